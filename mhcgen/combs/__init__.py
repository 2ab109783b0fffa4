"""Kinds of mixing matrices, one file each.

A kind says how many logits a token has, how the matrix C [from_stream, to_stream] follows from them, for which
stream counts it exists, and what a wrong answer would look like. Importing this package registers the built-in
kinds; a new one registers itself with `register` and is then buildable, fusable and tested like these
(docs/adding-a-variant.md shows one from start to end).
"""

from mhcgen.combs import birkhoff, circulant, diagonal, identity, kronecker, plain, sinkhorn
from mhcgen.combs.family import (
    COMB_KINDS,
    CombKind,
    CombProgram,
    DirectMap,
    ElementStep,
    HalfStep,
    LogStep,
    comb_kind,
    comb_program,
    register,
)

for _module in (sinkhorn, plain, birkhoff, kronecker, identity, diagonal, circulant):
    COMB_KINDS.setdefault(_module.KIND.name, _module.KIND)

__all__ = [
    "COMB_KINDS",
    "CombKind",
    "CombProgram",
    "DirectMap",
    "ElementStep",
    "HalfStep",
    "LogStep",
    "comb_kind",
    "comb_program",
    "register",
]
