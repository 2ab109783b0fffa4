"""Thread block clusters on the host: correct kernels in every order, every barrier a mutant, every rule broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_cases import ORDERS, signature, source

from mhcgen.backends.host import Finding, HostModule, LaunchReport
from mhcgen.errors import UsageError

CTYPES = {"x": "const float*", "out": "float*"}
KERNELS = ("reduce_ranks", "pass_on")
CLUSTER, CLUSTERS = 4, 3
THREADS = 96

Array = npt.NDArray[Any]


@cache
def module(text: str, *, race: bool) -> HostModule:
    return HostModule(text, [signature(name, **CTYPES) for name in KERNELS], name="clusters", race=race)


@cache
def correct(*, race: bool) -> HostModule:
    return module(source("clusters"), race=race)


def run_kernel(
    host: HostModule, kernel: str, order: str = "ascending", seed: int = 0, **options: Any
) -> tuple[Array, Array, LaunchReport]:
    """Input, output and report of one launch of three clusters."""
    elements = THREADS if kernel == "reduce_ranks" else THREADS - 32
    x = np.random.default_rng(3).standard_normal((CLUSTER * CLUSTERS, elements)).astype(np.float32)
    out = np.zeros_like(x)
    options = {"cluster": CLUSTER, "uninitialised": {"out"}, "order": order, "seed": seed} | options
    report = host.launch(kernel, CLUSTER * CLUSTERS, THREADS, [x, out], **options)
    return x, out, report


# ---- correct kernels ----------------------------------------------------------------------------------------------


def expected(kernel: str, x: Array) -> Array:
    by_cluster = x.reshape(CLUSTERS, CLUSTER, -1)
    if kernel == "reduce_ranks":
        total = by_cluster.astype(np.float64).sum((1, 2), keepdims=True)
        return (by_cluster * total).reshape(x.shape)
    passed = (by_cluster * by_cluster) * (np.float32(1) + (np.arange(CLUSTER) - 1) % CLUSTER)[None, :, None]
    return np.roll(passed, -1, axis=1)[:, :, ::-1].reshape(x.shape)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_correct_kernels_give_the_same_bits_in_every_order(kernel: str, race: bool) -> None:
    bits = set()
    for order in ORDERS:
        for seed in range(4):
            x, out, report = run_kernel(correct(race=race), kernel, order, seed)
            assert report.ok, report.text
            assert report.blocks_run == CLUSTER * CLUSTERS
            bits.add(out.tobytes())
    assert len(bits) == 1
    want = expected(kernel, x)
    assert np.max(np.abs(out - want)) <= 2e-6 * np.max(np.abs(want))


def test_ucontext_fibers_run_clusters_too() -> None:
    host = HostModule(source("clusters"), [signature(KERNELS[0], **CTYPES)], name="clusters", fibers="ucontext")
    assert run_kernel(host, KERNELS[0])[1].tobytes() == run_kernel(correct(race=False), KERNELS[0])[1].tobytes()


# ---- every barrier matters ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """The kernels with one cluster barrier removed, weakened or doubled, and the rule that must be named."""

    kernel: str
    line: int
    change: str
    rule: str
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.line}-{self.change}"


def mutants() -> Iterator[Mutant]:
    text = source("clusters")
    body = text.index('extern "C"')
    for match in re.finditer(r"(cluster_\w+)\(\);  // (?:[^\n:]*: )?([\w-]+)\n", text[body:]):
        start, end = match.start() + body, match.end() + body
        kernel = [name for name in KERNELS if f" {name}(" in text[:start]][-1]
        changes = {"deleted": ";"}
        if match[1] == "cluster_sync":
            changes["weakened"] = "__syncthreads();"
        if match[1] != "cluster_wait" and match[2] != "remote-before-start":  # a start publishes nothing
            changes["relaxed"] = "cluster_arrive_relaxed();" + " cluster_wait();" * (match[1] == "cluster_sync")
        for change, replacement in changes.items():
            line = text.count("\n", 0, start) + 1
            yield Mutant(kernel, line, change, match[2], f"{text[:start]}{replacement}\n{text[end:]}")
    for match in re.finditer(r"^ +(cluster_arrive\w*\(\);)", text[body:], re.MULTILINE):
        start = match.start(1) + body
        kernel = [name for name in KERNELS if f" {name}(" in text[:start]][-1]
        line = text.count("\n", 0, start) + 1
        doubled = f"{text[:start]}{match[1]} {text[start:]}"
        yield Mutant(kernel, line, "doubled", "barrier-cluster-arrived-twice", doubled)


MUTANTS = list(mutants())


def test_there_is_a_mutant_for_every_barrier() -> None:
    changes = [mutant.change for mutant in MUTANTS]
    assert {change: changes.count(change) for change in set(changes)} == {
        "deleted": 7,
        "weakened": 4,
        "relaxed": 4,
        "doubled": 3,
    }


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_race_mode_reports_the_missing_barrier(mutant: Mutant) -> None:
    host = module(mutant.text, race=True)
    for order, seed in (("ascending", 0), ("descending", 0), ("random", 1), ("warp-greedy", 2)):
        _, _, report = run_kernel(host, mutant.kernel, order, seed)
        scope = "" if mutant.change == "doubled" else "across-blocks"  # a block may race with itself as well
        found = [f for f in report.findings if f.rule == mutant.rule and f.scope == scope]
        assert found, report.text
        for finding in found:
            assert finding.lines[0] > 0
            if mutant.change == "doubled":
                continue
            assert finding.kind == "race"
            assert finding.buffer.startswith("shared ") and finding.owner is not None
            assert f"{finding.buffer} of block {finding.owner}, " in finding.text


def test_what_arrives_too_early_is_lost_in_plain_mode() -> None:
    """A block's memory is poisoned when it starts: a missing start barrier shows in the results of some order."""
    early = next(m for m in MUTANTS if m.kernel == "pass_on" and m.rule == "remote-before-start")
    outputs = [run_kernel(module(early.text, race=False), "pass_on", order)[1] for order in ORDERS]
    assert any(np.isnan(out).any() for out in outputs)


