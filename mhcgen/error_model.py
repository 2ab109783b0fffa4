"""Error of every tensor of an emission against the float64 reference, derived from its arithmetic.

This is a running error analysis, element by element. Each stage adds the roundings of its own operations
and carries the errors of its operands on, to first order, with absolute values taken, so that a bound holds
for every schedule of the Program and grows where the problem is badly conditioned (comb at wide logits) and
nowhere else. Nothing is tuned: the constants below are those of IEEE 754 and of the CUDA C++ programming
guide.

    U = 2^-24           one rounding in fp32, relative
    2^-9, 2^-12         one rounding to bf16, fp16, relative; added where a tensor of that dtype is produced
    sums                adjacent pairs first: ceil(log2 N) roundings deep; streams in order: one rounding each
    ieee                exp within 1.1 ulp (2.2 U), division and square root correctly rounded (U each)
    fast                exp by ex2.approx: 2^-22 and 2 U |argument|; division 4 U; rsqrt.approx 2^-22.9
    FLOOR = 2^-125      absolute, a stage: underflow and flushed subnormals
    SLACK = 1.01        second-order terms, except in comb, which has a factor of its own

comb: the error of each local operation of the Sinkhorn iteration, and of its logits, times the absolute
value of the derivative of the final matrix by that operation's result (a reverse sweep in float64).
Iterations contract errors, so this is far below the sum of local errors times a condition number, and exact
about slow convergence.

An opaque stage (branch, engram, tap) is taken to have given emission and reference the same array: hand the
reference a function that returns what the emission's branch returned.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mhcgen.ir import Program, Stage
from mhcgen.reference import sigmoid

Array = npt.NDArray[np.float64]

U = 2.0**-24
FLOOR = 2.0**-125
SLACK = 1.01

#: dtype -> (relative rounding error, absolute one among subnormals, largest finite number)
STORED: dict[str, tuple[float, float, float]] = {
    "fp32": (0.0, 0.0, float(np.finfo(np.float32).max)),
    "bf16": (2.0**-9, 2.0**-134, (2.0 - 2.0**-7) * 2.0**127),
    "fp16": (2.0**-12, 2.0**-25, 65504.0),
}

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
        rounded: whether the reference ran with `round_values=True`. A 16-bit value may then differ by a
        whole step
            where both sides round to different neighbours.

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
                        self._errors[tensor] = self._finish(tensor, found[slot], stage.kind)
        return self._errors[name]

    def _finish(self, name: str, error: Array, kind: str) -> Array:
        """Add what storing adds; infinities and NaN have a place, not an error."""
        value = self.value(name)
        if kind not in _COPIES:
            relative, absolute, _ = STORED.get(self.program.tensor(name).dtype, (0.0, 0.0, 0.0))
            stored = np.maximum(relative * np.abs(value), absolute)
            error = SLACK * (error + (2 * stored if self.rounded else stored))
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
    x, fn = model.value(stage.operand("x")), np.abs(model.value(stage.operand("fn")))
    n, hidden = x.shape[1:]
    roundings = (n + _depth(hidden)) * U
    weighed = roundings * np.abs(x) + (1 + roundings) * model.error(stage.operand("x"))
    return {"mixes": weighed.reshape(len(x), n * hidden) @ fn.T + FLOOR}


def _rowsq(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, mixes = model.value(stage.operand("x")), stage.operand("mixes")
    inverse, relative = _inverse_rms(
        model, x, model.error(stage.operand("x")), stage.attr("eps"), stage.attr("acc"), x.shape[1]
    )
    scaled = np.abs(model.value(mixes)) * (relative + U)[:, None] + model.error(mixes)
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
        comb[part] = comb_error(
            logits[part], errors[part], stage.attr("iters"), stage.attr("eps"), model.functions
        )
    return {"comb": comb, "iterations": np.zeros(len(logits))}


def comb_error(logits: Array, errors: Array, iters: int, eps: float, functions: _Functions) -> Array:
    """Bound of |emitted - reference| of comb [T, n, n].

    Forward once to have the matrix before each division; then backward, with D[t, out, from, to] the
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
    error = total.reshape(tokens, n, n)
    # First order in relative errors r leaves terms of order r^2; r is 1e-6 at ordinary logits.
    relative = np.max(np.where(a > FLOOR, error / a, 0.0), axis=(1, 2), keepdims=True)
    return error * (1.0 + np.minimum(relative, 1.0))


def _collapse(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, pre = np.abs(model.value(stage.operand("x"))), model.value(stage.operand("pre"))
    x_error, pre_error = model.error(stage.operand("x")), model.error(stage.operand("pre"))
    n = x.shape[1]
    total = np.full((x.shape[0], x.shape[2]), FLOOR)
    for c in range(n):
        # Stream c is in n - c of the n roundings.
        own = np.abs(pre[:, c, None]) * (x_error[:, c] + (n - c) * U * x[:, c])
        total += own + pre_error[:, c, None] * (x[:, c] + x_error[:, c])
    return {"y": total}


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
    scale = np.maximum.reduceat(z, starts, axis=1) / largest
    carried = np.maximum.reduceat(np.broadcast_to(error, z.shape), starts, axis=1) / largest
    return scale, np.where(np.isfinite(scale), carried + (model.functions.divide + U) * scale, 0.0)


def _quant(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    return {"q_scale": raw_scale(model, stage)[1], "q": np.zeros_like(model.value(stage.operand("z")))}


def _post(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, f, post, comb = (np.abs(model.value(stage.operand(slot))) for slot in ("x", "f", "post", "comb"))
    e_x, e_f, e_post, e_comb = (model.error(stage.operand(slot)) for slot in ("x", "f", "post", "comb"))
    n = x.shape[1]
    total = np.full(x.shape, FLOOR)
    for to in range(n):
        # post f is in all n + 1 roundings, stream j in n - j of them.
        total[:, to] += post[:, to, None] * (e_f + (n + 1) * U * f) + e_post[:, to, None] * (f + e_f)
        for j in range(n):
            total[:, to] += comb[:, j, to, None] * (e_x[:, j] + (n - j) * U * x[:, j])
            total[:, to] += e_comb[:, j, to, None] * (x[:, j] + e_x[:, j])
    return {"x_next": total}


def _mean(model: ErrorModel, stage: Stage) -> dict[str, Array]:
    x, error = np.abs(model.value(stage.operand("x"))), model.error(stage.operand("x"))
    roundings = (x.shape[1] - 1) * U + model.functions.divide
    return {"y": np.mean(x * roundings + error, axis=1) + FLOOR}


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
