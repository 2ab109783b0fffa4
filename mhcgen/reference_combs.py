"""Mixing matrices in float64 numpy, one plain function per kind: part of the oracle `mhcgen.reference`.

Written from the formulas alone: nothing here comes from `mhcgen.combs`, templates or passes. Each takes the logits
[T, L], the number of streams and the stage's attributes, and returns C [T, from_stream, to_stream].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]
Attrs = Mapping[str, Any]


def softmax(values: Array, axis: int) -> Array:
    """exp(v - max) over its sum along an axis; NaN where the whole line is -inf."""
    e: Array = np.exp(values - np.max(values, axis=axis, keepdims=True))
    share: Array = e / np.sum(e, axis=axis, keepdims=True)
    return share


def logsumexp(values: Array, axis: int) -> Array:
    """log of the sum of exponentials along an axis, which stays."""
    most = np.max(values, axis=axis, keepdims=True)
    total: Array = most + np.log(np.sum(np.exp(values - most), axis=axis, keepdims=True))
    return total


def sinkhorn(logits: Array, n: int, attrs: Attrs) -> Array:
    """Sinkhorn normalisation in the forms of public code.

    DeepSeek-V4 (the default): softmax over the last axis + eps, division of columns by their sums + eps, then
    iters - 1 times rows and columns. TransformerEngine: potentials f and g in the log domain, no eps. TileOPs:
    starts from exp(L - row maximum) and runs all iterations. mHC.cu: starts from exp(L), divides only where a sum
    exceeds eps. mHC paper: exp(L), columns first, so that rows come last. Liger, TileOPs, mHC.cu and the paper store
    C as (to, from): `orient` out.

    Raises:
        ValueError: the number of logits is not n*n, or iters < 1.
    """
    iters, eps = int(attrs["iters"]), float(attrs["eps"])
    if n * n != logits.shape[1] or iters < 1:
        raise ValueError(f"sinkhorn wants n*n logits and iters >= 1, got {logits.shape[1]} and {iters}")
    c: Array = logits.reshape(-1, n, n)
    axes = (1, 2) if attrs.get("order", "row-col") == "col-row" else (2, 1)
    if attrs.get("domain", "linear") == "log":
        c = _log_domain(c, axes, iters)
    else:
        c = _linear(c, axes, iters, eps, attrs.get("start", "softmax"), attrs.get("eps_mode", "add"))
    return np.swapaxes(c, 1, 2) if attrs.get("orient", "in") == "out" else c


def _linear(c: Array, axes: tuple[int, int], iters: int, eps: float, start: str, mode: str) -> Array:
    def divide(c: Array, axis: int) -> Array:
        total = np.sum(c, axis=axis, keepdims=True)
        if mode == "threshold":
            return np.where(total > eps, c / total, c)
        divided: Array = c / (total + eps if mode == "add" else total)
        return divided

    first, second = axes
    if start == "softmax":
        c = softmax(c, first)
        c = divide(c + eps if mode == "add" else c, second)
        iters -= 1
    else:
        c = np.exp(c - np.max(c, axis=first, keepdims=True) if start == "exp_rowmax" else c)
    for _ in range(iters):
        c = divide(divide(c, first), second)
    return c


def _log_domain(logits: Array, axes: tuple[int, int], iters: int) -> Array:
    first, second = axes
    f = g = np.zeros((1, 1, 1))
    for _ in range(iters):
        f = -logsumexp(logits + g, first)
        g = -logsumexp(logits + f, second)
    c: Array = np.exp(f + logits + g)
    return c


def plain(logits: Array, n: int, attrs: Attrs) -> Array:
    """C = the logits, row-major (arXiv 2409.19606: the residual columns of alpha)."""
    return logits.reshape(-1, n, n)


def birkhoff(logits: Array, n: int, attrs: Attrs) -> Array:
    """Sum over all permutations p, in lexicographic order, of softmax(logits)_p P_p with P_p[j, p(j)] = 1.

    mHC-lite, arXiv 2601.05732.
    """
    weights = softmax(logits, 1)
    c = np.zeros((len(logits), n, n))
    for index, permutation in enumerate(itertools.permutations(range(n))):
        for source, target in enumerate(permutation):
            c[:, source, target] += weights[:, index]
    return c


def kronecker(logits: Array, n: int, attrs: Attrs) -> Array:
    """Kronecker product of [[p, 1-p], [1-p, p]], p the first of a softmax of two logits a factor (KromHC)."""
    c = np.ones((len(logits), 1, 1))
    for factor in range(logits.shape[1] // 2):
        p = softmax(logits[:, 2 * factor : 2 * factor + 2], 1)
        two = np.stack([p, p[:, ::-1]], axis=1)
        size = 2 * c.shape[1]
        c = np.einsum("tab,tcd->tacbd", c, two).reshape(-1, size, size)
    return c


def circulant(logits: Array, n: int, attrs: Attrs) -> Array:
    """C[j, k] = softmax(logits)[(k - j) mod n]."""
    weights = softmax(logits, 1)
    return np.stack([np.roll(weights, j, axis=1) for j in range(n)], axis=1)


def diagonal(logits: Array, n: int, attrs: Attrs) -> Array:
    """C = diag(sigmoid(logits))."""
    c = np.zeros((len(logits), n, n))
    for j in range(n):
        c[:, j, j] = 1.0 / (1.0 + np.exp(-logits[:, j]))
    return c


def identity(logits: Array, n: int, attrs: Attrs) -> Array:
    """C = I for every token."""
    return np.broadcast_to(np.eye(n), (len(logits), n, n)).copy()


#: Kind -> function. Kinds registered from outside the package join here (`mhcgen.combs.register`).
COMBS: dict[str, Callable[[Array, int, Attrs], Array]] = {
    "sinkhorn": sinkhorn,
    "plain": plain,
    "birkhoff": birkhoff,
    "kronecker": kronecker,
    "circulant": circulant,
    "diagonal": diagonal,
    "identity": identity,
}
