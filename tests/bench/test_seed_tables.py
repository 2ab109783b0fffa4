"""The seed gate's tables: every arm it names, slopes, and what stands beside what."""

from __future__ import annotations

import json

import pytest

from mhcgen.bench.bandwidth import measure_bandwidth
from mhcgen.bench.measure import Bench
from mhcgen.bench.seed_tables import ARMS, SeedTables, arms_of, norm_quant_cases, slope
from mhcgen.build import build
from mhcgen.passes import run_pipeline

ARM_NAMES = ("unfused", "v1", "v4.auto")
TINY = SeedTables({"streams": 2, "hidden": 64}, (1, 2), 2, ARM_NAMES, ("v1",), ("v4.auto",), (None,))


def test_a_line_through_points() -> None:
    assert slope({1: 3.0, 10: 12.0, 20: 22.0, 40: 42.0}) == pytest.approx((1.0, 2.0))
    assert slope({1: 2.0, 2: 2.0, 3: 2.0}) == pytest.approx((0.0, 2.0))
    assert slope({20: 4.0}) == (0.0, 4.0)


def test_the_arms_are_those_of_the_seed_gate() -> None:
    names = [case.note for case in arms_of(build(), ARMS)]
    for wanted in ("unfused", "seed", "v1", "v2", "v4.512", "v4.1024"):
        assert wanted in names
    for placement in ("shared", "row", "element", "registers"):
        for threads in (128, 512):
            assert f"v3.{placement}.{threads}" in names
    assert len(names) == len(set(names))


def test_what_norm_and_quant_cost_apart_and_fused() -> None:
    cases = norm_quant_cases({"hidden": 4096})
    launches = {case.note: len(run_pipeline(case.program, case.options).kernels) for case in cases}
    assert launches == {
        f"{name}, {threads}": count
        for threads in (512, 1024, "auto")
        for name, count in (("v4, norm+quant apart", 2), ("v4z", 1))
    }


def test_every_table_is_made(bench: Bench) -> None:
    found: dict[str, list[dict[str, object]]] = {}
    made = 0
    for name, rows in TINY.run(bench):
        made += 1
        found.setdefault(name, []).extend(rows)
    assert made == TINY.count
    assert list(found) == ["arms", "post", "norm_quant", "projection", "iterations", "early_stop", "phases"]
    wrong = [row for rows in found.values() for row in rows if "error" in row]
    assert wrong == []
    assert [(row["note"], row["T"]) for row in found["arms"]] == [
        (name, tokens) for tokens in (1, 2) for name in ARM_NAMES
    ]
    assert all(row["method"] == "back_to_back" and len(row["runs"]) == 2 for row in found["arms"])  # type: ignore[arg-type]
    assert [row["note"] for row in found["projection"]] == ["own kernel", "vendor GEMM"] * 2
    assert [row["note"] for row in found["early_stop"]] == ["v1, early stop off", "v1, early stop on"]
    assert [row["early_stop"] for row in found["early_stop"]] == [False, True]
    (slopes,) = found["iterations"]
    assert list(slopes["us_by_iterations"]) == [1, 10, 20, 40]  # type: ignore[call-overload]
    assert slopes["us_per_iteration"] == 0.0
    json.dumps(found, allow_nan=False)


def test_all_that_is_run_was_compiled_beforehand(bench: Bench) -> None:
    """`cases` names every plan, so that none is compiled while the device waits."""
    named = {(case.program, case.options) for case in TINY.cases()}
    for _ in TINY.run(bench):
        pass
    loaded = {(m.program, m.plan.options) for m in bench._modules.values()}
    unfused = {(program, options) for program, options in loaded if options.fuse == "none"}
    assert loaded - unfused <= named
    assert {program for program, _ in unfused} <= {program for program, _ in named}


def test_the_bandwidth_probe_counts_what_it_reads_and_writes(bench: Bench) -> None:
    row = measure_bandwidth(bench, 1, hidden=256, streams=4, dtype="bf16")
    tokens = (1 << 20) // (4 * 256 * 2)
    assert row["T"] == tokens
    read, written = tokens * (4 * 256 * 2 + 4 * 4), tokens * 256 * 2
    assert row["us"] == 2.0
    assert row["read_GB_s"] == round(read / 2.0 * 1e-3, 1)
    assert row["read_write_GB_s"] == round((read + written) / 2.0 * 1e-3, 1)
    assert row["copy_GB_s"] == 4000.0


def test_a_probe_that_cannot_run_is_a_row(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise MemoryError("out of memory")

    monkeypatch.setattr(type(bench.device), "repeated", full)
    row = measure_bandwidth(bench, 1, hidden=64, dtype="bf16")
    assert row["error"] == "MemoryError: out of memory"
