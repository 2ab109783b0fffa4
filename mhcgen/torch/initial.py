"""What the parameters of a site start as, so that it begins as a plain residual layer or near one."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mhcgen.ir import Program
from mhcgen.stages import COMB_STAGES

#: Initial scale of mixes: gates start near their bases, and learn how far to follow the streams.
INITIAL_SCALE = 0.01
#: Standard deviation of fn at the start; it also tells the streams apart.
INITIAL_FN = 0.02
#: Logit of what a mixing matrix starts without.
FAR = -8.0


def initial_gates(program: Program) -> dict[str, Tensor]:
    """Parameters of gates of low rank, by which a site starts as a residual around its branch.

    Every gate starts at 1/2 (the branch reads half the mean of the normed streams, and up learns from there), post
    gates at 1.
    """
    rows, columns, rank = program.dim("R"), program.dim("K"), program.dim("D")
    fn = torch.zeros(rows, columns)
    fn[:rank].normal_(0.0, INITIAL_FN)
    return {"fn": fn, "stream_weight": torch.zeros(columns), "up": torch.zeros(rank, columns)}


def initial_values(program: Program) -> dict[str, Tensor]:
    """`base` [R], and `comb_logits` [L] where the model has them, by which a site starts as a plain residual layer.

    pre gates start at 1/n (the branch reads the mean of the streams), post gates at 1 (every stream gets the
    branch's result), and the mixing matrix near the identity.
    """
    n = program.dim("n")
    base = torch.zeros(program.dim("R"))
    gates = next(stage for stage in program.stages if stage.kind in ("gates", "static_gates"))
    if gates.option("form", "affine") == "scaled":  # bases are added to what is activated already
        base[:n], base[n : 2 * n] = 1.0 / n, 1.0
    else:
        base[:n] = -math.log(n - 1) if n > 1 else -FAR
    made = next(stage for stage in program.stages if stage.kind in COMB_STAGES)
    separate = any(tensor.name == "comb_logits" for tensor in program.tensors)
    logits = torch.zeros(program.dim("L")) if separate else base[2 * n :]
    kind = made.attr("comb")
    if kind == "sinkhorn":
        logits.fill_(FAR)
        logits[:: n + 1] = 0.0
    elif kind == "plain":
        logits[:: n + 1] = 1.0
    elif kind in ("birkhoff", "circulant"):  # the first permutation, and the first shift, is the identity
        logits.fill_(FAR)
        logits[:1] = 0.0
    elif kind == "kronecker":
        logits[1::2] = FAR
    elif kind == "diagonal":
        logits.fill_(-FAR)
    return {"base": base, "comb_logits": logits} if separate else {"base": base}
