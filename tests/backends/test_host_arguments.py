"""What reaches a kernel: scalars by their bytes, arrays in guarded memory, aliases as aliases."""

from __future__ import annotations

import gc
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from host_cases import signature

from mhcgen.backends.host import HostBuffer, HostModule, buffers
from mhcgen.errors import EnvironmentFault, InputError, InputTypeError, MhcgenError, UsageError

TEXT = """
#include <cuda_bf16.h>
extern "C" __global__ void scalars(double* out, int a, float b, long long c, unsigned d, double e, float f) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = e; out[5] = f;
}
extern "C" __global__ void __launch_bounds__(64) copy(const float* x, float* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void shift(const float* x, float* y) {
  const float v = x[threadIdx.x];
  __syncthreads();
  y[threadIdx.x] = v + 1.0f;
}
extern "C" __global__ void touch(const __nv_bfloat16* x, __nv_bfloat16* y) { y[threadIdx.x] = x[threadIdx.x]; }
extern "C" __global__ void vector(const float* x, float* y) {
  reinterpret_cast<float4*>(y)[threadIdx.x] = reinterpret_cast<const float4*>(x)[threadIdx.x];
}
extern "C" __global__ void absent(const float* x, float* y) { y[0] = x == nullptr ? 1.0f : 2.0f; }
extern "C" __global__ void subnormal(const float* x, float* y) { y[0] = __fmul_rn(x[0], 0.5f); }
extern "C" __global__ void nothing() {}
"""
POINTERS = {"x": "const float*", "y": "float*"}
SIGNATURES = (
    signature("scalars", out="double*", a="int", b="float", c="long long", d="unsigned", e="double", f="float"),
    *(signature(name, **POINTERS) for name in ("copy", "shift", "vector", "absent", "subnormal")),
    signature("touch", x="const __nv_bfloat16*", y="__nv_bfloat16*"),
    signature("nothing"),
)


@pytest.fixture(scope="module")
def host() -> HostModule:
    return HostModule(TEXT, SIGNATURES, name="arguments")


@pytest.fixture(scope="module")
def racing() -> HostModule:
    return HostModule(TEXT, SIGNATURES, name="arguments", race=True)


def floats(count: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    return np.arange(count, dtype=np.float32) + 1


def test_scalars_travel_by_their_declared_type(host: HostModule) -> None:
    out = np.zeros(6)
    values = (-(2**31), 0.1, -(2**62), 2**32 - 1, 0.1, np.float64(1e-6))
    host.launch("scalars", 1, 1, [out, *values]).raise_if_found()
    assert out.tolist() == [-(2**31), float(np.float32(0.1)), -(2**62), 2**32 - 1, 0.1, float(np.float32(1e-6))]


@pytest.mark.parametrize(
    ("position", "value"),
    [(0, 2**31), (0, 1.5), (0, True), (0, "1"), (1, 1e39), (1, None), (2, 2**63), (3, -1), (4, 1j)],
)
def test_scalars_that_do_not_fit_are_refused(host: HostModule, position: int, value: object) -> None:
    values: list[Any] = [1, 1.0, 1, 1, 1.0, 1.0]
    values[position] = value
    with pytest.raises(InputError, match="I-SCALAR"):
        host.launch("scalars", 1, 1, [np.zeros(6), *values])


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"args": [floats(4)]}, "X-ARGS"),
        ({"args": [floats(4).astype(np.float64), floats(4)]}, "X-DTYPE"),
        ({"args": [floats(4).astype(np.int32), floats(4)]}, "X-DTYPE"),
        ({"args": [[1.0, 2.0], floats(4)]}, "X-DTYPE"),
        ({"args": [floats(8)[::2], floats(4)]}, "X-LAYOUT"),
        ({"args": [floats(4).astype(">f4"), floats(4)]}, "X-DTYPE"),
        ({"args": [floats(4), np.broadcast_to(np.float32(1), (4,))]}, "X-LAYOUT"),
        ({"kernel": "none"}, "X-KERNEL"),
        ({"grid": (1, 2, 3, 4)}, "X-SHAPE"),
        ({"grid": -1}, "X-SHAPE"),
        ({"grid": (1, 70000)}, "X-GRID"),
        ({"block": 0}, "X-BLOCK"),
        ({"block": 1025}, "X-BLOCK"),
        ({"block": (1, 1, 65)}, "X-BLOCK"),
        ({"block": 96}, "X-BLOCK"),
        ({"dynamic_shared": 232449}, "X-SHARED"),
        ({"order": "sideways"}, "X-ORDER"),
        ({"blocks": [1]}, "X-BLOCKS"),
        ({"uninitialised": {"z"}}, "X-UNINIT"),
        ({"count_accesses": True}, "X-COUNT"),
    ],
)
def test_wrong_launches_are_refused_with_a_code(host: HostModule, change: dict[str, Any], code: str) -> None:
    options: dict[str, Any] = {"kernel": "copy", "grid": 1, "block": 4, "args": [floats(4), floats(4)], **change}
    with pytest.raises((UsageError, InputError)) as caught:
        host.launch(**options)
    assert isinstance(caught.value, MhcgenError)
    assert caught.value.code == code


