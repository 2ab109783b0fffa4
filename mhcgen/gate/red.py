"""Red arms: faults planted on purpose, each of which a named check must catch.

A gate that has not been seen to fail proves nothing. Each fault has the check that must catch it; being caught by
another one, or by a crash, does not count, and neither does a check that the clean arm fails too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mhcgen.combs import comb_kind
from mhcgen.gate import barriers, checks, faults
from mhcgen.gate.arms import BASELINE
from mhcgen.gate.checks import Outcomes, Verdict
from mhcgen.gate.execute import POISONS, QUICK, Arrays, execute, load
from mhcgen.gate.faults import Fault
from mhcgen.gate.jobs import Job, jobs_of
from mhcgen.gate.planted import Wrong, iterations, shows
from mhcgen.gate.report import RedRow, Row
from mhcgen.gate.request import SMALL_TOKENS
from mhcgen.inputs import DISCRIMINATING
from mhcgen.ir import Program
from mhcgen.plan import Kernel, Plan, Sync
from mhcgen.stages import COMB_STAGES, LOW_RANK

if TYPE_CHECKING:
    from mhcgen.gate.run import Ran, Session

BARRIER_FAULTS = ("drop-barrier", "weaken-barrier")


@dataclass(frozen=True)
class RedArm:
    """A fault.

    Args:
        name: stable name.
        what: one line for people.
        applies: why it does not apply to a Program; empty where it does.
        check: the check that must catch it in an arm. In the baseline, which no arm is there to differ from,
            `reference` must catch what `bits` catches elsewhere.
        plant: the broken emissions of one arm, none where the arm has no place for it; None for barriers.
        may_hide: the same fault in the reference, where the Program may leave nothing of it to be seen.
    """

    name: str
    what: str
    applies: Callable[[Program], str]
    check: str
    plant: Callable[[Program, Plan], Iterator[Fault]] | None = None
    may_hide: Wrong | None = None


def _always(program: Program) -> str:
    return ""


def _kind(*kinds: str) -> Callable[[Program], str]:
    def applies(program: Program) -> str:
        missing = [kind for kind in kinds if not program.stages_of_kind(kind)]
        return f"the Program has no stage of kind {missing[0]}" if missing else ""

    return applies


def _streams(least: int, why: str, kind: str) -> Callable[[Program], str]:
    def applies(program: Program) -> str:
        return _kind(kind)(program) or (f"needs n >= {least}: {why}" if program.dim("n") < least else "")

    return applies


def _rooted(program: Program) -> str:
    return "" if program.stages_of_kind("rowsq_streams", "norm_streams") else _kind("rowsq")(program)


def _summed(program: Program) -> str:
    kind = "gated_mean" if program.stages_of_kind("gated_mean") else "collapse"
    return _streams(2, "there is one stream", kind)(program)


def _squared(program: Program) -> str:
    return "" if program.stages_of_kind("norm_streams") else _kind("rowsq")(program)


def _asymmetric(program: Program) -> str:
    """Some kinds of matrix are symmetric; n x n ones are at n = 2, where rows and columns sum to 1."""
    n = program.dim("n")
    matrices = program.stages_of_kind(*COMB_STAGES)
    if not matrices:
        return _kind("sinkhorn")(program)
    if n < 3:
        return "needs n >= 3: a 2 x 2 doubly stochastic matrix is symmetric"
    symmetric = [stage.attr("comb") for stage in matrices if comb_kind(stage).aim(n, 1) is None]
    return f"a matrix of kind {symmetric[0]} is symmetric" if symmetric else ""


def _short(program: Program) -> str:
    problem = _streams(2, "a 1 x 1 matrix does not change from one iteration to the next", "sinkhorn")(program)
    few = any(stage.attr("iters") < 2 for stage in program.stages_of_kind("sinkhorn"))
    return problem or ("there is one iteration, and none cannot be emitted" if few else "")


def _two_eps(program: Program) -> str:
    problem = _kind("rowsq", "sinkhorn")(program)
    if problem:
        return problem
    rms = {float(s.attr("eps")) for s in program.stages_of_kind("rowsq")}
    hc = {float(s.attr("eps")) for s in program.stages_of_kind("sinkhorn")}
    if len(rms | hc) < 2:
        return f"both eps are {rms.pop()}, so nothing can tell them apart (try --hc-eps 1e-2)"
    return "" if len(rms) == len(hc) == 1 else "the stages have more than two eps"


def _weighted(program: Program) -> str:
    if not any("weight" in dict(stage.operands) for stage in program.stages_of_kind("norm")):
        return "the Program has no norm with a weight"
    return "H = 1: one weight has no order" if program.dim("H") == 1 else ""


def _padded(program: Program) -> str:
    n = program.dim("n")
    whole = f"n = {n} is a power of two: no lane is padding" if n & (n - 1) == 0 else ""
    return _kind("sinkhorn")(program) or whole


RED: dict[str, RedArm] = {
    arm.name: arm
    for arm in (
        RedArm("drop-barrier", "each chosen barrier removed in turn", _always, "race"),
        RedArm("weaken-barrier", "each block or data barrier weakened one step in turn", _always, "race"),
        RedArm(
            "transpose-comb",
            "comb stored as (to_stream, from_stream)",
            _asymmetric,
            "bits",
            faults.transpose_comb,
        ),
        RedArm(
            "skip-stream",
            "collapse leaves out the last stream",
            _summed,
            "bits",
            faults.skip_stream,
        ),
        RedArm(
            "short-iteration",
            "one Sinkhorn iteration too few",
            _short,
            "bits",
            faults.short_iteration,
            iterations(-1),
        ),
        RedArm(
            "long-iteration",
            "one Sinkhorn iteration too many",
            _streams(2, "a 1 x 1 matrix does not change from one iteration to the next", "sinkhorn"),
            "bits",
            faults.long_iteration,
            iterations(1),
        ),
        RedArm("stale-output", "a row, then a result, left unwritten", _always, "poison", faults.stale_output),
        RedArm("swap-eps", "the eps of RMS and gates exchanged", _two_eps, "bits", faults.swap_eps),
        RedArm(
            "swap-norm-weight", "norm weight in reverse: z and q move", _weighted, "bits", faults.swap_norm_weight
        ),
        RedArm(
            "eps-outside-root", "eps added after the root", _rooted, "bits", faults.eps_outside_root
        ),
        RedArm("post-eps", "post gates get the eps of pre", _kind("gates"), "bits", faults.post_eps),
        RedArm(
            "max-over-padding", "padding lanes take part in a reduction", _padded, "bits", faults.max_over_padding
        ),
        RedArm("borrowed-row", "the norm of the token before", _squared, "bits", faults.borrowed_row),
    )
}


def run_red(
    session: Session, rows: Sequence[Row], runs: Sequence[Ran]
) -> tuple[tuple[RedRow, ...], tuple[tuple[str, str], ...]]:
    """Plant the faults of a request in every arm that ran.

    Args:
        session: of the gate.
        rows: the clean verdicts.
        runs: the clean arms, baseline first.

    Returns:
        A row per planted fault, and the red arms that do not apply with the reason.
    """
    program = session.program
    unfit = [(name, reason) for name in session.request.red if (reason := RED[name].applies(program))]
    wanted = [RED[name] for name in session.request.red if not RED[name].applies(program)]
    # Chosen to be small and complete: what a user left out of the clean run is no excuse to miss a fault.
    jobs = jobs_of(
        program, replace(session.request, inputs=("uniform", *DISCRIMINATING), tokens=(SMALL_TOKENS,))
    )
    clean = [(job, execute(runs[0].loaded, job.inputs)) for job in jobs]
    for red in [red for red in wanted if red.may_hide is not None and not _shown(program, clean, red.may_hide)]:
        wanted.remove(red)
        unfit.append((red.name, "nothing of it is left to be seen: on every input the matrix has converged before"))
    futures: list[tuple[str, Future[list[RedRow]]]] = []
    kinds = tuple(red.name for red in wanted if red.plant is None)
    if kinds:
        values = barriers.values_for(program, session.request.seed)
        config = session.request.config
        taken = barriers.iterations_taken(program, config, session.request.seed)
        for ran in runs:
            for kernel in ran.plan.kernels:
                left = barriers.unreached(kernel, config.iters, taken)
                futures.append((ran.arm.name, session.submit(_mutating(ran, kernel, kinds, values, left))))
                unfit += [(kind, _AT_ONCE.format(ran.arm.name)) for kind in kinds if left]
        unfit = list(dict.fromkeys(unfit))  # a trunk has a kernel a site
    for red in wanted:
        if red.plant is not None:
            # The reference check sees the baseline's inner values; of an arm there are only results to compare.
            hosts = runs if red.check != "bits" or _exposed(program) else runs[:1]
            futures += [(ran.arm.name, session.submit(_planting(session, red, ran, jobs, clean))) for ran in hosts]
    found = [(name, row) for name, future in futures for row in future.result()]
    reds = [_against_clean(row, name, rows) for name, row in found]
    planted = {row.fault for row in reds}
    unfit += [(red.name, "no chosen arm has a place for it") for red in wanted if red.name not in planted]
    order = {name: index for index, name in enumerate(RED)}
    return tuple(sorted(reds, key=lambda row: order[row.fault])), tuple(unfit)


_AT_ONCE = "to barriers of {} between two rounds of the Sinkhorn: every token leaves it in the first"


def _mutating(
    ran: Ran, kernel: Kernel, kinds: tuple[str, ...], values: Arrays, left: tuple[Sync, ...]
) -> Callable[[], list[RedRow]]:
    return lambda: barriers.try_mutants(ran.arm.name, ran.plan, kernel, kinds, values, left)


def _planting(
    session: Session, red: RedArm, ran: Ran, jobs: list[Job], clean: Outcomes
) -> Callable[[], list[RedRow]]:
    assert red.plant is not None
    plant = red.plant
    return lambda: [
        _plant(session, red, ran, fault, jobs, clean) for fault in plant(session.program, ran.plan)
    ]


def _plant(session: Session, red: RedArm, ran: Ran, fault: Fault, jobs: list[Job], clean: Outcomes) -> RedRow:
    started = time.perf_counter()
    request = session.request
    loaded = load(
        session.machine, fault.plan, source=fault.source, race=request.race, misaligned=ran.arm.misaligned, opt=QUICK
    )
    given = [(job, job.inputs if fault.inputs is None else fault.inputs(job.inputs)) for job in jobs]
    outcomes = [(job, execute(loaded, inputs)) for job, inputs in given]
    again = [
        (job, execute(loaded, inputs, fill=POISONS[1]))
        for (job, inputs), (_, outcome) in zip(given, outcomes, strict=True)
        if job is jobs[0] or checks.doubtful(outcome)
    ]
    expected = red.check
    verdicts = [checks.bits(outcomes, clean)]
    if ran.arm.name == BASELINE:
        expected = "reference" if red.check == "bits" else red.check
        values = [checks.reference_values(session.program, job, outcome) for job, outcome in outcomes]
        verdicts.append(checks.against_reference(session.program, outcomes, values))
    verdicts += [checks.poison(outcomes, again), checks.inputs_unchanged(outcomes), checks.findings(outcomes)]
    verdicts += [checks.race(outcomes)] if request.race else []
    caught = tuple(verdict.check for verdict in verdicts if not verdict.ok)
    detail = next((v.detail for v in verdicts if v.check == expected), "")
    unmoved = _unmoved(fault, verdicts[0])
    if unmoved:
        caught = tuple(check for check in caught if check != expected)
        detail = f"{', '.join(unmoved)} did not move"
    return RedRow(
        fault=red.name,
        site=f"{ran.arm.name}: {fault.where}",
        expected=expected,
        caught_by=caught,
        detail=detail or f"{expected} saw nothing wrong",
        seconds=time.perf_counter() - started,
    )


def _shown(program: Program, clean: Outcomes, wrong: Wrong) -> bool:
    """Whether the reference with a fault leaves its bounds on any job, by so much that an emission must too."""
    return any(
        shows(program, job, checks.reference_values(program, job, ran), wrong, margin=2.0) for job, ran in clean
    )


def _exposed(program: Program) -> bool:
    """Whether gates and comb are results. A trunk shows them through y alone, where rounding may hide a fault."""
    makers = program.stages_of_kind("gates", *LOW_RANK, *COMB_STAGES)
    made = [name for s in makers for slot, name in s.results if slot not in ("logits", "bottleneck")]
    return all(program.tensor(name).role == "result" for name in made)


def _unmoved(fault: Fault, bits: Verdict) -> list[str]:
    """Results that the fault must move and did not."""
    counts = dict(bits.counts)
    return [name for name in fault.moves if not counts.get(name)]


def _against_clean(red: RedRow, arm: str, rows: Sequence[Row]) -> RedRow:
    """A check that the clean arm fails as well has caught nothing."""
    row = next(row for row in rows if row.arm == arm)
    verdict = row.verdict(red.expected)
    if verdict is None or verdict.ok:
        return red
    return replace(
        red,
        caught_by=tuple(check for check in red.caught_by if check != red.expected),
        detail=f"the clean arm fails {red.expected} too: {verdict.detail}",
    )
