"""The command line: parse, call, print; and one form for everything that can go wrong.

Exit codes: 0 done, 1 a check failed, 2 wrong usage or input, 3 refused, 4 environment, 70 a bug of ours, 130
interrupted. A closed pipe (`| head`) is no error.
"""

from __future__ import annotations

import contextlib
import io
import platform
import sys
import tempfile
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from mhcgen._version import __version__
from mhcgen.commands import bench, emitting, faults, listing, report, running
from mhcgen.commands.output import close_quietly, say
from mhcgen.errors import (
    EXIT_INTERNAL,
    EXIT_OK,
    EnvironmentFault,
    InputError,
    InternalError,
    MhcgenError,
    UsageError,
    render,
)

EXIT_INTERRUPTED = 130

#: What typer raises for a command line it cannot read. It comes from click, or from typer's own copy of it.
_ParseError: Any = next(base for base in typer.BadParameter.__mro__ if base.__name__ == "ClickException")

app = typer.Typer(
    name="mhcgen",
    add_completion=False,
    # Plain help: it starts in half the time, and reads well in 80 columns.
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 a check failed, 2 usage or input, 3 refused, 4 environment, 70 a bug of mhcgen.",
)


def _version(wanted: bool) -> None:
    if wanted:
        say(f"mhcgen {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_version, is_eager=True)
    ] = False,
) -> None:
    """A compiler for hyper-connections (mHC): readable, proven CUDA.

    Start with: mhcgen emit --streams 4 --fuse pre
    """


app.command("list")(listing.list_)
app.command("emit")(emitting.emit)
app.command("explain")(emitting.explain)
app.command("check")(running.check)
app.command("faults")(faults.faults)
app.command("run")(running.run)
app.command("bench")(bench.bench)
app.command("tune")(bench.tune)
app.command("report")(report.report)
app.command("doctor")(listing.doctor)
app.command("cache")(listing.cache)
app.command("docs", hidden=True)(listing.docs)


def run(arguments: Sequence[str]) -> int:
    """Run one command line (without the program's name) and return its exit code; errors go to stderr."""
    given = list(arguments) or ["--help"]
    try:
        code = _call(given)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        close_quietly()
        return EXIT_OK
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except MhcgenError as error:
        if error.exit_code == EXIT_INTERNAL:
            error.notes += (_keep_traceback(given),)
        return _fail(error)
    except OSError as error:
        unusable = _unusable(error, given)
        return _fail(_internal(error, given) if unusable is None else unusable)
    except Exception as error:  # noqa: BLE001  (whatever it is, it is a bug of ours and is reported as one)
        return _fail(_internal(error, given))


def _call(arguments: list[str]) -> int:
    command = typer.main.get_command(app)
    try:
        with command.make_context("mhcgen", list(arguments)) as context:
            command.invoke(context)
    except typer.Exit as end:
        return int(end.exit_code)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except _ParseError as error:
        raise _usage(error) from error
    except OSError as error:
        if isinstance(error, BrokenPipeError) or error.filename is not None:
            raise
        raise EnvironmentFault(
            "E-OUTPUT",
            f"cannot write the output: {error.strerror or error}",
            hints=("make room, or send the output elsewhere",),
        ) from error
    return EXIT_OK


def _unusable(error: OSError, arguments: list[str]) -> InputError | None:
    """The error of a path that the user named and the system does not take: too long, or in a closed folder."""
    if not isinstance(error.filename, str):
        return None
    values = [part.partition("=")[2] if part.startswith("-") else part for part in arguments]
    path, named = Path(error.filename).absolute(), [Path(value).absolute() for value in values if value]
    # What is asked of the system may be the folder of what was named, or a file in it.
    if not any(path.is_relative_to(other) or other.is_relative_to(path) for other in named):
        return None
    return InputError(
        "I-PATH",
        f"the path cannot be used: {error.strerror or error}",
        where=error.filename,
        hints=("name a path that you may use",),
    )


def _usage(error: Any) -> UsageError:
    """typer's complaint in our form: one error, without a usage text around it."""
    context = getattr(error, "ctx", None)
    verb = context.command_path if context is not None else "mhcgen"
    return UsageError(
        "U-USAGE",
        " ".join(str(error.format_message()).split()).rstrip("."),
        where=verb,
        hints=(f"`{verb} --help` shows the options",),
    )


def _internal(error: Exception, arguments: list[str]) -> InternalError:
    return InternalError(
        "INTERNAL",
        f"{type(error).__name__}: {' '.join(str(error).split()) or 'no message'}",
        notes=(_keep_traceback(arguments),),
        hints=("this is a bug of mhcgen: please report it with the command and that file",),
    )


def _keep_traceback(arguments: list[str]) -> str:
    """Write the exception being handled to a file; returns a note that says where."""
    from mhcgen.cache import cache_root

    lines = [
        f"mhcgen {__version__}, Python {platform.python_version()}, {platform.platform()}",
        f"arguments: {arguments!r}",
        "",
        traceback.format_exc(),
    ]
    folder: Path | None = None
    with contextlib.suppress(MhcgenError, OSError):
        folder = cache_root()
    try:
        with tempfile.NamedTemporaryFile(
            "w", prefix="mhcgen-traceback-", suffix=".txt", dir=folder, delete=False, encoding="utf-8"
        ) as file:
            file.write("\n".join(lines))
    except OSError as error:
        return f"the traceback could not be kept: {error.strerror or error}"
    return f"the traceback is in {file.name}"


def _fail(error: MhcgenError) -> int:
    with contextlib.suppress(OSError, ValueError):
        print(render(error), file=sys.stderr)
    return error.exit_code


def main() -> NoReturn:
    """Entry point of the `mhcgen` command."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A name that the terminal's encoding lacks is no reason to fail.
        sys.stdout.reconfigure(errors="backslashreplace")
    sys.exit(run(sys.argv[1:]))
