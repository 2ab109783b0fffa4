"""stamp: time stamps at phase borders, where asked for.

```
data: load  sumsq | collapse            data: s0 load sumsq s1 | collapse s2
mix:  fetch       | gates  sinkhorn ->  mix:  s0 fetch         | gates s1 sinkhorn s2
```
A phase is what one team does for one stage, waiting included; each team has one stamp more than phases. The
first thread of the team takes them. Results are not touched, so stamped and unstamped emissions agree in every bit.

Deliberately not done here: anything, unless `stamps` was asked for.
"""

from __future__ import annotations

from dataclasses import replace

from mhcgen.log import Decision
from mhcgen.plan import Kernel, Loop, Node, Plan, Step, Sync

TEAMS = ("data", "mix")


def stamp(plan: Plan) -> Plan:
    """Plan -> Plan with stamp steps and phase names in every kernel, or unchanged."""
    if "stamp" in plan.done or not plan.options.stamps:
        return plan
    kernels, log = [], list(plan.log)
    for kernel in plan.kernels:
        if kernel.grid == "once":  # stamps are a token's, and this kernel runs without any
            kernels.append(kernel)
            continue
        stamped = _stamp_kernel(kernel)
        kernels.append(stamped)
        log.append(Decision("stamp", kernel.name, ", ".join(stamped.phases), "time stamps were asked for"))
    return replace(plan, kernels=tuple(kernels), log=tuple(log))


def stamp_count(kernel: Kernel) -> int:
    """Stamps a kernel takes per token: its phases, and one start for each team."""
    return len(kernel.phases) + len({phase.split(":")[0] for phase in kernel.phases})


def phase_borders(kernel: Kernel) -> list[tuple[str, int, int]]:
    """(phase, index of the stamp before it, index of the stamp after it)."""
    borders: list[tuple[str, int, int]] = []
    index, team = -1, ""
    for phase in kernel.phases:
        if phase.split(":")[0] != team:
            team = phase.split(":")[0]
            index += 1
        borders.append((phase, index, index + 1))
        index += 1
    return borders


def _stage_of(node: Node) -> str:
    """Stage of the steps in a node; all steps of a loop belong to one."""
    if isinstance(node, Loop):
        return next(_stage_of(inner) for inner in node.body if not isinstance(inner, Sync))
    assert isinstance(node, Step)
    return node.stage


def _teams_of(node: Node) -> set[str]:
    if isinstance(node, Loop):
        return {team for inner in node.body if not isinstance(inner, Sync) for team in _teams_of(inner)}
    return {node.team}


def _stamp_kernel(kernel: Kernel) -> Kernel:
    phases: list[str] = []
    marks: dict[int, list[tuple[str, int]]] = {}  # after which node of the body, (team, stamp index)
    starts: list[tuple[str, int]] = []
    index = 0
    for team in TEAMS:
        mine = [
            (at, _stage_of(node))
            for at, node in enumerate(kernel.body)
            if not isinstance(node, Sync) and team in _teams_of(node)
        ]
        if not mine:
            continue
        starts.append((team, index))
        index += 1
        for place, (at, stage) in enumerate(mine):
            last = place + 1 == len(mine) or mine[place + 1][1] != stage
            if last:
                phases.append(f"{team}: {stage}")
                marks.setdefault(at, []).append((team, index))
                index += 1
    body: list[Node] = [_step(kernel, team, i, index) for team, i in starts]
    for at, node in enumerate(kernel.body):
        body.append(node)
        body.extend(_step(kernel, team, i, index) for team, i in marks.get(at, ()))
    return replace(kernel, body=tuple(body), phases=tuple(phases))


def _template(kernel: Kernel) -> str:
    """One block stamps for a token: its only one, the leader of its cluster, or the first of those that share it."""
    if kernel.cluster > 1:
        return "stamp_leader"
    return "stamp_first" if kernel.grid_blocks > 1 else "stamp"


def _step(kernel: Kernel, team: str, index: int, count: int) -> Step:
    thread = 32 * kernel.team(team).first_warp
    return Step(
        name=f"stamp.{index}",
        stage="",
        template=_template(kernel),
        team=team,
        fields=(("index", index), ("stamps_of", count), ("thread", thread)),
        constant=True,  # nothing that a predecessor writes is read; its stamps are an array of its own
    )
