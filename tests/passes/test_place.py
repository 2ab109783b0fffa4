"""place: who owns which column, where tensors live, and which of it is logged."""

from __future__ import annotations

from typing import Any

import factories
import pytest
from factories import chain, program, stage

import mhcgen
from mhcgen.errors import RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.passes.geometry import registers_per_thread
from mhcgen.passes.place import place, power_of_two, register_limit
from mhcgen.plan import Kernel, Plan


def placed(made: Program, fuse: str = "pre", **options: Any) -> Kernel:
    """The first kernel of a Plan stopped after place."""
    return mhcgen.compile(made, fuse, stop_after="place", **options).kernels[0]


def choices(plan: Plan, step: str = "place") -> dict[str, str]:
    return {entry.subject: entry.choice for entry in plan.log if getattr(entry, "step", "") == step}


PRE = mhcgen.build(hidden=4096)


# ---- columns ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("hidden", [1, 2, 3, 7, 8, 31, 32, 33, 255, 256, 257, 1000, 4096, 4104, 7168, 16384])
@pytest.mark.parametrize("threads", [None, 64, 96, 1024])
def test_threads_own_every_column_in_aligned_power_of_two_runs(hidden: int, threads: int | None) -> None:
    for fuse in ("none", "pre"):
        plan = mhcgen.compile(mhcgen.build(hidden=hidden), fuse, threads=threads, stop_after="place")
        for kernel in plan.kernels:
            c = kernel.columns
            if c is None:
                continue
            assert c.run == power_of_two(c.run)
            assert hidden % c.chunk == c.run % c.chunk == c.chunk % c.vector == 0
            assert kernel.data_warps * 32 * c.run * c.blocks >= hidden
            if threads is not None:
                assert kernel.threads == threads


def test_a_reduction_keeps_a_token_in_one_block() -> None:
    for kernel in mhcgen.compile(PRE, "none").kernels:
        if "collapse" in kernel.stages:
            assert kernel.grid == "token_columns"
        else:
            assert kernel.columns is None or kernel.columns.blocks == 1


def test_columns_are_read_in_chunks_that_divide_the_width() -> None:
    chunks = {h: placed(mhcgen.build(hidden=h)).columns.chunk for h in (4096, 4100, 4098, 4099)}  # type: ignore[union-attr]
    assert chunks == {4096: 8, 4100: 4, 4098: 2, 4099: 1}


def test_many_streams_take_smaller_chunks() -> None:
    assert placed(mhcgen.build(streams=16, hidden=4096)).columns.chunk == 4  # type: ignore[union-attr]


def test_loads_are_vectors_unless_elements_are_asked_for() -> None:
    assert placed(PRE).columns.vector == 4  # type: ignore[union-attr]
    assert placed(mhcgen.build(hidden=4096, dtype="bf16")).columns.vector == 8  # type: ignore[union-attr]
    assert placed(PRE, scalar=True).columns.vector == 1  # type: ignore[union-attr]


def test_a_warp_holds_a_whole_quantisation_group() -> None:
    for hidden in (1, 129, 257):
        made = mhcgen.build(hidden=hidden, norm=True, quant="fp8")
        for fuse in ("none", "pre-norm-quant"):
            for threads in (None, 64, 1024):
                for kernel in mhcgen.compile(made, fuse, threads=threads).kernels:
                    if "quant" in kernel.stages:
                        assert kernel.columns is not None
                        assert 32 * kernel.columns.run >= 128


# ---- streams ----------------------------------------------------------------------------------------
def test_streams_stay_in_registers_where_they_fit() -> None:
    place_of_x = placed(PRE).place("x")
    assert place_of_x is not None and place_of_x.space == "thread"


def test_streams_stay_in_global_memory_where_they_do_not_fit_or_were_told_to() -> None:
    wide = mhcgen.compile(mhcgen.build(streams=16, hidden=1 << 16), "pre", stop_after="place")
    for kernel in (wide.kernels[0], placed(PRE, slab="global")):
        where = kernel.place("x")
        assert where is not None and where.space == "global"
    assert choices(wide)[wide.kernels[0].name]


