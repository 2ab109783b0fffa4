"""Error of every tensor of an emission against the float64 reference, derived from its arithmetic.

This is a running error analysis, element by element. Each stage adds the roundings of its own operations
and carries the errors of its operands on, to first order, with absolute values taken, so that a bound holds
for every schedule of the Program and grows where the problem is badly conditioned (comb at wide logits) and
nowhere else. Nothing is tuned: the constants below are those of IEEE 754 and of the CUDA C++ programming
guide.

    U = 2^-24           one rounding in fp32, relative
    bf16, fp16          a tensor is rounded once, where it is produced: what value +- error rounds to
    sums                U |partial sum| for each addition: streams in order, columns adjacent pairs first;
                        of positive numbers, ceil(log2 N) U relative
    ieee                exp within 1.1 ulp (2.2 U), division and square root correctly rounded (U each)
    fast                exp by ex2.approx: 2^-22 and 2 U |argument|; division 4 U; rsqrt.approx 2^-22.9
    both                tanh within 2 ulp, and what its exponential and division add
    FLOOR = 2^-125      absolute, a stage: underflow and flushed subnormals
    SLACK = 1.01        second-order terms, except in comb, which has a factor of its own

comb: see `mhcgen.error_combs`.

Streams are [T, n, H] throughout, also where a Program stores them stream-last.
An opaque stage (branch, engram, tap) is taken to have given emission and reference the same array: hand the
reference a function that returns what the emission's branch returned. Streams whose mean square overflows
fp32 (beyond about 1e19) are outside the model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.error_combs import FLOOR, FUNCTIONS, Array, U, comb_error, depth
from mhcgen.ir import Program, Stage
from mhcgen.reference import evaluate, round_to, turned
from mhcgen.reference_each import root_mean_square, sigmoid

SLACK = 1.01

#: An exact 0 of the reference with an error below this is a sum of exact zeros: underflow did not happen.
_ONLY_FLOORS = 2.0**-100

#: Kinds whose results are not rounded anew.
_COPIES = ("expand", "first", "branch", "engram", "tap")


class ErrorModel:
    """Error bounds of every tensor of a Program, computed on demand and once.

    Args:
        program: the unfused Program.
        inputs: what both sides were given.
        values: `reference.run(..., all_values=True)` of those inputs.
        rounded: whether the reference ran with `round_values=True`. A 16-bit value must then be the same,
            but where its exact value is so near a tie that the two sides may round to different neighbours.

    Raises:
        ValueError: a value that is needed is missing.
    """

    def __init__(
        self,
        program: Program,
        inputs: Mapping[str, npt.ArrayLike],
        values: Mapping[str, Array],
        *,
        rounded: bool = False,
    ) -> None:
        self.program, self.rounded = program, rounded
        self.functions = FUNCTIONS[program.arithmetic.functions]
        self._inputs, self._values = inputs, values
        self._errors: dict[str, Array] = {}

    def value(self, name: str) -> Array:
        """The reference's value of a tensor, streams as [T, n, H]."""
        if name in self._values:
            return self.turned(name, self._values[name])
        if name in self._inputs:
            return self.turned(name, np.asarray(self._inputs[name]).astype(np.float64))
        raise ValueError(f"the bound needs the reference's {name}: run it with all_values=True")

    def turned(self, name: str, array: Array) -> Array:
        """Stored to [T, n, H] and back: swaps the last two axes of a stream-last tensor."""
        return turned(self.program.tensor(name), array)

    def rows(self, name: str, array: Array | None = None) -> Array:
        """A value, or an array of its shape, with a first axis of 1 where a tensor is the same for all tokens."""
        found = self.value(name) if array is None else array
        return found if self.program.tensor(name).shape[0] == "T" else found[None]

    def tokens(self) -> int:
        """T, of the first value that has it."""
        return next(len(self.value(t.name)) for t in self.program.tensors if t.shape[0] == "T")

    def error(self, name: str) -> Array:
        """Bound of |emitted - reference| of a tensor, by element; 0 where the reference is not finite."""
        if name not in self._errors:
            writer = self.program.writers.get(name)
            if writer is None:
                self._errors[name] = np.broadcast_to(np.float64(0.0), self.value(name).shape)
            else:
                stage = self.program.stage(writer)
                with np.errstate(all="ignore"):
                    found = _STAGES[stage.kind](self, stage)
                    for slot, tensor in stage.results:
                        self._errors[tensor] = self._finish(stage, slot, tensor, found[slot])
        return self._errors[name]

    def _finish(self, stage: Stage, slot: str, name: str, error: Array) -> Array:
        """Add what storing adds; infinities and NaN have a place, not an error."""
        value, dtype = self.value(name), self.program.tensor(name).dtype
        if stage.kind not in _COPIES:
            error = SLACK * error
            if dtype in ("bf16", "fp16"):
                exact = value
                if self.rounded:
                    operands = {slot: self.value(operand) for slot, operand in stage.operands}
                    exact = np.asarray(
                        evaluate(stage, operands, {**dict(self.program.dims), "T": self.tokens()})[slot]
                    )
                ends = [(end, round_to(end, dtype)) for end in (exact - error, exact + error)]
                # Past the largest number the end itself stays, so that the limit stays finite; the factor
                # keeps value +- limit from falling short of an end by the last bit of float64.
                away = [np.abs(np.where(np.isinf(r), end, r) - value) for end, r in ends]
                error = np.maximum(*away) * (1.0 + 2.0**-40)
            error = np.where((value == 0.0) & (error < _ONLY_FLOORS), 0.0, error)
        # A NaN beside a finite value is given by no formula below; should one do so, nothing is allowed.
        return np.where(np.isfinite(value), np.nan_to_num(error, nan=0.0, posinf=np.inf), 0.0)


