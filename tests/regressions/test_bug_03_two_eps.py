"""osaurus-ai/vmlx-swift #381: one eps served the RMS and the gates; both were 1e-6, so no test saw it."""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest
from factories import chain, program

import mhcgen
from mhcgen.ir import Program

PAIRS = [(1e-6, 1e-6), (1e-6, 1e-2), (1e-2, 1e-6), (1e-3, 1e-2)]


def made(rms_eps: float, hc_eps: float) -> Program:
    """A chain whose rescaled mixes are a result too."""
    stages = chain(rowsq={"eps": rms_eps}, gates={"pre_eps": hc_eps}, sinkhorn={"eps": hc_eps, "iters": 1})
    return program(*stages, n=4, hidden=16, results=("mixes_scaled", "pre"))


def run(program_: Program, x: float, mix: float, fuse: str = "pre") -> dict[str, Any]:
    inputs = factories.inputs(program_, 1)
    inputs |= {"x": np.full((1, 4, 16), x, np.float32), "mixes": np.full((1, 24), mix, np.float32)}
    inputs |= {"scale": np.ones(3, np.float32), "base": np.zeros(24, np.float32)}
    return mhcgen.compile(program_, fuse).load("host")(**inputs)


@pytest.mark.parametrize("fuse", ["none", "pre"])
@pytest.mark.parametrize(("rms_eps", "hc_eps"), PAIRS)
def test_the_rms_eps_is_in_the_norm_only(rms_eps: float, hc_eps: float, fuse: str) -> None:
    scaled = run(made(rms_eps, hc_eps), 0.05, 1.0, fuse)["mixes_scaled"]
    assert scaled == pytest.approx(1 / np.sqrt(0.05**2 + rms_eps), rel=1e-6)


def test_the_two_mixed_up_would_show() -> None:
    assert run(made(1e-6, 1e-2), 0.05, 1.0)["mixes_scaled"] == pytest.approx(20.0, rel=1e-3)
    assert run(made(1e-2, 1e-6), 0.05, 1.0)["mixes_scaled"] == pytest.approx(8.9, rel=1e-2)


def test_eps_is_inside_the_root() -> None:
    assert run(made(1e-6, 1e-2), 1e-3, 1.0)["mixes_scaled"] == pytest.approx(707.1, rel=1e-4)


@pytest.mark.parametrize(("rms_eps", "hc_eps"), PAIRS)
def test_the_other_eps_is_in_pre_and_comb_only(rms_eps: float, hc_eps: float) -> None:
    out = run(made(rms_eps, hc_eps), 1.0, -1e4)
    assert np.array_equal(out["pre"], np.full((1, 4), hc_eps, np.float32))
    assert not out["post"].any()
    eps = np.float64(np.float32(hc_eps))
    expected = (0.25 + eps) / (4 * (0.25 + eps) + eps)
    assert out["comb"] == pytest.approx(expected, rel=1e-6)


def test_the_command_line_has_an_option_for_each() -> None:
    plan = mhcgen.compile(mhcgen.build(rms_eps=1e-3, hc_eps=1e-2), "pre")
    assert "--rms-eps 0.001 --hc-eps 0.01" in plan.source
