"""C[j,k] = c[(k - j) mod n] with c = softmax(logits): rows are one another shifted, and C doubly stochastic."""

from __future__ import annotations

import math

from mhcgen.combs.family import Array, CombKind, DirectMap
from mhcgen.ir import Stage


def _steps(stage: Stage, n: int) -> DirectMap:
    # exp twice over (numerator, terms of the sum), the tree of n, division
    return DirectMap("functions/comb_circulant.cu.j2", (("n", n),), 9.0 + math.ceil(math.log2(n)) if n > 1 else 0.0)


def _aim(n: int, shift: int) -> Array:
    import numpy as np

    logits: Array = 10.0 * np.eye(n)[shift % n]
    return logits


KIND = CombKind(
    name="circulant",
    source="circulant residual map",
    logits=lambda n: n,
    steps=_steps,
    formula=lambda stage: ("c = softmax(logits)", "comb[j,k] = c[(k - j) mod n]"),
    aim=_aim,
)
