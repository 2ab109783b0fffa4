"""What a launch found out, in words and in fields."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from mhcgen.errors import LaunchError


@dataclass(frozen=True)
class Place:
    """One side of a finding: who did what, where.

    Args:
        block: linear block id, or None where it does not matter.
        thread: linear thread id in its block, or None.
        action: `read`, `write`, `atomic`, `copy`, `send`, or the name of a barrier or warp operation.
        file: name of the source, empty if unknown.
        line: 1-based, 0 if unknown.
        callers: lines of the calls that lead there, innermost first, where it lies in inlined functions.
    """

    block: int | None = None
    thread: int | None = None
    action: str = ""
    file: str = ""
    line: int = 0
    callers: tuple[int, ...] = ()

    def __str__(self) -> str:
        who = "" if self.thread is None else f"thread {self.thread}"
        who += "" if self.block is None else f" of block {self.block}" if who else f"block {self.block}"
        text = f"{self.action} by {who}" if self.action and who else self.action or who
        if self.line:
            text += f" at {self.file}:{self.line}"
        if self.callers:
            text += " from line " + ", ".join(map(str, self.callers))
        return text


@dataclass(frozen=True)
class Finding:
    """One broken rule; repetitions at the same two places are counted, not listed.

    Args:
        kind: `race`, `uninit`, `oob`, `write-to-const`, `barrier`, `mask`, `shuffle`, `deadlock`, `stack`, `trap`,
            `misaligned`, `copy`, `arrivals`.
        rule: the rule within the kind, e.g. `barrier-lines`; equals `kind` where that says it all.
        scope: of a race, `same-warp`, `across-warps` or `across-blocks`; else empty.
        buffer: parameter name, `shared NAME` or `dynamic shared`; empty where there is none.
        offset: bytes from the start of the buffer; negative in the guard band before it.
        size: bytes of the access, 0 if unknown.
        owner: in a launch with clusters, the linear id of the block whose shared memory it is; else None.
        places: the earlier or waiting side, then the later or missing one; one or two.
        mask: of a warp operation, else None.
        count: how often it happened.
        text: all of it for people, with the source lines.
    """

    kind: str
    rule: str
    scope: str = ""
    buffer: str = ""
    offset: int | None = None
    size: int = 0
    places: tuple[Place, ...] = ()
    mask: int | None = None
    count: int = 1
    owner: int | None = None
    text: str = ""

    @property
    def threads(self) -> tuple[int | None, ...]:
        """Linear thread ids, one per place."""
        return tuple(place.thread for place in self.places)

    @property
    def blocks(self) -> tuple[int | None, ...]:
        """Linear block ids, one per place."""
        return tuple(place.block for place in self.places)

    @property
    def lines(self) -> tuple[int, ...]:
        """Source lines, one per place; 0 where unknown."""
        return tuple(place.line for place in self.places)


@dataclass(frozen=True, eq=False)
class AccessCounts:
    """How often each element of an array was read and written in one launch.

    Args:
        loads: uint32, in the shape of the array.
        stores: uint32, in the shape of the array.

    A vector load counts once for each element it covers. What the compiler keeps in a register is not counted
    again, as on a GPU.
    """

    loads: npt.NDArray[np.uint32]
    stores: npt.NDArray[np.uint32]

    @property
    def max_loads(self) -> int:
        """The most loads of any one element."""
        return int(self.loads.max(initial=0))

    @property
    def total_loads(self) -> int:
        """Loads of all elements together."""
        return int(self.loads.sum(dtype=np.int64))

    @property
    def max_stores(self) -> int:
        """The most stores to any one element."""
        return int(self.stores.max(initial=0))

    @property
    def total_stores(self) -> int:
        """Stores to all elements together."""
        return int(self.stores.sum(dtype=np.int64))


@dataclass(frozen=True, eq=False)
class LaunchReport:
    """The outcome of one launch.

    Args:
        kernel, order, seed, race: what ran and how.
        findings: empty if all is well. In plain mode only barrier, mask, shuffle, deadlock, copy, arrivals,
            guard-band, stack and trap findings can occur; races, reads of unwritten memory and wild
            accesses need a race build.
        completed: False if the launch was stopped (deadlock, trap, wild access); outputs then mean nothing.
        blocks_run: thread blocks that ran to their end.
        switches: changes of fiber, a measure of work.
        seconds: wall time of the launch without copies.
        accesses: per array parameter, if the caller asked for counting.
        unwritten: per parameter named in `uninitialised`, the bytes nobody wrote; race builds only.
        suppressed: distinct findings beyond the limit of a report.
    """

    kernel: str
    order: str
    seed: int
    race: bool
    findings: tuple[Finding, ...] = ()
    completed: bool = True
    blocks_run: int = 0
    switches: int = 0
    seconds: float = 0.0
    accesses: dict[str, AccessCounts] = field(default_factory=dict)
    unwritten: dict[str, int] = field(default_factory=dict)
    suppressed: int = 0

    @property
    def ok(self) -> bool:
        """No finding, and every block ran to its end."""
        return self.completed and not self.findings

    @property
    def text(self) -> str:
        """All findings for people; empty if there is none."""
        lines = [finding.text for finding in self.findings]
        if self.suppressed:
            lines.append(f"... and {self.suppressed} more that did not fit in the report")
        return "\n".join(lines)

    def raise_if_found(self) -> LaunchReport:
        """Return the report itself if it is clean.

        Raises:
            LaunchError: `X-FINDING`, with every finding in its notes.
        """
        if self.ok:
            return self
        kinds = ", ".join(sorted({finding.kind for finding in self.findings})) or "an incomplete launch"
        raise LaunchError(
            "X-FINDING",
            f"the executor found {kinds}",
            where=f"{self.kernel}, order {self.order}, seed {self.seed}",
            notes=tuple(finding.text for finding in self.findings),
        )

    def __str__(self) -> str:
        state = "clean" if self.ok else f"{len(self.findings)} findings"
        head = f"{self.kernel}: {state} ({self.blocks_run} blocks, order {self.order}, seed {self.seed})"
        return "\n".join([head, self.text]) if self.text else head
