"""Where the time of one launch goes: medians of the stamps that a kernel takes at the borders of its phases.

```
data  load sumsq ....| wait | collapse          each team has its own clock line; a phase is what the
mix          fetch   | gates | sinkhorn         team did for one stage, its waiting included
```
Cycles are of the SM that ran the token; nanoseconds are the GPU's global timer, which on some GPUs ticks
more coarsely than phases last. Stamping changes no bit of a result, which is checked here too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.bench.measure import Bench, Case, Unmeasurable
from mhcgen.passes.stamp import phase_borders
from mhcgen.plan import Kernel

LAUNCHES = 60

#: Of one launch: int64 [T, stamps, 2], nanoseconds and cycles.
Stamps = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Phase:
    """One phase of one team.

    Args:
        team: `data` or `mix`.
        stage: what it worked for.
        begin: cycles from the kernel's first stamp to the start of the phase, median.
        cycles: SM cycles it took, median.
        ns: nanoseconds it took, median.
        share: its part of its team's cycles, 0 to 1.
    """

    team: str
    stage: str
    begin: float
    cycles: float
    ns: float
    share: float


@dataclass(frozen=True)
class PhaseTable:
    """The phases of one kernel.

    Args:
        kernel: its name.
        threads, cluster: of its schedule.
        samples: launches times tokens that the medians are over.
        cycles, ns: from the first stamp to the last of any team, median.
        phases: in order, team by team.
    """

    kernel: str
    threads: int
    cluster: int
    samples: int
    cycles: float
    ns: float
    phases: tuple[Phase, ...]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def lines(self) -> list[tuple[str, ...]]:
        """Rows of a table for people, with a heading."""
        head = ("team", "phase", "begin", "cycles", "ns", "share")
        rows = [
            (p.team, p.stage, f"{p.begin:.0f}", f"{p.cycles:.0f}", f"{p.ns:.0f}", f"{100 * p.share:.1f} %")
            for p in self.phases
        ]
        return [head, *rows, ("all", self.kernel, "0", f"{self.cycles:.0f}", f"{self.ns:.0f}", "")]


def phases_of(kernel: Kernel, launches: Sequence[Stamps]) -> PhaseTable:
    """Medians over every token of every launch.

    Args:
        kernel: a stamped kernel.
        launches: its stamps, one array a launch.
    """
    taken = np.concatenate([np.asarray(stamps, np.int64) for stamps in launches])
    borders = phase_borders(kernel)
    first = taken.min(axis=1)
    span = taken.max(axis=1) - first
    cycles = [float(np.median(taken[:, after, 1] - taken[:, before, 1])) for _, before, after in borders]
    totals: dict[str, float] = {}
    for (name, _, _), count in zip(borders, cycles, strict=True):
        team = name.split(":")[0]
        totals[team] = totals.get(team, 0.0) + count
    phases = []
    for (name, before, after), count in zip(borders, cycles, strict=True):
        team, _, stage = name.partition(": ")
        phases.append(
            Phase(
                team,
                stage,
                begin=float(np.median(taken[:, before, 1] - first[:, 1])),
                cycles=count,
                ns=float(np.median(taken[:, after, 0] - taken[:, before, 0])),
                share=count / totals[team] if totals[team] else 0.0,
            )
        )
    return PhaseTable(
        kernel.name,
        kernel.threads,
        kernel.cluster,
        samples=len(taken),
        cycles=statistics.median(map(float, span[:, 1])),
        ns=statistics.median(map(float, span[:, 0])),
        phases=tuple(phases),
    )


def measure_phases(bench: Bench, case: Case, tokens: int = 1, launches: int = LAUNCHES) -> tuple[PhaseTable, ...]:
    """The phase table of every kernel of a case.

    Args:
        bench: where.
        case: what; its schedule is stamped here.
        tokens: T of each launch.
        launches: how many are stamped, after one that is not counted.

    Raises:
        Unmeasurable: stamping changed bits, or no kernel has a phase.
    """
    module = bench.module(case.program, replace(case.options, stamps=True))
    differing = bench.differing_bytes(module, tokens)
    if differing:
        raise Unmeasurable(f"{differing} bytes of the stamped emission differ from the unfused one")
    inputs, outputs = bench.inputs(case.program, tokens), bench.outputs(module, tokens)
    taken: dict[str, list[Stamps]] = {}
    for i in range(launches + 1):
        module(out=outputs, **inputs)
        for name, stamps in module.stamps.items():
            if i:
                taken.setdefault(name, []).append(bench.device.fetch(stamps))
    kernels = [kernel for kernel in module.plan.kernels if kernel.name in taken]
    if not kernels:
        raise Unmeasurable("no kernel of this plan has phases")
    return tuple(phases_of(kernel, taken[kernel.name]) for kernel in kernels)
