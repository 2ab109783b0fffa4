"""C = a Kronecker product of k = log2 n doubly stochastic 2 x 2 matrices; exact, 2k logits (KromHC)."""

from __future__ import annotations

from mhcgen.combs.family import CombKind, DirectMap
from mhcgen.ir import Stage


def _steps(stage: Stage, n: int) -> DirectMap:
    factors = n.bit_length() - 1
    # each factor: exp twice, their sum, division, and the product
    return DirectMap("functions/comb_kronecker.cu.j2", (("factors", factors),), 11.0 * factors)


def _streams(n: int) -> str:
    if n & (n - 1):
        return f"a Kronecker product of 2 x 2 matrices has 2^k rows, and {n} is no power of two"
    return ""


KIND = CombKind(
    name="kronecker",
    source="KromHC: C = kron of [[p_i, 1 - p_i], [1 - p_i, p_i]]",
    logits=lambda n: 2 * (n.bit_length() - 1),
    steps=_steps,
    formula=lambda stage: (
        "p_i = softmax(logits[2i], logits[2i + 1])[0] for i < k = log2 n",
        "comb = kron over i of [[p_i, 1 - p_i], [1 - p_i, p_i]], factor 0 the slowest index",
    ),
    streams=_streams,
)
