"""Every arm once on a GPU, for compute-sanitizer; bits against the unfused emission.

for tool in memcheck racecheck initcheck synccheck; do
  PYTHONPATH=. compute-sanitizer --tool $tool --error-exitcode 9 python3 benchmarks/sanitize.py
done
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from gpu import need_gpu

import mhcgen
from mhcgen.backends import cuda
from mhcgen.gate import arms
from mhcgen.inputs import make_inputs
from mhcgen.plan import Options
from mhcgen.runtime import load

CASES: tuple[tuple[dict[str, Any], str, int], ...] = (
    ({"streams": 4, "hidden": 4096}, "pre", 3),
    ({"streams": 3, "hidden": 257, "norm": True, "quant": "q8"}, "pre-norm-quant", 3),
    ({"streams": 8, "hidden": 1280}, "pre", 2),
    (
        {"streams": 4, "hidden": 1024, "dtype": "bf16", "projection": "fma", "norm": True, "quant": "q8"},
        "pre-norm-quant",
        9,
    ),
    (
        {"streams": 4, "hidden": 1024, "dtype": "bf16", "projection": "fma", "scope": "boundary", "norm": True},
        "boundary",
        9,
    ),
    (
        {"model": "deepseek-v4.1", "streams": 4, "hidden": 1024, "dtype": "bf16", "projection": "fma", "norm": True},
        "pre-norm",
        9,
    ),
    ({"model": "gated-residual", "streams": 4, "hidden": 512, "dtype": "bf16"}, "pre", 3),
    ({"model": "plain-hc", "streams": 4, "hidden": 512, "dtype": "bf16"}, "pre", 3),
)


def main() -> int:
    need_gpu()
    bad = ran = 0
    for config, fuse, tokens in CASES:
        program = mhcgen.build(**config)
        host = make_inputs(program, tokens)
        inputs = {name: cuda.to_device(value) for name, value in host.items()}
        want = {k: cuda.to_host(v) for k, v in mhcgen.compile(program, "none").load("cuda")(**inputs).items()}
        for arm in arms(program, Options(fuse=fuse, cluster=16 if "projection" in config else None)):
            try:
                plan = mhcgen.passes.run_pipeline(program, arm.options)
            except mhcgen.RefusedError:
                continue
            got = {k: cuda.to_host(v) for k, v in load(plan, "cuda")(**inputs).items()}
            differ = sum(int((got[k].view(np.uint8) != want[k].view(np.uint8)).sum()) for k in want)
            ran += 1
            bad += differ > 0
            if differ:
                print(f"DIFFERS {config} {arm.name}: {differ} bytes")
    print(f"{ran} arms ran, {bad} differ from the unfused emission")
    return 1 if bad else 0


sys.exit(main())
