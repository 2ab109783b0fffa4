"""place: threads own columns, tensors get a home, stages become steps.

```
kernel {rowsq gates sinkhorn collapse}
  columns  thread i owns [i*run, (i+1)*run) of all n streams, read in chunks
  x        registers of its owner, or global memory read twice
  logits   one element a lane | one row a lane | all in every lane | shared memory
```
The reduction order over columns does not depend on any of it (mhcgen.arithmetic), so neither do the bits.
Refusal codes: P-ELEMENT, P-REGISTERS, P-CHAIN, P-SLAB, P-CLUSTER, L-THREADS.

Deliberately not done here: barriers. Steps only state what they touch.
"""

from __future__ import annotations

from dataclasses import replace

from mhcgen.combs import DirectMap, comb_program
from mhcgen.ir import Stage
from mhcgen.log import Decision, LogEntry
from mhcgen.passes.geometry import KEPT_COLUMNS, MAX_CLUSTER, WORKING_REGISTERS, geometry, registers_per_thread
from mhcgen.passes.options import check_options
from mhcgen.passes.refuse import refuse
from mhcgen.plan import Kernel, Options, Place, Plan
from mhcgen.stages import COMB_STAGES, KINDS
from mhcgen.steps import expand_kernel


def place(plan: Plan) -> Plan:
    """Plan -> Plan with geometry, places and steps in every kernel.

    Raises:
        RefusedError: a placement, slab or block size asked for by name is not legal.
        UsageError: `U-OPTION`, see `mhcgen.passes.options`.
    """
    if "place" in plan.done:
        return plan
    check_options(plan.options)
    _check_counts(plan.options)
    for index, kernel in enumerate(plan.kernels):
        placed, log = _place_kernel(plan, kernel)
        plan = replace(plan.with_kernel(index, placed), log=(*plan.log, *log))
        expanded = expand_kernel(plan, placed)
        plan = plan.with_kernel(index, expanded)
    return plan


def _check_counts(options: Options) -> None:
    threads = options.threads
    if threads is not None and (
        isinstance(threads, bool) or not isinstance(threads, int) or threads % 32 or not 32 <= threads <= 1024
    ):
        raise refuse(
            "place",
            "L-THREADS",
            f"threads {threads!r}",
            "a block is a multiple of 32 threads from 32 to 1024",
            "use a multiple of 32 up to 1024",
        )
    cluster = options.cluster
    if cluster is not None and (
        isinstance(cluster, bool) or not isinstance(cluster, int) or not 1 <= cluster <= MAX_CLUSTER
    ):
        raise refuse(
            "place",
            "P-CLUSTER",
            f"cluster {cluster!r}",
            f"a cluster has 1 to {MAX_CLUSTER} blocks",
            "use a count from 1, for no cluster, to 16",
        )


def _place_kernel(plan: Plan, kernel: Kernel) -> tuple[Kernel, list[LogEntry]]:
    log: list[LogEntry] = []
    stages = plan.kernel_stages(kernel)
    kernel = geometry(plan, kernel, stages, log)
    layout = _layout(plan, kernel, stages, log)
    places = _places(plan, kernel, stages, layout, log)
    return replace(kernel, places=places), log


def power_of_two(n: int) -> int:
    """n rounded up to a power of two."""
    return 1 << (n - 1).bit_length()


def register_limit(warps: int) -> int:
    """Largest n whose whole matrix, logits and sums a lane can hold beside its working registers."""
    have = registers_per_thread(warps) - WORKING_REGISTERS
    n = 1
    while 2 * (n + 1) * (n + 1) <= have and n < 6:
        n += 1
    return n


