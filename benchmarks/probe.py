"""First look on a GPU: CPU and GPU bits, and the decode chain under its schedules. Prints a table and JSON."""

from __future__ import annotations

import json
import os
import sys
import time

import cupy
import numpy as np

import mhcgen
from mhcgen.backends import cuda
from mhcgen.bench.timing import graph_time
from mhcgen.inputs import make_inputs

out: dict = {"gpu": cupy.cuda.runtime.getDeviceProperties(0)["name"].decode(), "bits": [], "times": []}


def on_gpu(plan, inputs):
    module = plan.load("cuda")
    got = module(**{k: cuda.to_device(v) for k, v in inputs.items()})
    return {k: cuda.to_host(v) for k, v in got.items()}


def same(a, b):
    return {k: int((a[k].view(np.uint8) != b[k].view(np.uint8)).sum()) for k in a}


def bits():
    for n, h, dtype in ((4, 4096, "fp32"), (3, 257, "fp32"), (8, 1281, "fp32"), (4, 4096, "bf16"), (4, 7168, "fp16")):
        program = mhcgen.build(streams=n, hidden=h, dtype=dtype, projection="fma")
        inputs = make_inputs(program, 8)
        host = mhcgen.compile(program, "none").load("host")(**inputs)
        for fuse, kw in (
            ("none", {}),
            ("pre", {}),
            ("pre", {"placement": "shared", "slab": "global", "threads": 128}),
        ):
            got = on_gpu(mhcgen.compile(program, fuse, **kw), inputs)
            row = {"n": n, "H": h, "dtype": dtype, "fuse": fuse, **kw, "differ": same(host, got)}
            out["bits"].append(row)
            print(row, flush=True)


def timed(name, program, tokens, **kw):
    try:
        plan = mhcgen.compile(program, **kw)
        module = plan.load("cuda")
        inputs = {k: cuda.to_device(v) for k, v in make_inputs(program, tokens).items()}
        results = {
            t.name: cupy.empty(
                program.shape(t.name, tokens),
                cuda.to_device(np.zeros(1, np.float32)).dtype
                if t.dtype == "fp32"
                else module.runner.empty((1,), t.dtype).dtype,
            )
            for t in program.of_role("value", "result")
            if module._is_global(t.name)
        }
        t = graph_time(lambda i: module(out=results, **inputs))
        row = {
            "what": name,
            "T": tokens,
            "us": round(t.median, 3),
            "low": round(t.low, 3),
            "kw": {k: v for k, v in kw.items()},
        }
    except mhcgen.MhcgenError as e:
        row = {"what": name, "T": tokens, "error": str(e)[:200]}
    out["times"].append(row)
    print(row, flush=True)


def times():
    null = cupy.RawKernel('extern "C" __global__ void null_kernel() {}', "null_kernel")
    t = graph_time(lambda i: null((1,), (32,), ()))
    print("null", t.median)
    out["null_us"] = t.median
    for functions in ("ieee", "fast"):
        for iters in (1, 20):
            program = mhcgen.build(dtype="bf16", functions=functions, iters=iters)
            for placement in ("element", "row", "registers"):
                timed(f"finish bf16 {functions} it{iters} {placement}", program, 1, fuse="pre", placement=placement)
        program = mhcgen.build(dtype="bf16", functions=functions)
        for tokens in (8, 64, 512, 4096):
            timed(f"finish bf16 {functions}", program, tokens, fuse="pre")
        timed(f"finish bf16 {functions} sharedwarp", program, 1, fuse="pre", mix_warp="shared")
        timed(
            f"finish bf16 {functions} sumsq32",
            mhcgen.build(dtype="bf16", functions=functions, sumsq="fp32"),
            1,
            fuse="pre",
        )
        timed(f"finish bf16 {functions} global", program, 1, fuse="pre", slab="global")
        timed(
            f"norm quant {functions}",
            mhcgen.build(dtype="bf16", functions=functions, norm=True, quant="q8"),
            1,
            fuse="pre-norm-quant",
        )
        timed(
            f"pre fma one block {functions}",
            mhcgen.build(dtype="bf16", functions=functions, projection="fma"),
            1,
            fuse="pre",
        )
    boundary = mhcgen.build(dtype="bf16", functions="fast", scope="boundary", projection="fma")
    for tokens in (1, 8, 64):
        timed("post alone + chain unfused", boundary, tokens, fuse="none")
        timed("boundary one block", boundary, tokens, fuse="boundary")


start = time.time()
for part in sys.argv[1:] or ("bits", "times"):
    {"bits": bits, "times": times}[part]()
print("seconds", time.time() - start)
target = os.environ.get("OUT", ".")
with open(f"{target}/probe.json", "w") as f:
    json.dump(out, f, indent=1)
