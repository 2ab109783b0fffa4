"""Loading and launching a built emission on the CPU."""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.backends.host import abi, debuginfo
from mhcgen.backends.host.arguments import Bound, bind
from mhcgen.backends.host.buffers import HostBuffer
from mhcgen.backends.host.build import Built, Fibers, build
from mhcgen.backends.host.findings import AccessCounts, Finding, LaunchReport
from mhcgen.backends.host.geometry import block_ids, check_shapes, cluster_of, shape_of
from mhcgen.backends.host.render import Renderer, guard_finding, input_finding, merged
from mhcgen.backends.host.unit import launch_bound, source_name, uses_clusters
from mhcgen.backends.signature import KernelSignature
from mhcgen.errors import EnvironmentFault, UsageError

Argument = npt.NDArray[Any] | HostBuffer | int | float | bool | np.generic | None

_STACK_BYTES = 128 * 1024
_MAX_FINDINGS = 256
_MAX_WAITS = 64
_SLICE_NANOSECONDS = 100_000_000


@dataclass
class _Library:
    """One loaded shared object. Its runtime has one running fiber, so launches take turns."""

    handle: ctypes.CDLL
    lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, record: abi.LaunchRecord, kernel: str) -> float:
        """Run a launch to its end; returns its seconds. Between slices Python may deliver a Ctrl-C."""
        with self.lock:
            started = time.perf_counter()
            opened = self.handle.mhc_rt_open(ctypes.byref(record))
            status = -1
            if opened:
                try:
                    while (status := self.handle.mhc_rt_run(opened, _SLICE_NANOSECONDS)) == 1:
                        pass
                finally:
                    self.handle.mhc_rt_close(opened)
            seconds = time.perf_counter() - started
        if status != 0:
            raise EnvironmentFault("E-MEMORY", "the launch ran out of memory", where=kernel)
        return seconds


_libraries: dict[Path, _Library] = {}
_libraries_lock = threading.Lock()
_per_thread = threading.local()


