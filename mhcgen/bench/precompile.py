"""Compile many plans side by side before the GPU is touched, so that its time goes to measuring.

Processes of their own fill the compile cache; whoever loads a plan later finds its machine code there. Nothing is
lost where this fails: a plan that is not in the cache is compiled when it is loaded.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace

from mhcgen.ir import Program
from mhcgen.plan import Options


def _compile(program: Program, options: Options, arch: str) -> str:
    from mhcgen.backends import nvrtc
    from mhcgen.errors import MhcgenError
    from mhcgen.passes import run_pipeline

    try:
        nvrtc.compile(run_pipeline(program, options).source, arch)
    except MhcgenError as error:
        return f"{error.code}: {error.message}"
    return ""


def precompile(wanted: Iterable[tuple[Program, Options]], arch: str, workers: int | None = None) -> dict[str, int]:
    """Fill the compile cache.

    Args:
        wanted: Programs with their schedules; repetitions cost nothing.
        arch: what to compile for, e.g. `sm_90`.
        workers: processes; one for each CPU if None.

    Returns:
        How many plans were compiled, by what went wrong; the empty key counts those where nothing did.
    """
    # A fresh copy has no cached graph to carry over.
    jobs = list(dict.fromkeys((replace(program), options) for program, options in wanted))
    counts: dict[str, int] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(min(len(jobs) or 1, workers or os.cpu_count() or 1), mp_context=context) as pool:
        for outcome in pool.map(_compile, *zip(*((p, o, arch) for p, o in jobs), strict=True), chunksize=1):
            counts[outcome] = counts.get(outcome, 0) + 1
    return counts
