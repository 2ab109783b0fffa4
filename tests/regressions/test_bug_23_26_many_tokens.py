"""local-inference-lab/b12x #120 and cupy/cupy #7539: an offset was multiplied in 32 bits and then widened.
ml-explore/mlx #2267: token counts on grid.y end at 65535.

D13 and D14 on the CPU: arrays that take no memory before they are touched, and a grid of which a few blocks run. So
the last token of the largest T is tried, for which no GPU has the memory.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import factories
import numpy as np
import pytest
import sparse

import mhcgen
from mhcgen.backends.host import HostBuffer
from mhcgen.errors import InputError
from mhcgen.plan import Kernel, Plan
from mhcgen.runtime import HostRunner, Module, geometry

FULL = {"norm": True, "quant": "q8"}
#: name -> what is built, how it is fused; between them every grid and every kind of stage.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unfused": ({"hidden": 4096, "projection": "fma", **FULL}, {"fuse": "none"}),
    "pre": ({"hidden": 4096, **FULL}, {"fuse": "pre-norm-quant"}),
    "streamed": ({"hidden": 7168, "dtype": "bf16"}, {"fuse": "pre", "slab": "global"}),
    "cluster": ({"hidden": 4096, "projection": "fma", "dtype": "bf16"}, {"fuse": "pre"}),
    "boundary": ({"hidden": 4096, "scope": "boundary", "projection": "fma"}, {"fuse": "boundary", "cluster": 1}),
    "boundary cluster": ({"hidden": 2048, "scope": "boundary", "projection": "fma"}, {"fuse": "boundary"}),
    "post": ({"hidden": 4096, "scope": "post"}, {"fuse": "none"}),
    "head": ({"hidden": 4096, "scope": "head", "projection": "fma"}, {"fuse": "none"}),
    "mean": ({"hidden": 4096, "scope": "mean"}, {"fuse": "none"}),
    "expand": ({"hidden": 4096, "scope": "expand"}, {"fuse": "none"}),
    "one stream": ({"streams": 1, "hidden": 7}, {"fuse": "pre"}),
    "sixteen streams": ({"streams": 16, "hidden": 8192, "dtype": "bf16"}, {"fuse": "pre"}),
    "streams last": ({"model": "transformer-engine", "hidden": 1024, "projection": "fma"}, {"fuse": "pre"}),
    "stamped": ({"hidden": 512}, {"fuse": "pre", "stamps": True}),
}


def offsets(name: str, edit: Callable[[str], str] = str) -> None:
    """Each wanted token of the largest T has the bits that it has among few tokens, and no other is written."""
    build, options = CASES[name]
    program = mhcgen.build(**build)
    plan = mhcgen.compile(program, **options)
    tokens = 2**31 // program.dim("n") - 1
    wanted = sparse.borders(program, tokens)
    rows = factories.inputs(program, len(wanted))
    small = plan.load("host")(**rows)
    module, large = sparse.run(plan, rows, tokens, wanted, source=edit(plan.source))
    for launch in module.launches:
        assert launch.report.ok, launch.report.text
    assert isinstance(module.runner, sparse.SomeTokens)
    together = set.union(*module.runner.ran.values())
    for result, array in large.items():
        if program.tensor(result).shape[0] == "T":
            for row, token in zip(small[result], wanted, strict=True):
                # Not a comparison that pytest would explain, byte by byte.
                same = np.ascontiguousarray(array[token]).tobytes() == row.tobytes()
                assert same, (result, token)
            for token in {t + step for t in wanted for step in (-1, 1)} - together:
                assert not 0 <= token < tokens or not np.any(array[token].view(np.uint8)), (result, token)


@pytest.mark.parametrize("name", CASES)
def test_the_last_token_of_the_largest_count_is_right(name: str) -> None:
    offsets(name)


def in_32_bits(text: str) -> str:
    """Offsets that wrap within the array, so that nothing crashes."""
    changed, count = re.subn(r" \+ (token|token_first) \* ", r" + (unsigned)\1 * ", text)
    assert count
    return changed


@pytest.mark.parametrize("name", ["pre", "cluster", "boundary cluster", "post", "mean"])
def test_offsets_of_32_bits_are_seen(name: str) -> None:
    with pytest.raises(AssertionError):
        offsets(name, in_32_bits)


def test_the_last_row_of_the_largest_projection_is_right() -> None:
    """fn has 2^32 elements and more at n = 16 and the largest H: an offset of its own."""
    program = factories.program(factories.stage("project"), n=16, hidden=2**20)
    rows, columns = program.shape("fn", 1)
    assert rows * columns > 2**32
    fn, x = (HostBuffer(shape, np.float32, sparse=True).array for shape in ((rows, columns), (1, 16, 2**20)))
    for at, value in ((0, 1.0), (columns // 2, 2.0), (columns - 1, 4.0)):
        fn[rows - 1, at] = value
        x.reshape(-1)[at] = 1.0
    plan = mhcgen.compile(program)
    (kernel,) = plan.kernels
    assert kernel.grid == "token_rows" and kernel.row_blocks == rows
    out = Module(plan, OneRow(plan, rows - 1))(x=x, fn=fn)
    assert out["mixes"][0, -1] == 7.0


class OneRow(HostRunner):
    """Runs one block of a grid of rows."""

    def __init__(self, plan: Plan, row: int) -> None:
        super().__init__(plan)
        self.row = row

    def launch(self, kernel: Kernel, scalar: bool, grid: tuple[int, int], *rest: Any, **options: Any) -> Any:
        return super().launch(kernel, scalar, grid, *rest, blocks=[self.row * grid[0]], **options)


@pytest.mark.parametrize("name", ["pre", "unfused", "cluster"])
def test_one_token_more_is_refused(name: str) -> None:
    build, options = CASES[name]
    program = mhcgen.build(**build)
    tokens = 2**31 // program.dim("n")
    with pytest.raises(InputError) as caught:
        sparse.run(mhcgen.compile(program, **options), factories.inputs(program, 1), tokens, [0])
    assert caught.value.code == "I-TOKENS"


@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
@pytest.mark.parametrize("name", CASES)
def test_tokens_are_on_the_first_axis_of_the_grid(name: str, tokens: int) -> None:
    """D14: no other axis grows with T, whatever the kernel."""
    build, options = CASES[name]
    for kernel in mhcgen.compile(mhcgen.build(**build), **options).kernels:
        (x, y), _ = geometry(kernel, tokens)
        assert y == geometry(kernel, 1)[0][1] <= 1024
        assert x * kernel.tokens_per_cluster(tokens) >= tokens or kernel.grid == "once"


def test_more_tokens_than_an_axis_of_the_grid_has_run() -> None:
    program = mhcgen.build(streams=2, hidden=1, iters=1)
    inputs = factories.inputs(program, 70000)
    out = mhcgen.compile(program, "pre").load("host")(**inputs)
    some = [0, 65534, 65535, 65536, 69999]
    few = {t.name: np.ascontiguousarray(inputs[t.name][some]) for t in program.of_role("input")}
    alone = mhcgen.compile(program, "none").load("host")(**{**inputs, **few})
    assert all(array[some].tobytes() == alone[name].tobytes() for name, array in out.items())
