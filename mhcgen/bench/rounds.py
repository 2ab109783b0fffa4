"""Arms in turns: each is timed once in every round, so that a drift of the clock meets them all alike."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from mhcgen.bench.measure import Bench, Case, Prepared, Row, describe, error_text
from mhcgen.bench.timing import summarise
from mhcgen.gate.arms import candidates
from mhcgen.ir import Program
from mhcgen.plan import Options

ROUNDS = 5
METHODS = ("graph", "back_to_back")


def arm_cases(what: str, program: Program, options: Options, patterns: Iterable[str]) -> list[Case]:
    """The arms of a Program whose names match a pattern, as cases; illegal ones too, whose rows will say why.

    Args:
        what: name of the cases.
        program: the unfused Program.
        options: the schedule that is asked for: its fusion and arch are those of the arms.
        patterns: names of `mhcgen list kernels`, `*` for any text.
    """
    wanted = tuple(patterns)
    # The arm without early stop is another Program, and only a check of bits.
    arms = [arm for arm in candidates(program, options) if not arm.full_loop]
    return [Case(what, program, a.options, a.name) for a in arms if any(fnmatchcase(a.name, p) for p in wanted)]


def interleaved(
    bench: Bench, cases: Iterable[Case], tokens: int, rounds: int = ROUNDS, first: str = "back_to_back"
) -> list[Row]:
    """Rows of cases that take turns.

    A row's `us` is the median over the rounds of one method; the other method's times stand beside it under its
    name. What cannot be measured is a row with its error.

    Args:
        bench: where.
        cases: checked first; whoever differs from the unfused emission takes no turn.
        tokens: T.
        rounds: how often each case is timed by the first method.
        first: `back_to_back` or `graph`.
    """
    ready: list[tuple[Prepared, list[float]]] = []
    rows: list[Row] = []
    for case in cases:
        try:
            prepared = bench.prepare(case, tokens)
        except Exception as error:  # noqa: BLE001  (one arm less; the others go on)
            rows.append({**describe(case, None, tokens), **getattr(error, "row", {}), "error": error_text(error)})
            continue
        ready.append((prepared, []))
        rows.append(prepared.row)
    for _ in range(rounds):
        for prepared, taken in ready:
            taken.append(bench.timed(prepared, tokens, first, rounds=1).median)
    (second,) = (method for method in METHODS if method != first)
    for prepared, taken in ready:
        times = summarise(taken)
        bench.note(prepared.row, first, times, first=True)
        prepared.row["runs"] = list(times.runs)
        bench.note(prepared.row, second, bench.timed(prepared, tokens, second), first=False)
    return rows
