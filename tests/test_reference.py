"""The reference against definitions written out again as loops over scalars, and against what must hold."""

from __future__ import annotations

import ast
import math
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mhcgen import reference, reference_combs, reference_each
from mhcgen.build import build
from mhcgen.inputs import discriminating, make_inputs


def random(*shape: int, seed: int = 0, width: float = 1.0) -> Any:
    return np.random.default_rng(seed).uniform(-width, width, shape)


def logits_of(*shape: int, seed: int = 0, width: float = 1.0) -> Any:
    return random(*shape, seed=seed, width=width).reshape(shape[0], -1)


# --- independence -----------------------------------------------------------------------------------------


def test_it_imports_nothing_but_numpy() -> None:
    """Its matrices, and what is done to each stream alone, are modules that import nothing else either."""
    modules = set()
    for path in (reference.__file__, reference_combs.__file__, reference_each.__file__):
        for node in ast.walk(ast.parse(Path(path).read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                modules.add(node.module or "")
    standard = {"__future__", "collections.abc", "itertools", "typing"}
    assert modules == {*standard, "numpy", "numpy.typing", "mhcgen.reference_combs", "mhcgen.reference_each"}


def test_it_needs_attributes_only() -> None:
    stage = SimpleNamespace(
        name="s", kind="collapse", operands=[("x", "a"), ("pre", "b")], results=[("y", "c")], attrs=[]
    )
    tensors = [
        SimpleNamespace(name="a", shape=["T", "n", "H"], dtype="fp32", role="input"),
        SimpleNamespace(name="b", shape=["T", "n"], dtype="fp32", role="input"),
        SimpleNamespace(name="c", shape=["T", "H"], dtype="fp32", role="result"),
    ]
    program = SimpleNamespace(dims=[("n", 2), ("H", 3)], tensors=tensors, stages=[stage])
    found = reference.run(program, {"a": np.ones((1, 2, 3)), "b": np.full((1, 2), 0.25)})
    assert np.array_equal(found["c"], np.full((1, 3), 0.5))


# --- rounding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "carrier"),
    [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16), ("fp8_e4m3", ml_dtypes.float8_e4m3fn)],
)
def test_rounding_is_that_of_the_format(dtype: str, carrier: Any) -> None:
    every = np.arange(2 ** (8 * np.dtype(carrier).itemsize), dtype=np.uint32)
    every = every.astype(f"u{np.dtype(carrier).itemsize}").view(carrier)
    with np.errstate(invalid="ignore"):
        every = every.astype(np.float64)
    finite = np.unique(every[np.isfinite(every)])
    assert np.array_equal(reference.round_to(finite, dtype), finite)
    # Half way between neighbours: the one with the even last bit, here found by index from 0 upwards.
    positive = finite[finite >= 0]
    ties = (positive[:-1] + positive[1:]) / 2
    even = np.where(np.arange(len(ties)) % 2 == 0, positive[:-1], positive[1:])
    for sign in (1.0, -1.0):
        assert np.array_equal(reference.round_to(sign * ties, dtype), sign * even)
        assert np.array_equal(reference.round_to(sign * np.nextafter(ties, 0), dtype), sign * positive[:-1])
        assert np.array_equal(reference.round_to(sign * np.nextafter(ties, np.inf), dtype), sign * positive[1:])


def test_rounding_happens_once() -> None:
    # Just above a tie of bf16, by less than fp32 can hold: through fp32 it would go down to even.
    assert reference.round_to(1.0 + 2.0**-8 + 2.0**-40, "bf16") == 1.0 + 2.0**-7
    assert reference.round_to(1.0 + 2.0**-11 + 2.0**-40, "fp16") == 1.0 + 2.0**-10


def test_rounding_of_special_values() -> None:
    special = np.array([np.nan, np.inf, -np.inf, -0.0, 1e300, -1e300])
    for dtype in ("bf16", "fp16"):
        rounded = reference.round_to(special, dtype)
        assert np.array_equal(rounded, [np.nan, np.inf, -np.inf, 0.0, np.inf, -np.inf], equal_nan=True)
        assert np.signbit(rounded[3])
    assert np.isnan(reference.round_to([500.0], "fp8_e4m3"))
    assert np.array_equal(reference.round_to([1.1], "fp32"), [1.1])


