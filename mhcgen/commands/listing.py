"""`list`, `doctor`, `cache` and the hidden `docs`: what there is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mhcgen.commands.options import Asked, takes_request
from mhcgen.commands.output import say, table
from mhcgen.errors import CheckFailed, UsageError

LISTS = ("models", "fusions", "kernels", "archs", "red")


@takes_request
def list_(
    asked: Asked,
    what: Annotated[
        str | None, typer.Argument(metavar="[models|fusions|kernels|archs|red]", help="Default: all of them.")
    ] = None,
) -> None:
    """List models, fusions, the kernels (arms) that `check` can test, archs, or the red arms it can plant."""
    if what is not None and what not in LISTS:
        raise UsageError(
            "U-OPTION",
            f"there is no list of {what!r}",
            where="list",
            hints=(f"choose one of {', '.join(LISTS)}",),
        )
    makers = {"models": _models, "fusions": _fusions, "kernels": _kernels, "archs": _archs, "red": _red}
    if what is not None:
        say(table(makers[what](asked)))
        return
    for name in LISTS:
        say(f"{name}\n" + "".join(f"  {line}\n" for line in table(makers[name](asked)).splitlines()))


def _models(_: Asked) -> list[tuple[str, ...]]:
    from mhcgen.build import MAX_STREAMS
    from mhcgen.models import MODELS

    def legal(streams: tuple[int, ...]) -> str:
        run = streams == tuple(range(1, len(streams) + 1))
        return f"n 1 to {streams[-1]}" if run else f"n {', '.join(map(str, streams))}"

    return [
        (
            m.name, legal(m.legal_streams(MAX_STREAMS)), f"hidden {m.hidden}", f"comb {m.comb}", f"iters {m.iters}",
            f"rms_eps {m.rms_eps:.3g}", f"hc_eps {m.hc_eps:.3g}", f"exit {m.exit}", m.source,
        )
        for m in MODELS.values()
    ]


def _fusions(_: Asked) -> list[tuple[str, ...]]:
    from mhcgen.passes.fuse import PRESETS

    return [*PRESETS.items(), ("a+b,c+d", "any groups of stages, by the names that `mhcgen explain` prints")]


def _kernels(asked: Asked) -> list[tuple[str, ...]]:
    from mhcgen.gate import arms

    return [(arm.name, arm.what) for arm in arms(asked.program, asked.options)]


def _archs(_: Asked) -> list[tuple[str, ...]]:
    from mhcgen.backends.archs import KNOWN, known_names, parse_arch

    rows: list[tuple[str, ...]] = []
    for number in KNOWN:
        names = [name for name in known_names() if parse_arch(name).number == number]
        facts = parse_arch(names[0]).facts
        shared = f"{facts.shared_per_block // 1024} KiB shared a block"
        threads = f"{facts.threads_per_sm} threads an SM"
        rows.append((names[0], shared, threads, f"fp64 1/{facts.fp64_divisor}", " ".join(names[1:])))
    return rows


def _red(_: Asked) -> list[tuple[str, ...]]:
    from mhcgen.gate import RED

    return [(name, red.what) for name, red in RED.items()]


def doctor(
    need: Annotated[
        list[str] | None,
        typer.Option("--need", metavar="host|nvrtc|cuda|torch", help="What must work; may be given twice."),
    ] = None,
) -> None:
    """Say what is installed, what works, and what is missing with the command that adds it.

    Exit code 4 if something is there but broken, or if what --need names would not work.
    """
    from mhcgen.doctor import NEEDS, diagnose, unmet

    names = [name.strip() for part in need or () for name in part.split(",")]
    for name in names:
        if name not in NEEDS:
            raise UsageError(
                "U-OPTION", f"--need must be one of {', '.join(NEEDS)}, got {name!r}", where="--need",
                hints=(f"choose one of {', '.join(NEEDS)}",),
            )
    checks = diagnose()
    rows: list[tuple[str, ...]] = []
    for check in checks:
        rows.append((check.state, check.name, check.detail))
        if check.fix:
            rows.append(("", "", f"-> {check.fix}"))
    say(table(rows))
    stopped = False
    for name in names:
        left = unmet(name, checks)
        stopped = stopped or bool(left)
        say(f"{name}: {'works' if not left else 'does not work: ' + ', '.join(check.name for check in left)}")
    # Asked for one backend, a fault of another is shown and does not count.
    if stopped or (not names and any(check.state == "broken" for check in checks)):
        raise typer.Exit(4)


def cache(
    clear: Annotated[bool, typer.Option("--clear", help="Remove every entry.")] = False,
) -> None:
    """Show the compile cache: where it is, how many entries, how large; or empty it."""
    from mhcgen import cache as store

    root = store.cache_root()
    if clear:
        count = store.clear()
        say(f"{root}: {count} {_entries(count)} removed")
        return
    found = list(store.entries())
    size = sum(entry.size for entry in found)
    say(f"{root}: {len(found)} {_entries(len(found))}, {size / 2**20:.1f} MiB")


def _entries(count: int) -> str:
    return "entry" if count == 1 else "entries"


def docs(
    write: Annotated[bool, typer.Option("--write", help="Write it to docs/refusals.md.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail if docs/refusals.md is not current.")] = False,
    checkout: Annotated[Path, typer.Option("--checkout", metavar="DIR", help="The checkout.")] = Path(),
) -> None:
    """Print the catalogue of refusals, as docs/refusals.md has it."""
    from mhcgen.files import write_file
    from mhcgen.refusals_doc import examples_of, refusals_text

    text = refusals_text(examples_of(checkout))
    path = checkout / "docs" / "refusals.md"
    if write:
        write_file(path, text)
        say(str(path))
    elif check:
        if not path.is_file() or path.read_text(encoding="utf-8") != text:
            raise CheckFailed(
                "C-DOCS", "the catalogue has changed since this file was written", where=str(path),
                hints=("`mhcgen docs --write` writes it anew",),
            )
        say(f"{path}: current")
    else:
        say(text)
