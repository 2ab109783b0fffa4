"""A Program in plain torch operations: the formulas of its stages, differentiable any number of times.

This is the backward of every operator (its inputs are taken again through this, and torch differentiates it), the
forward of float64 tensors, and the forward on a CPU where the executor would be slow. It computes in fp32, sums of
squares in fp64 where the Program says so, all of it in float64 for float64 tensors. Tensors of bf16 and fp16 are
rounded where the Program produces them; gradients pass that rounding as they are. Sums run in torch's order, so the
results are those of the kernels within rounding and not bit for bit.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from mhcgen.errors import UsageError
from mhcgen.ir import Program, Stage
from mhcgen.stages import STREAM_LAST
from mhcgen.torch.combs import comb

#: dtype of a Program's tensor -> torch's.
DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "int8": torch.int8,
    "fp8_e4m3": torch.float8_e4m3fn,
    "int32": torch.int32,
    "int64": torch.int64,
}
_NARROW = ("bf16", "fp16")
_ACTS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh}


class _Round(torch.autograd.Function):
    """To a narrower dtype and back; the gradient passes unrounded."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, dtype: torch.dtype) -> Tensor:
        return value.to(dtype).to(value.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def evaluate(
    program: Program, tensors: Mapping[str, Tensor], wanted: Collection[str] | None = None
) -> dict[str, Tensor]:
    """Results of a Program without opaque stages.

    Args:
        program: what to compute.
        tensors: inputs and parameters by name, all float64, or each of the Program's dtype.
        wanted: names of results; stages that none of them needs are left out. None is all.

    Returns:
        The wanted results by name in the Program's dtypes; float64 for float64 inputs.
    """
    inputs = program.of_role("input", "parameter")
    given = [tensors[tensor.name] for tensor in inputs]
    double = given[0].dtype == torch.float64
    work = torch.float64 if double else torch.float32
    last = {tensor.name for tensor in program.tensors if tensor.shape == STREAM_LAST}
    values: dict[str, Tensor] = {}
    for tensor, value in zip(inputs, given, strict=True):
        value = value.to(work)
        values[tensor.name] = value.transpose(1, 2) if tensor.name in last else value
    results = [t for t in program.of_role("result") if wanted is None or t.name in wanted]
    # Under autocast a matrix product would be narrowed, which the Program does not do.
    with torch.autocast(given[0].device.type, enabled=False):
        for stage in _needed(program, {tensor.name for tensor in results}):
            operands = {slot: values[name] for slot, name in stage.operands}
            if stage.kind == "comb" and not operands:  # the same matrix for every token
                operands["logits"] = values[inputs[0].name].new_zeros((given[0].shape[0], 0))
            made = _STAGES[stage.kind](stage, operands, program)
            for slot, name in stage.results:
                if slot == "iterations":
                    continue
                dtype = program.tensor(name).dtype
                narrow = dtype in _NARROW and not double
                values[name] = _Round.apply(made[slot], DTYPES[dtype]) if narrow else made[slot]
    found = {}
    for tensor in results:
        value = values[tensor.name]
        if not (double and value.dtype == torch.float64):
            value = value.to(DTYPES[tensor.dtype])
        found[tensor.name] = value.transpose(1, 2) if tensor.name in last else value
    return found


def _needed(program: Program, wanted: set[str]) -> list[Stage]:
    """Stages that the wanted tensors depend on, in order."""
    chosen = []
    for stage in reversed(program.stages):
        if wanted.intersection(stage.writes):
            wanted.update(stage.reads)
            chosen.append(stage)
    return chosen[::-1]


Made = dict[str, Tensor]


def _expand(stage: Stage, o: Made, program: Program) -> Made:
    return {"x": o["e"][:, None, :].expand(-1, program.dim("n"), -1)}


def _project(stage: Stage, o: Made, program: Program) -> Made:
    return {"mixes": o["x"].flatten(1) @ o["fn"].T}


def project_streams(x: Tensor, fn: Tensor) -> Tensor:
    """mixes [T, (2+n)n] of each stream alone, from rows pre | post | comb of fn [2+n, H]."""
    each = x @ fn.T
    return torch.cat([each[:, :, 0], each[:, :, 1], each[:, :, 2:].flatten(1)], 1)


def _project_streams(stage: Stage, o: Made, program: Program) -> Made:
    return {"mixes": project_streams(o["x"], o["fn"])}


def _root(mean: Tensor, stage: Stage, count: int) -> Tensor:
    """Root mean square of `count` elements; a clamp is one of their norm."""
    eps, place = float(stage.attr("eps")), stage.option("eps_place", "in")
    if place == "out":
        return mean.sqrt() + eps
    if place == "clamp":
        return mean.sqrt().clamp(min=eps / count**0.5)
    return (mean + eps).sqrt()


def _mean_square(value: Tensor, axes: tuple[int, ...], acc: str) -> Tensor:
    wide = value.to(torch.float64) if acc == "fp64" else value
    return (wide * wide).mean(axes).to(value.dtype)


def _rowsq(stage: Stage, o: Made, program: Program) -> Made:
    mean = _mean_square(o["x"], (1, 2), stage.attr("acc"))
    return {"mixes_scaled": o["mixes"] / _root(mean, stage, program.dim("n") * program.dim("H"))[:, None]}


def _rowsq_streams(stage: Stage, o: Made, program: Program) -> Made:
    root = _root(_mean_square(o["x"], (2,), stage.attr("acc")), stage, program.dim("H"))
    each = torch.cat([root, root, root.repeat_interleave(program.dim("n"), 1)], 1)
    return {"mixes_scaled": o["mixes"] / each}


def _norm_streams(stage: Stage, o: Made, program: Program) -> Made:
    root = _root(_mean_square(o["x"], (2,), stage.attr("acc")), stage, program.dim("H"))
    return {"x_normed": o["x"] / root[:, :, None] * (1.0 + o["weight"].reshape(o["x"].shape[1:]))}


def _low_rank_gates(stage: Stage, o: Made, program: Program) -> Made:
    low, injected = (o["mixes"] / program.dim("n")).tensor_split([program.dim("D")], 1)
    post = stage.option("post_mult", 1.0) * torch.sigmoid(injected)
    return {"bottleneck": torch.nn.functional.silu(low), "post": post}


def _gated_mean(stage: Stage, o: Made, program: Program) -> Made:
    gate = torch.sigmoid(o["bottleneck"] @ o["up"]).reshape(o["x"].shape)
    return {"y": (gate * o["x"]).sum(1) / program.dim("n")}


def _gates(stage: Stage, o: Made, program: Program) -> Made:
    n, mixes, scale, base = program.dim("n"), o["mixes_scaled"], o["scale"], o["base"]
    pre_act, post_act = (_ACTS[stage.option(key, "sigmoid")] for key in ("pre_act", "post_act"))
    parts = (slice(0, n), slice(n, 2 * n), slice(2 * n, None))
    if stage.option("form", "affine") == "scaled":
        acts = (pre_act, post_act, pre_act)
        pre, post, logits = (
            act(mixes[..., p]) * scale[i] + base[p] for i, (act, p) in enumerate(zip(acts, parts, strict=True))
        )
    else:
        pre, post, logits = (mixes[..., p] * scale[i] + base[p] for i, p in enumerate(parts))
        pre, post = pre_act(pre), post_act(post)
    return {"pre": pre + stage.attr("pre_eps"), "post": stage.attr("post_mult") * post, "logits": logits}


def _static_gates(stage: Stage, o: Made, program: Program) -> Made:
    n, base = program.dim("n"), o["base"]
    pre_act, post_act = (_ACTS[stage.option(key, "sigmoid")] for key in ("pre_act", "post_act"))
    pre, post = pre_act(base[:n]) + stage.attr("pre_eps"), stage.attr("post_mult") * post_act(base[n : 2 * n])
    return {"pre": pre, "post": post, "logits": base[2 * n :]}


def _head_gates(stage: Stage, o: Made, program: Program) -> Made:
    return {"pre": torch.sigmoid(o["mixes_scaled"] * o["scale"] + o["base"]) + stage.attr("pre_eps")}


def _comb(stage: Stage, o: Made, program: Program) -> Made:
    return {"comb": comb(stage.attr("comb"), o["logits"], program.dim("n"), dict(stage.attrs))}


def _collapse(stage: Stage, o: Made, program: Program) -> Made:
    return {"y": (o["pre"].reshape(-1, program.dim("n"), 1) * o["x"]).sum(1)}


def _first(stage: Stage, o: Made, program: Program) -> Made:
    return {"y": o["x"][:, 0]}


def _norm(stage: Stage, o: Made, program: Program) -> Made:
    mean = _mean_square(o["y"], (1,), stage.attr("acc"))
    z = o["y"] / (mean + stage.attr("eps")).sqrt()[:, None]
    return {"z": z * o["weight"] if "weight" in o else z}


def _post(stage: Stage, o: Made, program: Program) -> Made:
    n = program.dim("n")
    post, matrix = o["post"].reshape(-1, n, 1), o["comb"].reshape(-1, n, n)
    return {"x_next": post * o["f"][:, None, :] + matrix.transpose(1, 2) @ o["x"]}


def _mean(stage: Stage, o: Made, program: Program) -> Made:
    return {"y": o["x"].sum(1) / program.dim("n")}


def _sum(stage: Stage, o: Made, program: Program) -> Made:
    return {"y": o["x"].sum(1)}


def _quant(stage: Stage, o: Made, program: Program) -> Made:
    """Neither result has a gradient: a rounded integer has none, and its scale means nothing without it."""
    z, group = o["z"].detach(), int(stage.attr("group"))
    hidden = z.shape[1]
    groups = -(-hidden // group)
    parts = torch.nn.functional.pad(z, (0, groups * group - hidden)).reshape(-1, groups, group)
    largest = 127.0 if stage.attr("scheme") == "q8" else 448.0
    scale = parts.abs().amax(2) / largest
    if stage.attr("pow2"):
        mantissa, exponent = torch.frexp(scale)
        power = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).to(exponent.dtype))
        scale = torch.where((scale == 0) | ~scale.isfinite(), scale, power)
    safe = torch.where(scale == 0, torch.ones_like(scale), scale)[..., None]
    if stage.attr("scheme") == "q8":
        q = (parts * (1.0 / safe)).round().to(torch.int8)
    else:
        q = (parts / safe).clamp(-largest, largest).to(torch.float8_e4m3fn)
    return {"q": q.reshape(-1, groups * group)[:, :hidden], "q_scale": scale}


def _opaque(stage: Stage, o: Made, program: Program) -> Made:
    raise UsageError("U-BRANCH", f"stage {stage.name} is opaque, and no operator holds one", where=stage.name)


_STAGES = {
    "expand": _expand,
    "project": _project,
    "project_streams": _project_streams,
    "rowsq": _rowsq,
    "rowsq_streams": _rowsq_streams,
    "norm_streams": _norm_streams,
    "low_rank_gates": _low_rank_gates,
    "head_low_rank_gates": _low_rank_gates,
    "gated_mean": _gated_mean,
    "gates": _gates,
    "static_gates": _static_gates,
    "head_gates": _head_gates,
    "sinkhorn": _comb,
    "comb": _comb,
    "collapse": _collapse,
    "first": _first,
    "norm": _norm,
    "quant": _quant,
    "post": _post,
    "mean": _mean,
    "sum": _sum,
    "branch": _opaque,
    "engram": _opaque,
    "tap": _opaque,
}
