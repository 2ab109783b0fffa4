"""The emitted arithmetic in numpy float32, operation by operation, as a stand-in for an emission.

Written from the rules of the arithmetic (docstring of `mhcgen.arithmetic`), not from templates: order of
sums, one rounding an operation, fused multiply-adds. Functions that need not be correctly rounded are wrong
on purpose, by a pseudo-random amount up to what the error model allows, so that a bound is tried at its edge.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import ml_dtypes
import numpy as np

from mhcgen.ir import Program, Stage

F = np.float32
STORED = {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}


def fma(a: Any, b: Any, c: Any) -> Any:
    """round(a*b + c) of float32 arrays, rounded once.

    The product of two 24-bit numbers is exact in float64. The sum is rounded there to odd: where it is
    inexact and its last bit is even, it moves one step towards the lost part. An odd 53-bit number is never a
    tie of 24 bits, so the second rounding gives what a single one would (Boldo and Melquiond, 2008).
    """
    product = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    addend = np.broadcast_to(np.asarray(c, np.float64), np.broadcast_shapes(np.shape(product), np.shape(c)))
    total = np.asarray(product + addend)
    back = total - addend
    lost = (addend - (total - back)) + (product - back)  # Knuth's two-sum: exact
    even = (total.view(np.int64) & 1) == 0
    odd = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where(np.isfinite(total) & (lost != 0) & even, odd, total).astype(F)


def tree(values: Any) -> Any:
    """Sum over the last axis, adjacent pairs first, absent elements skipped."""
    while values.shape[-1] > 1:
        paired = values[..., 0 : values.shape[-1] // 2 * 2 : 2] + values[..., 1::2]
        values = np.concatenate([paired, values[..., values.shape[-1] // 2 * 2 :]], axis=-1)
    return values[..., 0]


class Functions:
    """exp, division and inverse root of a function set, off by up to their stated error."""

    def __init__(self, name: str, seed: int) -> None:
        self.fast = name == "fast"
        self.random = np.random.default_rng(seed)

    def _off(self, exact: Any, relative: float) -> Any:
        """float64 values moved by up to `relative`, then rounded."""
        return (exact * (1.0 + relative * self.random.uniform(-1, 1, np.shape(exact)))).astype(F)

    def exp(self, x: Any) -> Any:
        if self.fast:
            scaled = x * F(1.4426950408889634)
            return self._off(np.exp2(np.asarray(scaled, np.float64)), 2.0**-22 - 2.0**-24)
        # Within 1.1 ulp: 0.5 from rounding, and 0.6 ulp (at least 0.6 * 2^-24 relative) before it.
        return self._off(np.exp(np.asarray(x, np.float64)), 0.6 * 2.0**-24)

    def divide(self, a: Any, b: Any) -> Any:
        if self.fast:
            return a * self._off(1.0 / np.asarray(b, np.float64), 2.0**-24)
        return a / b

    def inverse_root(self, v: Any) -> Any:
        if self.fast:
            return self._off(1.0 / np.sqrt(np.asarray(v, np.float64)), 2.0**-22.9 - 2.0**-24)
        return F(1.0) / np.sqrt(v)

    def sigmoid(self, x: Any) -> Any:
        return self.divide(F(1.0), F(1.0) + self.exp(-x))


def _rowsq(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    x = o["x"].astype(np.float64 if stage.attr("acc") == "fp64" else F)
    column = np.zeros_like(x[:, 0])
    for c in range(x.shape[1]):
        column = column + x[:, c] * x[:, c]
    mean = (tree(column) / x.dtype.type(x.shape[1] * x.shape[2])).astype(F)
    return {"mixes_scaled": o["mixes"] * f.inverse_root(mean + F(stage.attr("eps")))[:, None]}


def _project(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    x, rows = o["x"], o["fn"].reshape(-1, *o["x"].shape[1:])
    mixes = np.zeros((len(x), len(rows)), F)
    for r, row in enumerate(rows):
        column = np.zeros_like(x[:, 0])
        for c in range(x.shape[1]):
            column = fma(x[:, c], row[c], column)
        mixes[:, r] = tree(column)
    return {"mixes": mixes}


def _gates(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    m, scale, base = o["mixes_scaled"], o["scale"], o["base"]
    n = next(k for k in range(1, 17) if (2 + k) * k == m.shape[1])
    group = np.repeat(scale, [n, n, n * n])
    logit = fma(m, group, base)
    gate = f.sigmoid(logit[:, : 2 * n])
    pre = gate[:, :n] + F(stage.attr("pre_eps"))
    return {"pre": pre, "post": F(stage.attr("post_mult")) * gate[:, n:], "logits": logit[:, 2 * n :]}


def _head_gates(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    logit = fma(o["mixes_scaled"], o["scale"][0], o["base"])
    return {"pre": f.sigmoid(logit) + F(stage.attr("pre_eps"))}


def _sinkhorn(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    n = round(o["logits"].shape[1] ** 0.5)
    eps = F(stage.attr("eps"))
    c = o["logits"].reshape(-1, n, n)
    c = f.exp(c - c.max(axis=2, keepdims=True))
    c = f.divide(c, tree(c)[..., None]) + eps
    for step in range(2 * stage.attr("iters") - 1):
        if step % 2 == 0:
            c = f.divide(c, (tree(c.transpose(0, 2, 1)) + eps)[:, None, :])
        else:
            c = f.divide(c, (tree(c) + eps)[:, :, None])
    return {"comb": c, "iterations": np.full(len(c), stage.attr("iters"), np.int32)}


def _collapse(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    x, pre = o["x"], o["pre"]
    y = pre[:, 0, None] * x[:, 0]
    for c in range(1, x.shape[1]):
        y = fma(pre[:, c, None], x[:, c], y)
    return {"y": y}


def _norm(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    y = o["y"]
    mean = tree(y * y) / F(y.shape[1])
    z = y * f.inverse_root(mean + F(stage.attr("eps")))[:, None]
    return {"z": z * o["weight"] if "weight" in o else z}


def _quant(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    z, group = o["z"], stage.attr("group")
    largest = F(127.0 if stage.attr("scheme") == "q8" else 448.0)
    q, scales = [], []
    for start in range(0, z.shape[1], group):
        part = z[:, start : start + group]
        d = f.divide(np.abs(part).max(axis=1), np.full(len(z), largest))
        if stage.attr("pow2"):
            mantissa, exponent = np.frexp(d)
            d = np.where(d > 0, np.ldexp(F(1), exponent - (mantissa == 0.5)), d)
        inverse = np.where(d == 0, F(0), f.divide(np.full(len(z), F(1)), d))
        scaled = part * inverse[:, None]
        if stage.attr("scheme") == "q8":
            q.append(np.nan_to_num(np.rint(scaled)).astype(np.int8))
        else:
            q.append(np.clip(scaled, -448, 448).astype(ml_dtypes.float8_e4m3fn))
        scales.append(d)
    return {"q": np.concatenate(q, axis=1), "q_scale": np.stack(scales, axis=1)}


def _post(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    x, branch, post, comb = o["x"], o["f"], o["post"], o["comb"]
    x_next = np.empty_like(x)
    for k in range(x.shape[1]):
        total = post[:, k, None] * branch
        for j in range(x.shape[1]):
            total = fma(comb[:, j, k, None], x[:, j], total)
        x_next[:, k] = total
    return {"x_next": x_next}


def _mean(stage: Stage, o: dict[str, Any], f: Functions) -> dict[str, Any]:
    x = o["x"]
    total = x[:, 0]
    for c in range(1, x.shape[1]):
        total = total + x[:, c]
    return {"y": f.divide(total, np.full_like(total, x.shape[1]))}


_STAGES: dict[str, Callable[[Stage, dict[str, Any], Functions], dict[str, Any]]] = {
    "project": _project,
    "rowsq": _rowsq,
    "gates": _gates,
    "head_gates": _head_gates,
    "sinkhorn": _sinkhorn,
    "collapse": _collapse,
    "norm": _norm,
    "quant": _quant,
    "post": _post,
    "mean": _mean,
}


def run32(
    program: Program,
    inputs: Mapping[str, Any],
    branches: Mapping[str, Callable[[Any], Any]] | None = None,
    seed: int = 0,
) -> dict[str, Any]:
    """Every tensor of a Program in its dtype; branches take and return float32, by kind."""
    f = Functions(program.arithmetic.functions, seed)
    values: dict[str, Any] = {name: np.asarray(array) for name, array in inputs.items()}
    for stage in program.stages:
        o = {slot: values[name].astype(F) for slot, name in stage.operands}
        with np.errstate(all="ignore"):
            if stage.kind == "expand":
                made = {"x": np.repeat(o["e"][:, None], program.dim("n"), axis=1)}
            elif branches and stage.kind in branches:
                made = {slot: branches[stage.kind](*o.values()) for slot, _ in stage.results}
            else:
                made = _STAGES[stage.kind](stage, o, f)
            for slot, name in stage.results:
                dtype = program.tensor(name).dtype
                values[name] = made[slot].astype(STORED[dtype]) if dtype in STORED else made[slot]
    return values
