"""sync: the weakest barrier where two steps touch the same memory.

```
map    writes s_logits                 map
reduce reads  s_logits         ->      __syncwarp();   // RAW s_logits: map -> reduce
                                       reduce
```
Nothing where each thread reads only what it wrote; `__syncwarp()` where one warp holds every access; the named
barrier of the data warps where the mix work has a warp of its own; `__syncthreads()` otherwise. Between blocks of
a cluster the readers wait until all that is sent to them has been counted, and no other thread waits. It refuses
nothing: an order can always be had.

Deliberately not done here: moving steps to need fewer barriers; the order of steps is place's.
"""

from __future__ import annotations

from dataclasses import replace

from mhcgen.hazards import STRENGTH, in_words, walk_hazards, with_reasons
from mhcgen.log import Decision, LogEntry
from mhcgen.plan import Kernel, Plan
from mhcgen.stages import MIXES


def sync(plan: Plan) -> Plan:
    """Plan -> Plan with barriers in every kernel's body."""
    if "sync" in plan.done:
        return plan
    at_least = "block" if plan.options.sync == "block" else "warp"
    kernels, log = [], list(plan.log)
    for kernel in plan.kernels:
        walked = walk_hazards(kernel, kernel.body, insert=True, at_least=at_least)
        synced = replace(kernel, body=with_reasons(kernel, walked.body))
        kernels.append(synced)
        log.extend(_explain(plan, synced))
    return replace(plan, kernels=tuple(kernels), log=tuple(log))


PRIMITIVE = {
    "warp": "__syncwarp()",
    "data": "barrier of the data warps",
    "block": "__syncthreads()",
    "arrival": in_words("arrival"),
}


def _explain(plan: Plan, kernel: Kernel) -> list[LogEntry]:
    entries: list[LogEntry] = []
    syncs = list(kernel.syncs())
    n = plan.program.dim("n")
    mixes = dict(plan.program.dims).get("R", (2 + n) * n)
    count = f"({2 + n}) * {n} = {mixes} mixes" if mixes == (2 + n) * n else f"{mixes} mixes"
    touched = {name for stage in plan.kernel_stages(kernel) for name in (*stage.reads, *stage.writes)}
    if any(p.layout == "shared" for p in kernel.places) and any(
        plan.program.tensor(name).shape == MIXES for name in touched
    ):
        rounds = -(-mixes // 32)
        entries.append(
            Decision(
                "sync",
                kernel.name,
                "one warp covers the mixes",
                f"{count} "
                + (
                    "fit the 32 lanes of a warp"
                    if rounds == 1
                    else f"exceed 32 lanes, but a warp may stride over them in {rounds} rounds, "
                    "so every access stays in one warp"
                ),
            )
        )
    if not syncs:
        entries.append(Decision("sync", kernel.name, "no barrier", "no two threads touch the same memory"))
    for barrier in syncs:
        weakest = max((hazard.scope for hazard in barrier.because), key=STRENGTH.__getitem__)
        because = {
            "warp": "every access is in one warp",
            "data": "only data warps touch it, and the mix warp must not be kept waiting",
            "block": "the accesses cross warps",
            "arrival": "other blocks of the cluster send it, and only its readers need to wait",
        }[weakest]
        if weakest != barrier.scope:
            because = f"asked for ({PRIMITIVE[weakest]} would do: {because})"
        hazards = "; ".join(str(hazard) for hazard in barrier.because)
        entries.append(Decision("sync", f"{kernel.name}: {hazards}", PRIMITIVE[barrier.scope], because))
    return entries
