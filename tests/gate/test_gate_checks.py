"""Each check of the gate can fail: tampered texts, and outcomes with one thing wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gates import tampered

import mhcgen.gate.jobs as jobs_module
from mhcgen import build, configure
from mhcgen.errors import CompileError
from mhcgen.gate import Request, run
from mhcgen.gate.checks import bits, findings, poison, race, rows, slab_once
from mhcgen.gate.execute import HostMachine, Launched, Outcome, execute, load
from mhcgen.gate.jobs import Job
from mhcgen.gate.planted import discriminates
from mhcgen.inputs import make_inputs
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options

CONFIG = configure(streams=4, hidden=64)


def failed_checks(arm: str, old: str, new: str, **asked: Any) -> set[str]:
    """Checks of an arm that fail once its text is tampered with."""
    request = Request(
        CONFIG, Options(fuse="pre"), **{"backend": "host", "tokens": (1, 2), "inputs": ("uniform",), **asked}
    )
    report = run(request, tamper=tampered(arm, old, new))
    assert report.exit_code == (1 if any(not row.ok for row in report.rows) else 0)
    row = next(row for row in report.rows if row.arm == arm)
    return {verdict.check for verdict in row.verdicts if not verdict.ok}


# ---- tampered texts ---------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("__fadd_rn(1.0f, mhc_exp(-x))", "__fadd_rn(1.0f, mhc_exp(x))", "bits"),
        ("if (token >= tokens) return;", "if (token >= tokens - 1) return;", "poison"),
        ("mhc_store_fp32(y_t + col, value);", "if (col > 8) mhc_store_fp32(y_t + col, value);", "poison"),
        ("post_t[lane] = post_gate;", "post_t[lane] = post_gate; ((float*)scale)[0] = 1.0f;", "inputs_unchanged"),
        ("post_t[lane] = post_gate;", "post_t[lane] = post_gate; if (token == 0) post_t[-1] = 0.0f;", "findings"),
        ("post_t[lane] = post_gate;", "post_t[lane] = post_gate; if (lane == 0) __syncthreads();", "findings"),
        ("post_t[lane] = post_gate;", "post_t[lane] = token ? post_gate * 1.5f : post_gate;", "rows"),
        ("licence:", "license:", "ran"),
    ],
)
def test_a_tampered_text_fails_its_check(old: str, new: str, check: str) -> None:
    assert {check, "ran"} <= failed_checks("asked", old, new)


def test_a_harmless_change_of_the_text_fails_nothing_else() -> None:
    assert failed_checks("asked", "licence:", "license:") == {"ran"}


def test_a_wrong_baseline_fails_against_the_reference() -> None:
    assert "reference" in failed_checks("unfused", "mhc_exp(-x)", "mhc_exp(x)")


def test_a_race_changes_bits_between_orders() -> None:
    lost = failed_checks("asked", "__syncthreads();  // RAW s_pre", "// RAW s_pre")
    assert "orders" in lost


def test_a_race_is_reported_in_race_mode() -> None:
    lost = failed_checks("asked", "__syncthreads();  // RAW s_pre", "// RAW s_pre", race=True, inputs=("uniform",))
    assert "race" in lost


def test_a_fault_that_only_full_clusters_show_is_found() -> None:
    """Few tokens have a cluster each, so that its second token is one that no usual launch here has."""
    config = configure(streams=4, hidden=1024, projection="fma")
    request = Request(
        config, Options(fuse="pre", cluster=4), backend="host", tokens=(1, 3), inputs=("uniform",), arms="asked"
    )
    old = "value[v] = __fmul_rn(s_pre_ranks[k * 4], xs[0][v]);"
    report = run(request, tamper=tampered("asked", old, old.replace("k * 4", "0")))
    row = next(row for row in report.rows if row.arm == "asked")
    assert {verdict.check for verdict in row.verdicts if not verdict.ok} == {"clusters", "ran"}
    assert run(request).exit_code == 0


def test_a_second_load_of_the_streams_is_counted() -> None:
    old = "// collapse.columns\n"
    new = f"{old}    if (column_first < 64 && x_t[column_first] == 12345.0f) return;\n"
    assert "slab_once" in failed_checks("asked", old, new, race=True, inputs=("uniform",))


def test_a_text_that_does_not_compile_is_an_error_and_no_verdict() -> None:
    with pytest.raises(CompileError):
        failed_checks("asked", "const long long token =", "const lang token =")


def test_inputs_that_show_nothing_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def constant(program: Any, tokens: int, seed: int = 0) -> dict[str, Any]:
        return {name: np.zeros_like(array) for name, array in make_inputs(program, tokens).items()}

    monkeypatch.setattr(jobs_module, "make_inputs", constant)
    report = run(Request(CONFIG, Options(fuse="pre"), tokens=(2,), backend="host", inputs=("uniform",)))
    verdict = report.rows[0].verdict("discriminates")
    assert verdict is not None
    assert not verdict.ok
    assert "all zero" in verdict.detail


# ---- single checks ----------------------------------------------------------------------------------
PROGRAM = build(streams=4, hidden=64)
JOB = Job("uniform", 3, make_inputs(PROGRAM, 3))


@pytest.fixture(scope="module")
def clean() -> Outcome:
    return execute(load(HostMachine(), run_pipeline(PROGRAM, Options()), race=False), JOB.inputs)


def with_result(outcome: Outcome, name: str, index: tuple[int, ...], value: float) -> Outcome:
    array = outcome.results[name].copy()
    array[index] = value
    return replace(outcome, results={**outcome.results, name: array})


def test_one_flipped_bit_is_a_difference(clean: Outcome) -> None:
    array = clean.results["comb"].copy()
    array.view(np.uint32)[2, 3, 1] ^= 1
    verdict = bits([(JOB, replace(clean, results={**clean.results, "comb": array}))], [(JOB, clean)])
    assert not verdict.ok
    assert dict(verdict.counts) == {"pre": 0, "post": 0, "comb": 1, "y": 0, "elements": 3 * (4 + 4 + 16 + 64)}


def test_the_sign_of_zero_is_a_bit_and_that_of_nan_is_not(clean: Outcome) -> None:
    plus, minus = (with_result(clean, "y", (0, 0), zero) for zero in (0.0, -0.0))
    assert not bits([(JOB, plus)], [(JOB, minus)]).ok
    one, other = (with_result(clean, "y", (0, 0), nan) for nan in (np.nan, -np.nan))
    assert bits([(JOB, one)], [(JOB, other)]).ok
    assert not bits([(JOB, one)], [(JOB, clean)]).ok


def test_a_survivor_under_both_poisons_is_unwritten(clean: Outcome) -> None:
    second = replace(clean, fill=0xA5)

    def stale(outcome: Outcome) -> Outcome:
        array = outcome.results["post"].copy()
        array[1].view(np.uint8)[:] = outcome.fill
        return replace(outcome, results={**outcome.results, "post": array})

    assert poison([(JOB, clean)], [(JOB, second)]).ok
    verdict = poison([(JOB, stale(clean))], [(JOB, stale(second))])
    assert dict(verdict.counts)["post"] == 4
    assert not verdict.ok


def test_a_result_that_depends_on_the_poison_fails(clean: Outcome) -> None:
    other = with_result(replace(clean, fill=0xA5), "y", (0, 5), 1.0)
    assert not poison([(JOB, clean)], [(JOB, other)]).ok


def test_a_row_that_moves_with_its_place_fails(clean: Outcome) -> None:
    turned = replace(clean, results={name: array[::-1] for name, array in clean.results.items()})
    assert rows([(JOB, clean)], [(JOB, turned)]).ok
    assert not rows([(JOB, clean)], [(JOB, clean)]).ok


class Found:
    """A finding, as far as the checks look."""

    def __init__(self, kind: str) -> None:
        self.kind, self.text = kind, f"a {kind}"


@pytest.mark.parametrize(("kind", "check"), [("race", race), ("uninit", race), ("mask", findings), ("oob", findings)])
def test_findings_go_to_their_check(clean: Outcome, kind: str, check: Any) -> None:
    launch = replace(clean.launches[0], findings=(Found(kind),))
    bad = [(JOB, replace(clean, launches=(launch,)))]
    assert not check(bad).ok
    assert (findings if check is race else race)(bad).ok


def test_a_stopped_launch_is_a_finding(clean: Outcome) -> None:
    stopped: Launched = replace(clean.launches[0], completed=False)
    assert not findings([(JOB, replace(clean, launches=(stopped,)))]).ok


def test_uncounted_loads_do_not_pass_for_single_ones(clean: Outcome) -> None:
    plan = run_pipeline(PROGRAM, Options(fuse="pre", slab="registers"))
    verdict = slab_once(plan, [(JOB, clean)])
    assert verdict is not None
    assert not verdict.ok
    assert slab_once(run_pipeline(PROGRAM, Options()), [(JOB, clean)]) is None


def test_a_fault_that_the_inputs_hide_is_reported(clean: Outcome) -> None:
    from mhcgen import reference

    # Equal logits give a symmetric comb: transposing it changes nothing.
    inputs = {**JOB.inputs, "scale": np.zeros(3, np.float32), "base": np.zeros(24, np.float32)}
    job = Job("D1", 3, inputs)
    values = reference.run(PROGRAM, inputs, all_values=True)
    verdict = discriminates(PROGRAM, [(job, clean)], [values])
    assert not verdict.ok
    assert "comb transposed" in verdict.detail
