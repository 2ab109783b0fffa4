"""The cache on disk: where it lies, what counts as an entry, what damage does."""

from __future__ import annotations

import os
import stat
import tempfile
import time
from pathlib import Path

import pytest

from mhcgen import cache
from mhcgen.errors import EnvironmentFault, InternalError

KEY = cache.key_of("one")


@pytest.fixture(autouse=True)
def root(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_was_stored_is_loaded(tmp_path: Path) -> None:
    assert cache.load(KEY, ".so") is None
    made = cache.store(KEY, ".so", b"bytes")
    assert cache.load(KEY, ".so") == made
    assert made.read_bytes() == b"bytes"
    source = tmp_path / "file"
    source.write_bytes(b"of a file")
    copied = cache.store(KEY, ".cubin", source)
    assert cache.load(KEY, ".cubin") == copied and copied.read_bytes() == b"of a file"
    assert cache.load(KEY, ".o") is None
    assert cache.load(cache.key_of("two"), ".so") is None


@pytest.mark.parametrize("damaged", [b"", b"byte", b"bytes.", b"bytez"])
def test_a_damaged_entry_is_a_miss_until_it_is_stored_again(damaged: bytes) -> None:
    made = cache.store(KEY, ".so", b"bytes")
    made.write_bytes(damaged)
    assert cache.load(KEY, ".so") is None
    assert cache.store(KEY, ".so", b"bytes") == made
    assert cache.load(KEY, ".so") == made


def test_two_results_for_one_key_are_both_whole() -> None:
    """Builds need not be reproducible: whichever is found is one of them."""
    first, second = cache.store(KEY, ".so", b"first"), cache.store(KEY, ".so", b"second")
    assert cache.load(KEY, ".so") in (first, second)
    assert {entry.path for entry in cache.entries()} == {first, second}


def test_key_parts_have_boundaries() -> None:
    assert cache.key_of("ab", "c") != cache.key_of("a", "bc") != cache.key_of("abc")
    assert cache.key_of("a", "b") != cache.key_of("b", "a")
    assert cache.key_of("a") == cache.key_of(b"a")


def test_wrong_names_are_our_bug() -> None:
    for key, suffix in (("../../etc", ".so"), (KEY, "so"), (KEY, "../x"), (KEY[:-1], ".so")):
        with pytest.raises(InternalError):
            cache.store(key, suffix, b"")


def test_entries_and_clear_touch_nothing_else(root: Path) -> None:
    cache.store(KEY, ".so", b"1")
    cache.store(cache.key_of("two"), ".o", b"22")
    mine = root / "notes.txt"
    mine.write_text("keep")
    old, new = root / ".part-old", root / ".part-new"
    for folder in (old, new):
        folder.mkdir()
    os.utime(old, (time.time() - 7200,) * 2)
    assert sorted((entry.suffix, entry.size) for entry in cache.entries()) == [(".o", 2), (".so", 1)]
    assert cache.clear() == 2
    assert list(cache.entries()) == []
    assert sorted(path.name for path in root.iterdir()) == [".part-new", "notes.txt"]


def test_a_workspace_leaves_nothing(root: Path) -> None:
    with pytest.raises(RuntimeError), cache.workspace() as work:
        (work / "half").write_text("built")
        assert work.parent == root
        raise RuntimeError
    assert list(root.iterdir()) == []


# ---- where it lies ------------------------------------------------------------------------------------------------


def test_order_of_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MHCGEN_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_root() == tmp_path / "xdg" / "mhcgen"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache.cache_root() == tmp_path / "home" / ".cache" / "mhcgen"
    assert stat.S_IMODE(cache.cache_root().stat().st_mode) == 0o700


def test_without_a_home_a_private_temporary_directory_serves(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("MHCGEN_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("HOME", str(blocked / "home"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    shared = cache.cache_root()
    assert shared.parent == tmp_path and shared == cache.cache_root()
    # A directory that others may write to could hold their code.
    shared.chmod(0o777)
    private = cache.cache_root()
    assert private != shared and private.parent == tmp_path
    assert stat.S_IMODE(private.stat().st_mode) == 0o700


def test_an_explicit_place_is_never_replaced(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(blocked))
    with pytest.raises(EnvironmentFault) as caught:
        cache.load(KEY, ".so")
    assert caught.value.code == "E-CACHE" and caught.value.where == str(blocked)
