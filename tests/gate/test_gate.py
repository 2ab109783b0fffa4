"""The gate is green on correct emissions, says what it did, and refuses what it cannot do."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import pytest
from factories import program as smallest
from gates import failures, gate

from mhcgen import build, configure
from mhcgen.errors import RefusedError, UsageError
from mhcgen.gate import CHECKS, RED, Request, arms, candidates, run
from mhcgen.gate.report import JSON_PREFIX
from mhcgen.gate.request import SMALL_TOKENS
from mhcgen.inputs import DISCRIMINATING
from mhcgen.plan import Options

ALL_PARTS = {"norm": True, "quant": "q8", "projection": "fma", "iterations_out": True}


@pytest.mark.parametrize(
    ("config", "fuse"),
    [
        ({"streams": 1, "hidden": 1}, "pre"),
        ({"streams": 2, "hidden": 7, "dtype": "bf16", **ALL_PARTS}, "pre-norm-quant"),
        ({"streams": 3, "hidden": 65, "dtype": "fp16"}, "pre"),
        ({"streams": 4, "hidden": 257, "functions": "fast", "sumsq": "fp32"}, "pre"),
        ({"streams": 5, "hidden": 64, "norm": True, "quant": "fp8", "quant_pow2": True}, "pre-norm"),
        ({"streams": 8, "hidden": 40, "early_stop": True, "iterations_out": True}, "pre"),
        ({"streams": 16, "hidden": 24, "iters": 2}, "pre"),
        ({"scope": "site", "norm": True, "dtype": "bf16"}, "pre"),
        ({"scope": "boundary", "streams": 3}, "boundary"),
        ({"scope": "boundary", "extra": ("engram", "tap")}, "pre"),
        ({"model": "transformer-engine", "scope": "boundary", "extra": ("engram", "tap"), "streams": 3}, "pre"),
        ({"scope": "trunk", "hidden": 33}, "pre"),
        ({"scope": "head"}, "none"),
        ({"scope": "expand"}, "none"),
        ({"scope": "mean", "dtype": "bf16"}, "none"),
        ({"scope": "post"}, "none"),
    ],
    ids=str,
)
def test_correct_emissions_pass(config: dict[str, Any], fuse: str) -> None:
    report = gate(config, fuse, tokens=(0, 1, 4))
    assert not failures(report)
    assert report.exit_code == 0
    assert report.error is None


def test_a_result_that_is_the_poison_itself_is_not_unwritten() -> None:
    """The log domain negates the largest potential: a NaN as a GPU makes it becomes all ones, the first poison."""
    config = {"model": "transformer-engine", "streams": 8, "hidden": 7}
    report = gate(config, options={"placement": "shared"}, inputs=("uniform", "D15"))
    assert not failures(report)


def test_every_arm_passes() -> None:
    report = gate(arms="all", tokens=(1, 4))
    assert not failures(report)
    names = {row.arm for row in report.rows} | {refused.arm.name for refused in report.refused}
    assert names == {arm.name for arm in candidates(build(streams=4, hidden=64), Options(fuse="pre"))}
    assert {"unfused", "asked", "seed", "v1", "v2", "v3.row.128", "v4.512", "scalar"} <= {r.arm for r in report.rows}
    assert all(refused.refusal.because and refused.refusal.hint for refused in report.refused)


def test_the_arms_of_the_longest_chain_pass() -> None:
    report = gate(ALL_PARTS, "pre-norm-quant", arms="v1,v2,v3.*.128,v4.256*,cluster.*,stamped,scalar", tokens=(3,))
    assert not failures(report)
    assert len(report.rows) > 9


def test_every_arm_is_free_of_races_and_loads_the_streams_once() -> None:
    report = gate(arms="all", race=True, tokens=(2,), inputs=("uniform", "D15"))
    assert not failures(report)
    once = [row for row in report.rows if row.verdict("slab_once")]
    assert {row.arm for row in once} >= {"v4.256", "v4.512", "v4.auto"}
    for row in once:
        verdict = row.verdict("slab_once")
        assert verdict is not None
        assert dict(verdict.counts)["most"] == 1
        assert dict(verdict.counts)["elements"] == (2 + SMALL_TOKENS) * 4 * 64
    weakened = next(row for row in report.rows if row.arm == "v1").verdict("weakened")
    assert weakened is not None
    assert dict(weakened.counts)["still block"] < dict(weakened.counts)["block barriers"]


def test_a_run_too_long_for_registers_is_read_back_from_its_own_row() -> None:
    # 32 columns a lane: y and z of a cluster pass through global memory, each token's through its own row.
    report = gate(
        {**ALL_PARTS, "hidden": 2048}, "pre-norm-quant", arms="cluster.2", inputs=("uniform",), tokens=(1, 3)
    )
    assert not failures(report)
    assert report.rows[1].arm == "cluster.2"


def test_arms_are_the_legal_candidates() -> None:
    program = build(streams=8, hidden=64)
    every = {arm.name for arm in candidates(program, Options(fuse="pre"))}
    legal = {arm.name for arm in arms(program, Options(fuse="pre"))}
    assert legal < every
    assert "v3.element.128" in every - legal


def test_an_early_stop_is_compared_with_the_full_loop() -> None:
    report = gate({"early_stop": True, "iterations_out": True}, arms="unfused,full-loop")
    assert not failures(report)
    verdict = report.rows[1].verdict("bits")
    assert verdict is not None
    assert "iterations" not in dict(verdict.counts)
    assert "comb" in dict(verdict.counts)


def test_the_asked_schedule_is_the_arm_asked() -> None:
    report = gate(options={"placement": "row", "threads": 96, "slab": "global"})
    assert [row.arm for row in report.rows] == ["unfused", "asked"]
    assert report.rows[1].threads == (96,)


def test_a_hand_built_program_takes_the_place_of_the_configuration() -> None:
    request = Request(configure(hidden=64), Options(), tokens=(3,), backend="host")
    report = run(request, program=smallest())
    assert not failures(report)
    assert report.rows[0].kernels == (("mhc_mean", report.rows[0].kernels[0][1]),)


# ---- what it says -----------------------------------------------------------------------------------
def test_the_json_line_has_a_fixed_schema() -> None:
    report = gate({"streams": 3}, red=("transpose-comb", "swap-eps"), arms="unfused,asked", inputs=("uniform",))
    line = report.json_line()
    assert line.startswith(f"{JSON_PREFIX} {{")
    assert "\n" not in line
    found = json.loads(line.removeprefix(JSON_PREFIX))
    assert list(found) == [
        "version", "ok", "exit_code", "config", "options", "class", "backend", "device", "race", "seed", "tokens",
        "inputs", "arms", "refused", "red", "red_not_applicable", "seconds",
    ]  # fmt: skip
    assert list(found["arms"][0]) == [
        "name", "what", "ok", "kernels", "launches", "threads", "sha256", "checks", "failed", "seconds",
    ]  # fmt: skip
    assert list(found["red"][0]) == [
        "fault", "site", "expected_check", "caught_by", "caught", "buffers", "detail", "seconds",
    ]  # fmt: skip
    assert found["config"]["streams"] == 3
    assert found["tokens"] == [1, 2]
    for arm in found["arms"]:
        order = [check for check in CHECKS if check in arm["checks"]]
        assert list(arm["checks"]) == order
        assert all(set(check) == {"ok", "counts", "detail"} for check in arm["checks"].values())
    assert found["red_not_applicable"][0]["fault"] == "swap-eps"
    assert found["exit_code"] == 1
    assert found["ok"] is False


def test_two_runs_say_the_same() -> None:
    def timeless(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: timeless(item) for key, item in value.items() if key != "seconds"}
        return [timeless(item) for item in value] if isinstance(value, list) else value

    first, second = (timeless(gate(arms="v*.128,v4.auto", inputs=("uniform", "D1")).as_dict()) for _ in range(2))
    assert json.dumps(first) == json.dumps(second)


def test_the_table_names_arms_checks_and_what_failed() -> None:
    report = gate(red=("skip-stream",))
    table = report.table()
    for word in ("unfused", "asked", "reference", "bits", "poison", "skip-stream", "caught"):
        assert word in table
    assert "D10 T=3" in table


# ---- what it refuses --------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ({"tokens": (-1,)}, "U-TOKENS"),
        ({"tokens": ()}, "U-TOKENS"),
        ({"tokens": (True,)}, "U-TOKENS"),
        ({"backend": "gpu"}, "U-BACKEND"),
        ({"backend": "cuda", "race": True}, "U-RACE"),
        ({"arms": "v9"}, "U-ARM"),
        ({"red": ("drop-barier",)}, "U-RED"),
        ({"inputs": ("D99",)}, "U-INPUTS"),
    ],
    ids=str,
)
def test_a_wish_that_means_nothing_is_refused(asked: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        gate(**asked)
    assert caught.value.code == code
    assert caught.value.hints


@pytest.mark.parametrize("asked", [{"options": {"threads": 33}}, {"arms": "v3.element.128"}], ids=str)
def test_an_arm_asked_for_by_name_and_refused_ends_the_gate(asked: dict[str, Any]) -> None:
    with pytest.raises(RefusedError):
        gate({"streams": 8}, **asked)


def test_a_pattern_lists_the_refused_arms_instead() -> None:
    report = gate({"streams": 8}, arms="v3.element.*,v3.row.128", inputs=("uniform",))
    assert [row.arm for row in report.rows] == ["unfused", "v3.row.128"]
    assert {refused.refusal.code for refused in report.refused} == {"P-ELEMENT"}


def test_a_gate_that_ends_early_starts_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    compiled: list[Any] = []
    load = sys.modules["mhcgen.gate.run"].load

    def counted(*given: Any, **how: Any) -> Any:
        compiled.append(given)
        return load(*given, **how)

    def interrupt(loaded: Any, *_: Any, **__: Any) -> Any:
        started.append(loaded)
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["mhcgen.gate.run"], "execute", interrupt)
    monkeypatch.setattr(sys.modules["mhcgen.gate.run"], "load", counted)
    with pytest.raises(KeyboardInterrupt):
        gate(arms="all")
    workers = os.cpu_count() or 1
    assert 1 <= len(started) <= len(compiled) <= 2 * workers, "what runs ends, and at most what was being started"


def test_names_are_stable() -> None:
    assert set(RED) == {
        "drop-barrier", "weaken-barrier", "transpose-comb", "skip-stream", "short-iteration", "long-iteration",
        "stale-output", "swap-eps", "swap-norm-weight", "eps-outside-root", "post-eps", "max-over-padding",
        "borrowed-row",
    }  # fmt: skip
    assert all(red.what and red.check in CHECKS for red in RED.values())
    assert {"D1", "D10"} <= set(DISCRIMINATING)


@pytest.mark.slow
def test_the_whole_gate_at_the_width_of_the_seed() -> None:
    report = gate({"hidden": 4096}, arms="all", tokens=(1, 4, 8))
    assert not failures(report)


@pytest.mark.slow
@pytest.mark.parametrize("streams", [2, 3, 5, 6, 8, 16])
@pytest.mark.parametrize("hidden", [1, 7, 64, 257, 1280, 4096, 7168])
def test_every_arm_at_many_sizes(streams: int, hidden: int) -> None:
    inputs = ("uniform", "D1", "extreme")
    report = gate({"streams": streams, "hidden": hidden}, arms="all", tokens=(0, 1, 4), inputs=inputs)
    assert not failures(report)
