"""Run an emission on a GPU: CuPy holds the arrays, the driver loads and launches.

Two ways to compile. `nvrtc` is exact: NVRTC to machine code, loaded as it is. `cupy` needs CuPy alone, but
CuPy's compile call always appends `-ftz=true`, so the module says `flushes_subnormals`.

Launches are asynchronous on the caller's current stream and device; nothing here allocates device memory
or synchronises.
"""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np

from mhcgen.backends import nvrtc
from mhcgen.backends.archs import Arch, parse_arch
from mhcgen.backends.cuda_arguments import Packer, as_carrier, stream_handle
from mhcgen.backends.cupy_state import require_gpu
from mhcgen.backends.driver import Dim3, Driver, Function, LaunchBuffer
from mhcgen.backends.nvrtc_library import find_nvrtc, header_dirs
from mhcgen.backends.ptx import parse
from mhcgen.backends.signature import KernelSignature
from mhcgen.errors import CompileError, EnvironmentFault, InternalError, LaunchError, UsageError

# What CuPy is told in the fallback; the definition lets the guard of an emission accept flushed subnormals.
FALLBACK_OPTIONS = ("-std=c++17", "--fmad=false", "-DMHCGEN_ALLOW_FTZ")

_GRID_LIMITS = (2**31 - 1, 65535, 65535)
_BLOCK_LIMITS = (1024, 1024, 64)
_THREADS_PER_BLOCK = 1024
_CLUSTERS_SINCE = 90

_PTX_TYPES = {
    "float32": {"f32", "b32"},
    "float64": {"f64", "b64"},
    "int32": {"u32", "s32", "b32"},
    "uint32": {"u32", "s32", "b32"},
    "int64": {"u64", "s64", "b64"},
    "uint64": {"u64", "s64", "b64"},
}

# Modules by device and content. They are never unloaded: a captured graph may hold their kernels.
_modules: dict[tuple[int, int, bytes], int] = {}
_modules_lock = threading.Lock()


def is_available() -> tuple[bool, str]:
    """Whether kernels can run here, and if not, why and what to do; never raises, makes no context.

    It starts the driver, so a process that forks and then uses the GPU must fork first.
    """
    try:
        require_gpu()
    except EnvironmentFault as fault:
        return False, " ".join((fault.message, *(f"({hint})" for hint in fault.hints)))
    return True, ""


def to_device(array: np.ndarray[Any, Any], device: int | None = None) -> Any:
    """A copy of a host array on the device, dtype and shape kept (bf16 and fp8 as dtypes of ml_dtypes).

    Raises:
        EnvironmentFault: no GPU or no CuPy.
    """
    cupy, _ = require_gpu()
    host = np.asarray(array, order="C")
    with cupy.cuda.Device(device):
        return cupy.asarray(host.view(as_carrier(host.dtype))).view(host.dtype)


def to_host(array: Any) -> np.ndarray[Any, Any]:
    """A copy of a device array in host memory; waits for the current stream.

    Raises:
        EnvironmentFault: no GPU or no CuPy.
    """
    cupy, _ = require_gpu()
    copied: np.ndarray[Any, Any] = cupy.asnumpy(array.view(as_carrier(array.dtype)))
    return copied.view(array.dtype)


