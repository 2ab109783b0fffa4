"""Planted faults: each is caught by the check named for it, and a fault that cannot be planted is no success."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gates import failures, gate, missed, tampered

import mhcgen.gate.red as red_module
from mhcgen import build, configure
from mhcgen.errors import InternalError
from mhcgen.gate import RED, Request, run
from mhcgen.gate.faults import Fault, in_step, substituted
from mhcgen.ir import Program
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options, Plan

VALUES = tuple(name for name, red in RED.items() if red.plant is not None)
#: What no Program of that many streams can have.
IMPOSSIBLE = {
    1: {"transpose-comb", "skip-stream", "short-iteration", "long-iteration", "max-over-padding"},
    2: {"transpose-comb", "max-over-padding"},
    3: set(),
    4: {"max-over-padding"},
    8: {"max-over-padding"},
}
FULL = {"norm": True, "quant": "q8", "hc_eps": 1e-4}


def expected(fault: str, arm: str) -> str:
    """The check that must catch a fault in an arm."""
    return "reference" if RED[fault].check == "bits" and arm == "unfused" else RED[fault].check


@pytest.mark.parametrize("streams", [1, 2, 3, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_each_fault_is_caught_by_its_check(streams: int) -> None:
    report = gate({"streams": streams, **FULL}, "pre-norm-quant", red=VALUES)
    assert not failures(report)
    assert not missed(report)
    assert {name for name, _ in report.unfit} == IMPOSSIBLE[streams]
    planted = {(red.fault, red.site.split(":")[0]) for red in report.reds}
    assert planted == {(name, arm) for name in set(VALUES) - IMPOSSIBLE[streams] for arm in ("unfused", "asked")}
    for red in report.reds:
        assert red.expected == expected(red.fault, red.site.split(":")[0])
        assert red.expected in red.caught_by
        assert red.detail
    assert report.exit_code == 1
    assert report.error is None


#: Forms that the others all but cover.
SLOW_FORMS = [
    ({"scope": "site", "norm": True, "hc_eps": 1e-2}, "pre", {"sync": "block"}),
    ({"early_stop": True, "iterations_out": True}, "pre", {}),
    ({"streams": 3, "hc_eps": 1e-3, "iters": 2}, "pre", {"placement": "registers", "slab": "global"}),
    ({"scope": "trunk", "dtype": "bf16", "hidden": 24}, "pre", {}),
]


@pytest.mark.parametrize(
    ("config", "fuse", "options"),
    [
        *[pytest.param(*form, marks=pytest.mark.slow) for form in SLOW_FORMS],
        ({"dtype": "bf16", "projection": "fma", "hidden": 33, **FULL}, "pre-norm", {}),
        ({"dtype": "fp16", "functions": "fast", "streams": 5, **FULL}, "pre-norm", {"placement": "shared"}),
        ({"streams": 3, "hidden": 17, "model": "glm-5.3-flash"}, "pre", {"placement": "row"}),
        ({"scope": "boundary", "hc_eps": 1e-2, "streams": 3}, "boundary", {}),
    ],
    ids=str,
)
def test_each_fault_is_caught_in_other_forms(config: dict[str, Any], fuse: str, options: dict[str, Any]) -> None:
    report = gate(config, fuse, options, red=VALUES)
    assert not failures(report)
    assert not missed(report)
    assert len({red.fault for red in report.reds}) + len(report.unfit) == len(VALUES)


def test_a_time_stamp_is_of_no_stage() -> None:
    report = gate(options={"stamps": True}, red=("transpose-comb",), inputs=("uniform",))
    assert report.reds and not missed(report)


def test_norm_weight_must_move_both_z_and_q() -> None:
    report = gate({**FULL}, "pre-norm-quant", red=("swap-norm-weight",))
    assert not missed(report)
    # With a weight of ones in the place of q's share, q would not move: the fault is then missed, not caught.
    plant = RED["swap-norm-weight"].plant
    assert plant is not None
    program = build(streams=4, hidden=64, **FULL)
    (fault,) = plant(program, run_pipeline(program, Options(fuse="pre-norm-quant")))
    assert fault.moves == ("z", "q")


def test_both_eps_equal_is_said_and_not_passed_over() -> None:
    report = gate(red=("swap-eps",))
    assert report.reds == ()
    ((name, reason),) = report.unfit
    assert name == "swap-eps"
    assert "--hc-eps" in reason
    assert report.exit_code == 0


def test_all_means_every_red_arm() -> None:
    report = gate({"streams": 3, **FULL}, "pre-norm-quant", red=("all",), inputs=("uniform",))
    assert {red.fault for red in report.reds} == set(RED)
    assert not missed(report)


# ---- a gate that cannot see a fault says so --------------------------------------------------------
def harmless(program: Program, plan: Plan) -> Iterator[Fault]:
    """A change of text that changes nothing else."""
    yield Fault(plan, plan.source.replace("licence:", "license:"), "a comment")


def test_a_missed_fault_ends_with_70(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(red_module.RED, "skip-stream", replace(RED["skip-stream"], plant=harmless))
    report = gate(red=("skip-stream",))
    assert [red.caught for red in report.reds] == [False, False]
    assert report.exit_code == 70
    assert isinstance(report.error, InternalError)
    assert report.error.code == "G-UNCAUGHT"
    assert "MISSED" in report.table()


def test_the_wrong_check_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(red_module.RED, "skip-stream", replace(RED["skip-stream"], check="findings"))
    report = gate(red=("skip-stream",))
    assert all("bits" in red.caught_by for red in report.reds)
    assert report.exit_code == 70


def test_a_check_that_the_clean_arm_fails_has_caught_nothing() -> None:
    request = Request(configure(hidden=64), Options(fuse="pre"), tokens=(2,), backend="host", red=("skip-stream",))
    report = run(request, tamper=tampered("asked", "mhc_exp(-x)", "mhc_exp(x)"))
    red = next(red for red in report.reds if red.site.startswith("asked"))
    assert not red.caught
    assert "the clean arm fails bits too" in red.detail
    assert report.exit_code == 70


def test_a_result_that_must_move_and_does_not_is_a_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    def same_weight(program: Program, plan: Plan) -> Iterator[Fault]:
        # The mixes move pre and y; that says nothing of the norm weight.
        def halved(inputs: Any) -> Any:
            return {**inputs, "mixes": inputs["mixes"] * np.float32(0.5), "norm_weight": inputs["norm_weight"] * 0}

        yield Fault(plan, plan.source, "mixes", halved, ("z", "q", "comb", "q_scale", "nothing of that name"))

    red = replace(RED["swap-norm-weight"], plant=same_weight)
    monkeypatch.setitem(red_module.RED, "swap-norm-weight", red)
    report = gate({**FULL}, "pre-norm-quant", red=("swap-norm-weight",))
    assert all("did not move" in red.detail for red in report.reds)
    assert report.exit_code == 70


def test_a_substitution_without_a_place_raises() -> None:
    with pytest.raises(InternalError) as caught:
        substituted("float a;", "double", "float", "nowhere")
    assert caught.value.code == "G-NOT-PLANTED"
    with pytest.raises(InternalError):
        substituted("float a;", "float", "float", "the same text")
    with pytest.raises(InternalError):
        in_step("// rowsq.partial\nx;\n}\n", "collapse.columns", "x", "y")


def test_a_step_is_changed_and_no_other() -> None:
    text = "  // a.one\n  x = 1;\n  // b.two\n  x = 1;\n}\n"
    assert in_step(text, "b.two", "1", "2") == "  // a.one\n  x = 1;\n  // b.two\n  x = 2;\n}\n"
