"""NVIDIA/Megatron-LM #4469: the kernel of large widths was less precise than that of small ones.
flashinfer-ai/flashinfer #1178: threads without columns, or with -inf alone, spoiled their block.
vllm-project/vllm #52737 and #43950: a fast path for whole chunks and four streams was taken by others.

Widths on both sides of each change of schedule: pieces of 8, 4, 2 and 1 columns, fewer columns than lanes, more
than one warp, more than a thread's run, streams in registers or read again, one block or a cluster.
"""

from __future__ import annotations

import shutil
from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, beyond_bounds

import mhcgen
from mhcgen import reference
from mhcgen.inputs import discriminating

NARROW = (1, 2, 7, 8, 9, 31, 33, 64, 65, 127, 129)
WIDE = (255, 257, 264, 1016, 1020, 1024, 1032, 2048, 2064, 4096, 4160, 4360, 8192, 8208)
#: Largest distance from float64 at any width, in units of the last place of the result's scale. Measured: below 2.5.
STEP = 4.0


def error(hidden: int, **schedule: Any) -> float:
    """Largest error of pre and y, as a share of float32's precision."""
    program = mhcgen.build(hidden=hidden, projection="fma", iters=2)
    plan = mhcgen.compile(program, "pre", **schedule)
    given = factories.inputs(program, 2)
    ran = Ran(plan, given, 2)
    assert beyond_bounds(plan, given, ran) == []
    want = reference.run(program, given)
    return max(float(np.abs(ran.results[name] - want[name]).max()) for name in ("pre", "y")) * 2.0**23


@pytest.mark.parametrize("hidden", (*NARROW, *WIDE))
def test_every_width_is_as_precise(hidden: int) -> None:
    assert error(hidden) < STEP


@pytest.mark.parametrize("slab", ["auto", "global"])
@pytest.mark.parametrize("hidden", [2048, 2064, 8192, 8208])
def test_so_is_every_width_in_one_block(hidden: int, slab: str) -> None:
    assert error(hidden, cluster=1, slab=slab) < STEP


def test_the_widths_take_every_form() -> None:
    plans = {h: mhcgen.compile(mhcgen.build(hidden=h, projection="fma"), "pre") for h in (*NARROW, *WIDE)}
    columns = [kernel.columns for plan in plans.values() for kernel in plan.kernels if kernel.columns]
    assert {1, 2, 4, 8} == {c.chunk for c in columns}
    assert len({c.run for c in columns}) > 3 and len({c.blocks for c in columns}) > 4



@pytest.mark.parametrize("rest", [1, 8, 64, 100, 255])
def test_every_remainder_of_256_works_with_any_stream_count(rest: int) -> None:
    for streams in (2, 3):
        program = mhcgen.build(streams=streams, hidden=256 + rest, dtype="bf16", norm=True, quant="q8", iters=2)
        plan = mhcgen.compile(program, "pre-norm-quant")
        given = factories.inputs(program, 2)
        assert beyond_bounds(plan, given, Ran(plan, given, 2)) == []


def test_two_streams_at_the_width_of_four() -> None:
    program = mhcgen.build(streams=2, hidden=4096)
    plan = mhcgen.compile(program, "pre")
    given = factories.inputs(program, 1)
    assert beyond_bounds(plan, given, Ran(plan, given, 1)) == []


# ---- -inf and NaN in narrow rows ------------------------------------------------------------------------------
@pytest.mark.parametrize("placement", ["shared", "row", "element", "registers"])
@pytest.mark.parametrize("hidden", [1, 7, 64])
def test_one_minus_infinity_is_eps_and_a_row_of_them_is_nan_in_its_own_token(hidden: int, placement: str) -> None:
    program = mhcgen.build(hidden=hidden, iters=1, hc_eps=1e-3)
    given = discriminating(program, 3, "-inf base")
    assert given is not None
    plan = mhcgen.compile(program, "pre", placement=placement)
    ran = Ran(plan, dict(given), 3)
    assert beyond_bounds(plan, dict(given), ran) == []
    comb = ran.results["comb"]
    assert np.isfinite(comb[:2]).all() and np.isnan(comb[2]).any()
    column = comb[0, :, 1]  # where base has its -inf: (0 + eps) over the sum of the column
    others = reference.run(program, dict(given))["comb"][0, :, 1]
    assert column == pytest.approx(others, rel=1e-5) and 0 < column[0] < 0.1


@pytest.mark.parametrize("hidden", [1, 2, 7, 8, 64])
def test_a_nan_stays_in_its_token(hidden: int) -> None:
    program = mhcgen.build(hidden=hidden, norm=True)
    given = discriminating(program, 3, "D15")
    assert given is not None
    out = mhcgen.compile(program, "pre-norm").load("host")(**given)
    for name, array in out.items():
        assert np.isnan(array[1]).any(), name
        assert np.isfinite(array[[0, 2]]).all(), name


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
def test_a_compiler_told_to_assume_no_nan_changes_nothing() -> None:
    program = mhcgen.build(hidden=7)
    plan = mhcgen.compile(program, "pre")
    for kind in ("D15", "-inf base"):
        given = dict(discriminating(program, 3, kind) or {})
        usual, told = (plan.load("host", compiler=cxx)(**given) for cxx in ("g++", "g++ -ffast-math -Ofast"))
        for name, array in usual.items():
            np.testing.assert_array_equal(array, told[name], err_msg=name)
    # Its modules carry start-up code that turns subnormals off, for everything else in the process too.
    assert (np.full(2, 1e-40, np.float32) * np.float32(0.5)).all()
