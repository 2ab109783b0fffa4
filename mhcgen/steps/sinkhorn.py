"""The mixing matrix: steps of a comb program in whichever place the matrix lives, or a direct map."""

from __future__ import annotations

from typing import Any

from mhcgen.combs import CombProgram, DirectMap, ElementStep, HalfStep, LogStep, comb_program
from mhcgen.ir import Stage
from mhcgen.plan import Access, Declare, Loop, Node
from mhcgen.steps.context import LANE_LAYOUTS, Context, identifier
from mhcgen.steps.division import bounded_divisions
from mhcgen.steps.mix import lane_declares, lane_fields, store_matrix


def sinkhorn(context: Context, stage: Stage) -> None:
    """comb from logits: start steps, the loop, and the store; or element by element."""
    program = comb_program(stage, context.n)
    if isinstance(program, DirectMap):
        _direct(context, stage)
        return
    program = bounded_divisions(context, stage, program)
    if context.layout in LANE_LAYOUTS:
        _fetch_logits(context, stage)
    else:
        _fetch_logits_shared(context, stage)
    if program.potentials and context.layout not in LANE_LAYOUTS:
        _zero_potential(context, stage, program)
    for index, step in enumerate(program.start):
        _comb_step(context, stage, step, f"start{index}", context.body)
    if program.count > 0:
        inner: list[Node] = []
        if _stops_early(stage):
            _snapshot(context, stage, inner)
        for index, step in enumerate(program.loop):
            _comb_step(context, stage, step, f"loop{index}", inner)
        if _counts_iterations(stage):
            context.step(stage, "count", "count_iteration", "mix", declares=(_counter(context, program),), into=inner)
        if _stops_early(stage):
            _stop_if_stationary(context, stage, inner)
        context.body.append(Loop(f"{stage.name}.loop", program.count, tuple(inner)))
    if _counts_iterations(stage):
        context.step(
            stage,
            "iterations",
            "store_iterations",
            "mix",
            declares=(_counter(context, program),),
            target=context.row(stage.result("iterations")),
        )
    if program.potentials:
        _exp_potentials(context, stage)
    comb, suffix = stage.result("comb"), "_transposed" if program.transposed else ""
    if context.layout in LANE_LAYOUTS:
        store_matrix(context, stage, "store", comb, suffix)
        return
    matrix = _matrix(context, stage)
    sizes: dict[str, Any] = {"n": context.n} if program.transposed else {}
    context.step(
        stage,
        "store",
        f"store_matrix_shared{suffix}",
        "mix",
        (Access(matrix, False, own=True), *context.small_accesses(comb)),
        size=context.n * context.n,
        source=matrix,
        targets=context.small_targets(comb),
        **sizes,
    )


def _direct(context: Context, stage: Stage) -> None:
    """Each element by one call of the kind's device function; a kind without logits reads none."""
    logits = dict(stage.operands).get("logits")
    comb = stage.result("comb")
    context.step(
        stage,
        "elements",
        "comb_direct",
        "mix",
        (*(context.gate_accesses(logits) if logits else ()), *context.small_accesses(comb)),
        kind=stage.attr("comb"),
        source=context.gate_source(logits) if logits else "nullptr",
        n=context.n,
        size=context.n * context.n,
        targets=context.small_targets(comb),
    )


def _counter(context: Context, program: CombProgram) -> Declare:
    return context.declare("iterations" if program.counted else "iterations_from_zero")


