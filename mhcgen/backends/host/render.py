"""Turns the runtime's finding records into `Finding`s: names, source lines, sentences."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mhcgen.backends.host import abi
from mhcgen.backends.host.debuginfo import DebugInfo
from mhcgen.backends.host.findings import Finding, Place

# One sentence per rule. Fields: first and second place, mask, value, lanes.
_SENTENCES = {
    "race": "no barrier orders these two accesses",
    "remote-before-start": "no cluster barrier orders this access after the start of the block that owns the memory",
    "remote-after-exit": "no cluster barrier orders this access before the end of the block that owns the memory",
    "uninit": "this memory is read before anything was written to it",
    "write-to-const": "the kernel writes to an array that it may only read",
    "barrier-lines": "threads meet at a block barrier from different lines",
    "barrier-kinds": "threads meet at a block barrier through different functions",
    "barrier-exited": "a block barrier is passed although a thread of the block has returned",
    "barrier-diverged": "a barrier of block or cluster is reached by a part of a warp only; the rest waits elsewhere",
    "barrier-named-arguments": "bar.sync {value} with a number or a count of threads that it does not take",
    "barrier-named-counts": "threads disagree on how many must come to bar.sync {value}",
    "barrier-named-partial": "a part of a warp joins bar.sync {value}, the rest does not",
    "barrier-cluster-arrived-twice": "a thread arrives at the cluster barrier again without having waited",
    "barrier-cluster-not-arrived": "a thread waits at the cluster barrier without having arrived",
    "barrier-cluster-lines": "lanes of a warp come to a cluster barrier from different lines",
    "mask-without-self": "a lane calls a warp operation whose mask lacks it",
    "mask-lines": "lanes meet in one warp operation from different lines",
    "mask-lanes-absent": "a lane named in the mask does not come; it waits elsewhere",
    "mask-width": "the width of a shuffle must be a power of two up to 32, not {value}",
    "shuffle-inactive": "the source lane of a shuffle does not take part; its value is undefined",
    "oob-guard": "the access lies outside the array",
    "oob-wild": "the access lies in no array at all; the launch was stopped before it",
    "oob-shared": "the access lies in shared memory, but in no shared variable",
    "oob-index": "index {signed} lies outside a declared array; the launch was stopped before the access",
    "oob-shared-guard": "a write lies behind all static shared variables",
    "oob-dynamic-guard": "a write lies behind the dynamic shared memory of the launch",
    "oob-rank": "the cluster has no block of rank {signed}; the launch was stopped",
    "oob-map": "the address is no shared memory of this block and cannot be mapped; the launch was stopped",
    "deadlock-waiting": "{value} live threads all wait",
    "deadlock-spinning": "threads only yield in __nanosleep and nothing else happens: a wait that cannot end",
    "copy-in-flight": "an asynchronous copy may still be writing there: its thread has not waited for it",
    "copy-memory": "an asynchronous copy goes from global to shared memory of its block; the launch was stopped",
    "copy-not-awaited": "a thread returns and has never waited for {value} of its asynchronous copies",
    "arrivals-in-flight": "no wait for its counter orders the value that is sent before the other access",
    "arrivals-bytes": "a counter of arrivals cannot expect {signed} bytes; the launch was stopped",
    "arrivals-twice": "the counter of arrivals is initialised again; it serves once in a launch",
    "arrivals-too-many": "the executor keeps {value} counters of arrivals a block; the launch was stopped",
    "arrivals-no-start": "nobody has initialised the counter of arrivals of block {value}; the launch was stopped",
    "arrivals-unordered": "no barrier orders this after the initialisation of the counter",
    "arrivals-excess": "more bytes are sent than the {value} that the counter expects",
    "arrivals-after-exit": "a value is sent to block {value}, all of whose threads have returned",
    "arrivals-not-awaited": "a block ends and none of its threads has waited for the {value} bytes that it expects",
    "misaligned": "the address of an access is no multiple of {value}; the launch was stopped before it",
    "stack": "the thread used more stack than the executor gives it",
    "trap": "the kernel called __trap",
}


_OF_MEMORY = ("race", "uninit", "oob", "write-to-const")
_OF_NO_ACCESS = ("oob-index", "oob-rank", "oob-map")
_ACTIONS = {abi.ACCESS_COPY: "copy", abi.ACCESS_SEND: "send", abi.ACCESS_ATOMIC: "atomic", abi.ACCESS_WRITE: "write"}


class Renderer:
    """Renders the records of one launch.

    Args:
        info: of the module, for source lines.
        source: text of the emission, to quote its lines.
        file: name of the emission as the compiler knows it.
        buffers: name per region of the launch.
    """

    def __init__(self, info: DebugInfo, source: str, file: str, buffers: Sequence[str]) -> None:
        self._info = info
        self._lines = source.split("\n")
        self._file = file
        self._buffers = buffers

    def finding(self, record: abi.FindingRecord, waits: Sequence[abi.WaitRecord]) -> Finding:
        """The finding of one record; `waits` are quoted in deadlocks."""
        kind = abi.KINDS[record.kind]
        rule = abi.RULES[record.detail] or kind
        places = tuple(place for side in (0, 1) if (place := self._place(record, side, kind)) is not None)
        buffer = "" if record.region == abi.NONE else self._buffers[record.region]
        if not buffer and rule.startswith("oob-shared"):
            buffer = "shared"
        elif rule == "oob-dynamic-guard":
            buffer = "dynamic shared"
        elif rule == "oob-wild" and not buffer:
            buffer = "null pointer"
        has_offset = bool(buffer)
        mask = record.mask if kind in ("mask", "shuffle") or rule == "barrier-diverged" else None
        draft = Finding(
            kind=kind,
            rule=rule,
            scope=abi.SCOPES[record.scope],
            buffer=buffer,
            offset=record.offset if has_offset else None,
            size=record.size,
            places=places,
            mask=mask,
            count=record.count,
            owner=None if record.owner == abi.NONE else record.owner,
        )
        return replace(draft, text=self._text(draft, record.value, waits))

    def _place(self, record: abi.FindingRecord, side: int, kind: str) -> Place | None:
        thread, line, pc = record.thread[side], record.line[side], record.pc[side]
        if thread == abi.NONE:
            return Place(block=record.block[0]) if side == 0 and kind == "oob" else None
        action = ""
        if kind in _OF_MEMORY and abi.RULES[record.detail] not in _OF_NO_ACCESS:
            flags = record.access[side]
            action = next((name for bit, name in _ACTIONS.items() if flags & bit), "read")
        file, line, callers = self._source(pc, line)
        return Place(record.block[side], thread, action, file, line, callers)

    def _source(self, pc: int, line: int) -> tuple[str, int, tuple[int, ...]]:
        """File, line and callers of a return address; `line` is what the runtime knows without it."""
        frames = self._info.frames(pc - 1) if pc else ()  # the call is just before the return address
        inside = [frame.line for frame in frames if frame.file == self._file]
        if inside:
            # Calls that the compiler has merged have no line of their own; the runtime knows which one it was.
            return self._file, inside[0] or line, tuple(inside[1:])
        if line:
            return self._file, line, ()
        return (frames[0].file, frames[0].line, ()) if frames else ("", 0, ())

    def _text(self, finding: Finding, value: int, waits: Sequence[abi.WaitRecord]) -> str:
        signed = value - (1 << 64) if value >> 63 else value
        sentence = _SENTENCES[finding.rule].format(value=value, signed=signed)
        head = f"{finding.kind}{' ' + finding.scope if finding.scope else ''}: "
        if finding.buffer:
            owner = "" if finding.owner is None else f" of block {finding.owner}, "
            head += f"{finding.buffer}{owner}{finding.offset:+d}: "
        lines = [head + sentence + (f" ({finding.count} times)" if finding.count > 1 else "")]
        if finding.mask is not None:
            lines.append(f"    mask {finding.mask:#010x}")
        for place in finding.places:
            lines.append(f"    {place}")
            if place.file == self._file and 0 < place.line <= len(self._lines):
                lines.append(f"      | {self._lines[place.line - 1].strip()}")
        if finding.kind == "deadlock":
            lines += [f"    {text}" for text in self._waits(waits)]
        return "\n".join(lines)

    def _waits(self, waits: Sequence[abi.WaitRecord]) -> list[str]:
        """Who waits where. In a cluster, warps and blocks that wait alike share a line."""
        alike: dict[tuple[int, ...], dict[int, list[int]]] = {}
        for w in waits:
            where = (w.lanes, w.kind, w.op, w.mask, w.line, w.pc) + (w.warp,) * (w.block == abi.NONE)
            alike.setdefault(where, {}).setdefault(w.block, []).append(w.warp)
        texts = []
        for (lanes, kind, op, mask, line, pc, *_), blocks in alike.items():
            by_warps: dict[tuple[int, ...], list[int]] = {}
            for block, warps in blocks.items():
                by_warps.setdefault(tuple(warps), []).append(block)
            for members, owners in by_warps.items():
                who = f"{_counted_as('warp', members)}"
                who += "" if owners == [abi.NONE] else f" of {_counted_as('block', owners)}"
                texts.append(
                    f"{who}, lanes {_runs(_bits(lanes))} wait in {_call(kind, op, mask)}{self._at(pc, line)}"
                )
        return texts

    def _at(self, pc: int, line: int) -> Place:
        file, line, callers = self._source(pc, line)
        return Place(file=file, line=line, callers=callers)


def _call(kind: int, op: int, mask: int) -> str:
    if kind == abi.WAIT_BLOCK:
        return abi.BLOCK_OPS[op]
    if kind == abi.WAIT_NAMED:
        return f"bar.sync {op}, {mask}"
    if kind == abi.WAIT_CLUSTER:
        return "barrier.cluster.wait"
    if kind == abi.WAIT_ARRIVALS:
        return f"mhc_host_arrivals_wait ({op} of {mask} bytes are missing)"
    return f"{abi.WARP_OPS[op]}({mask:#010x})"


def _bits(bits: int) -> list[int]:
    return [lane for lane in range(32) if bits >> lane & 1]


def _counted_as(noun: str, numbers: Sequence[int]) -> str:
    """'warp 3' or 'warps 0-2,5'."""
    return f"{noun}{'s' if len(numbers) > 1 else ''} {_runs(numbers)}"


def _runs(numbers: Iterable[int]) -> str:
    """0, 8, 9, 10 -> '0,8-10'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def guard_finding(buffer: str, offset: int) -> Finding:
    """A write past an array, known only by the guard band it changed."""
    text = f"oob: {buffer}{offset:+d}: a write changed the guard band of the array; a race build names the line"
    return Finding("oob", "oob-guard", buffer=buffer, offset=offset, text=text)


def input_finding(buffer: str, offset: int) -> Finding:
    """A write to a read-only array, known only by the changed bytes."""
    text = f"write-to-const: {buffer}{offset:+d}: the kernel changed an array that it may only read"
    return Finding("write-to-const", "write-to-const", buffer=buffer, offset=offset, text=text)


def merged(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding per rule and source lines: copies of one line (unrolled loops) count as repetitions."""
    groups: dict[tuple[object, ...], list[Finding]] = {}
    for finding in findings:
        places = tuple((place.action, place.file, place.line, place.callers) for place in finding.places)
        key = (finding.rule, finding.scope, finding.buffer, places)
        groups.setdefault(key, []).append(finding)
    return tuple(_counted(group[0], sum(item.count for item in group)) for group in groups.values())


def _counted(finding: Finding, count: int) -> Finding:
    repeated = f" ({finding.count} times)" if finding.count > 1 else ""
    head, newline, rest = finding.text.partition("\n")
    head = head.removesuffix(repeated) + (f" ({count} times)" if count > 1 else "")
    return replace(finding, count=count, text=head + newline + rest)
