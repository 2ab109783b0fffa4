"""Launches of very many tokens on the CPU executor: memory that is not there until touched, a few blocks run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mhcgen.backends.host import HostBuffer
from mhcgen.ir import Program
from mhcgen.plan import Kernel, Plan
from mhcgen.runtime import NUMPY_DTYPES, HostRunner, Module


class SomeTokens(HostRunner):
    """Runs the blocks of the wanted tokens and leaves the others of the grid out.

    Attributes:
        ran: tokens of the blocks that ran, by kernel name; those of a cluster come together.
    """

    def __init__(self, plan: Plan, wanted: Sequence[int], **options: Any) -> None:
        super().__init__(plan, **options)
        self.wanted = wanted
        self.ran: dict[str, set[int]] = {}

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        return HostBuffer(shape, NUMPY_DTYPES[dtype], sparse=True).array

    def launch(
        self, kernel: Kernel, scalar: bool, grid: tuple[int, int], args: list[Any], fresh: tuple[str, ...], **own: Any
    ) -> Any:
        assert grid[1] <= 1024, f"tokens belong on the first axis of the grid {grid}"
        share = args[-2] if kernel.cluster > 1 else 1
        columns = sorted({0 if kernel.grid == "once" else token // share for token in self.wanted})
        self.ran[kernel.name] = {column * share + i for column in columns for i in range(share)}
        blocks = [column + row * grid[0] for column in columns for row in range(grid[1])]
        return super().launch(kernel, scalar, grid, args, fresh, blocks=blocks, **own)


def at(program: Program, rows: dict[str, Any], tokens: int, wanted: Sequence[int]) -> dict[str, Any]:
    """Inputs of T = tokens whose wanted tokens are `rows` in turn; all others are zeros that take no memory."""
    made = dict(rows)
    for tensor in program.of_role("input"):
        if tensor.shape[0] == "T":
            shape = program.shape(tensor.name, tokens)
            made[tensor.name] = HostBuffer(shape, NUMPY_DTYPES[tensor.dtype], sparse=True).array
            for row, token in zip(rows[tensor.name], wanted, strict=True):
                made[tensor.name][token] = row
    return made


def borders(program: Program, tokens: int) -> list[int]:
    """Tokens on both sides of where an offset, in elements, leaves 31 or 32 bits; the first and the last."""
    strides = {int(np.prod(program.shape(t.name, 1))) for t in program.tensors if t.shape[0] == "T"}
    first = {-(-(2**bits) // stride) for stride in strides for bits in (31, 32)}
    around = {token + step for token in first for step in (-1, 0)}
    return sorted({0, tokens - 1} | {token for token in around if token < tokens})


def module(plan: Plan, wanted: Sequence[int], **options: Any) -> Module:
    """A Module that runs the wanted tokens of each call; options are those of `HostRunner`."""
    return Module(plan, SomeTokens(plan, wanted, **options))


def run(plan: Plan, rows: dict[str, Any], tokens: int, wanted: Sequence[int], **options: Any) -> tuple[Module, Any]:
    """The Module and its results, T rows of them."""
    loaded = module(plan, wanted, **options)
    return loaded, loaded(**at(plan.program, rows, tokens, wanted))
