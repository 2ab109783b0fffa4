"""Second look on a GPU: clusters for pre and boundary; bits against the unfused emission, then times."""

from __future__ import annotations

import json
import os

import cupy
import numpy as np

import mhcgen
from mhcgen.backends import cuda
from mhcgen.bench.timing import graph_time, sets_for
from mhcgen.inputs import make_inputs

rows: list = []


def gpu(inputs):
    return {k: cuda.to_device(v) for k, v in inputs.items()}


def case(name, program, tokens, check=True, **kw):
    row = {"what": name, "T": tokens, **kw}
    try:
        plan = mhcgen.compile(program, **kw)
        module = plan.load("cuda")
        inputs = gpu(make_inputs(program, tokens))
        if check:
            want = mhcgen.compile(program, "none").load("cuda")(**inputs)
            got = module(**inputs)
            row["differ"] = sum(int((cuda.to_host(got[k]).view(np.uint8) != cuda.to_host(want[k]).view(np.uint8)).sum()) for k in want)
        size = sum(v.nbytes for k, v in inputs.items() if program.tensor(k).role == "input")
        many = [gpu(make_inputs(program, tokens, seed=s)) for s in range(min(8, sets_for(size)) if tokens >= 64 else 1)]
        outs = [module(**i) for i in many]
        full = [dict(o) for o in outs]
        t = graph_time(lambda i: module(out=full[i % len(many)], **many[i % len(many)]))
        row |= {"us": round(t.median, 3), "low": round(t.low, 3)}
    except mhcgen.MhcgenError as e:
        row["error"] = str(e)[:300]
    rows.append(row)
    print(row, flush=True)


for h in (4096, 7168):
    for functions in ("fast", "ieee"):
        pre = mhcgen.build(dtype="bf16", hidden=h, functions=functions, projection="fma", sumsq="fp32")
        bnd = mhcgen.build(dtype="bf16", hidden=h, functions=functions, projection="fma", sumsq="fp32", scope="boundary", norm=True)
        pnq = mhcgen.build(dtype="bf16", hidden=h, functions=functions, projection="fma", sumsq="fp32", norm=True, quant="q8")
        for tokens in (1, 8, 64):
            for cluster in (16, 8) if h == 4096 else (16,):
                case(f"pre {functions} H{h}", pre, tokens, fuse="pre", cluster=cluster)
                case(f"boundary+norm {functions} H{h}", bnd, tokens, fuse="boundary", cluster=cluster)
            case(f"pre-norm-quant {functions} H{h}", pnq, tokens, fuse="pre-norm-quant", cluster=16)
for n in (2, 8):
    pre = mhcgen.build(dtype="bf16", streams=n, functions="fast", projection="fma", sumsq="fp32")
    for tokens in (1, 8, 64):
        case(f"pre fast n{n}", pre, tokens, fuse="pre", cluster=16)
post = mhcgen.build(dtype="bf16", scope="boundary", projection="fma")
if "post" in getattr(__import__("mhcgen.build", fromlist=["SCOPES"]), "SCOPES"):
    p = mhcgen.build(dtype="bf16", scope="post")
    for tokens in (1, 8, 64, 512, 4096):
        case("post", p, tokens, check=False, fuse="none")
with open(os.environ.get("OUT", ".") + "/cluster.json", "w") as f:
    json.dump(rows, f, indent=1)