def test_streams_read_once_are_not_kept() -> None:
    where = placed(PRE, "none").place("x")
    assert where is not None and where.space == "global"


# ---- the warp of the mixes --------------------------------------------------------------------------
def test_the_mixes_have_a_warp_of_their_own_where_a_collapse_can_use_the_time() -> None:
    assert placed(PRE).own_mix_warp
    assert not placed(PRE, mix_warp="shared").own_mix_warp
    assert not placed(PRE, "rowsq+gates+sinkhorn").own_mix_warp


def test_no_column_work_takes_one_warp() -> None:
    kernel = placed(program(stage("sinkhorn")), "none")
    assert (kernel.warps, kernel.data_warps, kernel.mix_warp) == (1, 0, 0)


# ---- the matrix -------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("streams", "options", "layout"),
    [
        (1, {}, "element"),
        (4, {}, "element"),
        (5, {}, "row"),
        (16, {}, "row"),
        (4, {"sync": "block"}, "shared"),
        (4, {"placement": "row"}, "row"),
        (4, {"placement": "registers"}, "registers"),
        (8, {"placement": "shared"}, "shared"),
        (4, {"placement": "element"}, "element"),
    ],
)
def test_where_the_matrix_lives(streams: int, options: dict[str, str], layout: str) -> None:
    kernel = placed(mhcgen.build(streams=streams, hidden=64), **options)
    where = kernel.place("logits")
    assert where is not None and where.layout == layout
    assert where.space == ("shared" if layout == "shared" else "lane")


def test_several_sites_in_one_kernel_take_shared_memory() -> None:
    made = program(*chain("1", x="x1"), *chain("2", x="x2"))
    plan = mhcgen.compile(made, "gates1+gates2+sinkhorn1+sinkhorn2", stop_after="place")
    fused = next(kernel for kernel in plan.kernels if "gates1" in kernel.stages)
    assert {p.layout for p in fused.places if p.layout} == {"shared"}


def test_a_sinkhorn_of_given_logits_beside_other_gates_is_another_site() -> None:
    made = program(stage("gates"), stage("sinkhorn", operands={"logits": "given"}))
    assert mhcgen.compile(made, "gates+sinkhorn").kernels[0].places
    with pytest.raises(RefusedError, match="P-CHAIN"):
        mhcgen.compile(made, "gates+sinkhorn", placement="row")


def test_rescaled_mixes_that_others_read_are_in_shared_memory() -> None:
    made = program(*chain(), results=("mixes_scaled",))
    where = placed(made).place("mixes_scaled")
    assert where is not None and where.space == "shared"
    lane = placed(program(*chain())).place("mixes_scaled")
    assert lane is not None and lane.space == "lane"


# ---- registers --------------------------------------------------------------------------------------
def test_registers_of_a_thread() -> None:
    assert registers_per_thread(1) == 255
    assert registers_per_thread(8) == 255
    assert registers_per_thread(9) == registers_per_thread(12) == 168
    assert registers_per_thread(16) == 128
    assert registers_per_thread(32) == 64


def test_the_largest_matrix_in_registers() -> None:
    assert register_limit(1) == 6
    assert register_limit(32) == 3


def test_powers_of_two() -> None:
    assert [power_of_two(n) for n in (1, 2, 3, 4, 5, 8, 9)] == [1, 2, 4, 4, 8, 8, 16]


# ---- the pass ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("field", ["placement", "sync", "slab", "mix_warp"])
def test_words_outside_the_lists_are_refused(field: str) -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.compile(factories.program(), **{field: "somewhere"})
    assert caught.value.code == "U-OPTION"
    assert caught.value.where == f"--{field.replace('_', '-')}"


@pytest.mark.parametrize("threads", [0, -32, 33, 1056, 64.0, True, "64"])
def test_threads_that_no_block_has_are_refused(threads: Any) -> None:
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(factories.program(), threads=threads)
    assert caught.value.code == "L-THREADS"


