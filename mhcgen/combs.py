"""Kinds of mixing matrices, each as a short program of row and column steps.

A kind is described once, independent of where the matrix lives: placements turn half-steps into
shuffles, register arithmetic or shared-memory passes. Rows are `from_stream`, columns are `to_stream`.
The names of functions are those of `templates/functions/`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mhcgen.ir import Stage


@dataclass(frozen=True)
class HalfStep:
    """Reduce rows (`row`: over to_stream) or columns (`col`: over from_stream), then map every element.

    Args:
        axis: `row` or `col`.
        op: `max` or `sum`, adjacent pairs first.
        finish: function applied once to each reduced value, with eps: `plain` or `add_eps`.
        fn: function that replaces an element, given its reduced value and eps.
    """

    axis: str
    op: str
    finish: str
    fn: str


@dataclass(frozen=True)
class CombProgram:
    """A comb kind instantiated: steps before the loop, the loop, and its count."""

    start: tuple[HalfStep, ...]
    loop: tuple[HalfStep, ...]
    count: int


def _sinkhorn(stage: Stage) -> CombProgram:
    """DeepSeek-V4: softmax over to_stream + eps, one column step, then iters-1 times row and column.

    Source: DeepSeek-V4 inference rule; iteration 1 is softmax and column.
    """
    row = HalfStep("row", "sum", "add_eps", "divide")
    col = HalfStep("col", "sum", "add_eps", "divide")
    softmax = (
        HalfStep("row", "max", "plain", "exp_of_difference"),
        HalfStep("row", "sum", "plain", "divide_then_add_eps"),
    )
    return CombProgram((*softmax, col), (row, col), int(stage.attr("iters")) - 1)


#: comb kind -> its program for a stage. New kinds register here.
COMB_KINDS: dict[str, Callable[[Stage], CombProgram]] = {"sinkhorn": _sinkhorn}


def comb_program(stage: Stage) -> CombProgram:
    """The steps of a stage of kind `sinkhorn`, by its attribute `comb`."""
    return COMB_KINDS[stage.attr("comb")](stage)
