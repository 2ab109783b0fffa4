"""Correct kernels: right results, no findings, the same bits in every order of threads and blocks."""

from __future__ import annotations

import numpy as np
import pytest
from host_cases import KERNELS, ORDERS, launch, module, signature

from mhcgen.backends.host import HostModule


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
@pytest.mark.parametrize("threads", [64, 128, 1024])
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_order_gives_the_same_bits(kernel: str, threads: int, race: bool) -> None:
    host = module(KERNELS[kernel][0], race=race)
    bits = set()
    for order in ORDERS:
        for seed in (1, 2) if order in ("random", "warp-greedy") else (0,):
            made, report = launch(host, kernel, threads, order, seed)
            assert report.findings == (), report.text
            assert report.completed and report.blocks_run == 3
            assert not any(report.unwritten.values())
            made.assert_correct()
            bits.add(made.bits())
    assert len(bits) == 1


@pytest.mark.parametrize("kernel", ["tree_sum", "mix_streams", "split_roles"])
@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_ucontext_fibers_give_the_same_bits(kernel: str, race: bool) -> None:
    bits = set()
    for fibers in ("ucontext", None):
        made, report = launch(module(KERNELS[kernel][0], race=race, fibers=fibers), kernel, 128)
        assert report.ok, report.text
        bits.add(made.bits())
    assert len(bits) == 1


INDEXES = """
extern "C" __global__ void indexes(int* out) {
  const int thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const int block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  const dim3 shape = blockDim;
  const uint3 mine = threadIdx;
  int* row = out + (block * shape.x * shape.y * shape.z + thread) * 6;
  row[0] = mine.x; row[1] = threadIdx.y; row[2] = threadIdx.z;
  row[3] = blockIdx.x; row[4] = blockIdx.y; row[5] = blockIdx.z;
}
"""


@pytest.fixture(scope="module")
def indexes() -> HostModule:
    return HostModule(INDEXES, [signature("indexes", out="int*")], race=True)


def test_indexes_in_three_dimensions(indexes: HostModule) -> None:
    out = np.zeros((2, 3, 2, 4, 3, 5, 6), np.int32)  # blocks z, y, x, threads z, y, x
    report = indexes.launch("indexes", (2, 3, 2), (5, 3, 4), [out], uninitialised={"out"})
    assert report.ok, report.text
    bz, by, bx, tz, ty, tx = np.indices(out.shape[:-1])
    np.testing.assert_array_equal(out, np.stack([tx, ty, tz, bx, by, bz], -1))


def test_only_the_chosen_blocks_run(indexes: HostModule) -> None:
    whole = np.full((5, 32, 6), -7, np.int32)
    report = indexes.launch("indexes", 5, 32, [whole], blocks=[4, 1])
    assert report.blocks_run == 2
    assert [bool((whole[b] != -7).any()) for b in range(5)] == [False, True, False, False, True]


def test_the_last_block_of_a_huge_grid(indexes: HostModule) -> None:
    blocks = 2**22
    report = indexes.launch("indexes", blocks, 1, [np.zeros((blocks, 6), np.int32)], blocks=[blocks - 1])
    assert report.ok and report.blocks_run == 1


@pytest.mark.parametrize("grid", [0, (0, 4), (3, 0, 2)])
def test_a_grid_of_nothing_launches_nothing(indexes: HostModule, grid: int | tuple[int, ...]) -> None:
    report = indexes.launch("indexes", grid, 32, [np.zeros((0, 6), np.int32)])
    assert report.ok and report.blocks_run == 0


PARTIAL = """
extern "C" __global__ void partial(float* out) {
  extern __shared__ float all[];
  float v = threadIdx.x;
  for (int d = 1; d < 8; d *= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  all[threadIdx.x] = v;
  __syncwarp();
  __syncthreads();
  out[threadIdx.x] = all[blockDim.x - 1 - threadIdx.x];
}
"""


@pytest.mark.parametrize("order", ORDERS)
def test_a_last_warp_of_eight_lanes(order: str) -> None:
    out = np.zeros(40, np.float32)
    host = HostModule(PARTIAL, [signature("partial", out="float*")], race=True)
    report = host.launch("partial", 1, 40, [out], dynamic_shared=160, order=order)
    assert report.ok, report.text
    groups = np.arange(40).reshape(5, 8).sum(1)
    np.testing.assert_array_equal(out, np.repeat(groups, 8)[::-1])


SHARED = """
extern "C" __global__ void before(float* out) {
  __shared__ float fixed[33];
  extern __shared__ float sized[];
  if (threadIdx.x == 0) { fixed[32] = 5.0f; sized[7] = 6.0f; }
  out[threadIdx.x] = threadIdx.x < 33 ? fixed[threadIdx.x] : sized[threadIdx.x - 33];
}
extern "C" __global__ void typed(unsigned short* out) {
  extern __shared__ __align__(16) unsigned short bytes_of_any_type[];
  bytes_of_any_type[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = bytes_of_any_type[threadIdx.x];
}
"""


def test_shared_memory_is_poisoned_for_every_block() -> None:
    host = HostModule(SHARED, [signature("before", out="float*"), signature("typed", out="unsigned short*")])
    out = np.zeros(41, np.float32)
    assert host.launch("before", 1, 41, [out], dynamic_shared=32, order="descending").ok
    # Thread 0 comes last in this order: nobody sees its two values.
    assert np.isnan(out[1:]).all() and np.isnan(out[0])
    raw = np.zeros(64, np.uint16)
    assert host.launch("typed", 1, 64, [raw], dynamic_shared=128).ok
    np.testing.assert_array_equal(raw, np.arange(64))


SCOPES = """
__shared__ float outside[4];
template <int N>
__device__ __forceinline__ float rotated(float v) {
  __shared__ float ring[N];
  ring[threadIdx.x] = v;
  __syncthreads();
  return ring[(threadIdx.x + 1) % N];
}
extern "C" __global__ void scopes(float* out) {
  __shared__ unsigned char bytes[64];
  outside[threadIdx.x & 3] = 1.0f;
  bytes[threadIdx.x] = threadIdx.x;
  out[threadIdx.x] = rotated<64>(threadIdx.x) + bytes[threadIdx.x];
}
"""


def test_shared_variables_of_every_scope_are_known() -> None:
    host = HostModule(SCOPES, [signature("scopes", out="float*")], race=True)
    report = host.launch("scopes", 1, 64, [np.zeros(64, np.float32)])
    # Only the careless writes are reported, under the variable's name.
    assert {(f.kind, f.buffer) for f in report.findings} == {("race", "shared outside")}


def test_a_thousand_threads_with_a_barrier_each_round() -> None:
    made, report = launch(module("reductions", race=False), "tree_sum", 1024, "random", 5)
    assert report.ok and report.switches > 1024 * 40
    made.assert_correct()
