"""Random configurations, Programs, legal fusion groups and schedules for property tests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import networkx as nx
from factories import program, stage
from hypothesis import strategies as st

from mhcgen.build import build
from mhcgen.combs import COMB_KINDS
from mhcgen.combs.sinkhorn import OPTIONS
from mhcgen.errors import UsageError
from mhcgen.ir import Program, Stage
from mhcgen.models import MODELS
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.stages import KINDS

FLOATS = ("fp32", "bf16", "fp16")
DTYPES = st.sampled_from(FLOATS)
#: Widths below, at and past a warp, odd ones, and ones with each power of two as factor.
HIDDEN = st.one_of(st.integers(1, 80), st.sampled_from([96, 127, 128, 200, 257, 264, 520]))
TOKENS = st.integers(0, 9)
#: 40 is enough for a Sinkhorn to become stationary, so that an early stop happens.
_ITERS = st.sampled_from([1, 2, 3, 4, 40])


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `mhcgen.build`."""
    norm = draw(st.booleans())
    scope = draw(st.sampled_from(["pre", "pre", "site", "boundary", "trunk", "expand", "post", "mean", "head"]))
    return {
        "streams": draw(st.integers(1, 8)),
        "hidden": draw(HIDDEN),
        "iters": draw(_ITERS),
        "rank": draw(st.sampled_from([1, 3, 40])),
        "rms_eps": draw(st.sampled_from([1e-6, 1e-2])),
        "hc_eps": draw(st.sampled_from([1e-6, 1e-3])),
        "dtype": draw(DTYPES),
        "functions": draw(st.sampled_from(["ieee", "ieee", "fast"])),
        "sumsq": draw(st.sampled_from(["fp64", "fp32"])),
        "projection": "fma" if scope == "trunk" else draw(st.sampled_from(["external", "fma"])),
        "scope": scope,
        "exit": draw(st.sampled_from(["mean", "head"])),
        "norm": norm,
        "quant": draw(st.sampled_from(["none", "q8", "fp8"])) if norm else "none",
        "quant_pow2": draw(st.booleans()),
        "early_stop": draw(st.booleans()),
        "iterations_out": draw(st.booleans()),
        "extra": draw(st.sampled_from([(), (), ("engram",), ("tap",), ("engram", "tap")])),
    }


@st.composite
def built(draw: st.DrawFn) -> Program:
    """A Program of a model; options that it has no use for are left at its defaults."""
    model, options = draw(st.sampled_from(sorted(MODELS))), draw(configs())
    while True:
        try:
            return build(model, **options)
        except UsageError as error:
            # What the message names (`--iters`, `early_stop`) is what the model does not take.
            field = error.where.lstrip("-").replace("-", "_").replace("with", "extra")
            assert field in options, error
            del options[field]


def fitting_combs(n: int) -> list[str]:
    """Kinds of mixing matrices that are one stage of kind `comb` and exist for n streams."""
    return sorted(name for name, kind in COMB_KINDS.items() if kind.stage == "comb" and not kind.streams(n))