# ---- rules, with the smallest kernel that breaks each -------------------------------------------------------------

HEAD = (
    'extern "C" __global__ void k(float* o) {\n  const int t = threadIdx.x, lane = t & 31, b = blockIdx.x;\n'
    "  extern __shared__ float d[];\n  __shared__ float s[64];  const int c = ~b & 1;\n"
    "  const auto sync = [] { mhc_host_cluster_arrive(); mhc_host_cluster_wait(); };\n"
    "  const auto at = [](float* p, int r) { return static_cast<float*>(mhc_host_map_shared_rank(p, r)); };\n"
)


def run(
    body: str, *, race: bool = True, blocks: int = 2, cluster: int | None = 2, **options: Any
) -> tuple[Array, LaunchReport]:
    """Launch a kernel of blocks of 64 threads; its body starts at line 7."""
    host = HostModule(HEAD + body + "\n}", [signature("k", o="float*")], name="k", race=race)
    o = np.zeros(256, np.float32)
    report = host.launch("k", blocks, 64, [o], cluster=cluster, dynamic_shared=256, **options)
    return o, report


@dataclass(frozen=True)
class Broken:
    """A kernel body and its finding."""

    rule: str
    body: str
    kind: str
    lines: tuple[int, ...]
    buffer: str = ""
    offset: int | None = None
    owner: int | None = None
    places: tuple[tuple[int | None, int | None], ...] | None = None  # block and thread
    in_plain_mode: bool = True

    def __str__(self) -> str:
        return self.rule


