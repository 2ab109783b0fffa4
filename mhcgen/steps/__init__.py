"""Stages of a placed kernel become steps: who runs a piece, what it touches, which template renders it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import networkx as nx

from mhcgen.ir import Stage
from mhcgen.plan import Buffer, Kernel, Node, Plan, Step
from mhcgen.stages import COMB_STAGES
from mhcgen.steps import cluster, column, each, gated, mix, sinkhorn
from mhcgen.steps.context import Context

Expand = Callable[[Context, Stage], None]

EXPANDERS: dict[str, Expand] = {
    "expand": column.expand,
    "project": column.project,
    "rowsq": mix.rowsq,
    "project_streams": each.project_streams,
    "rowsq_streams": each.rowsq_streams,
    "norm_streams": gated.norm_streams,
    "low_rank_gates": gated.low_rank_gates,
    "head_low_rank_gates": gated.low_rank_gates,
    "gated_mean": gated.gated_mean,
    "gates": mix.gates,
    "static_gates": mix.static_gates,
    "head_gates": mix.head_gates,
    "sinkhorn": sinkhorn.sinkhorn,
    "comb": sinkhorn.sinkhorn,
    "collapse": column.collapse,
    "norm": column.norm,
    "quant": column.quant,
    "post": column.post,
    "mean": column.mean,
    "sum": column.total,
    "first": column.total,
}


ClusterExpand = Callable[[cluster.ClusterContext, Stage], None]

CLUSTER_EXPANDERS: dict[str, ClusterExpand] = {
    "project": cluster.project,
    "rowsq": cluster.rowsq,
    "gates": cluster.gates,
    "sinkhorn": sinkhorn.sinkhorn,
    "collapse": cluster.collapse,
    "norm": cluster.norm,
    "quant": cluster.quant,
    "post": cluster.post,
}


def stage_order(plan: Plan, kernel: Kernel) -> tuple[str, ...]:
    """Topological order of a kernel's stages in which the mixing matrix comes as late as it may.

    Nothing on the way to y reads comb, so the columns never wait for the Sinkhorn.
    """
    position = {stage.name: index for index, stage in enumerate(plan.program.stages)}
    graph = plan.program.graph.subgraph(kernel.stages)

    def key(name: str) -> str:
        late = plan.program.stage(name).kind in COMB_STAGES
        return f"{int(late)}{position[name]:06d}"

    return tuple(nx.lexicographical_topological_sort(graph, key=key))


def expand_kernel(plan: Plan, kernel: Kernel) -> Kernel:
    """The kernel with its body of steps and its shared buffers; no barriers yet."""
    kernel = replace(kernel, stages=stage_order(plan, kernel))
    if kernel.cluster > 1:
        context: Context = _expand_cluster(plan, kernel)
    else:
        context = Context(plan, kernel)
        context.load_slab()
        for stage in plan.kernel_stages(kernel):
            EXPANDERS[stage.kind](context, stage)
    buffers: tuple[Buffer, ...] = tuple(context.buffers[name] for name in sorted(context.buffers))
    early = context.early
    if plan.options.dependent:
        early = _dependent(context)
    return replace(kernel, body=(*early, *context.body), buffers=buffers, dependent=plan.options.dependent)


def _dependent(context: Context) -> list[Node]:
    """Early steps with the two halves of dependent launch: parameters, the wait, then what others wrote."""
    stage = context.plan.kernel_stages(context.kernel)[0]
    constant = [node for node in context.early if isinstance(node, Step) and node.constant]
    given = [node for node in context.early if node not in constant]
    halves: list[Node] = []
    for piece in ("dependent_launch", "dependent_wait"):
        context.step(stage, piece, piece, "all", into=halves)
    return [halves[0], *constant, halves[1], *given]


def _expand_cluster(plan: Plan, kernel: Kernel) -> Context:
    context = cluster.ClusterContext(plan, kernel)
    for stage in plan.kernel_stages(kernel):
        CLUSTER_EXPANDERS[stage.kind](context, stage)
    context.finish()
    return context
