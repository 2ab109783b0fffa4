"""Kernels on torch's memory, device and current stream: compiled by NVRTC, loaded and launched by the driver.

CuPy has no part in it. torch's allocator owns every buffer, so inside a CUDA graph they belong to the graph's pool;
kernels stay loaded for the life of the process, and nothing that a launch uses is ever evicted. A launch is enqueued
and not waited for.
"""

from __future__ import annotations

import logging
import struct
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import starmap
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mhcgen.api import compile
from mhcgen.backends.archs import Arch
from mhcgen.backends.cuda import load_exact
from mhcgen.backends.driver import Dim3, Driver, Function, LaunchBuffer, load_driver
from mhcgen.backends.signature import KernelSignature
from mhcgen.errors import LaunchError
from mhcgen.lower import signature, tensors_of
from mhcgen.plan import Kernel, Plan
from mhcgen.runners import text_of
from mhcgen.runtime import VECTOR_ALIGNMENT, geometry, launch_order
from mhcgen.torch.calls import Call

LOGGER = logging.getLogger("mhcgen")
Shape = tuple[Dim3, Dim3, int, Dim3 | None, bool]

#: Distinct token counts whose shapes an operation remembers; a memo of tuples, no buffers.
_SIZES = 4096
_SCALARS = {"int": "i4x", "long long": "q"}

#: Emissions built so far, by `operation, device, twin`; a fetch from the compile cache counts.
compiled: Counter[str] = Counter()
_lock = threading.RLock()


@lru_cache(maxsize=64)
def arch_of(device: int) -> str:
    """Name of a device's architecture, the target of its plans."""
    return Arch(load_driver().capability(device)).name


def raw_stream(device: int) -> int:
    """torch's current stream of a device."""
    return int(torch.cuda.current_stream(device).cuda_stream)


# Without building a Stream object; the same call that compiled torch code makes before each of its launches.
_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", raw_stream)


Allocate = Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor]


