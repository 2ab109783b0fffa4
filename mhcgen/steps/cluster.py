"""A cluster of blocks works on a few tokens: block b owns a slice of the columns, block k leads token k.

```
block b   dots of its slice for every token  ──send──>  block k: totals, gates, Sinkhorn of token k
block k   pre gates of token k               ──send──>  every block: collapse of its slice
```
What is sent is counted where it arrives: a buffer's readers wait until all its bytes are there, and nobody else does.
Slices are aligned runs of 2^k columns, so the sums keep the one tree of mhcgen.arithmetic. The rows of fn are
spread over the warps and stay in registers for all tokens of the cluster.
"""

from __future__ import annotations

from typing import Any

from mhcgen.functions import ITEMSIZES, vector_of
from mhcgen.ir import Stage
from mhcgen.plan import BUFFER_BYTES, Access, Declare, Kernel, Node, Plan
from mhcgen.steps import mix
from mhcgen.steps.column import levels
from mhcgen.steps.context import Context, arrivals_of, identifier

#: Bytes of an asynchronous copy.
COPY_BYTES = 16


class ClusterContext(Context):
    """Adds the order of a cluster's exchange: all local sums are sent first, then totals are taken."""

    def __init__(self, plan: Plan, kernel: Kernel) -> None:
        super().__init__(plan, kernel)
        self.totals: list[Node] = []
        self.staged: set[str] = set()
        self.started: Stage | None = None
        #: by tokens: `1` or `count`, see `receive`; each a counter and its bytes
        self.expects: dict[str, list[tuple[str, str]]] = {"1": [], "count": []}

    def first_row(self, tensor: str) -> str:
        """Pointer to the cluster's first token of a global tensor."""
        return f"{identifier(tensor)}_c"

    @property
    def width(self) -> int:
        """Columns a block owns."""
        return 32 * self.columns.run

    def keep_streams(self, tensor: str) -> str:
        """Shared copy of the block's slice of the streams, for every token of the cluster."""
        count = self.kernel.tokens * self.n * self.width
        return self.share(self.shared(tensor), self.dtype(tensor), count)

    def copies(self, tensor: str) -> bool:
        """Whether its columns can be copied to shared memory asynchronously: vectors of 16 bytes."""
        dtype = self.dtype(tensor)
        return vector_of(dtype, self.columns.chunk, self.plan.options.scalar) * ITEMSIZES[dtype] == COPY_BYTES

    def receive(self, buffer: str, ctype: str, each: int, tokens: str = "1") -> dict[str, Any]:
        """Declare a buffer that other blocks send into, and the counter of what arrives.

        Args:
            buffer: its name.
            ctype: `float` or `double`.
            each: elements that arrive for a token.
            tokens: tokens it holds: `1`, the one that a leader leads, or `count`, all of the cluster.
        """
        self.share(buffer, ctype, each * (1 if tokens == "1" else self.kernel.tokens))
        counter = self.share(arrivals_of(buffer), "arrivals", 1)
        size = each * BUFFER_BYTES[ctype]
        self.expects[tokens].append((counter, f"{size}" if tokens == "1" else f"{size} * {tokens}"))
        return {"ranks": buffer, "counter": counter}

    def streams_of(self, stage: Stage, tensor: str) -> tuple[dict[str, Any], tuple[Access, ...]]:
        """Fields and accesses of a step that reads chunks of the streams of token k; stages them first."""
        dtype = self.dtype(tensor)
        keep = self.keep_streams(tensor)
        if tensor not in self.staged and not self.plan.made_in(self.kernel, tensor):
            fields: dict[str, Any] = {
                "source": self.first_row(tensor),
                "keep": keep,
                "n": self.n,
                "warps": self.kernel.data_warps,
                "width": self.width,
                **self.slice_fields(),
            }
            piece = f"stage_{identifier(tensor)}"
            if self.copies(tensor):
                self.step(stage, piece, "cluster_stage_async", "data", **fields)
                self.start(stage)
                self.step(stage, f"{piece}_wait", "copies_wait", "data", (Access(keep, True),))
            else:
                fields |= {"load": f"mhc_load_{dtype}", "store": f"mhc_store_{dtype}"}
                self.step(stage, piece, "cluster_stage", "data", (Access(keep, True),), **fields)
        self.start(stage)
        self.staged.add(tensor)
        found = {
            "streams_from": f"columns/cluster_streams_from_shared_{dtype}.cu.j2",
            "streams": keep,
            "width": self.width,
        }
        return found, (Access(keep, False),)

    def slice_fields(self) -> dict[str, Any]:
        """Fields every column step of a cluster has."""
        c = self.columns
        return {"chunk": c.chunk, "chunks": c.chunks, "hidden": self.hidden, "first": "column_first"}

    def start(self, stage: Stage) -> None:
        """Before the first send: every block of the cluster must have started, and know what it will be sent."""
        if self.started is None:
            self.started = stage
            self.step(stage, "started", "cluster_wait", "all")

    def finish(self) -> None:
        """Every send is known: take the totals that are left, and let the blocks start."""
        self.flush()
        assert self.started is not None
        self.step(
            self.started,
            "start",
            "cluster_arrive",
            "all",
            tuple(Access(counter, True, own=True) for pairs in self.expects.values() for counter, _ in pairs),
            constant=True,
            for_leaders=tuple(f"{counter}[0], {size}" for counter, size in self.expects["1"]),
            for_all=tuple(f"{counter}[0], {size}" for counter, size in self.expects["count"]),
        )

    def flush(self) -> None:
        """Everything has been sent: take the totals."""
        self.body += self.totals
        self.totals = []


