"""Every barrier is needed: without it, or weaker, race mode reports a race on the buffer that the barrier names.

All mutants of a kernel go into one text under names of their own, so that they cost one compilation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, differing

import mhcgen
from mhcgen.backends.host import Finding, HostModule
from mhcgen.hazards import STRENGTH
from mhcgen.ir import Program
from mhcgen.log import Hazard
from mhcgen.lower import signature, tensors_of
from mhcgen.plan import Kernel, Plan, Sync, edit_sync
from mhcgen.runtime import NUMPY_DTYPES, geometry
from mhcgen.steps.context import identifier

TOKENS = 2
#: What the reported kinds are called; a read of what nobody wrote yet is how a missing RAW barrier may first show.
RACES = ("race", "uninit")

#: name -> (stages besides the pre chain, schedule)
ARMS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unfused": ({}, {"fuse": "none", "placement": "shared"}),
    "seed": ({}, {"fuse": "seed", "placement": "shared"}),
    "shared": ({"norm": True}, {"fuse": "pre-norm", "placement": "shared"}),
    "shared, mixes on a data warp": (
        {"norm": True},
        {"fuse": "pre-norm", "placement": "shared", "mix_warp": "shared"},
    ),
    "block": ({"norm": True}, {"fuse": "pre-norm", "sync": "block"}),
    "row": ({}, {"fuse": "pre", "placement": "row"}),
    "element": ({}, {"fuse": "pre", "placement": "element"}),
    "registers": ({}, {"fuse": "pre", "placement": "registers"}),
    "streamed": ({}, {"fuse": "pre", "placement": "shared", "slab": "global", "threads": 96}),
    "one warp": ({}, {"fuse": "pre", "placement": "shared", "threads": 32, "slab": "global", "mix_warp": "shared"}),
    "early stop": ({"early_stop": True, "iterations_out": True}, {"fuse": "pre", "placement": "shared"}),
    "early stop, block": ({"early_stop": True}, {"fuse": "pre", "sync": "block"}),
    "quantised": ({"norm": True, "quant": "q8"}, {"fuse": "pre-norm-quant", "placement": "shared"}),
    "projected": ({"projection": "fma"}, {"fuse": "pre", "placement": "row", "cluster": 1}),
    "boundary": (
        {"projection": "fma", "scope": "boundary"},
        {"fuse": "boundary", "placement": "shared", "cluster": 1},
    ),
    "cluster": ({"projection": "fma", "norm": True}, {"fuse": "pre-norm", "cluster": 4}),
}
SIZES = {3: 72, 4: 96, 8: 264}


@cache
def arm(streams: int, name: str) -> Plan | None:
    """The Plan of an arm, None where this many streams have none."""
    build, options = ARMS[name]
    program = mhcgen.build(streams=streams, hidden=SIZES[streams], iters=3, **build)
    try:
        return mhcgen.compile(program, **options)
    except mhcgen.RefusedError:
        assert (streams, name) in ((8, "element"), (8, "registers")) or name == "cluster"
        return None


CASES = [(n, name) for n in SIZES for name in ARMS if arm(n, name) is not None]
#: Every arm at n = 4, and at one of the other two; the rest is slow.
PARAMS = [
    pytest.param(n, name, marks=[pytest.mark.slow] * (n == (3, 8)[list(ARMS).index(name) % 2])) for n, name in CASES
]


@dataclass(frozen=True)
class Mutant:
    """A kernel with one barrier gone or weaker, and the hazards that nothing covers now."""

    kernel: Kernel
    bare: tuple[Hazard, ...]
    what: str


def weaker(kernel: Kernel, sync: Sync) -> Iterator[Sync]:
    """The barrier at each weaker scope that this kernel has. A wait for what is sent has none: where another team has
    waited, a barrier of the block does order its readers."""
    if sync.scope == "arrival":
        return
    for scope, team in (("block", "all"), ("data", "data"), ("warp", "mix"), ("warp", "data")):
        exists = {"data": kernel.own_mix_warp, "block": True, "warp": True}[scope]
        if exists and STRENGTH[scope] < STRENGTH[sync.scope] and (team != "mix" or kernel.mix_warp >= 0):
            yield replace(sync, scope=scope, team=team)


def mutants(kernel: Kernel) -> Iterator[Mutant]:
    """Every mutant that leaves a hazard bare."""
    for index, sync in enumerate(kernel.syncs()):
        for number, made in enumerate((None, *weaker(kernel, sync))):
            bare = tuple(h for h in sync.because if made is None or STRENGTH[h.scope] > STRENGTH[made.scope])
            if bare:
                body = edit_sync(kernel.body, index, lambda _, m=made: m)  # type: ignore[misc]
                what = f"{sync.scope} barrier {index} " + (f"as {made.scope} of {made.team}" if made else "gone")
                yield Mutant(replace(kernel, name=f"{kernel.name}_{index}_{number}", body=body), bare, what)


def values(program: Program) -> dict[str, Any]:
    """Every tensor of a Program after a clean run, so that any kernel can be launched alone."""
    inputs = factories.inputs(program, TOKENS)
    plan = mhcgen.compile(program, "none", cluster=1)
    out = {
        t.name: np.zeros(program.shape(t.name, TOKENS), NUMPY_DTYPES[t.dtype])
        for t in program.of_role("value", "result")
    }
    plan.load("host")(out=out, **inputs)
    return {**inputs, **out}


def module(plan: Plan) -> HostModule:
    """All kernels of a Plan, compiled for race mode; unoptimised, since there are many and each runs once."""
    return HostModule(plan.source, [signature(plan, kernel) for kernel in plan.kernels], race=True, opt="-O0")


def findings(loaded: HostModule, plan: Plan, kernel: Kernel, arrays: dict[str, Any]) -> list[Finding]:
    """What race mode says of one launch of one kernel."""
    names = tensors_of(plan, kernel)
    made_here = [name for name in names if plan.made_in(kernel, name)]
    args = [np.zeros_like(arrays[name]) if name in made_here else arrays[name] for name in names]
    grid, scalars = geometry(kernel, TOKENS, TOKENS)  # a cluster takes them all
    options: dict[str, Any] = {"cluster": (1, kernel.cluster, 1)} if kernel.cluster > 1 else {}
    fresh = tuple(identifier(name) for name in made_here)
    report = loaded.launch(
        kernel.name, grid, kernel.threads, [*args, *scalars], uninitialised=fresh, order="random", **options
    )
    return list(report.findings)


def shown(buffer: str) -> str:
    """A buffer's name as findings show it."""
    return identifier(buffer.removeprefix("global:")) if buffer.startswith("global:") else f"shared {buffer}"


