"""Writing files so that nobody ever sees half of one: aside first, then renamed into place."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from mhcgen.errors import EnvironmentFault, InputError

_PART = ".mhcgen-part"

#: What test runners leave in a folder; it belongs to nobody.
LITTER = ("__pycache__", ".pytest_cache")


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A path to write to, which takes the place of `path` at the end, and is removed if that is not reached.

    A link stays, and what it leads to is replaced.

    Raises:
        EnvironmentFault: `E-WRITE`; also where `path` is a device or a pipe, which a rename would remove.
    """
    target = Path(os.path.realpath(path))
    if is_special(target):
        raise EnvironmentFault(
            "E-WRITE", "is no regular file, so nothing can take its place", where=str(path),
            hints=("name a regular file",),
        )
    aside = _aside(target)
    try:
        yield aside
        aside.replace(target)
    except OSError as error:
        raise _fault(path, error) from error
    finally:
        with contextlib.suppress(OSError):
            aside.unlink()


def is_special(path: Path) -> bool:
    """Whether there is something that is neither a file nor a folder: a device, a pipe, a loop of links."""
    if Path(os.path.realpath(path)).is_symlink():
        return True
    return path.exists() and not path.is_file() and not path.is_dir()


def write_file(path: Path, text: str) -> None:
    """Write one text; whatever was there stays whole until the new one is.

    Raises:
        EnvironmentFault: `E-WRITE`.
    """
    with replacing(path) as aside:
        _write(aside, text)


def write_folder(folder: Path, texts: Mapping[str, str | bytes], *, foreign: Sequence[str] = ()) -> None:
    """Write the files of a folder: a new folder in one rename, an existing one file by file, the last file last.

    Files of other names are left alone.

    Args:
        folder: where; missing parents are made.
        texts: file name to text or bytes. The last one vouches for the others.
        foreign: names of what others put there; with any of them nothing is written.

    Raises:
        InputError: `I-EXISTS`, something is foreign, or there is a file of that name.
        EnvironmentFault: `E-WRITE`.
    """
    folder = folder.absolute()
    if os.path.lexists(folder) and not folder.is_dir():
        raise InputError(
            "I-EXISTS", "there is a file of that name, and a folder is to be written", where=str(folder),
            hints=("name a folder, or remove the file",),
        )
    if foreign:
        raise InputError(
            "I-EXISTS", "the folder holds what mhcgen did not make", where=str(folder),
            notes=(f"{', '.join(foreign[:3])}{', ...' if len(foreign) > 3 else ''}",),
            hints=("name another folder, or give --force to write into this one; other files stay",),
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_dir():
            _refresh(folder, texts)
        else:
            _create(folder, texts)
    except OSError as error:
        raise _fault(folder, error) from error


def _create(folder: Path, texts: Mapping[str, str | bytes]) -> None:
    aside = _aside(folder)
    try:
        aside.mkdir()
        for name, text in texts.items():
            _write(aside / name, text)
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _refresh(folder: Path, texts: Mapping[str, str | bytes]) -> None:
    asides = {name: _aside(folder / name) for name in texts}
    try:
        for name, text in texts.items():
            _write(asides[name], text)
        for name, aside in asides.items():
            aside.replace(folder / name)
    finally:
        for aside in asides.values():
            with contextlib.suppress(OSError):
                aside.unlink()


def _aside(path: Path) -> Path:
    # Of a length of its own: a name may be as long as the system takes.
    digest = hashlib.sha256(path.name.encode("utf-8", "surrogateescape")).hexdigest()[:12]
    return path.with_name(f"{_PART}-{digest}-{os.getpid()}-{threading.get_ident()}")


def _write(path: Path, content: str | bytes) -> None:
    path.write_bytes(content.encode() if isinstance(content, str) else content)


def _fault(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        "E-WRITE", f"cannot be written: {error.strerror or error}", where=str(path),
        hints=("name a place that you may write and that has room",),
    )
