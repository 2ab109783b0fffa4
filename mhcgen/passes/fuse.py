"""fuse: user wishes become kernels.

```
rowsq   gates   sinkhorn   collapse        --fuse rowsq+gates+sinkhorn,collapse
  k0      k1       k2         k3      ->   k0: rowsq gates sinkhorn      k1: collapse
```
A group is legal if no path between two of its stages leaves it (convexity), it holds no opaque stage, and the
kernels it leaves can be ordered. Streams that a tap reads are not kept inside, and what runs once for all tokens is
not joined with what runs once a token. Refusal codes: F-ESCAPE, F-OPAQUE, F-TAP, F-STATIC, F-UNKNOWN, F-OVERLAP,
F-PRESET.

Deliberately not done here: cost. A legal group is formed because it was asked for.
"""

from __future__ import annotations

from dataclasses import replace

import networkx as nx

from mhcgen.errors import RefusedError
from mhcgen.functions import functions
from mhcgen.ir import Program
from mhcgen.log import Decision, Witness
from mhcgen.passes.refuse import refuse
from mhcgen.plan import Kernel, Plan
from mhcgen.stages import COMB_STAGES, EACH_STREAM, LOW_RANK

#: The chain every `pre` preset holds; a projection in the Program joins it.
PRE_CHAIN = ("rowsq", "gates", "sinkhorn", "collapse")

#: preset -> what it is for. Groups are computed from kinds, so they serve any model.
PRESETS: dict[str, str] = {
    "none": "one kernel a stage: the baseline of every gate",
    "seed": "rowsq, gates with sinkhorn, collapse: the three launches of the seed system",
    "pre": "projection (if the Program has it), rowsq, gates, sinkhorn and collapse in one kernel",
    "pre-norm": "pre, and the RMSNorm of y",
    "pre-norm-quant": "pre-norm, and the quantisation of z",
    "boundary": "post of one site with the pre chain of the next (norm and quant too where present)",
    "delayed": "post with collapse (and norm, quant): the critical path of the delayed variant",
    "site": "the pre chain and post of one site: refused, the branch stands between",
}


def fuse(plan: Plan) -> Plan:
    """Plan -> Plan with kernels.

    Raises:
        RefusedError: F-ESCAPE, F-OPAQUE, F-TAP, F-STATIC, F-UNKNOWN, F-OVERLAP or F-PRESET, with the witness path.
    """
    if "fuse" in plan.done:
        return plan
    program = plan.program
    groups = requested_groups(program, plan.options.fuse)
    seen: dict[str, str] = {}
    for group in groups:
        for name in group:
            if name in seen:
                raise refuse(
                    "fuse",
                    "F-OVERLAP",
                    f"group {'+'.join(group)}",
                    f"{name} is already in group {seen[name]}",
                    "name each stage once",
                )
            seen[name] = "+".join(group)
        check_group(program, group)
    singles = [(s.name,) for s in program.stages if s.name not in seen and s.kind not in OPAQUE_KINDS]
    ordered = _order(program, [*groups, *singles])
    log = list(plan.log)
    for group in ordered:
        if len(group) > 1:
            log.append(
                Decision(
                    "fuse",
                    "+".join(group),
                    "one kernel",
                    "asked for, and no path between its stages leaves the group",
                )
            )
        else:
            log.append(Decision("fuse", group[0], "a kernel of its own", "no group names it with others"))
    # A text of several kernels may call the function `mhc_mean`, so there the stage `mean` is no kernel of that name.
    taken = {function.name for function in functions(program, 1, True)} if len(ordered) > 1 else set()
    names = [_kernel_name(group) for group in ordered]
    kernels = tuple(
        Kernel(f"{name}_kernel" if name in taken else name, group) for name, group in zip(names, ordered, strict=True)
    )
    return replace(plan, kernels=kernels, log=tuple(log))


OPAQUE_KINDS = ("branch", "engram", "tap")


def requested_groups(program: Program, wish: str) -> list[tuple[str, ...]]:
    """Groups of stage names of a preset or an explicit wish, each in program order."""
    order = {stage.name: index for index, stage in enumerate(program.stages)}
    if wish in PRESETS:
        groups = _preset_groups(program, wish)
    else:
        groups = []
        for part in wish.split(","):
            names = tuple(name.strip() for name in part.split("+"))
            for name in names:
                if name not in order:
                    reason = f"there is no stage or preset {name!r}"
                    if name in PRESETS:
                        reason = f"{name} is a preset, which stands alone: a comma parts groups of stages"
                    elif not name and wish.strip():
                        reason = "a name is missing: a comma parts groups of stages, a + the stages of one"
                    raise refuse(
                        "fuse",
                        "F-UNKNOWN",
                        f"group {part.strip()!r}",
                        reason,
                        f"stages: {', '.join(order)}; presets: {', '.join(PRESETS)}",
                    )
            if len(set(names)) != len(names):
                raise refuse(
                    "fuse",
                    "F-OVERLAP",
                    f"group {part.strip()!r}",
                    "a stage is named twice",
                    "name each stage once",
                )
            groups.append(names)
    return [tuple(sorted(group, key=order.__getitem__)) for group in groups]