@pytest.mark.parametrize(("streams", "name"), PARAMS)
def test_every_barrier_is_needed_at_its_strength(streams: int, name: str) -> None:
    plan = arm(streams, name)
    assert plan is not None
    tried, missed = 0, []
    arrays = values(plan.program)
    for kernel in plan.kernels:
        found = list(mutants(kernel))
        if not found:
            continue
        mutated = replace(plan, kernels=(kernel, *(mutant.kernel for mutant in found)))
        loaded = module(mutated)
        assert findings(loaded, plan, kernel, arrays) == []
        for mutant in found:
            reported = findings(loaded, plan, mutant.kernel, arrays)
            wanted = {shown(hazard.buffer) for hazard in mutant.bare}
            seen = {f.buffer for f in reported if f.kind in RACES}
            tried += 1
            if not seen & wanted:
                others = sorted({f"{f.kind} on {f.buffer}" for f in reported})
                missed.append(
                    f"{kernel.name}: {mutant.what}: {'; '.join(map(str, mutant.bare))}: {others or 'nothing'}"
                )
    assert missed == []
    assert tried == sum(1 for kernel in plan.kernels for _ in mutants(kernel))


@pytest.mark.parametrize(("streams", "name"), PARAMS)
def test_the_arm_itself_is_clean_in_every_order(streams: int, name: str) -> None:
    plan = arm(streams, name)
    assert plan is not None
    inputs = factories.inputs(plan.program, TOKENS)
    base = Ran(plan, inputs, TOKENS, race=True)
    for order in ("descending", "warp-greedy"):
        assert differing(base.results, Ran(plan, inputs, TOKENS, race=True, order=order).results) == []


def test_arms_have_barriers_of_every_scope() -> None:
    scopes = {sync.scope for n, name in CASES for kernel in arm(n, name).kernels for sync in kernel.syncs()}  # type: ignore[union-attr]
    assert scopes == {"warp", "data", "block", "arrival"}


def test_asked_for_barriers_can_be_weakened_to_the_chosen_ones() -> None:
    """A user's block barriers, replaced by what the pass picks: clean, and the same bits."""
    for n in SIZES:
        asked = arm(n, "block")
        assert asked is not None
        chosen = mhcgen.compile(asked.program, "pre-norm", placement="shared")
        inputs = factories.inputs(asked.program, TOKENS)
        assert {s.scope for s in chosen.kernels[0].syncs()} != {"block"}
        before = Ran(asked, inputs, TOKENS, race=True)
        assert differing(before.results, Ran(chosen, inputs, TOKENS, race=True).results) == []