def test_raw_bits_stand_for_narrow_floats(host: HostModule) -> None:
    bits, out = np.arange(8, dtype=np.uint16), np.zeros(8, ml_dtypes.bfloat16)
    host.launch("touch", 1, 8, [bits, out]).raise_if_found()
    np.testing.assert_array_equal(out.view(np.uint16), bits)
    with pytest.raises(InputTypeError):
        host.launch("touch", 1, 8, [bits.astype(np.float16), out])


def test_only_writable_arrays_come_back(host: HostModule) -> None:
    x, y = floats(4), np.zeros((2, 2), np.float32)
    x.flags.writeable = False
    host.launch("copy", 1, 4, [x, y]).raise_if_found()
    np.testing.assert_array_equal(y, [[1, 2], [3, 4]])


def test_outputs_called_uninitialised_are_poisoned(host: HostModule) -> None:
    y = np.zeros(8, np.float32)
    host.launch("copy", 1, 4, [floats(8), y], uninitialised={"y"}).raise_if_found()
    assert np.isnan(y[4:]).all() and y[3] == 4


def test_one_array_given_twice_is_one_memory(host: HostModule, racing: HostModule) -> None:
    x = floats(8)
    report = racing.launch("shift", 1, 8, [x, x])
    assert report.ok, report.text
    np.testing.assert_array_equal(x, np.arange(8) + 2)
    (finding,) = racing.launch("copy", 1, 4, [x[:4], x[1:5]]).findings[:1]
    assert (finding.kind, finding.buffer) == ("race", "x|y")
    host.launch("copy", 1, 4, [x[:4], x[2:6]])
    assert x[2] == 2


def test_empty_arrays_and_empty_signatures(host: HostModule) -> None:
    empty = np.zeros((0, 5), np.float32)
    assert host.launch("copy", 0, 4, [empty, empty.copy()]).ok
    assert host.launch("nothing", 2, 32, []).blocks_run == 2
    (finding,) = host.launch("copy", 1, 1, [floats(1), empty]).findings
    assert (finding.kind, finding.buffer, finding.offset) == ("oob", "y", 0)


def test_the_null_pointer(host: HostModule, racing: HostModule) -> None:
    y = np.zeros(1, np.float32)
    host.launch("absent", 1, 1, [None, y]).raise_if_found()
    assert y[0] == 1
    report = racing.launch("copy", 1, 1, [None, y])
    assert [f.rule for f in report.findings] == ["oob-wild"]


def test_host_buffers_are_used_in_place(host: HostModule) -> None:
    first, second, third = (HostBuffer((2, 4), np.float32) for _ in range(3))
    assert np.isnan(first.array).all()
    first.array[:] = floats(8).reshape(2, 4)
    host.launch("shift", 1, 8, [first, second]).raise_if_found()
    host.launch("shift", 1, 8, [second.array, third.array]).raise_if_found()
    np.testing.assert_array_equal(third.array.ravel(), np.arange(8) + 3)


