"""The checks of the gate: each a function of outcomes that returns one Verdict, each able to fail.

A check that had nothing to look at says so in its counts; it is never counted as a comparison that held.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from mhcgen import bounds, reference
from mhcgen.gate.execute import Array, Arrays, Loaded, Outcome, as_bytes
from mhcgen.gate.jobs import Job
from mhcgen.ir import Program
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Kernel, Plan

#: Check -> what it proves; in the order of reports.
CHECKS: dict[str, str] = {
    "reference": "the unfused emission is within its derived bound of the float64 reference",
    "bits": "an arm gives the bits of the unfused emission, every result and every element",
    "poison": "every element of every result is written, and none depends on what was there before",
    "ran": "the kernels of this arm's own text ran, once each and every block of them",
    "inputs_unchanged": "inputs have the same bytes after the call",
    "findings": "the executor saw no broken barrier, mask or shuffle, no deadlock, no access out of bounds",
    "discriminates": "the inputs could show the faults they are there for",
    "orders": "ascending, descending, random and warp-greedy thread orders give the same bits",
    "clusters": "a token's bits do not depend on how many others its cluster of blocks has",
    "rows": "a row's bits depend neither on the number of rows nor on its place among them",
    "race": "race mode saw no data race and no read of unwritten memory",
    "slab_once": "streams that live in registers are loaded from global memory exactly once",
    "weakened": "with its barriers weakened to those the sync pass chooses, the arm is clean and bit-equal",
}

#: Findings of race mode; all others belong to the check `findings`.
RACES = ("race", "uninit")


@dataclass(frozen=True)
class Verdict:
    """What one check found for one arm.

    Args:
        check: a key of `CHECKS`.
        ok: nothing is wrong.
        counts: what was counted, in a fixed order: wrong things first, then how much was looked at.
        detail: the first thing that is wrong; empty if nothing is.
    """

    check: str
    ok: bool
    counts: tuple[tuple[str, int | float], ...]
    detail: str = ""


Outcomes = Sequence[tuple[Job, Outcome]]


# ---- values -----------------------------------------------------------------------------------------
def differing(a: Array, b: Array) -> int:
    """Elements whose bits differ; all of them where shape or dtype does."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return max(a.size, b.size, 1)
    return int(np.count_nonzero(differs(a, b)))


def differs(a: Array, b: Array) -> Array:
    """Where the bits of two like arrays differ, flat; two NaNs are equal whatever their bits (x86 and GPU differ)."""
    size = a.dtype.itemsize
    other: Array = np.any(as_bytes(a).reshape(-1, size) != as_bytes(b).reshape(-1, size), axis=1)
    if a.dtype.kind not in "iu":
        other &= ~(np.isnan(a).reshape(-1) & np.isnan(b).reshape(-1))
    return other


def bits(
    outcomes: Outcomes, baseline: Outcomes, check: str = "bits", *, but: tuple[str, ...] = ()
) -> Verdict:
    """Differing elements per result, over all jobs; results named in `but` are not compared."""
    wrong: dict[str, int] = {}
    seen = 0
    detail = ""
    for (job, ours), (_, theirs) in zip(outcomes, baseline, strict=True):
        for name, want in theirs.results.items():
            if name in but:
                continue
            count = differing(ours.results[name], want)
            wrong[name] = wrong.get(name, 0) + count
            seen += want.size
            if count and not detail:
                detail = f"{name}: {count} of {want.size} elements differ on {job}"
    return Verdict(check, not detail, (*wrong.items(), ("elements", seen)), detail)


def rows(outcomes: Outcomes, turned: Outcomes, whole: tuple[str, ...] = ()) -> Verdict:
    """Rows of uniform inputs compared between token counts, and between an order of rows and its reverse.

    Args:
        outcomes: every job's; uniform inputs have the same first rows for every token count.
        turned: runs of some of the same jobs with their rows reversed.
        whole: results that are the same for all tokens, and have no rows.
    """
    wrong: dict[str, int] = {}
    seen = 0
    detail = ""

    def compare(name: str, a: Array, b: Array, how: str) -> None:
        nonlocal seen, detail
        count = differing(a, b)
        wrong[name] = wrong.get(name, 0) + count
        seen += a.size
        if count and not detail:
            detail = f"{name}: {count} of {a.size} elements depend on {how}"

    uniform = sorted((pair for pair in outcomes if pair[0].kind == "uniform"), key=lambda pair: pair[0].tokens)
    for (small, ours), (large, theirs) in pairwise(uniform):
        for name, array in ours.results.items():
            other_array = theirs.results[name] if name in whole else theirs.results[name][: small.tokens]
            compare(name, array, other_array, f"T, {small.tokens} or {large.tokens}")
    by_job = {job: outcome for job, outcome in outcomes}
    for job, other in turned:
        for name, array in by_job[job].results.items():
            reverse = other.results[name] if name in whole else np.ascontiguousarray(other.results[name][::-1])
            compare(name, array, reverse, f"the order of rows on {job}")
    return Verdict("rows", not detail, (*wrong.items(), ("elements", seen)), detail)


