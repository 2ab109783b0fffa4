"""Column work: every data thread owns an aligned run of columns."""

from __future__ import annotations

from typing import Any

from mhcgen.ir import Stage
from mhcgen.plan import Access, Declare
from mhcgen.steps.context import Context, identifier

#: Gates and matrix elements a thread may hold beside its columns.
HELD_GATES = 24


def levels(chunks: int) -> int:
    """Levels of the binary tree over the chunks of a run."""
    return (chunks - 1).bit_length()


def expand(context: Context, stage: Stage) -> None:
    """x[t,c,:] = e[t,:]: copies, no rounding."""
    source, reads, declares = context.column_source(stage.operand("e"))
    target = stage.result("x")
    context.step(
        stage,
        "copy",
        "expand",
        "data",
        reads + stream_writes(context, target),
        declares + stream_declares(context, target),
        n=context.n,
        **stream_sinks(context, target),
        **source,
        **context.column_fields(),
    )


def stream_sinks(context: Context, tensor: str) -> dict[str, Any]:
    """Fields of a step that writes chunks of a stream tensor."""
    in_thread = context.place(tensor).space == "thread"
    sinks = ("columns/stream_to_registers.cu.j2",) * in_thread
    fields: dict[str, Any] = {"out_registers": context.registers(tensor)} if in_thread else {}
    if not in_thread or context.plan.escapes(context.kernel, tensor):
        dtype, last = context.dtype(tensor), context.last(tensor)
        sinks += (f"columns/stream{last}_to_global{last and f'_{dtype}'}.cu.j2",)
        fields["out"] = context.row(tensor)
        fields |= {} if last else {"store": f"mhc_store_{dtype}"}
    return {"sinks": sinks, **fields}


def stream_writes(context: Context, tensor: str) -> tuple[Access, ...]:
    """Accesses behind `stream_sinks`."""
    return (Access(f"global:{tensor}", True, own=True),)


def stream_declares(context: Context, tensor: str) -> tuple[Declare, ...]:
    """Registers behind `stream_sinks`."""
    return (context.declare_streams(tensor),) * (context.place(tensor).space == "thread")


def project(context: Context, stage: Stage) -> None:
    """mixes[t,r] = fn[r] . x[t]: columns add their streams in order, then the column tree."""
    x, mixes = stage.operand("x"), stage.result("mixes")
    rows = context.elements(mixes)
    split = context.kernel.grid == "token_rows"
    here = 1 if split else rows  # rows of one block
    bounds = {"row_first": "row_first", "row_end": "row_first + 1"} if split else {"row_first": 0, "row_end": rows}
    part = context.share(f"s_{identifier(mixes)}_part", "float", here * context.kernel.data_warps)
    own = context.kernel.warps == here == 1  # then lane 0 alone writes the one partial sum and reads it
    source, reads, declares = context.streams(x)
    fields = context.column_fields()
    context.step(
        stage,
        "partial",
        "project_partial",
        "data",
        (*reads, Access(part, True, own=own)),
        declares,
        part=part,
        fn=context.row(stage.operand("fn")),
        n=context.n,
        **bounds,
        row_length=context.n * context.hidden,
        warps=context.kernel.data_warps,
        levels=levels(context.columns.chunks),
        **source,
        **fields,
    )
    context.step(
        stage,
        "total",
        "project_total",
        "mix",
        (Access(part, False, own=own), *context.small_accesses(mixes, own=True)),
        part=part,
        **bounds,
        warps=context.kernel.data_warps,
        targets=context.small_targets(mixes),
    )


def collapse(context: Context, stage: Stage) -> None:
    """y[t,h] = sum_c pre[t,c] x[t,c,h]: fused multiply-adds in stream order."""
    pre = stage.operand("pre")
    source, reads, declares = context.streams(stage.operand("x"))
    sinks, writes, more = context.column_sinks(stage.result("y"))
    context.step(
        stage,
        "columns",
        "collapse",
        "data",
        (*context.gate_accesses(pre), *reads, *writes),
        declares + more,
        pre=context.gate_source(pre),
        n=context.n,
        **source,
        **sinks,
        **context.column_fields(),
    )


