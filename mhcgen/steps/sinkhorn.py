"""The mixing matrix: half-steps of a comb program in whichever place the matrix lives."""

from __future__ import annotations

from typing import Any

from mhcgen.combs import HalfStep, comb_program
from mhcgen.ir import Stage
from mhcgen.plan import Access, Declare, Loop, Node
from mhcgen.steps.context import LANE_LAYOUTS, Context, identifier
from mhcgen.steps.mix import _store_matrix, lane_declares, lane_fields


def sinkhorn(context: Context, stage: Stage) -> None:
    """comb from logits: start steps, the loop, and the store."""
    program = comb_program(stage)
    lanes = context.layout in LANE_LAYOUTS
    if lanes:
        _fetch_logits(context, stage)
    else:
        _fetch_logits_shared(context, stage)
    half = _half_step_lanes if lanes else _half_step_shared
    for index, step in enumerate(program.start):
        half(context, stage, step, f"start{index}", context.body)
    if program.count > 0:
        inner: list[Node] = []
        if stage.attr("early_stop"):
            _snapshot(context, stage, inner)
        for index, step in enumerate(program.loop):
            half(context, stage, step, f"loop{index}", inner)
        if _counts_iterations(stage):
            context.step(
                stage, "count", "count_iteration", "mix", declares=(context.declare("iterations"),), into=inner
            )
        if stage.attr("early_stop"):
            _stop_if_stationary(context, stage, inner)
        context.body.append(Loop(f"{stage.name}.loop", program.count, tuple(inner)))
    if _counts_iterations(stage):
        context.step(
            stage,
            "iterations",
            "store_iterations",
            "mix",
            declares=(context.declare("iterations"),),
            target=context.row(stage.result("iterations")),
        )
    comb = stage.result("comb")
    if lanes:
        _store_matrix(context, stage, "store", comb)
        return
    matrix = _matrix(context, stage)
    context.step(
        stage,
        "store",
        "store_matrix_shared",
        "mix",
        (Access(matrix, False, own=True), *context.small_accesses(comb)),
        size=context.n * context.n,
        source=matrix,
        targets=context.small_targets(comb),
    )


def _matrix(context: Context, stage: Stage) -> str:
    """Shared buffer the stage works in: that of its logits, its own where another stage reads those too."""
    logits = stage.operand("logits")
    inside = [r for r in context.program.readers[logits] if r in context.kernel.stages]
    name = stage.name if len(inside) > 1 else logits
    return context.share(f"s_{identifier(name)}", "float", context.n * context.n)


def _counts_iterations(stage: Stage) -> bool:
    return any(slot == "iterations" for slot, _ in stage.results)


def _snapshot(context: Context, stage: Stage, into: list[Node]) -> None:
    """Keep each lane's elements, to see whether an iteration changes a bit."""
    elements = _own_elements(context)
    declares = (context.declare("snapshot", elements=elements), *_matrix_declares(context))
    if context.layout in LANE_LAYOUTS:
        context.step(stage, "snapshot", "snapshot_lanes", "mix", (), declares, into=into, elements=elements)
        return
    matrix = _matrix(context, stage)
    context.step(
        stage,
        "snapshot",
        "snapshot_shared",
        "mix",
        (Access(matrix, False, own=True),),
        declares,
        into=into,
        matrix=matrix,
        size=context.n * context.n,
        elements=elements,
    )


def _stop_if_stationary(context: Context, stage: Stage, into: list[Node]) -> None:
    """Leave the loop once an iteration changed no bit: all further ones would change none either."""
    elements = _own_elements(context)
    declares = (context.declare("snapshot", elements=elements), *_matrix_declares(context))
    if context.layout in LANE_LAYOUTS:
        context.step(stage, "stop", "stationary_lanes", "mix", (), declares, into=into, elements=elements)
        return
    matrix = _matrix(context, stage)
    fields: dict[str, Any] = {"matrix": matrix, "size": context.n * context.n, "elements": elements}
    reads = (Access(matrix, False, own=True),)
    if context.plan.options.sync != "block":
        context.step(stage, "stop", "stationary_shared", "mix", reads, declares, into=into, **fields)
        return
    # With block barriers in the loop every thread must leave it together, so the vote goes through memory.
    flag = context.share(f"s_{identifier(stage.name)}_stop", "int", 1)
    context.step(
        stage, "vote", "vote_shared", "mix", (*reads, Access(flag, True)), declares, into=into, flag=flag, **fields
    )
    context.step(stage, "leave", "leave", "all", (Access(flag, False),), into=into, flag=flag)