def reference_values(program: Program, job: Job, outcome: Outcome) -> Arrays:
    """The float64 values of a job; opaque stages give what they gave the emission."""
    made = {**outcome.values, **outcome.results}
    same = {
        stage.name: (lambda value: lambda *_: value)(made[stage.writes[0]])
        for stage in program.stages_of_kind(*OPAQUE_KINDS)
    }
    return reference.run(program, job.inputs, same, all_values=True, round_values=rounded(program))


def rounded(program: Program) -> bool:
    """Whether the reference rounds 16-bit tensors where they are produced, as emissions do."""
    return any(tensor.dtype in ("bf16", "fp16") for tensor in program.tensors)


def against_reference(program: Program, outcomes: Outcomes, values: Sequence[Mapping[str, Array]]) -> Verdict:
    """Tensors outside their bound; per result the worst error in units of its limit.

    Unfused, every value lies in global memory, so inner values are compared as well: the y of a trunk tells little
    of the gates of its first site.
    """
    ratios: dict[str, float] = {tensor.name: 0.0 for tensor in program.of_role("result")}
    inner = 0.0
    failed = seen = 0
    detail = ""
    for (job, outcome), reference_of_job in zip(outcomes, values, strict=True):
        made = {**outcome.values, **outcome.results}
        got = {name: made[name] for name in computed(program)}
        found = bounds.compare_all(program, got, reference_of_job, job.inputs, rounded=rounded(program))
        for comparison in found:
            ratio = comparison.error / comparison.limit if comparison.limit else float(comparison.error > 0)
            if comparison.name in ratios:
                ratios[comparison.name] = max(ratios[comparison.name], ratio)
            else:
                inner = max(inner, ratio)
            seen += got[comparison.name].size
            if not comparison.ok:
                failed += 1
                detail = detail or (
                    f"{comparison.name}{list(comparison.worst_index)}: error {comparison.error:.3g}, "
                    f"limit {comparison.limit:.3g} on {job} ({comparison.why})"
                )
    shares = [*ratios.items(), ("inner values", inner)]
    counts = (("failed", failed), *((f"{name} error/limit", _short(ratio)) for name, ratio in shares))
    return Verdict("reference", not failed, (*counts, ("elements", seen)), detail)


def computed(program: Program) -> tuple[str, ...]:
    """Tensors that kernels write; what opaque stages write is the same on both sides."""
    opaque = {name for stage in program.stages_of_kind(*OPAQUE_KINDS) for name in stage.writes}
    return tuple(tensor.name for tensor in program.of_role("value", "result") if tensor.name not in opaque)


def _short(value: float) -> float:
    return float(f"{value:.3g}")


# ---- what ran and what it touched -------------------------------------------------------------------
def poison(outcomes: Outcomes, again: Outcomes) -> Verdict:
    """Unwritten elements per result, from two runs of each job under different poisons.

    Args:
        outcomes: runs under the first poison.
        again: runs under the second of some of the same jobs, of every `doubtful` one among them.
    """
    second = {job: outcome for job, outcome in again}
    wrong: dict[str, int] = {}
    seen = 0
    detail = ""
    for job, outcome in outcomes:
        for name, array in outcome.results.items():
            left = _holds(array, outcome.fill)
            other = second.get(job)
            if other is not None:
                # Under two poisons a byte pattern that a result may have cannot look unwritten.
                left = (left & _holds(other.results[name], other.fill)) | differs(array, other.results[name])
            elif array.dtype.itemsize == 1:
                continue
            count = int(np.count_nonzero(left))
            wrong[name] = wrong.get(name, 0) + count
            seen += array.size
            if count and not detail:
                detail = f"{name}: {count} of {array.size} elements unwritten on {job}"
    for job, outcome in (*outcomes, *again):
        for launch in outcome.launches:
            lost = {name: count for name, count in launch.unwritten.items() if count and name in wrong}
            if lost and not detail:
                detail = f"{launch.kernel} left bytes unwritten on {job}: {lost}"
    return Verdict("poison", not detail, (*wrong.items(), ("elements", seen)), detail)


def doubtful(outcome: Outcome) -> bool:
    """Whether a result holds the bytes it was filled with: unwritten, or written with just those."""
    return any(bool(_holds(array, outcome.fill).any()) for array in outcome.results.values())


def _holds(array: Array, fill: int) -> Array:
    size = array.dtype.itemsize
    found: Array = np.all(as_bytes(array).reshape(-1, size) == fill, axis=1)
    return found