class HostModule:
    """An emission compiled for the CPU: `source` unchanged, one fiber per CUDA thread.

    Args:
        source: the emitted CUDA text.
        kernels: the `__global__` functions to be launched. Their parameters are compared with the source at
            compile time.
        name: of the emission, as findings and compiler messages show it.
        race: instrument memory accesses, so that launches report races, reads of unwritten memory and accesses
            out of bounds; several times slower.
        compiler: command of a C++ compiler; None searches (see `find_compiler`).
        fibers: `asm`, `ucontext`, or None for the faster one that this CPU has.
        opt: optimisation level of the emission.

    Raises:
        EnvironmentFault: `E-NO-CXX`, `E-CXX`, `E-PLATFORM`, `E-CACHE`, `E-LOAD`.
        CompileError: `X-COMPILE`.
        UsageError: options or signatures that mean nothing here.
    """

    def __init__(
        self,
        source: str,
        kernels: Sequence[KernelSignature],
        *,
        name: str = "emission",
        race: bool = False,
        compiler: str | None = None,
        fibers: Fibers | None = None,
        opt: str = "-O2",
    ) -> None:
        self.source = source
        self.name = name
        self.race = race
        self.kernels = {kernel.name: kernel for kernel in kernels}

        def built() -> Built:
            return build(source, kernels, name=name, race=race, compiler=compiler, fibers=fibers, opt=opt)

        first = built()
        try:
            self._library = _load(first.path)
        except EnvironmentFault:
            if first.path.exists():
                raise
            first = built()  # another process cleared the cache in between
            self._library = _load(first.path)
        self.path = first.path
        self.compiled = first.compiled

    def launch(
        self,
        kernel: str,
        grid: int | Sequence[int],
        block: int | Sequence[int],
        args: Sequence[Argument],
        *,
        dynamic_shared: int = 0,
        cluster: int | Sequence[int] | None = None,
        order: str = "ascending",
        seed: int = 0,
        blocks: Iterable[int] | None = None,
        uninitialised: Iterable[str] = frozenset(),
        count_accesses: bool = False,
    ) -> LaunchReport:
        """Run one kernel; returns when all its blocks have ended or the launch was stopped.

        Args:
            kernel: name of one of the module's kernels.
            grid, block: one to three integers; a grid with a 0 in it launches nothing.
            args: per parameter a C-contiguous numpy array of the right dtype or a `HostBuffer` (pointers; None
                is the null pointer), or a number (scalars). Arrays that share memory go on sharing it.
            dynamic_shared: bytes of dynamic shared memory per block.
            cluster: blocks per cluster in x, y, z: they run together and may use each other's shared memory. The
                clusters run one after another.
            order: in which order threads and blocks run: `ascending`, `descending`, `random` (by `seed`) or
                `warp-greedy` (one warp as far as it goes, warps in an order drawn from `seed`).
            seed: of the two random orders.
            blocks: linear ids of the only blocks to run, with the rest of their clusters; None runs all.
            uninitialised: pointer parameters whose contents mean nothing before the launch: they are filled with
                0xff bytes, and a race build reports reads of what nobody has written.
            count_accesses: count the loads and stores of every element (race builds only).

        Returns:
            The report. Findings do not raise; see `LaunchReport.raise_if_found`.

        Raises:
            UsageError: `X-KERNEL`, `X-SHAPE`, `X-GRID`, `X-BLOCK`, `X-SHARED`, `X-CLUSTER`, `X-ORDER`,
                `X-BLOCKS`, `X-ARGS`, `X-UNINIT`, `X-COUNT`.
            InputError: `I-SCALAR` for a number that does not fit its parameter (see `cast_scalar`), `X-LAYOUT`
                for an array that is not C-contiguous, not native or not writable.
            InputTypeError: `X-DTYPE` for an array of the wrong dtype.
            EnvironmentFault: `E-MEMORY`, `E-PLATFORM`.
        """
        signature = self._signature(kernel)
        grid3, block3 = shape_of(grid, "grid"), shape_of(block, "block")
        check_shapes(grid3, block3, dynamic_shared)
        cluster3 = cluster_of(cluster, grid3)
        size = self._cluster_size(kernel, cluster3)
        bound_threads = launch_bound(self.source, kernel)
        if bound_threads is not None and block3[0] * block3[1] * block3[2] > bound_threads:
            raise UsageError(
                "X-BLOCK",
                f"a block of {block3} exceeds the kernel's __launch_bounds__({bound_threads})",
                where=kernel,
            )
        if order not in abi.ORDERS:
            raise UsageError("X-ORDER", f"unknown order {order!r}", hints=tuple(abi.ORDERS))
        if count_accesses and not self.race:
            raise UsageError("X-COUNT", "only a race build counts accesses", hints=("HostModule(..., race=True)",))
        chosen = block_ids(blocks, grid3, cluster3, order, seed)
        bound = bind(signature, args, frozenset(uninitialised))
        block_count = grid3[0] * grid3[1] * grid3[2] if chosen is None else len(chosen)
        if block_count == 0:
            bound.copy_back()
            return LaunchReport(kernel, order, seed, self.race)
        regions = _Regions(bound, self._shared_variables(), dynamic_shared, count=count_accesses, race=self.race)
        waits = _MAX_WAITS * max(1, size)
        record = abi.LaunchRecord(
            entry=self._entry(kernel),
            arguments=ctypes.addressof(bound.pointers),
            blocks=None if chosen is None else chosen.ctypes.data,
            regions=regions.records,
            findings=(abi.FindingRecord * _MAX_FINDINGS)(),
            waits=(abi.WaitRecord * waits)(),
            stacks=_stacks(block3[0] * block3[1] * block3[2] * max(1, size)),
            stack_bytes=_STACK_BYTES,
            block_count=block_count,
            dynamic_shared=dynamic_shared,
            seed=seed & (2**64 - 1),
            grid=abi.Dim3(*grid3),
            block=abi.Dim3(*block3),
            order=abi.ORDERS[order],
            race=int(self.race),
            region_count=len(regions.names),
            finding_capacity=_MAX_FINDINGS,
            wait_capacity=waits,
            cluster=size,
        )
        seconds = self._library.run(record, kernel)
        findings = self._findings(record, regions.names) + self._buffer_findings(bound, record)
        bound.copy_back()
        return LaunchReport(
            kernel=kernel,
            order=order,
            seed=seed,
            race=self.race,
            findings=findings,
            completed=bool(record.completed),
            blocks_run=record.blocks_run,
            switches=record.switches,
            seconds=seconds,
            accesses=regions.counts(bound) if count_accesses else {},
            unwritten=regions.unwritten(bound) if self.race else {},
            suppressed=record.suppressed,
        )

    def _signature(self, kernel: str) -> KernelSignature:
        if kernel not in self.kernels:
            raise UsageError("X-KERNEL", f"the module has no kernel {kernel!r}", hints=tuple(self.kernels))
        return self.kernels[kernel]

    def _entry(self, kernel: str) -> int:
        address = ctypes.cast(self._library.handle[f"mhc_entry_{kernel}"], ctypes.c_void_p).value
        assert address is not None
        return address

    def _cluster_size(self, kernel: str, cluster: tuple[int, int, int] | None) -> int:
        """Blocks per cluster; 0 for a launch that has nothing to do with clusters."""
        if cluster is None:
            return int(uses_clusters(self.source))  # every block is a cluster of its own then
        size = cluster[0] * cluster[1] * cluster[2]
        if size > 1 and not self._library.handle.mhc_rt_has_clusters():
            raise EnvironmentFault("E-PLATFORM", "the host backend runs clusters on x86_64 only", where=kernel)
        return size

    def _shared_variables(self) -> tuple[debuginfo.SharedVariable, ...]:
        if not self.race:
            return ()
        return debuginfo.shared_variables(self.path)

    def _renderer(self, names: Sequence[str]) -> Renderer:
        return Renderer(debuginfo.read(self.path), self.source, source_name(self.name), names)

    def _findings(self, record: abi.LaunchRecord, names: Sequence[str]) -> tuple[Finding, ...]:
        if record.finding_count == 0:
            return ()
        renderer = self._renderer(names)
        waits = record.waits[: record.wait_count]
        return merged(renderer.finding(found, waits) for found in record.findings[: record.finding_count])

    def _buffer_findings(self, bound: Bound, record: abi.LaunchRecord) -> tuple[Finding, ...]:
        """What only shows in the memory afterwards: a changed guard band or input."""
        found = []
        seen = {record.findings[i].region for i in range(record.finding_count)}
        for index, item in enumerate(bound.buffers):
            offset = item.buffer.broken_guard()
            if offset is not None:
                item.buffer.fill_guards()
                if index not in seen:
                    found.append(guard_finding(item.name, offset - item.start))
            changed = item.changed_input()
            if changed is not None and index not in seen:
                found.append(input_finding(item.name, changed))
        return tuple(found)


