"""Alternate normalisation of rows and columns of a positive matrix (Sinkhorn and Knopp, 1967).

Public code differs in where it starts, where eps goes, which axis comes first, and in which domain it works;
each is an attribute, and the defaults are the DeepSeek-V4 inference rule: softmax over the last axis + eps, one
column step, then iters - 1 times row and column, every sum + eps.
"""

from __future__ import annotations

from mhcgen.combs.family import Array, CombKind, CombProgram, CombStep, ElementStep, HalfStep, LogStep
from mhcgen.ir import Stage

OPTIONS = {
    #: linear: elements are divided. log: potentials of rows and columns, C = exp(f + L + g), no eps.
    "domain": ("linear", "log"),
    #: softmax stands for the first half of iteration 1. exp and exp_rowmax (max of the first axis of `order`
    #: subtracted) are followed by `iters` whole iterations.
    "start": ("softmax", "exp", "exp_rowmax"),
    #: add: sum + eps (and softmax + eps). threshold: divide only where the sum exceeds eps. none: no eps.
    "eps_mode": ("add", "threshold", "none"),
    #: the two halves of an iteration; the second is the last.
    "order": ("row-col", "col-row"),
    #: the logits' axes: in: (from_stream, to_stream). out: (to_stream, from_stream), so that rows run over sources.
    "orient": ("in", "out"),
}


def halves(stage: Stage) -> tuple[str, str]:
    """First and second axis of an iteration."""
    first, _, second = KIND.option(stage, "order").partition("-")
    return first, second


def _steps(stage: Stage, n: int) -> CombProgram:
    iters = int(stage.attr("iters"))
    transposed = KIND.option(stage, "orient") == "out"
    if KIND.option(stage, "domain") == "log":
        potentials = tuple(LogStep(axis) for axis in halves(stage))
        return CombProgram((), potentials, iters, potentials=True, transposed=transposed)
    mode = KIND.option(stage, "eps_mode")
    finish, fn = {"add": ("add_eps", "divide"), "threshold": ("plain", "divide_above"), "none": ("plain", "divide")}[
        mode
    ]
    first, second = halves(stage)
    loop = tuple(HalfStep(axis, "sum", finish, fn) for axis in (first, second))
    subtract_max = HalfStep(first, "max", "plain", "exp_of_difference")
    start = KIND.option(stage, "start")
    if start == "softmax":
        divide = "divide_then_add_eps" if mode == "add" else "divide"
        softmax: tuple[CombStep, ...] = (subtract_max, HalfStep(first, "sum", "plain", divide))
        return CombProgram((*softmax, loop[1]), loop, iters - 1, counted=1, transposed=transposed)
    begin: CombStep = ElementStep("exp_element") if start == "exp" else subtract_max
    return CombProgram((begin,), loop, iters, transposed=transposed)


def _check(stage: Stage) -> str:
    if KIND.option(stage, "domain") == "linear":
        return ""
    given = [key for key in ("start", "eps_mode") if key in dict(stage.attrs)]
    if given:
        return f"the log domain has no {given[0]}: it starts from zero potentials and adds no eps"
    return (
        "the log domain keeps no matrix whose bits could stop changing" if stage.option("early_stop", False) else ""
    )


def _formula(stage: Stage) -> tuple[str, ...]:
    axis = {"row": "last axis", "col": "first axis"}
    first, second = (axis[name] for name in halves(stage))
    iters, eps = stage.attr("iters"), stage.attr("eps")
    comb = "comb[j,k] = C[j,k]" if KIND.option(stage, "orient") == "in" else "comb[j,k] = C[k,j]"
    layout = "L[j,k]" if KIND.option(stage, "orient") == "in" else "L[k,j], rows over to_stream"
    if KIND.option(stage, "domain") == "log":
        return (
            f"L = logits as n x n, {layout}; f = g = 0",
            f"{iters} times: f = -logsumexp(L + g, {first}); g = -logsumexp(L + f, {second})",
            f"C = exp(f + L + g); {comb}",
        )
    mode = KIND.option(stage, "eps_mode")
    divided = {"add": f"(sum + {eps})", "threshold": f"sum where sum > {eps}", "none": "sum"}[mode]
    start = KIND.option(stage, "start")
    added = f" + {eps}" if mode == "add" else ""
    begin = {
        "softmax": f"C = softmax(L, {first}){added}; C = C / {divided} over the {second}",
        "exp": "C = exp(L)",
        "exp_rowmax": f"C = exp(L - max over the {first})",
    }[start]
    times = iters - 1 if start == "softmax" else iters
    return (
        f"L = logits as n x n, {layout}",
        begin,
        f"{times} times: C = C / {divided} over the {first}; C = C / {divided} over the {second}",
        comb,
    )


def _limit(stage: Stage) -> float:
    """Without eps a line of zeros divides by zero; exp alone overflows at 88.7 and its n-fold sum before."""
    if KIND.option(stage, "domain") == "log":
        return float("inf")
    if KIND.option(stage, "eps_mode") == "none":
        return 40.0
    return 80.0 if KIND.option(stage, "start") == "exp" else float("inf")


def _aim(n: int, shift: int) -> Array:
    import numpy as np

    return 10.0 * np.roll(np.eye(n), shift, axis=1).reshape(-1)


KIND = CombKind(
    name="sinkhorn",
    source="DeepSeek-V4 inference rule; options from TransformerEngine, Liger, Megatron, TileOPs, mHC.cu, mHC paper",
    logits=lambda n: n * n,
    steps=_steps,
    formula=_formula,
    stage="sinkhorn",
    options=OPTIONS,
    check=_check,
    aim=_aim,
    limit=_limit,
)
