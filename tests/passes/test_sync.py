"""sync: barriers in real plans, their kinds, their reasons in the text, and that none is spare."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

import mhcgen
from mhcgen.hazards import STRENGTH
from mhcgen.log import Decision
from mhcgen.passes.sync import sync
from mhcgen.plan import Kernel, Loop, Plan, Sync, walk

SHARED = {"streams": 4, "hidden": 257, "norm": True}


def plan(fuse: str = "pre-norm", build: dict[str, Any] | None = None, **options: Any) -> Plan:
    return mhcgen.compile(mhcgen.build(**{**SHARED, **(build or {})}), fuse, **options)


def in_loops(kernel: Kernel) -> list[Sync]:
    return [
        node for loop in walk(kernel.body) if isinstance(loop, Loop) for node in loop.body if isinstance(node, Sync)
    ]


def test_lanes_that_hold_the_matrix_need_no_barrier_in_the_loop() -> None:
    for placement in ("row", "element", "registers"):
        kernel = plan(placement=placement).kernels[0]
        assert in_loops(kernel) == []
        assert {s.scope for s in kernel.syncs()} == {"block", "data"}


def test_a_shared_matrix_needs_warp_barriers_only() -> None:
    for streams in (4, 8):
        kernel = plan(build={"streams": streams}, placement="shared").kernels[0]
        assert {(s.scope, s.team) for s in in_loops(kernel)} == {("warp", "mix")}
        assert len(in_loops(kernel)) == 4  # two half-steps, each a reduction and a map


def test_the_first_barrier_of_a_loop_names_its_back_edge() -> None:
    kernel = plan(placement="shared").kernels[0]
    carried = [str(h) for s in in_loops(kernel) for h in s.because if h.carried]
    assert carried == ["RAW s_logits: sinkhorn.loop1.col_sum.map -> sinkhorn.loop0.row_sum.reduce (next iteration)"]


def test_block_barriers_are_block_barriers_everywhere() -> None:
    kernel = plan(sync="block").kernels[0]
    assert {s.scope for s in kernel.syncs()} == {"block"}
    assert in_loops(kernel)
    said = [e for e in plan(sync="block").log if isinstance(e, Decision) and e.step == "sync"]
    assert any(e.because.startswith("asked for (__syncwarp() would do") for e in said)


def test_asking_for_a_warp_gives_the_weakest_correct_barriers() -> None:
    assert plan(sync="warp", placement="shared").kernels == plan(placement="shared").kernels


def test_the_data_warps_do_not_wait_for_the_mix_warp() -> None:
    own = plan().kernels[0]
    assert ("data", "data") in {(s.scope, s.team) for s in own.syncs()}
    together = plan(mix_warp="shared").kernels[0]
    assert {s.scope for s in together.syncs()} == {"block"}


def test_unfused_kernels_without_shared_memory_have_no_barrier() -> None:
    for kernel in plan("none").kernels:
        if "collapse" in kernel.stages or "gates" in kernel.stages:
            assert list(kernel.syncs()) == []
    said = {e.subject: e.because for e in plan("none").log if isinstance(e, Decision) and e.choice == "no barrier"}
    assert said["mhc_collapse"] == "no two threads touch the same memory"


@pytest.mark.parametrize("streams", [4, 8])
def test_why_a_warp_covers_the_mixes_is_said(streams: int) -> None:
    log = plan(build={"streams": streams}, placement="shared").log
    said = [e.because for e in log if isinstance(e, Decision) and e.choice == "one warp covers the mixes"]
    assert said == [
        "(6) * 4 = 24 mixes fit the 32 lanes of a warp"
        if streams == 4
        else "(10) * 8 = 80 mixes exceed 32 lanes, but a warp may stride over them in 3 rounds, so every access "
        "stays in one warp"
    ]


def test_every_barrier_carries_its_hazards_into_the_text() -> None:
    made = plan(placement="shared")
    lines = [
        line
        for line in made.source.splitlines()
        if re.search(r"__syncwarp\(|__syncthreads\(|mhc_sync_data\(\d", line)
    ]
    syncs = list(made.kernels[0].syncs())
    assert [line.split("//")[1].strip() for line in lines] == ["; ".join(map(str, s.because)) for s in syncs]


def test_a_barrier_is_as_strong_as_its_strongest_hazard() -> None:
    for placement in ("shared", "row"):
        for barrier in plan(placement=placement).kernels[0].syncs():
            assert STRENGTH[barrier.scope] == max(STRENGTH[h.scope] for h in barrier.because)


@pytest.mark.parametrize("options", [{"placement": "shared"}, {}, {"sync": "block"}, {"mix_warp": "shared"}])
def test_syncing_twice_changes_nothing(options: dict[str, Any]) -> None:
    once = plan(**options)
    again = sync(replace(once, done=("fuse", "place")))
    assert again.kernels == once.kernels
    assert sync(once) is once