def ran(loaded: Loaded, plan: Plan, outcomes: Outcomes) -> Verdict:
    """Kernels, launches and blocks against a plan made anew, and the compiled text against its digest.

    Args:
        loaded: what was compiled and launched.
        plan: the plan that the arm's name stands for.
        outcomes: every run of it.
    """
    wanted = Counter(kernel.name for kernel in plan.kernels)
    once = Counter(kernel.name for kernel in plan.kernels if kernel.grid == "once")
    wrong: list[str] = []
    launches = 0
    for job, outcome in outcomes:
        have = Counter(launch.kernel for launch in outcome.launches)
        launches += sum(have.values())
        if have != (wanted if job.tokens else once):
            wrong.append(f"on {job} launches were {dict(sorted(have.items()))}, the plan has {dict(wanted)}")
        for launch in outcome.launches:
            kernel = next((k for k in plan.kernels if k.name == launch.kernel), None)
            blocks = 0 if kernel is None else blocks_of(kernel, job.tokens)
            if launch.blocks != blocks or launch.blocks_run not in (-1, blocks):
                wrong.append(f"{launch.kernel} ran {launch.blocks_run} of {blocks} blocks on {job}")
            if launch.scalar != loaded.misaligned:
                wrong.append(f"{launch.kernel}: the {'scalar' if launch.scalar else 'vector'} twin ran")
    wrong += _other_text(loaded, plan)
    counts = (("wrong", len(wrong)), ("kernels", len(wanted)), ("launches", launches))
    return Verdict("ran", not wrong, counts, wrong[0] if wrong else "")


def blocks_of(kernel: Kernel, tokens: int) -> int:
    """Thread blocks of one launch."""
    tall = kernel.grid_blocks
    if kernel.grid == "once":
        return 1
    wide = tokens if kernel.cluster == 1 else -(-tokens // kernel.tokens_per_cluster(tokens))
    return wide * tall


def _other_text(loaded: Loaded, plan: Plan) -> list[str]:
    compiled = loaded.module.runner.module(loaded.misaligned)
    have = sha256(compiled.source)
    wrong = []
    if have != plan.emitted_sha256:
        wrong.append(f"the compiled text has sha256 {have[:12]}, the plan's has {plan.emitted_sha256[:12]}")
    counted = getattr(compiled, "launches", None)
    if counted is not None and dict(counted) != {k: v for k, v in loaded.module.counts.items() if v}:
        wrong.append(f"the backend counted launches {dict(counted)}, the module {loaded.module.counts}")
    return wrong


def sha256(text: str) -> str:
    """Hex digest of a text."""
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def inputs_unchanged(outcomes: Outcomes) -> Verdict:
    """Changed bytes per input."""
    wrong: dict[str, int] = {}
    seen = 0
    for job, outcome in outcomes:
        seen += sum(array.nbytes for array in job.inputs.values())
        for name, count in outcome.changed_inputs.items():
            wrong[name] = wrong.get(name, 0) + count
    detail = ", ".join(f"{count} bytes of {name}" for name, count in wrong.items())
    return Verdict("inputs_unchanged", not wrong, (*wrong.items(), ("bytes", seen)), detail)


def findings(outcomes: Outcomes) -> Verdict:
    """Findings of the executor but for those of race mode."""
    return _findings("findings", outcomes, lambda kind: kind not in RACES)


def race(outcomes: Outcomes) -> Verdict:
    """Findings of race mode."""
    return _findings("race", outcomes, lambda kind: kind in RACES)


def _findings(check: str, outcomes: Outcomes, wanted: object) -> Verdict:
    assert callable(wanted)
    kinds: Counter[str] = Counter()
    launches = 0
    detail = ""
    for job, outcome in outcomes:
        for launch in outcome.launches:
            launches += 1
            mine = [finding for finding in launch.findings if wanted(finding.kind)]
            kinds.update(finding.kind for finding in mine)
            if mine and not detail:
                detail = f"{launch.kernel} on {job}: {mine[0].text}"
            if check == "findings" and not launch.completed:
                kinds["stopped"] += 1
                detail = detail or f"{launch.kernel} on {job}: the launch was stopped or reported too much to list"
    return Verdict(check, not detail, (*sorted(kinds.items()), ("launches", launches)), detail)


def slab_once(plan: Plan, outcomes: Outcomes) -> Verdict | None:
    """Loads of each element of the streams that live in registers; None where no kernel keeps any."""
    kept = {
        (kernel.name, place.tensor)
        for kernel in plan.kernels
        for place in kernel.places
        if place.space == "thread"
        and "n" in plan.program.tensor(place.tensor).shape
        and not plan.made_in(kernel, place.tensor)
    }
    if not kept:
        return None
    most = elements = wrong = 0
    detail = ""
    for job, outcome in outcomes:
        for launch in outcome.launches:
            for name, counted in launch.counts.items():
                if (launch.kernel, name) not in kept:
                    continue
                elements += counted.loads.size
                most = max(most, int(counted.loads.max(initial=0)))
                bad = int(np.count_nonzero(counted.loads != 1))
                wrong += bad
                if bad and not detail:
                    detail = f"{launch.kernel}: {bad} elements of {name} are not loaded exactly once on {job}"
    if not elements:
        detail = detail or "no access was counted"
    return Verdict("slab_once", not detail, (("wrong", wrong), ("most", most), ("elements", elements)), detail)
