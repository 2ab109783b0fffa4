"""One run of one emission: arrays placed, poisoned, launched, fetched, and everything the checks look at.

Host and GPU differ only in `Machine`. Every array is the gate's own, so that guard bands, poison and unchanged
inputs are seen on the very memory the kernels used.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from mhcgen.backends import host
from mhcgen.inputs import numpy_dtype
from mhcgen.ir import Program
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Plan
from mhcgen.runtime import NUMPY_DTYPES, CudaRunner, HostRunner, Module
from mhcgen.stages import STREAM_LAST

Array = npt.NDArray[Any]
Arrays = dict[str, Array]

#: Fill bytes of output arrays. The first is a NaN in every float, and one that arithmetic seldom makes (a GPU's NaN,
#: negated), the second a small negative number; a byte that survives under both was never written.
POISONS = (0xFF, 0xA5)

#: Optimisation of what runs a few times only: faults compile three times as fast, and the level changes no bit.
QUICK = "-O0"


class Arena(Protocol):
    """Memory of one run."""

    def put(self, array: Array, misalign: int) -> Any:
        """A copy where kernels can read it, `misalign` bytes past a boundary."""

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int, misalign: int) -> Any:
        """An array whose bytes are all `byte`."""

    def fetch(self, array: Any) -> Array:
        """A copy in host memory."""


class Machine(Protocol):
    """Where arrays live and kernels run."""

    name: str

    def describe(self) -> str:
        """The device, for reports."""

    def lacks(self, plan: Plan) -> str:
        """Why this machine cannot run a plan at all; empty where it can."""

    def module(self, plan: Plan, source: str, *, race: bool, opt: str) -> Module:
        """The text compiled in place of the plan's own; `opt` is the host compiler's level."""

    def arena(self) -> Arena:
        """Memory for one run."""


class HostArena:
    """Arrays between guard bands, used by kernels in place."""

    def __init__(self) -> None:
        # An array finds its guard bands only while its HostBuffer lives.
        self._kept: list[Any] = []

    def put(self, array: Array, misalign: int) -> Array:
        """A guard-banded copy."""
        placed = self._buffer(array.shape, array.dtype, misalign)
        placed[...] = array
        return placed

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int, misalign: int) -> Array:
        """A guard-banded array of one byte."""
        placed = self._buffer(shape, NUMPY_DTYPES[dtype], misalign)
        placed.reshape(-1).view(np.uint8).fill(byte)
        return placed

    def _buffer(self, shape: tuple[int, ...], dtype: np.dtype[Any], misalign: int) -> Array:
        buffer = host.HostBuffer(shape, dtype, misalign=misalign)
        self._kept.append(buffer)
        return buffer.array

    def fetch(self, array: Any) -> Array:
        """A plain copy."""
        return np.array(array, copy=True)


class HostMachine:
    """The CPU executor."""

    name = "host"

    def describe(self) -> str:
        """CPU and compiler."""
        lines = host.find_compiler().identity.split("\n")
        return f"{platform.machine()}, {lines[1] if len(lines) > 1 else lines[0]}"

    def lacks(self, plan: Plan) -> str:
        """Clusters, as long as the executor declares none of their primitives."""
        if all(kernel.cluster == 1 for kernel in plan.kernels):
            return ""
        headers = Path(host.__file__).parent.glob("*.h")
        has = any("mhc_host_cluster_arrive" in path.read_text() for path in headers)
        return "" if has else "the CPU executor runs no thread-block clusters; the cuda backend does"

    def module(self, plan: Plan, source: str, *, race: bool, opt: str) -> Module:
        """Compiled with the C++ compiler at hand."""
        return Module(plan, HostRunner(plan, race=race, source=source, opt=opt))

    def arena(self) -> HostArena:
        """Guard-banded memory."""
        return HostArena()


class CudaArena:
    """CuPy arrays on the current device."""

    def put(self, array: Array, misalign: int) -> Any:
        """A copy on the device."""
        from mhcgen.backends.cuda import to_device

        if not misalign:
            return to_device(array)
        raw = np.empty(misalign + array.nbytes, np.uint8)
        raw[misalign:] = as_bytes(array)
        return to_device(raw)[misalign:].view(array.dtype).reshape(array.shape)

    def filled(self, shape: tuple[int, ...], dtype: str, byte: int, misalign: int) -> Any:
        """A device array of one byte."""
        kind = NUMPY_DTYPES[dtype]
        size = int(np.prod(shape, dtype=np.int64)) * kind.itemsize
        return self.put(np.full(size, byte, np.uint8).view(kind).reshape(shape), misalign)

    def fetch(self, array: Any) -> Array:
        """A copy in host memory; waits for the device."""
        from mhcgen.backends.cuda import to_host

        return to_host(array)


class CudaMachine:
    """The current CUDA device, through CuPy."""

    name = "cuda"

    def describe(self) -> str:
        """Name of the device."""
        import cupy

        name = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"]
        return name.decode() if isinstance(name, bytes) else str(name)

    def lacks(self, plan: Plan) -> str:
        """Nothing that is not refused when the plan is made."""
        return ""

    def module(self, plan: Plan, source: str, *, race: bool, opt: str) -> Module:
        """Compiled by NVRTC where it is at hand; `race` and `opt` have no meaning on a GPU."""
        return Module(plan, CudaRunner(plan, source=source))

    def arena(self) -> CudaArena:
        """Device memory."""
        return CudaArena()


def machine_of(backend: str) -> Machine:
    """The machine of a decided backend."""
    return HostMachine() if backend == "host" else CudaMachine()


# ---- opaque stages ----------------------------------------------------------------------------------
def _branch(z: Array, last: bool) -> Array:
    """Half the columns in reverse order: depends on every column and its place, exact but for subnormals."""
    return np.ascontiguousarray(z[:, ::-1] * z.dtype.type(0.5))


def _engram(x: Array, last: bool) -> Array:
    """Every column moved by one: exact in every dtype."""
    return np.ascontiguousarray(np.roll(x, 1, axis=1 if last else 2))


def _tap(x: Array, last: bool) -> Array:
    """The first stream."""
    return np.ascontiguousarray(x[:, :, 0] if last else x[:, 0, :])


#: What opaque stages do here, of an operand and whether its streams lie side by side.
OPAQUE: dict[str, Callable[[Array, bool], Array]] = {"branch": _branch, "engram": _engram, "tap": _tap}


def opaque_functions(program: Program, arena: Arena, made: Arrays) -> dict[str, Callable[..., Any]]:
    """A fixed function for every opaque stage, computed in host memory for every machine alike.

    Args:
        program: whose opaque stages.
        arena: where operands come from and results go.
        made: takes a copy of every result, by tensor name.
    """

    def bound(kind: str, operand: str, result: str) -> Callable[..., Any]:
        last = program.tensor(operand).shape == STREAM_LAST

        def run(**operands: Any) -> Any:
            (array,) = operands.values()
            with np.errstate(all="ignore"):
                made[result] = OPAQUE[kind](arena.fetch(array), last)
            return arena.put(made[result], 0)

        return run

    return {s.name: bound(s.kind, s.reads[0], s.writes[0]) for s in program.stages_of_kind(*OPAQUE_KINDS)}


# ---- running ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Loaded:
    """A compiled emission: the plan it claims to be, the text that was compiled, and the module."""

    plan: Plan
    source: str
    module: Module
    machine: Machine
    misaligned: bool = False


@dataclass(frozen=True)
class Launched:
    """One launch as the machine reports it.

    Args:
        kernel: name.
        scalar: the twin with element loads ran.
        blocks: thread blocks asked for.
        blocks_run: thread blocks that ran to their end; -1 where the machine cannot say.
        completed: the launch was not stopped.
        findings: of the executor.
        counts: accesses per parameter, where counted.
        unwritten: bytes nobody wrote, per fresh output, in race mode.
    """

    kernel: str
    scalar: bool
    blocks: int
    blocks_run: int
    completed: bool
    findings: tuple[Any, ...] = ()
    counts: Mapping[str, Any] = field(default_factory=dict)
    unwritten: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """Everything one run left behind.

    Args:
        results: every result by name, in host memory.
        values: intermediate values likewise; those that stayed in registers hold poison.
        launches: in order.
        changed_inputs: input name to the number of changed bytes.
        fill: the poison byte.
        seconds: wall time of the call.
    """

    results: Arrays
    values: Arrays
    launches: tuple[Launched, ...]
    changed_inputs: dict[str, int]
    fill: int
    seconds: float


def load(
    machine: Machine,
    plan: Plan,
    *,
    source: str | None = None,
    race: bool,
    misaligned: bool = False,
    opt: str = "-O2",
) -> Loaded:
    """Compile an emission now; `source` replaces the plan's own text."""
    text = plan.source if source is None else source
    module = machine.module(plan, text, race=race, opt=opt)
    module.runner.module(misaligned)
    return Loaded(plan, text, module, machine, misaligned)


