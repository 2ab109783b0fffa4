"""The decode table: finish, pre, pre-norm-quant, post and boundary at T = 1, 8, 64, both classes; bits checked first.

    PYTHONPATH=. python3 benchmarks/decode.py OUT.json [--quick]

Times are medians of graph replays, microseconds a launch; inputs rotate over several sets past the L2 at T = 64.
The floor beside each is the bytes moved once over the copy rate measured in the same run, and the null kernel.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import mhcgen
from mhcgen.backends import cuda
from mhcgen.bench.timing import graph_time, sets_for
from mhcgen.inputs import make_inputs

Arrays = dict[str, Any]
rows: list[dict[str, Any]] = []


def to_gpu(arrays: Arrays) -> Arrays:
    return {name: cuda.to_device(value) for name, value in arrays.items()}


def copy_rate() -> float:
    """Bytes a microsecond of a large device copy, read and write counted."""
    source = cupy.zeros(1 << 28, cupy.float32)
    target = cupy.empty_like(source)
    time = graph_time(
        lambda i: target.data.copy_from_device_async(source.data, source.nbytes, cupy.cuda.get_current_stream()),
        count=4,
    )
    return 2 * source.nbytes / time.median


def null_time() -> float:
    kernel = cupy.RawKernel('extern "C" __global__ void null_kernel() {}', "null_kernel")
    return graph_time(lambda i: kernel((1,), (32,), ())).median


def differing(got: Arrays, want: Arrays) -> int:
    return sum(int((cuda.to_host(got[k]).view(np.uint8) != cuda.to_host(want[k]).view(np.uint8)).sum()) for k in want)


def measure(what: str, program: Any, tokens: int, rate: float, null: float, **options: Any) -> None:
    row: dict[str, Any] = {
        "what": what,
        "T": tokens,
        "n": program.dim("n"),
        "H": program.dim("H"),
        "class": program.arithmetic.functions,
        "sumsq": program.arithmetic.sumsq,
        **options,
    }
    try:
        module = mhcgen.compile(program, **options).load("cuda")
        host_inputs = make_inputs(program, tokens)
        inputs = to_gpu(host_inputs)
        got = module(**inputs)
        want = mhcgen.compile(program, "none").load("cuda")(**inputs)
        row["differing_bytes"] = differing(got, want)
        moved = sum(v.nbytes for v in inputs.values()) + sum(v.nbytes for v in got.values())
        big = sum(v.nbytes for k, v in inputs.items() if program.tensor(k).role == "input")
        sets = 1 if tokens < 64 else sets_for(big)
        many = [inputs] + [
            {**inputs, **{k: v.copy() for k, v in inputs.items() if program.tensor(k).role == "input"}}
            for _ in range(min(sets, 24) - 1)
        ]
        outs = [module(**i) for i in many]
        time = graph_time(lambda i: module(out=outs[i % len(many)], **many[i % len(many)]))
        row |= {
            "us": round(time.median, 3),
            "low": round(time.low, 3),
            "high": round(time.high, 3),
            "floor_us": round(max(moved / rate, null), 3),
            "bytes": moved,
            "sets": len(many),
            "kernels": {k.name: {"cluster": k.cluster, "threads": k.threads} for k in module.plan.kernels},
        }
    except mhcgen.MhcgenError as error:
        row["error"] = str(error)[:300]
    rows.append(row)
    print({k: v for k, v in row.items() if k not in ("kernels", "bytes")}, flush=True)


def main() -> None:
    quick = "--quick" in sys.argv
    rate, null = copy_rate(), null_time()
    print(f"copy {rate * 1e-6:.2f} TB/s, null kernel {null:.3f} us")
    for hidden in (4096,) if quick else (4096, 7168):
        for functions, sumsq in (("fast", "fp32"), ("ieee", "fp32"), ("ieee", "fp64")):
            common = {"dtype": "bf16", "hidden": hidden, "functions": functions, "sumsq": sumsq}
            cases = [
                ("finish", mhcgen.build(**common), {"fuse": "pre"}),
                ("finish+norm+quant", mhcgen.build(**common, norm=True, quant="q8"), {"fuse": "pre-norm-quant"}),
                ("pre", mhcgen.build(**common, projection="fma"), {"fuse": "pre", "cluster": 16}),
                (
                    "pre+norm+quant",
                    mhcgen.build(**common, projection="fma", norm=True, quant="q8"),
                    {"fuse": "pre-norm-quant", "cluster": 16},
                ),
                (
                    "boundary (post+pre+norm)",
                    mhcgen.build(**common, projection="fma", scope="boundary", norm=True),
                    {"fuse": "boundary", "cluster": 16},
                ),
                ("post", mhcgen.build(**common, scope="post"), {"fuse": "none"}),
            ]
            for what, program, options in cases:
                if what == "post" and (functions, sumsq) != ("fast", "fp32"):
                    continue
                for tokens in (1, 8, 64):
                    measure(what, program, tokens, rate, null, **options)
    for n in () if quick else (2, 8):
        for what, options, extra in (
            ("finish", {"fuse": "pre"}, {}),
            ("pre", {"fuse": "pre", "cluster": 16}, {"projection": "fma"}),
        ):
            program = mhcgen.build(dtype="bf16", streams=n, functions="fast", sumsq="fp32", **extra)
            for tokens in (1, 8, 64):
                measure(what, program, tokens, rate, null, **options)
    name = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    target = Path(sys.argv[1])
    target.write_text(json.dumps({"gpu": name, "copy_TB_s": rate * 1e-6, "null_us": null, "rows": rows}, indent=1))


main()
