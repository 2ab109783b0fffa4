"""What a gate run says: rows per arm, a table, one JSON line, an exit code."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from mhcgen.errors import EXIT_DIFFERS, EXIT_INTERNAL, EXIT_OK, InternalError
from mhcgen.gate.arms import RefusedArm
from mhcgen.gate.checks import CHECKS, Verdict
from mhcgen.gate.request import Request

JSON_PREFIX = "MHCGEN_CHECK_JSON"
JSON_VERSION = 1


@dataclass(frozen=True)
class Row:
    """One arm.

    Args:
        arm: its name.
        what: one line for people.
        kernels: kernel name to launches over the whole gate.
        threads: threads per block of each kernel, in order.
        sha256: of the text that was compiled.
        verdicts: of every check that ran, in the order of `CHECKS`.
        seconds: compiling, running and comparing.
    """

    arm: str
    what: str
    kernels: tuple[tuple[str, int], ...]
    threads: tuple[int, ...]
    sha256: str
    verdicts: tuple[Verdict, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Every check held."""
        return all(verdict.ok for verdict in self.verdicts)

    def verdict(self, check: str) -> Verdict | None:
        """The verdict of one check, None where it did not run."""
        return next((verdict for verdict in self.verdicts if verdict.check == check), None)


@dataclass(frozen=True)
class RedRow:
    """One planted fault.

    Args:
        fault: a key of `mhcgen.gate.RED`.
        site: where it was planted: arm, kernel, and what there.
        expected: the check that must catch it.
        caught_by: the checks that did.
        detail: what the expected check said, or what is missing.
        buffer: of a barrier, the buffers of its hazards; the finding must name one.
        seconds: wall time.
    """

    fault: str
    site: str
    expected: str
    caught_by: tuple[str, ...]
    detail: str
    buffer: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def caught(self) -> bool:
        """The check that must catch it did; another one does not count."""
        return self.expected in self.caught_by


