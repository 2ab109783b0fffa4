"""`emit` and `explain`: from options to text, and to the reasons behind it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mhcgen.commands.options import Asked, Force, takes_request
from mhcgen.commands.output import say
from mhcgen.errors import CheckFailed, RefusedError, UsageError

if TYPE_CHECKING:
    from mhcgen.abi import AbiRequest

GRAPHS = ("dot", "mermaid", "svg")


@takes_request
def emit(
    asked: Asked,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write a folder: the text, what it must equal, and its test."),
    ] = None,
    abi: Annotated[
        str | None, typer.Option("--abi", metavar="c", help="With --out: also a C header, a launcher and snippets.")
    ] = None,
    cubin: Annotated[
        str | None,
        typer.Option("--cubin", metavar="sm_XX,...", help="With --abi: also machine code, and a loader for it."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option("--name", metavar="NAME", help="With --abi: of files and functions. Default: the fusion's."),
    ] = None,
    force: Force = False,
    all_: Annotated[
        bool, typer.Option("--all", help="Write the set of emissions that is kept under generated/.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="With --all: only look; fail if a file differs, lacks or is an orphan.")
    ] = False,
    folder: Annotated[
        Path | None, typer.Option("--dir", metavar="DIR", help="With --all: where the set is. Default generated.")
    ] = None,
) -> None:
    """Print the CUDA text of an emission, or write it into a folder together with its test."""
    if all_:
        if out is not None or force or asked.given or abi or cubin or name:
            _conflict("--all", "the set is fixed, and takes no option but --check and --dir")
        _emit_all(folder or Path("generated"), check)
    elif check or folder is not None:
        _conflict("--check" if check else "--dir", "it belongs to --all")
    elif abi is None and (cubin is not None or name is not None):
        _conflict("--cubin" if cubin is not None else "--name", "it belongs to --abi")
    elif out is not None:
        _emit_folder(asked, out, force, _abi(abi, cubin, name))
    elif abi is not None:
        _conflict("--abi", "it belongs to --out")
    elif force:
        _conflict("--force", "it belongs to --out")
    else:
        say(asked.plan().source)


def _conflict(option: str, why: str) -> NoReturn:
    raise UsageError(
        "U-USAGE", f"{option} cannot be used so: {why}", where=option, hints=("`mhcgen emit --help` says more",)
    )


def _abi(abi: str | None, cubin: str | None, name: str | None) -> AbiRequest | None:
    from mhcgen.abi import ABIS, AbiRequest

    _member("--abi", abi, ABIS)
    if abi is None:
        return None
    if name == "":
        raise UsageError("U-NAME", "the name is empty", where="--name", hints=("give a name, or leave it out",))
    archs = () if cubin is None else tuple(part.strip() for part in cubin.split(","))
    return AbiRequest(name or "", archs)


def _emit_folder(asked: Asked, out: Path, force: bool, abi: AbiRequest | None) -> None:
    from mhcgen.files import write_folder
    from mhcgen.folder import folder_files, foreign, read_manifest, remove_stale

    files = folder_files(asked.config, asked.options, abi)
    before = read_manifest(out)
    write_folder(out, files, foreign=foreign(out) if out.is_dir() and not force else ())
    remove_stale(out, before, files)
    say(f"{out}: {', '.join(files)}")


def _emit_all(root: Path, check: bool) -> None:
    from mhcgen.generated_set import GENERATED, check_generated, write_generated

    if not check:
        left = write_generated(root)
        say(f"{root}: {len(GENERATED)} emissions")
        if left:
            raise CheckFailed(
                "C-ORPHAN", f"{len(left)} entries belong to no emission and were left alone", where=str(root),
                notes=tuple(left), hints=("remove them",),
            )
        return
    found = check_generated(root)
    if found:
        raise CheckFailed(
            "C-GENERATED", f"{len(found)} files are not what this version of mhcgen emits", where=str(root),
            notes=tuple(found), hints=("`mhcgen emit --all` writes the set anew; read its diff",),
        )
    say(f"{root}: {len(GENERATED)} emissions, all current")


@takes_request
def explain(
    asked: Asked,
    stop_after: Annotated[
        str | None, typer.Option("--stop-after", metavar="PASS", help="Decisions up to this pass: fuse, place, ...")
    ] = None,
    formula: Annotated[bool, typer.Option("--formula", help="Also print what each stage computes.")] = False,
    graph: Annotated[
        str | None,
        typer.Option("--graph", metavar="|".join(GRAPHS), help="Print only a drawing, with kernels as boxes."),
    ] = None,
) -> None:
    """Print the Program, what was decided and why, and what was refused and why."""
    from mhcgen.passes import PIPELINE
    from mhcgen.text import print_log, print_program

    _member("--stop-after", stop_after, tuple(name for name, _ in PIPELINE))
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
    from mhcgen.formulas import formulas

    return f"\n{formulas(asked.program)}"


def _draw(asked: Asked, kind: str, stop_after: str | None) -> None:
    from mhcgen.graph import draw
    from mhcgen.log import Refusal

    try:
        plan = asked.plan(stop_after)
    except RefusedError as refused:
        refusal = refused.refusal if isinstance(refused.refusal, Refusal) else None
        say(draw(asked.program, kind, refusal=refusal))
        raise
    say(draw(asked.program, kind, kernels=plan.kernels))