def _stops_early(stage: Stage) -> bool:
    return bool(dict(stage.attrs).get("early_stop", False))


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
    sizes: dict[str, Any] = {} if context.layout == "registers" else {"n": context.n}
    context.step(
        stage,
        "fetch",
        f"fetch_logits_{context.layout}",
        "mix",
        context.gate_accesses(logits),
        lane_declares(context),
        early=not context.plan.made_in(context.kernel, logits),
        source=context.gate_source(logits),
        elements=lane_fields(context)["elements"],
        **sizes,
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
        ("element", "row"): {"power": power, "stride": 1},
        ("element", "col"): {"power": power, "stride": power},
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
    alone = context.n == 1  # then lane 0 does everything
    along, across = (context.n, 1) if step.axis == "row" else (1, context.n)
    context.step(
        stage,
        f"{name}.reduce",
        "reduce_shared",
        "mix",
        (Access(matrix, False, own=alone), Access(reduced, True, own=alone)),
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
        (Access(reduced, False, own=alone), Access(matrix, True, own=True)),
        into=into,
        matrix=matrix,
        reduced=reduced,
        n=context.n,
        size=context.n * context.n,
        fn=step.fn,
        eps=stage.attr("eps"),
    )


def _comb_step(
    context: Context, stage: Stage, step: HalfStep | ElementStep | LogStep, piece: str, into: list[Node]
) -> None:
    lanes = context.layout in LANE_LAYOUTS
    if isinstance(step, HalfStep):
        (_half_step_lanes if lanes else _half_step_shared)(context, stage, step, piece, into)
    elif isinstance(step, ElementStep):
        _element_step(context, stage, step, piece, into)
    else:
        (_potential_lanes if lanes else _potential_shared)(context, stage, step, piece, into)


def _element_step(context: Context, stage: Stage, step: ElementStep, piece: str, into: list[Node]) -> None:
    name = f"{piece}.{step.fn}"
    if context.layout in LANE_LAYOUTS:
        elements = lane_fields(context)["elements"]
        declares = lane_declares(context)
        context.step(stage, name, "each_lanes", "mix", (), declares, into=into, fn=step.fn, elements=elements)
        return
    matrix, size = _matrix(context, stage), context.n * context.n
    writes = (Access(matrix, True, own=True),)
    context.step(stage, name, "each_shared", "mix", writes, into=into, fn=step.fn, matrix=matrix, size=size)


# ---- potentials of rows and columns: the log domain -------------------------------------------------
def _potential_declares(context: Context) -> tuple[Declare, ...]:
    """A lane holds the potentials of the rows and columns it has elements of."""
    rows, cols = {"element": (1, 1), "row": (1, context.n), "registers": (context.n, context.n)}[context.layout]
    return (*lane_declares(context), context.declare("potentials", rows=rows, cols=cols))


def _potential_lanes(context: Context, stage: Stage, step: LogStep, piece: str, into: list[Node]) -> None:
    n, power = context.n, int(lane_fields(context)["power"])
    mine, other = ("row", "col") if step.axis == "row" else ("col", "row")
    names = {"mine": f"{mine}_potential", "other": f"{other}_potential"}
    along, across = (n, 1) if step.axis == "row" else (1, n)
    first, last = (1, power) if step.axis == "row" else (power, power * power)
    choices: dict[str, tuple[str, dict[str, Any]]] = {
        "element": ("potential_element", {"first": first, "last": last, **names}),
        "row": (f"potential_row_{step.axis}", {"n": n} if step.axis == "row" else {"n": n, "last": power}),
        "registers": ("potential_registers", {"n": n, "along": along, "across": across, **names}),
    }
    template, fields = choices[context.layout]
    name = f"{piece}.{step.axis}_potential"
    context.step(stage, name, template, "mix", (), _potential_declares(context), into=into, **fields)


def _potential_buffer(context: Context, stage: Stage, axis: str) -> str:
    return context.share(f"s_{identifier(stage.name)}_{axis}", "float", context.n)


def _zero_potential(context: Context, stage: Stage, program: CombProgram) -> None:
    """The potential that the first step reads starts at 0; the first step itself makes the other."""
    first = program.loop[0]
    assert isinstance(first, LogStep)
    buffer = _potential_buffer(context, stage, "col" if first.axis == "row" else "row")
    writes = (Access(buffer, True, own=True),)
    context.step(stage, "zero", "potential_zero", "mix", writes, n=context.n, potential=buffer)


def _potential_shared(context: Context, stage: Stage, step: LogStep, piece: str, into: list[Node]) -> None:
    matrix, n = _matrix(context, stage), context.n
    mine = _potential_buffer(context, stage, step.axis)
    other = _potential_buffer(context, stage, "col" if step.axis == "row" else "row")
    along, across = (n, 1) if step.axis == "row" else (1, n)
    context.step(
        stage,
        f"{piece}.{step.axis}_potential",
        "potential_shared",
        "mix",
        # own: lane i alone writes potential i, and with one stream lane 0 alone does everything.
        (Access(matrix, False, own=n == 1), Access(other, False, own=n == 1), Access(mine, True, own=True)),
        into=into,
        matrix=matrix,
        mine=mine,
        other=other,
        n=n,
        along=along,
        across=across,
    )


def _exp_potentials(context: Context, stage: Stage) -> None:
    """C = exp(row potential + logits + column potential)."""
    if context.layout in LANE_LAYOUTS:
        sizes: dict[str, Any] = {} if context.layout == "element" else {"n": context.n}
        template = f"exp_potentials_{context.layout}"
        context.step(stage, "exp", template, "mix", (), _potential_declares(context), **sizes)
        return
    matrix = _matrix(context, stage)
    alone = context.n == 1  # then lane 0 does everything
    row, col = (_potential_buffer(context, stage, axis) for axis in ("row", "col"))
    context.step(
        stage,
        "exp",
        "exp_potentials_shared",
        "mix",
        (Access(row, False, own=alone), Access(col, False, own=alone), Access(matrix, True, own=True)),
        matrix=matrix,
        row=row,
        col=col,
        n=context.n,
        size=context.n * context.n,
    )
