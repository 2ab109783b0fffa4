"""The Plan: a Program with the choices made so far. Frozen; passes return new Plans.

```
Plan ── kernels: Kernel ── geometry: threads, warps, column map
                        ── places: where each tensor lives
                        ── body: Step | Loop | Sync, in program order
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING

from mhcgen.errors import UsageError
from mhcgen.ir import AttrValue, NumericClass, Program, Stage
from mhcgen.log import Decision, Hazard, LogEntry, Refusal

if TYPE_CHECKING:
    from mhcgen.runtime import Module

#: What an H200 holds at once with one block an SM: 7 clusters of more than 8 blocks, or 120 blocks in smaller ones
#: (docs/measurements). With more tokens each cluster takes several.
RESIDENT_CLUSTERS = 7
RESIDENT_BLOCKS = 120

#: The pass after which a Plan can be emitted.
LAST_PASS = "launch"

PLACEMENTS = ("auto", "shared", "row", "element", "registers")
SYNCS = ("auto", "warp", "block")
SLABS = ("auto", "registers", "global")
MIX_WARPS = ("auto", "own", "shared")
REGIMES = ("decode", "prefill")


@dataclass(frozen=True)
class Options:
    """A schedule as asked for; none of it may change a bit.

    Args:
        fuse: a preset, or explicit groups such as `rowsq+gates,collapse`.
        arch: target, e.g. `sm_90`.
        placement: where the mixing matrix lives.
        sync: `auto` and `warp` pick the weakest correct barrier, `block` forces block barriers.
        threads: threads per block, every warp counted; None lets the place pass choose.
        slab: whether the streams of a token stay in registers from the square sum to the collapse.
        mix_warp: whether the mix work has a warp of its own beside the data warps.
        cluster: most blocks of a cluster, 1 for none; None lets the place pass choose.
        scalar: use element loads where vectors would be legal (the twin for misaligned arrays).
        dependent: emit for dependent launch: parameters are read before the wait for the preceding launch.
        stamps: emit time stamps at phase borders.
        regime: what the schedule is chosen for: `decode`, the latency of few tokens, or `prefill`, the rate of many.
    """

    fuse: str = "none"
    arch: str = "sm_90"
    placement: str = "auto"
    sync: str = "auto"
    threads: int | None = None
    slab: str = "auto"
    mix_warp: str = "auto"
    scalar: bool = False
    cluster: int | None = None
    dependent: bool = False
    stamps: bool = False
    regime: str = "decode"


@dataclass(frozen=True)
class Team:
    """Consecutive warps that run a step together. `role` is `data`, `mix`, or `gate` (the first data warp alone)."""

    role: str
    first_warp: int
    warps: int

    @property
    def last_warp(self) -> int:
        """Index of its last warp."""
        return self.first_warp + self.warps - 1


@dataclass(frozen=True)
class Columns:
    """Which columns a data thread owns: an aligned run, read in chunks.

    Args:
        run: columns per thread, a power of two.
        chunk: columns handled at once; divides run, and H.
        vector: elements per load instruction of the streams; divides chunk.
        blocks: thread blocks that share one token's columns (1 where a reduction needs them together).
    """

    run: int
    chunk: int
    vector: int
    blocks: int = 1

    @property
    def chunks(self) -> int:
        """Chunks per run."""
        return self.run // self.chunk


@dataclass(frozen=True)
class Place:
    """Where a tensor lives inside a kernel.

    Args:
        tensor: its name.
        space: `global`, `shared`, `lane` (registers of the mix warp) or `thread` (registers of data threads).
        layout: how lanes hold it: `row`, `element`, `registers`, or empty.
    """

    tensor: str
    space: str
    layout: str = ""


#: Bytes of an element by the ctype of its buffer.
BUFFER_BYTES = {"float": 4, "double": 8, "int": 4, "fp32": 4, "bf16": 2, "fp16": 2, "arrivals": 8}


@dataclass(frozen=True)
class Buffer:
    """A shared-memory array of one kernel.

    Args:
        name: its name in the text, `s_...`.
        ctype: `float`, `double`, `int`, a dtype name of mhcgen.ir for streams, or `arrivals` for a counter of what
            other blocks send.
        count: number of elements.
    """

    name: str
    ctype: str
    count: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes."""
        return self.count * BUFFER_BYTES[self.ctype]


@dataclass(frozen=True)
class Access:
    """One step's use of a buffer.

    Args:
        buffer: shared buffer, or `global:<tensor>` for a tensor written and read in one kernel.
        write: whether it writes.
        own: each thread touches only elements no other thread of the kernel touches.
        remote: it touches the buffer of other blocks of the cluster; what it writes there is counted as it arrives.
    """

    buffer: str
    write: bool
    own: bool = False
    remote: bool = False


