"""Every barrier that the sync pass chose is needed: removed or weakened, race mode names its hazard's buffer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from gates import failures, gate, missed

import mhcgen.gate.barriers as barriers
from mhcgen import build
from mhcgen.build import build_config, configure
from mhcgen.gate import RedRow
from mhcgen.gate.barriers import (
    iterations_taken,
    mutants,
    one_step_weaker,
    unreached,
    values_for,
    weakened_plan,
    weakest,
)
from mhcgen.passes import run_pipeline
from mhcgen.plan import Loop, Options, Sync, walk

BOTH = ("drop-barrier", "weaken-barrier")
#: One arm of each shape of barriers; block sizes differ in nothing that a barrier orders.
SHAPES = "unfused,seed,asked,v1,v2,v3.*.256,v4.256,v4.256.shared,v4.auto.shared,scalar,group.*"
FEW_SHAPES = "unfused,asked,v1,v2,v3.row.256,v4.256,v4.256.shared"


def mutation(config: dict[str, Any], fuse: str, arms: str, **asked: Any) -> tuple[RedRow, ...]:
    """All barrier mutants of the chosen arms; the clean arms must be free of findings."""
    report = gate(config, fuse, arms=arms, race=True, red=BOTH, tokens=(2,), inputs=("uniform",), **asked)
    assert not failures(report)
    assert not missed(report)
    assert report.exit_code == 1
    for red in report.reds:
        assert red.expected == "race"
        assert any(buffer in red.detail for buffer in red.buffer)
    return report.reds


@pytest.mark.parametrize(
    ("config", "fuse", "arms"),
    [
        ({}, "pre", SHAPES),
        (
            {"streams": 3, "hidden": 40, "norm": True, "quant": "q8", "projection": "fma"},
            "pre-norm-quant",
            FEW_SHAPES,
        ),
        ({"streams": 8, "early_stop": True, "iterations_out": True, "iters": 4}, "pre", FEW_SHAPES),
        ({"streams": 2, "hidden": 520, "norm": True, "projection": "fma"}, "pre-norm", "asked,cluster.4"),
    ],
    ids=str,
)
def test_every_barrier_of_every_shape_is_needed(config: dict[str, Any], fuse: str, arms: str) -> None:
    found = Counter(red.fault for red in mutation(config, fuse, arms))
    assert found["drop-barrier"] >= 6
    assert found["weaken-barrier"] >= 5


@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        ({"scope": "boundary", "streams": 2, "hidden": 72}, "boundary"),
        pytest.param({"scope": "trunk", "streams": 3, "hidden": 24}, "pre", marks=pytest.mark.slow),
        pytest.param(
            {"scope": "site", "streams": 6, "norm": True, "dtype": "bf16"}, "pre-norm", marks=pytest.mark.slow
        ),
        ({"streams": 16, "hidden": 33, "iters": 3}, "pre"),
        ({"streams": 1, "hidden": 520, "projection": "fma"}, "pre"),
    ],
    ids=str,
)
def test_barriers_of_other_programs_are_needed(config: dict[str, Any], fuse: str) -> None:
    mutation(config, fuse, "unfused,asked,v1,v2")


@pytest.mark.slow
@pytest.mark.parametrize("streams", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        ({}, "pre"),
        ({"norm": True, "quant": "q8", "projection": "fma"}, "pre-norm-quant"),
        ({"scope": "boundary", "early_stop": True}, "boundary"),
    ],
    ids=str,
)
def test_every_barrier_of_every_arm_is_needed(streams: int, config: dict[str, Any], fuse: str) -> None:
    mutation({"streams": streams, **config}, fuse, "all")


def test_barriers_between_rounds_are_tried_where_there_is_a_second_round() -> None:
    config = {"streams": 1, "early_stop": True}
    asked: dict[str, Any] = {"arms": "v1", "race": True, "red": BOTH, "tokens": (2,), "inputs": ("uniform",)}
    report = gate(config, "pre", **asked)
    assert not missed(report) and report.exit_code == 1
    assert {name for name, _ in report.unfit} == set(BOTH)
    assert all("v1 between two rounds" in reason for _, reason in report.unfit)
    # A larger eps takes the 1 x 1 matrix through several rounds.
    several = gate({**config, "hc_eps": 1e-2}, "pre", **asked)
    assert not missed(several) and several.unfit == ()
    assert len(several.reds) == len(report.reds) + 2
    assert sum("next iteration" in red.site for red in several.reds) >= 2


def test_a_matrix_of_no_token_has_no_count() -> None:
    config = configure("static-mhc", hidden=64, early_stop=True)
    assert iterations_taken(build_config(config), config, 0) == config.iters


@pytest.mark.parametrize(("model", "alone"), [("deepseek-v4", 1), ("mhc-paper", 0)])
def test_rounds_are_counted_from_where_the_loop_begins(model: str, alone: int) -> None:
    """The first iteration of DeepSeek-V4 stands before its loop; the paper's loop has them all."""
    config = configure(model, streams=1, hidden=64, early_stop=True)
    program = build_config(config)
    (kernel,) = run_pipeline(program, Options(fuse="pre", sync="block", placement="shared")).kernels
    (loop,) = (node for node in walk(kernel.body) if isinstance(node, Loop))
    assert config.iters - loop.count == alone
    found = {taken: len(unreached(kernel, config.iters, taken)) for taken in (alone + 1, alone + 2)}
    assert found == {alone + 1: 1, alone + 2: 0}
    assert alone + 1 <= iterations_taken(program, config, 0) < config.iters
    assert iterations_taken(program, replace(config, early_stop=False), 0) == config.iters