def test_powers_of_two_are_rounded_up() -> None:
    values = [0.0, 1.0, 1.0 + 2.0**-50, 0.75, 3.0, 2.0**-130, np.inf]
    assert reference.ceil_power_of_two(values).tolist() == [0.0, 1.0, 2.0, 1.0, 4.0, 2.0**-130, np.inf]
    assert np.isnan(reference.ceil_power_of_two([np.nan]))


# --- comb -------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 16), st.integers(0, 1000), st.floats(0.0, 3.0))
def test_columns_sum_to_one_and_rows_nearly(n: int, seed: int, width: float) -> None:
    logits = logits_of(3, n, n, seed=seed, width=width)
    comb = reference.sinkhorn(logits, 20, 1e-6)
    assert comb.shape == (3, n, n)
    assert comb.min() > 0
    # The last step divides columns by sum + eps; rows are as good as the iterations made them: each of 19 contracts
    # the distance of the row sums by the square of Birkhoff's coefficient, of the widest cross ratio of the matrix.
    assert comb.sum(axis=1) == pytest.approx(1.0, abs=2e-6)
    for one, made in zip(logits.reshape(3, n, n), comb, strict=True):
        pairs = one[:, None, :] - one[None, :, :]
        widest = float((pairs.max(axis=2) - pairs.min(axis=2)).max())
        left = np.tanh(widest / 4) ** (2 * 19) * widest
        assert np.abs(np.log(made.sum(axis=1))).max() <= left + 1e-3


@pytest.mark.parametrize("n", [2, 3, 4, 8])
def test_dominant_diagonal_logits_give_the_identity(n: int) -> None:
    comb = reference.sinkhorn(100.0 * np.eye(n).reshape(1, -1), 20, 1e-6)
    assert comb[0] == pytest.approx(np.eye(n), abs=1e-5)


def test_one_stream() -> None:
    comb = reference.sinkhorn(random(5, 1, width=50.0), 20, 1e-6)
    assert comb == pytest.approx(1.0, abs=2e-6)
    program = build(streams=1, hidden=4)
    assert reference.run(program, make_inputs(program, 2))["comb"] == pytest.approx(1.0, abs=2e-6)


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 1000), st.randoms())
def test_streams_may_be_renamed(n: int, seed: int, shuffler: Any) -> None:
    """Renaming the streams of every operand renames the streams of every result."""
    order = list(range(n))
    shuffler.shuffle(order)
    program = build(streams=n, hidden=5, scope="boundary")
    inputs = {name: array.astype(np.float64) for name, array in make_inputs(program, 2, seed).items()}
    columns = [*order, *(n + i for i in order), *(2 * n + i * n + j for i in order for j in order)]
    renamed = {
        **inputs,
        "x": inputs["x"][:, order],
        "post": inputs["post"][:, order],
        "comb": inputs["comb"][:, order][:, :, order],
        "mixes": inputs["mixes"][:, columns],
        "base": inputs["base"][columns],
    }
    before, after = reference.run(program, inputs), reference.run(program, renamed)
    close = {"rtol": 1e-12, "atol": 1e-12}
    np.testing.assert_allclose(after["y"], before["y"], **close)
    for name in ("x_next", "pre_next", "post_next"):
        np.testing.assert_allclose(after[name], before[name][:, order], **close)
    np.testing.assert_allclose(after["comb_next"], before["comb_next"][:, order][:, :, order], **close)


