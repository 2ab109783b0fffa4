"""NVIDIA/warp #1738: emitted source followed the order of a set, so it changed by process and caches missed."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import mhcgen

PACKAGE = str(Path(mhcgen.__file__).parents[1])


def emit(seed: int, cwd: Path, *options: str) -> str:
    """sha256 of what the command line prints."""
    environment = {**os.environ, "PYTHONHASHSEED": str(seed), "PYTHONPATH": PACKAGE}
    command = [sys.executable, "-m", "mhcgen", "emit", "--streams", "4", "--fuse", "pre", *options]
    return hashlib.sha256(
        subprocess.run(command, env=environment, cwd=cwd, check=True, capture_output=True).stdout
    ).hexdigest()


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(21), marks=pytest.mark.slow)], ids=["few", "all"])
def test_one_digest_for_all_hash_seeds_and_directories(seeds: range, tmp_path: Path) -> None:
    folders = [tmp_path, Path("/"), Path(PACKAGE)]
    with ThreadPoolExecutor(2) as pool:
        digests = set(pool.map(lambda seed: emit(seed, folders[seed % 3]), seeds))
    assert len(digests) == 1


def test_b_after_a_is_b_alone() -> None:
    a, b = mhcgen.build(hidden=64, norm=True), mhcgen.build(streams=8, hidden=72)
    mhcgen.compile(a, "pre-norm").source  # noqa: B018
    after = mhcgen.compile(b, "pre").source
    code = "import mhcgen, sys; sys.stdout.write(mhcgen.compile(mhcgen.build(streams=8, hidden=72), 'pre').source)"
    environment = {**os.environ, "PYTHONPATH": PACKAGE}
    alone = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert alone.stdout == after
