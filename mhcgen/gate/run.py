"""The gate itself: plan the arms, compile them side by side, run every job, judge."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mhcgen.build import build_config
from mhcgen.errors import EnvironmentFault
from mhcgen.gate import barriers, checks, planted
from mhcgen.gate.arms import ASKED, BASELINE, Arm, RefusedArm, chosen, made
from mhcgen.gate.checks import CHECKS, Outcomes, Verdict
from mhcgen.gate.execute import POISONS, Array, Loaded, Machine, Outcome, execute, load, machine_of
from mhcgen.gate.jobs import Job, jobs_of, reversed_rows
from mhcgen.gate.report import Report, Row
from mhcgen.gate.request import Request, checked
from mhcgen.ir import Program
from mhcgen.log import Refusal
from mhcgen.passes.geometry import MAX_CLUSTER_TOKENS
from mhcgen.plan import Plan

#: Text to compile for an arm in place of its plan's own; tests hand in tampered text, which the gate must notice.
Tamper = Callable[[Arm, Plan], str]

ORDERS = ("descending", "random", "warp-greedy")

T = TypeVar("T")


@dataclass
class Session:
    """What the parts of one gate run share."""

    request: Request
    program: Program
    machine: Machine
    jobs: list[Job]
    workers: ThreadPoolExecutor | None
    stopped: threading.Event = field(default_factory=threading.Event)

    def execute(self, loaded: Loaded, inputs: Mapping[str, Array], **how: Any) -> Outcome:
        """As `mhcgen.gate.execute.execute`, until the session has ended early.

        Raises:
            CancelledError: it has.
        """
        if self.stopped.is_set():
            raise CancelledError
        return execute(loaded, inputs, **how)

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Start work beside others on the host; on a GPU the caller's thread, stream and device are kept."""
        if self.workers is not None:
            return self.workers.submit(work)
        done: Future[T] = Future()
        done.set_result(work())
        return done


@dataclass(frozen=True)
class Ran:
    """An arm with everything it did."""

    arm: Arm
    plan: Plan
    loaded: Loaded
    outcomes: Outcomes
    again: Outcomes
    orders: Outcomes
    turned: Outcomes
    full: Outcomes
    seconds: float


def run(request: Request, *, program: Program | None = None, tamper: Tamper | None = None) -> Report:
    """Run the gate.

    Args:
        request: what to check.
        program: a hand-built Program in place of that of the request's Config.
        tamper: for tests of the gate: the text to compile for an arm.

    Returns:
        The report; `exit_code` is that of the command line, `error` is set where a planted fault was missed.

    Raises:
        UsageError: a value of the request means nothing.
        RefusedError: the asked arm, or one named in full, is not legal.
        EnvironmentFault: no compiler, no GPU.
        CompileError: emitted text does not compile.
    """
    from mhcgen.gate.red import RED, run_red

    started = time.perf_counter()
    request = checked(request, tuple(RED))
    program = build_config(request.config) if program is None else program
    arms, refused = chosen(program, request.options, request.arms)
    with _session(request, program) as session:
        arms = _runnable(session.machine, arms, refused)
        rows, runs = run_arms(session, arms, tamper)
        reds, unfit = run_red(session, rows, runs) if request.red else ((), ())
        return Report(
            request=request,
            numeric_class=str(program.numeric_class),
            device=session.machine.describe(),
            inputs=tuple((job.kind, job.tokens) for job in session.jobs),
            rows=rows,
            refused=tuple(refused),
            reds=reds,
            unfit=unfit,
            seconds=time.perf_counter() - started,
        )


def _runnable(machine: Machine, arms: list[tuple[Arm, Plan]], refused: list[RefusedArm]) -> list[tuple[Arm, Plan]]:
    """The arms this machine can run; others join the refused ones, but for the one asked for."""
    found = []
    for arm, plan in arms:
        lacking = machine.lacks(plan)
        if not lacking:
            found.append((arm, plan))
            continue
        if arm.name == ASKED:
            hints = ("leave --cluster out",)
            raise EnvironmentFault("E-CLUSTER", lacking, where=f"--backend {machine.name}", hints=hints)
        refused.append(RefusedArm(arm, Refusal("gate", "E-CLUSTER", arm.name, lacking, None, "use --backend cuda")))
    return found


@contextmanager
def _session(request: Request, program: Program) -> Iterator[Session]:
    machine = machine_of(request.backend)
    jobs = jobs_of(program, request)
    if machine.name != "host":
        yield Session(request, program, machine, jobs, None)
        return
    # Compilers are processes of their own and launches leave the interpreter lock, so threads are enough.
    with ThreadPoolExecutor(os.cpu_count() or 1) as workers:
        session = Session(request, program, machine, jobs, workers)
        try:
            yield session
        except BaseException:  # an interrupt too: nothing that waits is started, and what runs ends after its launch
            session.stopped.set()
            workers.shutdown(wait=False, cancel_futures=True)
            raise


def run_arms(
    session: Session, arms: list[tuple[Arm, Plan]], tamper: Tamper | None = None
) -> tuple[tuple[Row, ...], tuple[Ran, ...]]:
    """Rows and runs of every arm; the first is the baseline."""
    assert arms[0][0].name == BASELINE
    futures = [session.submit(_running(session, arm, plan, tamper)) for arm, plan in arms]
    runs: list[Ran] = []
    rows: list[Row] = []
    for future in futures:
        ran = future.result()
        runs.append(ran)
        rows.append(_judge(session, ran, runs[0]))
    return tuple(rows), tuple(runs)


