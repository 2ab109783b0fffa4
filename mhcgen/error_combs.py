"""Error of a mixing matrix against the float64 reference, derived from its arithmetic; part of `mhcgen.error_model`.

Iterated kinds: forward once in float64, to have the matrix of every half-step, then backward with the derivative of
each final element by what that half-step gave; every local rounding is weighed by the absolute value of its
derivative. Iterations contract errors, so this stays near a few U where they converge and grows only where they do
not. Direct maps: the derivative of the reference by each logit (central differences), and the number of roundings
that the kind states. NaN in one line of a matrix leaves the finite elements beside it their bound: what those depend
on is finite, so their derivatives by the rest are 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.combs import COMB_KINDS, DirectMap
from mhcgen.ir import Stage
from mhcgen.reference_combs import COMBS, softmax

Array = npt.NDArray[np.float64]

U = 2.0**-24
FLOOR = 2.0**-125

#: Elements of the derivative held at once (8 bytes each).
_CHUNK = 1 << 21
#: Step of the central differences: logits act on the scale of 1.
_STEP = 1e-5


@dataclass(frozen=True)
class Functions:
    """Relative errors of a function set: exp (and per unit of argument), division, 1/sqrt, log (and absolute)."""

    exp: float
    exp_argument: float
    divide: float
    root: float
    log: float
    log_absolute: float


FUNCTIONS = {
    "ieee": Functions(exp=2.2 * U, exp_argument=0.0, divide=U, root=2 * U, log=2 * U, log_absolute=0.0),
    "fast": Functions(
        exp=2.0**-22, exp_argument=2 * U, divide=4 * U, root=2.0**-22.9, log=4 * U, log_absolute=2.0**-22
    ),
}


def depth(count: int) -> int:
    """Roundings on the longest path of a sum that joins adjacent pairs first."""
    return math.ceil(math.log2(count)) if count > 1 else 0


def comb_error(stage: Stage, logits: Array, errors: Array, n: int, functions: Functions) -> Array:
    """Bound of |emitted - reference| of comb [T, n, n].

    Args:
        stage: makes the matrix.
        logits: [T, L] float64.
        errors: bound of the error of each.
        n: streams.
        functions: the function set's errors.
    """
    attrs = dict(stage.attrs)
    if stage.kind != "sinkhorn":
        return _direct_error(stage, logits, errors, n, functions)
    analyse = _log_error if attrs.get("domain", "linear") == "log" else _linear_error
    square, square_errors = logits.reshape(-1, n, n), errors.reshape(-1, n, n)
    found = np.zeros_like(square)
    chunk = max(1, _CHUNK // n**4)
    for start in range(0, len(square), chunk):
        part = slice(start, start + chunk)
        found[part] = analyse(square[part], square_errors[part], attrs, functions)
    return np.swapaxes(found, 1, 2) if attrs.get("orient", "in") == "out" else found


def _axes(attrs: Mapping[str, Any]) -> tuple[int, int]:
    """Axis of [T, row, column] that the first and second half of an iteration sum over."""
    return (1, 2) if attrs.get("order", "row-col") == "col-row" else (2, 1)


def _identity(tokens: int, n: int) -> Array:
    """D[t, out, row, column]: the derivative of final element `out` by itself."""
    return np.broadcast_to(np.eye(n * n).reshape(1, n * n, n, n), (tokens, n * n, n, n))


def _known(array: Array) -> Array:
    """The array with 0 in place of NaN, for products with derivatives that are 0 there."""
    return np.where(np.isnan(array), 0.0, array)


def _linear_error(logits: Array, errors: Array, attrs: Mapping[str, Any], functions: Functions) -> Array:
    """Division of a by s = sum + eps gives b = a/s.

    b is rounded (one division an element), s is rounded (tree, + eps, fp32 eps: shared by its row or column, so
    the derivatives are added before the absolute value is taken), and D becomes (D - sum of D b over the line) / s.
    """
    tokens, n = logits.shape[:2]
    first, second = _axes(attrs)
    iters, eps, mode = int(attrs["iters"]), float(attrs["eps"]), attrs.get("eps_mode", "add")
    start = attrs.get("start", "softmax")
    most = np.max(logits, axis=first, keepdims=True)
    difference = logits if start == "exp" else logits - most
    p = softmax(logits, first)
    a = {"softmax": p + eps if mode == "add" else p}.get(start, np.exp(difference))
    begun = a
    steps: list[tuple[int, Array, Array, Array]] = []
    unsure = np.zeros(tokens, dtype=bool)
    axes = [first, second] * iters
    for axis in axes[1:] if start == "softmax" else axes:
        total = np.sum(a, axis=axis, keepdims=True)
        divides = total > eps if mode == "threshold" else np.ones_like(total, dtype=bool)
        if mode == "threshold":
            margin = np.expm1(4 * np.max(np.where(a > 0, errors, 0.0), axis=(1, 2)) + 1e-4)
            near = np.abs(total / eps - 1.0)
            unsure |= np.min(np.where(np.isnan(near), np.inf, near), axis=(1, 2)) < margin
        s = np.where(divides, total + eps if mode == "add" else total, 1.0)
        a = a / s
        steps.append((axis, np.where((s == 0.0) | np.isnan(s), 1.0, s), _known(a), divides))
    tree = depth(n) * U
    shared = tree + 2 * U if mode == "add" else tree
    derivative = _identity(tokens, n)
    found = np.zeros((tokens, n * n))
    for axis, s, b, divides in reversed(steps):
        weighted = derivative * b[:, None]
        divided = divides[:, None]
        line = np.where(divided, np.sum(weighted, axis=axis + 1, keepdims=True), 0.0)
        found += functions.divide * np.abs(np.where(divided, weighted, 0.0)).sum(axis=(2, 3))
        found += FLOOR * np.abs(derivative).sum(axis=(2, 3))  # quotients may underflow
        found += shared * np.abs(line).sum(axis=(2, 3))
        derivative = (derivative - line) / s[:, None]
    p, begun = _known(p), _known(begun)
    live = (p if start == "softmax" else begun) > 0
    argument = np.where(live, np.abs(difference), 0.0)
    relative = functions.exp + functions.exp_argument * argument + np.where(live, errors, 0.0)
    if start == "softmax":
        # p + eps, and p itself: a division, the sum of its line, the exponential and its argument.
        added = functions.divide * p + FLOOR + (U * (p + 2 * eps) if mode == "add" else 0.0)
        found += (np.abs(derivative) * added[:, None]).sum(axis=(2, 3))
        weighted = derivative * p[:, None]
        line = np.sum(weighted, axis=first + 1, keepdims=True)
        found += tree * np.abs(line).sum(axis=(2, 3))
        found += (np.abs(weighted - line * p[:, None]) * (relative + U * argument)[:, None]).sum(axis=(2, 3))
    else:
        weighted = derivative * begun[:, None]
        found += (np.abs(weighted) * (relative + U * argument)[:, None] + np.abs(derivative) * FLOOR).sum(axis=(2, 3))
        if start == "exp_rowmax":  # the maximum's own error scales its whole line
            line = np.sum(weighted, axis=first + 1, keepdims=True)
            found += (np.abs(line) * np.max(errors, axis=first, keepdims=True)[:, None]).sum(axis=(2, 3))
    found = np.where(unsure[:, None], 1.0, found)
    return _settled(found.reshape(tokens, n, n), a, np.where(live, errors, 0.0))


def _log_error(logits: Array, errors: Array, attrs: Mapping[str, Any], functions: Functions) -> Array:
    """Potentials f and g: each is rounded anew from the logits, so an error in one reaches the next only through it.

    Each half-step's own error is shared by its row or column. With A the derivative of log C by the logits plus the
    other potential, a half-step with weights w = softmax turns A into A - (sum of A over the line) w.
    """
    tokens, n = logits.shape[:2]
    axes = _axes(attrs) * int(attrs["iters"])
    f = g = np.zeros((tokens, 1, 1))
    steps: list[tuple[int, Array, Array]] = []
    for index, axis in enumerate(axes):
        moved = logits + (g if index % 2 == 0 else f)
        most = np.max(moved, axis=axis, keepdims=True)
        exponential = np.exp(moved - most)
        total = np.sum(exponential, axis=axis, keepdims=True)
        potential = -(most + np.log(total))
        weights = exponential / total
        distance = np.where(weights > 0, np.abs(moved - most), 0.0)
        size = np.where(weights > 0, np.abs(moved), 0.0)
        term = U * size + (U + functions.exp_argument) * distance + functions.exp
        local = np.sum(weights * term, axis=axis, keepdims=True) + depth(n) * U
        local += functions.log * np.abs(np.log(total)) + functions.log_absolute + U * np.abs(potential)
        steps.append((axis, weights, local))
        f, g = (potential, g) if index % 2 == 0 else (f, potential)
    c = np.exp(f + logits + g)
    argument = np.where(c > 0, np.abs(f + logits + g), 0.0)
    sums = np.where(c > 0, np.abs(f + logits), 0.0) + argument
    relative = functions.exp + functions.exp_argument * argument + U * sums
    found = (c * relative).reshape(tokens, n * n) + FLOOR
    weighted = _identity(tokens, n) * c[:, None]
    for axis, weights, local in reversed(steps):
        line = np.sum(weighted, axis=axis + 1, keepdims=True)
        found += (np.abs(line) * local[:, None]).sum(axis=(2, 3))
        weighted = weighted - line * weights[:, None]
    own = np.where(np.isfinite(logits), errors, 0.0)
    found += (np.abs(weighted) * own[:, None]).sum(axis=(2, 3))
    return _settled(found.reshape(tokens, n, n), c, own)


def _settled(error: Array, c: Array, errors: Array) -> Array:
    """What first order leaves out.

    Relative errors r leave terms of order r^2; r is 1e-6 at ordinary logits. Logits that are themselves off by d
    (bf16 streams under a large scale) move the derivatives by powers of exp(d): 8 of them cover what was tried, and
    no element of comb exceeds 1.
    """
    relative = np.max(np.where(c > FLOOR, error / c, 0.0), axis=(1, 2), keepdims=True)
    moved = np.exp(8.0 * np.max(errors, axis=(1, 2), keepdims=True))
    bounded: Array = np.minimum(error * (1.0 + np.minimum(relative, 1.0)) * moved, 1.0)
    return bounded


def _direct_error(stage: Stage, logits: Array, errors: Array, n: int, functions: Functions) -> Array:
    attrs, function = dict(stage.attrs), COMBS[stage.attr("comb")]
    program = COMB_KINDS[stage.attr("comb")].steps(stage, n)
    if not isinstance(program, DirectMap):
        return errors.reshape(-1, n, n)  # the logits as they are
    # Differences of logits, and arguments of exp, are rounded by their size: as if the logits were off by that.
    size = np.max(np.where(np.isfinite(logits), np.abs(logits), 0.0), axis=1, keepdims=True, initial=0.0)
    off = errors + (U + functions.exp_argument) * 2 * size
    slack = 2.0 if functions.exp_argument else 1.0
    found = slack * program.roundings * U * np.abs(function(logits, n, attrs)) + FLOOR * (program.roundings > 0)
    for index in range(logits.shape[1]):
        step = np.zeros(logits.shape[1])
        step[index] = _STEP
        slope = np.abs(function(logits + step, n, attrs) - function(logits - step, n, attrs)) / (2 * _STEP)
        found += np.nan_to_num(slope) * off[:, index, None, None]
    moved: Array = found * np.exp(8.0 * np.max(errors, axis=1, initial=0.0))[:, None, None]
    return moved
