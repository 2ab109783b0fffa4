"""Search the legal schedules of a request for the fastest on this GPU.

```
as asked -> cluster 1 2 4 8 16 -> slab -> threads -> mix warp -> placement -> again, while anything gets better
```
One axis is varied at a time, the others stay at their best. A candidate must give the bits of the unfused emission
on poisoned buffers before it is timed, and takes the lead only if it is more than a hundredth faster. What the user
fixed is not varied. Refused schedules are skipped, and equal texts are timed once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from mhcgen.bench.device import Device
from mhcgen.bench.floor import measure_floor
from mhcgen.bench.measure import Bench, Case, Prepared, error_text
from mhcgen.bench.precompile import precompile
from mhcgen.bench.progress import shown
from mhcgen.classes import regime_of
from mhcgen.errors import CheckFailed, RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.passes import run_pipeline
from mhcgen.plan import MIX_WARPS, PLACEMENTS, SLABS, Options, Plan
from mhcgen.tuned import AXES, Tuned, store

#: What each axis is tried at. Odd counts of warps are data warps and one for the mixes.
VALUES: dict[str, tuple[Any, ...]] = {
    "cluster": (None, 1, 2, 4, 8, 16),
    "slab": SLABS,
    "threads": (None, 64, 128, 160, 256, 288, 512, 544, 768, 1024),
    "mix_warp": MIX_WARPS,
    "placement": PLACEMENTS,
}
#: A candidate must be faster than the leader by this share: less is noise.
MARGIN = 0.01
PASSES = 2

#: Microseconds of a prepared launch; tests hand in their own.
Timer = Callable[[Prepared, Case, int], float]


@dataclass(frozen=True)
class Trial:
    """One candidate.

    Args:
        changes: values of the axes that differ from what was asked for.
        us: times by token count, microseconds; empty where it was not timed.
        error: why it was not.
    """

    changes: dict[str, Any]
    us: tuple[float, ...] = ()
    error: str = ""

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.changes.items()) or "as asked for"


@dataclass
class TuneReport:
    """What a search found.

    Args:
        regime: token class.
        tokens: token counts timed.
        trials: in the order tried; the first is the schedule as asked for.
        best: the fastest.
        gpu: name of the GPU.
        refused: how many candidates the passes refused.
        kept: file it is kept in; empty where it was not.
    """

    regime: str
    tokens: tuple[int, ...]
    trials: list[Trial] = field(default_factory=list)
    best: Trial = field(default_factory=lambda: Trial({}))
    gpu: str = ""
    refused: int = 0
    kept: str = ""

    def table(self) -> str:
        """Trials from the fastest on, and what was kept."""
        timed = sorted((t for t in self.trials if t.us), key=lambda t: sum(t.us))
        heading = ["us", *(f"T = {t}" for t in self.tokens)]
        rows = [heading, *([str(t), *(f"{us:.2f}" for us in t.us)] for t in timed)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(heading))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"not timed: {trial}: {trial.error}" for trial in self.trials if trial.error]
        lines.append(f"{len(self.trials)} schedules tried on {self.gpu}, {self.refused} refused")
        lines.append(f"class {self.regime}: {self.best}" + (f", kept in {self.kept}" if self.kept else ""))
        return "\n".join(lines) + "\n"


@dataclass
class _Search:
    """The state of one search."""

    bench: Bench
    program: Program
    asked: Options
    report: TuneReport
    timer: Timer
    seen: dict[str, Trial] = field(default_factory=dict)

    def plan(self, options: Options) -> Plan | None:
        try:
            return run_pipeline(self.program, options)
        except (RefusedError, UsageError):
            return None

    def trial(self, options: Options) -> Trial | None:
        """The candidate, timed or not; None where it is refused or its text was tried before."""
        plan = self.plan(options)
        if plan is None:
            self.report.refused += 1
            return None
        text = _text(plan)
        if text in self.seen:
            return None
        changes = {a: getattr(options, a) for a in AXES if getattr(options, a) != getattr(self.asked, a)}
        made = self._timed(Trial(changes), options)
        self.seen[text] = made
        self.report.trials.append(made)
        return made

    def _timed(self, trial: Trial, options: Options) -> Trial:
        case = Case("tune", self.program, options)
        try:
            times = [self.timer(self.bench.prepare(case, t), case, t) for t in self.report.tokens]
        except Exception as error:  # noqa: BLE001  (one candidate less; the search goes on)
            return replace(trial, error=error_text(error))
        return replace(trial, us=tuple(round(us, 4) for us in times))


def _text(plan: Plan) -> str:
    """The text of a plan but for the line that names its options."""
    return "".join(line for line in plan.source.splitlines(True) if not line.startswith("// command:"))


def candidates(options: Options, asked: Options, axis: str, values: Iterable[Any]) -> Iterator[Options]:
    """The schedules that differ from `options` in one axis; none where the user fixed it."""
    if getattr(asked, axis) != getattr(Options(), axis):
        return
    for value in values:
        if value != getattr(options, axis):
            yield replace(options, **{axis: value})


def tune(
    program: Program,
    options: Options,
    tokens: Iterable[int],
    device: Device,
    *,
    timer: Timer | None = None,
    values: Mapping[str, tuple[Any, ...]] = VALUES,
    keep: bool = True,
    progress: bool = False,
) -> TuneReport:
    """Search, and keep the winner in the cache directory.

    Args:
        program: the unfused Program, without opaque stages.
        options: the schedule as asked for; axes with a value of their own stay as they are.
        tokens: token counts of one class; `options.regime` becomes that class.
        device: where candidates are checked and timed.
        timer: microseconds of a launch; medians of graph replays if None.
        values: what each axis is tried at; an axis that is not named is left as it is.
        keep: store the winner.
        progress: draw a bar on stderr, where that is a terminal.

    Raises:
        UsageError: `U-TOKENS`, token counts of two classes or none.
        RefusedError: the schedule as asked for is not legal.
        CheckFailed: `C-TUNE`, it cannot be run, or its bits are wrong.
    """
    counts = tuple(tokens)
    regimes = {regime_of(count) for count in counts}
    if len(regimes) != 1 or min(counts) < 1:
        raise UsageError(
            "U-TOKENS", "one search is for token counts of one class, each 1 or more", where="--tokens",
            notes=tuple(f"T = {count} is of class {regime_of(count)}" for count in counts),
            hints=("search each class by itself",),
        )
    asked = replace(options, regime=regimes.pop(), stamps=False, scalar=False)
    run_pipeline(program, asked)
    bench = Bench(device, measure_floor(device))
    report = TuneReport(asked.regime, counts, gpu=device.describe()["gpu"])

    def by_graph(prepared: Prepared, _: Case, count: int) -> float:
        return bench.timed(prepared, count, "graph").median

    search = _Search(bench, program, asked, report, timer or by_graph)
    first = search.trial(asked)
    if first is None or not first.us:
        raise CheckFailed("C-TUNE", f"the schedule as asked for cannot be timed: {first.error if first else ''}")
    report.best, leader = first, asked
    for _ in range(PASSES):
        before = leader
        for axis in shown(AXES, f"tuning {asked.regime}") if progress else AXES:
            tried = list(candidates(leader, asked, axis, values.get(axis, ())))
            if not device.dry:
                legal = [o for o in tried if search.plan(o) is not None]
                precompile(((program, o) for o in legal), asked.arch)
            for candidate in tried:
                trial = search.trial(candidate)
                if trial is not None and trial.us and _share(trial, first) < _share(report.best, first) - MARGIN:
                    report.best, leader = trial, candidate
        if leader == before:
            break
    if keep:
        today = datetime.now(UTC).strftime("%Y-%m-%d")
        tuned = Tuned(report.gpu, report.best.changes, counts, report.best.us, first.us, today)
        report.kept = store(program, asked, tuned).name
    return report


def _share(trial: Trial, first: Trial) -> float:
    """Time of a trial as a share of the first one's, the mean over token counts."""
    return sum(us / default for us, default in zip(trial.us, first.us, strict=True)) / len(first.us)
