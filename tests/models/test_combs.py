"""Kinds of mixing matrices: what each promises, and the known mis-ports, each of which a bound must exclude."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen import bounds, reference
from mhcgen.combs import COMB_KINDS, DirectMap, comb_program
from mhcgen.errors import ProgramError
from mhcgen.ir import Program, Stage
from mhcgen.reference_combs import COMBS

TOKENS = 5
PLACEMENTS = ("shared", "row", "element", "registers")

#: Every option of the Sinkhorn, by name of the public form that has it.
SINKHORNS: dict[str, dict[str, Any]] = {
    "deepseek-v4": {},
    "liger": {"orient": "out"},
    "transformer-engine": {"domain": "log", "eps": 0.0},
    "log, columns first": {"domain": "log", "eps": 0.0, "order": "col-row", "orient": "out"},
    "tileops": {"start": "exp_rowmax", "orient": "out", "eps": 0.02},
    "mhc.cu": {"start": "exp", "eps_mode": "threshold", "eps": 1e-5, "orient": "out"},
    "mhc-paper": {"start": "exp", "eps_mode": "none", "order": "col-row", "orient": "out", "eps": 0.0},
    "softmax of columns": {"order": "col-row"},
    "softmax, no eps": {"eps_mode": "none", "eps": 0.0},
}
DIRECT = tuple(name for name, kind in COMB_KINDS.items() if kind.stage == "comb")


def matrix_program(n: int, comb: str = "sinkhorn", **attrs: Any) -> Program:
    """One stage that makes a matrix."""
    kind = COMB_KINDS[comb]
    usual = ("logits",) if kind.logits(n) else ()
    stages = [factories.stage(kind.stage, comb=comb, usual=usual, **attrs)]
    if not usual:
        stages.append(factories.stage("mean"))  # something that has tokens
    return factories.program(*stages, n=n)


def logits_of(program: Program, width: float = 2.0, seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return rng.uniform(-width, width, (TOKENS, program.dim("L"))).astype(np.float32)


def given(program: Program, **arrays: Any) -> dict[str, Any]:
    return {**factories.inputs(program, TOKENS), **{k: v for k, v in arrays.items() if v.shape[1]}}


def emitted(program: Program, logits: Any, **schedule: Any) -> Any:
    return mhcgen.compile(program, **schedule).load("host")(**given(program, logits=logits))["comb"]


def compared(program: Program, comb: Any, logits: Any) -> bool:
    """Whether a matrix is within the bound of the true one."""
    inputs = given(program, logits=logits)
    values = reference.run(program, inputs, all_values=True)
    return bounds.compare(program, "comb", comb, values, inputs).ok


def streams_of(comb: str) -> list[int]:
    return [n for n in (1, 2, 3, 4, 5, 8, 16) if not COMB_KINDS[comb].streams(n)]


#: Forms tried at more widths: each placement has steps of its own for divisions and for potentials.
WIDE = ("deepseek-v4", "transformer-engine")
CASES = [("sinkhorn", n, name) for name in SINKHORNS for n in ((1, 3, 4, 8) if name in WIDE else (3,))]
CASES += [(comb, n, "") for comb in DIRECT for n in streams_of(comb) if n not in (2, 16)]


def options_of(name: str) -> dict[str, Any]:
    return SINKHORNS[name] if name else {}


# --- every kind ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("comb", "n", "form"), CASES)
def test_every_placement_gives_the_same_bits_within_the_bound(comb: str, n: int, form: str) -> None:
    program = matrix_program(n, comb, **options_of(form))
    logits = logits_of(program)
    baseline = emitted(program, logits)
    assert compared(program, baseline, logits)
    for placement in PLACEMENTS:
        try:
            other = emitted(program, logits, placement=placement)
        except mhcgen.RefusedError as refused:
            assert refused.code in ("P-MATRIX", "P-ELEMENT", "P-REGISTERS")
            continue
        assert np.array_equal(baseline, other), placement


@pytest.mark.parametrize(("comb", "n", "form"), [case for case in CASES if case[1] <= 4])
def test_the_fast_set_is_within_its_own_bound(comb: str, n: int, form: str) -> None:
    program = matrix_program(n, comb, **options_of(form))
    program = replace(program, arithmetic=replace(program.arithmetic, functions="fast"))
    logits = logits_of(program)
    assert compared(program, emitted(program, logits), logits)


@pytest.mark.parametrize(("comb", "n", "form"), CASES)
def test_a_nan_stays_in_its_token(comb: str, n: int, form: str) -> None:
    program = matrix_program(n, comb, **options_of(form))
    logits = logits_of(program)
    if not logits.shape[1]:
        pytest.skip("no logits")
    logits[2, -1] = np.nan
    found = np.isnan(emitted(program, logits)).any(axis=(1, 2))
    assert list(np.flatnonzero(found)) == [2]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("comb", ["birkhoff", "kronecker", "circulant", "identity"])
def test_exact_kinds_are_doubly_stochastic(comb: str, n: int) -> None:
    if COMB_KINDS[comb].streams(n):
        pytest.skip(COMB_KINDS[comb].streams(n))
    program = matrix_program(n, comb)
    made = emitted(program, logits_of(program, 6.0)).astype(np.float64)
    for axis in (1, 2):
        assert np.max(np.abs(made.sum(axis=axis) - 1.0)) < 2e-6
    assert made.min() >= 0.0


@pytest.mark.parametrize("form", SINKHORNS)
def test_the_last_axis_sums_to_one(form: str) -> None:
    """The last step divides by sums over the second axis of the order, of the logits as they are stored."""
    options = SINKHORNS[form]
    n = 4
    program = matrix_program(n, **{**options, "iters": 2})
    made = emitted(program, logits_of(program, 3.0)).astype(np.float64)
    stored = np.swapaxes(made, 1, 2) if options.get("orient") == "out" else made
    last = 2 if options.get("order") == "col-row" else 1
    slack = 20 * float(options.get("eps", 1e-6)) + 1e-6
    assert np.max(np.abs(stored.sum(axis=last) - 1.0)) < slack
    assert np.max(np.abs(stored.sum(axis=3 - last) - 1.0)) > 10 * slack or form == "tileops"


@pytest.mark.parametrize("form", SINKHORNS)
def test_orientation_out_is_the_other_form_of_transposed_logits(form: str) -> None:
    options = {key: value for key, value in SINKHORNS[form].items() if key != "orient"}
    n = 3
    straight, turned = matrix_program(n, **options), matrix_program(n, **options, orient="out")
    logits = logits_of(straight)
    assert np.array_equal(np.swapaxes(emitted(straight, logits), 1, 2), emitted(turned, logits))
    assert not np.allclose(emitted(straight, logits), emitted(turned, logits), atol=1e-2)


@pytest.mark.parametrize("comb", [name for name, kind in COMB_KINDS.items() if kind.aim(4, 1) is not None])
@pytest.mark.parametrize("shift", [1, 3])
def test_aimed_logits_send_each_stream_to_the_next(comb: str, shift: int) -> None:
    n = 4
    program = matrix_program(n, comb)
    logits = np.tile(np.float32(COMB_KINDS[comb].aim(n, shift)), (TOKENS, 1))
    assert np.allclose(emitted(program, logits)[0], np.roll(np.eye(n), shift, axis=1), atol=1e-2)


# --- formulas, written again in another way -----------------------------------------------------------------


def test_birkhoff_is_the_sum_of_its_permutations() -> None:
    n = 3
    logits = np.arange(6.0)[None]
    weights = np.exp(logits[0]) / np.exp(logits[0]).sum()
    wanted = np.zeros((n, n))
    for weight, permutation in zip(weights, itertools.permutations(range(n)), strict=True):
        wanted += weight * np.eye(n)[list(permutation)]
    assert np.allclose(COMBS["birkhoff"](logits, n, {})[0], wanted, atol=1e-15)


def test_kronecker_is_numpys_product_with_the_first_factor_slowest() -> None:
    p = [0.8, 0.1, 0.6]
    logits = np.array([[math.log(v / (1 - v)) * (i == 0) for v in p for i in (0, 1)]])
    two = [np.array([[v, 1 - v], [1 - v, v]]) for v in p]
    assert np.allclose(COMBS["kronecker"](logits, 8, {})[0], np.kron(np.kron(two[0], two[1]), two[2]), atol=1e-15)


def test_circulant_rows_are_shifted() -> None:
    made = COMBS["circulant"](np.log(np.array([[0.5, 0.25, 0.125, 0.125]])), 4, {})[0]
    assert np.allclose(made[0], [0.5, 0.25, 0.125, 0.125])
    assert np.allclose(made[1], [0.125, 0.5, 0.25, 0.125])


def test_log_domain_and_linear_domain_agree_in_exact_arithmetic() -> None:
    logits = np.random.default_rng(3).normal(size=(4, 16))
    log = COMBS["sinkhorn"](logits, 4, {"iters": 20, "eps": 0.0, "domain": "log"})
    linear = COMBS["sinkhorn"](logits, 4, {"iters": 20, "eps": 0.0, "start": "exp", "eps_mode": "none"})
    assert np.allclose(log, linear, atol=1e-13)


# --- the log domain at extremes -----------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [89.0, 1e4])
def test_the_log_domain_takes_any_logits(scale: float) -> None:
    program = matrix_program(4, domain="log", eps=0.0)
    logits = np.sign(logits_of(program)) * np.float32(scale)
    made = emitted(program, logits)
    assert np.isfinite(made).all() and compared(program, made, logits)


def test_a_threshold_leaves_small_sums_alone() -> None:
    program = matrix_program(2, start="exp", eps_mode="threshold", eps=1e-5, iters=1)
    logits = np.tile(np.float32([-20, -21, 0, 1]), (TOKENS, 1))
    made = emitted(program, logits)[0]
    assert made[0, 0] < 1e-8 and compared(program, emitted(program, logits), logits)


# --- known mis-ports: each must fall outside the bound of the true matrix -----------------------------------


def _sigmoid_start(logits: Any, n: int, iters: int, eps: float) -> Any:
    c = 1.0 / (1.0 + np.exp(-logits.reshape(-1, n, n).astype(np.float64))) + eps
    c = c / (c.sum(axis=1, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(axis=2, keepdims=True) + eps)
        c = c / (c.sum(axis=1, keepdims=True) + eps)
    return c


def _padded_maximum(logits: Any, n: int, iters: int, eps: float) -> Any:
    """The maximum runs over lanes beyond n, which hold 0: in fp32, rows far below 0 underflow."""
    square = logits.reshape(-1, n, n)
    most = np.maximum(square.max(axis=2, keepdims=True), np.float32(0.0))
    exponential = np.exp((square - most).astype(np.float32)).astype(np.float64)
    with np.errstate(invalid="ignore"):
        c = exponential / exponential.sum(axis=2, keepdims=True) + eps
    c = c / (c.sum(axis=1, keepdims=True) + eps)
    for _ in range(iters - 1):
        c = c / (c.sum(axis=2, keepdims=True) + eps)
        c = c / (c.sum(axis=1, keepdims=True) + eps)
    return c


def _true(logits: Any, n: int, iters: int, eps: float) -> Any:
    return reference.sinkhorn(logits.astype(np.float64), iters, eps)


MISPORTS: dict[str, tuple[Callable[[Any, int, int, float], Any], float]] = {
    "sigmoid + eps for softmax + eps": (_sigmoid_start, 0.0),
    "comb transposed": (lambda logits, n, k, eps: np.swapaxes(_true(logits, n, k, eps), 1, 2), 0.0),
    "19 iterations": (lambda logits, n, k, eps: _true(logits, n, k - 1, eps), 0.0),
    "21 iterations": (lambda logits, n, k, eps: _true(logits, n, k + 1, eps), 0.0),
    "the RMS eps for the Sinkhorn's": (lambda logits, n, k, eps: _true(logits, n, k, 1e-5), 0.0),
    "a maximum over padding": (_padded_maximum, -200.0),
}


@pytest.mark.parametrize("name", MISPORTS)
def test_a_misport_falls_outside_the_bound(name: str) -> None:
    wrong, offset = MISPORTS[name]
    n, iters, eps = 3, 20, 1e-6
    program = matrix_program(n, iters=iters, eps=eps)
    # Slow to converge, so that one iteration shows; and not symmetric.
    slow = -9.0 * np.triu(np.ones((n, n)), 1).reshape(-1)
    logits = (slow + 0.25 * logits_of(program) + offset).astype(np.float32)
    assert compared(program, _true(logits, n, iters, eps).astype(np.float32), logits)
    assert not compared(program, wrong(logits, n, iters, eps).astype(np.float32), logits)


# --- what does not go together ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("attrs", "says"),
    [
        ({"domain": "log", "eps_mode": "threshold"}, "the log domain has no eps_mode"),
        ({"domain": "log", "start": "exp"}, "the log domain has no start"),
        ({"domain": "log", "early_stop": True}, "keeps no matrix whose bits could stop changing"),
        ({"order": "diagonal"}, "order is 'diagonal', not one of row-col, col-row"),
        ({"orient": "up"}, "orient is 'up', not one of in, out"),
    ],
)
def test_options_that_do_not_go_together_are_violations(attrs: dict[str, Any], says: str) -> None:
    with pytest.raises(ProgramError) as caught:
        mhcgen.compile(matrix_program(4, **attrs))
    assert any(says in note for note in caught.value.notes)


@pytest.mark.parametrize("comb", COMB_KINDS)
def test_a_kind_says_where_it_comes_from_and_has_a_reference(comb: str) -> None:
    kind = COMB_KINDS[comb]
    assert kind.source and comb in COMBS
    stage: Stage = matrix_program(4, comb).stages[0]
    assert kind.formula(stage)
    program = comb_program(stage, 4)
    assert isinstance(program, DirectMap) == (kind.stage == "comb" and comb != "plain")
