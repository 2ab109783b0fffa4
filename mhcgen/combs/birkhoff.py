"""C = a convex mix of all n! permutation matrices: exactly doubly stochastic, no iterations (mHC-lite, 2601.05732).

Permutations are numbered in lexicographic order; permutation p sends stream j to p(j), so P_p[j, p(j)] = 1.
"""

from __future__ import annotations

import itertools
import math

from mhcgen.combs.family import Array, CombKind, DirectMap
from mhcgen.ir import Stage

#: 6! = 720 logits a token: more projection than model.
MAX_STREAMS = 5


def _steps(stage: Stage, n: int) -> DirectMap:
    count = math.factorial(n)
    # exp twice over, sums of n! and (n-1)! terms in order, division
    fields = (("permutations", count), ("tables", _tables(n)))
    return DirectMap("functions/comb_birkhoff.cu.j2", fields, 0.0 if count == 1 else 10.0 + 2.0 * count)


def _tables(n: int) -> tuple[int, ...]:
    """One word a permutation: p(j) in bits 4j to 4j + 3."""
    return tuple(sum(image << (4 * j) for j, image in enumerate(p)) for p in itertools.permutations(range(n)))


def _streams(n: int) -> str:
    if n > MAX_STREAMS:
        return f"{n} streams have {n}! = {math.factorial(n)} permutations and as many logits a token"
    return ""


def _aim(n: int, shift: int) -> Array:
    import numpy as np

    wanted = tuple((j + shift) % n for j in range(n))
    logits = np.zeros(math.factorial(n))
    logits[list(itertools.permutations(range(n))).index(wanted)] = 12.0
    return logits


KIND = CombKind(
    name="birkhoff",
    source="mHC-lite, arXiv 2601.05732 (Birkhoff and von Neumann)",
    logits=math.factorial,
    steps=_steps,
    formula=lambda stage: (
        "a = softmax(logits), one weight for each of the n! permutations p in lexicographic order",
        "comb[j,k] = sum over p with p(j) = k of a_p",
    ),
    streams=_streams,
    aim=_aim,
)
