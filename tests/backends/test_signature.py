"""Scalars reach a kernel with the bytes its C parameter declares, or not at all."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mhcgen.backends.signature import KernelSignature, Param, cast_scalar, parse_ctype
from mhcgen.errors import InputError, InternalError

EPS = Param("eps", "float", False)
TOKENS = Param("T", "long long", False)


class OnDevice:
    """Stands for a CuPy array or a torch CUDA tensor."""

    __cuda_array_interface__: dict[str, Any] = {}  # noqa: RUF012

    def __float__(self) -> float:
        raise AssertionError("reading a device scalar synchronises")


@pytest.mark.parametrize(
    "value",
    [
        1e-6,
        np.float64(1e-6),
        np.float32(1e-6),
        np.array(1e-6),
        np.array([1e-6]),
        np.array(1e-6, np.float32),
        Fraction(1, 1_000_000),
    ],
    ids=repr,
)
def test_every_kind_of_epsilon_gives_the_same_four_bytes(value: object) -> None:
    cast = cast_scalar(EPS, value)
    assert type(cast) is np.float32
    assert cast.tobytes() == np.float32(1e-6).tobytes()


@pytest.mark.parametrize("value", [7, 7.0, np.int8(7), np.int64(7), np.uint64(7), np.float32(7), np.array(7)])
@pytest.mark.parametrize(
    ("ctype", "expected"),
    [
        ("int", np.int32),
        ("unsigned", np.uint32),
        ("unsigned int", np.uint32),
        ("long long", np.int64),
        ("unsigned long long", np.uint64),
        ("size_t", np.uint64),
        ("float", np.float32),
        ("double", np.float64),
        ("const int", np.int32),
    ],
)
def test_declared_type_decides_the_width(ctype: str, expected: type, value: object) -> None:
    cast = cast_scalar(Param("p", ctype, False), value)
    assert type(cast) is expected
    assert cast == 7


@pytest.mark.parametrize(
    ("ctype", "value"),
    [
        ("int", 2**31), ("int", -(2**31) - 1), ("unsigned", -1), ("unsigned", 2**32), ("long long", 2**63),
        ("int", float("nan")), ("int", float("inf")), ("int", 1.5), ("int", 3e9), ("int", np.float64("nan")),
        ("int", True), ("int", np.True_), ("float", False), ("float", np.array(True)),
        ("float", "1e-6"), ("float", b"1"), ("int", "4"), ("float", np.array("1.0")),
        ("float", np.array([1.0, 2.0])), ("int", np.array([])), ("float", [1.0]), ("float", None),
        ("int", None), ("int", 1j), ("float", 1j), ("float", np.complex64(1)), ("float", np.array(1j)),
        ("float", 1e39), ("float", -1e39), ("float", 10**400), ("double", 10**400), ("float", 1e-50),
        ("float", OnDevice()), ("int", OnDevice()), ("float", np.datetime64("2020-01-01")),
        ("float", np.array({}, dtype=object)),
    ],
)  # fmt: skip
def test_unfit_values_are_refused(ctype: str, value: object) -> None:
    with pytest.raises(InputError) as caught:
        cast_scalar(Param("p", ctype, False), value)
    assert caught.value.code == "I-SCALAR"
    assert caught.value.where == "p"


def test_token_counts_beyond_32_bits_survive() -> None:
    assert cast_scalar(TOKENS, 2**31 + 5) == 2**31 + 5
    assert cast_scalar(TOKENS, np.int64(2**62 + 1)) == 2**62 + 1


def test_non_finite_and_smallest_values_pass_to_floating_parameters() -> None:
    assert np.isnan(cast_scalar(EPS, float("nan")))
    assert cast_scalar(EPS, float("inf")) == np.inf
    assert cast_scalar(EPS, 1e-45) != 0
    assert cast_scalar(EPS, np.finfo(np.float32).max) == np.finfo(np.float32).max
    assert np.signbit(cast_scalar(EPS, -0.0))
    assert cast_scalar(EPS, ml_dtypes.bfloat16(0.5)) == 0.5


@given(st.integers(-(2**31), 2**31 - 1))
def test_int_round_trip(value: int) -> None:
    assert int(cast_scalar(Param("p", "int", False), value)) == value


@given(st.floats(width=32))
def test_float32_values_keep_their_bits(value: float) -> None:
    assert cast_scalar(EPS, value).tobytes() == np.float32(value).tobytes()


@pytest.mark.parametrize(
    ("ctype", "dtype", "const"),
    [
        ("const float*", np.float32, True),
        ("float *", np.float32, False),
        ("const __nv_bfloat16* __restrict__", ml_dtypes.bfloat16, True),
        ("__nv_bfloat16 const *", ml_dtypes.bfloat16, True),
        ("__half*", np.float16, False),
        ("unsigned char*", np.uint8, False),
        ("__nv_fp8_e4m3*", ml_dtypes.float8_e4m3fn, False),
    ],
)
def test_pointer_types(ctype: str, dtype: type, const: bool) -> None:
    assert parse_ctype(ctype) == (np.dtype(dtype), True, const)
    param = Param("p", ctype, False)
    assert param.is_pointer and param.dtype == np.dtype(dtype)


@pytest.mark.parametrize("ctype", ["float**", "float4", "", "*", "__half", "float& x", "float* x", "long"])
def test_unknown_types_are_our_bug(ctype: str) -> None:
    with pytest.raises(InternalError, match=r"parameter type|by value"):
        Param("p", ctype, False)


def test_contradictions_are_our_bug() -> None:
    with pytest.raises(InternalError):
        Param("p", "const float*", True)
    with pytest.raises(InternalError):
        Param("p", "int", True)
    with pytest.raises(InternalError):
        KernelSignature("k", (EPS, EPS))
    with pytest.raises(InternalError):
        cast_scalar(Param("p", "float*", True), 1.0)
