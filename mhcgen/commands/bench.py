"""`bench` and `tune`: times on a GPU, and the schedule that is fastest there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mhcgen.commands.options import Asked, Force, Tokens, integer, takes_request, token_counts
from mhcgen.commands.output import check_output, say


@takes_request
def bench(
    asked: Asked,
    tokens: Tokens = "1,8,64",
    arms: Annotated[
        str,
        typer.Option("--arms", metavar="all|LIST", help="Of `mhcgen list kernels`. Default: yours and the unfused."),
    ] = "",
    rounds: Annotated[str, typer.Option("--rounds", metavar="N", help="How often each is timed, in turns.")] = "5",
    peers: Annotated[
        str,
        typer.Option(
            "--peers", metavar="all|LIST",
            help="Rivals beside them, where installed: torch, torch-compile, liger, flashinfer, tilekernels, "
            "transformer-engine.",
        ),
    ] = "",
    phases: Annotated[bool, typer.Option("--phases", help="Where the time of one launch goes.")] = False,
    bandwidth: Annotated[
        str | None, typer.Option("--bandwidth", metavar="MiB", help="How fast the collapse kernel streams so much.")
    ] = None,
    seed_tables: Annotated[
        bool, typer.Option("--seed-tables", help="The tables of the seed gate, at T = 1, 4, 8 in its class.")
    ] = False,
    cold: Annotated[bool, typer.Option("--cold", help="Nothing in the L2 when a launch starts.")] = False,
    json: Annotated[Path | None, typer.Option("--json", metavar="F", help="Write every figure to a file.")] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="F.png", help="Draw time against T, and a roofline.")
    ] = None,
    force: Force = False,
) -> None:
    """Time emissions on the GPU: medians of graph replays, with the floor and rivals beside them.

    Every emission is first checked bit for bit against the unfused one; what differs is not timed.
    """
    from mhcgen.bench.run import BenchRequest, bench

    for option, path in (("--json", json), ("--plot", plot)):
        if path is not None:
            check_output(option, path, force)
    if plot is not None:
        from mhcgen.bench.plot import require_plot

        require_plot()  # before anything is measured
    request = BenchRequest(
        config=asked.config,
        options=asked.options,
        tokens=token_counts(tokens),
        arms=arms,
        peers=peers,
        phases=phases,
        bandwidth=None if bandwidth is None else integer("--bandwidth", bandwidth),
        seed_tables=seed_tables,
        rounds=integer("--rounds", rounds),
        cold=cold,
    )
    report = bench(request, progress=True)
    if json is not None:
        from mhcgen.files import write_file

        write_file(json, report.json())
    say(report.table())
    if plot is not None:
        from mhcgen.bench.plot import plot as draw

        draw(report.as_dict(), plot)


@takes_request
def tune(
    asked: Asked,
    tokens: Tokens = "1,8,64",
    keep: Annotated[bool, typer.Option("--keep/--no-keep", help="Keep what was found for --tuned.")] = True,
) -> None:
    """Search the legal schedules for the fastest on this GPU; `--tuned` uses it from then on.

    Up to 256 tokens and beyond are two classes, searched one after the other. Options of the schedule that you give
    stay as they are. Every candidate must give the bits of the unfused emission before it is timed.
    """
    from mhcgen.bench.run import BenchRequest, checked, gpu
    from mhcgen.classes import regime_of
    from mhcgen.tune import tune

    counts = token_counts(tokens)
    program, _ = checked(BenchRequest(asked.config, asked.options, counts))
    device = gpu()
    for regime in dict.fromkeys(regime_of(count) for count in counts):
        mine = [count for count in counts if regime_of(count) == regime]
        say(tune(program, asked.options, mine, device, keep=keep, progress=True).table())