def _allocators(device: int) -> tuple[Allocate, Allocate]:
    """Allocations of sizes, strides and dtype by torch's caching allocator: wherever, and on the current device."""
    where = torch.device("cuda", device)

    def anywhere(sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty_strided(sizes, strides, dtype=dtype, device=where)

    # What compiled torch code allocates with: a third of the time, but only on the current device.
    return anywhere, getattr(torch._C._dynamo.guards, "_empty_strided_cuda", anywhere)


_address = Tensor.data_ptr
# None where this torch has no such function; then nothing is known to be on the current device.
_current: Callable[[], int | None] = getattr(torch._C, "_cuda_getDevice", lambda: None)


class Launcher:
    """One kernel on one device, ready to launch.

    Args:
        driver: the driver.
        function: the loaded kernel.
        sign: its signature.
        cluster: blocks of its clusters, None without any.
    """

    __slots__ = ("_context", "_driver", "_free", "_function", "_pack", "_slots", "device", "launches", "name")

    def __init__(self, driver: Driver, function: Function, sign: KernelSignature, cluster: Dim3 | None) -> None:
        self._driver = driver
        self._function = function
        self._slots = len(sign.params)
        formats = ("Q" if param.is_pointer else _SCALARS[param.ctype] for param in sign.params)
        self._pack: Callable[..., None] = struct.Struct("=" + "".join(formats)).pack_into
        # Buffers of no launch at present; a launch takes one for itself, so threads never share one.
        self._free: list[LaunchBuffer] = []
        self.name = sign.name
        self.device = function.device
        self.launches = 0
        self._context = driver.context(self.device)
        with driver.on_device(self.device):
            function.prepare(0, cluster)

    def launch(self, values: Sequence[int], shape: Shape, stream: int) -> None:
        """Enqueue one launch: addresses and scalars in the order of the parameters.

        Raises:
            LaunchError: `E-LAUNCH`, the driver refused it.
        """
        driver, function = self._driver, self._function
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = LaunchBuffer(self._slots)
        self._pack(buffer.arguments, 0, *values)
        buffer.configure(shape, stream)
        driver.get_current(buffer.probe_address)
        if buffer.probe.value == self._context:
            code = driver.launch_kernel(buffer.config_address, function.handle, buffer.pointers_address, None)
        else:
            with driver.on_device(self.device):
                code = driver.launch_kernel(buffer.config_address, function.handle, buffer.pointers_address, None)
        self._free.append(buffer)
        if code:
            raise LaunchError(
                "E-LAUNCH",
                f"the driver refused to launch {self.name}.",
                where=self.name,
                notes=(
                    driver.describe(code),
                    f"grid {shape[0]}, block {shape[1]}, cluster {shape[3]}, device {self.device}",
                    "a fault of an earlier kernel is reported by the first call after it",
                ),
            )
        self.launches += 1


def load_launchers(plan: Plan, scalar: bool, device: int, name: str) -> tuple[Launcher, ...]:
    """Compile and load a plan, or its twin with element loads: its kernels in the plan's order.

    Raises:
        EnvironmentFault, CompileError, LaunchError: as `mhcgen.backends.cuda.load_exact`.
    """
    with _lock:
        driver = load_driver()
        source, signatures = text_of(plan, scalar)
        signs = {sign.name: sign for sign in signatures}
        made, functions = load_exact(
            driver, device, source, signs, name=f"{name}.cu", target=Arch(driver.capability(device)).name
        )
        for text in made.notes:
            LOGGER.info("%s: %s", name, text)
        compiled[f"{name}, device {device}, {'misaligned' if scalar else 'aligned'}"] += 1
        return tuple(
            Launcher(driver, functions[kernel.name], signs[kernel.name], cluster_of(kernel))
            for kernel in plan.kernels
        )


def cluster_of(kernel: Kernel) -> Dim3 | None:
    """Blocks of a kernel's clusters."""
    return (1, kernel.cluster, 1) if kernel.cluster > 1 else None


def shape_of(kernel: Kernel, tokens: int) -> tuple[Shape, tuple[int, ...]]:
    """Shape of a launch, and the scalars it ends with."""
    grid, scalars = geometry(kernel, tokens)
    return ((*grid, 1), (kernel.threads, 1, 1), 0, cluster_of(kernel), kernel.dependent), scalars


class _Sized:
    """What follows from a token count."""

    __slots__ = ("inputs", "launches", "made")

    def __init__(self, prepared: Prepared, tokens: int) -> None:
        call = prepared.call
        self.inputs = tuple(
            (index, spec.dtype, torch.Size(spec.shape(tokens)))
            for index, spec in zip(prepared.given, call.inputs, strict=True)
        )
        made = []
        for spec in (*call.outputs, *prepared.scratch):
            sizes = spec.shape(tokens)
            strides = [1] * len(sizes)
            for axis in range(len(sizes) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * max(1, sizes[axis + 1])
            made.append((sizes, tuple(strides), spec.dtype))
        self.made = tuple(made)
        self.launches = tuple(
            (index, itemgetter(*prepared.slots[index]), *shape_of(kernel, tokens))
            for index, kernel in (prepared.order if tokens else ())
        )


class Prepared:
    """An operation on one CUDA device: its plan, and the launches of it with nothing left to decide.

    Args:
        call: the operation.
        device: number of the device.

    Attributes:
        given: which inputs of the schema are given.
        ran: what `mhcgen.torch.last_path` says of it.
        plan: the Plan for the device's architecture.
        scratch: what a call allocates beside its results.
        order: kernels and their numbers in the order they are launched.
        slots: for each kernel, which of inputs, results and scratch its pointers are.
    """

    def __init__(self, call: Call, device: int) -> None:
        self.call = call
        self.device = device
        self.ran = (call.operation.name, "cuda", "CUDA tensors")
        names = {spec.name for spec in call.inputs}
        self.given = tuple(index for index, name in enumerate(call.operation.names) if name in names)
        self.plan = compile(call.program, call.fuse, arch=arch_of(device), **call.setup.schedule)
        reached = {name for kernel in self.plan.kernels for name in tensors_of(self.plan, kernel)}
        known = {spec.name for spec in (*call.inputs, *call.outputs)}
        values = [t.name for t in call.program.of_role("value", "result")]
        self.scratch = tuple(call.spec(name) for name in values if name in reached - known)
        order = [spec.name for spec in (*call.inputs, *call.outputs, *self.scratch)]
        ordered = [unit for unit in launch_order(self.plan) if isinstance(unit, Kernel)]
        self.order = tuple((self.plan.kernels.index(kernel), kernel) for kernel in ordered)
        self.slots = tuple(
            tuple(order.index(name) for name in tensors_of(self.plan, kernel)) for kernel in self.plan.kernels
        )
        for kernel in self.plan.kernels:
            tail = [param.name for param in signature(self.plan, kernel).params if not param.is_pointer]
            assert tail == ["per_cluster", "tokens"][kernel.cluster == 1 :], f"{kernel.name} takes {tail}"
        self._anywhere, self._here = _allocators(device)
        self._results = len(call.outputs)
        self._launchers: dict[bool, tuple[Launcher, ...]] = {}
        self._sized: dict[int, _Sized] = {}

    def launchers(self, twin: bool) -> tuple[Launcher, ...]:
        """The kernels, or those of the twin for arrays that are not 16-byte aligned; compiles the first time."""
        with _lock:
            if twin not in self._launchers:
                self._launchers[twin] = load_launchers(self.plan, twin, self.device, self.call.operation.name)
            return self._launchers[twin]

    @property
    def launches(self) -> int:
        """Kernels launched so far."""
        return sum(launcher.launches for twin in self._launchers.values() for launcher in twin)

    def run(self, tensors: Sequence[Any], outs: Sequence[Tensor] = ()) -> tuple[Tensor, ...] | None:
        """Enqueue the operation on torch's current stream; results, newly allocated unless given.

        Args:
            tensors: inputs in the order of the schema; those that are not given are not looked at.
            outs: checked tensors to write to.

        Returns:
            None, with nothing done, where a tensor is not what the kernels take; `Call.check` says why.

        Raises:
            EnvironmentFault, CompileError, LaunchError: of the backend.
        """
        first = tensors[0]
        tokens = first.shape[0] if first.ndim else -1
        if not 0 <= tokens <= self.call.limit:
            return None
        sized = self.sized(tokens)
        device = self.device
        for index, dtype, shape in sized.inputs:
            tensor = tensors[index]
            if (
                tensor.dtype is not dtype
                or tensor.shape != shape
                or not tensor.is_contiguous()
                or tensor.get_device() != device
            ):
                return None
        return self.launch(sized, [tensors[index] for index in self.given], outs)

    def launch(self, sized: _Sized, given: Sequence[Tensor], outs: Sequence[Tensor] = ()) -> tuple[Tensor, ...]:
        """Enqueue the operation on inputs that were checked, without those that are not given; see `run`."""
        allocate = self._here if _current() == self.device else self._anywhere
        made = [*outs, *starmap(allocate, sized.made[len(outs) :])]
        if sized.launches:
            pointers = [*map(_address, given), *map(_address, made)]
            bits = 0
            for pointer in pointers:
                bits |= pointer
            twin = bits % VECTOR_ALIGNMENT != 0
            launchers = self._launchers.get(twin) or self.launchers(twin)
            stream = _stream(self.device)
            for index, slots, shape, scalars in sized.launches:
                launchers[index].launch((*slots(pointers), *scalars), shape, stream)
        return tuple(made[: self._results])

    def sized(self, tokens: int) -> _Sized:
        """What follows from a token count; kept."""
        found = self._sized.get(tokens)
        if found is None:
            if len(self._sized) >= _SIZES:
                self._sized.clear()
            self._sized[tokens] = found = _Sized(self, tokens)
        return found
