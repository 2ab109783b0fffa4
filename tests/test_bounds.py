"""Bounds hold for the emitted arithmetic wherever it is tried, and no planted fault fits inside them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from typing import Any

import fp32_model
import ml_dtypes
import numpy as np
import pytest
from fp32_model import run32
from hypothesis import given, settings
from hypothesis import strategies as st

from mhcgen import reference
from mhcgen.bounds import bound, compare, compare_all
from mhcgen.build import build
from mhcgen.inputs import DISCRIMINATING, discriminating, make_inputs
from mhcgen.ir import Program, Tensor, make_stage

OPAQUE = {kind: lambda z: 0.5 * z for kind in ("branch", "engram", "tap")}


def emitted(program: Program) -> list[str]:
    return [tensor.name for tensor in program.of_role("value", "result")]


def judge(
    program: Program,
    inputs: dict[str, Any],
    got: dict[str, Any] | None = None,
    rounded: bool = False,
    seed: int = 0,
) -> dict[str, Any]:
    """Comparison of every tensor; opaque stages give the reference what they gave the emission."""
    ran = run32(program, inputs, OPAQUE, seed) if got is None else got
    same = {
        stage.name: (lambda value: lambda _: value)(ran[stage.writes[0]])
        for stage in program.stages_of_kind("branch", "engram", "tap")
    }
    values = reference.run(program, inputs, same, all_values=True, round_values=rounded)
    chosen = {name: ran[name] for name in emitted(program)}
    return {c.name: c for c in compare_all(program, chosen, values, inputs, rounded=rounded)}


def failed(comparisons: dict[str, Any]) -> set[str]:
    return {name for name, comparison in comparisons.items() if not comparison.ok}


@st.composite
def programs(draw: st.DrawFn) -> Program:
    norm = draw(st.booleans())
    return build(
        streams=draw(st.integers(1, 8)),
        hidden=draw(st.integers(1, 70)),
        iters=draw(st.sampled_from([1, 2, 20])),
        rms_eps=draw(st.sampled_from([1e-6, 1e-20, 1e-2])),
        hc_eps=draw(st.sampled_from([1e-6, 1e-2])),
        dtype=draw(st.sampled_from(["fp32", "bf16", "fp16"])),
        functions=draw(st.sampled_from(["ieee", "fast"])),
        sumsq=draw(st.sampled_from(["fp64", "fp32"])),
        projection=draw(st.sampled_from(["external", "fma"])),
        scope=draw(st.sampled_from(["pre", "site", "boundary"])),
        norm=norm,
        quant=draw(st.sampled_from(["none", "q8", "fp8"])) if norm else "none",
        quant_pow2=draw(st.booleans()),
        iterations_out=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(programs(), st.integers(0, 5), st.integers(0, 2**31), st.booleans(), st.sampled_from([0.1, 1.0, 8.0, 2000.0]))
def test_the_emitted_arithmetic_is_within_bounds(
    program: Program, tokens: int, seed: int, rounded: bool, logit_scale: float
) -> None:
    inputs = make_inputs(program, tokens, seed)
    # At the widest, bf16 streams leave the logits themselves uncertain by more than 1.
    inputs["scale"] = inputs["scale"] * np.float32(logit_scale)
    inputs["base"] = inputs["base"] * np.float32(logit_scale)
    comparisons = judge(program, inputs, rounded=rounded, seed=seed)
    assert {c: comparisons[c] for c in failed(comparisons)} == {}
    for comparison in comparisons.values():
        assert comparison.error <= comparison.limit


@settings(max_examples=100, deadline=None)
@given(programs(), st.integers(0, 4), st.sampled_from(sorted(DISCRIMINATING)), st.booleans())
def test_so_is_it_on_discriminating_inputs(program: Program, tokens: int, name: str, rounded: bool) -> None:
    inputs = discriminating(program, tokens, name)
    if inputs is not None:
        comparisons = judge(program, inputs, rounded=rounded)
        assert {c: comparisons[c] for c in failed(comparisons)} == {}


@pytest.mark.parametrize("options", [{"streams": 16}, {"iters": 1000}, {"streams": 16, "functions": "fast"}])
@pytest.mark.parametrize("name", ["uniform", "D1", "D8", "extreme"])
def test_wide_and_long_sinkhorns_are_within_bounds(options: dict[str, Any], name: str) -> None:
    program = build(hidden=9, **options)
    inputs = make_inputs(program, 3) if name == "uniform" else discriminating(program, 3, name)
    assert inputs is not None
    assert failed(judge(program, inputs)) == set()


def _custom(kind: str, slots: dict[str, str], results: dict[str, str], shapes: dict[str, Any]) -> Program:
    """A Program of one stage of a kind that no scope builds."""
    tensors = tuple(
        Tensor(name, shape, "fp32", "result" if name in results.values() else "input")
        for name, shape in shapes.items()
    )
    attrs = {"pre_eps": 1e-6} if kind == "head_gates" else {}
    whole = build(streams=3, hidden=5)
    return replace(whole, tensors=tensors, stages=(make_stage(kind, kind, slots, results, attrs),))


@pytest.mark.parametrize("functions", ["ieee", "fast"])
def test_stages_outside_the_scopes_are_within_bounds(functions: str) -> None:
    streams, columns = ("T", "n", "H"), ("T", "H")
    cases = [
        _custom("expand", {"e": "e"}, {"x": "x"}, {"e": columns, "x": streams}),
        _custom("mean", {"x": "x"}, {"y": "y"}, {"x": streams, "y": columns}),
        _custom(
            "head_gates",
            {"mixes_scaled": "m", "scale": "s", "base": "b"},
            {"pre": "pre"},
            {"m": ("T", "n"), "s": (1,), "b": ("n",), "pre": ("T", "n")},
        ),
    ]
    for case in cases:
        program = replace(case, arithmetic=replace(case.arithmetic, functions=functions))
        for seed in range(20):
            assert failed(judge(program, make_inputs(program, 4, seed), seed=seed)) == set()


# --- bounds are tight -------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 4, 8])
@pytest.mark.parametrize("hidden", [64, 4096])
@pytest.mark.parametrize("seed", range(3))
def test_limits_at_ordinary_logits(n: int, hidden: int, seed: int) -> None:
    program = build(streams=n, hidden=hidden)
    inputs = make_inputs(program, 4, seed)
    values = reference.run(program, inputs, all_values=True)
    for name, most in (("pre", 2e-6), ("post", 2e-6), ("y", 2e-6), ("comb", 2e-5)):
        size = np.abs(values[name]).reshape(4, -1).max(axis=1)
        limit = bound(program, name, inputs, values).limit.reshape(4, -1).max(axis=1)
        assert (limit / size).max() < most, name


def test_comb_grows_with_its_conditioning_and_y_does_not() -> None:
    program = build(hidden=32)
    limits = {}
    for name in ("D8", "D1"):
        inputs = discriminating(program, 2, name)
        assert inputs is not None
        values = reference.run(program, inputs, all_values=True)
        limits[name] = [float(bound(program, t, inputs, values).limit.max()) for t in ("comb", "y")]
    # The logits of D8 have a rounding error of 89 * 2^-24 and a matrix that depends on all of them.
    assert limits["D8"][0] > 10 * limits["D1"][0]
    assert limits["D8"][1] == pytest.approx(limits["D1"][1])


# --- planted faults ---------------------------------------------------------------------------------------


def faulty(monkeypatch: pytest.MonkeyPatch, kind: str, change: Callable[..., Any]) -> None:
    """Replace a stage of the fp32 model; `change(right, stage, operands, functions)` gives the results."""
    right = fp32_model._STAGES[kind]
    monkeypatch.setitem(fp32_model._STAGES, kind, lambda s, o, f: change(right, s, o, f))


def fails(program: Program, inputs: dict[str, Any] | None, rounded: bool = False) -> set[str]:
    assert inputs is not None
    return failed(judge(program, inputs, rounded=rounded))


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("input_name", ["uniform", "D1"])
def test_comb_transposed(monkeypatch: pytest.MonkeyPatch, dtype: str, input_name: str) -> None:
    program = build(hidden=32, dtype=dtype, scope="site")
    inputs = make_inputs(program, 3) if input_name == "uniform" else discriminating(program, 3, input_name)
    assert fails(program, inputs) == set()
    faulty(monkeypatch, "post", lambda right, s, o, f: right(s, {**o, "comb": o["comb"].transpose(0, 2, 1)}, f))
    assert fails(program, inputs) == {"x_next"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
def test_eps_swapped(dtype: str) -> None:
    options = {"hidden": 32, "dtype": dtype, "norm": True}
    program = build(**options, rms_eps=1e-6, hc_eps=1e-2)
    inputs = discriminating(program, 3, "D3")
    assert inputs is not None
    assert fails(program, inputs) == set()
    for wrong in ({"rms_eps": 1e-2, "hc_eps": 1e-2}, {"rms_eps": 1e-6, "hc_eps": 1e-6}):
        got = run32(build(**options, **wrong), inputs)
        assert {"pre", "comb", "y"} <= failed(judge(program, inputs, got))


def test_eps_outside_the_root(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(hidden=32)
    inputs = discriminating(program, 2, "D4")

    def outside(right: Any, stage: Any, o: Any, f: Any) -> Any:
        mean = np.mean(o["x"].astype(np.float64) ** 2, axis=(1, 2))
        return {"mixes_scaled": o["mixes"] / (np.sqrt(mean) + 1e-6).astype(np.float32)[:, None]}

    assert fails(program, inputs) == set()
    faulty(monkeypatch, "rowsq", outside)
    assert {"mixes_scaled", "pre", "post", "comb", "y"} <= fails(program, inputs)


@pytest.mark.parametrize("functions", ["ieee", "fast"])
@pytest.mark.parametrize("wrong", [19, 21])
@pytest.mark.parametrize("eps", [1e-6, 1e-2])
def test_iterations_off_by_one(functions: str, wrong: int, eps: float) -> None:
    options = {"hidden": 8, "functions": functions, "hc_eps": eps}
    program = build(**options, iters=20)
    inputs = make_inputs(program, 3)
    # Moderate cyclic logits next to a random part: convergence is slow, so each iteration still moves comb.
    rng = np.random.default_rng(0)
    logits = 6.0 * np.roll(np.eye(4), 1, axis=1) + rng.uniform(-3, 3, (4, 4))
    logits[0] += 4.0 * np.eye(4)[0]
    inputs["base"][8:] = logits.reshape(-1)
    assert fails(program, inputs) == set()
    assert "comb" in failed(judge(program, inputs, run32(build(**options, iters=wrong), inputs)))


def test_a_clamped_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(hidden=8)
    inputs = discriminating(program, 2, "D5")

    def clamped(right: Any, stage: Any, o: Any, f: Any) -> Any:
        c = o["logits"].reshape(-1, 4, 4)
        c = np.exp(c - c.max(axis=2, keepdims=True))
        c = c / c.sum(axis=2, keepdims=True)
        for axis in [1, *[2, 1] * 19]:
            c = c / np.maximum(c.sum(axis=axis, keepdims=True), np.float32(1e-6))
        return {"comb": c}

    assert fails(program, inputs) == set()
    faulty(monkeypatch, "sinkhorn", clamped)
    assert fails(program, inputs) == {"comb"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stream", range(4))
@pytest.mark.parametrize("kind", ["collapse", "post", "rowsq"])
def test_a_stream_skipped(monkeypatch: pytest.MonkeyPatch, dtype: str, stream: int, kind: str) -> None:
    program = build(hidden=32, dtype=dtype, scope="site")
    inputs = make_inputs(program, 2)

    def skip(right: Any, stage: Any, o: Any, f: Any) -> Any:
        x = o["x"].copy()
        x[:, stream] = 0
        return right(stage, {**o, "x": x}, f)

    faulty(monkeypatch, kind, skip)
    first = {"collapse": "y", "post": "x_next", "rowsq": "mixes_scaled"}[kind]
    assert first in fails(program, inputs)


@pytest.mark.parametrize("name", ["mixes_scaled", "pre", "post", "y", "z", "q_scale", "x_next"])
@pytest.mark.parametrize("factor", [1.00001, 0.99999])
def test_a_hundred_thousandth(name: str, factor: float) -> None:
    program = build(hidden=64, norm=True, quant="q8", scope="site")
    inputs = make_inputs(program, 3)
    got = run32(program, inputs, OPAQUE)
    wrong = {**got, name: (got[name] * factor).astype(np.float32)}
    assert failed(judge(program, inputs, got)) == set()
    assert failed(judge(program, inputs, wrong)) == {name}


def test_a_hundred_thousandth_of_comb_and_of_projected_mixes() -> None:
    program = build(hidden=64, projection="fma")
    inputs = make_inputs(program, 3)
    inputs["scale"][:] = 0.5
    got = run32(program, inputs)
    for name in ("comb", "mixes"):
        wrong = {**got, name: (got[name] * 1.00001).astype(np.float32)}
        assert failed(judge(program, inputs, wrong)) == {name}


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("rounded", [False, True])
def test_narrow_results_are_the_nearest(dtype: str, rounded: bool) -> None:
    """Truncation instead of rounding, and a relative error of 1e-4 before rounding, both show."""
    program = build(hidden=256, dtype=dtype)
    inputs = make_inputs(program, 3)
    exact = reference.run(program, inputs)["y"]
    got = run32(program, inputs)
    for factor in (1 - 1e-4, 1 + 1e-4):
        wrong = {**got, "y": reference.round_to(exact * factor, dtype)}
        assert failed(judge(program, inputs, wrong, rounded)) == {"y"}
    truncated = np.where(np.abs(got["y"].astype(float)) > np.abs(exact), np.nextafter(got["y"], 0), got["y"])
    assert failed(judge(program, inputs, {**got, "y": truncated}, rounded)) == {"y"}


@pytest.mark.parametrize(("gate", "change"), [("post", 1e-6), ("pre", -1e-6)])
def test_eps_on_post_or_none_on_pre(monkeypatch: pytest.MonkeyPatch, gate: str, change: float) -> None:
    program = build(hidden=8)

    def shifted(right: Any, stage: Any, o: Any, f: Any) -> Any:
        made = right(stage, o, f)
        return {**made, gate: made[gate] + np.float32(change)}

    faulty(monkeypatch, "gates", shifted)
    assert gate in fails(program, make_inputs(program, 3))


@pytest.mark.parametrize("width", ["tf32", "bf16"])
@pytest.mark.parametrize("hidden", [256, 4096])
def test_truncated_projection_weights(width: str, hidden: int) -> None:
    program = build(hidden=hidden, projection="fma")
    inputs = discriminating(program, 2, "D9")
    assert inputs is not None
    narrow = dict(inputs)
    if width == "tf32":
        narrow["fn"] = (inputs["fn"].view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)
    else:
        narrow["fn"] = inputs["fn"].astype(ml_dtypes.bfloat16).astype(np.float32)
    assert fails(program, inputs) == set()
    assert "mixes" in failed(judge(program, inputs, run32(program, narrow)))


def test_a_neighbours_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    program = build(hidden=16)
    inputs = discriminating(program, 4, "D10")
    faulty(monkeypatch, "rowsq", lambda right, s, o, f: right(s, {**o, "x": np.roll(o["x"], 1, axis=0)}, f))
    assert {"mixes_scaled", "pre", "post", "comb", "y"} <= fails(program, inputs)


def test_all_zero_and_unwritten_outputs() -> None:
    program = build(hidden=16, norm=True, quant="q8")
    inputs = make_inputs(program, 3)
    got = run32(program, inputs)
    for name in emitted(program):
        assert failed(judge(program, inputs, {**got, name: np.zeros_like(got[name])})) == {name}
        if got[name].dtype == np.float32:
            last = got[name].copy()
            last[-1] = np.nan
            comparison = judge(program, inputs, {**got, name: last})[name]
            assert not comparison.ok
            assert comparison.error == np.inf
            assert comparison.worst_index[0] == 2
            assert "nan" in comparison.why


# --- NaN, infinity, quantised numbers ---------------------------------------------------------------------


def test_nan_must_be_where_the_reference_has_it() -> None:
    program = build(hidden=6, norm=True, quant="q8")
    inputs = discriminating(program, 3, "D15")
    assert inputs is not None
    got = run32(program, inputs)
    assert failed(judge(program, inputs, got)) == set()
    hidden = {**got, "pre": np.nan_to_num(got["pre"], nan=0.5)}
    assert failed(judge(program, inputs, hidden)) == {"pre"}
    scale = {**got, "q_scale": np.nan_to_num(got["q_scale"], nan=0.0)}
    assert failed(judge(program, inputs, scale)) == {"q_scale"}
    everywhere = {**got, "y": np.full_like(got["y"], np.nan)}
    assert failed(judge(program, inputs, everywhere)) == {"y"}


def test_infinities_need_their_sign_and_a_reason() -> None:
    program = build(hidden=4, dtype="fp16")
    inputs = make_inputs(program, 2)
    inputs["x"][0, :, 0] = 60000.0
    inputs["x"][1, :, 1] = -np.inf
    inputs["base"][:4] = 4.0
    got = run32(program, inputs)
    assert np.isposinf(got["y"][0, 0])
    assert np.isneginf(got["y"][1, 1])
    for rounded in (False, True):
        assert failed(judge(program, inputs, got, rounded)) == set()
        for index, value in (((0, 0), -np.inf), ((1, 1), np.inf), ((1, 1), -65504.0), ((0, 1), np.inf)):
            wrong = got["y"].copy()
            wrong[index] = value
            assert failed(judge(program, inputs, {**got, "y": wrong}, rounded)) == {"y"}


@pytest.mark.parametrize("scheme", ["q8", "fp8"])
@pytest.mark.parametrize("pow2", [False, True])
def test_quantised_numbers_are_exact_but_at_a_boundary(scheme: str, pow2: bool) -> None:
    program = build(hidden=160, norm=True, quant=scheme, quant_pow2=pow2)
    inputs = make_inputs(program, 4)
    values = reference.run(program, inputs, all_values=True)
    limit = bound(program, "q", inputs, values)
    assert limit.kind == "steps"
    assert (limit.limit == 0).mean() > 0.99
    got = run32(program, inputs)
    free = np.argwhere(limit.limit == 0)[::37]
    for index in map(tuple, free):
        wrong = got["q"].copy()
        wrong[index] = -1 if wrong[index] == 0 else wrong[index] * 0
        comparison = judge(program, inputs, {**got, "q": wrong})["q"]
        assert not comparison.ok
        assert comparison.worst_index == index


def test_a_step_at_a_rounding_boundary_is_allowed() -> None:
    # Half of amax is 63.5 steps: a tie in exact numbers, either way after rounding.
    program = build(streams=1, hidden=4, norm=True, quant="q8", norm_eps=1e-6)
    inputs = make_inputs(program, 1)
    inputs["x"][:] = np.array([1.0, 0.5, 0.25, -0.5], np.float32)
    inputs["norm_weight"][:] = 1.0
    got = run32(program, inputs)
    for q in ([127, 63, 32, -63], [127, 64, 32, -64]):
        assert judge(program, inputs, {**got, "q": np.array([q], np.int8)})["q"].ok
    for q in ([127, 62, 32, -63], [127, 65, 32, -64], [126, 64, 32, -64], [127, 64, 31, -64]):
        assert not judge(program, inputs, {**got, "q": np.array([q], np.int8)})["q"].ok


def test_power_of_two_scales() -> None:
    program = build(hidden=64, norm=True, quant="fp8", quant_pow2=True)
    inputs = make_inputs(program, 2)
    got = run32(program, inputs)
    assert judge(program, inputs, got)["q_scale"].ok
    for factor in (0.5, 2.0, 1.5, 0.0):
        assert not judge(program, inputs, {**got, "q_scale": got["q_scale"] * np.float32(factor)})["q_scale"].ok


def test_iteration_counts() -> None:
    for early, allowed in ((False, {20}), (True, {1, 7, 20})):
        program = build(hidden=4, iterations_out=True, early_stop=early)
        inputs = make_inputs(program, 2)
        got = run32(program, inputs)
        for count in (0, 1, 7, 20, 21):
            ran = {**got, "iterations": np.full(2, count, np.int32)}
            assert judge(program, inputs, ran)["iterations"].ok == (count in allowed)


# --- the interface ----------------------------------------------------------------------------------------


def test_a_comparison_says_where_and_why() -> None:
    program = build(hidden=8)
    inputs = make_inputs(program, 3)
    values = reference.run(program, inputs, all_values=True)
    got = run32(program, inputs)["y"]
    got[1, 5] += 1e-3
    comparison = compare(program, "y", got, values, inputs)
    assert not comparison.ok
    assert comparison.worst_index == (1, 5)
    assert comparison.error == pytest.approx(1e-3 / np.abs(values["y"][1]).max(), rel=1e-3)
    assert comparison.error > 100 * comparison.limit
    assert comparison.why.startswith("collapse in ieee, fp32")


def test_inputs_are_compared_exactly() -> None:
    program = build(hidden=8)
    inputs = make_inputs(program, 2)
    values = reference.run(program, inputs, all_values=True)
    assert compare(program, "x", inputs["x"], values, inputs).ok
    assert not compare(program, "x", np.nextafter(inputs["x"], np.float32(2)), values, inputs).ok


def test_misuse_is_named() -> None:
    program = build(hidden=8)
    inputs = make_inputs(program, 2)
    results = reference.run(program, inputs)
    with pytest.raises(ValueError, match=r"needs the reference's mixes_scaled.*all_values"):
        bound(program, "pre", inputs, results)
    values = reference.run(program, inputs, all_values=True)
    with pytest.raises(ValueError, match=r"y has shape \(2, 7\)"):
        compare(program, "y", np.zeros((2, 7)), values, inputs)
    with pytest.raises(KeyError):
        bound(program, "nothing", inputs, values)


@pytest.mark.parametrize("scope", ["pre", "boundary"])
def test_no_tokens(scope: str) -> None:
    program = build(hidden=40, scope=scope, norm=True, quant="q8", projection="fma")
    comparisons = judge(program, make_inputs(program, 0))
    assert all(c.ok and c.worst_index == () and c.error == 0.0 for c in comparisons.values())


def test_fma_of_the_model_rounds_once() -> None:
    rng = np.random.default_rng(1)
    a, b, c = (rng.normal(size=3000).astype(np.float32) for _ in range(3))
    # Sums near a tie of the last bit, where rounding twice goes wrong.
    c[:1000] = -(a[:1000] * b[:1000]) * np.float32(1 + 2.0**-20)
    c[1000:2000] = np.ldexp(np.float32(1), 24) * np.sign(c[1000:2000])
    a[1000:2000], b[1000:2000] = np.float32(1 + 2.0**-23), np.float32(1 - 2.0**-24)
    got = fp32_model.fma(a, b, c)
    for x, y, z, r in zip(a, b, c, got, strict=True):
        exact = Fraction(float(x)) * Fraction(float(y)) + Fraction(float(z))
        neighbours = [np.nextafter(r, np.float32(-np.inf)), r, np.nextafter(r, np.float32(np.inf))]
        distance = [abs(Fraction(float(v)) - exact) for v in neighbours]
        assert distance[1] == min(distance)
