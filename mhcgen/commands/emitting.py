"""`emit` and `explain`: from options to text, and to the reasons behind it."""

from __future__ import annotations

from typing import Annotated

import typer

from mhcgen.commands.options import Asked, takes_request
from mhcgen.commands.output import say
from mhcgen.errors import RefusedError, UsageError

PASSES = ("fuse", "place", "sync", "launch")
GRAPHS = ("dot", "mermaid", "svg")


@takes_request
def emit(asked: Asked) -> None:
    """Print the CUDA text of an emission, or write it into a folder together with its test."""
    say(asked.plan().source)


@takes_request
def explain(
    asked: Asked,
    stop_after: Annotated[
        str | None, typer.Option("--stop-after", metavar="|".join(PASSES), help="Show the Plan after this pass.")
    ] = None,
    formula: Annotated[bool, typer.Option("--formula", help="Also print what each stage computes.")] = False,
    graph: Annotated[
        str | None,
        typer.Option("--graph", metavar="|".join(GRAPHS), help="Print only a drawing, with kernels as boxes."),
    ] = None,
) -> None:
    """Print the Program, what was decided and why, and what was refused and why."""
    from mhcgen.text import print_log, print_program

    _member("--stop-after", stop_after, PASSES)
    _member("--graph", graph, GRAPHS)
    if graph is not None:
        _draw(asked, graph, stop_after)
        return
    say(print_program(asked.program))
    if formula:
        say(_formulas(asked))
    try:
        plan = asked.plan(stop_after)
    except RefusedError as refused:
        say(f"\n{refused.refusal}")
        raise
    say("\n" + print_log(plan.log))
    if not plan.refusals:
        say("refused: nothing")


def _member(option: str, value: str | None, allowed: tuple[str, ...]) -> None:
    if value is not None and value not in allowed:
        raise UsageError(
            "U-OPTION",
            f"{option} must be one of {', '.join(allowed)}, got {value!r}",
            where=option,
            hints=(f"choose one of {', '.join(allowed)}",),
        )


def _formulas(asked: Asked) -> str:
    from mhcgen.stages import KINDS

    lines = [f"  {stage.name}: {KINDS[stage.kind].meaning}" for stage in asked.program.stages]
    return "\n".join(["", "formulas", *lines])


def _draw(asked: Asked, kind: str, stop_after: str | None) -> None:
    from mhcgen.graph import draw

    try:
        plan = asked.plan(stop_after)
    except RefusedError as refused:
        say(draw(asked.program, kind, refusal=refused.refusal))
        raise
    say(draw(asked.program, kind, kernels=plan.kernels))
