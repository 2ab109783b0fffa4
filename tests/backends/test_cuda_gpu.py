"""The CUDA backend on a device: streams, devices, limits, clusters, graphs, bf16. Skipped without one."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mhcgen.backends import cuda, nvrtc, nvrtc_library
from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.errors import EnvironmentFault, InputError, InputTypeError, LaunchError

READY, REASON = cuda.is_available()
gpu = [pytest.mark.gpu, pytest.mark.skipif(not READY, reason=REASON or "ready")]

ROOT = Path(__file__).parents[2]
GUARD_PAGE = ROOT / "docs" / "decisions" / "0002-fast-math-guard.md"

SOURCE = r"""
#include <cuda_bf16.h>

__device__ __forceinline__ void spin(long long clocks) {
  const long long start = clock64();
  while (clock64() - start < clocks) {}
}

extern "C" __global__ void slow_fill(float* x, float value, long long clocks) {
  spin(clocks);
  x[blockIdx.x * blockDim.x + threadIdx.x] = value;
}

extern "C" __global__ void add_one(const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __fadd_rn(x[i], 1.0f);
}

extern "C" __global__ void scalars(double* out, float a, double b, int c, unsigned d, long long e) {
  out[0] = a; out[1] = b; out[2] = c; out[3] = d; out[4] = (double)e; out[5] = (double)(e >> 32);
}

extern "C" __global__ void big_shared(float* out, int count) {
  extern __shared__ __align__(16) float cells[];
  for (int i = threadIdx.x; i < count; i += blockDim.x) cells[i] = (float)(i % 97);  // the sum stays exact
  __syncthreads();
  float sum = 0.0f;
  for (int i = threadIdx.x; i < count; i += blockDim.x) sum += cells[count - 1 - i];
  atomicAdd(out, sum);
}

extern "C" __global__ void neighbours(float* out) {
#if __CUDA_ARCH__ >= 900
  __shared__ float cell[32];
  unsigned rank, size, remote;
  float value;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  cell[threadIdx.x] = (float)(blockIdx.x * 32 + threadIdx.x);
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
  const unsigned local = (unsigned)__cvta_generic_to_shared(&cell[threadIdx.x]);
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(local), "r"((rank + 1) % size));
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(value) : "r"(remote) : "memory");
  asm volatile("barrier.cluster.arrive.aligned;\n\tbarrier.cluster.wait.aligned;" ::: "memory");
  out[blockIdx.x * 32 + threadIdx.x] = value;
#endif
}

extern "C" __global__ void dependent_add(const float* x, float* y) {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __fadd_rn(x[i], 1.0f);
}