def project(context: ClusterContext, stage: Stage) -> None:
    """mixes[t,r] = fn[r] . x[t], each block its slice of the columns, each warp its rows of fn."""
    mixes = stage.result("mixes")
    kernel, c = context.kernel, context.columns
    rows = context.elements(mixes)
    sent = context.receive(f"s_{identifier(mixes)}_ranks", "float", rows * kernel.cluster)
    rows_fields: dict[str, Any] = {
        "load_rows": "columns/cluster_load_rows.cu.j2",
        "fn": context.row(stage.operand("fn")),
        "rows": rows,
        "rows_per_warp": kernel.rows_per_warp,
        "row_length": context.n * context.hidden,
        "n": context.n,
    }
    registers = context.declare(
        "fn_rows", rows_per_warp=kernel.rows_per_warp, chunks=c.chunks, n=context.n, chunk=c.chunk
    )
    context.step(
        stage,
        "rows",
        "cluster_project_rows",
        "data",
        (),
        (registers,),
        # Post's streams are on the way to everything, so their loads go first; a dependent launch has time to wait.
        constant=context.plan.options.dependent or not context.plan.made_in(kernel, stage.operand("x")),
        **rows_fields,
        **context.slice_fields(),
    )
    source, reads = context.streams_of(stage, stage.operand("x"))
    context.step(
        stage,
        "dots",
        "cluster_project_dots",
        "data",
        (*reads, Access(sent["ranks"], True, remote=True)),
        (registers,),
        **sent,
        rows_per_pass=kernel.rows_per_warp * kernel.data_warps,
        cluster=kernel.cluster,
        tokens_at_once=2 if kernel.rows_per_warp * c.run <= 16 else 1,
        levels=levels(c.chunks),
        **rows_fields,
        **source,
        **context.slice_fields(),
    )
    context.step(
        stage,
        "total",
        "cluster_project_total",
        "mix",
        (Access(sent["ranks"], False), *context.small_accesses(mixes, own=True)),
        into=context.totals,
        ranks=sent["ranks"],
        rows=rows,
        cluster=kernel.cluster,
        targets=context.small_targets(mixes),
    )


