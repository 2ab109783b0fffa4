"""One figure: a Program under a schedule at a token count, its bits checked first, then timed.

An arm that differs from the unfused emission in one byte is not timed: a fast wrong kernel is no figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from mhcgen.bench import timing
from mhcgen.bench.device import Device
from mhcgen.bench.floor import Floor, bytes_once, tensor_bytes
from mhcgen.bench.timing import Timing
from mhcgen.inputs import make_inputs
from mhcgen.ir import Program
from mhcgen.passes import run_pipeline
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Options, Plan
from mhcgen.runtime import Module

#: Inputs are made for so many tokens and repeated beyond: the generator is slow, and kernels look at one token each.
MADE_TOKENS = 64
#: From so many tokens on, per-token inputs rotate past the L2; below, they are what the kernel before left there.
#: Results go to one set of arrays, as an allocator gives a caller, and a rival in a captured graph, the same ones.
ROTATED_TOKENS = 64
#: Fill bytes of results before a check: of the emission under test, and of the unfused one. A byte that either
#: leaves unwritten differs from the other's.
POISONS = (0xFF, 0xA5)

Row = dict[str, Any]
Arrays = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is measured, and under which schedule.

    Args:
        what: its name in tables.
        program: the unfused Program.
        options: the schedule.
        note: one more column, such as the name of an arm; may be empty.
    """

    what: str
    program: Program
    options: Options
    note: str = ""


@dataclass(frozen=True)
class Prepared:
    """A checked case, ready to be timed.

    Args:
        row: what is known of it so far.
        launch: one call of it; the argument picks the set of arrays.
        kernels: launches of a call.
        sets: how many sets of arrays it rotates over.
    """

    row: Row
    launch: Callable[[int], None]
    kernels: int
    sets: int


