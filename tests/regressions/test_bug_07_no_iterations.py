"""ROCm/aiter #3044: zero Sinkhorn repeats switched one entry to a head-only mode, which no default test ran.

Here the head is a scope of its own, and a count of iterations that has no meaning is refused everywhere.
"""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, beyond_bounds

import mhcgen
from mhcgen import reference
from mhcgen.errors import ProgramError, UsageError


@pytest.mark.parametrize("iters", [0, -1, 1.0, True, "20"])
@pytest.mark.parametrize("model", ["deepseek-v4", "glm-5.3-flash", "mhc-paper"])
def test_a_count_that_means_nothing_is_refused(model: str, iters: Any) -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.build(model, iters=iters)
    assert (caught.value.code, caught.value.where) == ("U-ITERS", "--iters")


@pytest.mark.parametrize("iters", [0, -1])
def test_so_is_it_in_a_program_made_by_hand(iters: int) -> None:
    with pytest.raises(ProgramError, match="iters"):
        mhcgen.compile(factories.program(factories.stage("sinkhorn", iters=iters)))
    with pytest.raises(ValueError, match="iters"):
        reference.run(factories.program(factories.stage("sinkhorn", iters=iters)), {"logits": np.zeros((1, 4))})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("fuse", ["none", "project+rowsq+gates+collapse"])
def test_the_head_yields_the_collapsed_stream_and_nothing_unwritten(fuse: str, dtype: str) -> None:
    program = mhcgen.build(scope="head", hidden=40, dtype=dtype, projection="fma")
    assert program.shape("fn", 1) == (4, 160)  # n rows, no post, no comb
    assert [t.name for t in program.of_role("result")] == ["pre", "y"]
    plan = mhcgen.compile(program, fuse)
    inputs = factories.inputs(program, 3)
    ran = Ran(plan, inputs, 3)  # on poisoned results, all of which must be written
    assert beyond_bounds(plan, inputs, ran) == []


def test_one_iteration_is_one_column_pass() -> None:
    program = mhcgen.build(hidden=8, iters=1)
    inputs = factories.inputs(program, 2)
    comb = Ran(mhcgen.compile(program, "pre"), inputs, 2).results["comb"]
    assert comb.sum(axis=1) == pytest.approx(1.0, abs=1e-5)
    assert np.abs(comb.sum(axis=2) - 1.0).max() > 1e-3
