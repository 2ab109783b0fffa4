"""The score of the planted faults: every red arm that applies, for every model, on one small shape each.

The shape has three streams, so that lanes beyond n exist and a matrix is told from its transpose (two where a model
has no form for three), an hc eps unlike the RMS eps where the model has one, and a norm with a weight, so that every
fault has a place.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mhcgen.build import MAX_STREAMS, Config, configure
from mhcgen.gate.red import RED
from mhcgen.gate.report import RedRow, Report
from mhcgen.gate.request import Request
from mhcgen.gate.run import run
from mhcgen.models import MODELS, model
from mhcgen.plan import Options

#: Hidden size: a whole warp of columns and a tail.
HIDDEN = 40


@dataclass(frozen=True)
class ModelScore:
    """Planted faults of one model.

    Args:
        model: its name.
        streams: n of the shape.
        rows: a row per planted fault.
        unfit: red arms that do not apply, with the reason.
    """

    model: str
    streams: int
    rows: tuple[RedRow, ...]
    unfit: tuple[tuple[str, str], ...]

    def counts(self, fault: str) -> tuple[int, int]:
        """Faults of a red arm that were caught by the check that must catch them, and all of that arm."""
        mine = [row for row in self.rows if row.fault == fault]
        return sum(row.caught for row in mine), len(mine)


@dataclass(frozen=True)
class Score:
    """Planted faults of several models."""

    models: tuple[ModelScore, ...]
    faults: tuple[str, ...]

    @property
    def planted(self) -> int:
        """Faults that were planted."""
        return sum(len(made.rows) for made in self.models)

    @property
    def missed(self) -> tuple[tuple[str, RedRow], ...]:
        """Model and row of every fault that the check that must catch it did not."""
        return tuple((made.model, row) for made in self.models for row in made.rows if not row.caught)

    def table(self) -> str:
        """Caught of planted, by model and fault; `-` where a fault does not apply."""
        width = max(len(made.model) for made in self.models)
        lines = []
        for fault in self.faults:
            cells = []
            for made in self.models:
                caught, planted = made.counts(fault)
                cells.append(f"{made.model:{width}} {caught}/{planted}" if planted else f"{made.model:{width}} -")
            lines += [fault, *(f"  {cell}" for cell in cells)]
        for name, row in self.missed:
            lines.append(f"MISSED {name}: {row.fault} at {row.site}: expected {row.expected}; {row.detail}")
        kinds = {row.fault for made in self.models for row in made.rows}
        lines.append(
            f"{self.planted - len(self.missed)} of {self.planted} planted faults caught: {len(kinds)} kinds, "
            f"{len(self.models)} models"
        )
        return "\n".join(lines) + "\n"


def shape(name: str) -> Config:
    """The small configuration of a model in which every fault that applies has a place."""
    spec = model(name)
    legal = spec.legal_streams(MAX_STREAMS)
    streams = 3 if 3 in legal else min(legal, key=lambda n: (abs(n - 4), n))
    told_apart = {"hc_eps": 1e-2} if spec.uses_hc_eps and spec.hc_eps == spec.rms_eps else {}
    return configure(name, streams=streams, hidden=HIDDEN, norm=True, projection="fma", **told_apart)


def score(
    models: Iterable[str] = (), faults: Iterable[str] = (), *, backend: str = "host", fuse: str = "pre-norm"
) -> Score:
    """Plant every fault that applies in the unfused and the fused emission of each model.

    Args:
        models: names; all of them where none is given.
        faults: red arms; all of them where none is given.
        backend: `host`, or `cuda` for those faults that need no race mode.
        fuse: the fusion beside the unfused emission.
    """
    wanted = tuple(faults) or tuple(RED)
    found = []
    for name in tuple(models) or tuple(MODELS):
        config = shape(name)
        report: Report = run(Request(config, Options(fuse=fuse), tokens=(3,), backend=backend, red=wanted))
        found.append(ModelScore(name, config.streams, report.reds, report.unfit))
    return Score(tuple(found), wanted)