def _layout(plan: Plan, kernel: Kernel, stages: tuple[Stage, ...], log: list[LogEntry]) -> str:
    """How lanes hold the mixes and the matrix: element, row, registers or shared."""
    if not any(stage.kind in ("gates", "head_gates", *COMB_STAGES) for stage in stages):
        return ""
    n, wish = plan.program.dim("n"), plan.options.placement
    square = power_of_two(n) ** 2
    if wish == "element" and square > 32:
        raise refuse(
            "place",
            "P-ELEMENT",
            f"placement element at n = {n}",
            f"one element a lane needs {power_of_two(n)} x {power_of_two(n)} = {square} lanes, and a warp has 32",
            "use --placement row, which holds one row a lane up to n = 16",
        )
    other = _no_matrix(plan, stages)
    if wish in ("element", "row", "registers") and other:
        raise refuse(
            "place",
            "P-MATRIX",
            f"placement {wish} in {kernel.name}",
            f"the lanes hold logits of an n x n matrix, and {other}",
            "use --placement shared",
        )
    chain = _one_chain(plan, stages)
    if wish in ("element", "row", "registers") and not chain:
        raise refuse(
            "place",
            "P-CHAIN",
            f"placement {wish} in {kernel.name}",
            "the lanes hold the mixes of one site, and this kernel works on more than one",
            "use --placement shared, or split the group",
        )
    limit = register_limit(kernel.warps)
    if wish == "registers" and n > limit:
        raise refuse(
            "place",
            "P-REGISTERS",
            f"placement registers at n = {n}",
            f"{n * n} elements and their sums in every lane would spill; the limit here is n = {limit}",
            "use --placement row, or shared",
        )
    if wish != "auto":
        log.append(Decision("place", "logits, comb", wish, "asked for"))
        return wish
    if other or not chain:
        why = (
            f"the lanes hold logits of an n x n matrix, and {other}"
            if other
            else "the lanes hold the mixes of one site, and here are more than one"
        )
        log.append(Decision("place", "logits, comb", "shared", why))
        return "shared"
    if plan.options.sync == "block":
        log.append(
            Decision(
                "place",
                "logits, comb",
                "shared",
                "block barriers were asked for, and only shared memory needs them",
            )
        )
        return "shared"
    if square <= 32:
        log.append(
            Decision("place", "logits, comb", "element", f"{square} lanes hold one element each; sums are shuffles")
        )
        return "element"
    log.append(
        Decision(
            "place",
            "logits, comb",
            "row",
            f"{square} elements exceed the 32 lanes of a warp, and {n} rows do not: one row a lane",
        )
    )
    return "row"


def _no_matrix(plan: Plan, stages: tuple[Stage, ...]) -> str:
    """Why lanes cannot hold the logits of these stages, which then live in shared memory; empty where they can."""
    n = plan.program.dim("n")
    for stage in stages:
        if stage.kind in COMB_STAGES and isinstance(comb_program(stage, n), DirectMap):
            return f"comb {stage.attr('comb')} is made element by element, of other logits or of none"
        if stage.kind == "gates":
            logits = dict(stage.results).get("logits")
            if logits is None or plan.program.shape(logits, 1)[-1] != n * n:
                return f"{stage.name} makes no n x n logits"
    return ""


def _one_chain(plan: Plan, stages: tuple[Stage, ...]) -> bool:
    """Whether at most one set of mixes is worked on: one gates stage, one matrix, and that of its logits."""
    gates = [s for s in stages if s.kind == "gates"]
    matrices = [s for s in stages if s.kind in COMB_STAGES]
    if len(gates) > 1 or len(matrices) > 1:
        return False
    return all(dict(g.results).get("logits") == dict(s.operands).get("logits") for g in gates for s in matrices)


def _fits_lanes(plan: Plan, kernel: Kernel, slot: str, tensor: str) -> bool:
    """Whether lanes can hand a tensor on: logits to the sinkhorn, rescaled mixes to the gates alone."""
    inside = [r for r in plan.program.readers.get(tensor, ()) if r in kernel.stages]
    kinds = {plan.program.stage(r).kind for r in inside}
    if slot == "logits":
        writer = plan.program.stage(plan.program.writers[tensor])
        return bool(kinds) and kinds <= set(COMB_STAGES) and writer.kind == "gates"
    if slot != "mixes_scaled" or plan.program.stage(plan.program.writers[tensor]).kind != "rowsq":
        return False
    return kinds == {"gates"} and not plan.escapes(kernel, tensor)


def _places(
    plan: Plan, kernel: Kernel, stages: tuple[Stage, ...], layout: str, log: list[LogEntry]
) -> tuple[Place, ...]:
    places: dict[str, Place] = {place.tensor: place for place in kernel.places}
    columns = kernel.columns
    keep = columns is not None and columns.run <= KEPT_COLUMNS
    for stage in stages:
        kind = KINDS[stage.kind]
        for slot, tensor in stage.results:
            if tensor in places:
                continue
            inside = any(r in kernel.stages for r in plan.program.readers.get(tensor, ()))
            shape = dict((s.rstrip("?"), d) for s, d in kind.results)[slot]
            if not inside:
                places[tensor] = Place(tensor, "global")
            elif "H" in shape:
                in_thread = keep and "n" not in shape
                places[tensor] = Place(tensor, "thread" if in_thread else "global")
                if not in_thread:
                    log.append(
                        Decision(
                            "place",
                            tensor,
                            "global, read back by its writer",
                            "a thread's run does not fit registers",
                        )
                    )
            elif layout in ("element", "row", "registers") and _fits_lanes(plan, kernel, slot, tensor):
                places[tensor] = Place(tensor, "lane", layout)
            else:
                places[tensor] = Place(tensor, "shared")
        if stage.kind in ("gates", *COMB_STAGES):
            # Gates without logits still say by their pre how the mixes are held.
            results = dict(stage.results)
            matrix = results["comb"] if stage.kind != "gates" else results.get("logits", results["pre"])
            places[matrix] = replace(places[matrix], layout=layout)
        for tensor in stage.reads:
            places.setdefault(tensor, Place(tensor, "global"))
    return tuple(places[name] for name in sorted(places))
