"""A progress bar on stderr while a long run measures; nothing where stderr is no terminal."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

T = TypeVar("T")


def shown(items: Iterable[T], label: str, *, count: int | None = None) -> Iterator[T]:
    """The items, one by one, with a bar beside them.

    Args:
        items: what is worked through.
        label: word in front of the bar.
        count: how many, where `items` cannot say.
    """
    if sys.stderr is None or not sys.stderr.isatty():
        yield from items
        return
    try:
        from rich.console import Console
        from rich.progress import track
    except ImportError:
        yield from items
        return
    total = len(items) if count is None and isinstance(items, Sized) else count
    yield from track(items, label, total=total, console=Console(stderr=True), transient=True)
