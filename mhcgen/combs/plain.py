"""C = the logits as they are, no constraint: the residual mix of plain hyper-connections (arXiv 2409.19606)."""

from __future__ import annotations

from mhcgen.combs.family import Array, CombKind, CombProgram


def _aim(n: int, shift: int) -> Array:
    import numpy as np

    return np.roll(np.eye(n), shift, axis=1).reshape(-1)


KIND = CombKind(
    name="plain",
    source="Hyper-Connections, arXiv 2409.19606",
    logits=lambda n: n * n,
    steps=lambda stage, n: CombProgram(()),
    formula=lambda stage: ("comb[j,k] = logits[j n + k]",),
    stage="comb",
    aim=_aim,
)