def execute(
    loaded: Loaded, inputs: Mapping[str, Array], *, fill: int = POISONS[0], **launch_options: Any
) -> Outcome:
    """Run an emission on inputs.

    Args:
        loaded: what to run.
        inputs: arrays in host memory; copied first.
        fill: byte of all outputs before the call.
        launch_options: per_cluster; of the host backend: order, seed, count_accesses.
    """
    program, arena = loaded.plan.program, loaded.machine.arena()
    placed = {name: arena.put(array, _offset(loaded, array.dtype)) for name, array in inputs.items()}
    tokens = _tokens(program, inputs)
    made_by_kernels = {
        name for stage in program.stages if stage.kind not in OPAQUE_KINDS for name in stage.writes
    }
    out = {
        tensor.name: arena.filled(
            program.shape(tensor.name, tokens), tensor.dtype, fill, _offset(loaded, NUMPY_DTYPES[tensor.dtype])
        )
        for tensor in program.of_role("value", "result")
        if tensor.name in made_by_kernels
    }
    opaque: Arrays = {}
    started = time.perf_counter()
    results = loaded.module(
        **placed, out=out, branches=opaque_functions(program, arena, opaque), launch_options=launch_options
    )
    fetched = {**opaque, **{name: arena.fetch(array) for name, array in {**out, **results}.items()}}
    for name, array in fetched.items():
        if program.tensor(name).dtype == "fp8_e4m3":
            fetched[name] = array.view(numpy_dtype("fp8_e4m3"))  # carried as bytes; its NaNs are compared as NaNs
    seconds = time.perf_counter() - started
    return Outcome(
        results={name: fetched[name] for name in results},
        values={name: array for name, array in fetched.items() if name not in results},
        launches=tuple(_launched(launch) for launch in loaded.module.launches),
        changed_inputs={
            name: changed
            for name, array in inputs.items()
            if (changed := int(np.count_nonzero(as_bytes(arena.fetch(placed[name])) != as_bytes(array))))
        },
        fill=fill,
        seconds=seconds,
    )


def _offset(loaded: Loaded, dtype: np.dtype[Any]) -> int:
    """One element past the boundary: the least an array of that dtype can be misaligned by."""
    return int(dtype.itemsize) if loaded.misaligned else 0


def _tokens(program: Program, inputs: Mapping[str, Array]) -> int:
    tensor = next(t for t in program.of_role("input") if "T" in t.shape)
    return int(inputs[tensor.name].shape[tensor.shape.index("T")])


def _launched(launch: Any) -> Launched:
    report = launch.report
    blocks = int(launch.grid[0]) * int(launch.grid[1])
    if report is None:
        return Launched(launch.kernel, launch.scalar, blocks, -1, True)
    return Launched(
        launch.kernel,
        launch.scalar,
        blocks,
        report.blocks_run,
        report.completed and not report.suppressed,
        report.findings,
        report.accesses,
        report.unwritten,
    )


def as_bytes(array: Array) -> npt.NDArray[np.uint8]:
    """The bytes of an array, flat."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
