"""The race checker against a model: random programs of accesses and barriers, judged by full vector clocks.

The checker keeps few records per cell and orders warps by summaries; the model keeps everything. They must agree on
whether a program races, whatever the order of threads.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from host_cases import signature, source
from hypothesis import given
from hypothesis import strategies as st

from mhcgen.backends.host import HostModule

NOTHING, READ, WRITE, WARP, BLOCK, NAMED, SHARED_READ, SHARED_WRITE, ATOMIC = range(9)
WRITES = (WRITE, SHARED_WRITE, ATOMIC)


@dataclass
class Program:
    """Operations and their arguments, `[step, thread]`."""

    operations: npt.NDArray[np.int32]
    arguments: npt.NDArray[np.int32]


def random_program(seed: int, *, atomics: bool = False) -> Program:
    """Few threads touch few cells between barriers of every kind, so that about half of the programs race."""
    rng = np.random.default_rng(seed)
    warps = int(rng.integers(1, 5))
    threads, steps = 32 * warps, int(rng.integers(3, 8))
    operations = np.zeros((steps, threads), np.int32)
    arguments = np.zeros_like(operations)
    for step in range(steps):
        kind = rng.choice(["access", "access", "warp", "named", "block"], p=[0.3, 0.2, 0.25, 0.2, 0.05])
        if kind == "access":
            active = rng.choice(threads, int(rng.choice([1, 1, 2, 3, threads // 2])), replace=False)
            choices = [READ, READ, SHARED_READ, WRITE, SHARED_WRITE] + [ATOMIC] * (4 * atomics)
            if len(active) > 3:
                choices = [READ, SHARED_READ]  # many writers always race
            operations[step, active] = rng.choice(choices, len(active))
            arguments[step, active] = rng.integers(0, 2, len(active))
        elif kind == "warp":
            for warp in range(warps):
                lanes = rng.permutation(32)
                for group in np.split(lanes, np.sort(rng.integers(0, 33, 2))):
                    if len(group) and rng.random() < 0.7:
                        operations[step, warp * 32 + group] = WARP
                        arguments[step, warp * 32 + group] = np.uint32(sum(1 << int(n) for n in group)).view(np.int32)
        elif kind == "named":
            order = rng.permutation(
                warps
            )  # every barrier has a number of its own, so that it is clear who meets whom
            cut = int(rng.integers(0, warps + 1))
            for number, group in enumerate((order[:cut], order[cut:])):
                for warp in group:
                    operations[step, warp * 32 : warp * 32 + 32] = NAMED
                    arguments[step, warp * 32 : warp * 32 + 32] = len(group) * 32 * 16 + 2 * step + number
        else:
            operations[step] = BLOCK
    return Program(operations, arguments)


def races(program: Program) -> bool:
    """Two accesses to one cell, one of them a write, not both atomic, unordered by the barriers between."""
    steps, threads = program.operations.shape
    clocks = np.eye(threads, dtype=np.int64)  # clocks[a, b]: the newest step of b that a is ordered after
    history: dict[tuple[bool, int], list[tuple[int, int, int]]] = {}
    for step in range(steps):
        groups: dict[tuple[int, int, int], list[int]] = {}
        for thread in range(threads):
            operation, argument = int(program.operations[step, thread]), int(program.arguments[step, thread])
            if operation in (WARP, BLOCK, NAMED):
                warp = thread // 32 if operation == WARP else 0
                groups.setdefault((operation, argument, warp), []).append(thread)
            elif operation != NOTHING:
                cell = history.setdefault((operation in (SHARED_READ, SHARED_WRITE), argument), [])
                for other, other_step, other_operation in cell:
                    conflict = operation in WRITES or other_operation in WRITES
                    both_atomic = operation == other_operation == ATOMIC
                    if conflict and not both_atomic and clocks[thread, other] < other_step:
                        return True
                cell.append((thread, int(clocks[thread, thread]), operation))
        for members in groups.values():
            joined = clocks[members].max(axis=0)
            clocks[members] = joined
            for thread in members:
                clocks[thread, thread] += 1
    return False


@pytest.fixture(scope="module")
def host() -> HostModule:
    kernel = signature(
        "run_program", operations="const int*", arguments="const int*", cells="int*", sink="int*", steps="int"
    )
    return HostModule(source("program"), [kernel], name="program", race=True)


def checked(host: HostModule, program: Program, order: str, seed: int) -> bool:
    steps, threads = program.operations.shape
    report = host.launch(
        "run_program",
        1,
        threads,
        [program.operations, program.arguments, np.zeros(4, np.int32), np.zeros(threads, np.int32), steps],
        order=order,
        seed=seed,
    )
    assert report.completed, report.text
    assert {finding.kind for finding in report.findings} <= {"race"}, report.text
    return bool(report.findings)


@pytest.mark.parametrize("order", ["ascending", "descending", "random", "warp-greedy"])
def test_the_checker_agrees_with_full_vector_clocks(host: HostModule, order: str) -> None:
    verdicts = []
    for seed in range(250):
        program = random_program(seed)
        verdicts.append(races(program))
        assert checked(host, program, order, seed) == verdicts[-1], seed
    assert 60 < sum(verdicts) < 190  # the programs discriminate


@given(st.integers(0, 2**32))
def test_the_checker_agrees_on_any_program(host: HostModule, seed: int) -> None:
    program = random_program(seed)
    assert checked(host, program, "random", seed) == races(program)


@pytest.mark.parametrize("order", ["ascending", "random"])
def test_atomics_raise_no_false_alarm(host: HostModule, order: str) -> None:
    """Of replaced atomics the checker keeps one per warp: it may miss a race with them, never invent one."""
    missed = found = 0
    for seed in range(250):
        program = random_program(seed, atomics=True)
        verdict, report = races(program), checked(host, program, order, seed)
        assert verdict or not report, seed
        missed += verdict and not report
        found += verdict and report
    assert found > 60 and missed <= 2
