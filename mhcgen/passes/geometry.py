"""geometry: threads, warps and the column map of a kernel, the first half of place.

Four forms, tried in this order: pointwise (blocks share a token), cluster (blocks share a token's columns through
each other's memory), slab (the streams stay in registers), streaming (each stage reads them again).
Refusal codes: P-SLAB, P-CLUSTER, L-THREADS.
"""

from __future__ import annotations

from dataclasses import replace

from mhcgen.backends.archs import parse_arch
from mhcgen.ir import Program, Stage
from mhcgen.log import Decision, LogEntry
from mhcgen.passes.refuse import refuse
from mhcgen.plan import Columns, Kernel, Options, Place, Plan
from mhcgen.stages import COMB_STAGES, EACH_STREAM, KINDS, LOW_RANK, STREAM_LAST

MAX_WARPS = 32
REGISTERS_PER_SM = 65536
MAX_REGISTERS = 255
#: Registers a data thread needs beside the slab it holds: addresses, accumulators, temporaries.
WORKING_REGISTERS = 44
#: Floats of one chunk a streaming thread holds at once (n streams of `chunk` columns).
CHUNK_FLOATS = 64
DEFAULT_WARPS = 8
#: Small blocks where a token's columns may be shared: at one token, more SMs load at once.
POINTWISE_WARPS = 2
#: Longest run of y or z a thread keeps in registers between collapse, norm and quant.
KEPT_COLUMNS = 16
ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8_e4m3": 1, "int32": 4}

#: Kinds that need every column of a token in one block.
REDUCING = ("project", "rowsq", *EACH_STREAM, "norm_streams", "norm")
#: Kinds whose totals or small vectors are worked on by one warp.
MIXING = ("project", "rowsq", *EACH_STREAM, "norm_streams", "gates", "head_gates", *LOW_RANK, *COMB_STAGES)


def geometry(plan: Plan, kernel: Kernel, stages: tuple[Stage, ...], log: list[LogEntry]) -> Kernel:
    """Threads, warps and the column map."""
    kinds = {stage.kind for stage in stages}
    mixes = any(kind in MIXING for kind in kinds)
    if not any(KINDS[kind].work == "column" for kind in kinds):
        log.append(
            Decision("place", kernel.name, "one warp a token", "it holds no column work; a warp covers the mixes")
        )
        once = all(plan.program.runs_once(stage) for stage in stages)
        return replace(kernel, data_warps=0, mix_warp=0, warps=1, grid="once" if once else "token")
    chunk = _chunk(plan.program)
    if not mixes and not any(kind in REDUCING for kind in kinds):
        return _pointwise(plan, kernel, chunk, log)
    clustered = _cluster_geometry(plan, kernel, kinds, chunk, log)
    if clustered is not None:
        return clustered
    slab = _slab_geometry(plan, kernel, stages, chunk, log)
    if slab is not None:
        return slab
    streaming = _streaming(plan, kernel, mixes, chunk, log)
    return _row_blocks(plan, streaming, stages, log) if kinds == {"project"} else streaming


def _row_blocks(plan: Plan, kernel: Kernel, stages: tuple[Stage, ...], log: list[LogEntry]) -> Kernel:
    """A projection alone: its rows do not depend on each other, so each has a block of its own."""
    if len(stages) != 1:
        return kernel
    rows = plan.program.shape(stages[0].result("mixes"), 1)[-1]
    log.append(
        Decision(
            "place",
            kernel.name,
            f"{rows} blocks a token, one for each row of fn",
            "the rows do not depend on each other, and fn is far larger than the streams",
        )
    )
    return replace(kernel, grid="token_rows", row_blocks=rows)


def _chunk(program: Program) -> int:
    """Columns handled at once: the largest power of two up to 8 that divides H and fits registers."""
    n, hidden = program.dim("n"), program.dim("H")
    chunk = 8
    while hidden % chunk or (n * chunk > CHUNK_FLOATS and chunk > 1):
        chunk //= 2
    return chunk


