"""NVIDIA-NeMo/Automodel #2143: parameters meant as fp32 were cast to bf16. ByteDance-Seed/VeOmni #1200: the matrix
product truncated fp32 operands to TF32 where the highest precision had been asked for.

D9: products that sum to K/2 * 2^-12, and to 0 where the last bits of fn are lost.
"""

from __future__ import annotations

from typing import Any

import factories
import ml_dtypes
import numpy as np
import pytest

import mhcgen
from mhcgen.errors import InputTypeError, UsageError
from mhcgen.inputs import discriminating

WIDTHS = (256, 4096, 7168)  # times 4 streams: K = 1024, 16384, 28672
FORMS: dict[str, dict[str, Any]] = {
    "unfused": {"fuse": "none"},
    "one block": {"fuse": "pre", "cluster": 1},
    "cluster": {"fuse": "pre"},
}


@pytest.mark.parametrize("hidden", WIDTHS)
def test_the_projection_keeps_every_bit_of_its_weights(hidden: int) -> None:
    program = factories.program(factories.stage("project"), n=4, hidden=hidden)
    given = discriminating(program, 1, "D9")
    assert given is not None
    out = mhcgen.compile(program).load("host")(**given)
    assert (out["mixes"] == hidden * 2 * 2.0**-12).all()
    lost = {**given, "fn": given["fn"].astype(ml_dtypes.bfloat16).astype(np.float32)}
    assert (mhcgen.compile(program).load("host")(**lost)["mixes"] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", WIDTHS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_so_does_a_chain_that_projects(dtype: str, hidden: int, form: str) -> None:
    """Streams of 1 and -1 have an RMS of 1, so the gates show the sum."""
    program = mhcgen.build(hidden=hidden, projection="fma", dtype=dtype, iters=1)
    given = discriminating(program, 1, "D9")
    assert given is not None
    given = {**given, "scale": np.ones(3, np.float32), "base": np.zeros(24, np.float32)}
    out = mhcgen.compile(program, **FORMS[form]).load("host")(**given)
    dot = hidden * 2 * 2.0**-12
    assert out["pre"] == pytest.approx(1 / (1 + np.exp(-dot)) + 1e-6, rel=1e-6)


def test_there_is_no_reduced_projection_and_the_header_says_which_it_is() -> None:
    for method in ("tf32", "bf16"):
        with pytest.raises(UsageError):
            mhcgen.build(hidden=8, projection=method)
    assert "projection=fma" in mhcgen.compile(mhcgen.build(hidden=8, projection="fma")).source


@pytest.mark.parametrize("fuse", ["none", "pre"])
def test_a_base_keeps_its_low_bits_and_a_narrow_one_is_refused(fuse: str) -> None:
    """1 + 2^-10 is 1 in bf16. A refused call leaves the module as it was."""
    program = mhcgen.build(hidden=8)
    module = mhcgen.compile(program, fuse).load("host")
    given = factories.inputs(program, 1)
    given |= {"mixes": np.zeros((1, 24), np.float32), "base": np.full(24, 1 + 2.0**-10, np.float32)}
    want = 1 / (1 + np.exp(-(1 + 2.0**-10)))
    for _ in range(2):
        assert module(**given)["post"] == pytest.approx(2 * want, rel=2e-7)
        with pytest.raises(InputTypeError, match="base has dtype bfloat16"):
            module(**{**given, "base": given["base"].astype(ml_dtypes.bfloat16)})
    narrow = given["base"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert abs(module(**{**given, "base": narrow})["post"] / (2 * want) - 1).min() > 1e-4
