"""Inputs: the same bits for ever, unbiased, in the right dtype; discriminating inputs aim where they say."""

from __future__ import annotations

import hashlib
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mhcgen import reference
from mhcgen.build import build
from mhcgen.inputs import (
    DISCRIMINATING,
    discriminating,
    make_inputs,
    numpy_dtype,
    poison,
    poisoned_mask,
    splitmix64,
    uniform,
)
from mhcgen.ir import Program

DTYPES = ("fp32", "bf16", "fp16")


def values_of(program: Program, inputs: dict[str, Any]) -> dict[str, Any]:
    opaque = {kind: lambda z: z for kind in ("branch", "engram", "tap")}
    return reference.run(program, inputs, opaque, all_values=True)


def aimed(program: Program, tokens: int, name: str) -> dict[str, Any]:
    inputs = discriminating(program, tokens, name)
    assert inputs is not None
    return values_of(program, inputs)


@pytest.mark.parametrize("name", sorted(DISCRIMINATING))
@pytest.mark.parametrize(("n", "layers"), [(2, 1), (5, 2), (16, 4)])
def test_streams_of_gates_without_a_bound_stay_where_fp32_can_square_them(n: int, layers: int, name: str) -> None:
    program = build("plain-hc", streams=n, hidden=6, scope="trunk", layers=layers, exit="sum")
    inputs = discriminating(program, 3, name)
    found = {} if inputs is None else values_of(program, inputs)
    for stage in program.stages_of_kind("rowsq_streams") if found else ():
        streams = found[stage.operand("x")]
        assert np.max(np.abs(streams[np.isfinite(streams)]), initial=0.0) < 1e19, stage.name


# --- the generator ----------------------------------------------------------------------------------------


def test_splitmix64_is_the_published_one() -> None:
    # First outputs for seed 1234567, as printed by the reference implementations in C and Java.
    assert splitmix64(1234567, 0, 3).tolist() == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
    ]


def test_an_element_depends_on_its_index_alone() -> None:
    assert np.array_equal(splitmix64(7, 0, 100)[40:60], splitmix64(7, 40, 20))
    assert np.array_equal(uniform("x", 0, (10, 7)).reshape(-1)[:33], uniform("x", 0, (33,)))


def test_bytes_are_pinned() -> None:
    inputs = make_inputs(build(hidden=8, dtype="bf16"), 2, seed=3)
    digest = hashlib.sha256(b"".join(inputs[name].tobytes() for name in sorted(inputs))).hexdigest()
    assert digest[:16] == "cfe4ffb42bf7c349"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["x", "mixes", "3.attn.x"])
def test_numbers_are_unbiased_and_in_range(dtype: str, name: str) -> None:
    sample = uniform(name, 0, (200_000,), dtype).astype(np.float64)
    assert -1.0 <= sample.min() < -0.99
    assert 0.99 < sample.max() < 1.0
    # Five standard deviations of the mean of a uniform variable, and of its square.
    assert abs(sample.mean()) < 5 * (1 / 3) ** 0.5 / 200_000**0.5
    assert abs((sample**2).mean() - 1 / 3) < 5 * 0.3 / 200_000**0.5
    assert abs((sample > 0).mean() - 0.5) < 5 * 0.5 / 200_000**0.5
    assert abs(np.corrcoef(sample[:-1], sample[1:])[0, 1]) < 0.02


def test_seeds_and_names_give_other_numbers() -> None:
    draws = [uniform(name, seed, (50,)) for name in ("x", "f") for seed in (0, 1, -1)]
    for i, first in enumerate(draws):
        for second in draws[i + 1 :]:
            assert np.count_nonzero(first == second) < 3


def test_large_arrays_do_not_depend_on_the_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = uniform("x", 0, (1000,), "bf16")
    monkeypatch.setattr("mhcgen.inputs._CHUNK", 17)
    assert np.array_equal(uniform("x", 0, (1000,), "bf16"), whole)


# --- make_inputs ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_every_input_has_its_dtype_and_shape(dtype: str, tokens: int) -> None:
    program = build(scope="boundary", hidden=7, dtype=dtype, norm=True, projection="fma")
    inputs = make_inputs(program, tokens)
    assert set(inputs) == {tensor.name for tensor in program.of_role("input", "parameter")}
    for name, array in inputs.items():
        assert array.dtype == numpy_dtype(program.tensor(name).dtype)
        assert array.shape == program.shape(name, tokens)
        assert array.flags.c_contiguous
    assert inputs["x"].dtype == {"fp32": np.float32, "bf16": ml_dtypes.bfloat16, "fp16": np.float16}[dtype]


def test_projected_mixes_are_of_order_one() -> None:
    program = build(hidden=512, projection="fma")
    mixes = values_of(program, make_inputs(program, 8))["mixes"]
    assert 0.5 < np.sqrt(np.mean(mixes**2)) < 2.0


