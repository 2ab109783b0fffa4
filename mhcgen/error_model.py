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
    FLOOR = 2^-125      absolute, a stage: underflow and flushed subnormals
    SLACK = 1.01        second-order terms, except in comb, which has a factor of its own

comb: the error of each local operation of the Sinkhorn iteration, and of its logits, times the absolute
value of the derivative of the final matrix by that operation's result (a reverse sweep in float64).
Iterations contract errors, so this stays near a few U where they converge, and grows only where they do not.

An opaque stage (branch, engram, tap) is taken to have given emission and reference the same array: hand the
reference a function that returns what the emission's branch returned. Streams whose mean square overflows
fp32 (beyond about 1e19) are outside the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.ir import Program, Stage
from mhcgen.reference import evaluate, round_to, sigmoid

Array = npt.NDArray[np.float64]

U = 2.0**-24
FLOOR = 2.0**-125
SLACK = 1.01

#: An exact 0 of the reference with an error below this is a sum of exact zeros: underflow did not happen.
_ONLY_FLOORS = 2.0**-100

#: Kinds whose results are not rounded anew.
_COPIES = ("expand", "branch", "engram", "tap")

#: Elements of the derivative held at once in the comb analysis (8 bytes each).
_CHUNK = 1 << 21


@dataclass(frozen=True)
class _Functions:
    """Relative errors of a function set: exp (and per unit of argument), division, 1/sqrt."""

    exp: float
    exp_argument: float
    divide: float
    root: float


_FUNCTIONS = {
    "ieee": _Functions(exp=2.2 * U, exp_argument=0.0, divide=U, root=2 * U),
    "fast": _Functions(exp=2.0**-22, exp_argument=2 * U, divide=4 * U, root=2.0**-22.9),
}


def _depth(count: int) -> int:
    """Roundings on the longest path of a sum that joins adjacent pairs first."""
    return math.ceil(math.log2(count)) if count > 1 else 0


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
        self.functions = _FUNCTIONS[program.arithmetic.functions]
        self._inputs, self._values = inputs, values
        self._errors: dict[str, Array] = {}

    def value(self, name: str) -> Array:
        """The reference's value of a tensor."""
        if name in self._values:
            return self._values[name]
        if name in self._inputs:
            return np.asarray(self._inputs[name]).astype(np.float64)
        raise ValueError(f"the bound needs the reference's {name}: run it with all_values=True")

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
                    exact = np.asarray(evaluate(stage, operands, dict(self.program.dims))[slot])
                ends = [(end, round_to(end, dtype)) for end in (exact - error, exact + error)]
                # Past the largest number the end itself stays, so that the limit stays finite; the factor
                # keeps value +- limit from falling short of an end by the last bit of float64.
                away = [np.abs(np.where(np.isinf(r), end, r) - value) for end, r in ends]
                error = np.maximum(*away) * (1.0 + 2.0**-40)
            error = np.where((value == 0.0) & (error < _ONLY_FLOORS), 0.0, error)
        # A NaN beside a finite value is given by no formula below; should one do so, nothing is allowed.
        return np.where(np.isfinite(value), np.nan_to_num(error, nan=0.0, posinf=np.inf), 0.0)


# --- stages: error of each result slot, from values and errors of operands --------------------------------


def _inverse_rms(
    model: ErrorModel, value: Array, error: Array, eps: float, acc: str, streams: int
) -> tuple[Array, Array]:
    """1/sqrt(mean(v^2) + eps) of each token of v [T, ...] and a bound of its relative error.

    The sum rounds each square and each addition (streams in order, then the column tree) in its
    accumulator; the mean is narrowed or divided (U), eps is an fp32 number (U of it) and is added (U), then
    the root.
    """
    axes = tuple(range(1, value.ndim))
    unit = U if acc == "fp32" else 2.0**-53
    mean = np.mean(value * value, axis=axes)
    total = mean + eps
    carried = np.mean((2 * np.abs(value) + error) * error, axis=axes)
    summed = mean * (unit * (streams + _depth(value.shape[-1]) + 1) + U) + FLOOR
    relative = (carried + summed + U * eps) / total + U
    return 1.0 / np.sqrt(total), relative / 2 + relative * relative + model.functions.root


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


