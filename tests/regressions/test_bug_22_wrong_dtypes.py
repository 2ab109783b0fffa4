"""sgl-project/sglang #26843: post weights that were not fp32 entered the fused boundary, and hit an assertion."""

from __future__ import annotations

from typing import Any

import factories
import ml_dtypes
import numpy as np
import pytest

import mhcgen
from mhcgen.errors import InputError, InputTypeError
from mhcgen.runtime import NUMPY_DTYPES

DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "int8", "uint16", "bool", "complex64")
BOUNDARY = mhcgen.build(scope="boundary", hidden=8, dtype="bf16", projection="fma", norm=True)
ARGUMENTS = [t.name for t in BOUNDARY.of_role("input", "parameter")]


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, None) or name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_each_argument_in_each_wrong_dtype(name: str, dtype: str) -> None:
    module = mhcgen.compile(BOUNDARY, "boundary", cluster=1).load("host")
    inputs = factories.inputs(BOUNDARY, 1)
    wanted = NUMPY_DTYPES[BOUNDARY.tensor(name).dtype]
    if dtype_of(dtype) == wanted:
        pytest.skip("the right one")
    inputs[name] = np.zeros(inputs[name].shape, dtype_of(dtype))
    with pytest.raises(TypeError) as caught:
        module(**inputs)
    assert isinstance(caught.value, InputTypeError)
    assert (caught.value.code, caught.value.where) == ("I-DTYPE", name)
    assert f"{name} has dtype {dtype}" in caught.value.message and wanted.name in caught.value.message
    assert not module.launches


def test_all_arguments_are_tried() -> None:
    assert {"x", "f", "post", "comb", "fn", "scale", "base", "norm_weight"} <= set(ARGUMENTS)


def test_plain_uint16_is_never_bf16() -> None:
    module = mhcgen.compile(BOUNDARY, "none").load("host")
    inputs = factories.inputs(BOUNDARY, 1)
    inputs["x"] = inputs["x"].view(np.uint16)
    with pytest.raises(InputTypeError, match="never taken for bf16"):
        module(**inputs)


@pytest.mark.parametrize("swapped", [">f4", "S4", "O"])
def test_strange_layouts_of_the_right_size_are_refused(swapped: str) -> None:
    module = mhcgen.compile(mhcgen.build(hidden=8), "pre").load("host")
    inputs = factories.inputs(module.program, 1)
    inputs["mixes"] = inputs["mixes"].astype(swapped)
    with pytest.raises(InputError):
        module(**inputs)


@pytest.mark.parametrize("value", [[[0.0] * 24], 1.0, None, "x"])
def test_what_is_no_array_is_refused(value: Any) -> None:
    module = mhcgen.compile(mhcgen.build(hidden=8), "pre").load("host")
    inputs = {**factories.inputs(module.program, 1), "mixes": value}
    with pytest.raises(InputTypeError) as caught:
        module(**inputs)
    assert (caught.value.code, caught.value.where) == ("I-ARRAY", "mixes")


def test_a_branch_that_returns_another_dtype_is_refused() -> None:
    made = mhcgen.build(scope="site", hidden=8)
    module = mhcgen.compile(made, "pre").load("host")
    with pytest.raises(InputTypeError, match="f has dtype float64"):
        module(branches={"branch": lambda z: z.astype(np.float64)}, **factories.inputs(made, 1))


def test_outputs_given_by_the_caller_are_checked_too() -> None:
    module = mhcgen.compile(mhcgen.build(hidden=8), "pre").load("host")
    with pytest.raises(InputTypeError, match="y has dtype float64"):
        module(out={"y": np.zeros((1, 8))}, **factories.inputs(module.program, 1))