class _Regions:
    """The memory a launch may touch, as the runtime wants it: the buffers first, then shared memory."""

    def __init__(
        self,
        bound: Bound,
        shared: Sequence[debuginfo.SharedVariable],
        dynamic_shared: int,
        *,
        count: bool,
        race: bool,
    ) -> None:
        self.names = [item.name for item in bound.buffers]
        self._counters: list[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint32]]] = []
        rows = []
        for item in bound.buffers:
            flags = 0 if item.writable else abi.READONLY
            flags |= abi.NEEDS_INIT if item.uninitialised else 0
            row = abi.Region(
                base=item.address,
                size=item.nbytes,
                guard=item.guard,
                flags=flags,
                element=item.element,
            )
            if count:
                elements = -(-item.nbytes // item.element)
                loads, stores = np.zeros(elements, np.uint32), np.zeros(elements, np.uint32)
                row.loads, row.stores = loads.ctypes.data, stores.ctypes.data
                self._counters.append((loads, stores))
            rows.append(row)
        if race:
            for variable in shared:
                rows.append(abi.Region(base=variable.offset, size=variable.size, flags=abi.SHARED_STATIC))
                self.names.append(f"shared {variable.name}")
            rows.append(abi.Region(size=dynamic_shared, flags=abi.SHARED_DYNAMIC))
            self.names.append("dynamic shared")
        self.records = (abi.Region * len(rows))(*rows)

    def counts(self, bound: Bound) -> dict[str, AccessCounts]:
        """Per array parameter, in the shape of its array."""
        result = {}
        for name, view in bound.views.items():
            element = bound.buffers[view.index].element
            start, parts = view.offset // element, view.array.itemsize // element
            per_part = [
                counter[start : start + view.array.size * parts].reshape(*view.array.shape, parts)
                for counter in self._counters[view.index]
            ]
            loads, stores = (counter.max(axis=-1, initial=0) for counter in per_part)
            result[name] = AccessCounts(loads, stores)
        return result

    def unwritten(self, bound: Bound) -> dict[str, int]:
        """Per parameter that the caller called uninitialised."""
        return {
            name: int(self.records[view.index].unwritten)
            for name, view in bound.views.items()
            if bound.buffers[view.index].uninitialised
        }


def _load(path: Path) -> _Library:
    with _libraries_lock:
        if path not in _libraries:
            try:
                handle = _opened(path)
            except OSError as fault:
                raise EnvironmentFault(
                    "E-LOAD",
                    f"a built module cannot be loaded: {fault}",
                    where=str(path),
                    hints=("set MHCGEN_CACHE_DIR to a directory whose file system allows execution",),
                ) from fault
            handle.mhc_rt_open.argtypes = [ctypes.c_void_p]
            handle.mhc_rt_open.restype = ctypes.c_void_p
            handle.mhc_rt_run.argtypes = [ctypes.c_void_p, ctypes.c_ulonglong]
            handle.mhc_rt_run.restype = ctypes.c_int
            handle.mhc_rt_close.argtypes = [ctypes.c_void_p]
            handle.mhc_rt_close.restype = None
            handle.mhc_rt_has_clusters.argtypes = []
            handle.mhc_rt_has_clusters.restype = ctypes.c_int
            _libraries[path] = _Library(handle)
        return _libraries[path]


def _opened(path: Path) -> ctypes.CDLL:
    """The shared object, without what its start-up code does to this thread's floating-point mode.

    `g++ -ffast-math` links code into every module that turns subnormals off for the process that loads it. Launches
    set their own mode; the caller's numpy would go on without subnormals.
    """
    process = ctypes.CDLL(None)
    mode = ctypes.create_string_buffer(256)  # a fenv_t, of at most 32 bytes where we run
    process.fegetenv(mode)
    try:
        return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
    finally:
        process.fesetenv(mode)


def _stacks(threads: int) -> int:
    """Address of stacks for `threads` fibers: memory of this Python thread, kept and reused by all modules."""
    wanted = (threads + 1) * _STACK_BYTES  # one more below the lowest, for it to overflow into
    arena: mmap.mmap | None = getattr(_per_thread, "stacks", None)
    if arena is None or len(arena) < wanted:
        try:
            arena = mmap.mmap(-1, wanted, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as fault:
            raise EnvironmentFault("E-MEMORY", f"no memory for {threads} stacks: {fault}") from fault
        # Each stack uses its first pages only; huge pages would commit all of it.
        arena.madvise(mmap.MADV_NOHUGEPAGE)
        _per_thread.stacks = arena
    return ctypes.addressof(ctypes.c_char.from_buffer(arena)) + _STACK_BYTES
