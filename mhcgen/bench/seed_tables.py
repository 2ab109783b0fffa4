"""The tables of the seed gate: every arm at decode, what an iteration costs, and what fusing saves.

fp32 streams in the seed's class (ieee, fp64 sum of squares), T = 1, 4, 8, early stop off unless a row says so. The
`us` of a row is the time per call among 300 queued ones, the median over rounds in which arms take turns.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from mhcgen.bench.measure import Bench, Case, Row, Unmeasurable, describe, error_text
from mhcgen.bench.parts import only
from mhcgen.bench.phases import measure_phases
from mhcgen.bench.rounds import ROUNDS, arm_cases, interleaved
from mhcgen.bench.timing import BACK_TO_BACK, Timing
from mhcgen.build import build
from mhcgen.ir import Program
from mhcgen.plan import Options

TOKENS = (1, 4, 8)
ITERATIONS = (1, 10, 20, 40)

#: Arms of the gate that the tables show, as patterns: unfused, the seed's launches, v1, v2, v3 by placement and
#: block, v4 by block.
ARMS = (
    "unfused", "seed", "v1", "v2", "v3.*.128", "v3.*.512", "v4.512", "v4.512.shared", "v4.1024", "v4.1024.shared",
    "v4.auto",
)
#: Arms whose cost per iteration is of interest: they differ in where the matrix is.
ITERATED = ("v1", "v2", "v3.row.512", "v3.element.512", "v3.registers.512", "v4.auto")
STAMPED = ("v3.element.512", "v4.auto")
#: Threads of the kernels with and without norm and quant; None chooses.
BLOCKS: tuple[int | None, ...] = (512, 1024, None)
SEPARATE = "rowsq+gates+sinkhorn+collapse,norm+quant"
CONFIG: dict[str, Any] = {"dtype": "fp32", "functions": "ieee", "sumsq": "fp64"}


def arms_of(program: Program, patterns: Iterable[str]) -> list[Case]:
    """The arms of the pre chain whose names match."""
    return arm_cases("finish", program, Options(fuse="pre"), patterns)


def slope(points: dict[int, float]) -> tuple[float, float]:
    """Least-squares (slope, intercept) of time over iterations, microseconds."""
    xs, ys = list(points), list(points.values())
    mean_x, mean_y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - mean_x) ** 2 for x in xs)
    rise = sum((x - mean_x) * (y - mean_y) for x, y in points.items()) / spread if spread else 0.0
    return rise, mean_y - rise * mean_x


def iteration_cases(config: dict[str, Any], arms: Iterable[str]) -> dict[int, list[Case]]:
    """The arms at every count of `ITERATIONS`."""
    programs = {iters: build(**{**CONFIG, **config, "iters": iters}) for iters in ITERATIONS}
    return {iters: arms_of(program, arms) for iters, program in programs.items()}


def iterations(
    bench: Bench, config: dict[str, Any], tokens: int, rounds: int, arms: Iterable[str] = ITERATED
) -> list[Row]:
    """What an iteration costs each arm, and what is left at none."""
    points: dict[str, dict[int, float]] = {}
    for iters, cases in iteration_cases(config, arms).items():
        for row in interleaved(bench, cases, tokens, rounds):
            if "error" not in row:
                points.setdefault(str(row["note"]), {})[iters] = row["us"]
    found = []
    for arm, times in points.items():
        rise, rest = slope(times)
        found.append(
            {
                "what": "iterations", "note": arm, "T": tokens, "us_by_iterations": times,
                "us_per_iteration": round(rise, 4), "us_at_none": round(rest, 3),
            }
        )
    return found


def early_stop_cases(config: dict[str, Any], arms: Iterable[str]) -> list[Case]:
    """The same arms with the early stop off and on; results are the same bits."""
    return [
        replace(case, note=f"{case.note}, early stop {'on' if stop else 'off'}")
        for stop in (False, True)
        for case in arms_of(build(**{**CONFIG, **config, "early_stop": stop}), arms)
    ]


def norm_quant_cases(config: dict[str, Any], blocks: Iterable[int | None] = BLOCKS) -> list[Case]:
    """v4 with a separate norm+quant launch, and the two fused."""
    program = build(**{**CONFIG, **config, "norm": True, "quant": "q8"})
    kept = Options(slab="registers")
    return [
        Case("finish+norm+quant", program, replace(kept, fuse=fuse, threads=threads), f"{name}, {threads or 'auto'}")
        for threads in blocks
        for name, fuse in (("v4, norm+quant apart", SEPARATE), ("v4z", "pre-norm-quant"))
    ]


def projection_case(config: dict[str, Any]) -> Case:
    """The projection's own kernel."""
    program = only(build(**{**CONFIG, **config, "projection": "fma"}), "project")
    return Case("project", program, Options(), "own kernel")


