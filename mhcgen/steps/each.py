"""Projection and RMS of each stream alone, as plain hyper-connections have them.

```
fn row 0 . x[c] -> mixes[c]    row 1 . x[c] -> mixes[n + c]    row 2 + k . x[c] -> mixes[2n + c n + k]
```
Sums run over the columns of one stream in the same tree as elsewhere.
"""

from __future__ import annotations

from mhcgen.ir import Stage
from mhcgen.plan import Access
from mhcgen.steps.column import levels
from mhcgen.steps.context import Context, identifier
from mhcgen.steps.mix import apply_function, root_fields


def project_streams(context: Context, stage: Stage) -> None:
    """mixes of stream c from the rows of fn [2 + n, H] and that stream's columns."""
    mixes, warps = stage.result("mixes"), context.kernel.data_warps
    rows = context.elements(mixes)
    part = context.share(f"s_{identifier(mixes)}_part", "float", rows * warps)
    source, reads, declares = context.streams(stage.operand("x"))
    context.step(
        stage,
        "partial",
        "project_streams_partial",
        "data",
        (*reads, Access(part, True)),
        declares,
        part=part,
        fn=context.row(stage.operand("fn")),
        n=context.n,
        fn_rows=2 + context.n,
        warps=warps,
        levels=levels(context.columns.chunks),
        **source,
        **context.column_fields(),
    )
    context.step(
        stage,
        "total",
        "project_total",
        "mix",
        (Access(part, False), *context.small_accesses(mixes)),
        part=part,
        row_first=0,
        row_end=rows,
        warps=warps,
        targets=context.small_targets(mixes),
    )


def stream_roots(context: Context, stage: Stage) -> str:
    """Sums of squares of each stream of x, and what they are rescaled by; the shared array of those n numbers."""
    warps = context.kernel.data_warps
    acc = {"fp32": "float", "fp64": "double"}[stage.attr("acc")]
    part = context.share(f"s_{identifier(stage.name)}_part", acc, context.n * warps)
    roots = context.share(f"s_{identifier(stage.name)}_roots", "float", context.n)
    source, reads, declares = context.streams(stage.operand("x"))
    context.step(
        stage,
        "partial",
        "sumsq_streams_partial",
        "data",
        (*reads, Access(part, True)),
        declares,
        part=part,
        acc=acc,
        n=context.n,
        warps=warps,
        levels=levels(context.columns.chunks),
        **source,
        **context.column_fields(),
    )
    context.step(
        stage,
        "roots",
        "sumsq_streams_total",
        "mix",
        (Access(part, False), Access(roots, True)),
        part=part,
        acc=acc,
        n=context.n,
        warps=warps,
        count=context.hidden,
        eps=stage.attr("eps"),
        roots=roots,
        root=root_fields(stage)["root"],
    )
    return roots


def rowsq_streams(context: Context, stage: Stage) -> None:
    """Sums of squares of each stream, n roots, and the rescale of each stream's mixes by its own."""
    scaled, roots = stage.result("mixes_scaled"), stream_roots(context, stage)
    context.step(
        stage,
        "scale",
        "scale_streams",
        "mix",
        (Access(roots, False), *context.gate_accesses(stage.operand("mixes")), *context.small_accesses(scaled)),
        n=context.n,
        rows=context.elements(scaled),
        roots=roots,
        apply=apply_function(stage),
        source=context.gate_source(stage.operand("mixes")),
        targets=context.small_targets(scaled),
    )
