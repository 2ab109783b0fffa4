"""What a Program computes, in float64 numpy: one plain function per kind of stage.

This is the oracle that emitted code is compared with. It shares no code and no constant with templates,
passes or `combs`, imports nothing but numpy (its mixing matrices are in `mhcgen.reference_combs` and what is done to
each stream or element alone in `mhcgen.reference_each`, which import nothing else either), and reads a Program only
through its attributes, so a mistake there cannot repeat itself here.
Formulas are those of the DeepSeek-V4 inference rule unless a function names another source.

Streams are [T, n, H] in every function; a Program's tensor of shape T, H, n (stream-last) is turned on its way in
and out. Gates and matrices that are the same for all tokens have no T.

Arithmetic follows IEEE 754, in `run` without warnings: 0/0 is NaN, a row of logits that is -inf throughout
becomes NaN, and a NaN in one token reaches results of that token only. A token count of 0 gives results of
length 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mhcgen.reference_combs import COMBS
from mhcgen.reference_each import (
    gated_mean,
    low_rank_gates,
    norm_streams,
    project_streams,
    root_mean_square,
    rowsq_streams,
    sigmoid,
)

Array = npt.NDArray[np.float64]

#: Shape of streams whose memory has the streams of a column side by side.
STREAM_LAST = ("T", "H", "n")

#: Significant bits, exponent of the smallest normal number, largest finite number of each narrow float.
_FLOATS: dict[str, tuple[int, int, float]] = {
    "bf16": (8, -126, (2.0 - 2.0**-7) * 2.0**127),
    "fp16": (11, -14, 65504.0),
    "fp8_e4m3": (4, -6, 448.0),
}


class TensorLike(Protocol):
    """What is read of a `mhcgen.ir.Tensor`."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> Sequence[int | str]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def role(self) -> str: ...


