"""For each refusal code, the smallest requests that get it. `passes/test_refusals.py` walks the catalogue.

A code without an entry here fails that test: either nothing can raise it and it goes, or its example is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from factories import chain, program, stage

from mhcgen.build import build
from mhcgen.ir import Program


@dataclass(frozen=True)
class Example:
    """A request that is refused.

    Args:
        name: what is special about it.
        program: makes the Program.
        options: of `mhcgen.compile`.
        step: the pass that refuses.
        because: the reason, whole.
        path: the witness path; empty where no path proves the refusal.
    """

    name: str
    program: Callable[[], Program]
    options: dict[str, Any] = field(default_factory=dict)
    step: str = "fuse"
    because: str = ""
    path: tuple[str, ...] = ()


def square() -> Program:
    """Two chains a -> b and c -> d whose ends feed each other: a feeds d, c feeds b."""
    return program(
        stage("mean", "a", {"x": "x1"}, {"y": "ya"}),
        stage("mean", "c", {"x": "x2"}, {"y": "yc"}),
        stage("expand", "b", {"e": "yc"}, {"x": "xb"}),
        stage("expand", "d", {"e": "ya"}, {"x": "xd"}),
    )


def two_sites() -> Program:
    """Two chains that share nothing."""
    return program(*chain("1", x="x1"), *chain("2", x="x2"))


EXAMPLES: dict[str, tuple[Example, ...]] = {
    "F-ESCAPE": (
        Example(
            "through a stage",
            lambda: program(*chain()),
            {"fuse": "rowsq+sinkhorn"},
            because="a path between rowsq and sinkhorn leaves the group through gates",
            path=("rowsq", "gates", "sinkhorn"),
        ),
        Example(
            "through the branch",
            lambda: build(scope="site", hidden=8),
            {"fuse": "site"},
            because="a path between collapse and post leaves the group through the opaque branch",
            path=("collapse", "branch", "post"),
        ),
        Example(
            "through a reader of the streams between two sites",
            lambda: build(scope="boundary", hidden=8, extra=("engram",)),
            {"fuse": "boundary"},
            because="a path between post and collapse leaves the group through the opaque engram",
            path=("post", "engram", "collapse"),
        ),
        Example(
            "two groups that wait for each other",
            square,
            {"fuse": "a+b,c+d"},
            because="each needs a result of the other, so neither can launch first",
            path=("a", "d", "c", "b"),
        ),
    ),
    "F-OPAQUE": (
        Example(
            "the branch itself",
            lambda: build(scope="site", hidden=8),
            {"fuse": "collapse+branch"},
            because="branch is opaque: nothing is known of its inside, so no kernel can hold it",
            path=("branch",),
        ),
    ),
    "F-TAP": (
        Example(
            "an auxiliary reader of the streams between two sites",
            lambda: build(scope="boundary", hidden=8, extra=("tap",)),
            {"fuse": "boundary"},
            because="tap reads x_next between post and rowsq, so it must exist before they go on",
            path=("post", "tap"),
        ),
    ),
    "F-STATIC": (
        Example(
            "a matrix for all tokens",
            lambda: build("static-mhc", hidden=8),
            {"fuse": "gates+sinkhorn"},
            because="sinkhorn makes the same for all tokens and runs once, gates runs once a token",
        ),
    ),
    "F-UNKNOWN": (
        Example("no such stage", program, {"fuse": "median"}, because="there is no stage or preset 'median'"),
        Example(
            "an empty group",
            program,
            {"fuse": "mean,"},
            because="a name is missing: a comma parts groups of stages, a + the stages of one",
        ),
    ),
    "F-OVERLAP": (
        Example("in two groups", program, {"fuse": "mean,mean"}, because="mean is already in group mean"),
        Example("twice in one", program, {"fuse": "mean+mean"}, because="a stage is named twice"),
    ),
    "F-PRESET": (
        Example(
            "no gates",
            lambda: build(scope="post", hidden=8),
            {"fuse": "pre"},
            because="the Program has no stage of kind rowsq",
        ),
        Example(
            "no norm",
            lambda: build(hidden=8),
            {"fuse": "pre-norm"},
            because="the Program has no stage of kind norm",
        ),
    ),
    "P-ELEMENT": (
        Example(
            "five streams",
            lambda: program(*chain(), n=5),
            {"placement": "element"},
            "place",
            "one element a lane needs 8 x 8 = 64 lanes, and a warp has 32",
        ),
    ),
    "P-REGISTERS": (
        Example(
            "seven streams",
            lambda: program(*chain(), n=7),
            {"placement": "registers"},
            "place",
            "49 elements and their sums in every lane would spill; the limit here is n = 6",
        ),
    ),
    "P-MATRIX": (
        Example(
            "a diagonal",
            lambda: program(stage("comb", comb="diagonal")),
            {"placement": "row"},
            "place",
            "the lanes hold logits of an n x n matrix, and comb diagonal is made element by element, "
            "of other logits or of none",
        ),
        Example(
            "gates without logits",
            lambda: program(stage("gates", usual=()), stage("comb", usual=(), comb="identity")),
            {"placement": "row"},
            "place",
            "the lanes hold logits of an n x n matrix, and gates makes no n x n logits",
        ),
    ),
    "P-CHAIN": (
        Example(
            "two sites in one kernel",
            two_sites,
            {"fuse": "gates1+gates2", "placement": "row"},
            "place",
            "the lanes hold the mixes of one site, and this kernel works on more than one",
        ),
    ),
    "P-SLAB": (
        Example(
            "one warp for many columns",
            lambda: program(*chain(), hidden=4096),
            {"fuse": "pre", "slab": "registers", "threads": 32, "mix_warp": "shared"},
            "place",
            "the slab does not fit: it needs 2 x 128 floats a thread and 44 to work with, of 255 registers",
        ),
    ),
    "P-CLUSTER": (
        Example(
            "no projection",
            lambda: program(*chain()),
            {"fuse": "pre", "cluster": 2},
            "place",
            "only a kernel with a projection uses a cluster",
        ),
        Example(
            "an architecture without clusters",
            lambda: build(hidden=64, projection="fma"),
            {"fuse": "pre", "cluster": 2, "arch": "sm_80"},
            "place",
            "sm_80 has no clusters",
        ),
    ),
    "L-DEPENDENT": (
        Example(
            "an architecture before dependent launch",
            lambda: program(*chain()),
            {"dependent": True, "arch": "sm_80"},
            "launch",
            "sm_80 has no dependent launch",
        ),
    ),
    "L-THREADS": (
        Example(
            "no multiple of a warp",
            program,
            {"threads": 33},
            "place",
            "a block is a multiple of 32 threads from 32 to 1024",
        ),
        Example(
            "too many",
            program,
            {"threads": 1056},
            "place",
            "a block is a multiple of 32 threads from 32 to 1024",
        ),
        Example(
            "no data warp left, streams in registers",
            lambda: program(*chain()),
            {"fuse": "pre", "threads": 32, "mix_warp": "own"},
            "place",
            "a Sinkhorn warp of its own leaves no data warp in this block",
        ),
        Example(
            "no data warp left, streams in global memory",
            lambda: program(*chain()),
            {"fuse": "pre", "threads": 32, "mix_warp": "own", "slab": "global"},
            "place",
            "a Sinkhorn warp of its own leaves no data warp in this block",
        ),
    ),
    "L-SHARED": (
        Example(
            "two wide projections",
            lambda: program(
                stage("project", "a", {"fn": "fn1"}, {"mixes": "mixes1"}),
                stage("project", "b", {"fn": "fn2"}, {"mixes": "mixes2"}),
                n=16,
            ),
            {"fuse": "a+b", "threads": 1024},
            "launch",
            "it needs 73728 bytes of shared memory, and a block has 49152",
        ),
    ),
}
