"""Bits on a GPU: CPU against GPU, batch invariance, large T, repeats. Prints a summary and writes JSON.

PYTHONPATH=. python3 benchmarks/bits.py OUT.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
from gpu import need_gpu

import mhcgen
from mhcgen.backends import cuda
from mhcgen.inputs import make_inputs

cupy = need_gpu()
Arrays = dict[str, Any]
out: dict[str, Any] = {"cpu_gpu": [], "batch": [], "large": [], "repeats": [], "dependent": []}


def bytes_of(array: Any) -> Any:
    return np.ascontiguousarray(array).view(np.uint8)


def differing(a: Arrays, b: Arrays) -> int:
    """Differing bytes; NaN counts by position, since NaN bits differ between x86 and GPU."""
    count = 0
    for name, one in a.items():
        two = b[name]
        same = bytes_of(one).reshape((*one.shape, -1)) == bytes_of(two).reshape((*two.shape, -1))
        if one.dtype.kind == "f" or one.dtype.name == "bfloat16":
            same |= (np.isnan(one.astype(np.float32)) & np.isnan(two.astype(np.float32)))[..., None]
        count += int((~same).sum())
    return count


def on_gpu(program: Any, inputs: Arrays, fuse: str, **options: Any) -> Arrays:
    module = mhcgen.compile(program, fuse, **options).load("cuda")
    got = module(**{name: cuda.to_device(value) for name, value in inputs.items()})
    return {name: cuda.to_host(value) for name, value in got.items()}


def cpu_against_gpu() -> None:
    cases: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [
        ({"streams": 4, "hidden": 4096}, "pre", (1, 4, 8)),
        ({"streams": 3, "hidden": 257}, "pre", (1, 4, 8)),
        ({"streams": 8, "hidden": 1281}, "pre", (1, 4, 8)),
    ]
    models = [
        name
        for name in ("deepseek-v4", "glm-5.3-flash", "transformer-engine", "mhc-lite", "kromhc", "liger")
        if name in mhcgen.models.MODELS
    ]
    for model in models:
        for hidden in (1280, 4096, 5120, 7168):
            cases.append(({"model": model, "streams": 4, "hidden": hidden, "dtype": "bf16"}, "pre", (3,)))
    for model in sorted(mhcgen.models.MODELS):
        projected = {"model": model, "streams": 4, "hidden": 1280, "dtype": "bf16", "projection": "fma"}
        cases.append((projected, "pre", (1, 9)))
        if not model.startswith("gated"):
            cases.append(({**projected, "norm": True}, "pre-norm", (9,)))
    for dtype in ("bf16", "fp32"):
        boundary = {"scope": "boundary", "projection": "fma", "norm": True, "quant": "q8", "dtype": dtype}
        cases.append(({"streams": 4, "hidden": 4096, **boundary}, "boundary", (1, 9, 64)))
    for config, fuse, tokens in cases:
        for count in tokens:
            row: dict[str, Any] = {**config, "T": count}
            try:
                program = mhcgen.build(**config)
                inputs = make_inputs(program, count)
                host = mhcgen.compile(program, "none").load("host")(**inputs)
                row["unfused"] = differing(host, on_gpu(program, inputs, "none"))
                row["fused"] = differing(host, on_gpu(program, inputs, fuse))
            except mhcgen.MhcgenError as error:
                row["error"] = str(error)[:200]
            out["cpu_gpu"].append(row)


def batch() -> None:
    """The same row alone and at the first, middle and last place of batches on both sides of every threshold."""
    for options in ({}, {"cluster": 16}):
        for functions in ("ieee", "fast"):
            program = mhcgen.build(dtype="bf16", projection="fma", functions=functions, norm=True)
            one = make_inputs(program, 1, seed=9)
            alone = on_gpu(program, one, "pre-norm", **options)
            for count in (2, 7, 8, 63, 64, 65, 1024, 8192):
                many = make_inputs(program, min(count, 65), seed=3)
                if count > 65:
                    many = {
                        k: np.concatenate([v] * -(-count // 65))[:count] if "T" in program.tensor(k).shape else v
                        for k, v in many.items()
                    }
                for name in many:
                    if "T" not in program.tensor(name).shape:
                        many[name] = one[name]
                places = (0, count // 2, count - 1)
                for name in many:
                    if "T" in program.tensor(name).shape:
                        many[name][list(places)] = one[name][0]
                got = on_gpu(program, many, "pre-norm", **options)
                differ = sum(differing({k: v[p : p + 1] for k, v in got.items()}, alone) for p in places)
                out["batch"].append({"class": functions, **options, "T": count, "differ": differ})


def large() -> None:
    """T past the wrap of 32-bit element offsets: the last rows against the same rows alone."""
    for streams, hidden, count in ((4, 4096, 131073), (4, 7168, 74899), (16, 8192, 16385)):
        program = mhcgen.build(streams=streams, hidden=hidden, dtype="bf16")
        few = make_inputs(program, 5, seed=1)
        last = mhcgen.compile(program, "none").load("cuda")
        want = {k: cuda.to_host(v) for k, v in last(**{k: cuda.to_device(v) for k, v in few.items()}).items()}
        for fuse in ("none", "pre"):
            inputs: Arrays = {}
            for name, value in few.items():
                if "T" not in program.tensor(name).shape:
                    inputs[name] = cuda.to_device(value)
                    continue
                whole = cupy.zeros((count, *value.shape[1:]), value.dtype)
                whole[-5:] = cuda.to_device(value)
                inputs[name] = whole
            got = mhcgen.compile(program, fuse).load("cuda")(**inputs)
            rows = {k: cuda.to_host(v[-5:].copy()) for k, v in got.items()}
            out["large"].append(
                {"n": streams, "H": hidden, "T": count, "fuse": fuse, "differ": differing(rows, want)}
            )
            del inputs, got
            cupy.get_default_memory_pool().free_all_blocks()


def repeats() -> None:
    """1000 launches into the same buffers, dependent launch too: the same bits every time."""
    for options in ({}, {"cluster": 16}, {"cluster": 16, "dependent": True}):
        program = mhcgen.build(dtype="bf16", projection="fma", functions="fast", norm=True, quant="q8")
        module = mhcgen.compile(program, "pre-norm-quant", **options).load("cuda")
        inputs = {k: cuda.to_device(v) for k, v in make_inputs(program, 20).items()}
        first = {k: v.copy() for k, v in module(**inputs).items()}
        again = module(**inputs)
        differ = cupy.zeros((), cupy.int64)
        for _ in range(1000):
            for array in again.values():
                array.view(cupy.uint8).fill(0xFF)
            module(out=again, **inputs)
            for name, array in again.items():
                differ += (array.view(cupy.uint8) != first[name].view(cupy.uint8)).sum()
        out["repeats"].append({**options, "launches": 1000, "differ": int(differ)})


def main() -> None:
    for part in (cpu_against_gpu, batch, large, repeats):
        try:
            part()
        except Exception as error:  # noqa: BLE001 - a measuring session goes on and says what failed
            out.setdefault("errors", []).append(f"{part.__name__}: {type(error).__name__}: {error}"[:600])
    out["gpu"] = cupy.cuda.runtime.getDeviceProperties(0)["name"].decode()
    Path(sys.argv[1]).write_text(json.dumps(out, indent=1))
    for key in ("cpu_gpu", "batch", "large", "repeats"):
        rows = out[key]
        bad = [r for r in rows if any(v for k, v in r.items() if k in ("differ", "unfused", "fused", "error"))]
        print(f"{key}: {len(rows)} cases, {len(bad)} not equal")
        for row in bad[:12]:
            print("   ", row)
    print("errors:", out.get("errors", "none"))


main()
