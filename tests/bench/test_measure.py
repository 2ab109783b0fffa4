"""A figure is taken of what gives the right bits, on arrays that were poisoned, and of nothing else."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mhcgen.bench import measure, timing
from mhcgen.bench.cases import CASES, case
from mhcgen.bench.device import Dry
from mhcgen.bench.measure import Bench, Case, Unmeasurable
from mhcgen.bench.rounds import arm_cases, interleaved
from mhcgen.build import build
from mhcgen.plan import Options, Plan
from mhcgen.runtime import HostRunner, Module

SMALL = {"hidden": 64, "streams": 2, "iters": 2}


class Broken(Dry):
    """A device on which fused kernels come out wrong: `edit` spoils their text."""

    def __init__(self, edit: tuple[str, str]) -> None:
        super().__init__()
        self.edit = edit

    def load(self, plan: Plan) -> Module:
        if plan.options.fuse == "none":
            return super().load(plan)
        assert self.edit[0] in plan.source
        return Module(plan, HostRunner(plan, source=plan.source.replace(*self.edit)))


def small(what: str = "finish", **schedule: Any) -> Case:
    return case(what, schedule, dtype="bf16", **SMALL)


@pytest.mark.parametrize("what", list(CASES))
def test_every_case_can_be_measured(bench: Bench, what: str) -> None:
    row = bench.measure(small(what), 2)
    assert row["differing_bytes"] == 0
    assert row["what"] == what
    assert (row["T"], row["n"], row["H"], row["dtype"]) == (2, 2, 64, "bf16")
    assert (row["us"], row["low"], row["high"], row["method"]) == (2.0, 2.0, 2.0, "graph")
    assert row["GB_s"] == round(row["bytes"] / 2.0 * 1e-3, 1)
    assert row["early_stop"] is False
    json.dumps(row, allow_nan=False)


def test_what_differs_in_a_bit_is_not_timed() -> None:
    bench = Bench(Broken(("= mix_comb[1 - 1];", "= mix_comb[1 - 1] * 1.5f;")), measure.Floor(1.0, 1.0))
    with pytest.raises(Unmeasurable, match="bytes differ") as caught:
        bench.measure(small(), 2)
    assert caught.value.row["differing_bytes"] > 0
    row = bench.attempt(small(), 2)
    assert "us" not in row
    assert row["differing_bytes"] > 0
    assert "differ from the unfused emission" in row["error"]


def test_a_byte_that_nobody_writes_differs(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results are filled with other bytes than those of the unfused emission."""
    one = small()
    module = bench.module(one.program, one.options)
    run = type(module).__call__

    def lazy(self: Module, **arguments: Any) -> dict[str, Any]:
        made = run(self, **arguments)
        made["y"].reshape(-1).view(np.uint8)[7:8] = self.lazy_byte  # type: ignore[attr-defined]
        return made

    monkeypatch.setattr(Module, "__call__", lazy)
    module.lazy_byte = measure.POISONS[0]  # type: ignore[attr-defined]
    unfused = bench.module(one.program, Options())
    unfused.lazy_byte = measure.POISONS[1]  # type: ignore[attr-defined]
    assert bench.differing_bytes(module, 2) == 1


def test_a_refusal_is_a_row(bench: Bench) -> None:
    row = bench.attempt(small(slab="registers", threads=32, mix_warp="own"), 1)
    assert row["error"].startswith("L-THREADS: ")
    assert row["options"] == {"fuse": "pre", "slab": "registers", "threads": 32, "mix_warp": "own"}


def test_inputs_repeat_beyond_the_tokens_that_are_made(bench: Bench) -> None:
    one = small()
    tokens = measure.MADE_TOKENS + 6
    inputs = bench.inputs(one.program, tokens)
    assert inputs["x"].shape[0] == tokens
    assert (inputs["x"][measure.MADE_TOKENS :] == inputs["x"][:6]).all()
    assert inputs["scale"].shape == (3,)
    assert bench.measure(one, tokens)["differing_bytes"] == 0


def test_rotation_is_over_copies_of_what_a_launch_reads(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "ROTATION_BYTES", 100_000)
    one = small("pre")
    module = bench.module(one.program, one.options)
    assert len(bench.rotation(module, 1)) == 1
    sets = bench.rotation(module, 64)
    read = 64 * 2 * 64 * 2
    assert len(sets) == -(-100_000 // read)
    assert len({inputs["x"].ctypes.data for inputs, _ in sets}) == len(sets)
    assert len({inputs["fn"].ctypes.data for inputs, _ in sets}) == 1
    assert len({outputs["y"].ctypes.data for _, outputs in sets}) == 1
    fresh = Bench(bench.device, bench.floor, fresh_results=True)
    sets = fresh.rotation(fresh.module(one.program, one.options), 64)
    assert len({outputs["y"].ctypes.data for _, outputs in sets}) == len(sets)
    cold = Bench(bench.device, bench.floor, cold=True)
    sets = cold.rotation(cold.module(one.program, one.options), 1)
    assert len({inputs["fn"].ctypes.data for inputs, _ in sets}) == len(sets) > 1


def test_a_second_method_stands_beside_the_first(bench: Bench) -> None:
    row = bench.measure(small(), 1, methods=("graph", "back_to_back", "wall"))
    assert row["method"] == "graph"
    assert row["back_to_back"] == row["wall"] == {"us": 2.0, "low": 2.0, "high": 2.0}


def test_arms_take_turns(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(**SMALL)
    cases = arm_cases("finish", program, Options(fuse="pre"), ["unfused", "v4.auto", "v1"])
    assert [one.note for one in cases] == ["unfused", "v1", "v4.auto"]
    turns: list[tuple[int, str]] = []
    timed = Bench.timed

    def seen(self: Bench, prepared: Any, tokens: int, method: str, rounds: int = 5) -> Any:
        turns.append((prepared.row["note"], method))
        return timed(self, prepared, tokens, method, rounds)

    monkeypatch.setattr(Bench, "timed", seen)
    rows = interleaved(bench, cases, 1, rounds=3)
    names = ["unfused", "v1", "v4.auto"]
    assert turns == [(name, "back_to_back") for name in names * 3] + [(name, "graph") for name in names]
    assert all(len(row["runs"]) == 3 and row["method"] == "back_to_back" and "graph" in row for row in rows)


def test_an_arm_that_cannot_run_takes_no_turn(bench: Bench) -> None:
    program = build(**SMALL)
    legal = Case("finish", program, Options(fuse="pre"), "good")
    other = Case("finish", program, Options(fuse="pre", threads=33), "bad")
    good, bad = interleaved(bench, [legal, other], 1, rounds=1)
    assert "us" in good
    assert bad["error"].startswith("L-THREADS")
