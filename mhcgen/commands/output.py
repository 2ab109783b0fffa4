"""Printing for verbs. A reader who left (`| head`) ends the printing, not the verb: its exit code stays true."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from mhcgen.errors import UsageError
from mhcgen.files import is_special


def say(text: str) -> None:
    """Print a text, with a newline at its end if it has none."""
    if sys.stdout is None:  # started with stdout closed
        return
    try:
        sys.stdout.write(text if text.endswith("\n") or not text else f"{text}\n")
        sys.stdout.flush()
    except BrokenPipeError:
        close_quietly()


def table(rows: list[tuple[str, ...]], gap: str = "  ") -> str:
    """Rows as aligned columns, the last one as long as it is."""
    if not rows:
        return ""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]) - 1)]
    lines = (gap.join((*(cell.ljust(w) for cell, w in zip(row, widths, strict=False)), row[-1])) for row in rows)
    return "".join(f"{line.rstrip()}\n" for line in lines)


def close_quietly() -> None:
    """Let what is still printed go nowhere, so that the interpreter does not complain on its way out."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)


def bad_output(where: str, message: str, hint: str) -> UsageError:
    """The error of an output that cannot be."""
    return UsageError("U-OUTPUT", message, where=where, hints=(hint,))


def check_place(where: str, path: Path) -> None:
    """Whether a file can be written there, whatever there is now.

    Raises:
        UsageError: `U-OUTPUT`.
    """
    if not Path(os.path.realpath(path)).parent.is_dir():  # of what a link leads to
        raise bad_output(where, "its folder does not exist", "make the folder first")
    if path.is_dir():
        raise bad_output(where, "there is a folder of that name", "name a file")
    if is_special(path):
        raise bad_output(where, "it is no regular file", "name a regular file")


def check_output(option: str, path: Path, force: bool) -> None:
    """Everything that would stop the writing of a file, before anything is computed.

    Raises:
        UsageError: `U-OUTPUT`.
    """
    where = f"{option} {path}"
    check_place(where, path)
    if path.exists() and not force:
        with path.open("rb") as file:
            if b"mhcgen" not in file.read(512):
                hint = "name another file, or give --force"
                raise bad_output(where, "mhcgen did not make the file that is there", hint)
