"""What is done to each stream alone, or to each element, in float64 numpy: part of the oracle `mhcgen.reference`.

Plain hyper-connections (arXiv 2409.19606) and the gated residual of Qwen's qwen4_exp. Written from the formulas
alone; nothing here comes from templates or passes.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def sigmoid(values: npt.ArrayLike) -> Array:
    """1 / (1 + exp(-v)); exactly 0 and 1 far out, NaN stays."""
    exact = np.asarray(values, dtype=np.float64)
    with np.errstate(all="ignore"):
        return np.asarray(1.0 / (1.0 + np.exp(-exact)), dtype=np.float64)


def root_mean_square(mean_square: Array, eps: float, eps_place: str = "in", count: int = 1) -> Array:
    """sqrt(mean + eps) (in), sqrt(mean) + eps (out: Megatron, TileOPs), or max(|x|, eps) / sqrt(count) (clamp).

    clamp is x / max(|x|, eps) * sqrt(count) of the mHC-lite code, |x| being the norm of all `count` elements.
    """
    if eps_place == "out":
        outside: Array = np.sqrt(mean_square) + eps
        return outside
    if eps_place == "clamp":
        clamped: Array = np.maximum(np.sqrt(mean_square), eps / np.sqrt(count))
        return clamped
    if eps_place != "in":
        raise ValueError(f"unknown place of eps {eps_place!r}")
    root: Array = np.sqrt(mean_square + eps)
    return root


def project_streams(x: Array, fn: Array) -> Array:
    """mixes [T, (2+n)n] of each stream alone: pre n | post n | comb n*n from rows 0, 1 and 2 + k of fn [2+n, H].

    Plain hyper-connections, arXiv 2409.19606.
    """
    tokens, n, _ = x.shape
    per_stream = x @ fn.T
    parts = (per_stream[:, :, 0], per_stream[:, :, 1], per_stream[:, :, 2:].reshape(tokens, n * n))
    return np.concatenate(parts, axis=1)


def rowsq_streams(x: Array, mixes: Array, eps: float, eps_place: str = "in") -> Array:
    """mixes_scaled: the mixes of each stream over the root mean square of that stream alone."""
    n = x.shape[1]
    root = root_mean_square(np.mean(x * x, axis=2), eps, eps_place, x.shape[2])
    scaled: Array = mixes / np.concatenate([root, root, np.repeat(root, n, axis=1)], axis=1)
    return scaled


def norm_streams(x: Array, weight: Array, eps: float, eps_place: str = "in") -> Array:
    """x_normed [T, n, H]: RMSNorm of each stream alone, times 1 + weight [n*H] (Qwen's zero-centred weights)."""
    root = root_mean_square(np.mean(x * x, axis=2), eps, eps_place, x.shape[2])
    normed: Array = x / root[:, :, None] * (1.0 + weight.reshape(x.shape[1:]))
    return normed


def low_rank_gates(mixes: Array, streams: int, rank: int, post_mult: float) -> tuple[Array, Array]:
    """bottleneck [T, rank] and post [T, n] of the gated residual, from mixes [T, rank + n] over the stream count.

    A head has no mixes beyond the rank, and post is [T, 0] there. Source: GatedResidual of Qwen's qwen4_exp.
    """
    each = mixes / streams
    low, injected = each[:, :rank], each[:, rank:]
    return low * sigmoid(low), post_mult * sigmoid(injected)


def gated_mean(x: Array, bottleneck: Array, up: Array) -> Array:
    """y [T, H]: mean over streams of x gated element by element, sigmoid(bottleneck . up), up [rank, n*H]."""
    gate = sigmoid(bottleneck @ up).reshape(x.shape)
    y: Array = np.mean(gate * x, axis=1)
    return y
