"""`report`: everything about one emission in one HTML file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mhcgen.commands.options import Asked, Force, Tokens, takes_request, token_counts
from mhcgen.commands.output import check_output, say
from mhcgen.errors import CheckFailed, RefusedError

if TYPE_CHECKING:
    from mhcgen.log import Refusal


@takes_request
def report(
    asked: Asked,
    out: Annotated[Path, typer.Option("--out", metavar="F.html", help="Where the page goes.")],
    check: Annotated[bool, typer.Option("--check", help="Run the differential gate on the CPU for it.")] = False,
    tokens: Tokens = "1,4,8",
    bench: Annotated[
        Path | None, typer.Option("--bench", metavar="F.json", help="Timings that `mhcgen bench --json` wrote.")
    ] = None,
    why_not: Annotated[
        str | None,
        typer.Option("--why-not", metavar="NAME|GROUPS", help="Also show what another --fuse is refused for."),
    ] = None,
    archs: Annotated[
        str | None,
        typer.Option("--archs", metavar="sm_XX,...|none", help="Of the resources. Default one a generation."),
    ] = None,
    force: Force = False,
) -> None:
    """Write one self-contained HTML page: graph, decisions, refusals, source, resources, gate and timings.

    A refused request gets a page too, and exit code 3.
    """
    from mhcgen.bench.report import read
    from mhcgen.files import write_file
    from mhcgen.report import Contents, page, require_highlighter, resources_of

    counts = token_counts(tokens)
    targets = _archs(archs)
    check_output("--out", out, force)
    require_highlighter()
    figures = None if bench is None else read(bench)
    try:
        plan = asked.plan()
    except RefusedError as refused:
        write_file(out, page(Contents(asked.program, None, _refusal(refused))))
        say(f"{out}: the refusal")
        raise
    refusals, answers = _asked_about(asked, why_not)
    contents = Contents(
        asked.program, plan, (*plan.refusals, *refusals), answers,
        None if targets == () else resources_of(asked.program, asked.options, targets), bench=figures,
    )
    if check:
        from mhcgen.gate import Request, run

        gate = run(Request(asked.config, asked.options, tokens=counts, backend="host"))
        contents = replace(contents, gate=gate)
    write_file(out, page(contents))
    say(str(out))
    if contents.gate is not None and not contents.gate.ok:
        raise CheckFailed("C-GATE", "a check of the gate failed", where=str(out), hints=("the page says which",))


def _archs(text: str | None) -> tuple[str, ...] | None:
    """Names of architectures, none of them for `none`, and None where nothing was said."""
    from mhcgen.backends.archs import parse_arch

    if text is None:
        return None
    return () if text == "none" else tuple(parse_arch(name.strip(), "--archs").name for name in text.split(","))


def _refusal(error: RefusedError) -> tuple[Refusal, ...]:
    from mhcgen.log import Refusal

    return (error.refusal,) if isinstance(error.refusal, Refusal) else ()


def _asked_about(asked: Asked, fuse: str | None) -> tuple[tuple[Refusal, ...], tuple[str, ...]]:
    """What another fusion of the same Program gets: its refusal, or a line that there is none."""
    from mhcgen.passes import run_pipeline

    if fuse is None:
        return (), ()
    try:
        run_pipeline(asked.program, replace(asked.options, fuse=fuse))
    except RefusedError as refused:
        return _refusal(refused), ()
    return (), (f"--fuse {fuse} is legal here.",)