def test_bad_arguments_are_refused() -> None:
    program = build(hidden=8)
    with pytest.raises(ValueError, match="kind must be uniform"):
        make_inputs(program, 1, kind="normal")
    with pytest.raises(ValueError, match="tokens must be >= 0"):
        make_inputs(program, -1)
    with pytest.raises(KeyError):
        discriminating(program, 1, "D2")


# --- discriminating inputs --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DISCRIMINATING)
@pytest.mark.parametrize("tokens", [0, 1, 4])
@pytest.mark.parametrize("scope", ["pre", "site", "boundary"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_complete_typed_and_contiguous(name: str, tokens: int, scope: str, dtype: str) -> None:
    for streams, projection in ((1, "fma"), (3, "external"), (4, "fma")):
        program = build(scope=scope, hidden=6, dtype=dtype, norm=True, streams=streams, projection=projection)
        inputs = discriminating(program, tokens, name)
        if inputs is None:
            continue
        plain = make_inputs(program, tokens)
        assert {k: (v.dtype, v.shape) for k, v in inputs.items()} == {k: (v.dtype, v.shape) for k, v in plain.items()}
        assert all(array.flags.c_contiguous and array.flags.writeable for array in inputs.values())
        again = discriminating(program, tokens, name)
        assert again is not None
        assert all(inputs[key].tobytes() == again[key].tobytes() for key in inputs)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("D1", {"streams": 2}),
        ("D3", {}),
        ("D4", {"rms_eps": 1e-20, "dtype": "fp16"}),
        ("D5", {"streams": 1}),
        ("D9", {}),
        ("D9", {"projection": "fma", "streams": 3, "hidden": 5}),
        ("-inf base", {"streams": 1}),
    ],
)
def test_a_program_may_have_none(name: str, options: dict[str, Any]) -> None:
    assert discriminating(build(**{"hidden": 8, **options}), 2, name) is None


def test_d15_needs_a_token() -> None:
    assert discriminating(build(hidden=8), 0, "D15") is None


@pytest.mark.parametrize("scope", ["pre", "boundary"])
@pytest.mark.parametrize("projection", ["external", "fma"])
@pytest.mark.parametrize("n", [3, 4, 7])
def test_d1_tells_comb_from_its_transpose(scope: str, projection: str, n: int) -> None:
    values = aimed(build(scope=scope, projection=projection, hidden=6, streams=n), 4, "D1")
    comb = values["comb_next" if scope == "boundary" else "comb"]
    assert np.abs(comb - comb.transpose(0, 2, 1)).max(axis=(1, 2)).min() > 0.9
    if projection == "external":
        assert np.abs(comb[0] - comb[1]).max() > 0.9
        assert values["logits"].max() == pytest.approx(10.0, abs=1e-4)


def test_d3_tells_the_two_eps_apart() -> None:
    options = {"hidden": 64, "rms_eps": 1e-6, "hc_eps": 1e-2}
    inputs = discriminating(build(**options), 3, "D3")
    assert inputs is not None
    assert np.abs(inputs["x"]).mean() == pytest.approx(0.05, rel=0.1)
    right = values_of(build(**options), inputs)["mixes_scaled"]
    wrong = values_of(build(**{**options, "rms_eps": 1e-2}), inputs)["mixes_scaled"]
    assert np.abs(right / wrong).min() > 2.0


@pytest.mark.parametrize("scope", ["pre", "boundary"])
def test_d4_places_eps(scope: str) -> None:
    program = build(scope=scope, hidden=16)
    inputs = discriminating(program, 2, "D4")
    assert inputs is not None
    ratio = values_of(program, inputs)["mixes_scaled"] / inputs["mixes"]
    assert ratio == pytest.approx(707.1, rel=1e-3)


def test_d5_has_one_starved_column() -> None:
    values = aimed(build(hidden=6), 2, "D5")
    assert np.all(values["logits"].reshape(2, 4, 4)[:, :, :3] == 0.0)
    assert values["logits"].reshape(2, 4, 4)[:, :, 3] == pytest.approx(-1e4)
    # Not exactly 1/n: what eps leaves behind, as the rows still lean away from the starved column.
    assert values["comb"] == pytest.approx(0.25, abs=1e-3)


def test_d8_overflows_fp32_without_the_maximum() -> None:
    logits = aimed(build(hidden=6), 2, "D8")["logits"]
    comb = logits.reshape(2, 4, 4)
    assert np.exp(comb).max(axis=(1, 2)).min() > float(np.finfo(np.float32).max)
    assert np.exp(comb - comb.max(axis=2, keepdims=True)).min() > 0.1