#: A register declaration: template under templates/registers/ and its sorted fields.
Declare = tuple[str, tuple[tuple[str, AttrValue], ...]]


@dataclass(frozen=True)
class Step:
    """One piece of one stage, run by one team, rendered by one template.

    Args:
        name: unique in the kernel, `stage.piece`.
        stage: the stage it belongs to.
        template: file under templates/steps/.
        team: `data`, `mix` or `all`.
        accesses: what it touches in shared memory, or in global memory written by this kernel.
        fields: numbers and names for the template, sorted.
        declares: register declarations to hoist to the kernel's top: (template, fields) pairs.
        early: it reads only what is given, so it may be issued before anything waits.
        constant: it reads parameters only, so it may be issued before a dependent launch's wait.
    """

    name: str
    stage: str
    template: str
    team: str
    accesses: tuple[Access, ...] = ()
    fields: tuple[tuple[str, AttrValue], ...] = ()
    declares: tuple[Declare, ...] = ()
    early: bool = False
    constant: bool = False


@dataclass(frozen=True)
class Loop:
    """A counted loop around steps.

    Args:
        name: unique in the kernel.
        count: times it runs.
        body: its contents.
    """

    name: str
    count: int
    body: tuple[Node, ...]


@dataclass(frozen=True)
class Sync:
    """A barrier and the hazards it covers.

    Args:
        scope: `warp`, `data` (the data warps, where the mix work has a warp of its own), `block`, or `arrival` (a
            team waits until everything that other blocks send into a buffer has come; nobody else waits).
        team: who joins it, or waits: `mix`, `gate`, `data` or `all`.
        because: the hazards; a barrier without one is never emitted.
        buffer: of an `arrival`, the buffer that is waited for; empty elsewhere.
    """

    scope: str
    team: str
    because: tuple[Hazard, ...]
    buffer: str = ""


Node = Step | Loop | Sync


