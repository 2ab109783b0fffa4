"""Faults that change values: each a mutation of the Program, the Plan, the emitted text or the inputs.

Wherever a mutation is not one of values that the compiler itself holds, it is a substitution on the text that
must find its place; a fault that changes nothing raises instead of passing for one that was not seen.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mhcgen.errors import InternalError
from mhcgen.gate.execute import Array
from mhcgen.ir import AttrValue, Program, Stage
from mhcgen.lower import float_literal
from mhcgen.passes import run_pipeline
from mhcgen.plan import Kernel, Loop, Node, Plan, Step
from mhcgen.stages import COMB_STAGES, STREAM_LAST
from mhcgen.steps.context import identifier

Inputs = Mapping[str, Array]


@dataclass(frozen=True)
class Fault:
    """A broken emission.

    Args:
        plan: whose kernels are launched.
        source: the text that is compiled.
        where: what was changed, for the site of the report.
        inputs: what the emission is given in place of the job's inputs.
        moves: results that must each differ, not just one of them.
    """

    plan: Plan
    source: str
    where: str
    inputs: Callable[[Inputs], Inputs] | None = None
    moves: tuple[str, ...] = ()


# ---- mutations --------------------------------------------------------------------------------------
def _with_attrs(program: Program, change: Callable[[Stage], Mapping[str, AttrValue]]) -> Program:
    stages = []
    for stage in program.stages:
        attrs = {**dict(stage.attrs), **change(stage)}
        stages.append(replace(stage, attrs=tuple(sorted(attrs.items()))))
    return program.with_stages(stages)


def _with_steps(plan: Plan, change: Callable[[Kernel, Step], Step]) -> Plan:
    def visit(kernel: Kernel, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return tuple(
            change(kernel, node)
            if isinstance(node, Step)
            else replace(node, body=visit(kernel, node.body))
            if isinstance(node, Loop)
            else node
            for node in nodes
        )

    return replace(plan, kernels=tuple(replace(k, body=visit(k, k.body)) for k in plan.kernels))


def _fields(step: Step, **changed: AttrValue) -> Step:
    return replace(step, fields=tuple(sorted({**dict(step.fields), **changed}.items())))


def _planted(old: Plan, new: Plan, where: str) -> Fault:
    if new.source == old.source:
        raise InternalError("G-NOT-PLANTED", "the mutated plan gives the same text", where=where)
    return Fault(new, new.source, where)


def substituted(source: str, pattern: str, by: str, where: str) -> str:
    """The text with every match replaced.

    Raises:
        InternalError: `G-NOT-PLANTED`, there is no match, so the fault would silently be none.
    """
    text, count = re.subn(pattern, by, source, flags=re.S)
    if count < 1 or text == source:
        raise InternalError(
            "G-NOT-PLANTED", f"the text has no place for this fault: {pattern}", where=where,
            hints=("a template changed; change the fault with it",),
        )
    return text


def in_step(source: str, step: str, pattern: str, by: str) -> str:
    """`substituted` within the text of one step, in every kernel that holds it."""
    part = rf"(?m)^[ ]*// {re.escape(step)}$.*?(?=^[ ]*// \S+\.\S+$|^}}$)"
    pieces: list[str] = []
    last = 0
    for match in re.finditer(part, source, flags=re.S):
        pieces += [source[last : match.start()], substituted(match[0], pattern, by, step)]
        last = match.end()
    if not pieces:
        raise InternalError("G-NOT-PLANTED", f"the text has no step {step}", where=step)
    return "".join((*pieces, source[last:]))


def _steps(plan: Plan, *kinds: str) -> Iterator[Step]:
    """Steps of all stages of these kinds."""
    names = {stage.name for stage in plan.program.stages_of_kind(*kinds)}
    yield from (step for kernel in plan.kernels for step in kernel.steps() if step.stage in names)


# ---- the faults -------------------------------------------------------------------------------------
def transpose_comb(program: Program, plan: Plan) -> Iterator[Fault]:
    """comb stored with its axes swapped: by the template that is right for logits with rows as destinations."""

    makers = {stage.name for stage in program.stages_of_kind(*COMB_STAGES)}

    def change(kernel: Kernel, step: Step) -> Step:
        if step.stage not in makers:  # a time stamp is of no stage
            return step
        if step.template == "comb_direct":
            return replace(step, template="comb_direct_transposed")
        if not step.name.endswith(".store"):
            return step
        straight = step.template.removesuffix("_transposed")
        other = straight if straight != step.template else f"{straight}_transposed"
        return replace(_fields(step, n=program.dim("n")), template=other)

    yield _planted(plan, _with_steps(plan, change), "the store of comb")


def skip_stream(program: Program, plan: Plan) -> Iterator[Fault]:
    """collapse leaves out the last stream."""
    source = plan.source
    n = program.dim("n")
    # Not the slab's load.
    sums = [s for s in _steps(plan, "collapse", "gated_mean") if s.template.endswith(("collapse", "gated_mean"))]
    for step in sums:
        source = in_step(source, step.name, rf"int c = 1; c < {n};", f"int c = 1; c < {n - 1};")
    yield Fault(plan, source, "the sum of collapse")


def _iterations(by: int) -> Callable[[Program, Plan], Iterator[Fault]]:
    def plant(program: Program, plan: Plan) -> Iterator[Fault]:
        changed = _with_attrs(
            program, lambda s: {"iters": s.attr("iters") + by} if s.kind == "sinkhorn" else {}
        )
        yield _planted(plan, run_pipeline(changed, plan.options), f"iters {by:+d}")

    return plant


short_iteration = _iterations(-1)
long_iteration = _iterations(1)


def swap_eps(program: Program, plan: Plan) -> Iterator[Fault]:
    """The RMS takes the eps of the gates and the Sinkhorn, and they take its."""
    (rms,) = {float(s.attr("eps")) for s in program.stages_of_kind("rowsq")}
    (hc,) = {float(s.attr("eps")) for s in program.stages_of_kind("sinkhorn")}

    def change(stage: Stage) -> dict[str, AttrValue]:
        if stage.kind == "rowsq":
            return {"eps": hc}
        if stage.kind == "sinkhorn":
            return {"eps": rms}
        return {"pre_eps": rms} if stage.kind in ("gates", "head_gates") else {}

    yield _planted(plan, run_pipeline(_with_attrs(program, change), plan.options), f"{rms} for {hc} and back")


def swap_norm_weight(program: Program, plan: Plan) -> Iterator[Fault]:
    """The norm is handed its weight in reverse order; z and q must both move."""
    weights = [s.operand("weight") for s in program.stages_of_kind("norm") if "weight" in dict(s.operands)]

    def reversed_weights(inputs: Inputs) -> Inputs:
        given = {**inputs, **{name: np.ascontiguousarray(inputs[name][::-1]) for name in weights}}
        if all(np.array_equal(given[name], inputs[name]) for name in weights):
            raise InternalError("G-NOT-PLANTED", "the weight reads the same backwards", where=weights[0])
        return given

    results = {tensor.name for tensor in program.of_role("result")}
    moves = [
        name
        for stage in program.stages_of_kind("norm", "quant")
        for slot, name in stage.results
        if slot in ("z", "q") and name in results
    ]
    yield Fault(plan, plan.source, ", ".join(weights), reversed_weights, tuple(moves))


def eps_outside_root(program: Program, plan: Plan) -> Iterator[Fault]:
    """1 / (sqrt(mean) + eps) in place of 1 / sqrt(mean + eps), or the other way round."""

    def change(stage: Stage) -> dict[str, AttrValue]:
        if stage.kind not in ("rowsq", "rowsq_streams", "norm_streams"):
            return {}
        return {"eps_place": "in" if stage.option("eps_place", "in") == "out" else "out"}

    yield _planted(plan, run_pipeline(_with_attrs(program, change), plan.options), "the root of rowsq")


def post_eps(program: Program, plan: Plan) -> Iterator[Fault]:
    """post takes the eps that only pre has."""
    eps = float_literal(max(float(stage.attr("pre_eps")) for stage in program.stages_of_kind("gates")) or 1e-6)
    by = rf"\1__fadd_rn(\2, {eps});"
    yield Fault(plan, substituted(plan.source, r"(float post_gate = )([^;]+);", by, "post"), "the post gates")


def max_over_padding(program: Program, plan: Plan) -> Iterator[Fault]:
    """Lanes beyond n take part in a reduction: 0 in a maximum, 1 in a sum."""
    for op, neutral in (("max", "0.0f"), ("sum", "1.0f")):
        # `live` is a constant where n is a power of two, and the text says so.
        used = re.search(rf"live \? \w+\[\w+\] : mhc_{op}_identity", plan.source)
        if used is None or "bool live = true" in plan.source:
            continue
        pattern = rf"(float mhc_{op}_identity\(\) {{ return )[^;]*;"
        yield Fault(plan, substituted(plan.source, pattern, rf"\g<1>{neutral};", op), f"the padding of a {op}")
        return


def borrowed_row(program: Program, plan: Plan) -> Iterator[Fault]:
    """The square sum of token t reads the streams of token t - 1."""
    rows = {s.name: s.operand("x") for s in program.stages_of_kind("rowsq", "norm_streams")}
    squares = ("sumsq_partial", "sumsq_streams_partial")

    def change(kernel: Kernel, step: Step) -> Step:
        if step.stage not in rows or step.template not in squares:
            return step
        x = rows[step.stage]
        row = program.dim("n") * program.dim("H")
        last = "_last" if program.tensor(x).shape == STREAM_LAST else ""
        return _fields(
            step,
            streams_from=f"columns/streams{last}_from_global_{program.tensor(x).dtype}.cu.j2",
            streams=f"({identifier(x)} + (token > 0 ? token - 1 : 0) * {row})",
            load_kind="",
        )

    # A cluster squares streams that its blocks hold in shared memory, and has no other row to borrow.
    if any(step.template in squares for step in _steps(plan, "rowsq", "norm_streams")):
        yield _planted(plan, _with_steps(plan, change), "the streams of rowsq")


def stale_output(program: Program, plan: Plan) -> Iterator[Fault]:
    """The last row of every result, then one whole result, are not written."""
    guard = r"if \(token >= tokens\) return;"
    if re.search(guard, plan.source):
        less = substituted(plan.source, guard, "if (token >= tokens - 1) return;", "the last row")
        yield Fault(plan, less, "the last row")
    for tensor in program.of_role("result"):
        target = f"{identifier(tensor.name)}_t"

        def change(kernel: Kernel, step: Step, target: str = target) -> Step:
            fields = dict(step.fields)
            changed: dict[str, AttrValue] = {
                key: tuple(item for item in value if item != target)
                for key, value in fields.items()
                if key.endswith("targets") and isinstance(value, tuple) and target in value
            }
            sinks = fields.get("sinks")
            if fields.get("out") == target and isinstance(sinks, tuple):
                changed["sinks"] = tuple(sink for sink in sinks if not sink.endswith("_to_global.cu.j2"))
            return _fields(step, **changed) if changed else step

        mutated = _with_steps(plan, change)
        # A result that a later kernel reads would pass its poison on; one that nothing reads is only stale.
        if mutated.kernels != plan.kernels and tensor.name not in program.readers:
            yield _planted(plan, mutated, f"all of {tensor.name}")
            return
