"""Steps of the gated residual: normed streams, gates of low rank, and the gated mean.

```
x ── squares of each stream ── n roots ── x_normed ──┬── project ── mixes ── silu(mixes / n) ── bottleneck ──┐
                                                     └── mean over c of sigmoid(up . bottleneck) x_normed ──┴── y
```
Gates of every element are never in memory: the thread that owns a column makes those of its streams, each one chain
of fused multiply-adds over the rank. The order of that chain does not depend on any schedule.
"""

from __future__ import annotations

from typing import Any

from mhcgen.ir import Stage
from mhcgen.plan import Access
from mhcgen.steps.column import stream_declares, stream_sinks, stream_writes
from mhcgen.steps.context import Context
from mhcgen.steps.each import stream_roots

#: Floats of up that a thread may have on their way, and rows of it that they may belong to.
LOADED_FLOATS = 64
ROWS_AT_ONCE = 8


def norm_streams(context: Context, stage: Stage) -> None:
    """x_normed = (x * inverse RMS of its stream) * (1 + weight)."""
    roots = stream_roots(context, stage)
    source, reads, declares = context.streams(stage.operand("x"))
    target = stage.result("x_normed")
    context.step(
        stage,
        "apply",
        "norm_streams_apply",
        "data",
        (Access(roots, False), *reads, *stream_writes(context, target)),
        declares + stream_declares(context, target),
        n=context.n,
        roots=roots,
        weight=context.row(stage.operand("weight")),
        round=f"mhc_round_{context.dtype(target)}",
        **stream_sinks(context, target),
        **source,
        **context.column_fields(),
    )


def low_rank_gates(context: Context, stage: Stage) -> None:
    """The bottleneck, one lane an element, and post gates where the stage has them."""
    mixes, bottleneck = stage.operand("mixes"), stage.result("bottleneck")
    common: dict[str, Any] = {
        "source": context.gate_source(mixes),
        "rank": context.elements(bottleneck),
        "count": float(context.n),
    }
    context.step(
        stage,
        "silu",
        "low_rank",
        "mix",
        (*context.gate_accesses(mixes, own=True), *context.small_accesses(bottleneck, own=True)),
        targets=context.small_targets(bottleneck),
        **common,
    )
    post = dict(stage.results).get("post")
    if post is not None:
        context.step(
            stage,
            "post",
            "low_rank_post",
            "mix",
            (*context.gate_accesses(mixes), *context.small_accesses(post)),
            n=context.n,
            post_mult=stage.attr("post_mult"),
            post_targets=context.small_targets(post),
            **common,
        )


def gated_mean(context: Context, stage: Stage) -> None:
    """y = mean over streams of x, each element times its own gate."""
    bottleneck, x = stage.operand("bottleneck"), stage.operand("x")
    # Rows of up that are loaded before the first is used; streams in registers leave no room for more than one.
    floats = context.n * context.columns.chunk
    at_once = 1 if context.place(x).space == "thread" else max(1, min(ROWS_AT_ONCE, LOADED_FLOATS // floats))
    source, reads, declares = context.streams(x)
    sinks, writes, more = context.column_sinks(stage.result("y"))
    context.step(
        stage,
        "columns",
        "gated_mean",
        "data",
        (*context.gate_accesses(bottleneck), *reads, *writes),
        declares + more,
        bottleneck=context.gate_source(bottleneck),
        up=context.row(stage.operand("up")),
        rank=context.elements(bottleneck),
        rows_at_once=at_once,
        row_length=context.n * context.hidden,
        n=context.n,
        count=float(context.n),
        **source,
        **sinks,
        **context.column_fields(),
    )