class CudaModule:
    """The kernels of one emission, compiled once per device and ready to launch.

    Args:
        source: text of the emission.
        kernels: signatures of its kernels.
        compile: `nvrtc`, `cupy`, or `auto`: `nvrtc` where a fitting one is installed.
        name: file name in messages.
        arch: the plan's target; an `a` or `f` suffix is kept where the device has those instructions.
        device: device to compile for now; the current one if None. Others follow at their first launch or
            by `prepare`.

    Attributes:
        mode: `nvrtc` or `cupy`, whichever is used.
        flushes_subnormals: True for `cupy`.
        notes: what was decided and why, e.g. the fallback to CuPy.
        launches: how often each kernel was launched (a zero grid is no launch).

    Raises:
        UsageError: `U-COMPILE`, no such way to compile.
        EnvironmentFault: `E-NO-CUPY`, `E-TWO-CUPY`, `E-CUPY-BROKEN`, `E-NO-GPU`, `E-CUDA-MAJOR`,
            `E-NO-NVRTC`, `E-NO-CUDA-HEADERS`.
        CompileError: `E-COMPILE`, the text does not compile.
        LaunchError: `E-LOAD`, the driver refuses the machine code; `E-ARCH`, the plan is for another GPU.
    """

    def __init__(
        self,
        source: str,
        kernels: Sequence[KernelSignature],
        *,
        compile: str = "auto",
        name: str = "emission.cu",
        arch: str | Arch | None = None,
        device: int | None = None,
    ) -> None:
        if compile not in ("auto", "nvrtc", "cupy"):
            raise UsageError("U-COMPILE", f"{compile!r} is no way to compile.", hints=("one of: auto, nvrtc, cupy",))
        self._cupy, self._driver = require_gpu()
        self.source = source
        self.name = name
        self.kernels = {signature.name: signature for signature in kernels}
        self.launches: Counter[str] = Counter()
        self.notes: tuple[str, ...] = ()
        self._arch = None if arch is None else parse_arch(arch)
        self._max_major = self._driver.version // 1000
        self.mode: Literal["nvrtc", "cupy"] = self._choose(compile)
        self.flushes_subnormals = self.mode == "cupy"
        self._packers = {signature.name: Packer(signature, self._cupy.ndarray) for signature in kernels}
        self._functions: dict[int, dict[str, Function]] = {}
        self._compiled: dict[int, nvrtc.Compiled] = {}
        self._kept: list[Any] = []
        self._lock = threading.Lock()
        self.prepare(device)

    def _choose(self, wanted: str) -> Literal["nvrtc", "cupy"]:
        if wanted == "cupy":
            return "cupy"
        try:
            find_nvrtc(self._max_major)
        except EnvironmentFault as fault:
            if wanted == "nvrtc":
                raise
            self.notes += (
                f"compiled by CuPy, which flushes subnormals: {fault.message}",
                *(f"for exact results: {hint}" for hint in fault.hints),
            )
            return "cupy"
        return "nvrtc"

    def compiled(self, device: int | None = None) -> nvrtc.Compiled | None:
        """PTX, machine code and resources for a device; None where CuPy compiled."""
        number = self._current_device() if device is None else device
        self.prepare(number)
        return self._compiled.get(number)

    def prepare(self, device: int | None = None) -> None:
        """Compile and load for a device now (the current one if None), so that no launch has to.

        Raises:
            CompileError, EnvironmentFault, LaunchError: as the constructor.
        """
        number = self._current_device() if device is None else device
        with self._lock:
            if number not in self._functions:
                load = self._load_exact if self.mode == "nvrtc" else self._load_by_cupy
                self._functions[number] = load(number)

    def _current_device(self) -> int:
        return int(self._cupy.cuda.runtime.getDevice())

    def _target(self, device: int) -> str:
        own = self._driver.capability(device)
        wanted = self._arch or Arch(own)
        family = wanted.suffix == "f" and wanted.number // 10 == own // 10 and wanted.number <= own
        exact = wanted.number == own
        if not (exact or family or (not wanted.suffix and wanted.number <= own)):
            raise LaunchError(
                "E-ARCH",
                f"the plan is for {wanted.name}, but device {device} "
                f"({self._driver.device_name(device)}) is sm_{own}.",
                where=self.name,
                hints=(f"compile the plan with arch sm_{own}",),
            )
        return Arch(own, wanted.suffix if exact or family else "").name

    def _load_exact(self, device: int) -> dict[str, Function]:
        compiled, functions = load_exact(
            self._driver, device, self.source, self.kernels, name=self.name, target=self._target(device)
        )
        self.notes += tuple(note for note in compiled.notes if note not in self.notes)
        self._compiled[device] = compiled
        return functions

    def _load_by_cupy(self, device: int) -> dict[str, Function]:
        self._target(device)
        cupy = self._cupy
        major = int(cupy.cuda.nvrtc.getVersion()[0])
        includes = tuple(f"-I{folder.path}" for folder in header_dirs() if folder.version // 1000 == major)[:1]
        options = FALLBACK_OPTIONS + includes
        try:
            with cupy.cuda.Device(device), self._driver.capture_relaxed():
                module = cupy.RawModule(code=self.source, options=options)
                handles = {name: int(module.get_function(name).kernel.ptr) for name in self.kernels}
        except cupy.cuda.compiler.CompileException as error:
            raise CompileError(
                "E-COMPILE",
                f"CuPy's compiler rejected {self.name}.",
                where=self.name,
                notes=(*str(error).splitlines(), "options: " + " ".join(options)),
            ) from error
        self._kept.append(module)
        return {name: self._driver.adopt(device, handle, name) for name, handle in handles.items()}

    def launch(
        self,
        kernel: str,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        dynamic_shared: int = 0,
        stream: Any = None,
        cluster: Sequence[int] | None = None,
        dependent: bool = False,
    ) -> None:
        """Enqueue one launch and return at once.

        Args:
            kernel: name of the kernel.
            grid: blocks in x, y, z (one to three numbers); a zero means no launch.
            block: threads per block in x, y, z.
            args: one per parameter in order: contiguous `cupy.ndarray` of the declared dtype for a pointer, a
                number for a scalar. All arrays on one device; the launch goes there.
            dynamic_shared: bytes of dynamic shared memory per block.
            stream: a CuPy stream, an object with `cuda_stream` or `__cuda_stream__` (torch), or a handle; if
                None, CuPy's current stream of that device.
            cluster: blocks per cluster in x, y, z (sm_90 and later).
            dependent: allow the start before the predecessor in the stream ended (programmatic dependent
                launch); has no effect before sm_90.

        Raises:
            InputError: `I-ARGS`, `I-SCALAR`, `I-CONTIGUOUS`, `I-DEVICE`, `I-STREAM`.
            InputTypeError: `I-ARRAY`, no CuPy array; `I-DTYPE`, another dtype than declared.
            LaunchError: `E-LAUNCH`, the configuration is impossible or the driver refused it.
            UsageError: `U-KERNEL`, no such kernel.
        """
        packer = self._packers.get(kernel)
        if packer is None:
            raise UsageError(
                "U-KERNEL",
                f"the module has no kernel {kernel!r}.",
                notes=("it has: " + ", ".join(self._packers),),
            )
        shape = _shape(
            tuple(grid), tuple(block), dynamic_shared, None if cluster is None else tuple(cluster), dependent
        )
        buffer = packer.take()
        try:
            device = packer.pack(args, buffer)
            if device is None:
                device = self._current_device()
            if 0 in shape[0]:
                return
            functions = self._functions.get(device)
            if functions is None:
                self.prepare(device)
                functions = self._functions[device]
            handle = stream_handle(self._cupy, stream, device)
            self._launch(functions[kernel], buffer, shape, handle)
        finally:
            packer.give(buffer)
        self.launches[kernel] += 1

    def _launch(self, function: Function, buffer: LaunchBuffer, shape: Shape, stream: int) -> None:
        driver: Driver = self._driver
        if (shape[3] is not None or shape[4]) and driver.capability(function.device) < _CLUSTERS_SINCE:
            if shape[3] is not None:
                raise LaunchError(
                    "E-LAUNCH",
                    f"{function.name} needs clusters, which device {function.device} does not have.",
                    where=function.name,
                    notes=(f"device: sm_{driver.capability(function.device)}; clusters need sm_90",),
                )
            shape = (*shape[:4], False)
        buffer.configure(shape, stream)
        if driver.is_current(function.device, buffer):
            function.prepare(shape[2], shape[3])
            code = driver.launch_kernel(buffer.config_address, function.handle, buffer.pointers_address, None)
        else:
            with driver.on_device(function.device):
                function.prepare(shape[2], shape[3])
                code = driver.launch_kernel(buffer.config_address, function.handle, buffer.pointers_address, None)
        if code:
            grid, block, shared, cluster, _ = shape
            raise LaunchError(
                "E-LAUNCH",
                f"the driver refused to launch {function.name}.",
                where=function.name,
                notes=(
                    driver.describe(code),
                    f"grid {grid}, block {block}, dynamic shared {shared} bytes, cluster {cluster}, "
                    f"device {function.device}",
                    "a fault of an earlier kernel is reported by the first call after it",
                ),
            )


def load_exact(
    driver: Driver,
    device: int,
    source: str,
    kernels: Mapping[str, KernelSignature],
    *,
    name: str,
    target: str,
) -> tuple[nvrtc.Compiled, dict[str, Function]]:
    """Compile by NVRTC and load on a device, without CuPy: what was compiled, and the kernels by name.

    Raises:
        EnvironmentFault: `E-NO-NVRTC`, `E-NO-CUDA-HEADERS`.
        CompileError: `E-COMPILE`.
        LaunchError: `E-LOAD`.
        InternalError: `X-SIGNATURE`, a signature is not that of the text.
    """
    compiled = nvrtc.compile(source, target, name=name, max_major=driver.version // 1000)
    _check_signatures(kernels, compiled.ptx)
    key = (driver.process, device, hashlib.sha256(compiled.image).digest())
    with _modules_lock:
        if key not in _modules:
            _modules[key] = driver.load_module(device, compiled.image)
    return compiled, {kernel: driver.function(device, _modules[key], kernel) for kernel in kernels}


def _check_signatures(kernels: Mapping[str, KernelSignature], ptx: str) -> None:
    # A signature that differs from the text would make the kernel read arguments that nobody wrote.
    functions = parse(ptx)
    for name, signature in kernels.items():
        if name not in functions:
            continue
        wanted = [_PTX_TYPES["uint64" if param.is_pointer else param.dtype.name] for param in signature.params]
        found = functions[name].params
        if len(found) != len(wanted) or any(kind not in kinds for kind, kinds in zip(found, wanted, strict=True)):
            raise InternalError(
                "X-SIGNATURE",
                f"the signature of {name} is not that of its text.",
                where=name,
                notes=(
                    "signature: " + ", ".join(param.ctype for param in signature.params),
                    "compiled: " + ", ".join(found),
                ),
            )


Shape = tuple[Dim3, Dim3, int, Dim3 | None, bool]


def _dim3(what: str, values: tuple[Any, ...], least: int, limits: tuple[int, ...]) -> Dim3:
    if not 1 <= len(values) <= 3:
        raise LaunchError("E-LAUNCH", f"{what} has one to three sizes, not {len(values)}.")
    sizes = [int(value) for value in values] + [1] * (3 - len(values))
    if any(not least <= size <= limit for size, limit in zip(sizes, limits, strict=True)):
        raise LaunchError("E-LAUNCH", f"{what} {tuple(values)} is out of range.", notes=(f"{least} to {limits}",))
    return sizes[0], sizes[1], sizes[2]


@lru_cache(maxsize=1024)
def _shape(
    grid: tuple[Any, ...],
    block: tuple[Any, ...],
    dynamic_shared: int,
    cluster: tuple[Any, ...] | None,
    dependent: bool,
) -> Shape:
    """The checked launch shape; cached, since a serving loop repeats a few of them for ever."""
    blocks = _dim3("the grid", grid, 0, _GRID_LIMITS)
    threads = _dim3("the block", block, 1, _BLOCK_LIMITS)
    if threads[0] * threads[1] * threads[2] > _THREADS_PER_BLOCK:
        raise LaunchError("E-LAUNCH", f"the block {block} has more than {_THREADS_PER_BLOCK} threads.")
    if not 0 <= dynamic_shared < 2**31:
        raise LaunchError("E-LAUNCH", f"{dynamic_shared} bytes of dynamic shared memory are out of range.")
    clusters = None
    if cluster is not None:
        clusters = _dim3("the cluster", cluster, 1, _GRID_LIMITS)
        if any(size % part for size, part in zip(blocks, clusters, strict=True)):
            raise LaunchError("E-LAUNCH", f"the cluster {cluster} does not divide the grid {grid}.")
        if clusters == (1, 1, 1):
            clusters = None
    return blocks, threads, int(dynamic_shared), clusters, bool(dependent)
