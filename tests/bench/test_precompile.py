"""Plans compiled side by side are found in the cache by whoever loads them."""

from __future__ import annotations

import pytest

from mhcgen import cache
from mhcgen.backends import nvrtc
from mhcgen.bench.precompile import precompile
from mhcgen.build import build
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options

pytestmark = pytest.mark.nvrtc


def test_compiled_plans_are_in_the_cache(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
    program = build(streams=2, hidden=64, iters=2)
    list(program.graph)  # a view that cannot go to another process
    fused = Options(fuse="pre")
    counts = precompile([(program, fused), (program, Options()), (program, fused)], "sm_90", workers=2)
    assert counts == {"": 2}
    entries = list(cache.entries())
    for options in (fused, Options()):
        nvrtc.compile(run_pipeline(program, options).source, "sm_90")
    assert list(cache.entries()) == entries


def test_what_cannot_be_compiled_is_counted_by_its_reason() -> None:
    program = build(streams=2, hidden=64)
    (reason,) = precompile([(program, Options(threads=33))], "sm_90")
    assert reason.startswith("L-THREADS: ")
    assert precompile([], "sm_90") == {}