def rowsq(context: ClusterContext, stage: Stage) -> None:
    """Sum of squares, each block its slice; the leader of a token takes the inverse RMS and rescales."""
    kernel, c = context.kernel, context.columns
    acc = {"fp32": "float", "fp64": "double"}[stage.attr("acc")]
    sent = context.receive(f"s_{identifier(stage.name)}_ranks", acc, kernel.cluster)
    source, reads = context.streams_of(stage, stage.operand("x"))
    context.step(
        stage,
        "partial",
        "cluster_sumsq_partial",
        "data",
        (*reads, Access(sent["ranks"], True, remote=True)),
        **sent,
        acc=acc,
        n=context.n,
        levels=levels(c.chunks),
        last_warp=kernel.data_warps - 1,
        warps=kernel.data_warps,
        **source,
        **context.slice_fields(),
    )
    context.flush()
    context.step(
        stage,
        "inverse",
        "cluster_sumsq_total",
        "mix",
        (Access(sent["ranks"], False),),
        (mix.rms_declare(context, stage),),
        ranks=sent["ranks"],
        acc=acc,
        cluster=kernel.cluster,
        count_of=context.n * context.hidden,
        eps=mix.rms_eps(context, stage),
        **mix.root_fields(stage),
    )
    mix.rescale(context, stage)


def gates(context: ClusterContext, stage: Stage) -> None:
    """The leader's gates. Where the collapse is in this kernel, a data warp of the leader makes the pre gates
    for every block, so that neither they nor the Sinkhorn wait for the other."""
    context.flush()
    pre = stage.result("pre")
    if context.place(pre).space != "shared":
        mix.gates(context, stage)
        return
    kernel = context.kernel
    rowsq_stage = context.program.stage(context.program.writers[stage.operand("mixes_scaled")])
    project_stage = context.program.stage(context.program.writers[rowsq_stage.operand("mixes")])
    mixes_ranks = f"s_{identifier(project_stage.result('mixes'))}_ranks"
    squares_ranks = f"s_{identifier(rowsq_stage.name)}_ranks"
    sent = context.receive(f"{context.shared(pre)}_ranks", "float", context.n, "count")
    parameters = context.declare("pre_parameters")
    context.step(
        stage,
        "pre_parameters",
        "cluster_pre_parameters",
        "gate",
        (),
        (parameters,),
        constant=True,
        scale=context.row(stage.operand("scale")),
        base=context.row(stage.operand("base")),
        n=context.n,
    )
    step = context.step(
        stage,
        "pre",
        "cluster_pre_gates",
        "gate",
        (Access(mixes_ranks, False), Access(squares_ranks, False), Access(sent["ranks"], True, remote=True)),
        (parameters,),
        mixes_ranks=mixes_ranks,
        squares_ranks=squares_ranks,
        acc={"fp32": "float", "fp64": "double"}[rowsq_stage.attr("acc")],
        **sent,
        cluster=kernel.cluster,
        n=context.n,
        count_of=context.n * context.hidden,
        rms_eps=mix.rms_eps(context, rowsq_stage),
        apply=mix.apply_function(rowsq_stage),
        pre_act=stage.option("pre_act", "sigmoid"),
        pre_eps=stage.attr("pre_eps"),
        **mix.root_fields(rowsq_stage),
    )
    # Before the leader's own totals in program order: they take the same sums.
    context.body.remove(step)
    first_total = next(i for i, node in enumerate(context.body) if getattr(node, "team", "") == "mix")
    context.body.insert(first_total, step)
    mix.gates(context, stage, without_pre=True)


def _column_source(
    context: ClusterContext, tensor: str
) -> tuple[dict[str, Any], tuple[Access, ...], tuple[Declare, ...]]:
    """A run too long for registers is read back from the row of token k, which this warp wrote."""
    fields, accesses, declares = context.column_source(tensor)
    if context.place(tensor).space != "thread":
        fields["column"] = f"({context.first_row(tensor)} + (long long)k * {context.hidden})"
    return fields, accesses, declares


def _column_sinks(
    context: ClusterContext, tensor: str
) -> tuple[dict[str, Any], tuple[Access, ...], tuple[Declare, ...]]:
    fields, accesses, declares = context.column_sinks(tensor)
    swap = {"columns/column_to_global.cu.j2": "columns/cluster_column_to_global.cu.j2"}
    fields["sinks"] = tuple(swap.get(sink, sink) for sink in fields["sinks"])
    if "out" in fields:
        fields["out"] = context.first_row(tensor)
    return fields, accesses, declares