@pytest.mark.parametrize("cluster", [0, -1, 17, 10**9, 2.0, True, "4"])
@pytest.mark.parametrize("fuse", ["none", "pre"])
def test_clusters_that_no_gpu_has_are_refused(fuse: str, cluster: Any) -> None:
    made = mhcgen.build(hidden=7168, projection="fma")
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(made, fuse, cluster=cluster)
    assert caught.value.code == "P-CLUSTER"
    assert "1 to 16" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "cluster", "why"),
    [
        ({"projection": "external"}, 2, "only a kernel with a projection uses a cluster"),
        ({"model": "kromhc"}, 2, "comb: no steps for a cluster"),
        ({"model": "plain-hc"}, 2, "comb, project_streams, rowsq_streams: no steps for a cluster"),
        ({"hidden": 64}, 2, "one block of 32 lanes has all 64 columns, 8 a lane"),
        ({"hidden": 65536}, 2, "1024 columns a lane, as 2 blocks have them, do not fit the registers"),
        ({"model": "transformer-engine"}, 2, "the streams lie side by side"),
        ({"streams": 1, "norm": True, "quant": "q8"}, 2, "a group of 32 columns is shorter than the 64 of a lane"),
    ],
)
def test_why_a_kernel_has_no_cluster(config: dict[str, Any], cluster: int, why: str) -> None:
    made = mhcgen.build(**{"hidden": 4096, "projection": "fma", **config})
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(made, "pre-norm-quant" if "quant" in config else "pre", cluster=cluster)
    assert caught.value.code == "P-CLUSTER" and why in str(caught.value)


def test_a_cluster_needs_a_warp_for_columns_beside_that_of_the_mixes() -> None:
    made = mhcgen.build(hidden=4096, projection="fma")
    with pytest.raises(RefusedError, match="32 threads leave no warp for the columns") as caught:
        mhcgen.compile(made, "pre", cluster=4, threads=32)
    assert caught.value.code == "P-CLUSTER" and "--threads 64" in str(caught.value)


@pytest.mark.parametrize(
    ("arch", "blocks"), [("sm_80", 1), ("sm_90", 16), ("sm_100", 16), ("sm_120", 8), ("sm_121", 8)]
)
def test_a_cluster_is_by_itself_no_larger_than_documented(arch: str, blocks: int) -> None:
    made = mhcgen.build(hidden=4096, dtype="bf16", projection="fma")
    assert [kernel.cluster for kernel in mhcgen.compile(made, "pre", arch=arch).kernels] == [blocks]


def test_a_larger_cluster_can_be_asked_for_and_the_log_says_so() -> None:
    made = mhcgen.build(hidden=4096, dtype="bf16", projection="fma")
    plan = mhcgen.compile(made, "pre", arch="sm_120", cluster=16)
    assert [kernel.cluster for kernel in plan.kernels] == [16]
    assert "more than the 8 that are documented for sm_120" in "\n".join(map(str, plan.log))


def test_where_no_cluster_fits_by_itself_the_log_says_why() -> None:
    made = mhcgen.build(streams=1, hidden=20480, projection="fma", norm=True, quant="q8")
    plan = mhcgen.compile(made, "pre-norm-quant")
    assert [kernel.cluster for kernel in plan.kernels] == [1]
    log = "\n".join(map(str, plan.log))
    assert "no cluster; because a group of 32 columns is shorter than the 64 of a lane" in log


@pytest.mark.parametrize("model", ["kromhc", "plain-hc"])
def test_the_stage_that_runs_beside_the_collapse_is_named(model: str) -> None:
    log = "\n".join(map(str, mhcgen.compile(mhcgen.build(model, hidden=4096), "pre").log))
    assert "no path from comb to collapse" in log and "sinkhorn" not in log


@pytest.mark.parametrize("placement", ["shared", "row", "element", "registers"])
def test_placing_twice_changes_nothing(placement: str) -> None:
    made = mhcgen.build(hidden=264, norm=True, quant="q8", projection="fma")
    once = mhcgen.compile(made, "pre-norm-quant", placement=placement, stop_after="place")
    again = place(mhcgen.plan.Plan(once.program, once.options, once.kernels, done=("fuse",)))
    assert again.kernels == once.kernels