#: Stages of a chain; a gated head has gates of its own kind and no mixing matrix.
_CHAIN = (
    "norm_streams", "project", "rowsq", *EACH_STREAM, "gates", "head_gates", *LOW_RANK, *COMB_STAGES, "collapse",
    "first", "gated_mean",
)  # fmt: skip
_TAIL = ("norm", "quant")
#: Ends of a trunk without gates of their own.
_EXITS = ("mean", "sum")
#: kind -> the kind that a preset may ask for in its place.
_STANDS_FOR = {
    "comb": ("sinkhorn",),
    "first": ("collapse",),
    "gated_mean": ("collapse",),
    "head_low_rank_gates": ("head_gates",),
    "low_rank_gates": ("gates",),
    "norm_streams": ("rowsq",),
    "rowsq_streams": ("rowsq",),
    "static_gates": ("gates", "rowsq"),
}
#: preset -> kinds of a site's group, and kinds without which the preset means nothing.
_PRESET_KINDS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "seed": (("gates", "low_rank_gates", *COMB_STAGES), ("gates", "sinkhorn")),
    "pre": (_CHAIN, PRE_CHAIN),
    "pre-norm": ((*_CHAIN, "norm"), (*PRE_CHAIN, "norm")),
    "pre-norm-quant": ((*_CHAIN, *_TAIL), (*PRE_CHAIN, *_TAIL)),
    "boundary": (("post", *_CHAIN, *_TAIL, *_EXITS), ("post", *PRE_CHAIN)),
    "delayed": (("post", "collapse", "first", "gated_mean", *_TAIL), ("post", "collapse")),
    "site": ((*_CHAIN, *_TAIL, "post"), (*PRE_CHAIN, "post")),
}
#: Presets that put the post of a site into the group of the site after it.
_CROSSING = ("boundary", "delayed")


def site_of(name: str) -> str:
    """The site of a stage: `3.attn` of `3.attn.rowsq`, empty for a bare name."""
    return name.rpartition(".")[0]


def _preset_groups(program: Program, preset: str) -> list[tuple[str, ...]]:
    """One group a site; in a Program without site names all stages are one site."""
    if preset == "none":
        return []
    wanted, required = _PRESET_KINDS[preset]
    kinds = {stage.kind for stage in program.stages}
    kinds |= {other for kind in kinds for other in _STANDS_FOR.get(kind, ())}
    if "head_gates" in kinds and "gates" not in kinds:
        required = tuple(kind for kind in required if kind not in ("gates", "sinkhorn"))
    for kind in required:
        if kind not in kinds:
            raise refuse(
                "fuse",
                "F-PRESET",
                f"preset {preset}",
                f"the Program has no stage of kind {kind}",
                f"build it with that stage, or choose among {', '.join(stage.name for stage in program.stages)}",
            )
    groups: dict[str, tuple[str, ...]] = {}
    for index, stage in enumerate(program.stages):
        if stage.kind in wanted and not program.runs_once(stage):
            site = site_of(stage.name)
            if site and stage.kind == "post" and preset in _CROSSING:
                begins = ("rowsq", "rowsq_streams", "norm_streams", "collapse", *_EXITS)
                after = (site_of(s.name) for s in program.stages[index:] if s.kind in begins)
                site = next(after, site)
            groups[site] = (*groups.get(site, ()), stage.name)
    return list(groups.values())


def check_group(program: Program, group: tuple[str, ...]) -> None:
    """Raise the refusal of an illegal group; return for a legal one."""
    for name in group:
        if program.stage(name).kind in OPAQUE_KINDS:
            raise refuse(
                "fuse",
                "F-OPAQUE",
                f"group {'+'.join(group)}",
                f"{name} is opaque: nothing is known of its inside, so no kernel can hold it",
                "fuse the stages on one side of it",
                Witness((name,), "opaque"),
            )
    once = [name for name in group if program.runs_once(program.stage(name))]
    if once and len(once) < len(group):
        other = next(name for name in group if name not in once)
        raise refuse(
            "fuse",
            "F-STATIC",
            f"group {'+'.join(group)}",
            f"{once[0]} makes the same for all tokens and runs once, {other} runs once a token",
            f"leave {', '.join(once)} out of the group",
        )
    _check_taps(program, group)
    path = escaping_path(program, group)
    if path is not None:
        ends = f"{path[0]} and {path[-1]}"
        inner = [name for name in path[1:-1] if name not in group]
        opaque = [name for name in inner if program.stage(name).kind in OPAQUE_KINDS]
        reason = f"a path between {ends} leaves the group"
        reason += f" through the opaque {opaque[0]}" if opaque else f" through {inner[0]}"
        raise refuse(
            "fuse",
            "F-ESCAPE",
            f"group {'+'.join(group)}",
            reason,
            _escape_hint(program, group, inner, bool(opaque)),
            Witness(tuple(path)),
        )