def _running(session: Session, arm: Arm, plan: Plan, tamper: Tamper | None) -> Callable[[], Ran]:
    return lambda: run_arm(session, arm, plan, None if tamper is None else tamper(arm, plan))


def run_arm(session: Session, arm: Arm, plan: Plan, source: str | None = None) -> Ran:
    """Compile one arm and run every job on it."""
    started = time.perf_counter()
    race = session.request.race
    loaded = load(session.machine, plan, source=source, race=race, misaligned=arm.misaligned)
    counted = {"count_accesses": True} if race else {}
    outcomes = [(job, session.execute(loaded, job.inputs, **counted)) for job in session.jobs]
    always = repeated(session)
    again = [
        (job, session.execute(loaded, job.inputs, fill=POISONS[1]))
        for job, outcome in outcomes
        if job in always or checks.doubtful(outcome)
    ]
    orders: list[tuple[Job, Outcome]] = []
    if session.machine.name == "host":
        orders = [
            (job, session.execute(loaded, job.inputs, order=order, seed=session.request.seed))
            for job in ordered(session)
            for order in ORDERS
        ]
    turned = [
        (job, session.execute(loaded, reversed_rows(session.program, job)))
        for job in ordered(session)
        if job.tokens > 1
    ]
    # With few tokens each cluster has one; full ones take ways through the text that no usual token count takes.
    clusters = any(kernel.cluster > 1 for kernel in plan.kernels)
    full = [
        (job, session.execute(loaded, job.inputs, per_cluster=MAX_CLUSTER_TOKENS, **counted))
        for job in session.jobs
        if clusters and job.tokens > 1
    ]
    return Ran(arm, plan, loaded, outcomes, again, orders, turned, full, time.perf_counter() - started)


def repeated(session: Session) -> list[Job]:
    """Jobs run under a second poison whatever the first showed: all where a byte may have any value, else one."""
    jobs = [job for job in session.jobs if job.tokens]
    narrow = any(t.dtype in ("int8", "fp8_e4m3") for t in session.program.of_role("result"))
    return jobs if narrow else jobs[:1]


def ordered(session: Session) -> list[Job]:
    """The job run in several thread orders: the first with more than one token."""
    return ([job for job in session.jobs if job.tokens > 1] or [job for job in session.jobs if job.tokens])[:1]


def _judge(session: Session, ran: Ran, baseline: Ran) -> Row:
    started = time.perf_counter()
    verdicts = judge(session, ran, baseline, made(session.program, ran.arm))
    names = [kernel.name for kernel in ran.plan.kernels]
    return Row(
        arm=ran.arm.name,
        what=ran.arm.what,
        kernels=tuple((name, ran.loaded.module.counts[name]) for name in names),
        threads=tuple(kernel.threads for kernel in ran.plan.kernels),
        sha256=checks.sha256(ran.loaded.source),
        verdicts=verdicts,
        seconds=ran.seconds + time.perf_counter() - started,
    )


def judge(session: Session, ran: Ran, baseline: Ran, plan: Plan) -> tuple[Verdict, ...]:
    """Every check that applies to an arm, in the order of `CHECKS`.

    Args:
        session: of this gate.
        ran: the arm.
        baseline: the unfused arm's run.
        plan: what the arm's name stands for, planned anew.
    """
    usual = (*ran.outcomes, *ran.again, *ran.orders, *ran.turned)
    every = (*usual, *ran.full)
    in_order = {job: outcome for job, outcome in ran.outcomes}
    found: list[Verdict | None] = []
    if ran.arm.name == BASELINE:
        values = references(session, ran)
        found.append(checks.against_reference(session.program, ran.outcomes, values))
        found.append(planted.discriminates(session.program, list(ran.outcomes), values))
    else:
        but = _counts(session.program) if ran.arm.full_loop else ()
        found.append(checks.bits(ran.outcomes, baseline.outcomes, but=but))
    whole = tuple(t.name for t in session.program.of_role("result") if t.shape[0] != "T")
    found.append(checks.rows(ran.outcomes, ran.turned, whole))
    found.append(checks.poison(ran.outcomes, ran.again))
    found.append(checks.ran(ran.loaded, plan, usual))
    found.append(checks.inputs_unchanged(every))
    if ran.full:
        found.append(checks.bits(ran.full, [(job, in_order[job]) for job, _ in ran.full], "clusters"))
    if session.machine.name == "host":
        found.append(checks.findings(every))
        found.append(checks.bits(ran.orders, [(job, in_order[job]) for job, _ in ran.orders], "orders"))
        found.append(barriers.weakened(ran.plan, session.jobs, baseline.outcomes, race=session.request.race))
    if session.request.race:
        found.append(checks.race(every))
        found.append(checks.slab_once(ran.plan, ran.outcomes))
    order = list(CHECKS)
    return tuple(sorted((v for v in found if v is not None), key=lambda v: order.index(v.check)))


def _counts(program: Program) -> tuple[str, ...]:
    """Iteration counts: what an early stop is meant to change."""
    return tuple(name for s in program.stages_of_kind("sinkhorn") for slot, name in s.results if slot == "iterations")


def references(session: Session, ran: Ran) -> list[Mapping[str, Array]]:
    """Float64 values of every job."""
    return [checks.reference_values(session.program, job, outcome) for job, outcome in ran.outcomes]
