"""Barriers on trial: each one removed or weakened in a Plan, re-emitted, and run in race mode.

```
kernel {... sync A ... sync B ...}   ->   kernel_drop0 {... ... sync B ...}      race on A's buffer expected
                                          kernel_drop1 {... sync A ... ...}      race on B's buffer expected
```
All variants of a kernel are one emission, each under a name of its own, so they share one compilation. Barriers
stronger than their hazards need are weakened the other way round: `weakened` must stay clean and bit-equal.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from mhcgen.build import Config, build_config
from mhcgen.errors import ProgramError
from mhcgen.gate import checks
from mhcgen.gate.checks import RACES, Outcomes, Verdict
from mhcgen.gate.execute import POISONS, QUICK, Array, Arrays, HostMachine, execute, load
from mhcgen.gate.jobs import Job
from mhcgen.gate.report import RedRow
from mhcgen.hazards import STRENGTH, in_words, scope_between
from mhcgen.inputs import make_inputs
from mhcgen.ir import Program
from mhcgen.lower import signature, tensors_of
from mhcgen.passes import run_pipeline
from mhcgen.passes.stamp import stamp_count
from mhcgen.passes.sync import sync as choose_barriers
from mhcgen.plan import Kernel, Loop, Options, Plan, Step, Sync, edit_sync, walk
from mhcgen.runtime import HostRunner, geometry
from mhcgen.steps.context import identifier
from mhcgen.verify_plan import verify_plan

#: Tokens of a mutant's launch: races are between the threads of one block, two blocks show that tokens stay apart.
TOKENS = 2

#: The next weaker scope of a barrier that all threads join.
_WEAKER = {"block": "warp", "data": "warp"}


def weakest(kernel: Kernel, sync: Sync) -> Sync:
    """The barrier at the weakest scope that covers all its hazards."""
    if sync.scope == "arrival":
        return sync
    teams = {step.name: step.team for step in kernel.steps()}
    scope = max((hazard.scope for hazard in sync.because), key=STRENGTH.__getitem__)
    joining = {scope_between(kernel, teams[h.first], teams[h.second])[1] for h in sync.because}
    if STRENGTH[scope] >= STRENGTH["block"]:
        return Sync(scope, "all", sync.because)
    return Sync(scope, joining.pop(), sync.because) if len(joining) == 1 else Sync("block", "all", sync.because)


def one_step_weaker(kernel: Kernel, sync: Sync) -> Sync | None:
    """block -> data -> warp; None for a warp barrier, for a wait for what is sent (no barrier of a block
    orders that), and where the hazards need no more."""
    if sync.scope in ("warp", "arrival"):
        return None
    if sync.scope == "block" and kernel.own_mix_warp:
        weaker = Sync("data", "data", sync.because)
    else:
        weaker = Sync(_WEAKER[sync.scope], sync.team, sync.because)
    return weaker if STRENGTH[weakest(kernel, sync).scope] > STRENGTH[weaker.scope] else None


# ---- mutants ----------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Mutant:
    """A kernel with one barrier gone or weaker.

    Args:
        kernel: under a name of its own.
        original: the kernel as planned.
        sync: the barrier as planned.
        fault: `drop-barrier` or `weaken-barrier`.
        how: what was done, for the site of the report.
    """

    kernel: Kernel
    original: Kernel
    sync: Sync
    fault: str
    how: str

    @property
    def buffers(self) -> tuple[str, ...]:
        """Buffers of the barrier's hazards as the executor names them; a finding must be on one of them."""
        return tuple(dict.fromkeys(executor_name(hazard.buffer) for hazard in self.sync.because))


def executor_name(buffer: str) -> str:
    """`s_pre` is `shared s_pre` in findings, `global:x_next` is the parameter."""
    if buffer.startswith("global:"):
        return identifier(buffer.removeprefix("global:"))
    return f"shared {buffer}"