@pytest.mark.parametrize("iters", [1, 2, 20])
@pytest.mark.parametrize("eps", [1e-6, 1e-2, 0.0])
def test_sinkhorn_against_scalar_loops(iters: int, eps: float) -> None:
    n = 3
    logits = logits_of(2, n, n, width=4.0)
    for token in range(2):
        c = [[float(logits[token, i * n + j]) for j in range(n)] for i in range(n)]
        for i in range(n):
            top = max(c[i])
            row = [math.exp(v - top) for v in c[i]]
            c[i] = [v / sum(row) + eps for v in row]
        for step in range(iters):
            if step:
                c = [[v / (sum(row) + eps) for v in row] for row in c]
            sums = [sum(c[i][j] for i in range(n)) + eps for j in range(n)]
            c = [[c[i][j] / sums[j] for j in range(n)] for i in range(n)]
        np.testing.assert_allclose(reference.sinkhorn(logits, iters, eps)[token], c, rtol=1e-13)


def test_eps_is_added_to_sums_and_not_a_floor() -> None:
    """D5: a starved column gets its share of eps; a clamp would leave it at 0."""
    program = build(hidden=4)
    inputs = discriminating(program, 1, "D5")
    assert inputs is not None
    assert reference.run(program, inputs)["comb"] == pytest.approx(0.25, abs=1e-3)


def test_bad_sinkhorn_arguments() -> None:
    with pytest.raises(ValueError, match="n\\*n logits"):
        reference.sinkhorn(np.zeros((1, 5)), 20, 1e-6)
    with pytest.raises(ValueError, match="iters >= 1"):
        reference.sinkhorn(np.zeros((1, 4)), 0, 1e-6)


@pytest.mark.parametrize("value", [89.0, 200.0, 1e4, -1e4])
def test_extreme_logits_stay_finite(value: float) -> None:
    logits = np.zeros((1, 16))
    logits[0, ::3] = value
    comb = reference.sinkhorn(logits, 20, 1e-6)
    assert np.isfinite(comb).all()
    assert comb.sum(axis=1) == pytest.approx(1.0, abs=2e-6)


# --- gates, rms, projection -------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 6), st.integers(1, 9), st.integers(0, 3), st.integers(0, 1000))
def test_a_whole_site_against_scalar_loops(n: int, hidden: int, tokens: int, seed: int) -> None:
    program = build(streams=n, hidden=hidden, projection="fma", rms_eps=1e-3, hc_eps=1e-2, norm_eps=1e-1,
                    norm=True, scope="site", iters=3)  # fmt: skip
    i = make_inputs(program, tokens, seed)
    x, fn, scale, base, weight = (i[k].astype(np.float64) for k in ("x", "fn", "scale", "base", "norm_weight"))
    got = reference.run(program, i, {"branch": lambda z: z * 2 + 1}, all_values=True)
    for t in range(tokens):
        flat = [x[t, c, h] for c in range(n) for h in range(hidden)]
        mixes = [sum(w * v for w, v in zip(row, flat, strict=True)) for row in fn]
        r = 1 / math.sqrt(sum(v * v for v in flat) / len(flat) + 1e-3)
        pre, post = [], []
        for c in range(n):
            pre.append(1 / (1 + math.exp(-(mixes[c] * r * scale[0] + base[c]))) + 1e-2)
            post.append(2 / (1 + math.exp(-(mixes[n + c] * r * scale[1] + base[n + c]))))
        logits = [mixes[k] * r * scale[2] + base[k] for k in range(2 * n, (2 + n) * n)]
        y = [sum(pre[c] * x[t, c, h] for c in range(n)) for h in range(hidden)]
        s = 1 / math.sqrt(sum(v * v for v in y) / hidden + 1e-1)
        f = [2 * (v * s * w) + 1 for v, w in zip(y, weight, strict=True)]
        comb = got["comb"][t]
        x_next = [
            [post[k] * f[h] + sum(comb[j, k] * x[t, j, h] for j in range(n)) for h in range(hidden)] for k in range(n)
        ]
        for name, want in (("mixes", mixes), ("pre", pre), ("post", post), ("logits", logits), ("y", y),
                           ("f", f), ("x_next", x_next)):  # fmt: skip
            np.testing.assert_allclose(got[name][t], want, rtol=1e-12, atol=1e-13, err_msg=name)


