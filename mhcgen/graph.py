"""Draws a Program: stages as boxes inside the kernels that hold them, tensors and barriers along the edges.

Three languages: `dot` (Graphviz), `mermaid`, and `svg`, which is laid out here and needs no other program. The text
is a function of the Program, the kernels and the refusal alone.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from mhcgen.errors import UsageError
from mhcgen.hazards import STRENGTH, in_words
from mhcgen.ir import Program, Tensor
from mhcgen.log import Refusal
from mhcgen.plan import Kernel
from mhcgen.stages import KINDS

#: Colour of the path of a refusal, and of an edge with a barrier.
REFUSED = "#cc0000"
BARRIER = "#1f5fbf"

LANGUAGES = ("dot", "mermaid", "svg")


@dataclass(frozen=True)
class Node:
    """A box.

    Args:
        name: unique: the stage's name, or `tensor:` and the tensor's.
        label: what stands in it, line by line.
        style: `stage`, `opaque`, `given` (inputs and parameters) or `result`.
        witness: it is on the path of a refusal.
    """

    name: str
    label: tuple[str, ...]
    style: str
    witness: bool = False


@dataclass(frozen=True)
class Edge:
    """A tensor on its way from who has it to who reads it.

    Args:
        source: node that has it.
        target: node that reads it.
        tensor: its name; empty where only a barrier stands between the two.
        label: what stands beside the edge; empty where a node at its end says it.
        witness: it is on the path of a refusal.
        barrier: what orders its two ends inside their kernel, e.g. `block barrier`; empty where nothing has to.
    """

    source: str
    target: str
    tensor: str
    label: str = ""
    witness: bool = False
    barrier: str = ""

    @property
    def words(self) -> tuple[str, ...]:
        """What stands beside it, line by line."""
        return tuple(part for part in (self.label, self.barrier) if part)


@dataclass(frozen=True)
class Unit:
    """Stages that are drawn together: a kernel, or a stage without one (its title is empty)."""

    title: str
    stages: tuple[str, ...]


@dataclass(frozen=True)
class Drawing:
    """What is drawn, before any language: units in launch order, then the tensors around them."""

    units: tuple[Unit, ...]
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]


def draw(
    program: Program, language: str, *, kernels: Sequence[Kernel] = (), refusal: Refusal | None = None
) -> str:
    """The drawing as text.

    Args:
        program: what to draw.
        language: of `LANGUAGES`.
        kernels: boxes around stages; none before the fuse pass.
        refusal: its witness path is marked.

    Raises:
        UsageError: `U-GRAPH`, unknown language.
    """
    from mhcgen.graph_svg import svg

    writers = {"dot": _dot, "mermaid": _mermaid, "svg": svg}
    if language not in writers:
        raise UsageError(
            "U-GRAPH",
            f"a graph is drawn as {', '.join(LANGUAGES)}, got {language!r}",
            where="--graph",
            hints=(f"choose one of {', '.join(LANGUAGES)}",),
        )
    return writers[language](drawing_of(program, kernels, refusal))


def drawing_of(program: Program, kernels: Sequence[Kernel] = (), refusal: Refusal | None = None) -> Drawing:
    """Units, nodes and edges, all in Program order."""
    witness = refusal.witness.path if refusal is not None and refusal.witness is not None else ()
    marked = set(pairwise(witness))
    barriers = _barriers(kernels)
    nodes = [
        Node(
            s.name,
            (*((s.name,) if s.name == s.kind else (s.name, s.kind)), *_inner(barriers.get((s.name, s.name), ""))),
            _style(s.kind),
            s.name in witness,
        )
        for s in program.stages
    ]
    edges: list[Edge] = []
    for tensor in program.tensors:
        readers = program.readers.get(tensor.name, ())
        writer = program.writers.get(tensor.name)
        if writer is None:
            nodes.append(Node(f"tensor:{tensor.name}", _described(program, tensor), "given"))
            edges += [Edge(f"tensor:{tensor.name}", reader, tensor.name) for reader in readers]
            continue
        edges += [
            Edge(
                writer, reader, tensor.name, tensor.name, (writer, reader) in marked,
                barriers.get((writer, reader), ""),
            )
            for reader in readers
        ]
        if tensor.role == "result":
            nodes.append(Node(f"tensor:{tensor.name}", _described(program, tensor), "result"))
            edges.append(Edge(writer, f"tensor:{tensor.name}", tensor.name))
    # A step may read what a stage before its own predecessor made, as the first data warp of a cluster does.
    drawn = {(edge.source, edge.target) for edge in edges}
    order = {stage.name: at for at, stage in enumerate(program.stages)}
    edges += [
        Edge(*ends, "", barrier=barrier)
        for ends, barrier in barriers.items()
        if ends not in drawn and order[ends[0]] < order[ends[1]]
    ]
    return Drawing(_units(program, kernels), tuple(nodes), tuple(edges))


def _barriers(kernels: Sequence[Kernel]) -> dict[tuple[str, str], str]:
    """The strongest barrier or wait between two stages of a kernel, or inside one, by the hazards that it covers."""
    found: dict[tuple[str, str], str] = {}
    for kernel in kernels:
        stage = {step.name: step.stage for step in kernel.steps()}
        for sync in kernel.syncs():
            for hazard in sync.because:
                if not hazard.carried:
                    ends = (stage[hazard.first], stage[hazard.second])
                    found[ends] = max(found.get(ends, sync.scope), sync.scope, key=STRENGTH.__getitem__)
    return {ends: in_words(scope) for ends, scope in found.items()}


def _inner(barrier: str) -> tuple[str, ...]:
    return (f"({barrier} inside)",) if barrier else ()


def _style(kind: str) -> str:
    return "opaque" if KINDS[kind].work == "opaque" else "stage"


def _described(program: Program, tensor: Tensor) -> tuple[str, ...]:
    sizes = ", ".join(str(d) if d == "T" else str(program.dim(d)) for d in tensor.shape)
    return (tensor.name, f"{tensor.dtype}[{sizes}]")


def _units(program: Program, kernels: Sequence[Kernel]) -> tuple[Unit, ...]:
    """Kernels and stages outside of any, in an order in which they could run."""
    home = {stage: kernel for kernel in kernels for stage in kernel.stages}
    waiting: list[Unit] = []
    for stage in program.stages:
        kernel = home.get(stage.name)
        if kernel is None:
            waiting.append(Unit("", (stage.name,)))
        elif stage.name == kernel.stages[0]:
            waiting.append(Unit(kernel.name, kernel.stages))
    needs = {
        unit: {a for a, b in program.graph.edges if b in unit.stages and a not in unit.stages} for unit in waiting
    }
    ordered: list[Unit] = []
    done: set[str] = set()
    while waiting:
        ready = next((unit for unit in waiting if needs[unit] <= done), waiting[0])
        waiting.remove(ready)
        ordered.append(ready)
        done.update(ready.stages)
    return tuple(ordered)


# ---- dot --------------------------------------------------------------------------------------------------
_DOT_STYLE = {
    "stage": "shape=box",
    "opaque": 'shape=box, style="filled,dashed", fillcolor="#dddddd"',
    "given": "shape=ellipse",
    "result": "shape=ellipse, peripheries=2",
}


def _dot(drawing: Drawing) -> str:
    lines = ["digraph mhcgen {", "  rankdir=TB;"]
    lines += [f'  {what} [fontname="sans-serif"];' for what in ("graph", "node", "edge")]
    by_name = {node.name: node for node in drawing.nodes}
    for index, unit in enumerate(drawing.units):
        stages = [_dot_node(by_name[name]) for name in unit.stages]
        if unit.title:
            lines += [f"  subgraph cluster_{index} {{", f"    label={_quoted(unit.title)};", "    style=rounded;"]
            lines += [f"    {stage}" for stage in stages]
            lines.append("  }")
        else:
            lines += [f"  {stage}" for stage in stages]
    lines += [f"  {_dot_node(node)}" for node in drawing.nodes if node.name.startswith("tensor:")]
    for edge in drawing.edges:
        words = "\\n".join(_escaped(line) for line in edge.words)
        attrs = [f'label="{words}"'] if words else []
        if edge.witness or edge.barrier:
            attrs.append(f'color="{REFUSED if edge.witness else BARRIER}", penwidth=2')
        shown = f" [{', '.join(attrs)}]" if attrs else ""
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{shown};")
    return "\n".join([*lines, "}"]) + "\n"


def _dot_node(node: Node) -> str:
    label = "\\n".join(_escaped(line) for line in node.label)
    colour = f', color="{REFUSED}"' if node.witness else ""
    return f'{_quoted(node.name)} [label="{label}", {_DOT_STYLE[node.style]}{colour}];'


def _quoted(text: str) -> str:
    return f'"{_escaped(text)}"'


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


# ---- mermaid ----------------------------------------------------------------------------------------------
_MERMAID_SHAPE = {"stage": ('["', '"]'), "opaque": ('[["', '"]]'), "given": ('(["', '"])'), "result": ('(["', '"])')}


def _mermaid(drawing: Drawing) -> str:
    ids = {node.name: f"n{index}" for index, node in enumerate(drawing.nodes)}
    by_name = {node.name: node for node in drawing.nodes}

    def shown(name: str) -> str:
        left, right = _MERMAID_SHAPE[by_name[name].style]
        return f"{ids[name]}{left}{'<br/>'.join(html.escape(line) for line in by_name[name].label)}{right}"

    lines = ["flowchart TB"]
    for index, unit in enumerate(drawing.units):
        if unit.title:
            lines.append(f'  subgraph k{index}["{html.escape(unit.title)}"]')
            lines += [f"    {shown(name)}" for name in unit.stages]
            lines.append("  end")
        else:
            lines += [f"  {shown(name)}" for name in unit.stages]
    lines += [f"  {shown(node.name)}" for node in drawing.nodes if node.name.startswith("tensor:")]
    for edge in drawing.edges:
        arrow = "==>" if edge.witness else "-->"
        label = f'|"{"<br/>".join(html.escape(line) for line in edge.words)}"|' if edge.words else ""
        lines.append(f"  {ids[edge.source]} {arrow}{label} {ids[edge.target]}")
    opaque = [ids[node.name] for node in drawing.nodes if node.style == "opaque"]
    if opaque:
        lines += ["  classDef opaque fill:#ddd,stroke-dasharray:4 3", f"  class {','.join(opaque)} opaque"]
    return "\n".join(lines) + "\n"