@dataclass
class Bench:
    """A device with its floor, and what is worth keeping between figures of one run.

    Args:
        device: where.
        floor: of that device.
        cold: rotate parameters too, at every token count: nothing is in the L2 when a launch starts.
        fresh_results: rotate the arrays of results with the inputs, so that they are not in the L2 either.
    """

    device: Device
    floor: Floor
    cold: bool = False
    fresh_results: bool = False
    _inputs: dict[tuple[str, int], Arrays] = field(default_factory=dict)
    _expected: dict[tuple[str, int], Arrays] = field(default_factory=dict)
    _modules: dict[tuple[str, Options], Module] = field(default_factory=dict)

    def module(self, program: Program, options: Options) -> Module:
        """The loaded plan; loaded once for each Program and schedule.

        Raises:
            RefusedError: the schedule is not legal.
            Unmeasurable: the device cannot run it.
        """
        key = (_identity(program), options)
        if key not in self._modules:
            plan = run_pipeline(program, options)
            lacking = self.device.lacks(plan)
            if lacking:
                raise Unmeasurable(lacking)
            self._modules[key] = self.device.load(plan)
        return self._modules[key]

    def inputs(self, program: Program, tokens: int) -> Arrays:
        """Reproducible inputs on the device; beyond `MADE_TOKENS` tokens the first ones repeat."""
        key = (_identity(program), tokens)
        if key not in self._inputs:
            self._forget(tokens)
            times = -(-tokens // MADE_TOKENS)
            made = {k: self.device.put(v) for k, v in make_inputs(program, min(tokens, MADE_TOKENS)).items()}
            if times > 1:
                per_token = {k for k in made if program.tensor(k).shape[:1] == ("T",)}
                made = {k: self.device.repeated(v, times)[:tokens] if k in per_token else v for k, v in made.items()}
            self._inputs[key] = made
        return self._inputs[key]

    def _forget(self, tokens: int) -> None:
        """Large inputs and results are kept one Program at a time."""
        if tokens > MADE_TOKENS:
            for kept in (self._inputs, self._expected):
                for key in [key for key in kept if key[1] > MADE_TOKENS]:
                    del kept[key]

    def outputs(self, module: Module, tokens: int, byte: int = POISONS[0]) -> Arrays:
        """Poisoned arrays for everything a call writes: their bytes are all `byte`."""
        program = module.program
        return {
            tensor.name: self.device.filled(program.shape(tensor.name, tokens), tensor.dtype, byte)
            for tensor in module.outputs
        }

    def expected(self, program: Program, tokens: int, arch: str) -> Arrays:
        """Results of the unfused emission."""
        key = (_identity(program), tokens)
        if key not in self._expected:
            module = self.module(program, Options(arch=arch))
            out = self.outputs(module, tokens, POISONS[1])
            self._expected[key] = module(out=out, **self.inputs(program, tokens))
        return self._expected[key]

    def differing_bytes(self, module: Module, tokens: int) -> int:
        """In how many bytes a module's results differ from those of the unfused emission, on poisoned outputs."""
        program = module.program
        want = self.expected(program, tokens, module.plan.options.arch)
        got = module(out=self.outputs(module, tokens), **self.inputs(program, tokens))
        return sum(self.device.differing(got[name], want[name]) for name in want)

    def rotation(self, module: Module, tokens: int) -> list[tuple[Arrays, Arrays]]:
        """(inputs, outputs) sets to rotate over; one where the L2 may hold them."""
        program = module.program
        base = self.inputs(program, tokens)
        turning = [t.name for t in program.of_role("input") if t.shape[:1] == ("T",)]
        if self.cold:
            turning = list(base)
        read = sum(tensor_bytes(program, name, tokens) for name in turning)
        count = timing.sets_for(read) if self.cold or tokens >= ROTATED_TOKENS else 1
        sets = [base] + [{**base, **{k: base[k].copy() for k in turning}} for _ in range(count - 1)]
        results = self.outputs(module, tokens)
        fresh = self.cold or self.fresh_results
        return [(inputs, self.outputs(module, tokens) if fresh else results) for inputs in sets]

    def prepare(self, case: Case, tokens: int) -> Prepared:
        """Load a case, check its bits, and make what a launch of it needs.

        Raises:
            MhcgenError: refused, not compiled, not launched.
            Unmeasurable: the device cannot run it, or its bits are wrong.
        """
        module = self.module(case.program, case.options)
        row = describe(case, module.plan, tokens)
        differing = self.differing_bytes(module, tokens)
        row["differing_bytes"] = differing
        if differing:
            raise Unmeasurable(f"{differing} bytes differ from the unfused emission", row)
        sets = self.rotation(module, tokens)
        row |= {"bytes": bytes_once(case.program, tokens), "sets": len(sets), "cold": self.cold}

        def launch(i: int) -> None:
            inputs, outputs = sets[i % len(sets)]
            module(out=outputs, **inputs)

        return Prepared(row, launch, len(module.plan.kernels), len(sets))

    def measure(self, case: Case, tokens: int, *, methods: tuple[str, ...] = ("graph",), rounds: int = 5) -> Row:
        """One row: checked, then timed.

        Args:
            case: what.
            tokens: T.
            methods: of `graph`, `back_to_back` and `wall`; the first is the row's `us`.
            rounds: of the methods other than `graph`.

        Raises:
            MhcgenError, Unmeasurable: as `prepare`.
        """
        prepared = self.prepare(case, tokens)
        for method in methods:
            taken = self.timed(prepared, tokens, method, rounds)
            self.note(prepared.row, method, taken, first=method == methods[0])
        return prepared.row

    def timed(self, prepared: Prepared, tokens: int, method: str, rounds: int = 5) -> Timing:
        """Times of a prepared launch by one method: `graph`, `back_to_back` or `wall`."""
        if method == "graph":
            count, replays = timing.counts_for(tokens)
            # Every set at least once, so that the rotation is as long as it claims to be.
            return self.device.graph(prepared.launch, count=max(count, prepared.sets), replays=replays)
        if method == "back_to_back":
            return self.device.back_to_back(
                prepared.launch, kernels=prepared.kernels, launches=timing.BACK_TO_BACK, rounds=rounds
            )
        return self.device.wall(prepared.launch, launches=timing.BACK_TO_BACK, rounds=rounds)

    def note(self, row: Row, method: str, taken: Timing, *, first: bool) -> None:
        """Enter times into a row: as its own `us` with floor and rate, or beside it under the method's name."""
        if not first:
            row[method] = taken.as_dict()
            return
        row |= {"method": method, **taken.as_dict(), "floor_us": round(self.floor.us(row["bytes"]), 3)}
        row["GB_s"] = round(row["bytes"] / row["us"] * 1e-3, 1) if row["us"] else 0.0

    def attempt(self, case: Case, tokens: int, **options: Any) -> Row:
        """`measure`, with whatever goes wrong as the row's `error` instead of an exception."""
        try:
            return self.measure(case, tokens, **options)
        except Exception as error:  # noqa: BLE001  (one figure less; the run goes on)
            row = {**describe(case, None, tokens), **getattr(error, "row", {})}
            return {**row, "error": error_text(error)}


class Unmeasurable(Exception):
    """Why there is no figure; `row` is what was found up to then."""

    def __init__(self, why: str, row: Mapping[str, Any] | None = None) -> None:
        super().__init__(why)
        self.row = dict(row or {})


def error_text(error: BaseException) -> str:
    """One line for a row."""
    code = getattr(error, "code", type(error).__name__)
    words = " ".join(str(getattr(error, "message", error)).split())
    return f"{code}: {words}"[:300]


def _identity(program: Program) -> str:
    """What two Programs have in common whose inputs and bits are the same, early stop and counts included."""
    import hashlib

    from mhcgen.text import print_program

    return hashlib.sha256(print_program(program).encode()).hexdigest()


def without_branches(program: Program) -> bool:
    """Whether a Program can be timed at all: an opaque stage is the caller's, and its time is not ours."""
    return not program.stages_of_kind(*OPAQUE_KINDS)


def changed_options(options: Options) -> dict[str, Any]:
    """Options that differ from their defaults, by name."""
    default = Options()
    names = [f.name for f in fields(Options)]
    return {name: getattr(options, name) for name in names if getattr(options, name) != getattr(default, name)}


def describe(case: Case, plan: Plan | None, tokens: int) -> Row:
    """What a row says before anything is measured."""
    program = case.program
    streams = next((t.dtype for t in program.tensors if t.name in ("x", "e")), "fp32")
    iterated = program.stages_of_kind("sinkhorn")
    row: Row = {
        "what": case.what,
        **({"note": case.note} if case.note else {}),
        "T": tokens,
        "n": program.dim("n"),
        "H": program.dim("H"),
        "dtype": streams,
        "class": program.arithmetic.functions,
        "sumsq": program.arithmetic.sumsq,
        "early_stop": any(stage.option("early_stop", False) for stage in iterated),
        "options": changed_options(case.options),
    }
    if plan is not None:
        row["kernels"] = {
            k.name: {"threads": k.threads, "cluster": k.cluster, "shared": k.shared_bytes} for k in plan.kernels
        }
        row["sha256"] = plan.emitted_sha256[:12]
    return row


def with_options(case: Case, **changed: Any) -> Case:
    """The same case under another schedule."""
    return replace(case, options=replace(case.options, **changed))