@pytest.mark.parametrize("n", [3, 4, 6])
def test_orientation_of_comb(n: int) -> None:
    """D1 against a triple loop: comb is [from, to], and stream j goes where row j says."""
    program = build(streams=n, hidden=5, scope="site")
    inputs = discriminating(program, 2, "D1")
    assert inputs is not None
    got = reference.run(program, inputs, {"branch": lambda z: np.zeros_like(z)})
    x, comb = inputs["x"].astype(np.float64), got["comb"]
    want, transposed = np.zeros_like(x), np.zeros_like(x)
    for t in range(2):
        for j in range(n):
            for k in range(n):
                want[t, k] += comb[t, j, k] * x[t, j]
                transposed[t, k] += comb[t, k, j] * x[t, j]
    np.testing.assert_allclose(got["x_next"], want, rtol=1e-13)
    assert np.abs(got["x_next"] - transposed).max() > 0.5
    # Token 0 shifts by one: stream 0 arrives at stream 1.
    assert got["x_next"][0, 1] == pytest.approx(x[0, 0], abs=1e-2)


def test_two_eps_are_two() -> None:
    """D3: the inverse RMS is 20.0 with its own eps and 8.9 with the other."""
    for rms_eps, hc_eps, inverse in ((1e-6, 1e-2, 20.0), (1e-2, 1e-6, 8.94)):
        program = build(hidden=4, rms_eps=rms_eps, hc_eps=hc_eps)
        inputs = {**make_inputs(program, 1), "x": np.full((1, 4, 4), 0.05)}
        got = reference.run(program, inputs, all_values=True)
        assert got["mixes_scaled"] / inputs["mixes"] == pytest.approx(inverse, rel=1e-3)
        # pre - sigmoid is the gates' eps exactly; post has none.
        logit = got["mixes_scaled"] * 1.0
        sigmoid = 1 / (1 + np.exp(-(logit[:, :4] * inputs["scale"][0] + inputs["base"][:4])))
        assert got["pre"] - sigmoid == pytest.approx(hc_eps, rel=1e-9)
        sigmoid = 1 / (1 + np.exp(-(logit[:, 4:8] * inputs["scale"][1] + inputs["base"][4:8])))
        assert got["post"] == pytest.approx(2 * sigmoid, rel=1e-14)


def test_eps_is_inside_the_root() -> None:
    """D4: 707.1, where outside would be 999.0."""
    got = reference.rowsq(np.full((1, 4, 6), 1e-3), np.ones((1, 1)), 1e-6)
    assert got[0, 0] == pytest.approx(707.107, rel=1e-5)


def test_zero_streams_are_finite() -> None:
    """D12."""
    program = build(hidden=4, norm=True, quant="q8")
    inputs = discriminating(program, 2, "D12")
    assert inputs is not None
    assert all(np.isfinite(array).all() for array in reference.run(program, inputs, all_values=True).values())


@pytest.mark.parametrize("scope", ["pre", "site", "boundary"])
def test_a_nan_stays_in_its_token(scope: str) -> None:
    """D15."""
    program = build(hidden=40, scope=scope, norm=True, quant="fp8", projection="fma")
    inputs = discriminating(program, 3, "D15")
    assert inputs is not None
    clean = {**inputs, "x": np.nan_to_num(inputs["x"])}
    branches = {"branch": lambda z: z}
    got, plain = (reference.run(program, i, branches) for i in (inputs, clean))
    for name, array in got.items():
        assert np.isnan(array[1]).any(), name
        np.testing.assert_array_equal(array[[0, 2]], plain[name][[0, 2]])


def test_a_row_of_minus_infinity_is_nan_and_one_is_not() -> None:
    logits = np.zeros((2, 9))
    logits[0, 1] = -np.inf
    logits[1, 3:6] = -np.inf
    with np.errstate(invalid="ignore"):
        comb = reference.sinkhorn(logits, 20, 1e-6)
    assert np.isfinite(comb[0]).all()
    assert 0 < comb[0, 0, 1] < 1e-4
    assert np.isnan(comb[1]).all()