extern "C" __global__ void narrow(const float* x, __nv_bfloat16* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  y[i] = __float2bfloat16_rn(x[i]);
}
"""

X, Y = Param("x", "const float*", False), Param("y", "float*", True)
OUT = Param("out", "float*", True)
KERNELS = [
    KernelSignature(
        "slow_fill",
        (Param("x", "float*", True), Param("value", "float", False), Param("clocks", "long long", False)),
    ),
    KernelSignature("add_one", (X, Y)),
    KernelSignature(
        "scalars",
        (
            Param("out", "double*", True),
            Param("a", "float", False),
            Param("b", "double", False),
            Param("c", "int", False),
            Param("d", "unsigned", False),
            Param("e", "long long", False),
        ),
    ),
    KernelSignature("big_shared", (OUT, Param("count", "int", False))),
    KernelSignature("neighbours", (OUT,)),
    KernelSignature("dependent_add", (X, Y)),
    KernelSignature("narrow", (X, Param("y", "__nv_bfloat16*", True))),
]

HALF = """
{guard}
extern "C" __global__ void halve(const float* x, float* y) {{
  refuse_fast_math();
  y[threadIdx.x] = __fmul_rn(x[threadIdx.x], 0.5f);
}}
"""
HALF_KERNEL = [KernelSignature("halve", (X, Y))]

# About 50 ms on a current GPU: long against everything Python does between two launches.
SLOW = 100_000_000


def half_source() -> str:
    (guard,) = re.findall(r"```cuda\n(.*?)```", GUARD_PAGE.read_text(), re.DOTALL)
    return HALF.format(guard=guard)


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])
def test_the_kernels_of_this_file_compile(arch: str) -> None:
    try:
        nvrtc_library.find_nvrtc()
    except EnvironmentFault as fault:
        pytest.skip(fault.message)
    made = nvrtc.compile(SOURCE, arch)
    assert list(made.resources) == [kernel.name for kernel in KERNELS]
    assert nvrtc.compile(half_source(), arch).cubin


@pytest.fixture(scope="module")
def cupy() -> Any:
    return pytest.importorskip("cupy")


@pytest.fixture(scope="module")
def module(cupy: Any) -> cuda.CudaModule:
    return cuda.CudaModule(SOURCE, KERNELS)


def major(cupy: Any) -> int:
    return int(cupy.cuda.Device().compute_capability[:-1])


class TestOnDevice:
    pytestmark = gpu

    def test_resources_agree_with_the_loaded_code(self, module: cuda.CudaModule) -> None:
        if module.mode != "nvrtc":
            pytest.skip("compiled by CuPy: no figures to compare")
        made = module.compiled()
        assert made is not None
        for name, function in module._functions[module._current_device()].items():
            registers = function.driver._number("cuFuncGetAttribute", 4, function.handle)
            assert made.resources[name].registers == registers
            assert made.resources[name].static_shared == function.static_shared

    def test_every_scalar_kind_gives_the_same_result(self, cupy: Any, module: cuda.CudaModule) -> None:
        seen = set()
        for eps in (1e-6, np.float32(1e-6), np.float64(1e-6), np.array(1e-6)):
            for tokens in (2**31 + 5, np.int64(2**31 + 5), np.array(2**31 + 5)):
                out = cupy.full(6, np.nan)
                module.launch("scalars", (1,), (1,), [out, eps, 1e-300, -7, 2**32 - 1, tokens])
                seen.add(tuple(cupy.asnumpy(out)))
        assert seen == {(float(np.float32(1e-6)), 1e-300, -7.0, 2.0**32 - 1, 2.0**31 + 5, 0.0)}

    def test_current_stream_is_used(self, cupy: Any, module: cuda.CudaModule) -> None:
        x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        module.launch("slow_fill", (1,), (64,), [x, 5.0, SLOW], stream=stream)
        with stream:
            # On any other stream this would read the zeros: a non-blocking stream waits for nobody.
            module.launch("add_one", (1,), (64,), [x, y])
        stream.synchronize()
        assert (cupy.asnumpy(y) == 6.0).all()

    def test_a_launch_does_not_wait(self, cupy: Any, module: cuda.CudaModule) -> None:
        x = cupy.zeros(64, np.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        pool = cupy.get_default_memory_pool()
        before = (pool.used_bytes(), pool.total_bytes())
        module.launch("slow_fill", (1,), (64,), [x, 5.0, SLOW], stream=stream.ptr)
        assert not stream.done
        stream.synchronize()
        assert (pool.used_bytes(), pool.total_bytes()) == before

    def test_stream_of_torch(self, cupy: Any, module: cuda.CudaModule) -> None:
        torch = pytest.importorskip("torch")
        if not torch.cuda.is_available():
            pytest.skip("torch without CUDA")
        x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
        cupy.cuda.Device().synchronize()
        stream = torch.cuda.Stream()
        module.launch("slow_fill", (1,), (64,), [x, 5.0, SLOW], stream=stream)
        module.launch("add_one", (1,), (64,), [x, y], stream=stream)
        stream.synchronize()
        assert (cupy.asnumpy(y) == 6.0).all()

    def test_per_thread_default_stream(self, cupy: Any, module: cuda.CudaModule) -> None:
        x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream.ptds:
            module.launch("slow_fill", (1,), (64,), [x, 2.0, 1000])
            module.launch("add_one", (1,), (64,), [x, y])
        cupy.cuda.Stream.ptds.synchronize()
        assert (cupy.asnumpy(y) == 3.0).all()

    def test_more_than_48_kib_of_shared_memory(self, cupy: Any, module: cuda.CudaModule) -> None:
        limit = module._driver.shared_limit(module._current_device())
        for size in (16 * 1024, 48 * 1024, 64 * 1024, limit):
            count = size // 4
            out = cupy.zeros(1, np.float32)
            module.launch("big_shared", (1,), (1024,), [out, count], dynamic_shared=size)
            assert float(out[0]) == float(np.sum(np.arange(count) % 97))
        with pytest.raises(LaunchError, match="limit of the device"):
            module.launch("big_shared", (1,), (32,), [out, 4], dynamic_shared=limit + 4)
        module.launch("big_shared", (1,), (32,), [out, 4], dynamic_shared=16)  # the refusal left nothing behind

    @pytest.mark.parametrize("size", [1, 2, 4, 8, 16])
    def test_cluster_launch(self, cupy: Any, module: cuda.CudaModule, size: int) -> None:
        if major(cupy) < 9 or (size > 8 and major(cupy) != 9):
            pytest.skip("needs clusters (16 blocks: Hopper)")
        out = cupy.full(32 * 32, np.nan, np.float32)
        module.launch("neighbours", (32,), (32,), [out], cluster=(size,))
        block = np.arange(32)
        source = block // size * size + (block % size + 1) % size
        expected = (source[:, None] * 32 + np.arange(32)).ravel()
        assert (cupy.asnumpy(out) == expected).all()

    def test_dependent_launch_sees_its_predecessor(self, cupy: Any, module: cuda.CudaModule) -> None:
        x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
        stream = cupy.cuda.Stream(non_blocking=True)
        cupy.cuda.Device().synchronize()
        for round_ in range(4):
            module.launch("slow_fill", (1,), (64,), [x, float(round_), SLOW // 10], stream=stream)
            module.launch("dependent_add", (1,), (64,), [x, y], stream=stream, dependent=True)
            stream.synchronize()
            assert (cupy.asnumpy(y) == round_ + 1.0).all()

    def test_zero_grid_is_no_launch(self, cupy: Any, module: cuda.CudaModule) -> None:
        before = module.launches["add_one"]
        empty = cupy.zeros(0, np.float32)
        module.launch("add_one", (0,), (64,), [empty, empty])
        cupy.cuda.Device().synchronize()
        assert module.launches["add_one"] == before

    @pytest.mark.parametrize("fresh", [False, True])
    def test_graph_capture(self, cupy: Any, module: cuda.CudaModule, fresh: bool) -> None:
        x, y = cupy.zeros(64, np.float32), cupy.full(64, np.nan, np.float32)
        cupy.cuda.Device().synchronize()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            if fresh:  # even loading a module does not disturb a capture
                module = cuda.CudaModule(SOURCE + "// fresh\n", KERNELS)
            module.launch("slow_fill", (1,), (64,), [x, 8.0, 1000])
            module.launch("add_one", (1,), (64,), [x, y])
            graph = stream.end_capture()
        assert np.isnan(cupy.asnumpy(y)).all()
        for _ in range(2):
            y.fill(np.nan)
            cupy.cuda.Device().synchronize()
            graph.launch(stream)
            stream.synchronize()
            assert (cupy.asnumpy(y) == 9.0).all()

    def test_bf16_arrays(self, cupy: Any, module: cuda.CudaModule) -> None:
        host = np.random.default_rng(0).integers(0, 2**32, 1024, np.uint64).astype(np.uint32).view(np.float32)
        host = np.where(np.isnan(host), np.float32(1.0), host)
        y = cuda.to_device(np.full(1024, np.nan, ml_dtypes.bfloat16))
        assert y.dtype == ml_dtypes.bfloat16
        module.launch("narrow", (1,), (1024,), [cuda.to_device(host), y])
        with np.errstate(over="ignore"):
            expected = host.astype(ml_dtypes.bfloat16)
        assert (cuda.to_host(y).view(np.uint16) == expected.view(np.uint16)).all()

    @pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.int64, np.float16])
    @pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
    def test_transfers_keep_dtype_shape_and_bits(self, cupy: Any, dtype: Any, shape: tuple[int, ...]) -> None:
        host = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
        back = cuda.to_host(cuda.to_device(host))
        assert back.dtype == host.dtype and back.shape == host.shape
        assert back.tobytes() == host.tobytes()

    def test_arrays_that_do_not_fit_are_refused(self, cupy: Any, module: cuda.CudaModule) -> None:
        x, y = cupy.zeros((8, 8), np.float32), cupy.zeros((8, 8), np.float32)
        for bad in (cupy.asnumpy(x), x.astype(np.float64), x.view(np.int32), [0.0] * 64):
            with pytest.raises(InputTypeError):
                module.launch("add_one", (1,), (64,), [bad, y])
        with pytest.raises(InputError, match="not contiguous"):
            module.launch("add_one", (1,), (64,), [x.T, y])
        with pytest.raises(InputTypeError):  # bits of 16 are not bf16 unless somebody says so
            module.launch("narrow", (1,), (64,), [x, cupy.zeros(64, np.uint16)])

    def test_subnormals_are_kept_by_nvrtc_and_flushed_by_cupy(self, cupy: Any) -> None:
        x = cupy.asarray(np.array([1e-40, -1e-44, 1.0], np.float32))
        results = {}
        for mode in ("nvrtc", "cupy"):
            y = cupy.full(3, np.nan, np.float32)
            try:
                module = cuda.CudaModule(half_source(), HALF_KERNEL, compile=mode)
            except EnvironmentFault as fault:
                pytest.skip(fault.message)
            module.launch("halve", (1,), (3,), [x, y])
            results[mode] = cupy.asnumpy(y)
            assert module.flushes_subnormals is (mode == "cupy")
        assert (results["nvrtc"] == cupy.asnumpy(x) * np.float32(0.5)).all()
        assert results["cupy"][0] == 0.0 and results["cupy"][2] == 0.5

    def test_ptx_of_an_older_target_runs_here(self, cupy: Any, module: cuda.CudaModule) -> None:
        if module.mode != "nvrtc":
            pytest.skip("needs NVRTC")
        made = nvrtc.compile(SOURCE, "compute_80", max_major=module._max_major)
        version = module._driver.version
        if made.nvrtc_version > (version // 1000, version % 1000 // 10):
            pytest.skip("the driver is older than NVRTC: it loads its machine code, but not its PTX")
        device = module._current_device()
        function = module._driver.function(device, module._driver.load_module(device, made.image), "add_one")
        assert function.static_shared == 0

    def test_device_of_the_arrays(self, cupy: Any) -> None:
        if cupy.cuda.runtime.getDeviceCount() < 2:
            pytest.skip("needs two devices")
        with cupy.cuda.Device(0):
            module = cuda.CudaModule(SOURCE, KERNELS)
            with cupy.cuda.Device(1):
                x, y = cupy.full(64, 4.0, np.float32), cupy.zeros(64, np.float32)
                cupy.cuda.Device(1).synchronize()
            assert cupy.cuda.runtime.getDevice() == 0
            module.launch("add_one", (1,), (64,), [x, y])
            assert cupy.cuda.runtime.getDevice() == 0
            with cupy.cuda.Device(1):
                cupy.cuda.Device(1).synchronize()
                assert (cupy.asnumpy(y) == 5.0).all()
            with pytest.raises(InputError, match="other arrays are on device"):
                module.launch("add_one", (1,), (64,), [cupy.zeros(64, np.float32), y])

    def test_many_threads_launch_at_once(self, cupy: Any, module: cuda.CudaModule) -> None:
        wrong: list[int] = []

        def work(number: int) -> None:
            stream = cupy.cuda.Stream(non_blocking=True)
            with stream:
                x, y = cupy.zeros(64, np.float32), cupy.zeros(64, np.float32)
                for turn in range(50):
                    module.launch("slow_fill", (1,), (64,), [x, float(number * 100 + turn), 100])
                    module.launch("add_one", (1,), (64,), [x, y])
                    stream.synchronize()
                    if not (cupy.asnumpy(y) == number * 100 + turn + 1).all():
                        wrong.append(number)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_a_child_forked_after_the_import_can_use_the_gpu(self) -> None:
        script = (
            "import os, sys\n"
            "import numpy as np\n"
            "import mhcgen, mhcgen.doctor\n"
            "from mhcgen.backends import cuda\n"
            "from mhcgen.backends.signature import KernelSignature, Param\n"
            "child = os.fork()\n"
            "if child:\n"
            "    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
            "text = 'extern \"C\" __global__ void k(float* x) { x[threadIdx.x] = 3.0f; }'\n"
            "module = cuda.CudaModule(text, [KernelSignature('k', (Param('x', 'float*', True),))])\n"
            "x = cuda.to_device(np.zeros(32, np.float32))\n"
            "module.launch('k', (1,), (32,), [x])\n"
            "os._exit(0 if (cuda.to_host(x) == 3.0).all() else 1)\n"
        )
        done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