START = "sync();\n"
BROKEN = (
    Broken(
        "remote-before-start",
        "if (t == 5 && b == 1)\n at(s, 0)[3] = 1.0f;\n sync();",
        "race",
        (8,),
        "shared s",
        12,
        0,
        ((1, 5),),
        in_plain_mode=False,
    ),
    Broken(
        "remote-after-exit",
        START + "if (t == 5 && b == 1)\n at(d, 0)[3] = 1.0f;",
        "race",
        (9,),
        "dynamic shared",
        12,
        0,
        ((1, 5),),
        in_plain_mode=False,
    ),
    Broken(
        "race",
        START + "if (t == 5 && b == 1)\n at(s, 0)[3] = 1.0f;\n if (t == 7 && b == 0)\n o[0] = s[3];\n sync();",
        "race",
        (9, 11),
        "shared s",
        12,
        0,
        in_plain_mode=False,
    ),
    Broken(
        "race",
        START + "if (t == 5 && b == 1) {\n o[1] = 2.0f; }\n sync();\n if (t == 7 && b == 0) o[0] = o[1];\n"
        "if (t == 5 && b == 1) o[1] = 2.0f;",
        "race",
        (11, 12),
        "o",
        4,
        None,
        in_plain_mode=False,
    ),
    Broken(
        "uninit",
        START + "if (t == 5 && b == 1)\n o[0] = at(s, 0)[3];\n sync();",
        "uninit",
        (9,),
        "shared s",
        12,
        0,
        ((1, 5),),
        in_plain_mode=False,
    ),
    Broken(
        "oob-shared",
        START + "if (t == 5 && b == 1)\n at(d, 0)[64] = 1.0f;\n sync();",
        "oob",
        (9,),
        "dynamic shared",
        256,
        0,
        ((1, 5),),
        in_plain_mode=False,
    ),
    Broken("oob-rank", "if (t == 3)\n o[0] = *at(s, 2);", "oob", (6,)),
    Broken("oob-rank", "if (t == 3)\n o[0] = *at(s, -1);", "oob", (6,)),
    Broken("oob-map", "if (t == 3)\n o[0] = *at(o, 1);", "oob", (6,)),
    Broken("oob-map", "sync(); float* p = at(s, 1 - b);\n o[0] = *at(p, b);", "oob", (6,)),
    Broken(
        "barrier-cluster-arrived-twice",
        "mhc_host_cluster_arrive();\n if (t == 9) mhc_host_cluster_arrive();\n mhc_host_cluster_wait();",
        "barrier",
        (7, 8),
        places=((0, 9), (0, 9)),
    ),
    Broken(
        "barrier-cluster-not-arrived",
        "sync();\n if (t == 9 && b == 1)\n mhc_host_cluster_wait();",
        "barrier",
        (9,),
        places=((1, 9),),
    ),
    Broken(
        "barrier-cluster-lines",
        "if (lane < 16)\n mhc_host_cluster_arrive();\n else\n mhc_host_cluster_arrive();\n mhc_host_cluster_wait();",
        "barrier",
        (8, 10),
        places=((0, 0), (0, 16)),
    ),
    Broken(
        "barrier-cluster-lines",
        "mhc_host_cluster_arrive();\n if (lane < 16)\n mhc_host_cluster_wait();\n else mhc_host_cluster_wait();",
        "barrier",
        (9, 10),
    ),
    Broken(
        "barrier-diverged",
        "if (lane < 16) {\n mhc_host_cluster_arrive();\n mhc_host_cluster_wait(); }\n __syncwarp();",
        "barrier",
        (9, 10),
    ),
)


def pick(report: LaunchReport, broken: Broken) -> Finding:
    found = [f for f in report.findings if f.rule == broken.rule and (not broken.lines or f.lines == broken.lines)]
    assert found, f"no {broken.rule} at {broken.lines}: {report.text}"
    return found[0]


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_each_rule_names_place_buffer_and_owner(broken: Broken) -> None:
    for race in (True, False)[: 1 + broken.in_plain_mode]:
        _, report = run(broken.body, race=race)
        finding = pick(report, broken)
        assert (finding.kind, finding.buffer, finding.owner) == (broken.kind, broken.buffer, broken.owner)
        if broken.offset is not None:
            assert finding.offset == broken.offset
        if broken.places is not None:
            assert tuple((place.block, place.thread) for place in finding.places) == broken.places
        assert report.completed is (broken.rule not in ("oob-rank", "oob-map", "barrier-diverged"))


