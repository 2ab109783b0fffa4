"""Where figures are taken: the GPU, or a dry run that takes none.

`Gpu` times on the current CUDA device. `Dry` runs the same code on the CPU executor at sizes it can bear, with a
clock that is handed in: it finds the mistakes of a measuring script before it costs time on a device, and what it
prints is marked and never a figure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import numpy as np

from mhcgen.bench import timing
from mhcgen.bench.timing import Launch, Timing, summarise
from mhcgen.plan import Plan
from mhcgen.runtime import NUMPY_DTYPES, CudaRunner, HostRunner, Module

#: Bytes of the copy that measures the rate of memory; counted twice, read and written.
COPY_BYTES = 1 << 30
COPY_THREADS = 256
COPY_KERNEL = """
extern "C" __global__ void copy_kernel(const float4* from, float4* to) {
  const long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
  to[i] = from[i];
}
"""


class Device(Protocol):
    """What measuring needs of a machine."""

    name: str
    #: whether what it returns are times of a GPU
    dry: bool

    def describe(self) -> dict[str, str]:
        """Name of the GPU, driver and libraries."""

    def lacks(self, plan: Plan) -> str:
        """Why it cannot run a plan at all; empty where it can."""

    def load(self, plan: Plan) -> Module:
        """The plan, callable on arrays of this device."""

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        """A copy of a host array."""

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy in host memory."""

    def repeated(self, array: Any, times: int) -> Any:
        """The array `times` times along its first axis."""

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int) -> Any:
        """An array whose bytes are all `byte`."""

    def differing(self, a: Any, b: Any) -> int:
        """In how many bytes two arrays of one shape differ."""

    def graph(self, launch: Launch, *, count: int, replays: int) -> Timing:
        """Times of a launch in replays of a graph, microseconds."""

    def back_to_back(self, launch: Launch, *, kernels: int, launches: int, rounds: int) -> Timing:
        """Times of a launch among queued ones, microseconds."""

    def wall(self, launch: Launch, *, launches: int, rounds: int) -> Timing:
        """Times of a call in a loop under one sync, as Python sees them, microseconds."""

    def copy_time(self) -> tuple[int, Timing]:
        """(bytes read and written, time) of a large copy inside the device."""

    def null_time(self) -> Timing:
        """Time of an empty kernel in a graph like those of the launches, microseconds."""


class Gpu:
    """The current CUDA device, through CuPy.

    Raises:
        EnvironmentFault: `E-NO-GPU`, `E-NO-CUPY` and the like: there is none to measure on.
    """

    name = "cuda"
    dry = False

    def __init__(self) -> None:
        from mhcgen.backends.cupy_state import require_gpu

        self._cupy, self._driver = require_gpu()

    def describe(self) -> dict[str, str]:
        """Name of the GPU, driver and libraries."""
        from mhcgen.backends.nvrtc_library import find_nvrtc
        from mhcgen.errors import EnvironmentFault

        cupy = self._cupy
        try:
            nvrtc = find_nvrtc(self._driver.version // 1000).version_text
        except EnvironmentFault:
            nvrtc = "none: CuPy compiled"
        return {
            "gpu": self._driver.device_name(int(cupy.cuda.runtime.getDevice())),
            "driver_cuda": f"{self._driver.version // 1000}.{self._driver.version % 1000 // 10}",
            "driver": _driver_release(),
            "cupy": str(cupy.__version__),
            "nvrtc": nvrtc,
        }

    def lacks(self, plan: Plan) -> str:
        """Nothing that is not refused when the plan is made."""
        return ""

    def load(self, plan: Plan) -> Module:
        """Compiled by NVRTC where it is at hand."""
        return Module(plan, CudaRunner(plan))

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        """A copy on the device."""
        from mhcgen.backends.cuda import to_device

        return to_device(array)

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """A copy in host memory; waits."""
        from mhcgen.backends.cuda import to_host

        return to_host(array)

    def repeated(self, array: Any, times: int) -> Any:
        """The array `times` times along its first axis."""
        from mhcgen.backends.cuda_arguments import as_carrier

        rows = array.shape[0]
        made = self._cupy.empty((rows * times, *array.shape[1:]), array.dtype)
        # CuPy's own copies know numpy's dtypes only.
        target, source = made.view(as_carrier(array.dtype)), array.view(as_carrier(array.dtype))
        for i in range(times):
            target[i * rows : (i + 1) * rows] = source
        return made

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int) -> Any:
        """A device array of one byte."""
        kind = NUMPY_DTYPES[dtype]
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self._cupy.full(size, byte, np.uint8).view(kind).reshape(shape)

    def differing(self, a: Any, b: Any) -> int:
        """Compared on the device."""
        return int(self._cupy.count_nonzero(self._bytes(a) != self._bytes(b)))

    def _bytes(self, array: Any) -> Any:
        from mhcgen.backends.cuda_arguments import as_carrier

        return array.view(as_carrier(array.dtype)).reshape(-1).view(np.uint8)

    def graph(self, launch: Launch, *, count: int, replays: int) -> Timing:
        """See `timing.graph_time`."""
        return timing.graph_time(launch, count=count, replays=replays)

    def back_to_back(self, launch: Launch, *, kernels: int, launches: int, rounds: int) -> Timing:
        """See `timing.back_to_back`."""
        return timing.back_to_back(launch, kernels=kernels, launches=launches, rounds=rounds)

    def wall(self, launch: Launch, *, launches: int, rounds: int) -> Timing:
        """See `timing.wall_time`."""
        return timing.wall_time(launch, launches=launches, rounds=rounds)

    def copy_time(self) -> tuple[int, Timing]:
        """A copy of 1 GiB by a kernel of 16-byte accesses, counted read and written.

        A memcpy node of a graph reaches 2.8 TB/s on an H200, a kernel over 4: the faster one is the limit.
        """
        cupy = self._cupy
        source = cupy.full(COPY_BYTES // 4, 1.5, np.float32)
        target = cupy.empty_like(source)
        kernel = cupy.RawKernel(COPY_KERNEL, "copy_kernel")
        blocks = COPY_BYTES // 16 // COPY_THREADS

        def copy(_: int) -> None:
            kernel((blocks,), (COPY_THREADS,), (source, target))

        return 2 * COPY_BYTES, timing.graph_time(copy, count=4)

    def null_time(self) -> Timing:
        """An empty kernel of one warp."""
        kernel = self._cupy.RawKernel('extern "C" __global__ void null_kernel() {}', "null_kernel")
        return timing.graph_time(lambda _: kernel((1,), (32,), ()))


def _driver_release() -> str:
    """Version of the driver package, e.g. 580.95.05; `unknown` where nothing says it."""
    import subprocess
    from pathlib import Path

    try:
        words = Path("/proc/driver/nvidia/version").read_text().split()
        found = next((word for word in words if word.count(".") in (1, 2) and word[0].isdigit()), "")
        if found:
            return found
    except OSError:
        pass
    try:
        done = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True, text=True, timeout=20, check=True,
        )
        return (done.stdout.split() or ["unknown"])[0]
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def ticking(step: float = 1.0) -> Callable[[], float]:
    """A clock of microseconds that moves by `step` at every reading: no measurement, and the same every time."""

    def ticks() -> Iterator[float]:
        now = 0.0
        while True:
            yield now
            now += step

    made = ticks()
    return lambda: next(made)


