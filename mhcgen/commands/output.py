"""Printing for verbs. A reader who left (`| head`) ends the printing, not the verb: its exit code stays true."""

from __future__ import annotations

import contextlib
import os
import sys


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
