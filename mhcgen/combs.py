"""Kinds of mixing matrices, each as a short program of row and column steps.

A kind is described once, independent of where the matrix lives: placements turn `Reduce` and `Map` into
shuffles, register arithmetic or shared-memory passes. Rows are `from_stream`, columns are `to_stream`.
The names of functions are those of `templates/functions/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mhcgen.ir import Stage


@dataclass(frozen=True)
class Reduce:
    """Reduce the matrix along rows (`row`: over to_stream) or columns (`col`: over from_stream).

    Args:
        axis: `row` or `col`.
        op: `max` or `sum`, adjacent pairs first.
        finish: function applied once to each reduced value, e.g. `plain` or `add_eps`.
    """

    axis: str
    op: str
    finish: str


@dataclass(frozen=True)
class Map:
    """Replace every element by `fn(element, reduced value of its row or column)`."""

    axis: str
    fn: str


MicroOp = Reduce | Map


@dataclass(frozen=True)
class CombProgram:
    """A comb kind instantiated: steps before the loop, the loop, and its count."""

    start: tuple[MicroOp, ...]
    loop: tuple[MicroOp, ...]
    count: int


def _sinkhorn(stage: Stage) -> CombProgram:
    """DeepSeek-V4: softmax over to_stream + eps, one column step, then iters-1 times row and column.

    Source: DeepSeek-V4 inference rule (variants.md 2.1): iteration 1 is softmax and column.
    """
    row = (Reduce("row", "sum", "add_eps"), Map("row", "divide"))
    col = (Reduce("col", "sum", "add_eps"), Map("col", "divide"))
    softmax = (
        Reduce("row", "max", "plain"),
        Map("row", "exp_of_difference"),
        Reduce("row", "sum", "plain"),
        Map("row", "divide_then_add_eps"),
    )
    return CombProgram((*softmax, *col), (*row, *col), int(stage.attr("iters")) - 1)


#: comb kind -> its program for a stage. New kinds register here.
COMB_KINDS: dict[str, Callable[[Stage], CombProgram]] = {"sinkhorn": _sinkhorn}


def comb_program(stage: Stage) -> CombProgram:
    """The steps of a stage of kind `sinkhorn`, by its attribute `comb`."""
    return COMB_KINDS[stage.attr("comb")](stage)
