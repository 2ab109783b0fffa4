"""launch, stamp and the runner: grids, shared bytes, and that passes keep what they do not decide."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import strategies
from catalogue import two_sites
from factories import chain, inputs, program, stage
from hypothesis import given
from hypothesis import strategies as st

import mhcgen
from mhcgen.errors import RefusedError
from mhcgen.ir import Program
from mhcgen.passes import PIPELINE, run_pipeline
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Options, Plan
from mhcgen.verify_plan import plan_violations


def test_shared_bytes_are_those_of_the_buffers() -> None:
    for kernel in mhcgen.compile(mhcgen.build(hidden=64, norm=True), "pre-norm", placement="shared").kernels:
        assert kernel.shared_bytes == sum(buffer.nbytes for buffer in kernel.buffers) > 0


def test_grids_do_not_know_the_token_count() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=5000), "none")
    said = {entry.subject: str(entry) for entry in plan.log if getattr(entry, "step", "") == "launch"}
    assert "grid (T)" in said["mhc_rowsq"]
    assert "grid (T, 10)" in said["mhc_collapse"]
    assert {kernel.name for kernel in plan.kernels} == set(said)


# ---- the pipeline -----------------------------------------------------------------------------------
def test_the_pipeline_stops_where_it_is_told() -> None:
    names = [name for name, _ in PIPELINE]
    for index, name in enumerate(names):
        plan = mhcgen.compile(mhcgen.build(hidden=64), "pre", stop_after=name)
        assert plan.done == tuple(names[: index + 1])
        assert plan_violations(plan) == []


def test_the_log_keeps_the_order_of_the_passes() -> None:
    steps = [entry.step for entry in mhcgen.compile(mhcgen.build(hidden=64), "pre").log]
    order = [name for name, _ in PIPELINE]
    assert steps == sorted(steps, key=order.index)


@pytest.mark.parametrize("stamps", [False, True])
def test_every_pass_run_twice_changes_nothing(stamps: bool) -> None:
    made = mhcgen.build(hidden=64, norm=True, quant="q8")
    plan = run_pipeline(made, Options(fuse="pre-norm-quant", placement="shared", stamps=stamps))
    for _, run in PIPELINE:
        assert run(plan) is plan
    partial: Plan = Plan(made, Options(fuse="pre-norm-quant", placement="shared", stamps=stamps))
    for name, run in PIPELINE:
        once = run(partial)
        done = replace(once, done=(*partial.done, name))
        assert run(done) == done
        partial = done
    assert partial.kernels == plan.kernels


# ---- what passes may not touch (bugs 55) ------------------------------------------------------------
def untouched(made: Program, **options: Any) -> None:
    """Every pass keeps the Program: number, order and identity of its results included."""
    plan = Plan(made, Options(**options))
    results = [t.name for t in made.of_role("result")]
    opaque = {t for s in made.stages_of_kind(*OPAQUE_KINDS) for t in s.writes}
    for name, run in PIPELINE:
        plan = replace(run(plan), done=(*plan.done, name))
        assert plan.program is made
        assert [t.name for t in plan.program.of_role("result")] == results
        if "place" in plan.done:
            written = [t for k in plan.kernels for s in plan.kernel_stages(k) for t in s.writes if plan.escapes(k, t)]
            assert set(results) - opaque <= set(written)
            assert len(written) == len(set(written))


def test_results_that_a_later_stage_of_the_kernel_reads_stay_results() -> None:
    boundary = mhcgen.build(scope="boundary", hidden=64)
    assert boundary.tensor("x_next").role == "result" and boundary.readers["x_next"]
    untouched(boundary, fuse="boundary")


def test_values_made_results_stay_results() -> None:
    made = program(*chain(), results=("mixes_scaled", "logits", "pre"))
    for fuse in ("none", "pre", "gates+sinkhorn"):
        for placement in ("auto", "shared"):
            untouched(made, fuse=fuse, placement=placement)


def test_a_stage_without_reader_is_kept() -> None:
    made = program(*chain(), stage("mean", results={"y": "unread"}))
    plan = mhcgen.compile(made, "pre")
    assert "mean" in [name for kernel in plan.kernels for name in kernel.stages]


def test_two_sites_in_one_kernel_keep_all_results() -> None:
    names = "+".join(s.name for s in two_sites().stages)
    untouched(two_sites(), fuse=names)


@given(strategies.programs(), st.data())
def test_no_pass_touches_the_program(made: Program, data: st.DataObject) -> None:
    groups = data.draw(strategies.legal_groups(made))
    options = {**data.draw(strategies.schedules()), "fuse": strategies.wish(groups)}
    try:
        untouched(made, **options)
    except RefusedError as refused:
        assert refused.code[0] in "PL"


@pytest.mark.parametrize(
    ("config", "kernel"),
    [
        ({"hidden": 8, "projection": "fma"}, "mhc_project"),  # blocks share the rows of fn
        ({"hidden": 4096, "scope": "post"}, "mhc_post"),  # blocks share the columns
    ],
)
def test_of_the_blocks_that_share_a_token_one_writes_its_stamps(config: dict[str, Any], kernel: str) -> None:
    made = mhcgen.build(**config)
    plan = mhcgen.compile(made, stamps=True)
    assert next(k for k in plan.kernels if k.name == kernel).grid_blocks > 1
    module = plan.load("host", race=True)
    module(**inputs(made, 2))
    assert [launch.report.text for launch in module.launches if not launch.report.ok] == []
    assert module.stamps[kernel].all(), "no token is left without"