class _Maker:
    """Grows a Program stage by stage; operands are earlier results or new inputs."""

    def __init__(self, draw: st.DrawFn, n: int) -> None:
        self.draw = draw
        #: one kind of mixing matrix a Program: the logits of all gates are alike
        self.comb = draw(st.sampled_from(["sinkhorn", "sinkhorn", *fitting_combs(n)]))
        self.logits = {"logits": "logits"} if COMB_KINDS[self.comb].logits(n) else {}
        self.stages: list[Stage] = []
        #: what can be read, by the kind of value it is
        self.pools: dict[str, list[str]] = {
            name: [] for name in ("streams", "columns", "mixes", "gate", "bottleneck", "matrix", "logits")
        }
        self.written: set[str] = set()
        self.opaque = draw(st.booleans())

    def operand(self, kind: str) -> str:
        """What a stage wrote, an input, or a new input; the former rather, so that stages hang together."""
        pool = self.pools[kind]
        written = [name for name in pool if name in self.written]
        if written and self.draw(st.integers(0, 4)):
            return self.draw(st.sampled_from(written))
        if pool and self.draw(st.booleans()):
            return self.draw(st.sampled_from(pool))
        name = f"{kind}{len(self.stages)}_{len(pool)}"
        pool.append(name)
        return name

    def new(self, kind: str, slot: str) -> str:
        name = f"{slot}{len(self.stages)}"
        if kind:
            self.pools[kind].append(name)
            self.written.add(name)
        return name

    def kind(self) -> str:
        """Kind of the next stage; rather one that can read what is written."""
        kinds = [*_READS] if self.opaque else [kind for kind in _READS if kind not in ("branch", "engram")]
        fed = [kind for kind in kinds if any(set(self.pools[pool]) & self.written for pool in _READS[kind])]
        return self.draw(st.sampled_from(fed if fed and self.draw(st.integers(0, 4)) else kinds))

    def add(self, kind: str, reads: dict[str, str], writes: dict[str, str], **attrs: Any) -> None:
        operands = {slot: self.operand(pool) if pool in self.pools else pool for slot, pool in reads.items()}
        results = {slot: self.new(pool, slot) for slot, pool in writes.items()}
        self.stages.append(stage(kind, f"s{len(self.stages)}", operands, results, (), **attrs))

    def options(self, legal: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
        """Values for some of the attributes that a stage may leave out."""
        return {key: self.draw(st.sampled_from(values)) for key, values in legal.items() if self.draw(st.booleans())}

    def grow(self) -> None:
        """One more stage of a random kind."""
        draw, tag = self.draw, len(self.stages)
        match self.kind():
            case "expand":
                self.add("expand", {"e": "columns"}, {"x": "streams"})
            case "project":
                self.add("project", {"x": "streams", "fn": f"fn{tag}"}, {"mixes": "mixes"})
            case "rowsq":
                acc, eps = draw(st.sampled_from(["fp64", "fp32"])), draw(st.sampled_from([1e-6, 1e-2]))
                self.add(
                    "rowsq",
                    {"x": "streams", "mixes": "mixes"},
                    {"mixes_scaled": "mixes"},
                    acc=acc,
                    eps=eps,
                    **self.options(KINDS["rowsq"].options),
                )
            case "norm_streams":
                acc, eps = draw(st.sampled_from(["fp64", "fp32"])), draw(st.sampled_from([1e-6, 1e-2]))
                self.add(
                    "norm_streams",
                    {"x": "streams", "weight": f"weight{tag}"},
                    {"x_normed": "streams"},
                    acc=acc,
                    eps=eps,
                    **self.options(KINDS["norm_streams"].options),
                )
            case "low_rank_gates":
                self.add("low_rank_gates", {"mixes": "mixes"}, {"bottleneck": "bottleneck", "post": "gate"})
            case "gated_mean":
                reads = {"x": "streams", "bottleneck": "bottleneck", "up": f"up{tag}"}
                self.add("gated_mean", reads, {"y": "columns"})
            case "gates":
                self.add(
                    "gates",
                    {"mixes_scaled": "mixes", "scale": f"scale{tag}", "base": f"base{tag}"},
                    {"pre": "gate", "post": "gate", **self.logits},
                    pre_eps=draw(st.sampled_from([1e-6, 1e-2])),
                    **self.options(KINDS["gates"].options),
                )
            case "matrix" if self.comb != "sinkhorn":
                options = self.options(COMB_KINDS[self.comb].options)
                self.add("comb", self.logits, {"comb": "matrix"}, comb=self.comb, **options)
            case "matrix":
                counted = {"iterations": ""} if draw(st.booleans()) else {}
                stop, options = draw(st.booleans()), self.options(OPTIONS)
                if options.get("domain") == "log":  # its potentials leave no choice of these
                    options = {key: options[key] for key in options if key not in ("start", "eps_mode")}
                    stop = False
                self.add(
                    "sinkhorn",
                    {"logits": "logits"},
                    {"comb": "matrix", **counted},
                    iters=draw(_ITERS),
                    early_stop=stop,
                    **options,
                )
            case "collapse":
                self.add("collapse", {"x": "streams", "pre": "gate"}, {"y": "columns"})
            case "norm":
                weight = {"weight": f"weight{tag}"} if draw(st.booleans()) else {}
                self.add("norm", {"y": "columns", **weight}, {"z": "columns"})
            case "quant":
                self.add("quant", {"z": "columns"}, {"q": "", "q_scale": ""}, pow2=draw(st.booleans()))
            case "post":
                self.add(
                    "post",
                    {"x": "streams", "f": "columns", "post": "gate", "comb": "matrix"},
                    {"x_next": "streams"},
                )
            case "mean":
                self.add("mean", {"x": "streams"}, {"y": "columns"})
            case "branch":
                self.add("branch", {"z": "columns"}, {"f": "columns"})
            case _:
                self.add("engram", {"x": "streams"}, {"x_out": "streams"})


#: kind -> pools it reads from
_READS = {
    "rowsq": ("streams", "mixes"),
    "norm_streams": ("streams",),
    "low_rank_gates": ("mixes",),
    "gated_mean": ("streams", "bottleneck"),
    "gates": ("mixes",),
    "matrix": ("logits",),
    "collapse": ("streams", "gate"),
    "post": ("streams", "columns", "gate", "matrix"),
    "norm": ("columns",),
    "quant": ("columns",),
    "mean": ("streams",),
    "project": ("streams",),
    "expand": ("columns",),
    "branch": ("columns",),
    "engram": ("streams",),
}


@st.composite
def hand_built(draw: st.DrawFn) -> Program:
    """A Program nobody's model has: a random graph of stages, any value of which may also be a result."""
    n = draw(st.integers(1, 8))
    maker = _Maker(draw, n)
    for _ in range(draw(st.integers(1, 8))):
        maker.grow()
    maker.add("mean", {"x": "streams"}, {"y": "columns"})  # an identity alone would read nothing to count tokens by
    written = [name for s in maker.stages for name in s.writes]
    results = tuple(draw(st.lists(st.sampled_from(written), unique=True, max_size=3)))
    made = program(*maker.stages, n=n, hidden=draw(HIDDEN), dtype=draw(DTYPES), results=results)
    if not draw(st.integers(0, 2)):
        return made
    wide = [t.name for t in made.tensors if (t.shape[0], t.shape[-1]) == ("T", "H") and t.dtype in FLOATS]
    copied = {name for s in made.stages_of_kind("expand") for name in (*s.reads, *s.writes)}
    mixed = {name: draw(DTYPES) for name in wide if name not in copied}
    return replace(made, tensors=tuple(replace(t, dtype=mixed.get(t.name, t.dtype)) for t in made.tensors))


def programs() -> st.SearchStrategy[Program]:
    """Built and hand-built Programs."""
    return st.one_of(built(), hand_built())


@st.composite
def legal_groups(draw: st.DrawFn, made: Program) -> tuple[tuple[str, ...], ...]:
    """Groups of stages that may each be one kernel.

    Runs of a topological order are convex and can launch in that order, and every legal partition is the runs
    of some topological order; opaque stages end a run.
    """
    key = {s.name: draw(st.integers(0, 9)) for s in made.stages}
    order = nx.lexicographical_topological_sort(made.graph, key=lambda name: f"{key[name]}{name}")
    groups: list[list[str]] = [[]]
    for name in order:
        if made.stage(name).kind in OPAQUE_KINDS:
            groups.append([])
            continue
        if draw(st.integers(0, 3)) == 0 or not may_join(made, groups[-1], name):
            groups.append([])
        groups[-1].append(name)
    return tuple(tuple(group) for group in groups if group)


def may_join(made: Program, group: list[str], name: str) -> bool:
    """Whether a stage may follow in a group: not streams that a tap looks at between, and not once with per token."""

    def once(stage_name: str) -> bool:
        found = made.stage(stage_name)
        return not any("T" in made.tensor(tensor).shape for tensor in (*found.reads, *found.writes))

    tapped = {tensor for tap in made.stages_of_kind("tap") for tensor in tap.reads}
    written = {tensor for member in group for tensor in made.stage(member).writes}
    return all(once(member) == once(name) for member in group) and not tapped & written & set(made.stage(name).reads)


def wish(groups: tuple[tuple[str, ...], ...]) -> str:
    """The `--fuse` that asks for these groups; a Program of opaque stages alone has none."""
    return ",".join("+".join(group) for group in groups) or "none"


@st.composite
def schedules(draw: st.DrawFn) -> dict[str, Any]:
    """Options of `mhcgen.compile` besides `fuse`."""
    return {
        "placement": draw(st.sampled_from(["auto", "shared", "row", "element", "registers"])),
        "sync": draw(st.sampled_from(["auto", "warp", "block"])),
        "threads": draw(st.sampled_from([None, None, 32, 64, 96, 256, 512, 1024])),
        "slab": draw(st.sampled_from(["auto", "auto", "registers", "global"])),
        "mix_warp": draw(st.sampled_from(["auto", "own", "shared"])),
        "cluster": draw(st.sampled_from([None] * 9 + [1, 2, 4])),
        "scalar": draw(st.booleans()),
        "stamps": draw(st.sampled_from([False, False, True])),
        "dependent": draw(st.sampled_from([False, False, True])),
    }
