"""The pipeline, in order, and its runner. No pass logic lives here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from mhcgen.errors import UsageError
from mhcgen.ir import Program
from mhcgen.passes.fuse import fuse
from mhcgen.passes.launch import launch
from mhcgen.passes.options import check_options
from mhcgen.passes.place import place
from mhcgen.passes.stamp import stamp
from mhcgen.passes.sync import sync
from mhcgen.plan import Options, Plan
from mhcgen.values import member
from mhcgen.verify import verify

Pass = Callable[[Plan], Plan]

PIPELINE: tuple[tuple[str, Pass], ...] = (
    ("fuse", fuse),
    ("place", place),
    ("sync", sync),
    ("stamp", stamp),
    ("launch", launch),
)


def run_pipeline(program: Program, options: Options, *, stop_after: str | None = None, command: str = "") -> Plan:
    """Run the passes; Program and Plan are verified between them.

    Raises:
        RefusedError: what was asked for by name is not legal.
        UsageError: `U-OPTION`, a value of the options, or a pass to stop after, that there is not.
        ProgramError: the Program, or a pass, breaks a rule.
    """
    from mhcgen.verify_plan import verify_plan

    if not isinstance(program, Program):
        raise UsageError(
            "U-PROGRAM",
            f"a Program is wanted, got {type(program).__name__}",
            where="program",
            hints=("mhcgen.build(model, ...) makes one",),
        )
    check_options(options)
    if stop_after is not None:
        member("stop_after", stop_after, tuple(name for name, _ in PIPELINE))
    verify(program)
    plan = Plan(program, options, command=command)
    for name, run in PIPELINE:
        plan = run(plan)
        plan = replace(plan, done=(*plan.done, name))
        verify(plan.program)
        verify_plan(plan)
        if name == stop_after:
            break
    return plan
