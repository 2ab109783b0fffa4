"""Every emission compiles for every architecture, spills nothing, and keeps block barriers out of its loops."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import sweep

import mhcgen
from mhcgen.backends import nvrtc
from mhcgen.backends.nvrtc import Compiled
from mhcgen.plan import Plan

pytestmark = pytest.mark.nvrtc

ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")
#: Arms tried at every size and architecture; the others move little with either.
CORE = ("unfused", "seed", "element", "row", "registers", "shared", "shared-block", "streamed", "one-warp")
#: Arms without a barrier of the block inside the Sinkhorn loop.
WARP_ARMS = ("element", "row", "registers", "shared", "streamed", "one-warp")


def arms(streams: int, hidden: int, arch: str = "sm_90") -> dict[str, Plan]:
    """The arms of the pre chain that a size allows."""
    made, found = mhcgen.build(streams=streams, hidden=hidden), {}
    for name, options in sweep.ARMS.items():
        try:
            found[name] = mhcgen.compile(made, **{"fuse": "pre", "arch": arch, **options})
        except mhcgen.RefusedError:
            assert streams > 4 or (name, arch) == ("dependent", "sm_80"), name
    return found


def compiled(jobs: Iterable[tuple[str, Plan, str]]) -> dict[str, Compiled]:
    """Each (name, plan, arch) compiled, two at a time."""
    with ThreadPoolExecutor(2) as pool:
        waiting = {f"{name}, {arch}": pool.submit(nvrtc.compile, plan.source, arch) for name, plan, arch in jobs}
        return {name: future.result() for name, future in waiting.items()}


def assert_nothing_spilled(results: dict[str, Compiled]) -> None:
    wrong = [
        f"{name}: {kernel}: {r.spill_stores} + {r.spill_loads} bytes spilled, {r.stack} bytes of stack"
        for name, result in results.items()
        for kernel, r in result.resources.items()
        if r.spill_stores or r.spill_loads or r.stack or r.counts.local_loads or r.counts.local_stores
    ]
    assert wrong == []


def assert_as_planned(plan: Plan, result: Compiled) -> None:
    assert list(result.resources) == [kernel.name for kernel in plan.kernels]
    for kernel in plan.kernels:
        # Each array starts at a multiple of up to 16 bytes.
        extra = result.resources[kernel.name].static_shared - kernel.shared_bytes
        assert 0 <= extra < 16 * max(1, len(kernel.buffers))


@pytest.mark.parametrize("hidden", [4096, 257])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_all_arms_of_up_to_four_streams_spill_nothing(streams: int, hidden: int) -> None:
    plans = {name: plan for name, plan in arms(streams, hidden).items() if name in CORE or streams == 4}
    results = compiled((name, plan, "sm_90") for name, plan in plans.items())
    assert_nothing_spilled(results)
    for name, plan in plans.items():
        assert_as_planned(plan, results[f"{name}, sm_90"])


@pytest.mark.parametrize("arch", ["sm_80", "sm_100", "sm_120"])
def test_arms_of_four_streams_spill_nothing_on_other_architectures(arch: str) -> None:
    made = mhcgen.build(streams=4, hidden=4096)
    plans = {name: mhcgen.compile(made, **{"fuse": "pre", "arch": arch, **sweep.ARMS[name]}) for name in CORE}
    assert_nothing_spilled(compiled((name, plan, arch) for name, plan in plans.items()))


@pytest.mark.parametrize("streams", [5, 6, 7, 8])
def test_default_schedules_of_up_to_eight_streams_spill_nothing(streams: int) -> None:
    jobs = []
    for hidden in (4096, 257):
        for fuse in ("none", "pre"):
            plan = mhcgen.compile(mhcgen.build(streams=streams, hidden=hidden), fuse)
            jobs.append((f"{fuse} {hidden}", plan, "sm_90"))
    assert_nothing_spilled(compiled(jobs))


@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_default_schedules_of_the_gated_residual_spill_nothing(streams: int) -> None:
    jobs = []
    for hidden in (2560, 257):
        for fuse, scope in (("none", "pre"), ("pre-norm", "pre"), ("boundary", "boundary")):
            options: dict[str, Any] = {"projection": "fma", "norm": True, "dtype": "bf16", "scope": scope}
            made = mhcgen.build("gated-residual", streams=streams, hidden=hidden, **options)
            jobs.append((f"{fuse} {hidden}", mhcgen.compile(made, fuse), "sm_90"))
    assert_nothing_spilled(compiled(jobs))


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("hidden", [4096, 257])
@pytest.mark.parametrize("streams", [1, 2, 3, 4])
def test_all_arms_on_all_architectures_spill_nothing(streams: int, hidden: int, arch: str) -> None:
    assert_nothing_spilled(compiled((name, plan, arch) for name, plan in arms(streams, hidden, arch).items()))


@pytest.mark.parametrize(
    ("streams", "hidden", "dtype"),
    [
        pytest.param(n, h, d, marks=[pytest.mark.slow] * ((n, h) not in ((3, 4099), (4, 4099), (5, 4096))))
        for n, h, d in itertools.product(range(1, 9), (257, 1281, 4096, 4098, 4099, 4100, 7168), ("fp32", "bf16"))
    ],
)
def test_clusters_spill_nothing(streams: int, hidden: int, dtype: str) -> None:
    """Odd widths are loaded element by element, and post holds the streams twice while it makes the new ones."""
    plans = {
        fuse: mhcgen.compile(
            mhcgen.build(streams=streams, hidden=hidden, dtype=dtype, projection="fma", norm=True, scope=scope), fuse
        )
        for fuse, scope in (("pre-norm", "pre"), ("boundary", "boundary"))
    }
    assert_nothing_spilled(compiled((fuse, plan, "sm_90") for fuse, plan in plans.items()))


@pytest.mark.parametrize("streams", [4, 8])
def test_warp_arms_have_no_block_barrier_in_a_loop(streams: int) -> None:
    plans = {name: plan for name, plan in arms(streams, 257).items() if name in WARP_ARMS}
    results = compiled((name, plan, "sm_90") for name, plan in plans.items())
    for name, plan in plans.items():
        ptx = results[f"{name}, sm_90"].ptx
        (kernel,) = plan.kernels
        assert not nvrtc.block_barrier_in_loop(ptx, kernel.name), name
        if name in ("shared", "streamed"):  # the compiler may unroll loops over registers, not these
            assert any(loop.counts.bar_warp_sync for loop in nvrtc.ptx_loops(ptx, kernel.name)), name


def test_block_arms_do_have_one() -> None:
    plan = arms(4, 257)["shared-block"]
    result = nvrtc.compile(plan.source, "sm_90")
    assert nvrtc.block_barrier_in_loop(result.ptx, plan.kernels[0].name)


def test_barriers_in_the_machine_are_those_of_the_plan() -> None:
    for name in ("element", "shared", "shared-block"):
        plan = arms(4, 257)[name]
        result = nvrtc.compile(plan.source, "sm_90")
        counts = result.resources[plan.kernels[0].name].counts
        scopes = [sync.scope for sync in plan.kernels[0].syncs()]
        assert counts.bar_sync == scopes.count("block") + scopes.count("data"), name
        assert counts.bar_warp_sync == scopes.count("warp"), name


@pytest.mark.parametrize("functions", ["ieee", "fast"])
def test_every_function_set_compiles(functions: str) -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=257, functions=functions, norm=True), "pre-norm")
    ptx = nvrtc.compile(plan.source, "sm_90").ptx
    assert bool(re.search(r"\bex2\.approx", ptx)) == (functions == "fast")
    assert not re.search(r"\bdiv\.(approx|full)|\bsqrt\.approx", ptx)


def test_no_operation_is_contracted_or_flushed() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=257), "pre")
    ptx = nvrtc.compile(plan.source, "sm_90").ptx
    # A flushing reciprocal starts the refined division, whose operands are bounded away from subnormals.
    assert set(re.findall(r"[\w.]+\.ftz[\w.]*", ptx)) <= {"rcp.approx.ftz.f32"}
    assert not re.search(r"\b(mul|add|sub)\.f(32|64)\b", ptx)  # each states its rounding


#: The rest of the sweep: every template, once. In the default run a part, which moves with nothing.
REST = [name for name in sweep.plans() if not name.startswith("pre ")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (i % 4 > 0)) for i, n in enumerate(REST)]
)
def test_the_sweep_compiles(name: str) -> None:
    plan = sweep.plans()[name]
    result = nvrtc.compile(plan.source, plan.options.arch)
    assert list(result.resources) == [kernel.name for kernel in plan.kernels]
    assert_nothing_spilled({name: result})


@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        ({}, "pre"),
        ({"projection": "fma"}, "pre"),
        ({"projection": "fma", "scope": "boundary", "norm": True}, "boundary"),
        ({"scope": "post"}, "none"),
    ],
)
def test_a_dependent_launch_reads_what_others_write_behind_its_wait(config: dict[str, Any], fuse: str) -> None:
    """A load through `const __restrict__`, or one of the read-only cache, may be moved before the wait."""
    plan = mhcgen.compile(mhcgen.build(hidden=1024, dtype="bf16", **config), fuse, dependent=True)
    parameters = {t.name for t in plan.program.of_role("parameter")}
    found = re.findall(r"^ {4}const \w+\* (__restrict__ )?(\w+),?$", plan.source, re.M)
    assert {name for restrict, name in found if restrict} == {name for _, name in found} & parameters
    assert {name for restrict, name in found if not restrict} == {t.name for t in plan.program.of_role("input")}
    before, after = nvrtc.compile(plan.source, "sm_90").ptx.split("griddepcontrol.wait;")
    assert not re.search(r"ld\.global(?!\.nc)|cp\.async", before)
    if not parameters & {"fn", "norm_weight"}:
        assert "ld.global" in after and "ld.global.nc" not in after