def _columns(plan: Plan, run: int, chunk: int, blocks: int = 1) -> Columns:
    streams = [t.dtype for t in plan.program.tensors if "H" in t.shape]
    itemsize = max(ITEMSIZE[dtype] for dtype in streams)
    vector = 1 if plan.options.scalar else min(chunk, 16 // itemsize)
    return Columns(run, chunk, vector, blocks)


def _run(hidden: int, threads: int, least: int) -> int:
    """Smallest power-of-two run, at least `least`, with which the threads cover H."""
    run = least
    while threads * run < hidden:
        run *= 2
    return run


def _least_run(stages: tuple[Stage, ...], chunk: int) -> int:
    """Fewest columns of a thread: a chunk, and so many that a warp holds a whole quantisation group."""
    return max([chunk, *(int(stage.attr("group")) // 32 for stage in stages if stage.kind == "quant")])


def _pointwise(plan: Plan, kernel: Kernel, chunk: int, log: list[LogEntry]) -> Kernel:
    hidden, options = plan.program.dim("H"), plan.options
    wanted = (options.threads or 32 * POINTWISE_WARPS) // 32
    gated = any(stage.kind == "gated_mean" for stage in plan.kernel_stages(kernel))
    if gated and options.threads is None and options.regime == "decode":
        chunk = wanted = 1  # what gates read is far larger than the streams: many small blocks, on many SMs
    run = _least_run(plan.kernel_stages(kernel), chunk)
    warps = min(wanted, -(-hidden // (32 * run))) if options.threads is None else wanted
    blocks = -(-hidden // (warps * 32 * run))
    log.append(
        Decision(
            "place",
            kernel.name,
            f"{warps * 32} threads, {blocks} blocks a token, {run} columns a thread",
            "no stage reduces over columns, so blocks may share a token",
        )
    )
    return replace(
        kernel,
        data_warps=warps,
        mix_warp=-1,
        warps=warps,
        columns=_columns(plan, run, chunk, blocks),
        grid="token_columns",
    )


#: Kinds whose steps exist for clusters (mhcgen.steps.cluster and the lanes of the leader).
CLUSTER_KINDS = frozenset(("post", "project", "rowsq", "gates", "sinkhorn", "collapse", "norm", "quant"))
_PROJECTIONS = {"project", "project_streams"}
#: Most blocks of a cluster; above 8 the launch asks for the non-portable size.
MAX_CLUSTER = 16
#: Most tokens a cluster works on at once: one a warp, and their slices fit static shared memory.
MAX_CLUSTER_TOKENS = 16
#: Shared memory of a block for its slice of the streams and the sums that other blocks send.
STAGED_BYTES = 44 * 1024
#: Registers of a thread beside the rows of fn and the streams it holds.
CLUSTER_REGISTERS = 30


def _no_cluster(plan: Plan, kernel: Kernel, kinds: set[str], most: int) -> str:
    """Why a kernel is none for a cluster, whatever its size; empty if it is one."""
    options = plan.options
    if most == 1 or not kinds & _PROJECTIONS:
        return "only a kernel with a projection uses a cluster"
    if kinds & {"norm_streams", *LOW_RANK, "gated_mean"}:
        return "gates of every element have no steps for a cluster, so one block does a token's columns"
    if other := sorted(kinds - CLUSTER_KINDS):
        return f"{', '.join(other)}: no steps for a cluster"
    if not {"rowsq", "gates"} <= kinds:
        return "the leader of a token needs rowsq and gates in the kernel"
    if any(t.shape == STREAM_LAST for t in plan.program.tensors):
        return "the streams lie side by side, and a cluster reads them stream by stream"
    if not _one_site(plan.kernel_stages(kernel)):
        return "a cluster works on one site: one stage of each kind, each fed by the one before"
    if unlike := _unlike(plan.program, plan.kernel_stages(kernel)):
        return unlike
    if parse_arch(options.arch).facts.cluster_blocks == 1:
        return f"{options.arch} has no clusters"
    if options.slab == "registers" or options.sync == "block":
        return "a slab in one block's registers, or block barriers, were asked for"
    return ""


def _cluster_geometry(plan: Plan, kernel: Kernel, kinds: set[str], chunk: int, log: list[LogEntry]) -> Kernel | None:
    """Geometry with a token's columns over the blocks of a cluster; None where it is not wanted or not possible.

    Only a projection is worth it: its fn is n(2+n) times as large as the streams, so several SMs must read it.
    """
    options, program = plan.options, plan.program
    usual = parse_arch(options.arch).facts.cluster_blocks
    most = usual if options.cluster is None else options.cluster
    wanted = options.cluster is not None and options.cluster > 1
    if reason := _no_cluster(plan, kernel, kinds, most):
        if wanted:
            raise refuse("place", "P-CLUSTER", kernel.name, reason, "leave --cluster out")
        if most > 1 and kinds & _PROJECTIONS and not kinds <= CLUSTER_KINDS:
            log.append(Decision("place", kernel.name, "no cluster", reason))
        return None
    n, hidden = program.dim("n"), program.dim("H")
    run = chunk
    while -(-hidden // (32 * run)) > most:
        run *= 2
    blocks = -(-hidden // (32 * run))
    itemsize = ITEMSIZE[next(t.dtype for t in program.tensors if t.shape == ("T", "n", "H"))]
    twice = _held_twice(n, run, chunk, itemsize) if "post" in kinds else 0
    fit = _cluster_warps(n, run, chunk, program.dim("R"), options.threads, twice)
    group = next((s.attr("group") for s in plan.kernel_stages(kernel) if s.kind == "quant"), run)
    hint = "ask for more blocks, or leave --cluster out"
    if blocks == 1:
        reason = f"one block of 32 lanes has all {hidden} columns, {run} a lane"
    elif options.threads is not None and options.threads < 64:
        reason = f"{options.threads} threads leave no warp for the columns beside that of the mixes"
        hint = "ask for --threads 64 or more, or leave --cluster out"
    elif fit is None:
        reason = f"{run} columns a lane, as {most} blocks have them, do not fit the registers"
    elif group > 32 * run:
        reason = f"a group of {group} columns is longer than the {32 * run} of a block"
    elif group < run:
        reason = f"a group of {group} columns is shorter than the {run} of a lane, which makes one scale"
    if reason or fit is None:
        if wanted:
            raise refuse("place", "P-CLUSTER", kernel.name, reason, hint)
        if blocks > 1:
            log.append(Decision("place", kernel.name, "no cluster", reason))
        return None
    warps, rows = fit
    tokens = min(blocks, warps, MAX_CLUSTER_TOKENS)
    kept = n * 32 * run * itemsize
    tokens = max(1, min(tokens, (STAGED_BYTES - 4 * blocks * program.dim("R")) // kept))
    log.append(
        Decision(
            "place",
            kernel.name,
            f"a cluster of {blocks} blocks for up to {tokens} tokens, {run} columns a lane, {rows} rows of fn a warp",
            "fn is far larger than the streams: its columns are spread over several SMs, and each row is "
            "read once for all tokens of the cluster"
            + (f"; asked for, and more than the {usual} that are documented for {options.arch}" * (blocks > usual)),
        )
    )
    return replace(
        kernel,
        data_warps=warps,
        mix_warp=warps,
        warps=warps + 1,
        columns=_columns(plan, run, chunk, blocks),
        grid="cluster",
        cluster=blocks,
        tokens=tokens,
        rows_per_warp=rows,
    )


#: (reader, its operand, writer, its result): what one site hands on inside a cluster.
_LINKS = (
    ("rowsq", "mixes", "project", "mixes"),
    ("gates", "mixes_scaled", "rowsq", "mixes_scaled"),
    ("sinkhorn", "logits", "gates", "logits"),
    ("norm", "y", "collapse", "y"),
    ("quant", "z", "norm", "z"),
    ("project", "x", "post", "x_next"),
)


def _one_site(stages: tuple[Stage, ...]) -> bool:
    """Whether stages are one site's: no kind twice, linked, and all reading the same streams."""
    by_kind = {stage.kind: stage for stage in stages}
    streams = {s.operand("x") for kind, s in by_kind.items() if kind in ("project", "rowsq", "collapse")}
    if len(by_kind) < len(stages) or len(streams) > 1:
        return False
    for reader, slot, writer, result in _LINKS:
        # Streams may be given; everything else that is read comes from the stage before.
        if reader in by_kind and (writer in by_kind or writer != "post"):
            made = dict(by_kind[writer].results).get(result) if writer in by_kind else None
            if dict(by_kind[reader].operands).get(slot) != made:
                return False
    return True


def _unlike(program: Program, stages: tuple[Stage, ...]) -> str:
    """Why a cluster cannot read what these stages read; empty where it can."""
    for stage in stages:
        if stage.kind == "post" and len({program.tensor(t).dtype for t in (*stage.reads[:2], *stage.writes)}) > 1:
            return "a cluster reads streams and branch output of the dtype that it writes"
        coefficients = [name for slot, name in stage.operands if slot in ("pre", "post", "comb")]
        if any("T" not in program.tensor(name).shape for name in coefficients):
            return "a cluster reads coefficients of each token"
    return ""


def _held_twice(n: int, run: int, chunk: int, itemsize: int) -> int:
    """Registers for the streams that post reads while it makes the new ones.

    Narrow chunks are all loaded ahead. Of wide ones bf16 and fp16 fit in what is counted anyway; fp32 does so for up
    to four streams in one chunk. Found by compiling: n = 1 to 16, H = 257 to 7168, both widths of elements.
    """
    if chunk < 8:
        return max(96, n * run)
    return n * chunk if itemsize == 4 and (run > chunk or n > 4) else 0


def _cluster_warps(
    n: int, run: int, chunk: int, rows: int, threads: int | None, twice: int
) -> tuple[int, int] | None:
    """(data warps, rows of fn a warp holds) whose registers fit: fewest passes over fn, then most warps.

    One warp more than the rows need takes the squares; the collapse wants a warp a token, so there are a few.
    """
    fitting: list[tuple[int, int, int]] = []
    for rows_per_warp in (2, 1):
        for warps in (12, 8, 6, 4, 2):
            data = max(min(warps, -(-rows // rows_per_warp)) + 1, min(warps, 8))
            data = data if threads is None else threads // 32 - 1
            need = rows_per_warp * n * run + n * chunk + twice + CLUSTER_REGISTERS
            if data >= 1 and need <= registers_per_thread(data + 1):
                fitting.append((-(-rows // (rows_per_warp * data)), -data, rows_per_warp))
    if not fitting:
        return None
    _, data, rows_per_warp = min(fitting)
    return -data, rows_per_warp


def _slab_streams(plan: Plan, kernel: Kernel, stages: tuple[Stage, ...]) -> tuple[str, ...]:
    """Stream tensors worth keeping in registers: read twice, or made here and read here."""
    readers: dict[str, int] = {}
    for stage in stages:
        for slot, tensor in stage.operands:
            if slot == "x" and stage.kind != "post":
                readers[tensor] = readers.get(tensor, 0) + 1
    return tuple(t for t, count in readers.items() if count > 1 or plan.made_in(kernel, t))


def registers_per_thread(warps: int) -> int:
    """Registers each thread may use so that one block of that many warps fits an SM.

    An SM hands registers to warps in fours, eight registers a thread at a time.
    """
    return min(MAX_REGISTERS, REGISTERS_PER_SM // (-(-warps // 4) * 4 * 32) // 8 * 8)


def _slab_geometry(
    plan: Plan, kernel: Kernel, stages: tuple[Stage, ...], chunk: int, log: list[LogEntry]
) -> Kernel | None:
    """Geometry with the streams in registers, None where it is not wanted or does not fit."""
    options, program = plan.options, plan.program
    streams = _slab_streams(plan, kernel, stages)
    if options.slab == "global" or not streams:
        return None
    if options.regime == "prefill" and options.slab == "auto":
        log.append(
            Decision(
                "place",
                kernel.name,
                "streams stay in global memory",
                "for prefill: small blocks keep an SM busy while one of them waits, and read again from the L2",
            )
        )
        return None
    n, hidden = program.dim("n"), program.dim("H")
    kinds = {stage.kind for stage in stages}
    may_own = bool(kinds & set(MIXING)) and ("collapse" in kinds or options.mix_warp == "own")
    # A warp of its own for the mixes is worth having, a slab in registers more so.
    extras = {"own": (1,), "shared": (0,)}.get(options.mix_warp, (1, 0))
    if not may_own:
        extras = (0,)
    # With a given block size, narrower pieces let more threads share the columns.
    pieces = [chunk] if options.threads is None else [piece for piece in (8, 4, 2, 1) if piece <= chunk]
    tried: list[tuple[int, int, int, int, int, int, int]] = []
    for extra, piece in ((e, p) for e in extras for p in pieces):
        least = _least_run(stages, piece)
        # Gates of every element are made a chunk of all streams at a time; so are new streams, where they are many.
        chunked = "gated_mean" in kinds or ("post" in kinds and n > 8)
        working = WORKING_REGISTERS + (n * piece if chunked else 0)
        run, data_warps = _slab_run(options, extra, hidden, least, len(streams) * n, working, kernel.name)
        need = len(streams) * n * run + working
        have = registers_per_thread(data_warps + extra)
        tried.append((extra, piece, run, data_warps, need, have, working))
        if need <= have:
            break
    extra, piece, run, data_warps, need, have, working = tried[-1] if tried[-1][4] <= tried[-1][5] else tried[0]
    own = extra == 1
    fits = f"{n} x {run} floats a thread and {working} to work with, of {have} registers"
    if need > have:
        if options.slab == "registers":
            raise refuse(
                "place",
                "P-SLAB",
                kernel.name,
                f"the slab does not fit: it needs {fits}",
                "use more threads, or --slab global",
            )
        log.append(Decision("place", kernel.name, "streams stay in global memory", f"the slab needs {fits}"))
        return None
    log.append(Decision("place", ", ".join(streams), "registers of the owning threads", f"it fits: {fits}"))
    if own:
        matrix = next((stage.name for stage in stages if stage.kind in COMB_STAGES), "")
        why = f"the graph has no path from {matrix} to collapse, so both run at once"
        log.append(
            Decision(
                "place", kernel.name, "a warp of its own for the mixes", why if matrix else "no column waits for it"
            )
        )
    return replace(
        kernel,
        data_warps=data_warps,
        mix_warp=data_warps if own else 0,
        warps=data_warps + extra,
        columns=_columns(plan, run, piece),
        places=tuple(Place(t, "thread") for t in streams),
    )


def _slab_run(
    options: Options, extra: int, hidden: int, least: int, floats: int, working: int, kernel: str
) -> tuple[int, int]:
    """Run and data warps for a slab of `floats` registers a column; fewer, wider threads while it does not fit."""
    most = MAX_WARPS - extra if options.threads is None else options.threads // 32 - extra
    if most < 1:
        raise refuse(
            "place",
            "L-THREADS",
            kernel,
            "a Sinkhorn warp of its own leaves no data warp in this block",
            "use at least 64 threads, or --mix-warp shared",
        )
    run = _run(hidden, most * 32, least)
    if options.threads is not None:
        return run, most
    data_warps = -(-hidden // (32 * run))
    while floats * run + working > registers_per_thread(data_warps + extra) and data_warps > 1:
        run *= 2
        data_warps = -(-hidden // (32 * run))
    return run, data_warps


def _streaming(plan: Plan, kernel: Kernel, mixes: bool, chunk: int, log: list[LogEntry]) -> Kernel:
    """Geometry with the streams read from global memory by each stage."""
    options, hidden = plan.options, plan.program.dim("H")
    own = mixes and options.mix_warp == "own"
    extra = 1 if own else 0
    if options.threads is None:
        data_warps = min(DEFAULT_WARPS, -(-hidden // (32 * chunk)))
    else:
        data_warps = options.threads // 32 - extra
    if data_warps < 1:
        raise refuse(
            "place",
            "L-THREADS",
            kernel.name,
            "a Sinkhorn warp of its own leaves no data warp in this block",
            "use at least 64 threads, or --mix-warp shared",
        )
    # post holds a chunk of all streams beside the branch output and the coefficients.
    if any(stage.kind == "post" for stage in plan.kernel_stages(kernel)):
        have = registers_per_thread(data_warps + extra) - WORKING_REGISTERS
        while chunk > 1 and plan.program.dim("n") * chunk > have:
            chunk //= 2
    run = _run(hidden, data_warps * 32, _least_run(plan.kernel_stages(kernel), chunk))
    log.append(
        Decision(
            "place",
            kernel.name,
            f"{(data_warps + extra) * 32} threads, {run} columns a thread in chunks of {chunk}",
            "threads own aligned runs of 2^k columns, so every block size sums in the same tree",
        )
    )
    return replace(
        kernel,
        data_warps=data_warps,
        mix_warp=(data_warps if own else 0) if mixes else -1,
        warps=data_warps + extra,
        columns=_columns(plan, run, chunk),
    )
