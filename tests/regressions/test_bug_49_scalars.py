"""cupy/cupy #8485: a Python float for a 4-byte parameter arrived as the first half of a double, about -3e-19."""

from __future__ import annotations

from decimal import Decimal
from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen.backends.signature import Param, cast_scalar
from mhcgen.errors import InputError, UsageError

KINDS: dict[str, Any] = {
    "float": 1e-6,
    "float32": np.float32(1e-6),
    "float64": np.float64(1e-6),
    "0-d array": np.array(1e-6),
    "0-d float32 array": np.array(1e-6, np.float32),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_eps_of_any_kind_is_the_same_eps(kind: str) -> None:
    value = KINDS[kind]
    made = mhcgen.build(hidden=8, rms_eps=value, hc_eps=value)
    assert made == mhcgen.build(hidden=8)
    assert mhcgen.compile(made, "pre").source == mhcgen.compile(mhcgen.build(hidden=8), "pre").source


@pytest.mark.parametrize("fuse", ["none", "pre"])
def test_streams_of_zero_keep_eps(fuse: str) -> None:
    """D12: lost or misread, eps gives NaN or infinity."""
    made = mhcgen.build(hidden=8)
    inputs = factories.inputs(made, 2)
    inputs["x"] = np.zeros_like(inputs["x"])
    inputs["mixes"] = np.full_like(inputs["mixes"], 1e-3)
    out = mhcgen.compile(made, fuse).load("host")(**inputs)
    assert all(np.isfinite(array).all() for array in out.values())
    # mixes / sqrt(1e-6) is 1, so that pre shows which eps was used.
    logits = inputs["scale"][0] * 1.0 + inputs["base"][:4].astype(np.float64)
    assert out["pre"][0] == pytest.approx(1 / (1 + np.exp(-logits)) + 1e-6, rel=1e-4)


@pytest.mark.parametrize("kind", [np.int64, np.int32, np.uint8, np.array])
def test_counts_of_any_kind_are_the_same_count(kind: Any) -> None:
    assert mhcgen.build(streams=kind(3), hidden=kind(8), iters=kind(5)) == mhcgen.build(streams=3, hidden=8, iters=5)


@pytest.mark.parametrize("value", ["1e-6", True, np.bool_(True), 1e-6 + 0j, [1e-6], None.__class__, Decimal("1e-6")])
def test_what_is_no_number_is_refused(value: Any) -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.build(rms_eps=value)
    assert caught.value.code == "U-EPS"


@pytest.mark.parametrize("value", [0.0, -1e-6, float("nan"), float("inf"), 2.0, 1e-50])
def test_an_eps_that_means_nothing_is_refused(value: float) -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.build(hc_eps=value)
    assert (caught.value.code, caught.value.where) == ("U-EPS", "--hc-eps")


TOKENS = Param("tokens", "long long", False)


@pytest.mark.parametrize("value", [7, np.int64(7), np.int32(7), np.uint64(7), np.array(7), 7.0, np.float64(7)])
def test_a_token_count_of_any_kind_has_eight_bytes(value: Any) -> None:
    assert cast_scalar(TOKENS, value).tobytes() == np.int64(7).tobytes()


@pytest.mark.parametrize("value", [1e-6, np.float32(1e-6), np.float64(1e-6), np.array(1e-6)])
def test_a_float_of_any_kind_has_four(value: Any) -> None:
    assert cast_scalar(Param("eps", "float", False), value).tobytes() == np.float32(1e-6).tobytes()


def test_more_than_two_to_the_31_survives() -> None:
    assert int(cast_scalar(TOKENS, 2**31 + 5)) == 2**31 + 5
    with pytest.raises(InputError):
        cast_scalar(Param("n", "int", False), 2**31)


def test_a_token_count_past_the_grid_is_refused() -> None:
    module = mhcgen.compile(mhcgen.build(streams=1, hidden=1), "pre").load("host")
    inputs = factories.inputs(module.program, 1)
    inputs["x"] = np.broadcast_to(inputs["x"], (2**31, 1, 1))
    inputs["mixes"] = np.broadcast_to(inputs["mixes"], (2**31, 3))
    with pytest.raises(InputError) as caught:
        module(**inputs)
    assert caught.value.code == "I-TOKENS"