# --- stages: error of each result slot, from values and errors of operands --------------------------------


def _root(model: ErrorModel, value: Array, error: Array, stage: Stage, streams: int) -> tuple[Array, Array]:
    """What each token of v [T, ...] is divided by, and a bound of its relative error.

    The sum rounds each square and each addition (streams in order, then the column tree) in its
    accumulator; the mean is narrowed or divided (U). In the root, eps is an fp32 number (U of it) and is added
    (U), and the root is rounded; outside it, likewise with the root first.
    """
    eps, place = float(stage.attr("eps")), stage.option("eps_place", "in")
    count = value[0].size if len(value) else 1
    unit = U if stage.attr("acc") == "fp32" else 2.0**-53
    mean = np.mean(value * value, axis=tuple(range(1, value.ndim)))
    carried = np.mean((2 * np.abs(value) + error) * error, axis=tuple(range(1, value.ndim)))
    summed = mean * (unit * (streams + depth(value.shape[-1]) + 1) + U) + FLOOR
    root = root_mean_square(mean, eps, place, count)
    if place == "in":
        relative = (carried + summed + U * eps) / (mean + eps) + U
        return root, relative / 2 + relative * relative + U
    moved = carried + summed
    absolute = np.minimum(moved / np.sqrt(mean), np.sqrt(moved)) + U * np.sqrt(mean)
    return root, (absolute + U * (root - np.sqrt(mean))) / root + U


def _inverse_rms(model: ErrorModel, value: Array, error: Array, stage: Stage, streams: int) -> tuple[Array, Array]:
    """1 over the root mean square of each token, and a bound of its relative error."""
    root, relative = _root(model, value, error, stage, streams)
    divides = stage.option("eps_place", "in") != "in"
    # rsqrt.approx takes the place of root and division; elsewhere both are done.
    return 1.0 / root, relative + (U + model.functions.divide if divides else model.functions.root)


