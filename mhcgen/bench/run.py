"""`mhcgen bench`: what was asked for, measured in one run, and its report."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from mhcgen.bench.bandwidth import measure_bandwidth
from mhcgen.bench.cases import CASES
from mhcgen.bench.device import Device, Gpu
from mhcgen.bench.facts import facts
from mhcgen.bench.floor import measure_floor
from mhcgen.bench.measure import Bench, Case, Row
from mhcgen.bench.peers import Peer, measure_peer, peers_of
from mhcgen.bench.precompile import precompile
from mhcgen.bench.progress import shown
from mhcgen.bench.rounds import ROUNDS, arm_cases, interleaved
from mhcgen.bench.seed_tables import SeedTables, phase_tables
from mhcgen.build import Config, build_config
from mhcgen.errors import EnvironmentFault, UsageError
from mhcgen.gate.arms import ASKED, BASELINE, chosen
from mhcgen.ir import Program
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Options


@dataclass(frozen=True)
class BenchRequest:
    """What to measure.

    Args:
        config: what is computed.
        options: the schedule asked for.
        tokens: token counts T, each 1 or more.
        arms: comma list of arms or patterns, or `all`; empty for the asked schedule beside the unfused one.
        peers: comma list of rivals, or `all`; empty for none.
        phases: print where the time of a launch goes.
        bandwidth: MiB that the bandwidth probe streams; None leaves it out.
        seed_tables: measure the seed gate's tables as well.
        rounds: how often each arm is timed, in turns.
        cold: let nothing be in the L2 when a launch starts, parameters included.
    """

    config: Config
    options: Options
    tokens: tuple[int, ...] = (1, 8, 64)
    arms: str = ""
    peers: str = ""
    phases: bool = False
    bandwidth: int | None = None
    seed_tables: bool = False
    rounds: int = ROUNDS
    cold: bool = False


@dataclass
class BenchReport:
    """Everything that was measured.

    Args:
        head: facts of the device and the run.
        sections: rows by section, in the order taken: `rows`, `peers`, `phases`, `bandwidth`, `seed ...`.
        notes: what was left out, and why.
    """

    head: dict[str, Any]
    sections: dict[str, list[Row]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: the head, then a list of rows by section."""
        return {**self.head, **self.sections, **({"notes": self.notes} if self.notes else {})}

    def json(self) -> str:
        """The text of a JSON file."""
        return json.dumps(self.as_dict(), indent=1, allow_nan=False) + "\n"

    def table(self) -> str:
        """Tables for people: one a section, microseconds."""
        from mhcgen.bench.report import text

        return text(self.as_dict())


def checked(request: BenchRequest) -> tuple[Program, tuple[Peer, ...]]:
    """The Program and the rivals of a request, before anything is compiled or measured.

    Raises:
        UsageError: `U-TOKENS`, `U-ROUNDS`, `U-BRANCH`, `U-BANDWIDTH`, `U-PEER`, `U-ARM`.
        RefusedError: the asked schedule is not legal.
    """
    if not request.tokens or min(request.tokens) < 1:
        raise UsageError(
            "U-TOKENS", "a launch without tokens takes no time", where="--tokens", hints=("give counts of 1 or more",)
        )
    if request.rounds < 1:
        raise UsageError("U-ROUNDS", f"rounds must be 1 or more, got {request.rounds}", where="--rounds")
    if request.bandwidth is not None and not 1 <= request.bandwidth <= 1 << 16:
        raise UsageError(
            "U-BANDWIDTH",
            f"the probe streams 1 to {1 << 16} MiB, got {request.bandwidth}",
            where="--bandwidth",
            hints=("several times the L2 is a good size, e.g. 1024",),
        )
    program = build_config(request.config)
    opaque = program.stages_of_kind(*OPAQUE_KINDS)
    if opaque:
        raise UsageError(
            "U-BRANCH",
            f"the Program has the opaque stage {opaque[0].name}, whose time is not mhcgen's",
            where="bench",
            hints=("use --scope pre, post or boundary",),
        )
    chosen(program, request.options, request.arms)
    return program, peers_of(request.peers)


