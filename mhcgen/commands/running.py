"""`check` and `run`: emissions at work, on the gate's inputs and on the user's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhcgen.commands.checkpoint import checkpoint_of, with_projection
from mhcgen.commands.options import (
    Asked,
    Backend,
    Force,
    Seed,
    Tokens,
    backend_name,
    integer,
    takes_request,
    token_counts,
)
from mhcgen.commands.output import bad_output, check_place, say
from mhcgen.errors import InputError, UsageError

if TYPE_CHECKING:
    import numpy as np

    from mhcgen.ir import Program
    from mhcgen.weights import WeightFile


@takes_request
def check(
    asked: Asked,
    tokens: Tokens = "1,4,8",
    backend: Backend = "auto",
    race: Annotated[
        bool, typer.Option("--race", help="Run on the race checker of the CPU executor, at a small --hidden.")
    ] = False,
    arms: Annotated[
        str,
        typer.Option("--arms", metavar="all|LIST", help="Which schedules, of `mhcgen list kernels`. Default: yours."),
    ] = "",
    red: Annotated[
        list[str] | None,
        typer.Option("--red", metavar="NAME", help="Plant a fault of `mhcgen list red`: the check must fail."),
    ] = None,
    seed: Seed = "0",
) -> None:
    """The differential gate: unfused against float64, every schedule against unfused, bit for bit.

    Prints a table and one line MHCGEN_CHECK_JSON. Exit code 0, or 1 where a check failed.
    """
    from mhcgen.gate import Request, run

    # An empty name stays one: a script's unset variable is no reason to plant nothing and pass.
    names = tuple(name.strip() for part in red or () for name in part.split(","))
    report = run(
        Request(
            config=asked.config,
            options=asked.options,
            tokens=token_counts(tokens),
            backend=backend_name(backend),
            race=race,
            arms=arms,
            red=names,
            seed=integer("--seed", seed),
        )
    )
    say(report.table())
    say(report.json_line())
    if report.error is not None:
        raise report.error
    raise typer.Exit(report.exit_code)


@takes_request
def run(
    asked: Asked,
    inputs: Annotated[
        Path, typer.Option("--inputs", metavar="F.npz|safetensors", help="Inputs and parameters by name.")
    ],
    outputs: Annotated[Path, typer.Option("--outputs", metavar="F.npz", help="Where results go, by name.")],
    weights: Annotated[
        Path | None,
        typer.Option("--weights", metavar="FILE", help="Parameters from a checkpoint: .safetensors, index, .npz."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option("--layer", metavar="N", help="Of --weights: the layer to read.")
    ] = None,
    site: Annotated[
        str | None,
        typer.Option("--site", metavar="attn|ffn|head", help="Of --weights: the site; in a boundary, the next one."),
    ] = None,
    backend: Backend = "auto",
    force: Force = False,
) -> None:
    """Run an emission on your own arrays, with a checkpoint's parameters if you name one.

    Parameters that --weights gives are not in --inputs; mixes are projected from x unless --inputs has them.
    """
    backend_name(backend)
    checkpoint = checkpoint_of(asked, weights, layer, site)
    if checkpoint is not None:
        asked = with_projection(asked, open_inputs(inputs))
    plan = asked.plan()
    _no_opaque(asked.program)
    _check_output(outputs, inputs, force)
    parameters = {} if checkpoint is None else checkpoint.read(asked.program, open_inputs(inputs).names)
    arrays = {**read_inputs(asked.program, inputs, elsewhere=tuple(parameters)), **parameters}
    module = plan.load(backend)
    on_device = module.runner.name == "cuda"
    if on_device:
        from mhcgen.backends.cuda import to_device

        arrays = {name: to_device(array) for name, array in arrays.items()}
    made = module(**arrays)
    made |= {f"stamps.{kernel}": array for kernel, array in module.stamps.items()}
    for launch in module.launches:
        if launch.report is not None:
            launch.report.raise_if_found()
    if on_device:
        from mhcgen.backends.cuda import to_host

        made = {name: to_host(array) for name, array in made.items()}
    _write(outputs, made)
    say("".join(f"{name}: {array.dtype.name}{list(array.shape)}\n" for name, array in made.items()))
    if any(array.dtype.kind == "V" for array in made.values()):
        say("numpy loads bf16 from an archive as raw bytes: use array.view(ml_dtypes.bfloat16)")


def _no_opaque(program: Program) -> None:
    opaque = [stage.name for stage in program.stages if stage.kind in ("branch", "engram", "tap")]
    if opaque:
        raise UsageError(
            "U-BRANCH",
            f"the Program has the opaque stage {opaque[0]}, and no file says what it does",
            where="run",
            hints=("use --scope pre or boundary", "in Python, pass branches={...} to the loaded module"),
        )


def _check_output(outputs: Path, inputs: Path, force: bool) -> None:
    """Everything that would stop the writing, before anything is computed."""
    bad = partial(bad_output, str(outputs))
    if outputs.suffix != ".npz":
        raise bad("results are written as an .npz archive", "name a file that ends in .npz")
    check_place(str(outputs), outputs)
    if outputs.exists() and inputs.exists() and outputs.samefile(inputs):
        raise bad("it is the file of the inputs", "name another file")
    if outputs.exists() and not force:
        raise bad("the file exists", "name another file, or give --force")


def open_inputs(path: Path) -> WeightFile:
    """The user's file, unread.

    Raises:
        InputError: `I-FILE`, no such file, or not of a kind that is read.
    """
    import zipfile

    from mhcgen.weights import WeightFile

    if path.suffix == ".npz" and path.is_file() and not zipfile.is_zipfile(path):
        raise InputError(
            "I-FILE", "the file is not an .npz archive", where=str(path), hints=("write it with numpy.savez",)
        )
    return WeightFile(path)


def read_inputs(program: Program, path: Path, elsewhere: tuple[str, ...] = ()) -> dict[str, Any]:
    """The Program's inputs and parameters from a file, in the dtypes of the file.

    Args:
        program: whose.
        path: of the file.
        elsewhere: names that are given otherwise.

    Raises:
        InputError: `I-FILE`, no such file, or not of a kind that is read; `I-MISSING`, `I-UNKNOWN`.
    """
    import zlib

    file = open_inputs(path)
    wanted = {t.name: t for t in program.of_role("input", "parameter") if t.name not in elsewhere}
    for name in wanted:
        if name not in file:
            raise InputError(
                "I-MISSING", f"the file has no tensor {name}", where=str(path),
                notes=(f"it has: {', '.join(file.names) or 'nothing'}", f"wanted: {_wanted(program)}"),
                hints=("store the array under that name",),
            )
    for name in file.names:
        if name not in wanted:
            raise InputError(
                "I-UNKNOWN", f"the Program has no input {name!r}", where=str(path),
                notes=(f"wanted: {_wanted(program)}",), hints=("remove it or correct its name",),
            )
    try:
        return {name: _as_stored(file.read(name), tensor.dtype) for name, tensor in wanted.items()}
    except zlib.error as error:
        raise InputError(
            "I-FILE", f"the archive is damaged: {error}", where=str(path), hints=("write it again",)
        ) from error


def _wanted(program: Program) -> str:
    shapes = []
    for tensor in program.of_role("input", "parameter"):
        sizes = ", ".join(str(d) if d == "T" else str(program.dim(d)) for d in tensor.shape)
        shapes.append(f"{tensor.name} {tensor.dtype}[{sizes}]")
    return "; ".join(shapes)


def _as_stored(array: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    """numpy's archives carry bf16 as two raw bytes, which nothing else is stored as."""
    import ml_dtypes

    if dtype == "bf16" and array.dtype.kind == "V" and array.dtype.itemsize == 2 and array.dtype.names is None:
        return array.view(ml_dtypes.bfloat16)
    return array


def _write(outputs: Path, made: dict[str, Any]) -> None:
    import numpy as np

    from mhcgen.files import replacing

    with replacing(outputs) as aside, aside.open("wb") as file:
        np.savez(file, **made)
