"""`faults`: the score of the planted faults over models."""

from __future__ import annotations

from typing import Annotated

import typer

from mhcgen.commands.options import Backend, backend_name
from mhcgen.commands.output import say
from mhcgen.errors import EXIT_INTERNAL, EXIT_OK, UsageError


def faults(
    models: Annotated[
        list[str] | None, typer.Option("--model", metavar="NAME", help="May be given twice. Default: every model.")
    ] = None,
    red: Annotated[
        list[str] | None, typer.Option("--red", metavar="NAME", help="Of `mhcgen list red`. Default: every one.")
    ] = None,
    backend: Backend = "host",
) -> None:
    """Plant every fault that applies into every model's emissions, and print how many were caught.

    A fault counts as caught if the check that must catch it did; a crash or another check does not count. Exit code
    0, or 70 where one was missed.
    """
    from mhcgen.gate.red import RED
    from mhcgen.gate.score import score
    from mhcgen.models import model

    names = tuple(name.strip() for part in models or () for name in part.split(",") if name.strip())
    wanted = tuple(name.strip() for part in red or () for name in part.split(",") if name.strip())
    for name in names:
        model(name)
    for name in wanted:
        if name not in RED:
            raise UsageError(
                "U-RED", f"unknown red {name!r}", where="--red", notes=(f"known: {', '.join(RED)}",),
                hints=("`mhcgen list red` shows them",),
            )
    made = score(names, wanted, backend=backend_name(backend))
    say(made.table())
    raise typer.Exit(EXIT_INTERNAL if made.missed else EXIT_OK)