def gpu() -> Device:
    """The GPU to measure on.

    Raises:
        EnvironmentFault: `E-NO-GPU`; its notes say what is missing.
    """
    try:
        return Gpu()
    except EnvironmentFault as fault:
        if fault.code == "E-NO-GPU":
            raise
        raise EnvironmentFault(
            "E-NO-GPU",
            "times are taken on a GPU, and none can be used here",
            notes=(f"{fault.code}: {fault.message}", *fault.notes),
            hints=fault.hints,
        ) from fault


def bench(request: BenchRequest, device: Device | None = None, *, progress: bool = False) -> BenchReport:
    """Measure.

    Args:
        request: what.
        device: where; the current GPU if None.
        progress: draw a bar on stderr, where that is a terminal.

    Raises:
        UsageError, RefusedError: as `checked`.
        EnvironmentFault: `E-NO-GPU`.
    """
    program, rivals = checked(request)
    device = gpu() if device is None else device
    if not device.dry and request.arms:
        wanted = arms_of(request, program)
        precompile(((case.program, case.options) for case in wanted), request.options.arch)
    floor = measure_floor(device)
    report = BenchReport(facts(device, floor))
    work = Bench(device, floor, cold=request.cold)
    steps = list(_steps(request, program, rivals, work, report))
    for step in shown(steps, "measuring") if progress else steps:
        step()
    return report


def arms_of(request: BenchRequest, program: Program) -> list[Case]:
    """The arms a request times, the unfused one first."""
    named = [part.strip() for part in request.arms.split(",") if part.strip()] or [ASKED]
    patterns = ["*"] if "all" in named else [BASELINE, *named]
    return arm_cases(name_of(program), program, request.options, patterns)


def _steps(
    request: BenchRequest, program: Program, rivals: Iterable[Peer], work: Bench, report: BenchReport
) -> Iterator[Any]:
    """The parts of a run as callables, so that a bar can count them."""
    what = name_of(program)
    cases = arms_of(request, program)
    asked = Case(what, program, request.options, ASKED)

    def arms(tokens: int) -> None:
        rows = interleaved(work, cases, tokens, request.rounds, first="graph")
        report.sections.setdefault("rows", []).extend(rows)

    def rival(peer: Peer, tokens: int) -> None:
        row = measure_peer(work, peer, asked, tokens)
        if row is None:
            note = f"{peer.name} has no public function for {what}"
            report.notes.extend([] if note in report.notes else [note])
        else:
            report.sections.setdefault("peers", []).append(row)

    def phases() -> None:
        report.sections["phases"] = phase_tables(work, [asked], request.tokens[0])

    def probe(mebibytes: int) -> None:
        c = request.config
        row = measure_bandwidth(work, mebibytes, streams=c.streams, hidden=c.hidden, dtype=c.dtype)
        report.sections["bandwidth"] = [row]

    def seed(tables: Iterator[tuple[str, list[Row]]]) -> None:
        name, rows = next(tables)
        report.sections.setdefault(f"seed {name}", []).extend(rows)

    for tokens in request.tokens:
        yield lambda tokens=tokens: arms(tokens)
    for peer in rivals:
        for tokens in request.tokens:
            yield lambda peer=peer, tokens=tokens: rival(peer, tokens)
    if request.phases:
        yield phases
    if request.bandwidth is not None:
        yield lambda mebibytes=request.bandwidth: probe(mebibytes)
    if request.seed_tables:
        tables = SeedTables(
            {"streams": request.config.streams, "hidden": request.config.hidden}, rounds=request.rounds
        )
        running = tables.run(work)
        yield from [lambda: seed(running)] * tables.count


def name_of(program: Program) -> str:
    """What tables call a Program: the name of its case where it is one of those, else its scope."""
    kinds = {stage.kind for stage in program.stages}
    tail = "+norm+quant" if "quant" in kinds else "+norm" if "norm" in kinds else ""
    if program.scope == "pre":
        return ("pre" if "project" in kinds else "finish") + tail
    if program.scope == "boundary":
        return "boundary" if tail == "+norm" else f"boundary{tail or ' without norm'}"
    return program.scope if program.scope in CASES else f"{program.scope}{tail}"
