"""What each stage of a Program computes, as text with its own constants: `mhcgen explain --formula`.

Shapes are per token: x[c,h] the streams, j and k streams, r mixes. A stage's line says what its attributes say, not
what its kind usually does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mhcgen.combs import comb_kind
from mhcgen.ir import Program, Stage
from mhcgen.models import MODELS
from mhcgen.stages import COMB_STAGES, KINDS


def _root(stage: Stage, mean: str) -> str:
    eps, place = stage.attr("eps"), stage.option("eps_place", "in")
    return {
        "in": f"sqrt({mean} + {eps})",
        "out": f"(sqrt({mean}) + {eps})",
        "clamp": f"(max(|x|, {eps}) / sqrt(n H))",
    }[place]


def _rowsq(stage: Stage) -> tuple[str, ...]:
    how = " / " if stage.option("form", "rsqrt") == "divide" else " * 1/"
    return (f"mixes_scaled[r] = mixes[r]{how}{_root(stage, 'mean over c,h of x^2')}",)


def _rowsq_streams(stage: Stage) -> tuple[str, ...]:
    how = " / " if stage.option("form", "rsqrt") == "divide" else " * 1/"
    return (f"mixes_scaled of stream c = its mixes{how}{_root(stage, 'mean over h of x[c]^2')}",)


def _added(text: str, eps: float) -> str:
    return f"{text} + {eps}" if eps else text


def _gates(stage: Stage) -> tuple[str, ...]:
    pre_act, post_act = stage.option("pre_act", "sigmoid"), stage.option("post_act", "sigmoid")
    mult = "" if stage.attr("post_mult") == 1.0 else f"{stage.attr('post_mult')} * "
    if stage.option("form", "affine") == "scaled":
        value = "{act}(m) * scale[{group}] + base"
        pre, post, logits = (value.format(act=a, group=g) for g, a in enumerate((pre_act, post_act, pre_act)))
        lines: list[str] = []
    else:
        lines = ["l = m * scale[0 pre, 1 post, 2 comb] + base"]
        pre, post, logits = f"{pre_act}(l)", f"{post_act}(l)", "l"
    lines += [f"pre = {_added(pre, stage.attr('pre_eps'))}", f"post = {mult}{post}"]
    if "logits" in dict(stage.results):
        lines.append(f"logits = {logits}")
    return ("m = mixes_scaled, pre n | post n | comb", *lines)


def _static_gates(stage: Stage) -> tuple[str, ...]:
    mult = "" if stage.attr("post_mult") == 1.0 else f"{stage.attr('post_mult')} * "
    pre = _added(f"{stage.option('pre_act', 'sigmoid')}(base_pre)", stage.attr("pre_eps"))
    lines = (f"pre = {pre}", f"post = {mult}{stage.option('post_act', 'sigmoid')}(base_post)")
    logits = ("logits = base_comb",) if "logits" in dict(stage.results) else ()
    return ("the same for every token; base is pre n | post n | comb", *lines, *logits)


def _head_gates(stage: Stage) -> tuple[str, ...]:
    return (f"pre = {_added('sigmoid(mixes_scaled * scale + base)', stage.attr('pre_eps'))}",)


def _norm(stage: Stage) -> tuple[str, ...]:
    weight = " * weight[h]" if "weight" in dict(stage.operands) else ""
    return (f"z[h] = y[h] * 1/sqrt(mean over h of y^2 + {stage.attr('eps')}){weight}",)


def _quant(stage: Stage) -> tuple[str, ...]:
    largest, step = (127, "round half to even") if stage.attr("scheme") == "q8" else (448, "round to e4m3")
    up = ", rounded up to a power of two" if stage.attr("pow2") else ""
    return (f"q_scale = amax of {stage.attr('group')} columns / {largest}{up}", f"q = {step}(z / q_scale)")


def _of_normed(stage: Stage) -> tuple[str, ...]:
    """The kind's own line, of the streams that the stage reads: x, or x_normed."""
    text = KINDS[stage.kind].meaning.replace("[t,", "[")
    return (text.replace("x[", "x_normed[") if stage.operand("x").endswith("x_normed") else text,)


def _norm_streams(stage: Stage) -> tuple[str, ...]:
    return (f"x_normed[c,h] = x[c,h] * 1/{_root(stage, 'mean over h of x[c]^2')} * (1 + weight[c*H+h])",)


def _low_rank_gates(stage: Stage) -> tuple[str, ...]:
    low = "bottleneck[r] = silu(mixes[r] / n), silu(m) = m sigmoid(m)"
    if "post" not in dict(stage.results):
        return (low,)
    return (low, f"post[c] = {stage.attr('post_mult')} * sigmoid(mixes[D + c] / n)")


_LINES: dict[str, Callable[[Stage], tuple[str, ...]]] = {
    "rowsq": _rowsq,
    "rowsq_streams": _rowsq_streams,
    "project": _of_normed,
    "gated_mean": _of_normed,
    "norm_streams": _norm_streams,
    "low_rank_gates": _low_rank_gates,
    "head_low_rank_gates": _low_rank_gates,
    "gates": _gates,
    "static_gates": _static_gates,
    "head_gates": _head_gates,
    "norm": _norm,
    "quant": _quant,
    **{kind: lambda stage: comb_kind(stage).formula(stage) for kind in COMB_STAGES},
}


def stage_formula(stage: Stage) -> tuple[str, ...]:
    """Lines of one stage, by its kind and attributes."""
    lines = _LINES.get(stage.kind)
    return lines(stage) if lines is not None else (KINDS[stage.kind].meaning.replace("[t,", "[").replace("[t]", ""),)


def formulas(program: Program) -> str:
    """Every stage of a Program in order, then what its model says of itself.

    Example:
        >>> from mhcgen.build import build
        >>> from mhcgen.formulas import formulas
        >>> lines = formulas(build("kromhc", streams=2, hidden=8)).splitlines()
        >>> print(next(line.strip() for line in lines if line.startswith("  comb")))
        comb      p_i = softmax(logits[2i], logits[2i + 1])[0] for i < k = log2 n
    """
    rows: list[tuple[str, str]] = []
    for stage in program.stages:
        lines = stage_formula(stage)
        rows += [(stage.name if index == 0 else "", line) for index, line in enumerate(lines)]
    text = ["formulas", *_table(rows)]
    parameters = [
        (t.name, f"[{', '.join(map(str, program.shape(t.name, 0)))}] {t.dtype}") for t in program.of_role("parameter")
    ]
    text += ["parameters", *_table(parameters)] if parameters else []
    model = MODELS.get(program.model)
    if model is not None:
        legal = model.legal_streams(16)
        every = f"1 to {legal[-1]}" if legal == tuple(range(1, len(legal) + 1)) else ", ".join(map(str, legal))
        rows = [("source", model.source), ("streams", every), *(("note", note) for note in model.notes)]
        text += [f"model {model.name}", *_table(rows)]
    return "\n".join(text)


def _table(rows: Iterable[tuple[str, str]]) -> list[str]:
    rows = list(rows)
    width = max((len(name) for name, _ in rows), default=0)
    return [f"  {name:{width}}  {line}".rstrip() for name, line in rows]
