"""Mixing matrices in torch, differentiable: the formulas of `mhcgen.combs`, one function a kind.

Each takes logits [T, L], the number of streams and the stage's attributes, and returns C [T, from_stream, to_stream]
in the dtype of the logits. A kind registered with `mhcgen.combs.register` is added with `register` here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mhcgen.errors import UsageError

Attrs = Mapping[str, Any]
Comb = Callable[[Tensor, int, Attrs], Tensor]


def sinkhorn(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """Alternate normalisation of rows and columns; see `mhcgen.combs.sinkhorn` for the attributes."""
    c = logits.reshape(-1, n, n)
    iters, eps = int(attrs["iters"]), float(attrs["eps"])
    first, second = (1, 2) if attrs.get("order", "row-col") == "col-row" else (2, 1)
    if attrs.get("domain", "linear") == "log":
        c = _log_domain(c, first, second, iters)
    else:
        mode, start = attrs.get("eps_mode", "add"), attrs.get("start", "softmax")
        if start == "softmax":
            c = torch.softmax(c, first)
            c = _divide(c + eps if mode == "add" else c, second, eps, mode)
            iters -= 1
        else:
            c = torch.exp(c - c.amax(first, keepdim=True) if start == "exp_rowmax" else c)
        for _ in range(iters):
            c = _divide(_divide(c, first, eps, mode), second, eps, mode)
    return c.transpose(1, 2) if attrs.get("orient", "in") == "out" else c


def _divide(c: Tensor, axis: int, eps: float, mode: str) -> Tensor:
    total = c.sum(axis, keepdim=True)
    if mode == "threshold":
        # A sum that is not divided by must not reach the gradient as 1/0 either.
        return c / torch.where(total > eps, total, torch.ones_like(total))
    return c / (total + eps if mode == "add" else total)


def _log_domain(logits: Tensor, first: int, second: int, iters: int) -> Tensor:
    f = g = torch.zeros_like(logits[:, :1, :1])
    for _ in range(iters):
        f = -torch.logsumexp(logits + g, first, keepdim=True)
        g = -torch.logsumexp(logits + f, second, keepdim=True)
    return torch.exp(f + logits + g)


def plain(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """C = the logits, row-major."""
    return logits.reshape(-1, n, n)


def birkhoff(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """Convex mix of all permutations in lexicographic order."""
    matrices = torch.zeros((logits.shape[1], n, n), dtype=logits.dtype)
    for index, permutation in enumerate(itertools.permutations(range(n))):
        for source, target in enumerate(permutation):
            matrices[index, source, target] = 1.0
    return torch.einsum("tp,pjk->tjk", torch.softmax(logits, 1), matrices.to(logits.device))


def kronecker(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """Kronecker product of [[p, 1-p], [1-p, p]]."""
    c = torch.ones_like(logits[:, :1, None])
    for factor in range(logits.shape[1] // 2):
        p = torch.softmax(logits[:, 2 * factor : 2 * factor + 2], 1)
        two = torch.stack([p, p.flip(1)], 1)
        size = 2 * c.shape[1]
        c = torch.einsum("tab,tcd->tacbd", c, two).reshape(-1, size, size)
    return c


def circulant(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """C[j, k] = softmax(logits)[(k - j) mod n]."""
    weights = torch.softmax(logits, 1)
    return torch.stack([weights.roll(j, 1) for j in range(n)], 1)


def diagonal(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """C = diag(sigmoid(logits))."""
    return torch.diag_embed(torch.sigmoid(logits))


def identity(logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """C = I for every token."""
    return torch.eye(n, dtype=logits.dtype, device=logits.device).expand(logits.shape[0], n, n)


_COMBS: dict[str, Comb] = {
    "sinkhorn": sinkhorn,
    "plain": plain,
    "birkhoff": birkhoff,
    "kronecker": kronecker,
    "circulant": circulant,
    "diagonal": diagonal,
    "identity": identity,
}


def register(kind: str, function: Comb) -> None:
    """Add the differentiable form of a kind of mixing matrix; backward and the plain torch path need it."""
    _COMBS[kind] = function


def comb(kind: str, logits: Tensor, n: int, attrs: Attrs) -> Tensor:
    """The matrix [T, n, n] of a kind; [n, n] where the logits have no T.

    Raises:
        UsageError: `U-COMB`, the kind has no form in torch.
    """
    if kind not in _COMBS:
        raise UsageError(
            "U-COMB",
            f"the mixing matrix {kind!r} has no form in torch, which gradients and the torch path need",
            where=kind,
            hints=("give one: mhcgen.torch.register_comb(kind, function)",),
        )
    if logits.ndim == 1:
        return _COMBS[kind](logits[None], n, attrs)[0]
    return _COMBS[kind](logits, n, attrs)