def _own_elements(context: Context) -> int:
    if context.layout in LANE_LAYOUTS:
        return int(lane_fields(context)["elements"])
    return -(-context.n * context.n // 32)


def _matrix_declares(context: Context) -> tuple[Declare, ...]:
    return lane_declares(context) if context.layout in LANE_LAYOUTS else ()


def _fetch_logits(context: Context, stage: Stage) -> None:
    logits = stage.operand("logits")
    if context.place(logits).space == "lane":
        return
    context.step(
        stage,
        "fetch",
        f"fetch_logits_{context.layout}",
        "mix",
        context.gate_accesses(logits),
        lane_declares(context),
        early=not context.plan.made_in(context.kernel, logits),
        source=context.gate_source(logits),
        n=context.n,
        elements=lane_fields(context)["elements"],
    )


def _fetch_logits_shared(context: Context, stage: Stage) -> None:
    logits, matrix = stage.operand("logits"), _matrix(context, stage)
    if matrix == context.shared(logits) and context.plan.made_in(context.kernel, logits):
        return
    context.step(
        stage,
        "fetch",
        "store_matrix_shared",
        "mix",
        (*context.gate_accesses(logits), Access(matrix, True, own=True)),
        size=context.n * context.n,
        source=context.gate_source(logits),
        targets=(matrix,),
    )


def _half_step_lanes(context: Context, stage: Stage, step: HalfStep, piece: str, into: list[Node]) -> None:
    context.step(
        stage,
        f"{piece}.{step.axis}_{step.op}",
        f"half_{context.layout}_{step.axis}",
        "mix",
        (),
        lane_declares(context),
        into=into,
        op=step.op,
        finish=step.finish,
        fn=step.fn,
        eps=stage.attr("eps"),
        **_half_fields(context, step),
    )


def _half_fields(context: Context, step: HalfStep) -> dict[str, Any]:
    """Sizes the template of this layout and axis names."""
    fields = lane_fields(context)
    power = int(fields["power"])
    wanted = {
        ("element", "row"): {"first": 1, "last": power},
        ("element", "col"): {"first": power, "last": power * power},
        ("row", "row"): {"n": context.n},
        ("row", "col"): {"n": context.n, "last": power},
        ("registers", "row"): {"n": context.n},
        ("registers", "col"): {"n": context.n},
    }
    return wanted[context.layout, step.axis]


def _half_step_shared(context: Context, stage: Stage, step: HalfStep, piece: str, into: list[Node]) -> None:
    matrix = _matrix(context, stage)
    reduced = context.share(f"s_{identifier(stage.name)}_{step.axis}", "float", context.n)
    name = f"{piece}.{step.axis}_{step.op}"
    along, across = (context.n, 1) if step.axis == "row" else (1, context.n)
    context.step(
        stage,
        f"{name}.reduce",
        "reduce_shared",
        "mix",
        (Access(matrix, False), Access(reduced, True)),
        into=into,
        matrix=matrix,
        reduced=reduced,
        n=context.n,
        along=along,
        across=across,
        op=step.op,
        finish=step.finish,
        eps=stage.attr("eps"),
    )
    context.step(
        stage,
        f"{name}.map",
        f"map_shared_{step.axis}",
        "mix",
        # own: here and in the store, lane i alone touches elements i, i + 32, ...
        (Access(reduced, False), Access(matrix, True, own=True)),
        into=into,
        matrix=matrix,
        reduced=reduced,
        n=context.n,
        size=context.n * context.n,
        fn=step.fn,
        eps=stage.attr("eps"),
    )