def test_head_expand_and_mean() -> None:
    e = random(2, 5)
    x = reference.expand(e, 3)
    assert x.shape == (2, 3, 5)
    np.testing.assert_allclose(reference.mean(x), e)
    mixes, base = random(2, 3), random(3, seed=1)
    pre = reference.head_gates(mixes, np.array([0.5]), base, 1e-2)
    np.testing.assert_allclose(pre, 1 / (1 + np.exp(-(mixes * 0.5 + base))) + 1e-2, rtol=1e-14)


# --- quantisation -----------------------------------------------------------------------------------------


def test_q8_rules() -> None:
    z = np.zeros((2, 70))
    z[0, :4] = [127.0, 2.5, 3.5, -2.5]
    z[0, 32:36] = [-1.0, 0.5, -0.5, 0.25]
    z[1, 69] = -254.0
    q, scale = reference.quant(z, "q8", 32, False)
    assert scale.shape == (2, 3)
    assert scale[0].tolist() == [1.0, 1 / 127, 0.0]
    assert scale[1].tolist() == [0.0, 0.0, 2.0]
    assert q[0, :4].tolist() == [127.0, 2.0, 4.0, -2.0]  # halves go to even
    assert q[0, 32] == -127.0
    assert np.all(q[0, 64:] == 0.0)
    assert q[1, 69] == -127.0
    assert np.abs(q).max() == 127.0


def test_fp8_rules() -> None:
    z = np.zeros((1, 130))
    z[0, :5] = [448.0, 17.0, 19.0, -0.001, 2.0**-9]
    z[0, 129] = 3.0
    q, scale = reference.quant(z, "fp8", 128, False)
    assert scale.tolist() == [[1.0, 3.0 / 448.0]]
    # 17 and 19 are ties of step 2: to even. 2^-9 is the smallest subnormal; more than half of it is rounded up.
    assert q[0, :5].tolist() == [448.0, 16.0, 20.0, -(2.0**-9), 2.0**-9]
    assert q[0, 129] == 448.0
    carried = q.astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
    assert np.array_equal(carried, q)


@pytest.mark.parametrize("scheme", ["q8", "fp8"])
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 1000), hidden=st.integers(1, 300), exponent=st.integers(-20, 20))
def test_quantisation_error_and_power_of_two_scales(scheme: str, seed: int, hidden: int, exponent: int) -> None:
    z = random(2, hidden, seed=seed) * 2.0**exponent
    group = 32 if scheme == "q8" else 128
    for pow2 in (False, True):
        q, scale = reference.quant(z, scheme, group, pow2)
        wide = np.repeat(scale, group, axis=1)[:, :hidden]
        step = 0.5 if scheme == "q8" else np.maximum(np.abs(q) * 2.0**-4, 2.0**-10)
        assert np.all(np.abs(z - q * wide) <= step * wide * (1 + 1e-12))
        assert np.abs(q).max() <= (127 if scheme == "q8" else 448)
        if pow2:
            plain = reference.quant(z, scheme, group, False)[1]
            assert np.all(np.frexp(scale)[0] == 0.5)
            assert np.all((plain <= scale) & (scale < 2 * plain))


def test_nan_and_infinity_reach_the_scale() -> None:
    z = random(3, 64)
    z[0, 3], z[1, 40] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        for scheme in ("q8", "fp8"):
            q, scale = reference.quant(z, scheme, 32, False)
            assert np.isnan(scale[0, 0])
            assert np.isnan(q[0, :32]).all()
            assert np.isposinf(scale[1, 1])
            assert np.isfinite(scale[0, 1]) and np.isfinite(scale[1, 0]) and np.isfinite(scale[2]).all()