def _rowsq(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, mixes = model.value(stage.operand("x")), stage.operand("mixes")
    inverse, relative = _inverse_rms(
        model, x, model.error(stage.operand("x")), stage.attr("eps"), stage.attr("acc"), x.shape[1]
    )
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


def _gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    n, eps, mult = model.program.dim("n"), stage.attr("pre_eps"), stage.attr("post_mult")
    pre, pre_error = _logit(model, stage, slice(0, n), 0)
    post, post_error = _logit(model, stage, slice(n, 2 * n), 1)
    _, comb_error = _logit(model, stage, slice(2 * n, None), 2)
    return {
        "pre": _sigmoid_error(model, pre, pre_error) + U * (sigmoid(pre) + 2 * eps),
        "post": mult * (_sigmoid_error(model, post, post_error) + U * sigmoid(post)),
        "logits": comb_error,
    }


def _head_gates(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    pre, error = _logit(model, stage, slice(None), 0)
    return {"pre": _sigmoid_error(model, pre, error) + U * (sigmoid(pre) + 2 * stage.attr("pre_eps"))}


def _sinkhorn(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    name, n = stage.operand("logits"), model.program.dim("n")
    logits, errors = model.value(name).reshape(-1, n, n), model.error(name).reshape(-1, n, n)
    comb = np.zeros_like(logits)
    chunk = max(1, _CHUNK // n**4)
    for start in range(0, len(logits), chunk):
        part = slice(start, start + chunk)
        comb[part] = comb_error(logits[part], errors[part], stage.attr("iters"), stage.attr("eps"), model.functions)
    return {"comb": comb, "iterations": np.zeros(len(logits))}


def comb_error(logits: Array, errors: Array, iters: int, eps: float, functions: _Functions) -> Array:
    """Bound of |emitted - reference| of comb [T, n, n].

    Forward once, to have the matrix before each division; then backward, with D[t, out, from, to] the
    derivative of final element `out` by the element of the current matrix. Division of a by s = sum + eps
    gives b = a/s: b is rounded (one division an element), s is rounded (tree, + eps, fp32 eps: shared by
    its row or column, so the derivatives are added before the absolute value is taken), and D becomes (D -
    sum of D b over the line) / s.

    Args:
        logits: [T, n, n] float64.
        errors: bound of the error of each.
        iters: Sinkhorn iterations.
        eps: eps of the Sinkhorn.
        functions: the function set's errors.
    """
    tokens, n = logits.shape[:2]
    difference = logits - np.max(logits, axis=2, keepdims=True)
    p = np.exp(difference)
    p = p / np.sum(p, axis=2, keepdims=True)
    steps: list[tuple[int, Array, Array]] = []
    a = p + eps
    for axis in [1, *[2, 1] * (iters - 1)]:
        s = np.sum(a, axis=axis, keepdims=True) + eps
        a = a / s
        steps.append((axis, s, a))
    tree = _depth(n) * U
    derivative = np.broadcast_to(np.eye(n * n).reshape(1, n * n, n, n), (tokens, n * n, n, n))
    total = np.zeros((tokens, n * n))
    for axis, s, b in reversed(steps):
        weighted = derivative * b[:, None]
        line = np.sum(weighted, axis=axis + 1, keepdims=True)
        total += functions.divide * np.abs(weighted).sum(axis=(2, 3))
        total += (tree + 2 * U) * np.abs(line).sum(axis=(2, 3))
        derivative = (derivative - line) / s[:, None]
    # p + eps, and p itself: a division, the sum of its row, the exponential and its argument.
    added = U * (p + 2 * eps) + functions.divide * p + FLOOR
    total += (np.abs(derivative) * added[:, None]).sum(axis=(2, 3))
    weighted = derivative * p[:, None]
    line = np.sum(weighted, axis=3, keepdims=True)
    total += tree * np.abs(line).sum(axis=(2, 3))
    argument = np.where(p > 0, np.abs(difference), 0.0)
    exponent = functions.exp + (functions.exp_argument + U) * argument + np.where(p > 0, errors, 0.0)
    total += (np.abs(weighted - line * p[:, None]) * exponent[:, None]).sum(axis=(2, 3))
    error: Array = total.reshape(tokens, n, n)
    # First order in relative errors r leaves terms of order r^2; r is 1e-6 at ordinary logits. Logits that
    # are themselves off by d (bf16 streams under a large scale) move the derivatives by powers of exp(d): 8
    # of them cover what was tried, and no element of comb exceeds 1.
    relative = np.max(np.where(a > FLOOR, error / a, 0.0), axis=(1, 2), keepdims=True)
    moved = np.exp(8.0 * np.max(np.where(p > 0, errors, 0.0), axis=(1, 2), keepdims=True))
    bounded: Array = np.minimum(error * (1.0 + np.minimum(relative, 1.0)) * moved, 1.0)
    return bounded


def _weighted(model: ErrorModel, terms: list[tuple[str, Any, str, Any]]) -> Array:
    """Error of a chain of fused multiply-adds: U |partial sum| each, and the errors of weights and values.

    Args:
        terms: (name of weights, index, name of values, index) in the order of the chain; weights [T, 1].
    """
    total, partial = np.float64(FLOOR), np.float64(0.0)
    for weights, at, values, where in terms:
        w, v = model.value(weights)[at], model.value(values)[where]
        w_error, v_error = model.error(weights)[at], model.error(values)[where]
        partial = partial + w * v
        total = total + U * np.abs(partial) + np.abs(w) * v_error + w_error * (np.abs(v) + v_error)
    return np.asarray(total)


def _collapse(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, pre = stage.operand("x"), stage.operand("pre")
    streams = range(model.program.dim("n"))
    return {"y": _weighted(model, [(pre, np.s_[:, c, None], x, np.s_[:, c]) for c in streams])}


def _norm(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    y, error = model.value(stage.operand("y")), model.error(stage.operand("y"))
    inverse, relative = _inverse_rms(model, y, error, stage.attr("eps"), stage.attr("acc"), 1)
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


def _opaque(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {slot: np.zeros(model.value(name).shape) for slot, name in stage.results}


_STAGES: dict[str, Callable[[ErrorModel, Stage], dict[str, Array]]] = {
    "expand": _expand,
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
    "branch": _opaque,
    "engram": _opaque,
    "tap": _opaque,
}
