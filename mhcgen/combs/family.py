"""What a kind of mixing matrix is, and the registry of kinds.

A matrix is described independently of where it lives, in one of two ways:

- `CombProgram`: steps over rows and columns of the n x n logits. Placements turn them into shuffles, register
  arithmetic or passes over shared memory. Rows are the first axis of the logits, columns the last.
- `DirectMap`: a device function of the logits that gives one element, `mhc_comb_<kind>(logits, from, to)`.

The names of functions are those of `templates/functions/`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from mhcgen.ir import Stage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# In quotes, and numpy imported where it is used: the command line reads names of kinds, and starts without it.
Array: TypeAlias = "npt.NDArray[np.float64]"


@dataclass(frozen=True)
class HalfStep:
    """Reduce rows (`row`: over the last axis) or columns (`col`: over the first), then map every element.

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
class ElementStep:
    """Replace every element by a function of it alone."""

    fn: str


@dataclass(frozen=True)
class LogStep:
    """One potential from the other: -logsumexp(logits + other) over the last axis (`row`) or the first (`col`)."""

    axis: str


#: A step of a CombProgram.
CombStep = HalfStep | ElementStep | LogStep


@dataclass(frozen=True)
class CombProgram:
    """Steps before a loop, the loop, and its count.

    Args:
        start: run once.
        loop: run `count` times.
        count: times.
        counted: iterations that `start` stands for, where a count of them is asked for.
        potentials: the steps work on potentials of rows and columns beside the logits (log domain), and the
            matrix is exp(row + logits + col).
        transposed: the logits' axes are (to_stream, from_stream); the matrix is stored the other way round.
    """

    start: tuple[CombStep, ...]
    loop: tuple[CombStep, ...] = ()
    count: int = 0
    counted: int = 0
    potentials: bool = False
    transposed: bool = False


@dataclass(frozen=True)
class DirectMap:
    """A device function of the logits that gives one element.

    Args:
        template: its file under templates/; it defines `mhc_comb_<kind>(const float* logits, int from, int to)`.
        fields: what the template needs.
        roundings: bound of the relative error of an element in units of 2^-24, the logits taken as exact and
            `mhc_exp` and division as within 2.2 and 4 of them.
    """

    template: str
    fields: tuple[tuple[str, Any], ...]
    roundings: float


def _any_streams(n: int) -> str:
    return ""


def _no_aim(n: int, shift: int) -> Array | None:
    return None


def _unbounded(stage: Stage) -> float:
    return float("inf")


@dataclass(frozen=True)
class CombKind:
    """A kind of mixing matrix.

    Args:
        name: value of a stage's attribute `comb`.
        source: public source of the formula.
        logits: number of logits a token for n streams.
        steps: the program or map of a stage, for n streams.
        formula: the formula as text, for a stage.
        stage: kind of its stages: `sinkhorn` (iterated, has eps and iterations) or `comb`.
        options: attribute -> legal values of attributes that a stage may leave out, the first being meant then.
        check: sentence that says why a stage's attributes do not go together; empty if they do.
        streams: sentence that says why the kind has no matrix for n streams; empty if it has.
        aim: logits [L] of which the matrix is close to the cyclic permutation j -> j + shift mod n; None where
            the kind has no such matrix. Inputs that tell a matrix from its transpose are made of it.
        limit: largest magnitude of logits that fp32 can take without overflow or a sum of zeros.
    """

    name: str
    source: str
    logits: Callable[[int], int]
    steps: Callable[[Stage, int], CombProgram | DirectMap]
    formula: Callable[[Stage], tuple[str, ...]]
    stage: str = "comb"
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    check: Callable[[Stage], str] = lambda stage: ""
    streams: Callable[[int], str] = _any_streams
    aim: Callable[[int, int], Array | None] = _no_aim
    limit: Callable[[Stage], float] = _unbounded

    def option(self, stage: Stage, key: str) -> str:
        """Value of an optional attribute of a stage, its default where it has none."""
        return str(dict(stage.attrs).get(key, self.options[key][0]))


#: name -> kind.
COMB_KINDS: dict[str, CombKind] = {}


def register(kind: CombKind, reference: Callable[..., Array], templates: Mapping[str, str] | None = None) -> CombKind:
    """Add a kind, so that models may name it.

    Args:
        kind: the kind; its name must be free, or be a kind registered before this way (notebooks run cells twice).
        reference: the formula in float64 numpy: (logits [T, L], n, attributes) to the matrix [T, n, n]. It must
            not use anything of this package: it is what the emission is checked against.
        templates: texts of templates that are not files of this package, by name.
    """
    from mhcgen.emit import EXTRA_TEMPLATES
    from mhcgen.reference_combs import COMBS

    COMB_KINDS[kind.name] = kind
    COMBS[kind.name] = reference
    EXTRA_TEMPLATES.update(templates or {})
    return kind


def comb_kind(stage: Stage) -> CombKind:
    """The kind of a stage of kind `sinkhorn` or `comb`, by its attribute `comb`."""
    return COMB_KINDS[stage.attr("comb")]


def comb_program(stage: Stage, n: int) -> CombProgram | DirectMap:
    """The steps or the map of a stage of kind `sinkhorn` or `comb`."""
    return comb_kind(stage).steps(stage, n)