def mutants(kernel: Kernel, faults: tuple[str, ...]) -> Iterator[Mutant]:
    """Every mutant of a kernel, in program order of its barriers."""
    for fault in faults:
        for index, sync in enumerate(kernel.syncs()):
            weaker = one_step_weaker(kernel, sync)
            if fault == "weaken-barrier" and weaker is None:
                continue
            to = None if fault == "drop-barrier" else weaker
            name = f"{kernel.name}_{fault.split('-')[0]}{index}"
            body = edit_sync(kernel.body, index, partial(_become, to))
            how = f"{in_words(sync.scope)} " + ("removed" if to is None else f"made {to.scope}")
            yield Mutant(replace(kernel, name=name, body=body), kernel, sync, fault, how)


def _become(to: Sync | None, _: Sync) -> Sync | None:
    return to


def values_for(program: Program, seed: int) -> Arrays:
    """Every tensor of a Program after a clean unfused run, so that any kernel can be launched alone."""
    inputs = make_inputs(program, TOKENS, seed)
    clean = execute(load(HostMachine(), run_pipeline(program, Options()), race=False, opt=QUICK), inputs)
    return {**inputs, **clean.values, **clean.results}


def iterations_taken(program: Program, config: Config, seed: int) -> int:
    """The most iterations that a token of `values_for` takes; with early stop a 1 x 1 matrix takes few.

    Args:
        program: on trial; of one that is not the config's nothing is known, and all iterations count.
        config: behind it.
        seed: of `values_for`.
    """
    if not config.early_stop or build_config(config) != program:
        return config.iters
    try:
        twin = build_config(replace(config, iterations_out=True))
    except ProgramError:  # a static matrix is made once for all tokens, and no token has a count
        return config.iters
    loaded = load(HostMachine(), run_pipeline(twin, Options()), race=False, opt=QUICK)
    results = execute(loaded, make_inputs(twin, TOKENS, seed)).results
    counts = [array for name, array in results.items() if name.rpartition(".")[2].startswith("iterations")]
    return max((int(count.max()) for count in counts), default=config.iters)


def unreached(kernel: Kernel, iters: int, taken: int) -> tuple[Sync, ...]:
    """Barriers that order nothing but one round of a loop and the next, of loops that have no second round.

    Args:
        kernel: on trial.
        iters: iterations of the Program; those that its loop leaves out stand before it.
        taken: of `iterations_taken`.
    """
    loops = [n for n in walk(kernel.body) if isinstance(n, Loop) and taken - (iters - n.count) < 2]
    looped = {step.name for loop in loops for step in walk(loop.body) if isinstance(step, Step)}
    return tuple(
        sync
        for sync in kernel.syncs()
        if all(hazard.carried and {hazard.first, hazard.second} <= looped for hazard in sync.because)
    )


def try_mutants(
    arm: str,
    plan: Plan,
    kernel: Kernel,
    faults: tuple[str, ...],
    values: Mapping[str, Array],
    left: Collection[Sync] = (),
) -> list[RedRow]:
    """Launch every mutant of a kernel in race mode.

    Args:
        arm: name of the arm, for sites.
        plan: the arm's plan.
        kernel: one of its kernels.
        faults: `drop-barrier`, `weaken-barrier` or both.
        values: of `values_for`.
        left: barriers that are left alone, since these values give them nothing to order.
    """
    found = [mutant for mutant in mutants(kernel, faults) if mutant.sync not in left]
    if not found:
        return []
    started = time.perf_counter()
    mutated = replace(plan, kernels=(kernel, *(mutant.kernel for mutant in found)))
    runner = HostRunner(mutated, race=True, opt=QUICK)
    runner.module()
    # What the untouched kernel shows when it is launched like this is no merit of a mutant.
    control = _launch(plan, kernel, runner, values)
    compiling = (time.perf_counter() - started) / len(found)
    return [_try(arm, plan, mutant, runner, values, control, compiling) for mutant in found]


