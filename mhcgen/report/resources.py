"""What NVRTC makes of a request, architecture by architecture."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from mhcgen.errors import EnvironmentFault, MhcgenError
from mhcgen.ir import Program
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options

#: One of each generation, beside the one asked for.
ARCHS = ("sm_80", "sm_90", "sm_100", "sm_120")


@dataclass(frozen=True)
class Resources:
    """Registers, spills, shared memory and barriers.

    Args:
        compiler: the version of NVRTC; empty where there is none.
        rows: (arch, kernel, threads, registers, spill bytes, stack bytes, shared bytes, block barriers, warp
            barriers, shuffles, cluster barriers, arrival waits).
        notes: what is missing, and why.
    """

    compiler: str
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


HEAD = (
    "arch", "kernel", "threads", "registers", "spills (B)", "stack (B)", "shared (B)", "block barriers",
    "warp barriers", "shuffles", "cluster barriers", "arrival waits",
)


def resources_of(program: Program, options: Options, archs: Iterable[str] | None = None) -> Resources:
    """Plan and compile for each architecture; the schedule is chosen for each, as `emit --arch` would.

    Args:
        program: what is computed.
        options: the schedule as asked for.
        archs: targets; None for that of the options and `ARCHS`.
    """
    from mhcgen.backends import nvrtc

    try:
        version = ".".join(map(str, nvrtc.find_nvrtc().version))
    except EnvironmentFault as fault:
        return Resources("", (), (f"{fault.message.rstrip('.')}: {'; '.join(fault.hints)}",))
    rows: list[tuple[str, ...]] = []
    notes: list[str] = []
    for arch in dict.fromkeys((options.arch, *ARCHS) if archs is None else archs):
        try:
            plan = run_pipeline(program, replace(options, arch=arch))
            compiled = nvrtc.compile(plan.source, arch)
        except MhcgenError as error:  # refused there, too old for this NVRTC, ...: the other rows stand
            notes.append(_why(arch, error))
            continue
        notes += compiled.notes
        for kernel in plan.kernels:
            found = compiled.resources[kernel.name]
            spills = None if found.spill_stores is None else found.spill_stores + (found.spill_loads or 0)
            counts = found.total
            figures = (
                kernel.threads, found.registers, spills, found.stack, kernel.shared_bytes, counts.bar_sync,
                counts.bar_warp_sync, counts.shfl_sync, counts.barrier_cluster,
                counts.mbarrier_wait,
            )
            cells = ("-" if figure is None else str(figure) for figure in figures)
            rows.append((compiled.target, kernel.name, *cells))
    return Resources(version, tuple(rows), tuple(notes))


def _why(arch: str, error: MhcgenError) -> str:
    return f"{arch}: {error.code}: {error.message}"
