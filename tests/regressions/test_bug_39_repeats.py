"""NVIDIA/TransformerEngine #2790: atomic adds in the projection made results vary, and tests needed 5e-3.

No emission has an atomic. At K = 65536 repeats give the same bits in every order of threads and on dirty memory,
within about 1e-5 of float64.
"""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest
import sweep

import mhcgen
from mhcgen import reference
from mhcgen.backends.host.abi import ORDERS

K = 65536


def test_no_emission_has_an_atomic() -> None:
    for name, plan in sweep.plans(every=7).items():
        assert "atomic" not in plan.source and "red." not in plan.source, name


@pytest.mark.parametrize("schedule", [{"fuse": "none"}, {"fuse": "pre"}, {"fuse": "pre", "cluster": 1}], ids=str)
def test_a_long_sum_repeats_and_is_close(schedule: dict[str, Any]) -> None:
    program = mhcgen.build(streams=4, hidden=K // 4, projection="fma", iters=2)
    plan = mhcgen.compile(program, **schedule)
    module = plan.load("host")
    given = factories.inputs(program, 2)
    want = reference.run(program, given)
    first: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for seed, order in enumerate((*ORDERS, *ORDERS)):
        # The second time round, over what the calls before left behind; values between kernels too.
        out = {name: array for name, array in out.items()} if seed else {}
        for tensor in module.outputs:
            out.setdefault(tensor.name, module.runner.empty(program.shape(tensor.name, 2), tensor.dtype))
        made = module(out=out, launch_options={"order": order, "seed": seed}, **given)
        first = first or {name: array.copy() for name, array in made.items()}
        assert all(made[name].tobytes() == array.tobytes() for name, array in first.items()), order
        for array in out.values():
            array.reshape(-1).view(np.uint8)[:] = 0x7B if seed % 2 else 0xC2
    for name, array in first.items():
        assert np.abs(array - want[name]).max() < 1e-5 * max(1.0, np.abs(want[name]).max()), name
