"""The two calls most users need: `build` a Program, `compile` it to a Plan."""

from __future__ import annotations

from typing import Any

from mhcgen.ir import Program
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options, Plan
from mhcgen.values import plain, switch


def compile(
    program: Program,
    fuse: str = "none",
    *,
    arch: str = "sm_90",
    placement: str = "auto",
    sync: str = "auto",
    threads: int | None = None,
    slab: str = "auto",
    mix_warp: str = "auto",
    scalar: bool = False,
    cluster: int | None = None,
    dependent: bool = False,
    stamps: bool = False,
    regime: str = "decode",
    tuned: bool = False,
    stop_after: str | None = None,
) -> Plan:
    """Schedule a Program: fuse, place, sync, launch.

    Args:
        program: what to compute; see `mhcgen.build`.
        fuse: a preset (`mhcgen.passes.fuse.PRESETS`) or explicit groups, `rowsq+gates,collapse`.
        arch: target architecture, e.g. `sm_90`.
        placement: `auto`, `shared`, `row`, `element` or `registers`: where the mixing matrix lives.
        sync: `auto` and `warp` pick the weakest correct barriers, `block` forces block barriers.
        threads: threads per block, every warp counted, a multiple of 32 up to 1024; None chooses.
        slab: `auto`, `registers` or `global`: where the streams are between square sum and collapse.
        mix_warp: `auto`, `own` or `shared`: whether the mixes have a warp of their own.
        scalar: element loads and stores only, for arrays that are not 16-byte aligned.
        cluster: most blocks of a cluster, 1 for none; None chooses.
        dependent: emit for dependent launch (sm_90 and later), with its device-side wait.
        stamps: time stamps at phase borders.
        regime: `decode` or `prefill`: what the schedule is chosen for, few tokens or many.
        tuned: use the schedule that `mhcgen tune` found for this request on the current GPU, if it did; the log
            says where the schedule comes from.
        stop_after: name of the pass after which to stop, to look at the Plan there.

    Returns:
        The Plan: `.kernels`, `.log`, `.numeric_class`, `.source`, `.load(backend)`.

    Raises:
        RefusedError: what was asked for is not legal; the error carries code, witness path and hint.
        UsageError: `U-OPTION`, a value outside its enumeration or of another type; `U-ARCH`; `U-PROGRAM`.

    Example:
        >>> import mhcgen
        >>> plan = mhcgen.compile(mhcgen.build("deepseek-v4", streams=4, hidden=64), fuse="pre")
        >>> [kernel.name for kernel in plan.kernels]
        ['mhc_rowsq_gates_sinkhorn_collapse']
    """
    from mhcgen.backends.archs import parse_arch

    given = {
        "placement": placement, "sync": sync, "threads": threads, "slab": slab, "mix_warp": mix_warp,
        "scalar": scalar, "cluster": cluster, "dependent": dependent, "stamps": stamps, "regime": regime,
    }  # fmt: skip
    chosen: dict[str, Any] = {name: plain(name, value) for name, value in given.items()}
    options = Options(fuse=fuse, arch=parse_arch(arch).name, **chosen)
    switch("tuned", tuned)
    if tuned:
        from mhcgen.tuned import run_tuned

        return run_tuned(program, options, stop_after=stop_after)
    return run_pipeline(program, options, stop_after=stop_after)