class Dry:
    """The CPU executor, with a clock that is handed in.

    Args:
        clock: returns microseconds; read once before and once after each timed call.
    """

    name = "dry"
    dry = True

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock = clock or ticking()

    def describe(self) -> dict[str, str]:
        """That there is nothing to describe."""
        return {"gpu": "none: dry run", "driver": "none"}

    def lacks(self, plan: Plan) -> str:
        """Nothing: see `load`."""
        return ""

    def load(self, plan: Plan) -> Module:
        """On the executor; a plan that it cannot run is planned again without clusters."""
        from mhcgen.gate.execute import HostMachine
        from mhcgen.passes import run_pipeline

        if HostMachine().lacks(plan):
            plan = run_pipeline(plan.program, replace(plan.options, cluster=1))
        return Module(plan, HostRunner(plan))

    def put(self, array: np.ndarray[Any, Any]) -> Any:
        """An aligned copy."""
        from mhcgen.backends.host import HostBuffer

        made = HostBuffer(array.shape, array.dtype).array
        made[...] = array
        return made

    def fetch(self, array: Any) -> np.ndarray[Any, Any]:
        """A plain copy."""
        return np.array(array, copy=True)

    def repeated(self, array: Any, times: int) -> Any:
        """The array `times` times along its first axis."""
        return self.put(np.concatenate([array] * times))

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int) -> Any:
        """An array of one byte."""
        made = self.put(np.zeros(shape, NUMPY_DTYPES[dtype]))
        made.reshape(-1).view(np.uint8).fill(byte)
        return made

    def differing(self, a: Any, b: Any) -> int:
        """Compared by numpy."""
        return int(np.count_nonzero(a.reshape(-1).view(np.uint8) != b.reshape(-1).view(np.uint8)))

    def _timed(self, launch: Launch, rounds: int) -> Timing:
        times = []
        for i in range(rounds):
            begun = self._clock()
            launch(i)
            times.append(self._clock() - begun)
        return summarise(times)

    def graph(self, launch: Launch, *, count: int, replays: int) -> Timing:
        """Two calls by the clock."""
        return self._timed(launch, min(count, 2))

    def back_to_back(self, launch: Launch, *, kernels: int, launches: int, rounds: int) -> Timing:
        """Two calls by the clock."""
        return self._timed(launch, min(launches, 2))

    def wall(self, launch: Launch, *, launches: int, rounds: int) -> Timing:
        """Two calls by the clock."""
        return self._timed(launch, min(launches, 2))

    def copy_time(self) -> tuple[int, Timing]:
        """By the clock, nothing copied."""
        return 2 * COPY_BYTES, self._timed(lambda _: None, 1)

    def null_time(self) -> Timing:
        """By the clock, nothing run."""
        return self._timed(lambda _: None, 1)
