"""Stages in the order hyper-connections run them: the pieces that `mhcgen.build` and `mhcgen.trunk` put together.

```
x ── project ── rowsq ── gates ──┬── sinkhorn ── comb        pre_chain, at a site
                                 └── collapse ── y ── norm ── quant
x ── project ── rowsq ── gates ───── collapse ── y           head_chain, at the exit

x ── norm_streams ──┬── project ── gates ──┐                 the same in a model with gates of low rank
                    └──────────────────────┴── collapse ── y
```
Inside a trunk every stage and tensor of a site carries the site's name, `3.attn.rowsq`; elsewhere names are bare.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from mhcgen.arithmetic import Arithmetic
from mhcgen.ir import AttrValue, Dim, Program, Stage, Tensor, make_stage
from mhcgen.models import model as find_model
from mhcgen.stages import KINDS, STREAM_LAST, STREAMS

if TYPE_CHECKING:
    from mhcgen.build import Config

#: Last parts of the names of tensors that hold weights.
PARAMETERS = ("fn", "scale", "base", "norm_weight", "comb_logits", "stream_weight", "up")


def at(site: str, name: str) -> str:
    """Name of a site's stage or tensor; bare where there is no site."""
    return f"{site}.{name}" if site else name


class Builder:
    """Collects stages and tensors; tensors take shape from the kind's signature.

    Args:
        config: the configuration behind dtypes, dims and arithmetic.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.stages: list[Stage] = []

    def add(
        self,
        name: str,
        kind: str,
        operands: dict[str, str],
        results: dict[str, str],
        attrs: dict[str, AttrValue] | None = None,
        *,
        rows: Dim = "R",
    ) -> None:
        """Append a stage; `rows` is what its projection gives a token, R at a site and n (or D) at a head."""
        signature = KINDS[kind]
        shapes = {
            slot.rstrip("?"): tuple(rows if dim == "M" else dim for dim in shape)
            for slot, shape in (*signature.operands, *signature.results)
        }
        spec = find_model(self.config.model)
        if spec.stream_last:
            shapes = {slot: STREAM_LAST if shape == STREAMS else shape for slot, shape in shapes.items()}
        for slot in set(signature.shared) & set(spec.shared_slots):
            shapes[slot] = shapes[slot][1:]
        for slot, tensor in (*operands.items(), *results.items()):
            self.tensors.setdefault(tensor, Tensor(tensor, shapes[slot], self._dtype(slot), "value"))
        self.stages.append(make_stage(name, kind, operands, results, attrs))

    def _dtype(self, slot: str) -> str:
        if slot in ("x", "x_next", "x_out", "x_normed", "e", "f", "y", "z", "aux"):
            return self.config.dtype
        if slot == "q":
            return "int8" if self.config.quant == "q8" else "fp8_e4m3"
        return "int32" if slot == "iterations" else "fp32"

    def finish(self, results: Iterable[str], origin: str = "") -> Program:
        """The Program: named results, weights by their names, everything else by who writes it."""
        wanted = set(results)
        written = {tensor for stage in self.stages for tensor in stage.writes}
        tensors = []
        for tensor in self.tensors.values():
            if tensor.name in wanted:
                role = "result"
            elif tensor.name in written:
                role = "value"
            else:
                role = "parameter" if tensor.name.rpartition(".")[2] in PARAMETERS else "input"
            tensors.append(replace(tensor, role=role))
        config = self.config
        n, h = config.streams, config.hidden
        group = 32 if config.quant == "q8" else 128
        spec = find_model(config.model)
        dims = {"n": n, "H": h, "K": n * h, "R": spec.mixes(n, config.rank), "L": spec.logits(n), "G": -(-h // group)}
        dims |= {"S": 2 + n} if spec.norm_each else {}
        dims |= {"D": config.rank} if spec.rank else {}
        return Program(
            model=config.model,
            dims=tuple(sorted(dims.items())),
            arithmetic=Arithmetic(config.functions, config.sumsq, config.projection),
            tensors=tuple(tensors),
            stages=tuple(self.stages),
            scope=config.scope,
            origin=origin,
        )


def _project(b: Builder, x: str, site: str, rows: Dim, kind: str = "project") -> None:
    """mixes of the streams, unless they are given."""
    method = b.config.projection
    if method != "external":
        operands = {"x": x, "fn": at(site, "fn")}
        b.add(at(site, "project"), kind, operands, {"mixes": at(site, "mixes")}, {"method": method}, rows=rows)


def _mixes(b: Builder, x: str, site: str, rows: Dim) -> None:
    """projection (unless external) and rowsq."""
    c = b.config
    spec = find_model(c.model)
    each = spec.norm_each and rows == "R"  # a head has one projection of all streams
    _project(b, x, site, rows, "project_streams" if each else "project")
    b.add(
        at(site, "rowsq"),
        "rowsq_streams" if each else "rowsq",
        {"x": x, "mixes": at(site, "mixes")},
        {"mixes_scaled": at(site, "mixes_scaled")},
        {"acc": c.sumsq, "eps": c.rms_eps, **dict(spec.rms)},
        rows=rows,
    )


def pre_chain(b: Builder, x: str = "x", *, site: str = "", suffix: str = "", pre_prev: str = "pre_prev") -> None:
    """projection (unless external), rowsq, gates, the mixing matrix, collapse, and norm and quant if asked for.

    In a model with delayed pre the collapse (with norm and quant) comes first, by the gates of the site before;
    what the projection leads to is for later.

    Args:
        b: collects them.
        x: name of the streams it reads.
        site: the site it belongs to; empty outside a trunk.
        suffix: of pre, post and comb, where those names are taken (`_next` in a boundary).
        pre_prev: gates of the site before, for a model with delayed pre; empty where there is none, and y is
            stream 0 then.
    """
    if find_model(b.config.model).rank:
        _gated(b, x, site, at(site, "post" + suffix))
        b.add(at(site, "comb"), "comb", {}, {"comb": at(site, "comb" + suffix)}, {"comb": "identity"})
        _tail(b, site)
    elif find_model(b.config.model).delayed_pre:
        _collapse(b, x, pre_prev, site)
        _coefficients(b, x, site, suffix)
    else:
        _coefficients(b, x, site, suffix)
        _collapse(b, x, at(site, "pre" + suffix), site)


def _gated(b: Builder, x: str, site: str, post: str = "", y: str = "") -> None:
    """Streams normed one by one, their bottleneck, and y of them gated element by element; no post at a head."""
    c, normed, bottleneck = b.config, at(site, "x_normed"), at(site, "bottleneck")
    spec = find_model(c.model)
    b.add(
        at(site, "norm_streams"),
        "norm_streams",
        {"x": x, "weight": at(site, "stream_weight")},
        {"x_normed": normed},
        {"acc": c.sumsq, "eps": c.rms_eps, **dict(spec.rms)},
    )
    _project(b, normed, site, "R" if post else "D")
    mixes = {"mixes": at(site, "mixes")}
    if post:
        made = {"bottleneck": bottleneck, "post": post}
        b.add(at(site, "gates"), "low_rank_gates", mixes, made, {"post_mult": spec.post_mult})
    else:
        b.add(at(site, "gates"), "head_low_rank_gates", mixes, {"bottleneck": bottleneck})
    operands = {"x": normed, "bottleneck": bottleneck, "up": at(site, "up")}
    b.add(at(site, "collapse"), "gated_mean", operands, {"y": y or at(site, "y")})


def _coefficients(b: Builder, x: str, site: str, suffix: str) -> None:
    """projection (unless external), rowsq, gates and the mixing matrix."""
    c = b.config
    spec = find_model(c.model)
    pre, post, comb = (at(site, name + suffix) for name in ("pre", "post", "comb"))
    static = spec.static == "comb"
    logits = {"logits": at(site, "comb_logits" if static else "logits")} if spec.logits(c.streams) else {}
    kind, operands = "static_gates", {"base": at(site, "base")}
    if spec.static != "all":
        _mixes(b, x, site, "R")
        kind = "gates"
        operands |= {"mixes_scaled": at(site, "mixes_scaled"), "scale": at(site, "scale")}
    b.add(
        at(site, "gates"),
        kind,
        {slot: operands[slot] for slot in ("mixes_scaled", "scale", "base") if slot in operands},
        {"pre": pre, "post": post, **({} if static else logits)},
        {"post_mult": spec.post_mult, "pre_eps": spec.pre_eps_of(c.hc_eps), **dict(spec.gates)},
    )
    made = {"comb": comb}
    attrs: dict[str, AttrValue] = {"comb": spec.comb, **dict(spec.comb_options)}
    if spec.iterated:
        attrs |= {"early_stop": c.early_stop, "eps": c.hc_eps, "iters": c.iters}
        if c.iterations_out:
            made["iterations"] = at(site, "iterations")
    kind = "sinkhorn" if spec.iterated else "comb"
    b.add(at(site, kind), kind, dict(logits), made, attrs)


def _collapse(b: Builder, x: str, pre: str, site: str) -> None:
    """y by given gates, or stream 0 where there are none; norm and quant if asked for."""
    y = at(site, "y")
    if pre:
        b.add(at(site, "collapse"), "collapse", {"x": x, "pre": pre}, {"y": y})
    else:
        b.add(at(site, "first"), "first", {"x": x}, {"y": y})
    _tail(b, site)


def _tail(b: Builder, site: str) -> None:
    """norm and quant of y, if asked for."""
    c = b.config
    spec = find_model(c.model)
    y, z = at(site, "y"), at(site, "z")
    if c.norm:
        operands = {"y": y}
        if spec.norm_weight:
            operands["weight"] = at(site, "norm_weight")
        b.add(at(site, "norm"), "norm", operands, {"z": z}, {"acc": "fp32", "eps": c.norm_eps})
    if c.quant != "none":
        b.add(
            at(site, "quant"),
            "quant",
            {"z": z},
            {"q": at(site, "q"), "q_scale": at(site, "q_scale")},
            {"group": 32 if c.quant == "q8" else 128, "pow2": c.quant_pow2, "scheme": c.quant},
        )


def tail_results(config: Config, site: str = "") -> tuple[str, ...]:
    """What a pre chain returns beside pre, post, comb and y."""
    names = ("z",) * config.norm + ("q", "q_scale") * (config.quant != "none")
    return tuple(at(site, name) for name in (*names, *("iterations",) * config.iterations_out))


def branch(b: Builder, site: str = "") -> None:
    """The opaque sub-layer: it reads z where there is a norm, y elsewhere, and gives f."""
    source = at(site, "z" if b.config.norm else "y")
    b.add(at(site, "branch"), "branch", {"z": source}, {"f": at(site, "f")})


def post(b: Builder, x: str = "x", *, site: str = "") -> str:
    """post of a site, whose residual is the streams x the site read; returns the name of the new streams."""
    operands = {"x": x, "f": at(site, "f"), "post": at(site, "post"), "comb": at(site, "comb")}
    x_next = at(site, "x_next")
    b.add(at(site, "post"), "post", operands, {"x_next": x_next})
    return x_next


def between(b: Builder, x: str, *, site: str = "") -> tuple[str, tuple[str, ...]]:
    """Opaque readers between a post and the next pre; returns the streams that leave and the results."""
    leaving, results = x, tuple[str, ...]()
    if "engram" in b.config.extra:
        leaving = at(site, "x_engram")
        b.add(at(site, "engram"), "engram", {"x": x}, {"x_out": leaving})
    if "tap" in b.config.extra:
        b.add(at(site, "tap"), "tap", {"x": leaving}, {"aux": at(site, "aux")})
        results = (at(site, "aux"),)
    return leaving, results


def head_chain(b: Builder, x: str = "x", *, site: str = "", y: str = "y") -> None:
    """The gated head: its own projection of n rows, rowsq, gates and collapse (DeepSeek-V4's exit).

    pre = sigmoid(mixes rsqrt(mean x^2 + rms_eps) scale + base) + hc_eps, with one scale and n bases; no post and
    no comb. In a model with gates of low rank it is the mixer of a site without post.
    """
    if find_model(b.config.model).rank:
        _gated(b, x, site, y=y)
        return
    _mixes(b, x, site, "n")
    operands = {"mixes_scaled": at(site, "mixes_scaled"), "scale": at(site, "scale"), "base": at(site, "base")}
    b.add(at(site, "gates"), "head_gates", operands, {"pre": at(site, "pre")}, {"pre_eps": b.config.hc_eps})
    b.add(at(site, "collapse"), "collapse", {"x": x, "pre": at(site, "pre")}, {"y": y})