@dataclass(frozen=True)
class Report:
    """The outcome of a gate run.

    Args:
        request: what was asked for, backend decided.
        numeric_class: of the Program.
        device: what ran it.
        inputs: kind and token count of every job.
        rows: per arm, baseline first.
        refused: arms that are not legal for this Program, with the reason.
        reds: planted faults.
        unfit: red arms that do not apply, with the reason.
        seconds: wall time.
    """

    request: Request
    numeric_class: str
    device: str
    inputs: tuple[tuple[str, int], ...]
    rows: tuple[Row, ...]
    refused: tuple[RefusedArm, ...] = ()
    reds: tuple[RedRow, ...] = ()
    unfit: tuple[tuple[str, str], ...] = ()
    seconds: float = field(default=0.0, compare=False)

    @property
    def ok(self) -> bool:
        """Every check of every arm held, and no fault was planted."""
        return self.exit_code == EXIT_OK

    @property
    def exit_code(self) -> int:
        """0; 1 where a check failed (a caught fault is one); 70 where a planted fault was not caught."""
        if any(not red.caught for red in self.reds):
            return EXIT_INTERNAL
        failed = any(not row.ok for row in self.rows) or bool(self.reds)
        return EXIT_DIFFERS if failed else EXIT_OK

    @property
    def error(self) -> InternalError | None:
        """`G-UNCAUGHT` where a planted fault was not caught: a gate that cannot see it is our bug."""
        missed = [red for red in self.reds if not red.caught]
        if not missed:
            return None
        return InternalError(
            "G-UNCAUGHT",
            f"{len(missed)} of {len(self.reds)} planted faults were not caught by the check that must catch them",
            where=f"{missed[0].fault}: {missed[0].site}",
            notes=tuple(f"{red.fault} at {red.site}: expected {red.expected}; {red.detail}" for red in missed),
            hints=("this is a bug of the gate; please report it with the command that shows it",),
        )

    # ---- for people -----------------------------------------------------------------------------
    def table(self) -> str:
        """Arms, checks and verdicts as text."""
        used = [check for check in CHECKS if any(row.verdict(check) for row in self.rows)]
        lines = [["arm", "launches", "threads", *used, "s"]]
        for row in self.rows:
            launches = sum(count for _, count in row.kernels)
            threads = ",".join(str(t) for t in dict.fromkeys(row.threads))
            cells = [_cell(row.verdict(check)) for check in used]
            lines.append([row.arm, str(launches), threads, *cells, f"{row.seconds:.2f}"])
        text = [f"gate on {self.request.backend} ({self.device}), class {self.numeric_class}"]
        text.append("inputs: " + ", ".join(f"{kind} T={tokens}" for kind, tokens in self.inputs))
        text += _aligned(lines)
        for row in self.rows:
            text += [f"FAILED {row.arm}: {v.check}: {v.detail}" for v in row.verdicts if not v.ok]
        text += [f"refused {r.refusal.code}: arm {r.arm.name}: {r.refusal.because}" for r in self.refused]
        if self.reds:
            head = ["red arm", "site", "must be caught by", "caught by", ""]
            text += _aligned(
                [head]
                + [
                    [r.fault, r.site, r.expected, ",".join(r.caught_by) or "-", "caught" if r.caught else "MISSED"]
                    for r in self.reds
                ]
            )
        text += [f"red arm {name} does not apply: {reason}" for name, reason in self.unfit]
        text.append(self._last_line())
        return "\n".join(text) + "\n"

    def _last_line(self) -> str:
        bad = sum(not row.ok for row in self.rows)
        said = f"{len(self.rows)} arms, {bad} failed" if bad else f"{len(self.rows)} arms, all equal and clean"
        if self.reds:
            said += f"; {sum(r.caught for r in self.reds)} of {len(self.reds)} planted faults caught"
        if self.refused:
            said += f"; {len(self.refused)} arms not legal here"
        return f"{said} ({self.seconds:.1f} s)"

    # ---- for scripts ----------------------------------------------------------------------------
    def as_dict(self) -> dict[str, Any]:
        """Everything, in a fixed order of keys, ready for JSON."""
        request = self.request
        return {
            "version": JSON_VERSION,
            "ok": self.ok,
            "exit_code": self.exit_code,
            "config": request.config.as_dict(),
            "options": asdict(request.options),
            "class": self.numeric_class,
            "backend": request.backend,
            "device": self.device,
            "race": request.race,
            "seed": request.seed,
            "tokens": list(request.tokens),
            "inputs": [{"kind": kind, "tokens": tokens} for kind, tokens in self.inputs],
            "arms": [_row(row) for row in self.rows],
            "refused": [
                {"name": r.arm.name, "code": r.refusal.code, "because": r.refusal.because, "hint": r.refusal.hint}
                for r in self.refused
            ],
            "red": [
                {
                    "fault": red.fault,
                    "site": red.site,
                    "expected_check": red.expected,
                    "caught_by": list(red.caught_by),
                    "caught": red.caught,
                    "buffers": list(red.buffer),
                    "detail": red.detail,
                    "seconds": round(red.seconds, 3),
                }
                for red in self.reds
            ],
            "red_not_applicable": [{"fault": name, "because": reason} for name, reason in self.unfit],
            "seconds": round(self.seconds, 3),
        }

    def json_line(self) -> str:
        """`MHCGEN_CHECK_JSON {...}`, one line."""
        return f"{JSON_PREFIX} {json.dumps(self.as_dict(), allow_nan=False)}"


def _row(row: Row) -> dict[str, Any]:
    return {
        "name": row.arm,
        "what": row.what,
        "ok": row.ok,
        "kernels": dict(row.kernels),
        "launches": sum(count for _, count in row.kernels),
        "threads": list(row.threads),
        "sha256": row.sha256,
        "checks": {
            verdict.check: {
                "ok": verdict.ok,
                "counts": _finite(dict(verdict.counts)),
                "detail": verdict.detail,
            }
            for verdict in row.verdicts
        },
        "failed": [verdict.check for verdict in row.verdicts if not verdict.ok],
        "seconds": round(row.seconds, 3),
    }


def _finite(counts: Mapping[str, int | float]) -> dict[str, int | float | str]:
    """JSON has no infinity and no NaN."""
    return {key: value if math.isfinite(value) else str(value) for key, value in counts.items()}


def _cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "-"
    return "ok" if verdict.ok else "FAILED"


def _aligned(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