def _launch(plan: Plan, kernel: Kernel, runner: HostRunner, values: Mapping[str, Array]) -> Any:
    """Report of one kernel of a plan, or of a mutant of it, launched alone."""
    arena = HostMachine().arena()
    parameters = signature(plan, kernel).params
    args: list[Any] = []
    for parameter, name in zip(parameters, tensors_of(plan, kernel), strict=False):
        if parameter.writable:
            tensor = plan.program.tensor(name)
            args.append(arena.filled(plan.program.shape(name, TOKENS), tensor.dtype, POISONS[0], 0))
        else:
            args.append(arena.put(values[name], 0))
    if kernel.phases:
        args.append(arena.filled((TOKENS, stamp_count(kernel), 2), "int64", POISONS[0], 0))
    grid, scalars = geometry(kernel, TOKENS)
    fresh = tuple(parameter.name for parameter in parameters if parameter.writable)
    options = {"cluster": (1, kernel.cluster, 1)} if kernel.cluster > 1 else {}
    return runner.launch(kernel, False, grid, [*args, *scalars], fresh, **options)


def _try(
    arm: str,
    plan: Plan,
    mutant: Mutant,
    runner: HostRunner,
    values: Mapping[str, Array],
    control: Any,
    compiling: float,
) -> RedRow:
    started = time.perf_counter()
    report = _launch(plan, mutant.kernel, runner, values)
    hits = [f for f in report.findings if f.kind in RACES and f.buffer in mutant.buffers]
    detail = hits[0].text if hits else f"race mode reported {_kinds(report)}"
    if control.findings or not control.completed:
        hits, detail = [], f"the kernel with all its barriers is not clean: {_kinds(control)}"
    because = "; ".join(str(hazard) for hazard in mutant.sync.because)
    return RedRow(
        fault=mutant.fault,
        site=f"{arm}: {mutant.original.name}: {mutant.how} ({because})",
        expected="race",
        caught_by=("race",) if hits else (),
        detail=detail,
        buffer=mutant.buffers,
        seconds=compiling + time.perf_counter() - started,
    )


def _kinds(report: Any) -> str:
    return ", ".join(sorted({f"{f.kind} on {f.buffer}" for f in report.findings})) or "nothing"


# ---- over-strong barriers ---------------------------------------------------------------------------
def weakened_plan(plan: Plan) -> Plan | None:
    """The same steps with the barriers that the sync pass chooses itself; None where the user asked for no others.

    Lowering each barrier by its own hazards alone would be wrong: what several block barriers cover is named by
    none of them.
    """
    if plan.options.sync != "block":
        return None
    bare = []
    for kernel in plan.kernels:
        body = kernel.body
        while any(isinstance(node, Sync) for node in walk(body)):
            body = edit_sync(body, 0, partial(_become, None))
        bare.append(replace(kernel, body=body))
    options = replace(plan.options, sync="auto")
    made = choose_barriers(replace(plan, kernels=tuple(bare), options=options, done=("fuse", "place")))
    if made.kernels == plan.kernels:
        return None
    made = replace(made, done=plan.done)
    verify_plan(made)
    return made


def weakened(plan: Plan, jobs: list[Job], baseline: Outcomes, *, race: bool) -> Verdict | None:
    """Run the weakened plan; None where no barrier of the arm is stronger than needed."""
    weaker = weakened_plan(plan)
    if weaker is None:
        return None
    loaded = load(HostMachine(), weaker, race=race)
    outcomes = [(job, execute(loaded, job.inputs)) for job in jobs]
    parts = [checks.bits(outcomes, baseline), checks.findings(outcomes)]
    parts += [checks.race(outcomes)] if race else []
    before, after = (sum(sync.scope == "block" for k in p.kernels for sync in k.syncs()) for p in (plan, weaker))
    detail = next((f"{part.check}: {part.detail}" for part in parts if not part.ok), "")
    wrong = sum(not part.ok for part in parts)
    return Verdict(
        "weakened", not detail, (("failed", wrong), ("block barriers", before), ("still block", after)), detail
    )