def collapse(context: ClusterContext, stage: Stage) -> None:
    """y[t,h] = sum_c pre[t,c] x[t,c,h], each block its slice, one token a warp."""
    pre = stage.operand("pre")
    source, reads = context.streams_of(stage, stage.operand("x"))
    sinks, writes, declares = _column_sinks(context, stage.result("y"))
    inside = context.plan.made_in(context.kernel, pre)
    name = f"{context.shared(pre)}_ranks" if inside else context.first_row(pre)
    reads += (Access(name, False),) * inside
    context.step(
        stage,
        "columns",
        "cluster_collapse",
        "data",
        (*reads, *writes),
        declares,
        pre=name,
        n=context.n,
        **source,
        **sinks,
        **context.slice_fields(),
    )


def norm(context: ClusterContext, stage: Stage) -> None:
    """RMSNorm of y: each block's partial sum goes to all blocks, which add up the same total."""
    kernel, c = context.kernel, context.columns
    acc = {"fp32": "float", "fp64": "double"}[stage.attr("acc")]
    sent = context.receive(f"s_{identifier(stage.name)}_ranks", acc, kernel.cluster, "count")
    source, reads, declares = _column_source(context, stage.operand("y"))
    context.step(
        stage,
        "partial",
        "cluster_norm_partial",
        "data",
        (*reads, Access(sent["ranks"], True, remote=True)),
        declares,
        **sent,
        acc=acc,
        cluster=kernel.cluster,
        levels=levels(c.chunks),
        **source,
        **context.slice_fields(),
    )
    sinks, writes, more = _column_sinks(context, stage.result("z"))
    weighted = any(slot == "weight" for slot, _ in stage.operands)
    weight: dict[str, Any] = {"weight": context.row(stage.operand("weight"))} if weighted else {}
    context.step(
        stage,
        "apply",
        "cluster_norm_apply_weight" if weighted else "cluster_norm_apply",
        "data",
        (*reads, Access(sent["ranks"], False), *writes),
        declares + more,
        ranks=sent["ranks"],
        acc=acc,
        cluster=kernel.cluster,
        eps=stage.attr("eps"),
        **weight,
        **source,
        **sinks,
        **context.slice_fields(),
    )


def quant(context: ClusterContext, stage: Stage) -> None:
    """q = round(z / scale); a group lies within one block's slice and one warp."""
    group, run = stage.attr("group"), context.columns.run
    source, reads, declares = _column_source(context, stage.operand("z"))
    scheme = stage.attr("scheme") + ("_pow2" if stage.attr("pow2") else "")
    context.step(
        stage,
        "columns",
        "cluster_quant",
        "data",
        reads,
        declares,
        group=group,
        groups=-(-context.hidden // group),
        lanes=max(1, group // run),
        quantise=f"mhc_quantise_{stage.attr('scheme')}",
        scale_of=f"mhc_scale_{scheme}",
        store=f"mhc_store_{context.dtype(stage.result('q'))}",
        q=context.first_row(stage.result("q")),
        q_scale=context.first_row(stage.result("q_scale")),
        q_type={"q8": "signed char", "fp8": "unsigned char"}[stage.attr("scheme")],
        **source,
        **context.slice_fields(),
    )


def post(context: ClusterContext, stage: Stage) -> None:
    """x_next of the slice, to global memory and to shared memory, where the next stages read it."""
    target, x = stage.result("x_next"), stage.operand("x")
    kernel = context.kernel
    keep = context.keep_streams(target)
    dtype = context.dtype(target)
    context.step(
        stage,
        "columns",
        "cluster_post",
        "data",
        (Access(keep, True), Access(f"global:{target}", True, own=True)),
        post=context.first_row(stage.operand("post")),
        comb=context.first_row(stage.operand("comb")),
        branch=context.first_row(stage.operand("f")),
        n=context.n,
        warps=kernel.data_warps,
        out=context.first_row(target),
        keep=keep,
        dtype=dtype,
        store=f"mhc_store_{dtype}",
        round=f"mhc_round_{dtype}",
        streams=context.first_row(x),
        width=context.width,
        **context.slice_fields(),
    )
