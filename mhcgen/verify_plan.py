"""Rules a Plan must keep, by how far along it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mhcgen.errors import ProgramError
from mhcgen.hazards import STRENGTH, in_words, walk_hazards
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.plan import Plan, Step, walk

Rule = Callable[[Plan], Iterator[str]]


def every_stage_has_one_kernel(plan: Plan) -> Iterator[str]:
    """Each stage that is not opaque is in exactly one kernel."""
    homes = [name for kernel in plan.kernels for name in kernel.stages]
    for stage in plan.program.stages:
        wanted = 0 if stage.kind in OPAQUE_KINDS else 1
        if homes.count(stage.name) != wanted:
            yield f"stage {stage.name} is in {homes.count(stage.name)} kernels"


def kernel_names_are_unique(plan: Plan) -> Iterator[str]:
    """No two kernels share a name."""
    names = [kernel.name for kernel in plan.kernels]
    for name in sorted({n for n in names if names.count(n) > 1}):
        yield f"kernel {name} is defined twice"


def every_touched_tensor_has_a_place(plan: Plan) -> Iterator[str]:
    """After place: each tensor a kernel reads or writes lives somewhere in it."""
    for kernel in plan.kernels:
        for stage in plan.kernel_stages(kernel):
            for tensor in (*stage.reads, *stage.writes):
                if kernel.place(tensor) is None:
                    yield f"{kernel.name}: {tensor} has no place"


def threads_own_every_column(plan: Plan) -> Iterator[str]:
    """After place: runs are powers of two, and together they cover H."""
    hidden = plan.program.dim("H")
    for kernel in plan.kernels:
        c = kernel.columns
        if c is None:
            continue
        if c.run & (c.run - 1) or c.run % c.chunk or c.chunk % c.vector or hidden % c.chunk:
            yield f"{kernel.name}: run {c.run}, chunk {c.chunk} and vector {c.vector} do not nest in H = {hidden}"
        # In a cluster every warp of a block has the block's columns, one run a lane.
        warps = 1 if kernel.cluster > 1 else kernel.data_warps
        if warps * 32 * c.run * c.blocks < hidden:
            yield f"{kernel.name}: {kernel.data_warps} warps of run {c.run} do not cover H = {hidden}"


def buffers_are_declared(plan: Plan) -> Iterator[str]:
    """After place: each shared buffer a step touches is declared, and each declared one is touched."""
    for kernel in plan.kernels:
        declared = {buffer.name for buffer in kernel.buffers}
        touched = {a.buffer for s in kernel.steps() for a in s.accesses if not a.buffer.startswith("global:")}
        for name in sorted(touched ^ declared):
            yield f"{kernel.name}: buffer {name} is {'not declared' if name in touched else 'never used'}"


def no_hazard_is_bare(plan: Plan) -> Iterator[str]:
    """After sync: every pair of conflicting accesses has a strong enough barrier between."""
    for kernel in plan.kernels:
        for hazard in walk_hazards(kernel, kernel.body, insert=False).bare:
            yield f"{kernel.name}: {hazard} needs a {in_words(hazard.scope)} and has none"


def every_barrier_has_a_reason(plan: Plan) -> Iterator[str]:
    """After sync: a barrier names its hazards, and is at least as strong as they need."""
    for kernel in plan.kernels:
        for sync in kernel.syncs():
            if not sync.because:
                yield f"{kernel.name}: a {sync.scope} barrier has no hazard"
            for hazard in sync.because:
                if STRENGTH[hazard.scope] > STRENGTH[sync.scope]:
                    yield f"{kernel.name}: {hazard} needs {hazard.scope}, the barrier is {sync.scope}"


def nothing_of_a_predecessor_is_read_before_the_wait(plan: Plan) -> Iterator[str]:
    """After place: a dependent launch reads parameters only, and writes nothing global, before it waits."""
    for kernel in plan.kernels:
        if not kernel.dependent:
            continue
        names = [step.template for step in kernel.steps()]
        if names.count("dependent_launch") != 1 or names.count("dependent_wait") != 1:
            yield f"{kernel.name}: dependent launch and its wait do not come as a pair"
            continue
        for step in kernel.steps():
            if step.template == "dependent_wait":
                break
            if step.template != "dependent_launch" and not step.constant:
                yield f"{kernel.name}: {step.name} runs before the wait and is not bound to parameters"


def nothing_is_sent_before_every_block_has_started(plan: Plan) -> Iterator[str]:
    """After place: a cluster's blocks arrive once and wait once, and no step sends before that wait."""
    for kernel in plan.kernels:
        if kernel.cluster == 1:
            continue
        nodes = list(walk(kernel.body))
        templates = [node.template if isinstance(node, Step) else "" for node in nodes]
        if templates.count("cluster_arrive") != 1 or templates.count("cluster_wait") != 1:
            yield f"{kernel.name}: the arrival of its blocks and the wait for it do not come as a pair"
            continue
        started = templates.index("cluster_wait")
        for node in nodes[:started]:
            if isinstance(node, Step) and any(access.remote for access in node.accesses):
                yield f"{kernel.name}: {node.name} sends before every block has started"


RULES: dict[str, tuple[Rule, ...]] = {
    "fuse": (every_stage_has_one_kernel, kernel_names_are_unique),
    "place": (
        every_touched_tensor_has_a_place,
        threads_own_every_column,
        buffers_are_declared,
        nothing_of_a_predecessor_is_read_before_the_wait,
        nothing_is_sent_before_every_block_has_started,
    ),
    "sync": (no_hazard_is_bare, every_barrier_has_a_reason),
    "stamp": (),
    "launch": (),
}


def plan_violations(plan: Plan) -> list[str]:
    """All violations of the rules that hold after the passes already run."""
    return [f"{rule.__name__}: {text}" for name in plan.done for rule in RULES[name] for text in rule(plan)]


def verify_plan(plan: Plan) -> None:
    """Check every rule that holds at this level.

    Raises:
        ProgramError: `V-PLAN`, its notes list every violation.
    """
    found = plan_violations(plan)
    if found:
        raise ProgramError(
            "V-PLAN",
            f"the Plan breaks {len(found)} rule(s) after {plan.done[-1]}",
            where=f"model {plan.program.model}, fuse {plan.options.fuse}",
            notes=tuple(found),
            hints=("this is a bug of a pass; please report it with the command that shows it",),
        )
