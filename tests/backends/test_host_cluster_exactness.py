"""The race checker of clusters against a model: programs with every kind of barrier, judged by full vector clocks.

The checker summarises what cluster barriers order in one clock per phase; the model gives every thread a clock of all
threads of the cluster. They must agree on whether a program races, and on whether it touches the shared memory of
a block that may not have started or may have ended, whatever the order of threads.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from host_cases import ORDERS, signature, source
from hypothesis import given
from hypothesis import strategies as st

from mhcgen.backends.host import HostModule

(NOTHING, READ, WRITE, WARP, BLOCK, NAMED, SHARED_READ, SHARED_WRITE, ARRIVE, ARRIVE_RELAXED, WAIT) = range(11)
WRITES = (WRITE, SHARED_WRITE)
SHARED = (SHARED_READ, SHARED_WRITE)
_MAX_NAMED_STEPS = 7  # each with two numbers of its own, so that it is clear who meets whom


@dataclass
class Program:
    """Operations and their arguments, `[step, block, thread]`, and whether cluster barriers enclose them."""

    operations: npt.NDArray[np.int32]
    arguments: npt.NDArray[np.int32]
    first_barrier: bool
    last_barrier: bool


@dataclass(frozen=True)
class Verdict:
    """What a program does wrong."""

    races: frozenset[int] = frozenset()  # on the cells of these blocks; -1 is the one in global memory
    before_start: bool = False
    after_exit: bool = False


class Author:
    """Writes random programs: a few actors touch few cells between barriers of every kind; the rest is the choir.

    The choir does what barriers ask of it at once; the actors arrive at cluster barriers and wait there at will.
    """

    def __init__(self, seed: int, *, enclosed: bool) -> None:
        self.rng = np.random.default_rng(seed)
        self.blocks, self.warps = int(self.rng.integers(1, 4)), int(self.rng.integers(1, 4))
        self.threads = 32 * self.warps
        self.rows: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]] = []
        self.arrivals = np.zeros((self.blocks, self.threads), np.int64)  # how often each thread has arrived
        self.waits = np.zeros_like(self.arrivals)
        scenes = self.rng.integers(0, self.blocks * self.warps, 3) * 32  # warps with several actors each
        self.actors = np.unique(scenes[self.rng.integers(0, 3, 8)] + self.rng.integers(0, 32, 8))
        self.acting = np.zeros(self.arrivals.shape, bool)
        self.acting.flat[self.actors] = True
        self.relaxed = self.rng.choice([0.0, 0.1, 0.5, 0.9])
        ends = (True, True) if enclosed else self.rng.random(2) < 0.5
        kinds = {"access": 0.3, "cluster": 0.35, "warp": 0.2, "named": 0.1, "block": 0.05}
        named = 0
        for _ in range(int(self.rng.integers(8, 28))):
            kind = self.rng.choice(list(kinds), p=list(kinds.values()))
            if kind == "named" and named < _MAX_NAMED_STEPS:
                self.named(named)
                named += 1
            elif kind != "named":
                getattr(self, kind)()
        while self.arrivals.min() < self.arrivals.max() or (ends[1] and self.waits.min() < self.arrivals.max()):
            self.cluster(finish=True)
        operations, arguments = (np.stack(rows) for rows in zip(*self.rows, strict=True))
        self.program = Program(operations, arguments, bool(ends[0]), bool(ends[1]))

    def step(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
        self.rows.append(
            (np.zeros((self.blocks, self.threads), np.int32), np.zeros((self.blocks, self.threads), np.int32))
        )
        return self.rows[-1]

    def access(self) -> None:
        operations, arguments = self.step()
        actors = self.rng.choice(self.actors, 1)
        for actor in actors:
            operation = self.rng.choice([READ, WRITE, SHARED_READ, SHARED_WRITE], p=[0.2, 0.1, 0.45, 0.25])
            operations.flat[actor] = operation
            arguments.flat[actor] = self.rng.integers(self.blocks) if operation in SHARED else 0

    def cluster(self, *, finish: bool = False) -> None:
        """Some threads arrive, some wait; a fast one may arrive at the next phase before a slow one has waited."""
        operations, _ = self.step()
        todo = ~self.acting | (self.rng.random(self.acting.shape) < 0.6)
        arriving = todo & (self.arrivals == self.waits)
        if finish:
            arriving &= self.arrivals < self.arrivals.max()
        waiting = todo & (self.arrivals > self.waits) & (self.arrivals <= self.arrivals.min())
        relaxed = np.repeat(self.rng.random((self.blocks, self.warps)) < self.relaxed, 32, axis=1)
        relaxed[self.acting] = self.rng.random(len(self.actors)) < self.relaxed
        operations[arriving] = np.where(relaxed, ARRIVE_RELAXED, ARRIVE)[arriving]
        operations[waiting] = WAIT
        self.arrivals += arriving
        self.waits += waiting

    def warp(self) -> None:
        operations, arguments = self.step()
        for block in range(self.blocks):
            for warp in range(self.warps):
                for group in np.split(self.rng.permutation(32), np.sort(self.rng.integers(0, 33, 2))):
                    if len(group) and self.rng.random() < 0.7:
                        lanes = warp * 32 + group
                        operations[block, lanes] = WARP
                        mask = np.uint32(sum(1 << int(lane) for lane in group)).view(np.int32)
                        arguments[block, lanes] = mask

    def named(self, number: int) -> None:
        operations, arguments = self.step()
        for block in range(self.blocks):
            order = self.rng.permutation(self.warps)
            cut = int(self.rng.integers(0, self.warps + 1))
            for half, group in enumerate((order[:cut], order[cut:])):
                for warp in group:
                    lanes = slice(warp * 32, warp * 32 + 32)
                    operations[block, lanes] = NAMED
                    arguments[block, lanes] = len(group) * 32 * 16 + 2 * number + half

    def block(self) -> None:
        operations, _ = self.step()
        operations[self.rng.random(self.blocks) < 0.6] = BLOCK


class Model:
    """Runs a program step by step, with a clock of all threads for every thread.

    A thread is its position in all threads of the cluster. `clocks[a, b]` is the newest step of b that a is ordered
    after, `started[a]` whether a is ordered after a phase of the cluster barrier, hence after all blocks' starts.
    """

    def __init__(self, program: Program) -> None:
        steps, self.blocks, self.threads = program.operations.shape
        count = self.blocks * self.threads
        self.clocks = np.eye(count, dtype=np.int64)
        self.started = np.zeros(count, bool)
        self.arrivals = np.zeros(count, np.int64)
        self.phases: dict[int, npt.NDArray[np.int64]] = {}  # the clock of each phase of the cluster barrier
        self.history: dict[int, list[tuple[int, int, bool]]] = {}
        self.remote: list[tuple[int, int, int]] = []  # thread, its step, owner
        self.races: set[int] = set()
        self.before_start = False
        for block in range(self.blocks):
            self.access(block * self.threads, block, write=True)
            self.join(np.arange(self.threads) + block * self.threads)
        if program.first_barrier:
            self.whole_barrier()
        for step in range(steps):
            self.step(program.operations[step].reshape(-1), program.arguments[step].reshape(-1))
        if program.last_barrier:
            self.whole_barrier()
        ended = self.clocks.reshape(self.blocks, self.threads, count).max(axis=1)
        after_exit = any(ended[owner, thread] < when for thread, when, owner in self.remote)
        self.verdict = Verdict(frozenset(self.races), self.before_start, after_exit)

    def step(self, operations: npt.NDArray[np.int32], arguments: npt.NDArray[np.int32]) -> None:
        groups: dict[tuple[int, int, int], list[int]] = {}
        for thread in np.flatnonzero(operations):
            operation, argument = int(operations[thread]), int(arguments[thread])
            if operation in (WARP, BLOCK, NAMED):
                part = thread // 32 if operation == WARP else thread // self.threads
                groups.setdefault((operation, argument, part), []).append(thread)
            elif operation in (ARRIVE, ARRIVE_RELAXED):
                self.arrive(thread, release=operation == ARRIVE)
            elif operation == WAIT:
                self.wait(thread)
            elif operation in SHARED:
                self.touch_shared(thread, argument, write=operation in WRITES)
            elif operation in (READ, WRITE):
                self.access(thread, -1, write=operation in WRITES)
        for members in groups.values():
            self.join(np.array(members))

    def join(self, members: npt.NDArray[np.int64]) -> None:
        self.clocks[members] = self.clocks[members].max(axis=0)
        self.started[members] = self.started[members].any()
        self.clocks[members, members] += 1

    def arrive(self, thread: int, *, release: bool) -> None:
        self.arrivals[thread] += 1
        phase = int(self.arrivals[thread])
        clock = self.phases.setdefault(phase, np.zeros(len(self.clocks), np.int64))
        if release:
            self.phases[phase] = np.maximum(clock, self.clocks[thread])
            self.clocks[thread, thread] += 1

    def wait(self, thread: int) -> None:
        """All have arrived before."""
        self.clocks[thread] = np.maximum(self.clocks[thread], self.phases[int(self.arrivals[thread])])
        self.started[thread] = True

    def whole_barrier(self) -> None:
        self.join(np.arange(len(self.clocks)))
        self.started[:] = True

    def touch_shared(self, thread: int, owner: int, *, write: bool) -> None:
        if owner != thread // self.threads:
            self.before_start |= not self.started[thread]
            self.remote.append((thread, int(self.clocks[thread, thread]), owner))
        self.access(thread, owner, write=write)

    def access(self, thread: int, cell: int, *, write: bool) -> None:
        earlier = self.history.setdefault(cell, [])
        for other, when, wrote in earlier:
            if (write or wrote) and self.clocks[thread, other] < when:
                self.races.add(cell)
        earlier.append((thread, int(self.clocks[thread, thread]), write))


@pytest.fixture(scope="module")
def host() -> HostModule:
    kernel = signature(
        "run_program",
        operations="const int*",
        arguments="const int*",
        cells="int*",
        sink="int*",
        steps="int",
        first_barrier="int",
        last_barrier="int",
    )
    return HostModule(source("cluster_program"), [kernel], name="program", race=True)


def checked(host: HostModule, program: Program, order: str, seed: int) -> Verdict:
    steps, blocks, threads = program.operations.shape
    data = [np.zeros(1, np.int32), np.zeros(blocks * threads, np.int32)]
    ends = [int(program.first_barrier), int(program.last_barrier)]
    report = host.launch(
        "run_program",
        blocks,
        threads,
        [program.operations, program.arguments, *data, steps, *ends],
        cluster=blocks,
        order=order,
        seed=seed,
    )
    assert report.completed, report.text
    rules = {finding.rule for finding in report.findings}
    before_start = "remote-before-start" in rules
    # What is read before its block wrote it for the first time is a race as well, which other orders show.
    assert rules <= {"race", "remote-before-start", "remote-after-exit"} | ({"uninit"} if before_start else set())
    races = {finding.buffer for finding in report.findings if finding.rule in ("race", "uninit")}
    cells = {"cells": -1} | {f"shared cell{block}": block for block in range(blocks)}
    return Verdict(frozenset(cells[buffer] for buffer in races), before_start, "remote-after-exit" in rules)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("enclosed", [True, False])
def test_the_checker_agrees_with_full_vector_clocks(host: HostModule, order: str, enclosed: bool) -> None:
    verdicts = []
    for seed in range(300):
        program = Author(seed, enclosed=enclosed).program
        verdicts.append(Model(program).verdict)
        assert checked(host, program, order, seed) == verdicts[-1], seed
    assert 75 < sum(bool(v.races) for v in verdicts) < 225  # the programs discriminate
    assert enclosed or 30 < sum(v.before_start for v in verdicts) < 270
    assert enclosed or 30 < sum(v.after_exit for v in verdicts) < 270
    assert not enclosed or not any(v.before_start or v.after_exit for v in verdicts)


@given(st.integers(0, 2**32), st.booleans())
def test_the_checker_agrees_on_any_program(host: HostModule, seed: int, enclosed: bool) -> None:
    program = Author(seed, enclosed=enclosed).program
    assert checked(host, program, "random", seed) == Model(program).verdict


# ---- orders that random programs make too rarely ------------------------------------------------------------------

Row = tuple[int, Iterable[int], int]
ALL = range(128)
BLOCK_0, BLOCK_1 = range(64), range(64, 128)
WARP_0, WARP_1 = range(32), range(32, 64)  # of block 0
NAMED_0 = [(NAMED, BLOCK_0, 64 * 16)]  # both warps of block 0
SYNC = [(ARRIVE, ALL, 0), (WAIT, ALL, 0)]


def without(threads: Iterable[int], *others: int) -> list[int]:
    return [thread for thread in threads if thread not in others]


SCRIPTS: dict[str, tuple[list[Row], Verdict]] = {
    "a warp publishes what a named barrier told it": (
        [
            (SHARED_WRITE, [0], 0),
            *NAMED_0,
            (ARRIVE_RELAXED, WARP_0, 0),
            (ARRIVE, range(32, 128), 0),
            (WAIT, ALL, 0),
            (SHARED_READ, [64], 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "also when a lane of it has arrived before": (
        [
            *NAMED_0,
            (ARRIVE, [32], 0),
            (SHARED_WRITE, [0], 0),
            (NAMED, BLOCK_0, 64 * 16 + 1),
            (ARRIVE_RELAXED, WARP_0, 0),
            (ARRIVE, range(33, 128), 0),
            (WAIT, ALL, 0),
            (SHARED_READ, [64], 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "nothing else publishes a relaxed arrival": (
        [
            (SHARED_WRITE, [0], 0),
            (ARRIVE_RELAXED, WARP_0, 0),
            (ARRIVE, range(32, 128), 0),
            (WAIT, ALL, 0),
            (SHARED_READ, [64], 0),
            *SYNC,
        ],
        Verdict(frozenset({0})),
    ),
    "a block barrier passes on what one thread waited for": (
        [
            (SHARED_WRITE, [0], 0),
            (ARRIVE, ALL, 0),
            (WAIT, [64], 0),
            (BLOCK, BLOCK_1, 0),
            (SHARED_READ, [100], 0),
            (WAIT, without(ALL, 64), 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "a named barrier passes it on": (
        [
            (SHARED_WRITE, [0], 0),
            (ARRIVE, ALL, 0),
            (WAIT, [64], 0),
            (NAMED, BLOCK_1, 64 * 16),
            (SHARED_READ, [100], 0),
            (WAIT, without(ALL, 64), 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "a warp barrier passes it on to its lanes only": (
        [
            (SHARED_WRITE, [0], 0),
            (ARRIVE, ALL, 0),
            (WAIT, [64], 0),
            (WARP, [64, 65], 3),
            (SHARED_READ, [65], 0),
            (WRITE, [0], 0),
            (READ, [66], 0),
            (WAIT, without(ALL, 64), 0),
            *SYNC,
        ],
        Verdict(frozenset({-1})),
    ),
    "a phase knows what the phase before it knew": (
        [
            (SHARED_WRITE, [0], 0),
            *SYNC,
            (ARRIVE_RELAXED, BLOCK_0, 0),
            (ARRIVE, BLOCK_1, 0),
            (WAIT, ALL, 0),
            (SHARED_READ, [64], 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "everything before a block barrier is published with it": (
        [
            (SHARED_WRITE, [5], 0),
            (BLOCK, BLOCK_0, 0),
            (ARRIVE_RELAXED, [5], 0),
            (ARRIVE, without(ALL, 5), 0),
            (WAIT, ALL, 0),
            (SHARED_WRITE, [70], 0),
            *SYNC,
        ],
        Verdict(),
    ),
    "a read of an arrived lane, then of one that has not arrived": (
        [
            (ARRIVE, [2], 0),
            (SHARED_READ, [2], 0),
            (SHARED_READ, [32], 0),
            (SHARED_READ, [1], 0),
            (ARRIVE, without(ALL, 2), 0),
            (WAIT, ALL, 0),
            (SHARED_WRITE, [64], 0),
            *SYNC,
        ],
        Verdict(frozenset({0})),
    ),
    "reads of several warps of several blocks": (
        [
            (ARRIVE, [0], 0),
            (SHARED_READ, [0], 0),
            (SHARED_READ, [32], 0),
            (SHARED_READ, [64], 0),
            (SHARED_READ, [96], 0),
            (ARRIVE, without(ALL, 0), 0),
            (WAIT, ALL, 0),
            (SHARED_WRITE, [96], 0),
            *SYNC,
        ],
        Verdict(frozenset({0})),
    ),
    "a block lives as long as one thread that has waited": (
        [(SHARED_WRITE, [64], 0), (ARRIVE, ALL, 0), (WAIT, [0], 0), *[(WARP, [33, 34], 6)] * 20],
        Verdict(),
    ),
    "and may end when all have arrived": ([(SHARED_WRITE, [64], 0), (ARRIVE, ALL, 0)], Verdict(after_exit=True)),
    "a relaxed arrival does not keep it alive": (
        [(SHARED_WRITE, [69], 0), (ARRIVE_RELAXED, [69], 0), (ARRIVE, without(ALL, 69), 0), (WAIT, ALL, 0)],
        Verdict(after_exit=True),
    ),
    "but a block barrier before it does": (
        [
            (SHARED_WRITE, [69], 0),
            (BLOCK, BLOCK_1, 0),
            (ARRIVE_RELAXED, [69], 0),
            (ARRIVE, without(ALL, 69), 0),
            (WAIT, ALL, 0),
        ],
        Verdict(),
    ),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_checker_agrees_on_a_script(host: HostModule, name: str, order: str) -> None:
    rows, verdict = SCRIPTS[name]
    operations = np.zeros((len(rows), 2, 64), np.int32)
    arguments = np.zeros_like(operations)
    for step, (operation, threads, argument) in enumerate(rows):
        operations[step].flat[list(threads)] = operation
        arguments[step].flat[list(threads)] = argument
    program = Program(operations, arguments, first_barrier=True, last_barrier=False)
    assert Model(program).verdict == verdict
    for seed in range(4):
        assert checked(host, program, order, seed) == verdict, seed
