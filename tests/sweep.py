"""Plans that between them use every template: what lints, field checks and compilers are run over."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

from factories import chain, program, stage

import mhcgen
from mhcgen.arithmetic import Arithmetic
from mhcgen.combs import COMB_KINDS
from mhcgen.combs.sinkhorn import OPTIONS
from mhcgen.ir import Program
from mhcgen.models import MODELS
from mhcgen.plan import Plan
from mhcgen.stages import KINDS

FULL = {"norm": True, "quant": "q8", "projection": "fma"}
#: The arms of the pre chain: where the matrix lives, who works on it, which barriers, how streams are read.
ARMS: dict[str, dict[str, Any]] = {
    "unfused": {"fuse": "none"},
    "seed": {"fuse": "seed"},
    "element": {"placement": "element"},
    "row": {"placement": "row"},
    "registers": {"placement": "registers"},
    "shared": {"placement": "shared"},
    "shared-block": {"placement": "shared", "sync": "block"},
    "streamed": {"placement": "shared", "slab": "global", "mix_warp": "shared", "threads": 128},
    "one-warp": {"threads": 32, "slab": "global", "mix_warp": "shared"},
    "scalar": {"scalar": True},
    "stamped": {"stamps": True},
    "dependent": {"dependent": True},
    "wide": {"threads": 1024, "slab": "global", "mix_warp": "shared"},
}


LAYOUTS = {name: ARMS[name] for name in ("element", "row", "registers", "shared", "shared-block")}


def _programs() -> Iterator[tuple[str, Program, dict[str, Any]]]:
    """(name, Program, schedule of its own)."""
    for streams in (1, 3, 4, 8):
        for hidden in (257, 4096):
            size: dict[str, Any] = {"streams": streams, "hidden": hidden}
            yield f"pre {streams} {hidden}", mhcgen.build(**size), {"fuse": "pre"}
    for dtype in ("fp32", "bf16", "fp16"):
        for hidden in (257, 258, 264):
            made = mhcgen.build(hidden=hidden, dtype=dtype, scope="boundary", **FULL)
            yield f"boundary {dtype} {hidden}", made, {"fuse": "boundary", "cluster": 1}
    for quant in ("q8", "fp8"):
        for pow2 in (False, True):
            made = mhcgen.build(hidden=320, norm=True, quant=quant, quant_pow2=pow2, early_stop=True)
            yield f"{quant} pow2={pow2}", made, {"fuse": "pre-norm-quant"}
    for functions in ("ieee", "fast"):
        made = mhcgen.build(
            hidden=64, functions=functions, sumsq="fp32", early_stop=True, iterations_out=True, norm=True
        )
        yield f"{functions} counted", made, {"fuse": "pre-norm"}
    yield "no weight", program(stage("norm"), stage("quant", operands={"z": "z"})), {"fuse": "norm+quant"}
    for scope in ("expand", "post", "mean", "head", "site"):
        yield scope, mhcgen.build(hidden=264, scope=scope), {"fuse": "none"}
    yield "trunk", mhcgen.build(hidden=64, scope="trunk", exit="mean"), {"fuse": "boundary"}
    yield "two sites", program(*chain("1", x="x1"), *chain("2", x="x2")), {"fuse": "gates1+gates2+sinkhorn1"}
    for model in sorted(MODELS):
        yield f"model {model}", mhcgen.build(model, hidden=264, scope="trunk"), {"fuse": "none"}
        yield f"model {model} fused", mhcgen.build(model, hidden=72, scope="trunk"), {"fuse": "boundary"}
    for model in sorted(name for name, made in MODELS.items() if made.stream_last):
        for dtype in ("fp32", "bf16", "fp16"):
            made = mhcgen.build(model, hidden=40, dtype=dtype, scope="trunk", exit="mean")
            yield f"model {model} {dtype}", made, {"fuse": "none"}
            yield f"model {model} {dtype} pre", made, {"fuse": "pre"}
    yield "stamped by the first block of a token's columns", mhcgen.build(hidden=4096, scope="post"), {"stamps": True}
    yield "stamped by the first block of a token's rows", mhcgen.build(projection="fma"), {"stamps": True}
    for streams in (3, 8):
        yield f"post {streams}", mhcgen.build(streams=streams, hidden=40, scope="post"), {}
    logs = program(stage("sinkhorn", domain="log"), arithmetic=Arithmetic(functions="fast"))
    yield "log fast", logs, {}
    counted = program(stage("sinkhorn", results={"iterations": "iterations"}, start="exp"))
    yield "counted from zero", counted, {"placement": "registers"}
    wide = program(stage("norm"), stage("quant"), hidden=2048)
    yield "groups within a thread", wide, {"fuse": "norm+quant", "threads": 32}
    for kind, options in (*((kind, KINDS[kind].options) for kind in ("rowsq", "gates")), ("sinkhorn", OPTIONS)):
        for key, values in options.items():
            for value in values[1:]:
                made = program(*chain(**{kind: {key: value}}), n=3)
                yield f"option {kind} {key}={value}", made, {"fuse": "pre"}
    for place in KINDS["norm_streams"].options["eps_place"][1:]:
        made = program(stage("norm_streams", eps_place=place), stage("mean", operands={"x": "x_normed"}), n=3)
        yield f"option norm_streams eps_place={place}", made, {"fuse": "norm_streams+mean"}
    for dtype in ("fp32", "bf16", "fp16"):
        made = mhcgen.build(hidden=1024, dtype=dtype, scope="boundary", **FULL)
        yield f"cluster boundary {dtype}", made, {"fuse": "boundary", "cluster": 4}
        yield f"cluster boundary {dtype}, by element", made, {"fuse": "boundary", "cluster": 4, "scalar": True}
        made = mhcgen.build(hidden=1024, dtype=dtype, projection="fma", functions="fast")
        yield f"cluster {dtype}", made, {"fuse": "pre", "cluster": 4, "stamps": True}
        yield f"cluster {dtype}, by element", made, {"fuse": "pre", "cluster": 4, "scalar": True}
    made = mhcgen.build(hidden=1024, projection="fma", norm=True, early_stop=True)
    yield "cluster with early stop", made, {"fuse": "pre-norm", "cluster": 4}
    made = mhcgen.build(model="deepseek-v4.1", hidden=1024, projection="fma", norm=True)
    yield "cluster that norms before it projects", made, {"fuse": "pre-norm", "cluster": 4}
    made = program(stage("project"), *chain(), stage("norm"), n=4, hidden=1024)
    yield "cluster without a weight", made, {"fuse": "+".join(s.name for s in made.stages), "cluster": 4}
    for comb, kind in sorted(COMB_KINDS.items()):
        if kind.stage == "comb":
            usual = ("logits",) if kind.logits(4) else ()
            for options in ({}, *({key: value} for key, values in kind.options.items() for value in values[1:])):
                made = program(stage("gates", usual=usual), stage("comb", usual=usual, comb=comb, **options), n=4)
                yield f"comb {comb} {options}", made, {"fuse": "gates+comb"}
                yield f"comb {comb} {options} alone", made, {"fuse": "none"}
    yield "expand and mean", program(stage("expand"), stage("mean"), results=("x",)), {"fuse": "expand+mean"}


def _requests() -> Iterator[tuple[str, Program, dict[str, Any]]]:
    """(name, Program, whole schedule)."""
    for name, made, own in _programs():
        every = name.startswith("pre ") or name == "boundary fp32 264"
        arms = ARMS if every else LAYOUTS if name.startswith("option ") else {"own": {}}
        for arm, options in arms.items():
            yield f"{name}, {arm}", made, {**own, **options}
    for counted in (False, True):
        made = mhcgen.build(streams=5, hidden=40, early_stop=True, iterations_out=counted)
        for placement in ("shared", "registers", "row"):
            for sync in ("auto", "block"):
                options = {"fuse": "pre", "placement": placement, "sync": sync}
                yield f"early stop {counted}, {placement}, {sync}", made, options


@cache
def plans(every: int = 1) -> dict[str, Plan]:
    """Name -> Plan of the sweep, or of each `every`th of it; schedules that a Program refuses are left out."""
    found: dict[str, Plan] = {}
    for name, made, options in itertools.islice(_requests(), 0, None, every):
        with contextlib.suppress(mhcgen.RefusedError):
            found[name] = mhcgen.compile(made, **options)
    return found
