"""What a compiler made of an emission: barriers, shuffles, local traffic and loops, read from PTX.

PTX rather than machine code, because most `__syncwarp` leave no instruction there, and because a barrier
in PTX is one call in the text (after inlining and unrolling). `ptxas -v` supplies what PTX cannot know:
registers, spills, stack and barrier identifiers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, fields

from mhcgen.errors import InternalError, UsageError

_PATTERNS = {
    "bar_sync": re.compile(r"(bar|barrier)(\.cta)?\.(sync|red|arrive)\b"),
    "bar_warp_sync": re.compile(r"bar\.warp\.sync\b"),
    "shfl_sync": re.compile(r"shfl\.sync\b"),
    "vote_sync": re.compile(r"(vote|match|redux|elect)\b"),
    "barrier_cluster": re.compile(r"barrier\.cluster\b"),
    "mbarrier_wait": re.compile(r"mbarrier\.(try|test)_wait\b"),
    "atomics": re.compile(r"(atom|red)\b"),
    "local_loads": re.compile(r"ld\.local\b"),
    "local_stores": re.compile(r"st\.local\b"),
}


@dataclass(frozen=True)
class Counts:
    """Instructions of a stretch of PTX, each counted once per place (not per execution).

    Args:
        bar_sync: block barriers (`bar.sync`, `barrier.sync`, and the reducing and arriving forms).
        bar_warp_sync: warp barriers.
        shfl_sync: shuffles.
        vote_sync: votes, matches, elections and warp reductions.
        barrier_cluster: arrivals at and waits for cluster barriers.
        mbarrier_wait: waits for what other blocks send.
        atomics: atomic operations and reductions in memory.
        local_loads: loads from local memory, which is off-chip.
        local_stores: stores to local memory.
        instructions: all instructions.
    """

    bar_sync: int = 0
    bar_warp_sync: int = 0
    shfl_sync: int = 0
    vote_sync: int = 0
    barrier_cluster: int = 0
    mbarrier_wait: int = 0
    atomics: int = 0
    local_loads: int = 0
    local_stores: int = 0
    instructions: int = 0

    def __add__(self, other: Counts) -> Counts:
        return Counts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


@dataclass(frozen=True)
class Instruction:
    """One instruction of PTX.

    Args:
        text: without predicate, label and semicolon.
        predicate: the guard such as `%p1` or `!%p1`; empty where it always runs.
        line: line of the PTX, from 1.
        source_lines: lines of the emission from the innermost inlined function outwards; empty unless the
            text was compiled with `-lineinfo`.
        scope: brace nesting it lies in (labels of inline assembly are local to it).
    """

    text: str
    predicate: str
    line: int
    source_lines: tuple[int, ...]
    scope: tuple[int, ...] = ()

    @property
    def kind(self) -> str:
        """The field of `Counts` it belongs to; empty for an ordinary instruction."""
        for name, pattern in _PATTERNS.items():
            if pattern.match(self.text):
                return name
        return ""


@dataclass
class Function:
    """An entry or a device function that was not inlined; `params` are PTX types such as `u64`, `f32`."""

    name: str
    is_entry: bool
    params: tuple[str, ...] = ()
    body: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[tuple[int, ...], str], int] = field(default_factory=dict)

    @property
    def counts(self) -> Counts:
        """Instructions of its own body; those of functions it calls are theirs."""
        return count(self.body)

    @property
    def calls(self) -> tuple[str, ...]:
        """Names of the functions called, each once, sorted."""
        return tuple(sorted({name for item in self.body if (name := _callee(item.text))}))


@dataclass(frozen=True)
class Loop:
    """A loop of the control flow, innermost ones included; unrolled loops are gone.

    Args:
        depth: 1 for an outermost loop.
        lines: first and last line of its PTX.
        counts: its instructions, those of inner loops and of called functions included.
        body: its own instructions in order of the PTX.
    """

    depth: int
    lines: tuple[int, int]
    counts: Counts
    body: tuple[Instruction, ...]

    @property
    def source_lines(self) -> frozenset[int]:
        """Lines of the emission that its instructions come from (needs `-lineinfo`)."""
        return frozenset(line for item in self.body for line in item.source_lines)


def count(body: Iterable[Instruction]) -> Counts:
    """Counts over a sequence of instructions."""
    tally = dict.fromkeys((f.name for f in fields(Counts)), 0)
    for item in body:
        tally["instructions"] += 1
        if kind := item.kind:
            tally[kind] += 1
    return Counts(**tally)


_TOKEN = re.compile(r'"[^"\n]*"|//[^\n]*|/\*.*?\*/|\n|[;{}]|[^;{}\n"/]+|/', re.DOTALL)
_FILE = re.compile(r'\.file\s+(\d+)\s+"([^"]*)"')
_LOC = re.compile(r"\s*\.loc\b")
_PLACE = re.compile(r"(?:\.loc|inlined_at)\s+(\d+)\s+(\d+)")
_LABEL = re.compile(r"\s*([$%\w]+)\s*:(?!:)")
_PREDICATED = re.compile(r"@(!?%?[\w$]+)\s+")
_ENTRY = re.compile(r"\.(entry|func)\b\s*(?:\([^)]*\)\s*)?([$\w]+)")
_PARAM = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
_CALL = re.compile(r"call(?:\.uni)?\s+(?:\([^)]*\)\s*,\s*)?([$\w]+)")
_BRANCH = re.compile(r"bra(?:\.uni)?\s+([$\w]+)")
_TABLE_BRANCH = re.compile(r"brx\.idx(?:\.uni)?\s+[^,]+,\s*([$\w]+)")


def _callee(text: str) -> str:
    match = _CALL.match(text)
    return match[1] if match else ""


def parse(ptx: str) -> dict[str, Function]:
    """All functions of a module with a body, in order, by (mangled) name."""
    functions: dict[str, Function] = {}
    emission = {number for number, path in _FILE.findall(ptx) if path.endswith(".cu")}
    current: Function | None = None
    header = statement = ""
    scopes: list[int] = []
    serial = 0
    source: tuple[int, ...] = ()
    line = begin = 1
    for token in _TOKEN.findall(ptx):
        if token == "\n":
            line += 1
            continue
        if token.startswith(("//", "/*")):
            line += token.count("\n")
            continue
        if current is None:
            if token == "{" and not scopes and (match := _ENTRY.search(header)):
                current = functions.setdefault(
                    match[2], Function(match[2], match[1] == "entry", tuple(_PARAM.findall(header)))
                )
                source, statement = (), ""
            elif token == "}" and scopes:
                scopes.pop()
            elif token == "{":
                scopes.append(0)
            header = "" if token in ";}{" else header + " " + token.strip()
            continue
        if (statement and token == "{") or statement.count("{") > statement.count("}"):
            statement += token  # a vector operand: `{%f1, %f2}`
        elif token == "{":
            serial += 1
            scopes.append(serial)
        elif token == "}":
            if not scopes:
                current, header = None, ""
            else:
                scopes.pop()
            statement = ""
        elif token == ";":
            _add(current, statement, begin, source, tuple(scopes))
            statement = ""
        elif _LOC.match(token):
            # Line 0 marks what the compiler made up; lines of headers are not lines of the emission.
            source = tuple(int(at) for file, at in _PLACE.findall(token) if file in emission and at != "0")
        elif token.strip():
            while label := _LABEL.match(token) if not statement else None:
                current.labels[tuple(scopes), label[1]] = len(current.body)
                token = token[label.end() :]
            begin = begin if statement else line
            statement = " ".join((statement + " " + token).split())
    return functions


def _add(
    function: Function, statement: str, line: int, source: tuple[int, ...], scope: tuple[int, ...]
) -> None:
    if statement.startswith(".") and not statement.startswith(".branchtargets"):
        return  # a declaration
    predicate = ""
    if match := _PREDICATED.match(statement):
        predicate, statement = match[1], statement[match.end() :]
    if statement:
        function.body.append(Instruction(statement, predicate, line, source, scope))


def _resolve(function: Function, label: str, scope: tuple[int, ...]) -> int:
    for depth in range(len(scope), -1, -1):
        index = function.labels.get((scope[:depth], label))
        if index is not None:
            return index
    raise InternalError("X-PTX", f"the PTX of {function.name} branches to an unknown label {label}.")


def _successors(function: Function, index: int) -> list[int]:
    item = function.body[index]
    end = len(function.body)
    following = [index + 1] if index + 1 < end else []
    if match := _BRANCH.match(item.text):
        targets = [_resolve(function, match[1], item.scope)]
    elif match := _TABLE_BRANCH.match(item.text):
        table = function.body[_resolve(function, match[1], item.scope)].text
        targets = [_resolve(function, name, item.scope) for name in re.findall(r"[$\w]+", table)[1:]]
    elif re.match(r"(ret|exit)\b", item.text):
        targets = []
    else:
        return following
    targets = [target for target in targets if target < end]
    return targets + following if item.predicate else targets


def _components(nodes: set[int], edges: dict[int, list[int]]) -> list[set[int]]:
    """Strongly connected components that hold a cycle (Tarjan, with an explicit stack)."""
    order: dict[int, int] = {}
    low: dict[int, int] = {}
    pending: list[int] = []
    found: list[set[int]] = []
    for root in sorted(nodes):
        if root in order:
            continue
        work = [(root, iter(edges[root]))]
        order[root] = low[root] = len(order)
        pending.append(root)
        while work:
            node, rest = work[-1]
            for following in rest:
                if following not in nodes:
                    continue
                if following not in order:
                    order[following] = low[following] = len(order)
                    pending.append(following)
                    work.append((following, iter(edges[following])))
                    break
                if following in pending:
                    low[node] = min(low[node], order[following])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == order[node]:
                    at = pending.index(node)
                    component = set(pending[at:])
                    del pending[at:]
                    if len(component) > 1 or node in edges[node]:
                        found.append(component)
    return found


def _blocks(function: Function) -> list[tuple[int, int]]:
    """Basic blocks as half-open ranges of instructions."""
    size = len(function.body)
    leaders = {0, *(index for index in function.labels.values() if index < size)}
    for index in range(size - 1):
        if _successors(function, index) != [index + 1]:
            leaders.add(index + 1)
    starts = sorted(leaders)
    return list(zip(starts, [*starts[1:], size], strict=True)) if size else []


def _nest(nodes: set[int], edges: dict[int, list[int]], depth: int) -> list[tuple[int, set[int]]]:
    """Loops as (depth, blocks): each component, then what is cyclic without the edges to its entries."""
    loops: list[tuple[int, set[int]]] = []
    for component in _components(nodes, edges):
        loops.append((depth, component))
        outside = {following for node in nodes - component for following in edges[node]}
        entries = (component & outside) or {min(component)}
        inner = {
            node: [following for following in edges[node] if following not in entries] for node in component
        }
        loops += _nest(component, inner, depth + 1)
    return loops


def _total(name: str, functions: dict[str, Function], seen: frozenset[str] = frozenset()) -> Counts:
    """Counts of a function and of everything it calls; a call to a declaration counts nothing."""
    function = functions.get(name)
    if function is None or name in seen:
        return Counts()
    total = function.counts
    for callee in function.calls:
        total += _total(callee, functions, seen | {name})
    return total


def ptx_loops(ptx: str, kernel: str) -> tuple[Loop, ...]:
    """Every loop left in a kernel after the compiler unrolled what it could, in order of the PTX.

    A loop's counts include functions called from it, so that a barrier cannot hide in one.

    Raises:
        UsageError: `U-KERNEL`, the module has no such function.
    """
    functions = parse(ptx)
    function = _find(functions, kernel)
    blocks = _blocks(function)
    block_of = {start: number for number, (start, _) in enumerate(blocks)}
    edges = {
        number: [block_of[target] for target in _successors(function, end - 1)]
        for number, (_, end) in enumerate(blocks)
    }
    # The function's entry is reached from outside, so node -1 stands for the caller.
    edges[-1] = [0] if blocks else []
    loops = []
    for depth, members in _nest(set(edges), edges, 1):
        body = tuple(function.body[index] for number in sorted(members) for index in range(*blocks[number]))
        counts = count(body)
        for item in body:
            counts += _total(_callee(item.text), functions)
        loops.append(Loop(depth, (body[0].line, body[-1].line), counts, body))
    return tuple(sorted(loops, key=lambda loop: (loop.lines[0], loop.depth)))


def block_barrier_in_loop(ptx: str, kernel: str) -> bool:
    """Whether some block barrier of the kernel can be executed twice by one thread.

    Raises:
        UsageError: `U-KERNEL`, the module has no such function.
    """
    return any(loop.counts.bar_sync for loop in ptx_loops(ptx, kernel))


def sync_sites(ptx: str, kernel: str) -> tuple[Instruction, ...]:
    """The barriers, waits, shuffles and votes of a kernel in order; `source_lines` need `-lineinfo`.

    Raises:
        UsageError: `U-KERNEL`, the module has no such function.
    """
    kinds = {"bar_sync", "bar_warp_sync", "barrier_cluster", "mbarrier_wait", "shfl_sync", "vote_sync"}
    return tuple(item for item in _find(parse(ptx), kernel).body if item.kind in kinds)


def _find(functions: dict[str, Function], kernel: str) -> Function:
    if kernel not in functions:
        raise UsageError(
            "U-KERNEL",
            f"the module has no function {kernel!r}.",
            where=kernel,
            notes=("it has: " + ", ".join(functions),),
        )
    return functions[kernel]


@dataclass(frozen=True)
class KernelResources:
    """What one kernel needs. Figures of ptxas are None for a PTX-only target.

    Args:
        registers: 32-bit registers per thread; differs between versions of NVRTC.
        spill_stores: bytes of registers stored to local memory per thread.
        spill_loads: bytes loaded back.
        stack: bytes of stack frame per thread.
        static_shared: bytes of static shared memory per block.
        barrier_ids: distinct hardware barriers; not the number of calls.
        counts: instructions of its PTX, called functions excluded.
        total: the same with called functions included.
        calls: functions that were not inlined.
    """

    registers: int | None
    spill_stores: int | None
    spill_loads: int | None
    stack: int | None
    static_shared: int | None
    barrier_ids: int | None
    counts: Counts
    total: Counts
    calls: tuple[str, ...]


_COMPILING = re.compile(r"Compiling entry function '([^']+)'")
_PROPERTIES = re.compile(r"Function properties for ([$\w]+)")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_BARRIERS = re.compile(r"used (\d+) barriers")
_SHARED = re.compile(r"(\d+)(?:\+\d+)? bytes smem")


def resources(ptx: str, log: str) -> dict[str, KernelResources]:
    """Per kernel of the module, in order of the PTX: counts from the PTX, figures from a `ptxas -v` log."""
    frames: dict[str, tuple[int, ...]] = {}
    used: dict[str, tuple[int, int, int]] = {}
    entry = described = ""
    for line in log.splitlines():
        if match := _COMPILING.search(line):
            entry = described = match[1]
        elif match := _PROPERTIES.search(line):
            described = match[1]
        elif match := _STACK.search(line):
            frames[described] = tuple(map(int, match.groups()))
        elif match := _USED.search(line):
            barriers, shared = _BARRIERS.search(line), _SHARED.search(line)
            used[entry] = (
                int(match[1]),
                int(barriers[1]) if barriers else 0,
                int(shared[1]) if shared else 0,
            )
    functions = parse(ptx)
    result = {}
    for name, function in functions.items():
        if not function.is_entry:
            continue
        stack, stores, loads = frames.get(name, (None, None, None))
        registers, barrier_ids, shared_bytes = used.get(name, (None, None, None))
        result[name] = KernelResources(
            registers=registers,
            spill_stores=stores,
            spill_loads=loads,
            stack=stack,
            static_shared=shared_bytes,
            barrier_ids=barrier_ids,
            counts=function.counts,
            total=_total(name, functions),
            calls=function.calls,
        )
    return result