# --- run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scope", ["pre", "site", "boundary"])
def test_no_tokens(scope: str) -> None:
    program = build(hidden=40, scope=scope, norm=True, quant="q8", projection="fma", iterations_out=True)
    got = reference.run(program, make_inputs(program, 0), {"branch": lambda z: z})
    assert {name: array.shape for name, array in got.items()} == {
        tensor.name: program.shape(tensor.name, 0) for tensor in program.of_role("result")
    }


def test_results_by_default_and_everything_on_request() -> None:
    program = build(hidden=4)
    inputs = make_inputs(program, 2)
    assert set(reference.run(program, inputs)) == {"pre", "post", "comb", "y"}
    everything = reference.run(program, inputs, all_values=True)
    assert set(everything) == {tensor.name for tensor in program.tensors}
    assert all(array.dtype == np.float64 for array in everything.values())


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounding_points(dtype: str) -> None:
    program = build(hidden=8, dtype=dtype, norm=True)
    inputs = make_inputs(program, 2)
    exact, rounded = (reference.run(program, inputs, round_values=r) for r in (False, True))
    assert np.array_equal(rounded["y"], reference.round_to(exact["y"], dtype))
    assert not np.array_equal(rounded["y"], exact["y"])
    # z is computed from the rounded y, then rounded itself; fp32 tensors are left alone.
    z = reference.norm(rounded["y"], inputs["norm_weight"].astype(np.float64), 1e-6)
    assert np.array_equal(rounded["z"], reference.round_to(z, dtype))
    assert np.array_equal(rounded["comb"], exact["comb"])


def test_branches_by_name_and_by_kind() -> None:
    program = build(hidden=4, scope="boundary", extra=("engram", "tap"))
    inputs = make_inputs(program, 2)
    branches = {"engram": lambda x: x + 1.0, "tap": lambda x: x[:, 0]}
    got = reference.run(program, inputs, branches, all_values=True)
    assert np.array_equal(got["x_engram"], got["x_next"] + 1.0)
    assert np.array_equal(got["aux"], got["x_engram"][:, 0])
    with pytest.raises(ValueError, match=r"opaque stage engram .*needs a function"):
        reference.run(program, inputs, {"tap": branches["tap"]})
    with pytest.raises(ValueError, match="stage tap gave aux the shape"):
        reference.run(program, inputs, {**branches, "tap": lambda x: x})


def test_bad_inputs_are_named() -> None:
    program = build(hidden=4)
    inputs = make_inputs(program, 2)
    with pytest.raises(ValueError, match="missing input mixes, base"):
        reference.run(program, {k: v for k, v in inputs.items() if k not in ("mixes", "base")})
    with pytest.raises(ValueError, match=r"input mixes has shape \(3, 24\), wants \(2, 24\)"):
        reference.run(program, {**inputs, "mixes": np.zeros((3, 24))})


def test_unknown_kinds_are_refused() -> None:
    stage = SimpleNamespace(name="s", kind="mystery", operands=[], results=[], attrs=[])
    with pytest.raises(ValueError, match="unknown kind 'mystery'"):
        reference.evaluate(stage, {}, {})
    stage = SimpleNamespace(name="s", kind="sinkhorn", operands=[], results=[], attrs=[("comb", "other")])
    with pytest.raises(ValueError, match="unknown comb 'other'"):
        reference.evaluate(stage, {}, {})
    with pytest.raises(ValueError, match="unknown quantisation scheme 'q4'"):
        reference.quant(np.zeros((1, 1)), "q4", 32, False)


@pytest.mark.parametrize("name", ["D12", "D15", "extreme", "-inf base"])
def test_no_warnings(name: str) -> None:
    program = build(hidden=40, norm=True, quant="fp8", dtype="fp16")
    inputs = discriminating(program, 3, name)
    assert inputs is not None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reference.run(program, inputs, round_values=True)


def test_inputs_are_not_touched() -> None:
    program = build(hidden=4, scope="boundary")
    inputs = make_inputs(program, 2)
    before = {name: array.tobytes() for name, array in inputs.items()}
    reference.run(program, inputs, all_values=True)
    assert {name: array.tobytes() for name, array in inputs.items()} == before