CLEAN = {
    "global memory through a cluster barrier": (
        "o[64 * b + t] = t;\n sync();\n const float v = o[64 * (b ^ 1) + 63 - t];\n sync();\n o[64 * b + t] = v;"
    ),
    "remote atomics": (
        "if (t == 0) s[0] = 0;\n sync();\n atomicAdd(at(s, t & 1), 1.0f);\n sync();\n if (t == 0) o[b] = s[0];"
    ),
    "a block barrier passes on what one thread waited for": (
        "if (t == 0) s[1] = b;\n mhc_host_cluster_arrive();\n if (t < 32) mhc_host_cluster_wait();\n"
        " __syncthreads();\n o[64 * b + t] = at(s, c)[1];\n if (t >= 32) mhc_host_cluster_wait();\n sync();"
    ),
    "a named barrier does so too": (
        "if (t == 0) s[1] = b;\n mhc_host_cluster_arrive();\n if (t < 32) mhc_host_cluster_wait();\n"
        " mhc_host_bar_sync(1, 64);\n o[64 * b + t] = at(s, c)[1];\n if (t >= 32) mhc_host_cluster_wait();\n"
        " sync();"
    ),
    "one warp publishes for the block": (
        "s[t] = b;\n __syncthreads();\n if (t < 32) mhc_host_cluster_arrive();\n"
        " else mhc_host_cluster_arrive_relaxed();\n mhc_host_cluster_wait();\n"
        " o[64 * b + t] = at(s, c)[63 - t];\n sync();"
    ),
    "threads that have returned need not arrive": (
        "if (t >= 32) return;\n s[t] = b;\n sync();\n o[64 * b + t] = s[31 - t];"
    ),
    "every block is its own rank": "*at(s + t, b & 1) = t;\n __syncthreads();\n o[64 * b + t] = s[63 - t];",
    "polling another block": (
        "s[t] = 0;\n sync();\n if (t == 0 && (b & 1) == 0) atomicAdd(at(s, 1), 1.0f);\n"
        " if ((b & 1) == 1 && t == 0) while (atomicAdd(s, 0.0f) == 0.0f) __nanosleep(20);\n sync();"
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_correct_synchronisation_is_not_reported(name: str) -> None:
    outputs = set()
    for order in ORDERS:
        o, report = run(CLEAN[name], blocks=4, order=order, seed=5)
        assert report.ok, report.text
        outputs.add(o.tobytes())
    assert len(outputs) == 1


def test_blocks_of_different_clusters_are_never_ordered() -> None:
    body = "if (b == 0 && t == 0) o[7] = 1.0f;\n sync();\n if (b == 3 && t == 0) o[7] = 2.0f;"
    _, report = run(body, blocks=4, cluster=4)
    assert report.ok, report.text
    _, report = run(body, blocks=4, cluster=2)
    assert [(f.rule, f.scope, f.blocks) for f in report.findings] == [("race", "across-blocks", (0, 3))]


def test_a_deadlock_says_which_blocks_wait_at_the_cluster_barrier() -> None:
    for race in (False, True):
        _, report = run("if (t < 32)\n sync(); else\n __syncthreads();", race=race)
        (finding,) = [f for f in report.findings if f.kind == "deadlock"]
        assert "128 live threads all wait" in finding.text
        assert "warp 0 of blocks 0-1, lanes 0-31 wait in barrier.cluster.wait at k.cu:5" in finding.text
        assert "warp 1 of blocks 0-1, lanes 0-31 wait in __syncthreads at k.cu:9" in finding.text
        assert not report.completed


# ---- launches -----------------------------------------------------------------------------------------------------

RANKS = """extern "C" __global__ void k(int* o, int size) {
  __shared__ int mine;
  const int block = (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
  mine = block;
  mhc_host_cluster_arrive();
  mhc_host_cluster_wait();
  for (int r = 0; r < size; ++r) o[block * size + r] = *static_cast<int*>(mhc_host_map_shared_rank(&mine, r));
  mhc_host_cluster_arrive();
  mhc_host_cluster_wait();
}
"""


def ranks(grid: tuple[int, int, int], cluster: tuple[int, int, int], **options: Any) -> tuple[Array, LaunchReport]:
    """Per block, the linear ids of the blocks at each rank of its cluster."""
    host = HostModule(RANKS, [signature("k", o="int*", size="int")], race=True)
    size = int(np.prod(cluster))
    o = np.full((int(np.prod(grid)), size), -1, np.int32)
    return o, host.launch("k", grid, 1, [o, size], cluster=cluster, **options)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize(
    ("grid", "cluster"),
    [((8, 1, 1), (4, 1, 1)), ((3, 16, 1), (1, 16, 1)), ((4, 6, 4), (2, 3, 2)), ((2, 2, 2), (1, 1, 2))],
)
def test_ranks_run_along_x_first(grid: tuple[int, int, int], cluster: tuple[int, int, int], order: str) -> None:
    o, report = ranks(grid, cluster, order=order, seed=3)
    assert report.ok, report.text
    z, y, x = np.unravel_index(np.arange(np.prod(grid)), grid[::-1])
    rank_z, rank_y, rank_x = np.unravel_index(np.arange(np.prod(cluster)), cluster[::-1])
    of_rank = [
        first[:, None] // size * size + rank
        for first, size, rank in zip((x, y, z), cluster, (rank_x, rank_y, rank_z), strict=True)
    ]
    assert np.array_equal(o, (of_rank[2] * grid[1] + of_rank[1]) * grid[0] + of_rank[0])


def test_blocks_run_with_the_rest_of_their_cluster() -> None:
    o, report = ranks((4, 2, 1), (2, 2, 1), blocks=[3, 7])
    assert report.ok and report.blocks_run == 4
    assert [block for block in range(8) if (o[block] >= 0).all()] == [2, 3, 6, 7]
    assert (o[[0, 1, 4, 5]] == -1).all()


def test_without_a_cluster_each_block_is_one_of_its_own() -> None:
    for cluster in (None, 1):
        o, report = run("sync();\n o[64 * b + t] = b;\n at(s, 0)[t] = b;\n sync();", cluster=cluster)
        assert report.ok, report.text
        assert o[64] == 1
        _, report = run("sync();\n if (t == 0) at(s, 1)[t] = b;", cluster=cluster)
        assert [f.rule for f in report.findings] == ["oob-rank"]


@pytest.mark.parametrize(
    ("grid", "cluster", "code"),
    [
        (17, 17, "X-CLUSTER"),
        (4, 0, "X-CLUSTER"),
        (4, 3, "X-CLUSTER"),
        ((4, 3), (2, 2), "X-CLUSTER"),
        (4, -1, "X-SHAPE"),
    ],
)
def test_clusters_that_no_gpu_takes_are_refused(grid: Any, cluster: Any, code: str) -> None:
    with pytest.raises(UsageError) as caught:
        correct(race=False).launch("reduce_ranks", grid, 32, [np.zeros(1, np.float32)] * 2, cluster=cluster)
    assert caught.value.code == code


def test_every_block_has_guards_behind_its_shared_memory() -> None:
    body = "sync();\n if (b == 1 && t == 0) at(d, 0)[64] = 1.0f;\n sync();"
    _, report = run(body, race=False)
    assert [(f.rule, f.buffer, f.offset, f.blocks) for f in report.findings] == [
        ("oob-dynamic-guard", "dynamic shared", 256, (0,))
    ]