@pytest.mark.parametrize(("n", "hidden", "dot"), [(4, 256, 0.125), (4, 4096, 2.0), (4, 7168, 3.5)])
@pytest.mark.parametrize("scope", ["pre", "boundary"])
def test_d9_has_the_stated_dot_product(n: int, hidden: int, dot: float, scope: str) -> None:
    program = build(scope=scope, streams=n, hidden=hidden, projection="fma")
    inputs = discriminating(program, 2, "D9")
    assert inputs is not None
    assert np.all(values_of(program, inputs)["mixes"] == dot)
    inputs["fn"] = inputs["fn"].astype(ml_dtypes.bfloat16)
    assert np.all(values_of(program, inputs)["mixes"] == 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_d10_tells_a_neighbours_norm(dtype: str) -> None:
    program = build(scope="boundary", hidden=32, dtype=dtype, streams=16)
    inputs = discriminating(program, 40, "D10")
    assert inputs is not None
    values = values_of(program, inputs)
    size = np.sqrt(np.mean(values["x_next"] ** 2, axis=(1, 2)))
    period = 10 if dtype == "fp16" else 32
    ratio = size[1:] / size[:-1]
    inside = np.arange(1, 40) % period != 0
    assert ratio[inside].min() > 1.2
    assert np.abs(values["x_next"]).max() < (65504 if dtype == "fp16" else np.inf)
    assert np.abs(values["mixes_scaled"]).max() < 4.0


@pytest.mark.parametrize("scope", ["pre", "boundary"])
def test_d12_is_finite_only_with_eps(scope: str) -> None:
    program = build(scope=scope, hidden=6, norm=True)
    inputs = discriminating(program, 2, "D12")
    assert inputs is not None
    values = values_of(program, inputs)
    assert all(np.isfinite(array).all() for array in values.values())
    assert np.all(values["y"] == 0.0)
    assert 0.1 < np.abs(values["mixes_scaled"]).max() < 1.01


@pytest.mark.parametrize("scope", ["pre", "site", "boundary"])
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_d15_has_one_nan_in_one_token(scope: str, tokens: int) -> None:
    program = build(scope=scope, hidden=6)
    inputs = discriminating(program, tokens, "D15")
    assert inputs is not None
    assert sum(int(np.isnan(array).sum()) for array in inputs.values()) == 1
    for name, array in values_of(program, inputs).items():
        if program.tensor(name).role == "result":
            hit = np.isnan(array).reshape(tokens, -1).any(axis=1)
            assert hit.tolist() == [token == tokens // 2 for token in range(tokens)], name


@pytest.mark.parametrize("projection", ["external", "fma"])
def test_extreme_logits_reach_all_three_sizes(projection: str) -> None:
    values = aimed(build(hidden=6, projection=projection), 3, "extreme")
    sizes = np.abs(values["logits"])
    for size in (89.0, 200.0, 1e4):
        near = np.abs(sizes - size) < 0.1
        assert near.any(axis=1).all()
    assert np.isfinite(values["comb"]).all()


@pytest.mark.parametrize("projection", ["external", "fma"])
def test_deep_logits_underflow_without_the_row_maximum(projection: str) -> None:
    values = aimed(build(hidden=6, projection=projection), 3, "deep")
    assert not np.exp(values["logits"].astype(np.float32)).any()
    assert np.isfinite(values["comb"]).all()
    assert (values["comb"] > 0).all()


def test_minus_infinity_stays_in_its_place() -> None:
    values = aimed(build(hidden=6), 3, "-inf base")
    logits = values["logits"].reshape(3, 4, 4)
    assert np.isneginf(logits[:, 0, 1]).all()
    assert np.isneginf(logits[2, 3]).all()
    assert np.isfinite(values["comb"][:2]).all()
    assert np.isnan(values["comb"][2]).all()
    assert np.isfinite(values["y"]).all()


# --- poison -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16", "fp8_e4m3", "int8", "int32"])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (4, 0), (1,)])
def test_poison_is_seen_until_written(dtype: str, shape: tuple[int, ...]) -> None:
    array = poison(shape, dtype)
    assert array.shape == shape
    assert array.dtype == numpy_dtype(dtype)
    assert poisoned_mask(array).shape == shape
    assert poisoned_mask(array).all()
    if array.size:
        array[0] = 1
        assert not poisoned_mask(array)[0].any()
        assert poisoned_mask(array)[1:].all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_poison_is_a_nan_but_no_computed_nan(dtype: str) -> None:
    array = poison((2,), dtype)
    assert np.isnan(array.astype(np.float64)).all()
    with np.errstate(all="ignore"):
        computed = np.array([np.inf, 0.0], numpy_dtype(dtype))
        computed = computed - computed
    assert not poisoned_mask(computed).any()
    assert not poisoned_mask(np.array([np.nan, -np.nan], numpy_dtype(dtype))).any()
    ones = np.full(2 * numpy_dtype(dtype).itemsize, 0xFF, np.uint8)  # a GPU's NaN, negated
    assert not poisoned_mask(ones.view(numpy_dtype(dtype))).any()


def test_integer_poison_is_no_result() -> None:
    # q8 is symmetric, so -128 is never written; an iteration count is positive.
    assert poison((1,), "int8")[0] == -128
    assert poison((1,), "int32")[0] < 0


def test_a_strided_view_is_masked_too() -> None:
    array = poison((4, 4), "fp32")
    array[:, ::2] = 0.0
    assert poisoned_mask(array[:, ::2]).sum() == 0
    assert poisoned_mask(array[:, 1::2]).all()