def norm(context: Context, stage: Stage) -> None:
    """z = y / sqrt(mean(y^2) + eps) * weight: mean over the column tree, (y * inverse) * weight."""
    y = stage.operand("y")
    acc = {"fp32": "float", "fp64": "double"}[stage.attr("acc")]
    part = context.share(f"s_{identifier(stage.name)}_part", acc, context.kernel.data_warps)
    # With one data warp, lane 0 alone writes the one partial sum and reads it.
    own = context.kernel.data_warps == 1
    source, reads, declares = context.column_source(y)
    fields = context.column_fields()
    context.step(
        stage,
        "partial",
        "norm_partial",
        "data",
        (*reads, Access(part, True, own=own)),
        declares,
        part=part,
        acc=acc,
        levels=levels(context.columns.chunks),
        **source,
        **fields,
    )
    sinks, writes, more = context.column_sinks(stage.result("z"))
    weighted = any(slot == "weight" for slot, _ in stage.operands)
    weight: dict[str, Any] = {"weight": context.row(stage.operand("weight"))} if weighted else {}
    context.step(
        stage,
        "apply",
        "norm_apply_weight" if weighted else "norm_apply",
        "data",
        (*reads, Access(part, False, own=own), *writes),
        declares + more,
        part=part,
        acc=acc,
        warps=context.kernel.data_warps,
        eps=stage.attr("eps"),
        **weight,
        **source,
        **sinks,
        **fields,
    )


def quant(context: Context, stage: Stage) -> None:
    """q = round(z / scale) by groups of columns; a zero group has scale 0 and q 0."""
    run, group = context.columns.run, stage.attr("group")
    assert group <= 32 * run, "place gives each thread enough columns that a warp holds a whole group"
    source, reads, declares = context.column_source(stage.operand("z"))
    scheme = stage.attr("scheme") + ("_pow2" if stage.attr("pow2") else "")
    inside = run >= group
    span = {"group_chunks": group // context.columns.chunk} if inside else {"lanes": group // run}
    context.step(
        stage,
        "columns",
        "quant_in_thread" if inside else "quant_across_lanes",
        "data",
        reads,
        declares,
        group=group,
        **span,
        quantise=f"mhc_quantise_{stage.attr('scheme')}",
        scale_of=f"mhc_scale_{scheme}",
        store=f"mhc_store_{context.dtype(stage.result('q'))}",
        q=context.row(stage.result("q")),
        q_scale=context.row(stage.result("q_scale")),
        q_type={"q8": "signed char", "fp8": "unsigned char"}[stage.attr("scheme")],
        **source,
        **context.column_fields(),
    )


def post(context: Context, stage: Stage) -> None:
    """x_next[t,k,h] = post[t,k] f[t,h] + sum_j comb[t,j,k] x[t,j,h], fused multiply-adds in stream order."""
    gates, comb, target = stage.operand("post"), stage.operand("comb"), stage.result("x_next")
    # The old streams and the branch's output end here, the new ones take their place: caches of few tokens drop them.
    # At many tokens such loads were slower (docs/measurements, 2026-12-01).
    once = context.plan.options.regime == "decode"
    source, reads, declares = context.streams(stage.operand("x"), once=once)
    branch, more_reads, more_declares = context.column_source(stage.operand("f"), once=once)
    # Few enough gates stay in registers, loaded side by side; more are read where they are used.
    held = context.n * (context.n + 1) <= HELD_GATES
    load = "mhc_load_fp32" if context.n == 4 else "mhc_copy_floats"
    gates_fields: dict[str, Any] = {"load_gates": load} if held else {}
    context.step(
        stage,
        "columns",
        "post_held" if held else "post",
        "data",
        (
            *context.gate_accesses(gates),
            *context.gate_accesses(comb),
            *reads,
            *more_reads,
            *stream_writes(context, target),
        ),
        declares + more_declares + stream_declares(context, target),
        post=context.gate_source(gates),
        comb=context.gate_source(comb),
        **gates_fields,
        n=context.n,
        **stream_sinks(context, target),
        round=f"mhc_round_{context.dtype(target)}",
        **source,
        **branch,
        **context.column_fields(),
    )


def mean(context: Context, stage: Stage) -> None:
    """y[t,h] = (sum_c x[t,c,h]) / n: streams added in order, then one division."""
    source, reads, declares = context.streams(stage.operand("x"))
    sinks, writes, more = context.column_sinks(stage.result("y"))
    context.step(
        stage,
        "columns",
        "mean",
        "data",
        (*reads, *writes),
        declares + more,
        n=context.n,
        count=float(context.n),
        **source,
        **sinks,
        **context.column_fields(),
    )


def total(context: Context, stage: Stage) -> None:
    """y[t,h] = sum_c x[t,c,h], streams added in order; or stream 0 alone (stage kind `first`)."""
    source, reads, declares = context.streams(stage.operand("x"))
    sinks, writes, more = context.column_sinks(stage.result("y"))
    context.step(
        stage,
        "columns",
        stage.kind,
        "data",
        (*reads, *writes),
        declares + more,
        n=context.n,
        **source,
        **sinks,
        **context.column_fields(),
    )
