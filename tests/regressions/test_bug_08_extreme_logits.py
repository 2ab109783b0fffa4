"""tile-ai/TileOPs #172: rows and columns divided by sums that are nearly nothing came out abnormal; eps was raised.

Here eps stays at 1e-6 and comb is that of float64, finite and with columns of 1, whatever the logits.
"""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, beyond_bounds

import mhcgen
from mhcgen import reference
from mhcgen.inputs import discriminating
from mhcgen.ir import Program

LIMITS = (89.0, 200.0, 1e4)
FORMS = ("shared", "row", "element", "registers")


def dominant(size: float) -> Any:
    """One entry a row far above the rest: two rows want one column, and a column is wanted by nobody."""
    made = np.full((4, 4), -size)
    made[[0, 1, 2, 3], [0, 0, 2, 3]] = size
    return made


def logits_of(size: float) -> dict[str, Any]:
    signs = np.where(np.random.default_rng(int(size)).random((4, 4)) < 0.5, -1.0, 1.0)
    starved = np.zeros((4, 4))
    starved[:, 3] = -size
    above = np.full((4, 4), size) + np.arange(16).reshape(4, 4) / 8
    return {"signs": signs * size, "dominant": dominant(size), "a starved column": starved, "all above": above}


def combs(program: Program, fuse: str, placement: str, logits: Any) -> tuple[Any, Any]:
    """comb and that of float64 for logits that are exactly the base."""
    given = factories.inputs(program, 1)
    given["scale"] = np.zeros(3, np.float32)
    given["base"] = np.concatenate([np.zeros(8), logits.reshape(-1)]).astype(np.float32)
    out = mhcgen.compile(program, fuse, placement=placement).load("host")(**given)
    return out["comb"], reference.run(program, given)["comb"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", FORMS)
@pytest.mark.parametrize("size", LIMITS)
def test_comb_is_that_of_float64(size: float, placement: str, dtype: str) -> None:
    program = mhcgen.build(hidden=16, dtype=dtype)
    for name, logits in logits_of(size).items():
        got, want = combs(program, "pre", placement, logits)
        assert np.isfinite(got).all() and (got >= 0).all(), name
        assert np.abs(got - want).max() < 1e-5, name
        assert got.sum(axis=1) == pytest.approx(want.sum(axis=1), abs=1e-5), name


def test_an_eps_of_this_size_is_what_keeps_columns_at_one() -> None:
    """The eps of TileOPs, 0.02, would be seen: columns end a few hundredths short of 1."""
    for name, logits in logits_of(200.0).items():
        usual, _ = combs(mhcgen.build(hidden=16), "pre", "auto", logits)
        if name != "dominant":  # which has a column that nobody wants
            assert usual.sum(axis=1) == pytest.approx(1.0, abs=1e-4), name
    raised, _ = combs(mhcgen.build(hidden=16, hc_eps=0.02), "pre", "auto", logits_of(89.0)["all above"])
    assert np.abs(raised.sum(axis=1) - 1.0).min() > 1e-2


@pytest.mark.parametrize("kind", ["D5", "D8", "deep", "extreme", "slow"])
@pytest.mark.parametrize("placement", FORMS)
def test_logits_that_come_from_the_mixes_stay_within_bounds(placement: str, kind: str) -> None:
    program = mhcgen.build(hidden=16, dtype="bf16")
    given = discriminating(program, 6, kind)
    assert given is not None
    plan = mhcgen.compile(program, "pre", placement=placement)
    ran = Ran(plan, dict(given), 6)
    assert beyond_bounds(plan, dict(given), ran) == []
    assert all(np.isfinite(array.astype(np.float32)).all() for array in ran.results.values())
