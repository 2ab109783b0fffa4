"""C = I: streams do not mix; what a site adds to each is its own post gate's share (identity HC)."""

from __future__ import annotations

from mhcgen.combs.family import CombKind, DirectMap

KIND = CombKind(
    name="identity",
    source="iHC: the residual map restricted to the identity",
    logits=lambda n: 0,
    steps=lambda stage, n: DirectMap("functions/comb_identity.cu.j2", (), 0.0),
    formula=lambda stage: ("comb[j,k] = 1 if j = k else 0",),
)