@dataclass(frozen=True)
class Kernel:
    """One `__global__`.

    Args:
        name: name in the text.
        stages: names of the stages it holds, in the order they run.
        data_warps: warps that own columns; 0 where it holds no column work.
        mix_warp: index of the warp that runs the mix work; -1 where it holds none.
        warps: warps per block.
        columns: the column map; None where it holds no column work.
        places: where tensors live.
        buffers: shared arrays.
        body: steps, loops and barriers.
        grid: `token` (one block a token), `token_columns` (several blocks share a token's columns),
            `token_rows` (several blocks share the rows of fn), `cluster`, or `once` (one block for all tokens).
        shared_bytes: total of the buffers, set by the launch pass.
        cluster: blocks that work on the same tokens through each other's shared memory; 1 for none.
        tokens: most tokens of one cluster (their number is a run-time argument); 1 without one.
        rows_per_warp: rows of fn a warp of a cluster holds at once.
        row_blocks: blocks that share the rows of fn of one token (grid `token_rows`).
        dependent: launched so that it may start before its predecessor has ended.
        phases: names of the phases between time stamps, as `team: stage`; empty without stamps.
    """

    name: str
    stages: tuple[str, ...]
    data_warps: int = 0
    mix_warp: int = -1
    warps: int = 1
    columns: Columns | None = None
    places: tuple[Place, ...] = ()
    buffers: tuple[Buffer, ...] = ()
    body: tuple[Node, ...] = ()
    grid: str = "token"
    shared_bytes: int = 0
    phases: tuple[str, ...] = ()
    cluster: int = 1
    tokens: int = 1
    rows_per_warp: int = 0
    row_blocks: int = 1
    dependent: bool = False

    @property
    def threads(self) -> int:
        """Threads per block, every warp counted."""
        return 32 * self.warps

    @property
    def grid_text(self) -> str:
        """The grid in terms of T, for people."""
        if self.grid == "once":
            return "(1)"
        if self.grid == "cluster":
            return f"(ceil(T / per_cluster), {self.cluster}) in clusters of {self.cluster}"
        return f"(T, {self.grid_blocks})" if self.grid_blocks > 1 else "(T)"

    @property
    def grid_blocks(self) -> int:
        """Blocks along grid.y: those that share a token's columns, or its rows of fn."""
        if self.grid == "token_rows":
            return self.row_blocks
        return self.columns.blocks if self.columns is not None else 1

    def tokens_per_cluster(self, tokens: int) -> int:
        """How many tokens each cluster takes, so that all clusters are resident at once where that is possible."""
        resident = RESIDENT_CLUSTERS if self.cluster > 8 else RESIDENT_BLOCKS // self.cluster
        return max(1, min(self.tokens, -(-tokens // resident)))

    @property
    def own_mix_warp(self) -> bool:
        """The mix work has a warp that owns no columns."""
        return self.mix_warp >= self.data_warps > 0

    def team(self, role: str) -> Team:
        """The warps behind a role."""
        if role == "mix":
            return Team("mix", self.mix_warp, 1)
        if role == "gate":
            return Team("gate", 0, 1)
        if role == "data":
            return Team("data", 0, self.data_warps)
        return Team("all", 0, self.warps)

    def place(self, tensor: str) -> Place | None:
        """Where a tensor lives, None if this kernel does not touch it."""
        return next((place for place in self.places if place.tensor == tensor), None)

    def steps(self) -> Iterator[Step]:
        """Every step, loops flattened."""
        yield from (node for node in walk(self.body) if isinstance(node, Step))

    def syncs(self) -> Iterator[Sync]:
        """Every barrier, loops flattened."""
        yield from (node for node in walk(self.body) if isinstance(node, Sync))


def walk(body: tuple[Node, ...]) -> Iterator[Node]:
    """Every node of a body, loops before their contents."""
    for node in body:
        yield node
        if isinstance(node, Loop):
            yield from walk(node.body)


def edit_sync(body: tuple[Node, ...], index: int, edit: Callable[[Sync], Sync | None]) -> tuple[Node, ...]:
    """The body with its barrier number `index` (loops flattened) replaced by edit(barrier), dropped where None."""
    seen = -1

    def inside(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        nonlocal seen
        kept: list[Node] = []
        for node in nodes:
            made: Node | None = node
            if isinstance(node, Loop):
                made = replace(node, body=inside(node.body))
            elif isinstance(node, Sync):
                seen += 1
                made = edit(node) if seen == index else node
            if made is not None:
                kept.append(made)
        return tuple(kept)

    return inside(body)


@dataclass(frozen=True)
class Plan:
    """A Program and the choices made so far.

    Args:
        program: what is computed; never changed by a pass.
        options: what the user asked for.
        kernels: in launch order; empty before `fuse`.
        log: decisions and refusals, in order.
        done: names of the passes that ran.
        command: the command that made it, for the header of the text; may be empty.
    """

    program: Program
    options: Options
    kernels: tuple[Kernel, ...] = ()
    log: tuple[LogEntry, ...] = field(default=(), compare=False)
    done: tuple[str, ...] = ()
    command: str = field(default="", compare=False)

    @property
    def numeric_class(self) -> NumericClass:
        """The class of its Program."""
        return self.program.numeric_class

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Refusals in the log."""
        return tuple(entry for entry in self.log if isinstance(entry, Refusal))

    def decide(self, step: str, subject: str, choice: str, because: str) -> Plan:
        """A copy with one more decision."""
        return replace(self, log=(*self.log, Decision(step, subject, choice, because)))

    def with_kernel(self, index: int, kernel: Kernel) -> Plan:
        """A copy with one kernel replaced."""
        kernels = list(self.kernels)
        kernels[index] = kernel
        return replace(self, kernels=tuple(kernels))

    def kernel_stages(self, kernel: Kernel) -> tuple[Stage, ...]:
        """The stages of a kernel, in the order they run."""
        return tuple(self.program.stage(name) for name in kernel.stages)

    def escapes(self, kernel: Kernel, tensor: str) -> bool:
        """Whether a tensor must be in global memory after this kernel: a result, or read elsewhere."""
        if self.program.tensor(tensor).role == "result":
            return True
        inside = set(kernel.stages)
        return any(reader not in inside for reader in self.program.readers.get(tensor, ()))

    def made_in(self, kernel: Kernel, tensor: str) -> bool:
        """Whether this kernel writes the tensor."""
        return self.program.writers.get(tensor) in kernel.stages

    def require_finished(self) -> None:
        """A Plan that passes have yet to run on is there to be looked at: its text would lack steps or barriers.

        Raises:
            UsageError: `U-PLAN`.
        """
        if LAST_PASS not in self.done:
            raise UsageError(
                "U-PLAN",
                f"the Plan is not finished: it stops after {self.done[-1] if self.done else 'no pass'}",
                where="plan",
                hints=("compile without stop_after",),
            )

    @cached_property
    def source(self) -> str:
        """The CUDA text."""
        from mhcgen.emit import emit
        from mhcgen.lower import lower

        self.require_finished()
        return emit(lower(self))

    @cached_property
    def emitted_sha256(self) -> str:
        """sha256 of the text, hex."""
        import hashlib

        return hashlib.sha256(self.source.encode()).hexdigest()

    def load(self, backend: str = "auto", **options: object) -> Module:
        """A callable: numpy arrays on `host`, CuPy arrays on `cuda`; see `mhcgen.runtime.Module`."""
        from mhcgen.runtime import load

        return load(self, backend, **options)