def test_block_barriers_weakened_to_the_chosen_ones_stay_clean() -> None:
    for config in ({}, {"streams": 8, "early_stop": True, "norm": True}):
        fuse = "pre-norm" if "norm" in config else "pre"
        inputs = ("uniform", "D1", "extreme")
        report = gate(config, fuse, {"sync": "block"}, arms="asked,v1", race=True, inputs=inputs)
        assert not failures(report)
        for row in report.rows[1:]:
            assert row.verdict("weakened") is not None


def test_weakening_too_far_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_weak(plan: Any) -> Any:
        kernels = []
        for kernel in plan.kernels:
            body = tuple(Sync("warp", "all", n.because) if isinstance(n, Sync) else n for n in kernel.body)
            kernels.append(replace(kernel, body=body))
        return replace(plan, kernels=tuple(kernels))

    monkeypatch.setattr(barriers, "weakened_plan", too_weak)
    report = gate(arms="v1", race=True, inputs=("uniform",))
    verdict = report.rows[1].verdict("weakened")
    assert verdict is not None
    assert not verdict.ok
    assert "race" in verdict.detail


def test_a_mutant_that_is_no_fault_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    # The barrier stays where it is: race mode finds nothing, and the gate must not say that it did.
    monkeypatch.setattr(barriers, "_become", lambda to, sync: sync)
    report = gate(red=("drop-barrier",), inputs=("uniform",))
    assert report.reds
    assert not any(red.caught for red in report.reds)
    assert report.exit_code == 70


def test_a_finding_on_another_buffer_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(barriers, "executor_name", lambda buffer: f"another than {buffer}")
    report = gate(red=("drop-barrier",), inputs=("uniform",))
    assert report.exit_code == 70
    assert all(red.detail.startswith("race mode reported") for red in report.reds)


def test_mutants_differ_from_the_kernel_in_one_barrier() -> None:
    program = build(streams=4, hidden=64)
    plan = run_pipeline(program, Options(fuse="pre", placement="shared", threads=128, slab="global"))
    (kernel,) = plan.kernels
    syncs = list(kernel.syncs())
    found = list(mutants(kernel, BOTH))
    assert len({mutant.kernel.name for mutant in found}) == len(found)
    dropped = [mutant for mutant in found if mutant.fault == "drop-barrier"]
    assert len(dropped) == len(syncs)
    for index, mutant in enumerate(dropped):
        assert list(mutant.kernel.syncs()) == syncs[:index] + syncs[index + 1 :]
    for mutant in found:
        if mutant.fault == "weaken-barrier":
            changed = [(a, b) for a, b in zip(syncs, mutant.kernel.syncs(), strict=True) if a != b]
            assert [(a.scope, b.scope) for a, b in changed] == [("block", "warp")]


def test_one_step_weaker_is_data_where_there_is_a_warp_of_its_own_for_the_mixes() -> None:
    plan = run_pipeline(build(streams=4, hidden=64, norm=True), Options(fuse="pre-norm", threads=128))
    (kernel,) = plan.kernels
    assert kernel.own_mix_warp
    weaker = {sync.scope: one_step_weaker(kernel, sync) for sync in kernel.syncs()}
    assert weaker["block"] is not None
    assert weaker["block"].scope == "data"
    assert weaker["data"] is not None
    assert weaker["data"].scope == "warp"
    assert all(weakest(kernel, sync).scope == sync.scope for sync in kernel.syncs())


def test_a_plan_with_the_chosen_barriers_has_nothing_to_weaken() -> None:
    program = build(streams=4, hidden=64)
    assert weakened_plan(run_pipeline(program, Options(fuse="pre"))) is None
    strong = run_pipeline(program, Options(fuse="pre", placement="shared", sync="block"))
    weak = weakened_plan(strong)
    assert weak is not None
    chosen = run_pipeline(program, Options(fuse="pre", placement="shared", sync="auto"))
    scopes = [[[s.scope for s in kernel.syncs()] for kernel in plan.kernels] for plan in (weak, chosen)]
    assert scopes[0] == scopes[1]


def test_values_for_a_kernel_alone_are_those_of_the_whole_program() -> None:
    program = build(streams=4, hidden=64)
    values = values_for(program, 0)
    assert {tensor.name for tensor in program.tensors} == set(values)
