"""The build cache on disk: compiled host modules, runtime objects, cubins.

An entry is one file, `<root>/<key>/<sha256 of its bytes><suffix>`. The name of a file states what its bytes
must be, so one rename publishes bytes and checksum together: a reader never sees a half-written entry, a
truncated or corrupt one is a miss, and two processes that build the same key cannot mix their halves.

Callers make the key (`key_of`) from *everything* that can change the bytes: source, flags, compiler version.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import IO

from mhcgen.errors import EnvironmentFault, InternalError

if sys.platform != "win32":
    import fcntl

ENV_DIR = "MHCGEN_CACHE_DIR"

_KEY = re.compile(r"[0-9a-f]{64}")
_SUFFIX = re.compile(r"\.[a-z0-9_.]{1,16}")
_TEMPORARY = ".part-"
_PATIENCE = 120.0  # seconds to wait for another process that builds the same entry


@dataclass(frozen=True)
class CacheEntry:
    """One published file of the cache."""

    key: str
    suffix: str
    path: Path
    size: int


def key_of(*parts: str | bytes) -> str:
    """A cache key (64 hex digits) over all `parts`; their boundaries count, their order too."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()


def cache_root() -> Path:
    """The directory of the cache, created if need be.

    `MHCGEN_CACHE_DIR`, else `XDG_CACHE_HOME/mhcgen`, else `~/.cache/mhcgen`, else (no home, or one that cannot
    be written) a directory of this user under the system's temporary directory.

    Raises:
        EnvironmentFault: `E-CACHE` if `MHCGEN_CACHE_DIR` names a place that cannot be written; an explicit
            wish is never replaced silently by another directory.
    """
    explicit = os.environ.get(ENV_DIR)
    if explicit:
        root = Path(explicit).expanduser().absolute()
        if not _usable(root):
            raise EnvironmentFault(
                "E-CACHE",
                f"{ENV_DIR} names a directory that cannot be created or written",
                where=str(root),
                hints=(f"set {ENV_DIR} to a directory you may write", f"unset {ENV_DIR}"),
            )
        return root
    for root in _usual_roots():
        if _usable(root):
            return root
    return _temporary_root()


def load(key: str, suffix: str) -> Path | None:
    """The entry's file if it is there and its bytes match the checksum in its name, else None."""
    _check_names(key, suffix)
    for path in sorted(_files_of(cache_root() / key)):
        if not path.name.endswith(suffix) or len(path.name) != 64 + len(suffix):
            continue
        try:
            data = path.read_bytes()
        except OSError:
            continue
        if hashlib.sha256(data).hexdigest() == path.name[:64]:
            return path
    return None


def store(key: str, suffix: str, content: bytes | Path) -> Path:
    """Publish `content` (bytes, or a file that is copied) under `key`; returns the published file.

    Safe against any number of processes that store the same key at the same time.

    Raises:
        EnvironmentFault: `E-CACHE` if the file cannot be written (full or read-only disk).
    """
    _check_names(key, suffix)
    data = content.read_bytes() if isinstance(content, Path) else content
    target = cache_root() / key / (hashlib.sha256(data).hexdigest() + suffix)
    try:
        try:
            _publish(data, target)
        except FileNotFoundError:  # another process cleared the cache under our hands
            _publish(data, target)
    except OSError as fault:
        raise EnvironmentFault(
            "E-CACHE",
            f"a built file cannot be written to the cache: {fault.strerror or fault}",
            where=str(target),
            hints=(f"set {ENV_DIR} to a directory with room that you may write",),
        ) from fault
    return target


@contextlib.contextmanager
def building(key: str) -> Iterator[None]:
    """Held by one process at a time per key, so that others wait for its result instead of building it too.

    Only saves work: without locks (the file system has none, the holder hangs), all of them build, which is as
    correct.
    """
    folder = cache_root() / key
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            folder.mkdir(mode=0o700, exist_ok=True)
            _wait_for(stack.enter_context((folder / ".lock").open("w")))
        yield


def _wait_for(file: IO[str]) -> None:
    """Lock the file; its closing, also by a crash, lets go."""
    if sys.platform == "win32":
        return
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            time.sleep(0.02)


@contextlib.contextmanager
def workspace() -> Iterator[Path]:
    """A temporary directory inside the cache for building an entry; removed at the end."""
    with tempfile.TemporaryDirectory(prefix=_TEMPORARY, dir=cache_root()) as folder:
        yield Path(folder)


def _publish(data: bytes, target: Path) -> None:
    target.parent.mkdir(mode=0o700, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=_TEMPORARY, dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            out.write(data)
        Path(name).replace(target)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(name).unlink()
        raise


def entries() -> Iterator[CacheEntry]:
    """Every published entry, sorted by key; unfinished files are left out."""
    for folder in sorted(_files_of(cache_root())):
        if not _KEY.fullmatch(folder.name):
            continue
        for path in sorted(_files_of(folder)):
            if not _KEY.match(path.name):
                continue
            with contextlib.suppress(OSError):
                yield CacheEntry(folder.name, path.name[64:], path, path.stat().st_size)


def clear() -> int:
    """Remove all entries and what dead processes left unfinished; returns how many published entries went.

    Modules that are loaded in a running process stay usable: their files are unlinked, not truncated.
    Nothing else in the directory is touched.
    """
    count = sum(1 for _ in entries())
    for folder in _files_of(cache_root()):
        if _KEY.fullmatch(folder.name) or _abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)
    return count


def _abandoned(folder: Path) -> bool:
    """A build's workspace that nobody has touched for an hour."""
    if not folder.name.startswith(_TEMPORARY):
        return False
    try:
        return time.time() - folder.stat().st_mtime > 3600
    except OSError:
        return False


def _usual_roots() -> Iterator[Path]:
    xdg = os.environ.get("XDG_CACHE_HOME", "")
    if Path(xdg).is_absolute():  # the XDG specification says to ignore relative values
        yield Path(xdg) / "mhcgen"
    with contextlib.suppress(RuntimeError):  # no home directory
        yield Path.home() / ".cache" / "mhcgen"


def _usable(root: Path) -> bool:
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(root, os.W_OK | os.X_OK)


def _temporary_root() -> Path:
    """Shared by this user's processes if nobody else could have put files there, else private to this one."""
    user = os.getuid() if hasattr(os, "getuid") else 0
    shared = Path(tempfile.gettempdir()) / f"mhcgen-cache-{user}"
    if _usable(shared):
        state = shared.lstat()
        # Files of this directory are loaded as code: it must be ours, no link, and closed to others.
        if stat.S_ISDIR(state.st_mode) and state.st_uid == user and not state.st_mode & 0o022:
            return shared
    return _private_root()


@lru_cache(maxsize=1)
def _private_root() -> Path:
    return Path(tempfile.mkdtemp(prefix="mhcgen-cache-"))


def _files_of(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _check_names(key: str, suffix: str) -> None:
    if not _KEY.fullmatch(key) or not _SUFFIX.fullmatch(suffix):
        raise InternalError("I-CACHE-KEY", f"not a cache key and suffix: {key!r}, {suffix!r}")
