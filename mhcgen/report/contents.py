"""What stands on the page, as tables and lines: no HTML here, and nothing that differs from run to run."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mhcgen.errors import InputError
from mhcgen.gate.checks import CHECKS
from mhcgen.gate.report import Report
from mhcgen.ir import Program
from mhcgen.log import Decision, Refusal
from mhcgen.plan import Kernel, Plan
from mhcgen.report.resources import HEAD, Resources


@dataclass(frozen=True)
class Contents:
    """What a page is about.

    Args:
        program: what is computed.
        plan: how; None where the request was refused.
        refusals: what was refused: the request itself, or what was asked about beside it.
        answers: other answers to what was asked about.
        resources: of `resources_of`; None where they were not asked for.
        gate: of `mhcgen.gate.run`; None where it was not run.
        bench: a file of figures as `mhcgen.bench.report.read` gives it.
    """

    program: Program
    plan: Plan | None
    refusals: tuple[Refusal, ...] = ()
    answers: tuple[str, ...] = ()
    resources: Resources | None = None
    gate: Report | None = None
    bench: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Table:
    """Text in rows.

    Args:
        caption: what it shows.
        head: names of the columns.
        rows: cells; the first one names its row.
        numbers: columns that hold numbers.
        wide: columns that hold sentences.
    """

    caption: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: tuple[int, ...] = ()
    wide: tuple[int, ...] = ()


def kernels_of(plan: Plan) -> Table:
    """Facts of every launch."""
    rows = tuple(
        (
            kernel.name, " ".join(kernel.stages), kernel.grid_text, str(kernel.threads), str(kernel.shared_bytes),
            str(len(list(kernel.syncs()))),
        )
        for kernel in plan.kernels
    )
    head = ("kernel", "stages", "grid", "threads", "shared (B)", "barriers")
    return Table("Launches, in order", head, rows, numbers=(3, 4, 5))


def barriers_of(kernels: Iterable[Kernel]) -> Table:
    """Every barrier with the hazards that it covers."""
    rows = tuple(
        (kernel.name, sync.scope, sync.team, "; ".join(str(hazard) for hazard in sync.because))
        for kernel in kernels
        for sync in kernel.syncs()
    )
    return Table("Barriers, in program order", ("kernel", "scope", "joined by", "hazards"), rows, wide=(3,))


def decisions_of(plan: Plan | None) -> Table:
    """The log, but for refusals."""
    log = () if plan is None else plan.log
    rows = tuple((d.step, d.subject, d.choice, d.because) for d in log if isinstance(d, Decision))
    return Table("What each pass chose", ("pass", "about", "choice", "because"), rows, wide=(2, 3))


def resources_table(resources: Resources) -> Table:
    """Figures of the compiler."""
    caption = f"NVRTC {resources.compiler}, the plan for each architecture"
    return Table(caption, HEAD, resources.rows, numbers=tuple(range(2, len(HEAD))))


def gate_of(report: Report) -> dict[str, Any]:
    """The gate's verdict, table and failures; times are left out, since they are never the same twice."""
    used = [check for check in CHECKS if any(row.verdict(check) for row in report.rows)]
    rows = []
    for row in report.rows:
        verdicts = [row.verdict(check) for check in used]
        cells = ["-" if v is None else "ok" if v.ok else "FAILED" for v in verdicts]
        rows.append((row.arm, row.what, str(sum(count for _, count in row.kernels)), *cells))
    bad = sum(not row.ok for row in report.rows)
    inputs = ", ".join(f"{kind} T={tokens}" for kind, tokens in report.inputs)
    said = f"{bad} of {len(report.rows)} arms failed" if bad else f"{len(report.rows)} arms, all equal and clean"
    return {
        "ok": report.ok,
        "verdict": f"{said}, on {report.request.backend} ({report.device})",
        "table": Table(f"Inputs: {inputs}", ("arm", "what", "launches", *used), tuple(rows), (2,), (1,)),
        "failures": [f"{r.arm}: {v.check}: {v.detail}" for r in report.rows for v in r.verdicts if not v.ok],
    }


def timings_of(found: Mapping[str, Any]) -> dict[str, Any]:
    """Tables of a file of figures.

    Raises:
        InputError: `I-BENCH`, rows that mhcgen did not write.
    """
    from mhcgen.bench.report import failures, tables

    try:
        made = tuple(
            Table(title, tuple(head), tuple(tuple(map(str, row)) for row in rows), tuple(range(1, len(head))))
            for title, (head, *rows) in tables(found)
        )
        left = failures(found)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            "I-BENCH", f"the figures cannot be read: {type(error).__name__}: {error}", where="--bench",
            hints=("`mhcgen bench --json FILE` writes such files",),
        ) from error
    parts = [f"{found.get('gpu', 'unknown GPU')}, driver {found.get('driver', 'unknown')}"]
    parts += [f"{key} {found[key]}" for key in ("commit", "date", "command") if found.get(key)]
    return {"origin": "; ".join(parts), "tables": made, "failures": left}