def _check_taps(program: Program, group: tuple[str, ...]) -> None:
    """Streams that a tap reads must be whole, in memory, before any later stage goes on with them.

    A tap has no path back into the group, so convexity alone would let the group swallow the place it looks at.
    """
    members = set(group)
    for tap in program.stages_of_kind("tap"):
        for tensor in tap.reads:
            writer = program.writers.get(tensor)
            after = [name for name in program.readers[tensor] if name in members]
            if writer in members and after:
                before = [name for name in group if nx.has_path(program.graph, name, writer)]
                rest = [name for name in group if name not in before]
                raise refuse(
                    "fuse",
                    "F-TAP",
                    f"group {'+'.join(group)}",
                    f"{tap.name} reads {tensor} between {writer} and {after[0]}, so it must exist before they go on",
                    f"fuse the two sides of {tap.name} apart: --fuse {'+'.join(before)},{'+'.join(rest)}",
                    Witness((str(writer), tap.name), "tap"),
                )


def escaping_path(program: Program, group: tuple[str, ...]) -> list[str] | None:
    """The shortest path that leaves the group and comes back, None if the group is convex."""
    graph, members = program.graph, set(group)
    best: list[str] | None = None
    for source in group:
        outside = [s for s in graph.successors(source) if s not in members]
        for first in sorted(outside):
            lengths = nx.single_source_shortest_path(graph, first)
            for target in group:
                if target in lengths:
                    path = [source, *lengths[target]]
                    if best is None or (len(path), path) < (len(best), best):
                        best = path
    return best


def _escape_hint(program: Program, group: tuple[str, ...], inner: list[str], opaque: bool) -> str:
    if not opaque:
        return f"add {', '.join(inner)} to the group, or leave one end out"
    graph = program.graph
    blocker = inner[0]
    before = [name for name in group if nx.has_path(graph, name, blocker)]
    after = [name for name in group if name not in before]
    return f"fuse the two sides of {blocker} apart: --fuse {'+'.join(before)},{'+'.join(after)}"


def _order(program: Program, groups: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Launch order: topological over kernels, by program order among the free.

    Convex groups can still wait for each other in a circle (A needs B's output and B needs A's); that is
    an escape of the union and is refused with the circle as witness.
    """
    home = {name: index for index, group in enumerate(groups) for name in group}
    position = {stage.name: index for index, stage in enumerate(program.stages)}
    quotient = nx.DiGraph()
    nodes = [home.get(stage.name, f"opaque:{stage.name}") for stage in program.stages]
    quotient.add_nodes_from(nodes)
    for a, b in program.graph.edges:
        ka, kb = home.get(a, f"opaque:{a}"), home.get(b, f"opaque:{b}")
        if ka != kb:
            quotient.add_edge(ka, kb)

    def key(node: object) -> str:
        first = min(position[s] for s in groups[node]) if isinstance(node, int) else position[str(node)[7:]]
        return f"{first:06d}"

    try:
        return [groups[n] for n in nx.lexicographical_topological_sort(quotient, key=key) if isinstance(n, int)]
    except nx.NetworkXUnfeasible:
        raise _circle(program, groups, home, quotient) from None


def _circle(
    program: Program, groups: list[tuple[str, ...]], home: dict[str, int], quotient: nx.DiGraph
) -> RefusedError:
    cycle = nx.find_cycle(quotient)
    names: list[str] = []
    for a, b in cycle:
        edge = next(
            (u, v)
            for u, v in program.graph.edges
            if home.get(u, f"opaque:{u}") == a and home.get(v, f"opaque:{v}") == b
        )
        names.extend(edge)
    involved = " and ".join("+".join(groups[a]) for a, _ in cycle if isinstance(a, int))
    return refuse(
        "fuse",
        "F-ESCAPE",
        f"groups {involved}",
        "each needs a result of the other, so neither can launch first",
        "split one of the groups",
        Witness(tuple(names)),
    )


def _kernel_name(group: tuple[str, ...]) -> str:
    """`mhc_rowsq_gates`; a site is named where it changes: `mhc_0_attn_post_0_ffn_rowsq_gates`."""
    words, site = ["mhc"], ""
    for name in group:
        words.append(name[len(site) + 1 :] if site and site_of(name) == site else name)
        site = site_of(name)
    return "_".join(words).replace(".", "_")
