"""NVIDIA-NeMo/Automodel #2154 and NVIDIA/Megatron-LM #4957: the streams were mixed by comb transposed; shapes fit.

D1, a cyclic comb, tells the two apart by about 1. Each emission that has a `post` runs against a loop written here.
"""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen.inputs import discriminating
from mhcgen.ir import Program

BOUNDARY = {"scope": "boundary", "projection": "fma"}
#: name -> (what is built, schedule): each template of the stage, in global memory, registers and clusters.
POSTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "alone": ({"scope": "post", "hidden": 24}, {"fuse": "none"}),
    "alone, element by element": ({"scope": "post", "hidden": 8}, {"fuse": "none", "scalar": True}),
    "alone, odd": ({"scope": "post", "hidden": 7, "streams": 3}, {"fuse": "none"}),
    "alone, bf16": ({"scope": "post", "hidden": 40, "dtype": "bf16"}, {"fuse": "none"}),
    "alone, fp16": ({"scope": "post", "hidden": 40, "dtype": "fp16"}, {"fuse": "none"}),
    "alone, eight streams": ({"scope": "post", "hidden": 16, "streams": 8}, {"fuse": "none"}),
    "boundary in registers": ({"hidden": 264, **BOUNDARY}, {"fuse": "boundary", "cluster": 1}),
    "boundary streamed": ({"hidden": 264, **BOUNDARY}, {"fuse": "boundary", "cluster": 1, "slab": "global"}),
    "boundary in a cluster": ({"hidden": 1024, **BOUNDARY}, {"fuse": "boundary", "cluster": 4}),
    "boundary in a cluster, bf16": ({"hidden": 1024, "dtype": "bf16", **BOUNDARY}, {"fuse": "boundary"}),
    "streams last": ({"model": "transformer-engine", "hidden": 24, **BOUNDARY}, {"fuse": "none"}),
    "streams last, fused": ({"model": "transformer-engine", "hidden": 24, **BOUNDARY}, {"fuse": "boundary"}),
    "delayed": ({"model": "deepseek-v4.1", "hidden": 24, **BOUNDARY}, {"fuse": "delayed"}),
}
TOKENS = 3


def cyclic(n: int) -> Any:
    """comb of a cycle by one, of one by n - 1, of one by one."""
    return np.stack([np.roll(np.eye(n, dtype=np.float32), shift, axis=1) for shift in (1, n - 1, 1)])


def mixed(x: Any, f: Any, post: Any, comb: Any) -> Any:
    """x_next in float64, element by element; x is [T, n, H]."""
    tokens, n, hidden = x.shape
    made = np.zeros(x.shape)
    for t, k, h in np.ndindex(tokens, n, hidden):
        made[t, k, h] = float(post[t, k]) * float(f[t, h])
        for j in range(n):
            made[t, k, h] += float(comb[t, j, k]) * float(x[t, j, h])
    return made


def by_stream(program: Program, name: str, array: Any) -> Any:
    last = program.tensor(name).shape[1:] == ("H", "n")
    return np.swapaxes(array, 1, 2) if last else array


@pytest.mark.parametrize("name", POSTS)
def test_streams_go_from_rows_to_columns(name: str) -> None:
    build, options = POSTS[name]
    program = mhcgen.build(**build)
    given = factories.inputs(program, TOKENS)
    given["comb"] = cyclic(program.dim("n"))
    out = mhcgen.compile(program, **options).load("host")(**given)
    x, got = by_stream(program, "x", given["x"]), by_stream(program, "x_next", out["x_next"]).astype(np.float64)
    near = {"bf16": 2.0**-7, "fp16": 2.0**-10}.get(build.get("dtype", ""), 1e-6)
    assert np.abs(got - mixed(x, given["f"], given["post"], given["comb"])).max() < near
    turned = np.swapaxes(given["comb"], 1, 2)
    assert np.abs(got - mixed(x, given["f"], given["post"], turned)).max() > 0.5


@pytest.mark.parametrize("placement", ["shared", "row", "element", "registers"])
@pytest.mark.parametrize(("model", "step"), [("deepseek-v4", 1), ("liger", -1), ("mhc-paper", -1)])
def test_comb_made_here_has_rows_that_streams_come_from(model: str, step: int, placement: str) -> None:
    """A whole site: D1's logits send stream 0 to 1, or to the last where a model has rows over destinations."""
    program = mhcgen.build(model, streams=4, hidden=16, scope="site")
    given = discriminating(program, 2, "D1")
    assert given is not None
    quiet = {"branch": lambda **read: np.zeros_like(next(iter(read.values())))}
    out = mhcgen.compile(program, "pre", placement=placement).load("host")(branches=quiet, **given)
    for k in range(4):
        assert out["x_next"][0, (k + step) % 4] == pytest.approx(given["x"][0, k], abs=0.05)
        assert out["x_next"][1, (k - step) % 4] == pytest.approx(given["x"][1, k], abs=0.05)