def test_the_array_of_a_host_buffer_keeps_its_guards_without_it(host: HostModule) -> None:
    array = HostBuffer(3, np.float32).array
    gc.collect()
    (finding,) = host.launch("copy", 1, 4, [floats(4), array]).findings
    assert (finding.rule, finding.offset) == ("oob-guard", 12)
    assert array.tolist() == [1, 2, 3]
    del array
    gc.collect()
    before = len(buffers._live)
    for _ in range(10):
        HostBuffer(3, np.float32)
    gc.collect()
    assert len(buffers._live) == before


def test_parts_of_a_host_buffer_keep_their_neighbours(host: HostModule, racing: HostModule) -> None:
    whole = HostBuffer(12, np.float32)
    whole.array[:] = floats(12)
    host.launch("copy", 1, 4, [whole.array[:4], whole.array[8:]], uninitialised={"y"}).raise_if_found()
    assert whole.array.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4]
    report = racing.launch("copy", 1, 4, [whole.array[:4], whole.array[4:7]])
    assert [(f.rule, f.buffer, f.offset) for f in report.findings] == [("oob-wild", "y", 12)]


def test_guard_bands_of_a_host_buffer(host: HostModule) -> None:
    small = HostBuffer(3, np.float32)
    assert small.broken_guard() is None
    (finding,) = host.launch("copy", 1, 4, [floats(4), small]).findings
    assert (finding.rule, finding.offset) == ("oob-guard", 12)
    assert small.broken_guard() is None  # mended, so that the next launch is judged by itself
    assert host.launch("copy", 1, 3, [floats(4), small]).ok


def test_a_sparse_buffer_is_larger_than_memory(host: HostModule) -> None:
    vast = HostBuffer(2**40, np.float32, sparse=True)
    assert not vast.array[:4].any() and not vast.array[-4:].any()
    (finding,) = host.launch("copy", 1, 4, [floats(4), vast.array[-3:]]).findings
    assert (finding.rule, vast.array[-3:].tolist()) == ("oob-guard", [1, 2, 3])
    with pytest.raises(EnvironmentFault, match="bytes of addresses"):
        HostBuffer(2**60, np.uint8, sparse=True)


@pytest.mark.parametrize("misalign", [4, 8])
def test_misaligned_buffers_show_an_unkept_promise(host: HostModule, misalign: int) -> None:
    x = HostBuffer(8, np.float32, misalign=misalign)
    x.array[:] = floats(8)
    assert x.address % 256 == misalign
    assert host.launch("copy", 1, 8, [x, np.zeros(8, np.float32)]).ok
    report = host.launch("vector", 1, 2, [x, np.zeros(8, np.float32)])
    assert [(f.kind, f.buffer) for f in report.findings] == [("misaligned", "x")]
    with pytest.raises(UsageError, match="X-BUFFER"):
        HostBuffer(8, np.float32, misalign=256)


def test_subnormals_survive_a_process_that_flushes_them(host: HostModule) -> None:
    """Another library may have set FTZ and DAZ: a launch is not affected, and puts the mode back."""
    control = HostModule(
        'extern "C" __global__ void mode(unsigned* out, unsigned value) {\n'
        "#ifdef __x86_64__\n  out[0] = __builtin_ia32_stmxcsr(); __builtin_ia32_ldmxcsr(value);\n#endif\n}",
        [signature("mode", out="unsigned*", value="unsigned")],
    )
    inside = np.zeros(1, np.uint32)
    control.launch("mode", 1, 1, [inside, 0x1F80]).raise_if_found()
    if inside[0] == 0:
        pytest.skip("x86-64 only")
    assert inside[0] & 0xFFC0 == 0x1F80
    control.launch("mode", 1, 1, [inside, 0x9FC0]).raise_if_found()  # a kernel that sets them does no harm
    tiny, half = np.array([1e-40], np.float32), np.zeros(1, np.float32)
    host.launch("subnormal", 1, 1, [tiny, half]).raise_if_found()
    assert half[0] == np.float32(5e-41)
    assert np.float32(1e-40) * np.float32(0.5) != 0


def test_launches_from_many_python_threads(host: HostModule) -> None:
    results: list[bool] = []

    def work(seed: int) -> None:
        x, y = floats(64) * seed, np.zeros(64, np.float32)
        for _ in range(5):
            host.launch("copy", 1, 64, [x, y], order="random", seed=seed).raise_if_found()
        results.append(bool((x == y).all()))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 8
