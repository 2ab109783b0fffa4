"""C = diag(sigmoid(logits)): each stream keeps a share of itself (diagonal HC)."""

from __future__ import annotations

from mhcgen.combs.family import CombKind, DirectMap

KIND = CombKind(
    name="diagonal",
    source="dHC: the residual map restricted to a diagonal",
    logits=lambda n: n,
    # exp, 1 + exp, division
    steps=lambda stage, n: DirectMap("functions/comb_diagonal.cu.j2", (), 8.0),
    formula=lambda stage: ("comb[j,k] = sigmoid(logits[j]) if j = k else 0",),
)
