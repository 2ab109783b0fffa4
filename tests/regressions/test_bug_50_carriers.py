"""cupy/cupy #8801, #7527, #9494, #9630: bf16 of another library crashed, was refused, or came in as something else.

One carrier: arrays of the dtype of ml_dtypes. What merely has as many bits is refused, and so is fp8 in the place of
streams. On a device: `tests/backends/test_cuda_gpu.py`; tensors of torch go through `mhcgen.torch`, without CuPy.
"""

from __future__ import annotations

from typing import Any

import factories
import ml_dtypes
import numpy as np
import pytest

import mhcgen
from mhcgen.errors import InputTypeError

OTHERS = ("uint16", "int16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "float32")


def module(dtype: str, **options: Any) -> Any:
    return mhcgen.compile(mhcgen.build(hidden=32, dtype=dtype, **options), "none").load("host")


@pytest.mark.parametrize("other", OTHERS)
def test_streams_in_bf16_are_carried_by_ml_dtypes_alone(other: str) -> None:
    loaded = module("bf16")
    given = factories.inputs(loaded.program, 2)
    dtype = np.dtype(getattr(ml_dtypes, other, None) or other)
    same_bits = given["x"].view(dtype) if dtype.itemsize == 2 else given["x"].astype(np.float32).astype(dtype)
    with pytest.raises(InputTypeError, match=f"x has dtype {other}, and bfloat16") as caught:
        loaded(**{**given, "x": same_bits})
    assert caught.value.code == "I-DTYPE" and not loaded.launches


def test_a_view_says_what_plain_bits_hold() -> None:
    loaded = module("bf16")
    given = factories.inputs(loaded.program, 2)
    bits = given["x"].view(np.uint16).copy()
    usual, viewed = loaded(**given), loaded(**{**given, "x": bits.view(ml_dtypes.bfloat16)})
    assert usual["y"].dtype == ml_dtypes.bfloat16
    assert all(usual[name].tobytes() == array.tobytes() for name, array in viewed.items())


def test_the_bits_of_bf16_and_fp16_are_told_apart() -> None:
    """The same 16 bits are other numbers; both carriers round to nearest even."""
    for dtype, carrier in (("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)):
        loaded = module(dtype, scope="mean")
        x = np.full((1, 4, 32), 1 + 2.0**-7, np.float32).astype(carrier)
        x[0, 1:] = 0
        assert loaded(x=x)["y"][0, 0] == carrier((1 + 2.0**-7) / 4)


def test_fp8_comes_out_as_plain_codes() -> None:
    loaded = module("bf16", norm=True, quant="fp8")
    out = loaded(**factories.inputs(loaded.program, 2))
    codes = out["q"].view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert out["q"].dtype == np.uint8 and np.abs(codes).max() == 448.0
