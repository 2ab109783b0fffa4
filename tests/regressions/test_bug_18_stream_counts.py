"""PrimeIntellect-ai/prime-rl #3558: only power-of-two stream counts worked."""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, beyond_bounds, differing

import mhcgen
from mhcgen.errors import UsageError


@pytest.mark.parametrize("streams", [1, 2, 3, 5, 6, 7, 12, 16])
def test_every_count_works(streams: int) -> None:
    made = mhcgen.build(streams=streams, hidden=10, iters=20)
    inputs = factories.inputs(made, 2)
    plan, fused = mhcgen.compile(made, "none"), mhcgen.compile(made, "pre")
    base = Ran(plan, inputs, 2)
    assert beyond_bounds(plan, inputs, base) == []
    assert differing(base.results, Ran(fused, inputs, 2).results) == []
    comb = base.results["comb"]
    assert comb.sum(axis=1) == pytest.approx(1.0, abs=1e-4)
    assert comb.sum(axis=2) == pytest.approx(1.0, abs=1e-2)


def test_one_stream_has_a_comb_of_one() -> None:
    made = mhcgen.build(streams=1, hidden=10)
    out = mhcgen.compile(made, "pre").load("host")(**factories.inputs(made, 3))
    assert out["comb"] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.parametrize("streams", [0, -1, 17, 10**9, 4.0, "four", "", True, np.float32(4), [4]])
def test_what_no_count_is_gets_one_line(streams: Any) -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.build(streams=streams)
    assert caught.value.code == "U-STREAMS"
    assert "from 1 to 16" in caught.value.message
    assert "\n" not in caught.value.message
