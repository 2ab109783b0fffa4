"""Faults planted into reference values: proof that a job's inputs, and the bounds, could show them.

Nothing is emitted here. The values of a fault come from the float64 reference with one stage replaced; the job
discriminates if those values fall outside the bound of the true ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import numpy as np

from mhcgen import bounds, reference, reference_each
from mhcgen.combs import comb_kind
from mhcgen.gate.checks import Verdict, computed, rounded
from mhcgen.gate.execute import Array, Arrays, Outcome
from mhcgen.gate.jobs import Job
from mhcgen.ir import AttrValue, Program, Stage
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.stages import COMB_STAGES, LOW_RANK

#: Results by slot of a stage that goes wrong; None where this fault leaves the stage alone.
Wrong = Callable[[Stage, Arrays], Mapping[str, Array] | None]


@dataclass(frozen=True)
class Planted:
    """A fault of the reference.

    Args:
        name: for the report.
        wrong: the stage that goes wrong.
        needs: whether a Program and token count can have this fault.
        may_hide: the Program may leave nothing to show, whatever the inputs: a matrix that has converged.
    """

    name: str
    wrong: Wrong
    needs: Callable[[Program, int], bool] = lambda program, tokens: True
    may_hide: bool = False


def faulty_values(program: Program, values: Mapping[str, Array], wrong: Wrong) -> Arrays | None:
    """What kernels compute with one kind of stage gone wrong, None if no stage did."""
    now = dict(values)
    tokens = next((len(values[t.name]) for t in program.tensors if t.shape[0] == "T"), 0)
    dims = {**dict(program.dims), "T": tokens}
    hit = False
    for stage in program.stages:
        if stage.kind in OPAQUE_KINDS:
            continue  # what it gave the emission stands
        operands = {slot: reference.turned(program.tensor(name), now[name]) for slot, name in stage.operands}
        with np.errstate(all="ignore"):
            made = wrong(stage, operands)
            hit |= made is not None
            produced = {**reference.evaluate(stage, operands, dims), **(made or {})}
        for slot, name in stage.results:
            dtype = program.tensor(name).dtype
            array = reference.turned(program.tensor(name), np.asarray(produced[slot], dtype=np.float64))
            now[name] = reference.round_to(array, dtype) if rounded(program) else array
    return {name: now[name] for name in computed(program)} if hit else None


# ---- the faults -------------------------------------------------------------------------------------
#: DeepSeek-V4's Sinkhorn but for the orientation of its logits.
_RULE = (("domain", "linear"), ("start", "softmax"), ("eps_mode", "add"), ("order", "row-col"))


def _comb(fault: Callable[[Array, Stage], Array]) -> Wrong:
    """A fault of DeepSeek-V4's Sinkhorn, of the logits [T, n, n] with rows first; other forms have other faults."""

    def wrong(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
        if stage.kind != "sinkhorn" or any(stage.option(key, value) != value for key, value in _RULE):
            return None
        n = round(operands["logits"].shape[-1] ** 0.5)
        comb = fault(operands["logits"].reshape(-1, n, n), stage)
        return {"comb": np.swapaxes(comb, 1, 2) if stage.option("orient", "in") == "out" else comb}

    return wrong


def _transposed(program: Program) -> Wrong:
    """comb with its axes swapped, of any kind that is not symmetric."""

    def wrong(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
        n = program.dim("n")
        if stage.kind not in COMB_STAGES or comb_kind(stage).aim(n, 1) is None:
            return None
        comb = np.asarray(reference.evaluate(stage, operands, dict(program.dims))["comb"], dtype=np.float64)
        return {"comb": np.swapaxes(comb, -1, -2)}

    return wrong


def _clamped(logits: Array, stage: Stage) -> Array:
    """max(sum, eps) in place of sum + eps."""
    eps = stage.attr("eps")
    c: Array = np.exp(logits - np.max(logits, axis=2, keepdims=True))
    c = c / np.sum(c, axis=2, keepdims=True)
    for step in range(2 * stage.attr("iters") - 1):
        c = c / np.maximum(np.sum(c, axis=1 if step % 2 == 0 else 2, keepdims=True), eps)
    return c


def _without_maximum(logits: Array, stage: Stage) -> Array:
    """fp32 exponentials of the logits as they are."""
    c: Array = np.exp(logits.astype(np.float32)).astype(np.float64)
    eps = stage.attr("eps")
    c = c / np.sum(c, axis=2, keepdims=True) + eps
    for step in range(2 * stage.attr("iters") - 1):
        c = c / (np.sum(c, axis=1 if step % 2 == 0 else 2, keepdims=True) + eps)
    return c


def _rowsq(change: Callable[[Stage, Arrays], tuple[Stage, Arrays] | None]) -> Wrong:
    """A rescale by another stage, or of other operands, than the Program's."""

    def wrong(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
        changed = change(stage, operands) if stage.kind in ("rowsq", "rowsq_streams", "norm_streams") else None
        if changed is None:
            return None
        made = reference.evaluate(*changed, {})
        return {slot: np.asarray(array, dtype=np.float64) for slot, array in made.items()}

    return wrong


def _with(stage: Stage, **attrs: AttrValue) -> Stage:
    return replace(stage, attrs=tuple(sorted({**dict(stage.attrs), **attrs}.items())))


def _eps_lost(stage: Stage, operands: Arrays) -> tuple[Stage, Arrays]:
    return _with(stage, eps=0.0), operands


def _eps_outside(stage: Stage, operands: Arrays) -> tuple[Stage, Arrays] | None:
    # An eps of another place is not what D4 is about.
    inside = stage.option("eps_place", "in") == "in"
    return (_with(stage, eps_place="out"), operands) if inside else None


_of_other_row = _rowsq(lambda stage, operands: (stage, {**operands, "x": np.roll(operands["x"], 1, axis=0)}))


def _borrowed(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
    made = _of_other_row(stage, operands)
    if made is None or stage.kind != "norm_streams":
        return made
    # What is divided is the row's own, where it is not mixes but the streams: x times what the other row came to.
    eps, place = float(stage.attr("eps")), stage.option("eps_place", "in")
    squares = np.mean(np.roll(operands["x"], 1, axis=0) ** 2, axis=2)
    root = reference_each.root_mean_square(squares, eps, place)[:, :, None]
    return {"x_normed": operands["x"] / root * (1.0 + operands["weight"].reshape(root.shape[1], -1))}


def _weight_alone(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
    if stage.kind != "norm_streams":
        return None
    made = reference.evaluate(stage, {**operands, "weight": operands["weight"] - 1.0}, {})
    return {slot: np.asarray(array, dtype=np.float64) for slot, array in made.items()}


def _undivided(program: Program) -> Wrong:
    """Gates of low rank of the mixes as they are, not over the number of streams."""

    def wrong(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
        if stage.kind not in LOW_RANK:
            return None
        whole = {"mixes": operands["mixes"] * program.dim("n")}
        made = reference.evaluate(stage, whole, dict(program.dims))
        return {slot: np.asarray(array, dtype=np.float64) for slot, array in made.items()}

    return wrong


def _narrow_weights(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
    project = {"project": reference.project, "project_streams": reference_each.project_streams}.get(stage.kind)
    if project is None:
        return None
    return {"mixes": project(operands["x"], reference.round_to(operands["fn"], "bf16"))}


def _stream_skipped(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
    x = operands.get("x", np.empty(0))
    if stage.kind == "gated_mean":
        zero = np.concatenate([x[:, :-1], np.zeros_like(x[:, -1:])], axis=1)
        return {"y": reference_each.gated_mean(zero, operands["bottleneck"], operands["up"])}
    return {"y": reference.collapse(x[:, :-1], operands["pre"][..., :-1])} if stage.kind == "collapse" else None


def _other_eps(program: Program) -> Wrong:
    """The rescale with another eps of the Program, the one most unlike its own."""
    others = [float(stage.attr("eps")) for stage in program.stages_of_kind("sinkhorn")]

    def change(stage: Stage, operands: Arrays) -> tuple[Stage, Arrays] | None:
        own = float(stage.attr("eps"))
        other = max(others, key=lambda eps: abs(eps - own), default=own)
        return (_with(stage, eps=other), operands) if other != own else None

    return _rowsq(change)


def iterations(by: int) -> Wrong:
    """Iterations too many, or too few."""

    def wrong(stage: Stage, operands: Arrays) -> Mapping[str, Array] | None:
        if stage.kind != "sinkhorn" or stage.attr("iters") + by < 1:
            return None
        n = round(operands["logits"].shape[-1] ** 0.5)
        made = reference.evaluate(_with(stage, iters=stage.attr("iters") + by), operands, {"n": n})
        return {"comb": np.asarray(made["comb"], dtype=np.float64)}

    return wrong


def _some_iterations(program: Program, tokens: int) -> bool:
    """After k iterations one more moves the slowest matrix by about 1 / (2 k^2)."""
    return all(stage.attr("iters") <= 100 for stage in program.stages_of_kind("sinkhorn"))


def _several(program: Program, tokens: int) -> bool:
    return tokens > 1


def _wide(program: Program, tokens: int) -> bool:
    return program.dim("n") > 1


_UNSTABLE = Planted("exponentials without the row maximum", _comb(_without_maximum))

#: Kind of inputs -> the faults they are there for. `uniform` has the ordinary ones.
PLANTED: dict[str, tuple[Planted, ...]] = {
    "uniform": (
        Planted("a stream skipped", _stream_skipped, _wide),
        Planted("another row's norm", _borrowed, _several),
        Planted("a weight without the 1 that is added to it", _weight_alone),
    ),
    "D4": (Planted("eps outside the root", _rowsq(_eps_outside)),),
    "D5": (Planted("sums clamped by eps", _comb(_clamped)),),
    "D8": (_UNSTABLE,),
    "D9": (Planted("weights narrowed to bf16", _narrow_weights),),
    "D10": (Planted("another row's norm", _borrowed, _several),),
    "D12": (Planted("eps lost", _rowsq(_eps_lost)),),
    "deep": (_UNSTABLE,),
    "slow": (
        Planted("an iteration too few", iterations(-1), _some_iterations, may_hide=True),
        Planted("an iteration too many", iterations(1), _some_iterations, may_hide=True),
    ),
    "extreme": (_UNSTABLE,),
}


def planted(program: Program, job: Job) -> tuple[Planted, ...]:
    """The faults a job is there for, in this Program."""
    found = PLANTED.get(job.kind, ())
    if job.kind == "D3":
        found = (Planted("the two eps mixed up", _other_eps(program)),)
    if job.kind in ("uniform", "D1") and program.dim("n") >= 3:
        found = (Planted("comb transposed", _transposed(program)), *found)
    if job.kind == "uniform" and program.dim("n") > 1:
        found = (*found, Planted("mixes that are not over the number of streams", _undivided(program)))
    return tuple(fault for fault in found if fault.needs(program, job.tokens))


# ---- the check --------------------------------------------------------------------------------------
def discriminates(
    program: Program, jobs: list[tuple[Job, Outcome]], values: list[Mapping[str, Array]]
) -> Verdict:
    """Whether each job could show the faults it is there for, and its results are not degenerate."""
    seen = tried = 0
    wrong: list[str] = []
    for (job, outcome), true in zip(jobs, values, strict=True):
        if not job.tokens:
            continue
        wrong += [f"{sentence} on {job}" for sentence in _degenerate(program, job, outcome)]
        for fault in planted(program, job):
            shown = shows(program, job, true, fault.wrong)
            if shown is None:
                continue
            tried += 1
            seen += shown
            if not shown and not fault.may_hide:
                wrong.append(f"the fault '{fault.name}' would not show on {job}")
    counts = (("wrong", len(wrong)), ("faults", tried), ("shown", seen))
    return Verdict("discriminates", not wrong, counts, wrong[0] if wrong else "")


def shows(
    program: Program, job: Job, true: Mapping[str, Array], wrong: Wrong, *, margin: float = 1.0
) -> bool | None:
    """Whether the values of a fault leave the bounds of the true ones; None where no stage goes wrong.

    Args:
        program: of the job.
        job: whose inputs.
        true: reference values.
        wrong: the fault.
        margin: how many limits away they must be; 2 where an emission, itself off by up to one, is to show it.
    """
    faulty = faulty_values(program, true, wrong)
    if faulty is None:
        return None
    found = bounds.compare_all(program, faulty, true, job.inputs, rounded=rounded(program))
    return any(not comparison.ok and comparison.error > margin * comparison.limit for comparison in found)


def _degenerate(program: Program, job: Job, outcome: Outcome) -> list[str]:
    """What would make any comparison of results easy to pass."""
    found = []
    if job.kind == "uniform":
        for name in ("y", "pre", "pre_next"):
            array = outcome.results.get(name)
            if array is None or program.tensor(name).shape[0] != "T":
                continue
            numbers = np.asarray(array).astype(np.float64)
            if not np.any(numbers):
                found.append(f"{name} is all zero")
            # Few elements of a narrow dtype can be equal by chance.
            if job.tokens > 1 and numbers[0].size >= 4 and np.array_equal(numbers[0], numbers[-1]):
                found.append(f"first and last row of {name} are equal")
    if job.kind == "D15" and job.tokens > 1:
        rows = {
            int(row)
            for name, array in outcome.results.items()
            if array.dtype.kind not in "iu" and program.tensor(name).shape[0] == "T"
            for row in np.flatnonzero(np.isnan(array).reshape(job.tokens, -1).any(axis=1))
        }
        if rows != {job.tokens // 2}:
            found.append(f"NaN of token {job.tokens // 2} shows in rows {sorted(rows)}")
    return found
