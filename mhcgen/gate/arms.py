"""Arms: emissions of one Program under different schedules, all of which must give the same bits.

Names are stable: scripts and the JSON line use them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from itertools import pairwise

from mhcgen.errors import RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.log import Refusal
from mhcgen.passes import run_pipeline
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Options, Plan

BASELINE = "unfused"
ASKED = "asked"

PLACEMENTS = ("shared", "row", "element", "registers")
V3_THREADS = (128, 256, 512, 1024)
V4_THREADS = (256, 512, 1024)
CLUSTERS = (2, 4, 8, 16)
#: Stages whose neighbours are tried as explicit groups; a trunk repeats itself after that.
GROUPED_STAGES = 8


@dataclass(frozen=True)
class Arm:
    """One emission under test.

    Args:
        name: stable name.
        options: its schedule.
        what: one line for people.
        misaligned: its arrays start off every vector boundary.
        full_loop: the Sinkhorn loop runs to its end although the Program lets it stop early.
    """

    name: str
    options: Options
    what: str
    misaligned: bool = False
    full_loop: bool = False


@dataclass(frozen=True)
class RefusedArm:
    """An arm that has no legal schedule for this Program, with the pass's reason."""

    arm: Arm
    refusal: Refusal


def candidates(program: Program, options: Options) -> Iterator[Arm]:
    """Every arm by name, legal or not, in the order of reports."""
    plain = Options(arch=options.arch)
    fused = replace(plain, fuse=options.fuse)
    yield Arm(BASELINE, plain, "one kernel a stage: the baseline")
    yield Arm(ASKED, options, "the schedule asked for")
    yield Arm("seed", replace(plain, fuse="seed"), "the three launches of the seed system")
    shared = replace(fused, placement="shared", slab="global", mix_warp="shared", threads=128)
    yield Arm("v1", replace(shared, sync="block"), "matrix in shared memory, block barriers, streams read twice")
    yield Arm("v2", replace(shared, sync="warp"), "v1 with the weakest correct barriers")
    for placement in PLACEMENTS:
        for threads in V3_THREADS:
            yield Arm(
                f"v3.{placement}.{threads}",
                replace(shared, placement=placement, threads=threads),
                f"matrix by {placement}, streams read twice, {threads} threads",
            )
    kept = replace(fused, slab="registers")
    for count in (*V4_THREADS, None):
        size = "auto" if count is None else str(count)
        for mix_warp, suffix in (("own", ""), ("shared", ".shared")):
            yield Arm(
                f"v4.{size}{suffix}",
                replace(kept, threads=count, mix_warp=mix_warp),
                f"streams read once and kept in registers, {size} threads, mixes on "
                + ("a warp of their own" if mix_warp == "own" else "warp 0"),
            )
    for blocks in CLUSTERS:
        yield Arm(f"cluster.{blocks}", replace(fused, cluster=blocks), f"a token's columns over {blocks} blocks")
    yield Arm("stamped", replace(options, stamps=True), "asked, with time stamps")
    yield Arm("dependent", replace(options, dependent=True), "asked, for dependent launch")
    if any(stage.attr("early_stop") for stage in program.stages_of_kind("sinkhorn")):
        yield Arm("full-loop", options, "asked, without early stop", full_loop=True)
    yield Arm("scalar", replace(options, scalar=True), "asked, element loads, on misaligned arrays", True)
    for groups in _partial_groups(program):
        yield Arm(
            f"group.{groups.replace(',', '/')}",
            replace(plain, fuse=groups),
            f"explicit groups {groups}",
        )


def _partial_groups(program: Program) -> tuple[str, ...]:
    """Neighbouring stages in pairs, and the chain cut in two: fusions no preset names."""
    names = [stage.name for stage in program.stages if stage.kind not in OPAQUE_KINDS]
    names = names[:GROUPED_STAGES]
    pairs = [f"{a}+{b}" for a, b in pairwise(names)]
    half = len(names) // 2
    halves = ["+".join(names[:half]) + "," + "+".join(names[half:])] if half >= 2 else []
    return (*pairs, *halves)


def arms(program: Program, options: Options) -> tuple[Arm, ...]:
    """Every legal arm of a Program; `unfused` first.

    Args:
        program: the unfused Program.
        options: the schedule asked for.
    """
    return tuple(arm for arm in candidates(program, options) if isinstance(plan_arm(program, arm), Plan))


def made(program: Program, arm: Arm) -> Plan:
    """The finished Plan of an arm.

    Raises:
        RefusedError: it is not legal.
    """
    if arm.full_loop:
        stages = [
            replace(stage, attrs=tuple(sorted({**dict(stage.attrs), "early_stop": False}.items())))
            if stage.kind == "sinkhorn"
            else stage
            for stage in program.stages
        ]
        program = program.with_stages(stages)
    return run_pipeline(program, arm.options)


def plan_arm(program: Program, arm: Arm) -> Plan | RefusedArm:
    """The finished Plan of an arm, or why there is none."""
    try:
        return made(program, arm)
    except RefusedError as error:
        assert isinstance(error.refusal, Refusal)
        return RefusedArm(arm, error.refusal)


def chosen(program: Program, options: Options, wish: str) -> tuple[list[tuple[Arm, Plan]], list[RefusedArm]]:
    """The planned arms of a wish, baseline first, and those that are refused.

    Args:
        program: the unfused Program.
        options: the schedule asked for.
        wish: empty, `all`, or a comma list of names and patterns.

    Raises:
        UsageError: `U-ARM`, a name or pattern that matches nothing.
        RefusedError: the asked arm, or one named in full, is not legal.
    """
    every = list(candidates(program, options))
    parts = [part.strip() for part in wish.split(",") if part.strip()]
    named = {BASELINE, *(parts or (ASKED,))}
    if "all" in parts:
        named |= {ASKED}
    picked = [arm for arm in every if "all" in parts or any(fnmatchcase(arm.name, part) for part in named)]
    for part in parts:
        if part != "all" and not any(fnmatchcase(arm.name, part) for arm in every):
            raise _unknown(part, [arm.name for arm in every])
    planned: list[tuple[Arm, Plan]] = []
    refused: list[RefusedArm] = []
    for arm in picked:
        if arm.name in named:
            planned.append((arm, made(program, arm)))
            continue
        plan = plan_arm(program, arm)
        if isinstance(plan, Plan):
            planned.append((arm, plan))
        else:
            refused.append(plan)
    return planned, refused


def _unknown(part: str, names: list[str]) -> UsageError:
    near = difflib.get_close_matches(part, names, n=1)
    return UsageError(
        "U-ARM",
        f"no arm is called {part!r}",
        where="--arms",
        notes=(f"arms of this Program: all, {', '.join(names)}",),
        hints=((f"did you mean {near[0]}?",) if near else ("`mhcgen list kernels` shows them",)),
    )
