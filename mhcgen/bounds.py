"""What an emitted tensor may be, given the float64 reference, and the comparison of the two.

Limits are absolute and hold for each element; they come from `mhcgen.error_model`, whose docstring states the
constants. What is compared with what:

- a finite reference: |got - reference| <= limit. Where that reaches past the largest number of the tensor's
  dtype, an infinity of that sign is also right.
- bf16 and fp16: what reference +- error rounds to, so the nearest neighbour but for near ties.
- NaN in the reference: NaN in the same place, and nowhere else. An infinity likewise, with its sign.
- quantised numbers: any number that z within its own limit can round to, so exact except next to a rounding
  boundary. q8 is not compared where the reference has NaN (int8 has none) or where the inverse of the scale
  overflows fp32; a NaN in a group shows in its scale.
- a scale rounded up to a power of two: that power, or its neighbour where the raw scale's limit spans one.
- an iteration count: exact, or from 1 up to it where the Sinkhorn may stop early.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from mhcgen.error_combs import Array
from mhcgen.error_model import SLACK, ErrorModel, raw_scale
from mhcgen.ir import Program, Stage
from mhcgen.reference import ceil_power_of_two, round_to

#: Largest finite number of a dtype that has infinities.
_LARGEST = {
    "fp32": (2.0 - 2.0**-23) * 2.0**127,
    "bf16": (2.0 - 2.0**-7) * 2.0**127,
    "fp16": 65504.0,
}

#: A q8 scale below this has an inverse that overflows fp32.
_SMALLEST_SCALE = 2.0**-120


@dataclass(frozen=True)
class Bound:
    """What an emitted tensor may be.

    Args:
        kind: `error` (within `limit` of the reference), `steps` (quantised numbers), `power_of_two` (scales)
            or `count` (iterations).
        limit: largest permitted |got - reference|, element by element, absolute.
        low: smallest permitted value, element by element.
        high: largest permitted value.
        why: where the limit comes from, in one line.
    """

    kind: str
    limit: Array
    low: Array
    high: Array
    why: str


@dataclass(frozen=True)
class Comparison:
    """Outcome for one tensor.

    Args:
        name: the tensor.
        error: |got - reference| at the worst element, the one with the largest error in units of its limit.
            For kind `error` it is divided by the largest finite |reference| of the same token (of the tensor
            where that has no tokens), so it reads as a relative error; other kinds are absolute. Infinite
            where a NaN or an infinity is out of place.
        limit: the limit at that element in the same unit.
        ok: every element is within its limit.
        worst_index: index of the worst element; empty where the tensor has none.
        why: where the limit comes from, or what is out of place.
    """

    name: str
    error: float
    limit: float
    ok: bool
    worst_index: tuple[int, ...]
    why: str


_WHY = {
    "input": "given to both sides",
    "expand": "a copy",
    "project": "U times each partial sum",
    "project_streams": "U times each partial sum",
    "rowsq_streams": "U for each of sum, mean, eps, root and product, and the mixes' error",
    "rowsq": "U for each of sum, mean, eps, root and product, and the mixes' error",
    "gates": "the logit's error times the sigmoid's slope, exp, add, divide, add",
    "norm_streams": "U for each of sum, mean, eps, root, 1 + weight and products",
    "low_rank_gates": "the mix's error times the slope of silu or sigmoid, division, exp, add, divide, product",
    "head_low_rank_gates": "the mix's error times the slope of silu, division, exp, add, divide, product",
    "gated_mean": "U times each partial sum of a gate's logit, the sigmoid of it, n products and a division",
    "static_gates": "exp, add, divide, add of each parameter",
    "head_gates": "the logit's error times the sigmoid's slope, exp, add, divide, add",
    "comb": "roundings of the map, and each logit's error times the derivative of comb by it",
    "sinkhorn": "each rounding and each logit's error times the derivative of comb by it",
    "collapse": "n fused multiply-adds, error of pre and of the streams",
    "norm": "U for each of sum, mean, eps, root and products, and the error of y",
    "quant": "what z within its limit can give",
    "post": "n + 1 roundings, error of post, comb, branch output and streams",
    "mean": "n - 1 additions and a division",
    "sum": "n - 1 additions",
    "first": "a copy",
    "branch": "opaque: the same array on both sides",
    "engram": "opaque: the same array on both sides",
    "tap": "opaque: the same array on both sides",
}


def bound(
    program: Program,
    name: str,
    inputs: Mapping[str, npt.ArrayLike],
    reference_values: Mapping[str, Array],
    *,
    rounded: bool = False,
) -> Bound:
    """The Bound of one tensor, of any role.

    Args:
        program: the unfused Program.
        name: the tensor.
        inputs: what emission and reference were given.
        reference_values: `reference.run(..., all_values=True)` of those inputs.
        rounded: whether the reference ran with `round_values=True`.

    Raises:
        KeyError: the Program has no such tensor.
        ValueError: a reference value that is needed is missing.
    """
    return _bound(ErrorModel(program, inputs, reference_values, rounded=rounded), name)


def compare(
    program: Program,
    name: str,
    got: npt.ArrayLike,
    reference_values: Mapping[str, Array],
    inputs: Mapping[str, npt.ArrayLike],
    *,
    rounded: bool = False,
) -> Comparison:
    """Compare one emitted tensor with the reference; arguments as in `bound`.

    Raises:
        KeyError: the Program has no such tensor.
        ValueError: a reference value that is needed is missing, or `got` has another shape than the
        reference.
    """
    return _compare(ErrorModel(program, inputs, reference_values, rounded=rounded), name, got)


def compare_all(
    program: Program,
    got: Mapping[str, npt.ArrayLike],
    reference_values: Mapping[str, Array],
    inputs: Mapping[str, npt.ArrayLike],
    *,
    rounded: bool = False,
) -> list[Comparison]:
    """Compare every tensor of `got`, in its order, with one error analysis; raises as `compare` does."""
    model = ErrorModel(program, inputs, reference_values, rounded=rounded)
    return [_compare(model, name, array) for name, array in got.items()]


def _bound(model: ErrorModel, name: str) -> Bound:
    program = model.program
    dtype, writer = program.tensor(name).dtype, program.writers.get(name)
    stage = program.stage(writer) if writer else None
    value = model.value(name)
    if stage and stage.kind == "quant":
        make = _scale_bound if name == stage.result("q_scale") else _q_bound
        with np.errstate(all="ignore"):
            return make(model, stage, value)
    if stage and name == dict(stage.results).get("iterations"):
        low = np.ones_like(value) if stage.attr("early_stop") else value
        return Bound("count", value - low, low, value, "iterations run: all, fewer if it may stop early")
    limit = model.error(name)
    kind = stage.kind if stage else "input"
    with np.errstate(all="ignore"):
        low, high = value - limit, value + limit
    why = f"{kind} in {program.arithmetic.functions}, {dtype}: {_WHY[kind]}"
    limit, low, high = (model.turned(name, array) for array in (limit, low, high))
    return Bound("error", limit, low, high, why)


def _scales(model: ErrorModel, stage: Stage) -> tuple[Array, Array, Array]:
    """Least and greatest stored scale of each group before its own error, and that error."""
    scale, error = raw_scale(model, stage)
    if stage.attr("pow2"):
        least = ceil_power_of_two(np.maximum(scale - error, 0.0))
        return least, ceil_power_of_two(scale + error), np.zeros_like(error)
    return scale, scale, error


def _scale_bound(model: ErrorModel, stage: Stage, value: Array) -> Bound:
    least, greatest, error = _scales(model, stage)
    low, high = least - error, greatest + error
    kind = "power_of_two" if stage.attr("pow2") else "error"
    return Bound(kind, np.maximum(high - value, value - low), low, high, f"quant scale: {_WHY['quant']}")


def _q_bound(model: ErrorModel, stage: Stage, value: Array) -> Bound:
    """Rounding is monotone, so the ends of z +- its error over scale +- its error round to the ends of q."""
    z, z_error = model.value(stage.operand("z")), model.error(stage.operand("z"))
    least, greatest, error = (
        np.repeat(array, stage.attr("group"), axis=1)[:, : z.shape[1]] for array in _scales(model, stage)
    )
    q8 = stage.attr("scheme") == "q8"
    # 1/d and z * (1/d), or z / d: at most two roundings of the division's size.
    rounding = 2 * SLACK * model.functions.divide
    ends = []
    for d in (np.maximum(least - error, 0.0), greatest + error):
        for numerator in (z - SLACK * z_error, z + SLACK * z_error):
            for factor in (1.0 - rounding, 1.0 + rounding):
                end = np.nan_to_num(numerator / d * factor)
                steps = np.rint(np.clip(end, -127, 127)) if q8 else _e4m3(end)
                ends.append(np.where(greatest > 0, steps, value))
    low, high = np.minimum.reduce(ends), np.maximum.reduce(ends)
    free = (greatest > 0) & (least < _SMALLEST_SCALE)
    if q8:
        free |= np.isnan(value)
    low, high = np.where(free, -np.inf, low), np.where(free, np.inf, high)
    limit = np.where(free, np.inf, np.maximum(high - value, value - low))
    return Bound("steps", limit, low, high, f"quant: {_WHY['quant']}")


def _e4m3(values: Array) -> Array:
    return round_to(np.clip(values, -448, 448), "fp8_e4m3")


def _compare(model: ErrorModel, name: str, got: npt.ArrayLike) -> Comparison:
    allowed, reference = _bound(model, name), model.turned(name, model.value(name))
    actual = np.asarray(got).astype(np.float64)
    if actual.shape != reference.shape:
        raise ValueError(f"{name} has shape {actual.shape}, the reference {reference.shape}")
    if not actual.size:
        return Comparison(name, 0.0, 0.0, True, (), "no elements")
    largest = _LARGEST.get(model.program.tensor(name).dtype, np.inf)
    with np.errstate(all="ignore"):
        error = np.abs(actual - reference)
        good = (allowed.low <= actual) & (actual <= allowed.high)
        if allowed.kind == "power_of_two":
            good &= ceil_power_of_two(actual) == actual
        # Past the largest number both a finite value and its rounding, an infinity, are right.
        past = np.abs(reference) + allowed.limit > largest
        good |= past & np.isinf(actual) & (np.sign(actual) == np.sign(reference))
        # A reference that is not finite has a place to be compared, except where nothing is (limit infinite).
        same = (np.isnan(actual) & np.isnan(reference)) | (actual == reference)
        good = np.where(np.isfinite(reference) | np.isposinf(allowed.limit), good, same)
        ratio = error / allowed.limit
        within = np.minimum(np.nan_to_num(ratio, nan=0.0, posinf=0.0), 1.0)
        ratio = np.where(good, within, np.nan_to_num(ratio, nan=np.inf, posinf=np.inf) + 1.0)
    worst = tuple(int(i) for i in np.unravel_index(int(np.argmax(ratio)), ratio.shape))
    misplaced = not good[worst] and not np.isfinite(error[worst])
    norm = _norm(model.program, name, reference, worst) if allowed.kind == "error" else 1.0
    why = f"{actual[worst]} where the reference has {reference[worst]}" if misplaced else allowed.why
    return Comparison(
        name,
        float("inf") if misplaced else float(np.nan_to_num(error[worst])) / norm,
        float(allowed.limit[worst]) / norm,
        bool(np.all(good)),
        worst,
        why,
    )


def _norm(program: Program, name: str, reference: Array, index: tuple[int, ...]) -> float:
    """Largest finite |reference| of the token of `index` (of the tensor if it has none); 1 if tiny."""
    part = reference[index[0]] if program.tensor(name).shape[0] == "T" else reference
    finite = np.abs(np.where(np.isfinite(part), part, 0.0))
    largest = float(np.max(finite))
    return largest if largest > _SMALLEST_SCALE else 1.0
