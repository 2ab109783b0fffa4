"""What passes say: decisions, refusals with witnesses, hazards; and the catalogue of refusal codes.

Everything here is data. The command line prints it, tests compare it, `docs/refusals.md` is written from it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Witness:
    """The shortest path that proves a refusal: stage names, first to last."""

    path: tuple[str, ...]
    note: str = ""

    def __str__(self) -> str:
        text = " -> ".join(self.path)
        return f"{text} ({self.note})" if self.note else text


@dataclass(frozen=True)
class Decision:
    """One choice of one pass.

    Args:
        step: the pass (`fuse`, `place`, `sync`, `launch`, `lower`).
        subject: what was decided about (a kernel, a tensor, a stage).
        choice: what was chosen.
        because: why, in one sentence.
    """

    step: str
    subject: str
    choice: str
    because: str

    def __str__(self) -> str:
        return f"{self.step}: {self.subject}: {self.choice}; because {self.because}"


@dataclass(frozen=True)
class Refusal:
    """A legal question with the answer no.

    Args:
        step: the pass that refused.
        code: a code of `CATALOGUE`.
        subject: the group or choice that was asked for.
        because: why not, in one sentence.
        witness: the path that proves it, where a path proves it.
        hint: what to ask for instead.
    """

    step: str
    code: str
    subject: str
    because: str
    witness: Witness | None
    hint: str

    def __str__(self) -> str:
        lines = [f"refused {self.code}: {self.subject}: {self.because}"]
        if self.witness is not None:
            lines.append(f"  path: {self.witness}")
        lines.append(f"  hint: {self.hint}")
        return "\n".join(lines)


LogEntry = Decision | Refusal


@dataclass(frozen=True)
class Hazard:
    """Why two accesses need an order.

    Args:
        kind: `RAW`, `WAR` or `WAW`.
        buffer: the shared or global buffer both touch.
        first: the step that must come first.
        second: the step that must wait.
        scope: the smallest group of threads that holds every pair of conflicting threads:
            `warp`, `data`, `block`, `arrival` (readers of what other blocks send) or `cluster`.
        carried: the second access belongs to the next iteration of a loop.
    """

    kind: str
    buffer: str
    first: str
    second: str
    scope: str
    carried: bool = False

    def __str__(self) -> str:
        carried = " (next iteration)" if self.carried else ""
        return f"{self.kind} {self.buffer}: {self.first} -> {self.second}{carried}"


@dataclass(frozen=True)
class CatalogueEntry:
    """A code: what it means, and what to do. Its smallest example is `tests/catalogue.py`."""

    code: str
    meaning: str
    advice: str


CATALOGUE: dict[str, CatalogueEntry] = {
    entry.code: entry
    for entry in (
        CatalogueEntry(
            "F-ESCAPE",
            "A path between two stages of the group leaves it and comes back, so no single launch can hold both.",
            "Leave one end out of the group, or put the stages on the path into it.",
        ),
        CatalogueEntry(
            "F-OPAQUE",
            "The group holds a branch (attention, FFN, engram): nothing is known of its inside.",
            "Fuse the stages on one side of the branch.",
        ),
        CatalogueEntry(
            "F-TAP",
            "A tap reads streams that the group writes and goes on with: they must exist before it does.",
            "Fuse the stages on one side of the tap.",
        ),
        CatalogueEntry(
            "F-STATIC",
            "The group joins a stage that runs once, because its results are the same for all tokens, with one that "
            "runs once a token.",
            "Leave what runs once out of the group; it is one small launch.",
        ),
        CatalogueEntry(
            "F-UNKNOWN",
            "The group names a stage that the Program does not have.",
            "Use the stage names that `mhcgen explain` prints.",
        ),
        CatalogueEntry(
            "F-OVERLAP",
            "A stage is named in two groups.",
            "Name each stage once.",
        ),
        CatalogueEntry(
            "F-PRESET",
            "The preset needs a stage that the Program does not have.",
            "Build the Program with that stage (`--scope`, `--norm`, `--quant`) or choose another preset.",
        ),
        CatalogueEntry(
            "P-ELEMENT",
            "One element per lane needs n rounded up to a power of two, squared, to fit a warp: n <= 4.",
            "Use placement row or shared.",
        ),
        CatalogueEntry(
            "P-REGISTERS",
            "Every lane holding the whole n x n matrix would spill at this n.",
            "Use placement row or shared.",
        ),
        CatalogueEntry(
            "P-CHAIN",
            "The lanes of a warp hold the mixes of one site, and the kernel works on those of more than one.",
            "Use placement shared, or split the group.",
        ),
        CatalogueEntry(
            "P-MATRIX",
            "The lanes of a warp hold logits of an n x n matrix, and this mixing matrix has other logits or none.",
            "Use placement shared.",
        ),
        CatalogueEntry(
            "P-SLAB",
            "The streams of one token do not fit the registers of one block at this n, H and block size.",
            "Use more threads, or leave the slab in global memory (`--slab global`).",
        ),
        CatalogueEntry(
            "P-CLUSTER",
            "A cluster of fewer than 1 or more than 16 blocks was asked for, or one where the kernel, the "
            "architecture or the registers do not allow it.",
            "Leave `--cluster` out, or fuse the projection, rowsq and gates into the kernel.",
        ),
        CatalogueEntry(
            "L-THREADS",
            "The thread count is not a multiple of 32 between 32 and 1024, or leaves no data warp.",
            "Use a multiple of 32 up to 1024; with a Sinkhorn warp of its own at least 64.",
        ),
        CatalogueEntry(
            "L-DEPENDENT",
            "Dependent launch was asked for on an architecture that has none.",
            "Target sm_90 or later, or leave `--dependent` out.",
        ),
        CatalogueEntry(
            "L-SHARED",
            "The kernel needs more shared memory than a block of this architecture has.",
            "Use a register placement, or split the group.",
        ),
    )
}