class StageLike(Protocol):
    """What is read of a `mhcgen.ir.Stage`."""

    @property
    def name(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def operands(self) -> Sequence[tuple[str, str]]: ...
    @property
    def results(self) -> Sequence[tuple[str, str]]: ...
    @property
    def attrs(self) -> Sequence[tuple[str, Any]]: ...


class ProgramLike(Protocol):
    """What is read of a `mhcgen.ir.Program`."""

    @property
    def dims(self) -> Sequence[tuple[str, int]]: ...
    @property
    def tensors(self) -> Sequence[TensorLike]: ...
    @property
    def stages(self) -> Sequence[StageLike]: ...


# --- numbers ------------------------------------------------------------------------------------------------


def round_to(values: npt.ArrayLike, dtype: str) -> Array:
    """Values rounded to a narrow float format, nearest even, kept as float64.

    Rounds once, straight from float64: going through fp32 first would round twice and miss ties.

    Args:
        values: any shape.
        dtype: `bf16`, `fp16` or `fp8_e4m3` (the finite variant: no infinity, overflow is NaN); any other name
            returns the values unchanged.
    """
    exact = np.asarray(values, dtype=np.float64)
    if dtype not in _FLOATS:
        return exact
    bits, lowest, largest = _FLOATS[dtype]
    with np.errstate(all="ignore"):
        # v = m * 2^e with 0.5 <= |m| < 1, so its last kept bit weighs 2^(e - bits); below `lowest` the weight
        # stays, which is what subnormals are.
        exponent = np.frexp(exact)[1]
        step = np.ldexp(1.0, np.maximum(exponent, lowest + 1) - bits)
        rounded = np.rint(exact / step) * step
        overflow = np.nan if dtype == "fp8_e4m3" else np.copysign(np.inf, exact)
        rounded = np.where(np.abs(rounded) > largest, overflow, rounded)
        return np.asarray(np.where(np.isfinite(exact), rounded, exact), dtype=np.float64)


def ceil_power_of_two(values: npt.ArrayLike) -> Array:
    """Smallest power of two >= each value; 0 stays 0, NaN and infinity stay."""
    exact = np.asarray(values, dtype=np.float64)
    mantissa, exponent = np.frexp(exact)
    power = np.ldexp(1.0, np.where(mantissa == 0.5, exponent - 1, exponent))
    return np.asarray(np.where((exact == 0) | ~np.isfinite(exact), exact, power), dtype=np.float64)


#: Kinds whose function the caller gives.
OPAQUE = ("branch", "engram", "tap")


# --- stages -------------------------------------------------------------------------------------------------


def expand(e: Array, streams: int) -> Array:
    """x [T, n, H] = n copies of the embedding e [T, H]."""
    return np.repeat(e[:, None, :], streams, axis=1)


def project(x: Array, fn: Array) -> Array:
    """mixes [T, R]: dot products of the rows of fn [R, n*H] with x [T, n, H], stream-major (c*H + h)."""
    mixes: Array = x.reshape(x.shape[0], fn.shape[1]) @ fn.T
    return mixes


def rowsq(x: Array, mixes: Array, eps: float, eps_place: str = "in") -> Array:
    """mixes_scaled [T, R] = mixes / the root mean square of x over streams and columns; eps inside the root."""
    mean_square: Array = np.mean(x * x, axis=(1, 2))
    count = x.shape[1] * x.shape[2]
    return mixes / root_mean_square(mean_square, eps, eps_place, count)[:, None]


def gates(
    mixes_scaled: Array,
    scale: Array,
    base: Array,
    pre_eps: float,
    post_mult: float,
    *,
    streams: int | None = None,
    form: str = "affine",
    pre_act: str = "sigmoid",
    post_act: str = "sigmoid",
) -> tuple[Array, Array, Array]:
    """pre [T, n], post [T, n] and the logits of comb [T, L] from mixes_scaled [T, 2n + L].

    Columns are pre n | post n | comb L, with one scale each and one base a column. pre takes eps, post does
    not. In the form `scaled` (plain hyper-connections, arXiv 2409.19606) the activation comes first, of the logits
    too: act(mixes) * scale + base.

    Args:
        streams: n; None where L = n*n, so that it follows from the number of columns.
    """
    columns = mixes_scaled.shape[1]
    n = streams or next(k for k in range(1, columns + 1) if (2 + k) * k >= columns)
    act: dict[str, Callable[[Array], Array]] = {"sigmoid": sigmoid, "tanh": np.tanh}
    parts = [slice(0, n), slice(n, 2 * n), slice(2 * n, None)]
    if form == "scaled":
        acts = [act[pre_act], act[post_act], act[pre_act]]
        pre, post, comb = (a(mixes_scaled[:, p]) * s + base[p] for a, p, s in zip(acts, parts, scale, strict=True))
        return pre + pre_eps, post_mult * post, comb
    pre, post, comb = (mixes_scaled[:, p] * s + base[p] for p, s in zip(parts, scale, strict=True))
    return act[pre_act](pre) + pre_eps, post_mult * act[post_act](post), comb


def head_gates(mixes_scaled: Array, scale: Array, base: Array, pre_eps: float) -> Array:
    """pre [T, n] of the exit head: one scale, n bases, no post and no comb (DeepSeek-V4 head)."""
    return sigmoid(mixes_scaled * scale[0] + base) + pre_eps


def sinkhorn(logits: Array, iters: int, eps: float) -> Array:
    """comb [T, from_stream, to_stream] of the DeepSeek-V4 rule from logits [T, n*n], row-major (from * n + to).

    Iteration 1 is a softmax over to_stream, plus eps, then a division of each column by its sum + eps; each
    of the iters - 1 others divides rows, then columns, by their sums + eps.

    Raises:
        ValueError: the number of logits is not a square, or iters < 1.
    """
    return COMBS["sinkhorn"](logits, round(logits.shape[1] ** 0.5), {"iters": iters, "eps": eps})


def comb(kind: str, logits: Array | None, streams: int, tokens: int, attrs: Mapping[str, Any]) -> Array:
    """comb [T, n, n] of any kind; [n, n] where the logits have no T.

    Raises:
        ValueError: unknown kind.
    """
    if kind not in COMBS:
        raise ValueError(f"unknown comb {kind!r}")
    if logits is None:
        return COMBS[kind](np.zeros((tokens, 0)), streams, attrs)
    if logits.ndim == 1:
        static: Array = COMBS[kind](logits[None], streams, attrs)[0]
        return static
    return COMBS[kind](logits, streams, attrs)


def collapse(x: Array, pre: Array) -> Array:
    """y [T, H] = sum over streams of pre[t, c] x[t, c, h]."""
    pre = pre.reshape(-1, x.shape[1])
    y = np.zeros((x.shape[0], x.shape[2]))
    for c in range(x.shape[1]):
        y = y + pre[:, c, None] * x[:, c, :]
    return y


def norm(y: Array, weight: Array | None, eps: float) -> Array:
    """z [T, H] = y / sqrt(mean(y^2) + eps), times weight [H] if there is one (RMSNorm of the sub-layer)."""
    mean_square: Array = np.mean(y * y, axis=1)
    z = y / np.sqrt(mean_square + eps)[:, None]
    return z if weight is None else z * weight


def quant(z: Array, scheme: str, group: int, pow2: bool) -> tuple[Array, Array]:
    """q [T, H] and q_scale [T, ceil(H/group)]: symmetric quantisation in groups of consecutive columns.

    scheme `q8`: scale = amax/127 and q = round half to even of z * (1/scale). scheme `fp8` (e4m3): scale =
    amax/448 and q = z/scale rounded to e4m3. With pow2 the scale is rounded up to a power of two first. The
    last group may be short. A group of zeros has scale 0 and q 0; a group with a NaN has scale NaN and its q
    is NaN here (int8 has no NaN, so a comparison ignores q there).

    Raises:
        ValueError: unknown scheme.
    """
    if scheme not in ("q8", "fp8"):
        raise ValueError(f"unknown quantisation scheme {scheme!r}")
    tokens, hidden = z.shape
    starts = range(0, hidden, group)
    q, q_scale = np.zeros((tokens, hidden)), np.zeros((tokens, len(starts)))
    for g, start in enumerate(starts):
        part = z[:, start : start + group]
        scale = np.max(np.abs(part), axis=1) / (127.0 if scheme == "q8" else 448.0)
        if pow2:
            scale = ceil_power_of_two(scale)
        q_scale[:, g] = scale
        d = scale[:, None]
        if scheme == "q8":
            steps = np.rint(part * np.divide(1.0, d, out=np.zeros_like(d), where=d != 0))
        else:
            # The clip only undoes the last bit of z/scale: the largest quotient is 448 but for rounding.
            quotient = np.divide(part, d, out=np.zeros_like(part), where=d != 0)
            steps = round_to(np.clip(quotient, -448.0, 448.0), "fp8_e4m3")
        q[:, start : start + group] = steps
    return q, q_scale


def post(x: Array, f: Array, post: Array, comb: Array) -> Array:
    """x_next [T, n, H]: x_next[t, to] = post[t, to] f[t] + sum over from of comb[t, from, to] x[t, from]."""
    n = x.shape[1]
    post, comb = post.reshape(-1, n), comb.reshape(-1, n, n)
    x_next = np.zeros(x.shape)
    for to_stream in range(n):
        x_next[:, to_stream] = post[:, to_stream, None] * f
        for from_stream in range(n):
            x_next[:, to_stream] += comb[:, from_stream, to_stream, None] * x[:, from_stream]
    return x_next


def mean(x: Array) -> Array:
    """y [T, H]: unweighted mean of the streams (the exit of GLM-5.3-Flash)."""
    y: Array = np.mean(x, axis=1)
    return y


def total(x: Array) -> Array:
    """y [T, H]: sum of the streams (the exit of mHC-lite and of plain hyper-connections)."""
    y: Array = np.sum(x, axis=1)
    return y


# --- a Program ----------------------------------------------------------------------------------------------


def run(
    program: ProgramLike,
    inputs: Mapping[str, npt.ArrayLike],
    branches: Mapping[str, Callable[..., npt.ArrayLike]] | None = None,
    *,
    all_values: bool = False,
    round_values: bool = False,
) -> dict[str, Array]:
    """Every result of a Program, in float64.

    Args:
        program: as built by `mhcgen.build`.
        inputs: an array for every tensor of role `input` or `parameter`, in its concrete shape; any dtype,
            widened to float64. Other names are ignored.
        branches: the functions of opaque stages (branch, engram, tap), by stage name or, failing that, by
            kind. Each takes the stage's operand in float64 and returns the result.
        all_values: also return intermediate values (role `value`) and the inputs, widened.
        round_values: round each tensor of dtype bf16 or fp16 where it is produced, nearest even, as emitted
            code does. Off, everything is exact up to float64.

    Returns:
        dict of float64 arrays by tensor name. `iterations` is the Program's iteration count: where the stage
        may stop early that is an upper bound, since whether a step changes a bit is no question for float64.

    Raises:
        ValueError: an input is missing or has another shape, an opaque stage has no function or its function
            returns another shape, or a stage is of unknown kind.
    """
    branches = branches or {}
    declared = {tensor.name: tensor for tensor in program.tensors}
    dims = dict(program.dims)
    tokens = _tokens(program, inputs)
    values: dict[str, Array] = {}

    def shape(name: str) -> tuple[int, ...]:
        sizes = {**dims, "T": tokens}
        return tuple(d if isinstance(d, int) else sizes[d] for d in declared[name].shape)

    for tensor in program.tensors:
        if tensor.role in ("input", "parameter"):
            array = np.asarray(inputs[tensor.name]).astype(np.float64)
            if array.shape != shape(tensor.name):
                raise ValueError(f"input {tensor.name} has shape {array.shape}, wants {shape(tensor.name)}")
            values[tensor.name] = array
    for stage in program.stages:
        opaque = stage.kind in OPAQUE
        operands = {
            slot: values[name] if opaque else turned(declared[name], values[name]) for slot, name in stage.operands
        }
        function = branches.get(stage.name, branches.get(stage.kind))
        with np.errstate(all="ignore"):
            produced = evaluate(stage, operands, {**dims, "T": tokens}, function)
        for slot, name in stage.results:
            array = np.asarray(produced[slot], dtype=np.float64)
            array = array if opaque else turned(declared[name], array)
            if array.shape != shape(name):
                raise ValueError(f"stage {stage.name} gave {name} the shape {array.shape}, wants {shape(name)}")
            dtype = declared[name].dtype
            values[name] = round_to(array, dtype) if round_values and dtype in ("bf16", "fp16") else array
    if all_values:
        return values
    return {tensor.name: values[tensor.name] for tensor in program.tensors if tensor.role == "result"}


def turned(tensor: TensorLike, array: Array) -> Array:
    """Stored to [T, n, H] and back: a stream-last tensor swaps its last two axes, any other stays."""
    return np.swapaxes(array, 1, 2) if tuple(tensor.shape) == STREAM_LAST else array


def _tokens(program: ProgramLike, inputs: Mapping[str, npt.ArrayLike]) -> int:
    """T, from the first input that has it; missing inputs are reported together."""
    given = [tensor for tensor in program.tensors if tensor.role in ("input", "parameter")]
    missing = [tensor.name for tensor in given if tensor.name not in inputs]
    if missing:
        raise ValueError(f"missing input {', '.join(missing)}")
    for tensor in given:
        array_shape = np.shape(inputs[tensor.name])
        if "T" in tensor.shape and len(array_shape) == len(tensor.shape):
            return int(array_shape[list(tensor.shape).index("T")])
    return 0


def evaluate(
    stage: StageLike,
    operands: Mapping[str, Array],
    dims: Mapping[str, int],
    function: Callable[..., npt.ArrayLike] | None = None,
) -> dict[str, npt.ArrayLike]:
    """Results of one stage by slot, not rounded.

    Args:
        stage: any kind.
        operands: float64 arrays by slot, streams as [T, n, H].
        dims: sizes of the Program's symbols; T is needed only where a stage has no operand of that length.
        function: what an opaque stage computes.

    Raises:
        ValueError: unknown kind or comb, or an opaque stage without a function.
    """
    o, attr = operands, dict(stage.attrs)
    kind = stage.kind
    if kind in OPAQUE:
        if function is None:
            raise ValueError(f"opaque stage {stage.name} ({kind}) needs a function in branches")
        return {slot: np.asarray(function(*o.values())).astype(np.float64) for slot, _ in stage.results}
    if kind == "expand":
        return {"x": expand(o["e"], dims["n"])}
    if kind == "project":
        return {"mixes": project(o["x"], o["fn"])}
    if kind == "rowsq":
        return {"mixes_scaled": rowsq(o["x"], o["mixes"], attr["eps"], attr.get("eps_place", "in"))}
    if kind == "project_streams":
        return {"mixes": project_streams(o["x"], o["fn"])}
    if kind == "rowsq_streams":
        return {"mixes_scaled": rowsq_streams(o["x"], o["mixes"], attr["eps"], attr.get("eps_place", "in"))}
    if kind == "gates":
        form = {key: attr[key] for key in ("form", "pre_act", "post_act") if key in attr}
        mixes, eps, mult = o["mixes_scaled"], attr["pre_eps"], attr["post_mult"]
        found = gates(mixes, o["scale"], o["base"], eps, mult, streams=dims["n"], **form)
        return dict(zip(("pre", "post", "logits"), found, strict=True))
    if kind == "static_gates":
        form = {key: attr[key] for key in ("pre_act", "post_act") if key in attr}
        one, eps, mult = np.zeros((1, len(o["base"]))), attr["pre_eps"], attr["post_mult"]
        found = gates(one, np.zeros(3), o["base"], eps, mult, streams=dims["n"], **form)
        return {slot: array[0] for slot, array in zip(("pre", "post", "logits"), found, strict=True)}
    if kind == "norm_streams":
        return {"x_normed": norm_streams(o["x"], o["weight"], attr["eps"], attr.get("eps_place", "in"))}
    if kind in ("low_rank_gates", "head_low_rank_gates"):
        low, gate = low_rank_gates(o["mixes"], dims["n"], dims["D"], attr.get("post_mult", 1.0))
        return {"bottleneck": low, "post": gate}
    if kind == "gated_mean":
        return {"y": gated_mean(o["x"], o["bottleneck"], o["up"])}
    if kind == "head_gates":
        return {"pre": head_gates(o["mixes_scaled"], o["scale"], o["base"], attr["pre_eps"])}
    if kind in ("sinkhorn", "comb"):
        made = comb(attr["comb"], o.get("logits"), dims.get("n", 0), dims.get("T", 0), attr)
        return {"comb": made, "iterations": np.full(made.shape[0], float(attr.get("iters", 0)))}
    if kind == "collapse":
        return {"y": collapse(o["x"], o["pre"])}
    if kind == "norm":
        return {"z": norm(o["y"], o.get("weight"), attr["eps"])}
    if kind == "quant":
        q, q_scale = quant(o["z"], attr["scheme"], attr["group"], attr["pow2"])
        return {"q": q, "q_scale": q_scale}
    if kind == "post":
        return {"x_next": post(o["x"], o["f"], o["post"], o["comb"])}
    if kind == "mean":
        return {"y": mean(o["x"])}
    if kind == "sum":
        return {"y": total(o["x"])}
    if kind == "first":
        return {"y": o["x"][:, 0]}
    raise ValueError(f"stage {stage.name} has unknown kind {kind!r}")
