"""The bounded quotient equals the correctly rounded one: every mantissa on a GPU, a spread of them on the CPU.

docs/decisions/0004-bounded-division.md says why this has to be run once an architecture.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import mhcgen
from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.emit import render
from mhcgen.steps.division import LEAST_LOG2

KERNEL = KernelSignature(
    "mantissas",
    (
        Param("bad", "unsigned*", True),
        Param("exponent", "int", False),
        Param("first", "long long", False),
        Param("count", "long long", False),
    ),
)
#: Exponents of the divisor: both ends and the middle of the sums a Sinkhorn meets.
EXPONENTS = (-20, -1, 0, 1, 4)
MANTISSAS = 1 << 23


def source() -> str:
    """The emission's own functions, and the kernel that tries them."""
    functions = [render(f"functions/{name}.cu.j2", {}) for name in ("reciprocal", "bounded_quotient")]
    kernel = Path(__file__).with_name("kernels") / "division.cu.txt"
    return "\n".join((*functions, kernel.read_text()))


def test_on_the_cpu_a_spread_of_mantissas_divides_correctly() -> None:
    from mhcgen.backends.host import HostModule

    module = HostModule(source(), [KERNEL])
    count = 4096
    for exponent in EXPONENTS:
        for first in (0, 1 << 20, MANTISSAS - count):
            bad = np.zeros(count, np.uint32)
            module.launch("mantissas", count // 256, 256, [bad, exponent, first, count])
            assert int(bad.sum()) == 0, (exponent, first)


@pytest.mark.gpu
def test_on_the_gpu_every_mantissa_divides_correctly() -> None:
    import cupy

    from mhcgen.backends.cuda import CudaModule

    module = CudaModule(source(), [KERNEL])
    for exponent in EXPONENTS:
        bad = cupy.full(MANTISSAS, 0xFFFFFFFF, cupy.uint32)
        module.launch("mantissas", (MANTISSAS // 256, 1, 1), (256, 1, 1), [bad, exponent, 0, MANTISSAS])
        assert int(bad.astype(cupy.uint64).sum()) == 0, exponent


@pytest.mark.parametrize(
    ("streams", "iters", "bounded"), [(4, 20, True), (4, 21, False), (3, 20, True), (2, 20, True), (8, 20, False)]
)
def test_the_invariant_decides_which_division_is_emitted(streams: int, iters: int, bounded: bool) -> None:
    plan = mhcgen.compile(mhcgen.build(streams=streams, hidden=8, iters=iters), "pre")
    used = "mhc_bounded_quotient(" in plan.source
    assert used is bounded
    # the least element after every half-step, by the invariant's own arithmetic written out
    least = np.log2(1e-6) - (2 * iters - 1) * np.log2(streams * (1 + 2e-6) + 1e-6)
    assert bool(least >= LEAST_LOG2) is bounded


def test_no_invariant_without_eps_at_the_start() -> None:
    from mhcgen.models import MODELS

    plain = [name for name, model in MODELS.items() if name == "mhc-paper"]
    for name in plain:
        assert "mhc_bounded_quotient(" not in mhcgen.compile(mhcgen.build(name, streams=4, hidden=8), "pre").source
    assert plain
