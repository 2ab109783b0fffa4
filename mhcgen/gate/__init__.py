"""The differential gate: unfused against the reference, every arm against unfused, and faults that must fail.

    from mhcgen.gate import Request, run
    report = run(Request(mhcgen.configure(streams=4, hidden=64), Options(fuse="pre"), arms="all"))
    print(report.table()); print(report.json_line()); sys.exit(report.exit_code)
"""

from mhcgen.gate.arms import Arm, RefusedArm, arms, candidates
from mhcgen.gate.checks import CHECKS, Verdict
from mhcgen.gate.red import RED
from mhcgen.gate.report import RedRow, Report, Row
from mhcgen.gate.request import Request
from mhcgen.gate.run import run

__all__ = [
    "CHECKS",
    "RED",
    "Arm",
    "RedRow",
    "RefusedArm",
    "Report",
    "Request",
    "Row",
    "Verdict",
    "arms",
    "candidates",
    "run",
]
