"""Prefill arms of finish and post: which block size and slab place keep most loads in flight.

PYTHONPATH=. python3 benchmarks/prefill.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cupy

import mhcgen
from mhcgen.backends import cuda
from mhcgen.bench.timing import graph_time
from mhcgen.inputs import make_inputs
from mhcgen.passes.stamp import phase_borders

rows: list[dict[str, Any]] = []


def measure(what: str, program: Any, tokens: int, **options: Any) -> None:
    row: dict[str, Any] = {"what": what, "T": tokens, "class": program.arithmetic.functions, **options}
    try:
        module = mhcgen.compile(program, **options).load("cuda")
        base = {k: cuda.to_device(v) for k, v in make_inputs(program, min(tokens, 64)).items()}
        inputs = {
            k: cupy.concatenate([v] * (tokens // 64)) if program.tensor(k).role == "input" and tokens > 64 else v
            for k, v in base.items()
        }
        out = module(**inputs)
        time = graph_time(lambda i: module(out=out, **inputs), count=8, replays=12)
        moved = sum(v.nbytes for v in (*inputs.values(), *out.values()))
        row |= {"us": round(time.median, 2), "GB_s": round(moved / time.median * 1e-3)}
    except mhcgen.MhcgenError as error:
        row["error"] = str(error)[:200]
    rows.append(row)
    print(row, flush=True)


def phases(what: str, program: Any, tokens: int, **options: Any) -> None:
    plan = mhcgen.compile(program, stamps=True, **options)
    module = plan.load("cuda")
    inputs = {k: cuda.to_device(v) for k, v in make_inputs(program, tokens).items()}
    taken: dict[str, list[int]] = {}
    kernel = plan.kernels[0]
    for _ in range(60):
        module(**inputs)
        stamps = cuda.to_host(module.stamps[kernel.name])[0, :, 1]
        for phase, before, after in phase_borders(kernel):
            taken.setdefault(f"{len(taken)}" if False else f"{before}>{after} {phase}", []).append(
                int(stamps[after] - stamps[before])
            )
        starts = {}
        for phase, before, _ in phase_borders(kernel):
            starts.setdefault(phase.split(":")[0], before)
    row = {"what": f"phases {what}", "T": tokens, **options, "cycles": {k: sorted(v)[30] for k, v in taken.items()}}
    rows.append(row)
    print(row, flush=True)


def main() -> None:
    fast = {"dtype": "bf16", "functions": "fast", "sumsq": "fp32"}
    finish, post = mhcgen.build(**fast), mhcgen.build(**fast, scope="post")
    pre = mhcgen.build(**fast, projection="fma")
    phases("finish", finish, 1, fuse="pre")
    phases("pre", pre, 1, fuse="pre", cluster=16)
    phases(
        "boundary",
        mhcgen.build(**fast, projection="fma", scope="boundary", norm=True),
        1,
        fuse="boundary",
        cluster=16,
    )
    for tokens in (1, 8, 64):
        for threads in (None, 32, 128, 256):
            measure("post", post, tokens, fuse="none", threads=threads)
    for threads in (None, 128, 256):
        measure("post", post, 4096, fuse="none", threads=threads)
    for tokens in (512, 4096):
        measure("finish", finish, tokens, fuse="pre")
        measure("finish", finish, tokens, fuse="pre", mix_warp="shared")
        for threads in (128, 256, 512):
            for mix in ("own", "shared"):
                measure("finish", finish, tokens, fuse="pre", slab="global", threads=threads, mix_warp=mix)
        measure("finish", finish, tokens, fuse="pre", slab="registers", threads=288)
    Path(sys.argv[1]).write_text(json.dumps(rows, indent=1))


main()