def _expand(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {"x": np.repeat(model.error(stage.operand("e"))[:, None, :], model.program.dim("n"), axis=1)}


def _project(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    """U times every partial sum of the dot product, in its order, and the streams' error weighed by |fn|."""
    x, fn = model.value(stage.operand("x")), model.value(stage.operand("fn"))
    n, hidden = x.shape[1:]
    carried = model.error(stage.operand("x")).reshape(len(x), n * hidden) @ np.abs(fn).T
    partials = np.zeros_like(carried)
    for token in range(len(x)):
        sums = np.cumsum(fn.reshape(-1, n, hidden) * x[token], axis=1)
        partials[token] = np.abs(sums).sum(axis=(1, 2))
        level = sums[:, -1]
        while level.shape[1] > 1:
            even = level.shape[1] // 2 * 2
            pairs = level[:, 0:even:2] + level[:, 1:even:2]
            partials[token] += np.abs(pairs).sum(axis=1)
            level = np.concatenate([pairs, level[:, even:]], axis=1)
    return {"mixes": U * partials + carried + n * hidden * FLOOR}


def _project_streams(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    """Each mix is a dot product over the columns of one stream."""
    x, fn = model.value(stage.operand("x")), model.value(stage.operand("fn"))
    tokens, n, hidden = x.shape
    level = x[:, :, None, :] * fn[None, None]
    partials = np.abs(level).sum(axis=3)
    while level.shape[3] > 1:
        even = level.shape[3] // 2 * 2
        pairs = level[..., 0:even:2] + level[..., 1:even:2]
        partials += np.abs(pairs).sum(axis=3)
        level = np.concatenate([pairs, level[..., even:]], axis=3)
    found = U * partials + model.error(stage.operand("x")) @ np.abs(fn).T + hidden * FLOOR
    parts = (found[:, :, 0], found[:, :, 1], found[:, :, 2:].reshape(tokens, n * n))
    return {"mixes": np.concatenate(parts, axis=1)}


def _rowsq_streams(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, mixes = model.value(stage.operand("x")), stage.operand("mixes")
    error = model.error(stage.operand("x"))
    tokens, n, hidden = x.shape
    flat, flat_error = x.reshape(tokens * n, hidden), error.reshape(tokens * n, hidden)
    if stage.option("form", "rsqrt") == "divide":
        root, relative = _root(model, flat, flat_error, stage, 1)
        inverse, relative = 1.0 / root, relative + model.functions.divide
    else:
        inverse, relative = _inverse_rms(model, flat, flat_error, stage, 1)

    def spread(array: Array) -> Array:
        by = array.reshape(tokens, n)
        return np.concatenate([by, by, np.repeat(by, n, axis=1)], axis=1)

    scaled = np.abs(model.value(mixes)) * (spread(relative) + U) + model.error(mixes) * (1 + spread(relative))
    return {"mixes_scaled": scaled * spread(inverse) + FLOOR}


def _norm_streams(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    """Two products and 1 + weight (U each) beside the inverse RMS of each stream."""
    x, error = model.value(stage.operand("x")), model.error(stage.operand("x"))
    tokens, n, hidden = x.shape
    flat = (tokens * n, hidden)
    inverse, relative = (
        array.reshape(tokens, n, 1) for array in _inverse_rms(model, x.reshape(flat), error.reshape(flat), stage, 1)
    )
    factor = np.abs(1.0 + model.value(stage.operand("weight")).reshape(n, hidden))
    normed = (np.abs(x) * (relative + 3 * U) + error * (1 + relative + 3 * U)) * inverse * factor
    return {"x_normed": normed + FLOOR * (1 + factor)}


def _rowsq(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, mixes = model.value(stage.operand("x")), stage.operand("mixes")
    error = model.error(stage.operand("x"))
    if stage.option("form", "rsqrt") == "divide":
        root, relative = _root(model, x, error, stage, x.shape[1])
        inverse, relative = 1.0 / root, relative + model.functions.divide
    else:
        inverse, relative = _inverse_rms(model, x, error, stage, x.shape[1])
    scaled = np.abs(model.value(mixes)) * (relative + U)[:, None] + model.error(mixes) * (1 + relative)[:, None]
    return {"mixes_scaled": scaled * inverse[:, None] + FLOOR}


def _sigmoid_error(model: ErrorModel, logit: Array, error: Array) -> Array:
    """Absolute error of 1/(1 + exp(-l)): exp's error and the logit's count for the share 1 - sigmoid."""
    functions, s = model.functions, sigmoid(logit)
    exponential = functions.exp + functions.exp_argument * np.abs(logit) + np.expm1(error)
    inner = np.where(s < 1.0, (1.0 - s) * exponential, 0.0)
    return s * (np.where(s > 0.0, inner, 0.0) + U + functions.divide) + FLOOR


def _logit(model: ErrorModel, stage: Stage, part: slice, group: int) -> tuple[Array, Array]:
    """Logits fma(mixes_scaled, scale, base) of a range of columns, and their error."""
    name, scale = stage.operand("mixes_scaled"), model.value(stage.operand("scale"))[group]
    value = model.value(name)[:, part] * scale + model.value(stage.operand("base"))[part]
    error = model.error(name)[:, part] * abs(scale) + U * np.abs(value) + FLOOR
    # An infinite logit is infinite on both sides.
    return value, np.where(np.isfinite(value), error, 0.0)


def _tanh_error(model: ErrorModel, x: Array, error: Array) -> Array:
    """Absolute error of tanh: 2 ulp; where it is 1 - 2 / (exp(2x) + 1), that division and exponential too."""
    functions, t = model.functions, np.tanh(x)
    slope = 1.0 - t * t
    far = slope / 2 * (functions.exp + functions.exp_argument * 2 * np.abs(x)) + (1 - np.abs(t)) * functions.divide
    return slope * error * (1 + error) + 4 * U * np.abs(t) + np.where(np.abs(x) > 0.6, far, 0.0) + FLOOR


def _act(model: ErrorModel, act: str, x: Array, error: Array) -> tuple[Array, Array]:
    """Value of an activation, and its error."""
    if act == "tanh":
        return np.tanh(x), _tanh_error(model, x, error)
    return sigmoid(x), _sigmoid_error(model, x, error)


def _gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    n, eps, mult = model.program.dim("n"), stage.attr("pre_eps"), stage.attr("post_mult")
    acts = [stage.option(key, "sigmoid") for key in ("pre_act", "post_act", "pre_act")]
    values, errors = [], []
    for group, (part, act) in enumerate(zip((slice(0, n), slice(n, 2 * n), slice(2 * n, None)), acts, strict=True)):
        if stage.option("form", "affine") == "scaled":
            value, error = _scaled(model, stage, part, group, act)
        else:
            value, error = _logit(model, stage, part, group)
            if group < 2:
                value, error = _act(model, act, value, error)
        values.append(value)
        errors.append(error)
    return {
        "pre": errors[0] + U * (np.abs(values[0]) + 2 * eps),
        "post": mult * (errors[1] + U * np.abs(values[1])),
        "logits": errors[2],
    }


def _static_gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    n, base = model.program.dim("n"), model.value(stage.operand("base"))
    exact = np.zeros(n)
    pre, pre_error = _act(model, stage.option("pre_act", "sigmoid"), base[:n], exact)
    post, post_error = _act(model, stage.option("post_act", "sigmoid"), base[n : 2 * n], exact)
    return {
        "pre": pre_error + U * (np.abs(pre) + 2 * stage.attr("pre_eps")),
        "post": stage.attr("post_mult") * (post_error + U * np.abs(post)),
        "logits": np.zeros(len(base) - 2 * n),
    }


def _scaled(model: ErrorModel, stage: Stage, part: slice, group: int, act: str) -> tuple[Array, Array]:
    """fma(act(mixes), scale, base) of a range of columns, and its error."""
    name, scale = stage.operand("mixes_scaled"), model.value(stage.operand("scale"))[group]
    acted, error = _act(model, act, model.value(name)[:, part], model.error(name)[:, part])
    value = acted * scale + model.value(stage.operand("base"))[part]
    return value, np.where(np.isfinite(value), error * abs(scale) + U * np.abs(value) + FLOOR, 0.0)


def _low_rank_gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    """silu(m) = m sigmoid(m) of m = mixes / n, which is rounded once; post as any gate."""
    n, rank, mixes = model.program.dim("n"), model.program.dim("D"), stage.operand("mixes")
    value = model.value(mixes) / n
    error = np.where(np.isfinite(value), model.error(mixes) / n + U * np.abs(value) + FLOOR, 0.0)
    gate, gate_error = sigmoid(value), _sigmoid_error(model, value, error)
    silu = np.abs(value) * gate_error + error * (gate + gate_error) + U * np.abs(value) * gate + FLOOR
    post = stage.option("post_mult", 1.0) * (gate_error + U * gate)
    return {"bottleneck": silu[:, :rank], "post": post[:, rank:]}


def _gated_mean(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    """Products of a gate logit are added in order; the sum over streams and its division as in a mean."""
    x, low, up = (model.value(stage.operand(slot)) for slot in ("x", "bottleneck", "up"))
    x_error, low_error = model.error(stage.operand("x")), model.error(stage.operand("bottleneck"))
    tokens, n, hidden = x.shape
    partials = np.empty((tokens, n * hidden))
    for token in range(tokens):
        sums = up * low[token, :, None]
        partials[token] = np.abs(np.cumsum(sums, axis=0, out=sums)).sum(axis=0)
    logit_error = U * partials + low_error @ np.abs(up) + len(up) * FLOOR
    logit = low @ up
    logit_error = np.where(np.isfinite(logit), logit_error, 0.0)
    gate, gate_error = (
        array.reshape(x.shape) for array in (sigmoid(logit), _sigmoid_error(model, logit, logit_error))
    )
    sums = np.cumsum(gate * x, axis=1)
    carried = np.abs(x) * gate_error + x_error * (gate + gate_error)
    rounded = U * (np.abs(sums).sum(axis=1) + np.abs(sums[:, -1]))
    return {"y": (rounded + carried.sum(axis=1)) / n + 2 * FLOOR}


def _head_gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    pre, error = _logit(model, stage, slice(None), 0)
    return {"pre": _sigmoid_error(model, pre, error) + U * (sigmoid(pre) + 2 * stage.attr("pre_eps"))}


def _comb(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    name, n = dict(stage.operands).get("logits"), model.program.dim("n")
    value = model.value(name) if name else np.zeros((model.tokens(), 0))
    error = model.error(name) if name else value
    flat, errors = (a[None] if a.ndim == 1 else a for a in (value, error))
    comb = comb_error(stage, flat, errors, n, model.functions)
    return {"comb": comb.reshape(*value.shape[:-1], n, n), "iterations": np.zeros(len(flat))}


def _weighted(model: ErrorModel, terms: list[tuple[str, Any, str, Any]]) -> Array:
    """Error of a chain of fused multiply-adds: U |partial sum| each, and the errors of weights and values.

    Args:
        terms: (name of weights, index, name of values, index) in the order of the chain; weights [T, 1].
    """
    total, partial = np.float64(FLOOR), np.float64(0.0)
    for weights, at, values, where in terms:
        w, v = model.rows(weights)[at], model.value(values)[where]
        w_error, v_error = model.rows(weights, model.error(weights))[at], model.error(values)[where]
        partial = partial + w * v
        total = total + U * np.abs(partial) + np.abs(w) * v_error + w_error * (np.abs(v) + v_error)
    return np.asarray(total)


def _collapse(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, pre = stage.operand("x"), stage.operand("pre")
    streams = range(model.program.dim("n"))
    return {"y": _weighted(model, [(pre, np.s_[:, c, None], x, np.s_[:, c]) for c in streams])}


def _norm(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    y, error = model.value(stage.operand("y")), model.error(stage.operand("y"))
    inverse, relative = _inverse_rms(model, y, error, stage, 1)
    z = (np.abs(y) * (relative + 2 * U)[:, None] + error * (1 + relative)[:, None]) * inverse[:, None]
    weight = dict(stage.operands).get("weight")
    return {"z": (z if weight is None else z * np.abs(model.value(weight))) + FLOOR}


def raw_scale(model: ErrorModel, stage: Stage) -> tuple[Array, Array]:
    """amax of each group over the largest quantised number, and its error."""
    z, error = np.abs(model.value(stage.operand("z"))), model.error(stage.operand("z"))
    largest = 127.0 if stage.attr("scheme") == "q8" else 448.0
    starts = np.arange(0, z.shape[1], stage.attr("group"))
    low, scale, high = (np.maximum.reduceat(v, starts, axis=1) / largest for v in (z - error, z, z + error))
    carried = np.maximum(high - scale, scale - low)
    return scale, np.where(np.isfinite(scale), carried + (model.functions.divide + U) * scale, 0.0)


def _quant(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {"q_scale": raw_scale(model, stage)[1], "q": np.zeros_like(model.value(stage.operand("z")))}


def _post(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, f, post, comb = (stage.operand(slot) for slot in ("x", "f", "post", "comb"))
    streams = range(model.program.dim("n"))
    total = np.empty(model.value(x).shape)
    for to in streams:
        terms: list[tuple[str, Any, str, Any]] = [(post, np.s_[:, to, None], f, np.s_[:])]
        terms += [(comb, np.s_[:, j, to, None], x, np.s_[:, j]) for j in streams]
        total[:, to] = _weighted(model, terms)
    return {"x_next": total}


def _mean(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, error = model.value(stage.operand("x")), model.error(stage.operand("x"))
    sums, n = np.cumsum(x, axis=1), x.shape[1]
    rounded = U * np.abs(sums[:, 1:]).sum(axis=1) + model.functions.divide * np.abs(sums[:, -1])
    return {"y": (rounded + error.sum(axis=1)) / n + FLOOR}


def _sum(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, error = model.value(stage.operand("x")), model.error(stage.operand("x"))
    return {"y": U * np.abs(np.cumsum(x, axis=1)[:, 1:]).sum(axis=1) + error.sum(axis=1) + FLOOR}


def _first(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {"y": model.error(stage.operand("x"))[:, 0]}


def _opaque(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {slot: np.zeros(model.value(name).shape) for slot, name in stage.results}


_STAGES: dict[str, Callable[[ErrorModel, Stage], dict[str, Array]]] = {
    "expand": _expand,
    "project": _project,
    "rowsq": _rowsq,
    "project_streams": _project_streams,
    "rowsq_streams": _rowsq_streams,
    "norm_streams": _norm_streams,
    "low_rank_gates": _low_rank_gates,
    "head_low_rank_gates": _low_rank_gates,
    "gated_mean": _gated_mean,
    "gates": _gates,
    "head_gates": _head_gates,
    "static_gates": _static_gates,
    "sinkhorn": _comb,
    "comb": _comb,
    "collapse": _collapse,
    "norm": _norm,
    "quant": _quant,
    "post": _post,
    "mean": _mean,
    "sum": _sum,
    "first": _first,
    "branch": _opaque,
    "engram": _opaque,
    "tap": _opaque,
}
