"""sgl-project/sglang #38952: idle ranks pass zero tokens; the grid became 0, the launch failed, the worker died."""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen.runtime import NUMPY_DTYPES

CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unfused": ({}, "none"),
    "pre": ({}, "pre"),
    "pre bf16": ({"dtype": "bf16"}, "pre"),
    "quantised": ({"norm": True, "quant": "fp8"}, "pre-norm-quant"),
    "counted": ({"iterations_out": True}, "pre"),
    "boundary": ({"scope": "boundary"}, "boundary"),
    "site": ({"scope": "site"}, "pre"),
    "post": ({"scope": "post"}, "none"),
    "head": ({"scope": "head"}, "none"),
    "mean": ({"scope": "mean"}, "none"),
    "expand": ({"scope": "expand"}, "none"),
    "cluster": ({"projection": "fma", "hidden": 1024}, "pre"),
}


@pytest.mark.parametrize("name", CASES)
def test_nothing_in_nothing_out_and_no_launch(name: str) -> None:
    build, fuse = CASES[name]
    made = mhcgen.build(**{"hidden": 10, **build})
    module = mhcgen.compile(made, fuse).load("host")
    out = module(branches=factories.branches(made), **factories.inputs(made, 0))
    assert list(out) == [t.name for t in made.of_role("result")]
    for t in made.of_role("result"):
        assert out[t.name].shape == made.shape(t.name, 0)
        assert out[t.name].dtype == NUMPY_DTYPES[t.dtype]
    assert module.launches == []
    assert set(module.counts.values()) == {0}


@pytest.mark.parametrize("name", CASES)
def test_one_token_after_none(name: str) -> None:
    build, fuse = CASES[name]
    made = mhcgen.build(**{"hidden": 10, **build})
    module = mhcgen.compile(made, fuse).load("host")
    module(branches=factories.branches(made), **factories.inputs(made, 0))
    out = module(branches=factories.branches(made), **factories.inputs(made, 1))
    assert all(np.asarray(array).shape[0] == 1 for array in out.values())
    assert set(module.counts.values()) == {1}
