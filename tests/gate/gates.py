"""What the tests of the gate share: short requests on the executor."""

from __future__ import annotations

from typing import Any

from mhcgen import configure
from mhcgen.gate import Report, Request, run
from mhcgen.gate.arms import Arm
from mhcgen.plan import Options, Plan


def gate(
    config: dict[str, Any] | None = None, fuse: str = "pre", options: dict[str, Any] | None = None, **asked: Any
) -> Report:
    """A gate on the CPU executor at a small width; `asked` are fields of the Request."""
    made = configure(**{"streams": 4, "hidden": 64, **(config or {})})
    return run(Request(made, Options(fuse=fuse, **(options or {})), **{"backend": "host", "tokens": (1, 2), **asked}))


def failures(report: Report) -> list[str]:
    """`arm check: detail` of every failed check."""
    return [f"{row.arm} {v.check}: {v.detail}" for row in report.rows for v in row.verdicts if not v.ok]


def missed(report: Report) -> list[str]:
    """Planted faults that were not caught."""
    return [f"{red.fault} at {red.site}: {red.detail}" for red in report.reds if not red.caught]


def tampered(arm_name: str, old: str, new: str) -> Any:
    """A `tamper` that changes the text of one arm, and insists that there is something to change."""

    def change(arm: Arm, plan: Plan) -> str:
        if arm.name != arm_name:
            return plan.source
        assert old in plan.source, f"{arm.name} has no {old!r}"
        return plan.source.replace(old, new)

    return change