def projection(bench: Bench, config: dict[str, Any], tokens: int, rounds: int) -> list[Row]:
    """The projection's own kernel against the vendor's fp32 GEMM."""
    case = projection_case(config)
    rows = interleaved(bench, [case], tokens, rounds)
    row: Row = {**describe(replace(case, note="vendor GEMM"), None, tokens), "options": {}}
    try:
        row |= vendor(bench, case.program, tokens, rounds)
    except Exception as error:  # noqa: BLE001  (a comparison less)
        row["error"] = error_text(error)
    return [*rows, row]


def vendor(bench: Bench, program: Program, tokens: int, rounds: int) -> Row:
    """Times of `matmul` of the array library in fp32, TF32 off; its result must agree with ours.

    Raises:
        Unmeasurable: it does not.
    """
    inputs = bench.inputs(program, tokens)
    x, fn = inputs["x"].reshape(tokens, -1), inputs["fn"]
    library = import_module("numpy" if bench.device.dry else "cupy")
    out = library.empty((tokens, fn.shape[0]), x.dtype)

    def launch(_: int) -> Any:
        return library.matmul(x, fn.T, out=out)

    launch(0)
    want = bench.device.fetch(bench.expected(program, tokens, Options().arch)["mixes"])
    error = abs(bench.device.fetch(out) - want).max() / max(abs(want).max(), 1e-30)
    if not error < 1e-4:
        raise Unmeasurable(f"the vendor's result is {error:.1e} away")
    queued = bench.device.back_to_back(launch, kernels=2, launches=BACK_TO_BACK, rounds=rounds)
    row: Row = {"bytes": 4 * (x.size + fn.size + out.size), "relative_difference": float(f"{error:.2e}")}
    bench.note(row, "back_to_back", queued, first=True)
    row["runs"] = list(queued.runs)
    try:
        replayed: Timing = bench.device.graph(launch, count=32, replays=20)
        bench.note(row, "graph", replayed, first=False)
    except Exception as error:  # noqa: BLE001  (not every GEMM can be captured)
        row["graph_error"] = error_text(error)
    return row


def phase_tables(bench: Bench, cases: Iterable[Case], tokens: int) -> list[Row]:
    """Phases of cases, one row each."""
    found: list[Row] = []
    for case in cases:
        row = describe(case, None, tokens)
        try:
            row["phases"] = [table.as_dict() for table in measure_phases(bench, case, tokens)]
        except Exception as error:  # noqa: BLE001  (one table less)
            row["error"] = error_text(error)
        found.append(row)
    return found


@dataclass(frozen=True)
class SeedTables:
    """Which tables, and how large.

    Args:
        config: fields of a Config beside `CONFIG`: hidden, streams.
        tokens: T of the arm tables; the first is that of the others.
        rounds: N, how often each arm is timed.
        arms, iterated, stamped: patterns of arm names.
        blocks: threads of the kernels with norm and quant.
    """

    config: dict[str, Any]
    tokens: tuple[int, ...] = TOKENS
    rounds: int = ROUNDS
    arms: tuple[str, ...] = ARMS
    iterated: tuple[str, ...] = ITERATED
    stamped: tuple[str, ...] = STAMPED
    blocks: tuple[int | None, ...] = BLOCKS

    def cases(self) -> list[Case]:
        """Every case of every table, to compile them beforehand."""
        program, post = self._program(), self._post()
        stamped = [replace(c, options=replace(c.options, stamps=True)) for c in arms_of(program, self.stamped)]
        many = [case for cases in iteration_cases(self.config, self.iterated).values() for case in cases]
        return [
            *arms_of(program, self.arms), post, *norm_quant_cases(self.config, self.blocks),
            projection_case(self.config), *many, *early_stop_cases(self.config, self.iterated), *stamped,
        ]

    @property
    def count(self) -> int:
        """How many tables `run` makes."""
        return 4 * len(self.tokens) + 3

    def run(self, bench: Bench) -> Iterator[tuple[str, list[Row]]]:
        """Each table in turn, as (name, rows), so that what is done can be kept before the next begins."""
        program, first = self._program(), self.tokens[0]
        for count in self.tokens:
            yield "arms", interleaved(bench, arms_of(program, self.arms), count, self.rounds)
        for count in self.tokens:
            yield "post", interleaved(bench, [self._post()], count, self.rounds)
            yield "norm_quant", interleaved(bench, norm_quant_cases(self.config, self.blocks), count, self.rounds)
            yield "projection", projection(bench, self.config, count, self.rounds)
        yield "iterations", iterations(bench, self.config, first, self.rounds, self.iterated)
        yield "early_stop", interleaved(bench, early_stop_cases(self.config, self.iterated), first, self.rounds)
        yield "phases", phase_tables(bench, arms_of(program, self.stamped), first)

    def _program(self) -> Program:
        return build(**{**CONFIG, **self.config})

    def _post(self) -> Case:
        return Case("post", build(**{**CONFIG, **self.config, "scope": "post"}), Options())
