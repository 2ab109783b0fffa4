"""Values of every type at the two calls of Python: one clear error or what was meant, never a stray exception."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import factories
import ml_dtypes
import numpy as np
import pytest

import mhcgen
from mhcgen.build import Config
from mhcgen.classes import load_classes
from mhcgen.errors import InputError, InputTypeError, RefusedError, UsageError
from mhcgen.inputs import make_inputs
from mhcgen.passes import PIPELINE
from mhcgen.plan import Options
from mhcgen.runtime import Module

SMALL: dict[str, Any] = {"streams": 2, "hidden": 8, "iters": 2}
PROGRAM = mhcgen.build("deepseek-v4", **SMALL)

SWITCHES = ("scalar", "dependent", "stamps", "tuned")
CONFIG_SWITCHES = ("norm", "quant_pow2", "early_stop", "iterations_out")
#: None of these is what an option takes, whatever that is.
NONSENSE = ("", "moon", b"pre", 2.5, -1, float("nan"), 10**400, -(10**400), [], {}, ("pre",), np.arange(2), object())
NAMES = [f"{type(value).__name__}-{index}" for index, value in enumerate(NONSENSE)]
OPTIONS = (*(field.name for field in fields(Options)), "tuned", "stop_after")


@pytest.mark.parametrize("value", ["no", "", 0, 1, 2.5, [], np.int64(1)])
@pytest.mark.parametrize("field", SWITCHES)
def test_a_switch_of_a_schedule_is_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{field} must be true or false") as caught:
        mhcgen.compile(PROGRAM, **{field: value})
    assert (caught.value.code, caught.value.where) == ("U-OPTION", f"--{field}")


@pytest.mark.parametrize("value", ["no", "", 0, 1, 2.5, [], np.int64(1)])
@pytest.mark.parametrize("field", CONFIG_SWITCHES)
def test_a_switch_of_a_configuration_is_true_or_false(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=f"{field} must be true or false") as caught:
        mhcgen.configure(**SMALL, **{field: value})
    assert (caught.value.code, caught.value.where) == ("U-OPTION", f"--{field.replace('_', '-')}")


def test_scalars_of_numpy_are_the_values_they_hold() -> None:
    given: dict[str, Any] = {"scalar": np.True_, "threads": np.int64(64), "regime": np.str_("prefill")}
    plan = mhcgen.compile(PROGRAM, **given)
    assert plan.options == Options(scalar=True, threads=64, regime="prefill")
    assert [type(value) for value in (plan.options.scalar, plan.options.threads)] == [bool, int]
    assert plan.source == mhcgen.compile(PROGRAM, scalar=True, threads=64, regime="prefill").source
    assert mhcgen.configure(norm=np.True_, extra=[]) == mhcgen.configure(norm=True)


@pytest.mark.parametrize("value", NONSENSE, ids=NAMES)
@pytest.mark.parametrize("field", OPTIONS)
def test_nonsense_in_a_schedule(field: str, value: Any) -> None:
    with pytest.raises((UsageError, RefusedError)):
        mhcgen.compile(PROGRAM, **{field: value})


@pytest.mark.parametrize("value", NONSENSE, ids=NAMES)
@pytest.mark.parametrize("field", [field.name for field in fields(Config)])
def test_nonsense_in_a_configuration(field: str, value: Any) -> None:
    if field == "extra" and isinstance(value, list):
        return
    with pytest.raises(UsageError):
        mhcgen.build(**{**SMALL, field: value})


@pytest.mark.parametrize("field", ["iters", "rank", "early_stop"])
def test_nonsense_where_a_model_has_no_such_thing(field: str) -> None:
    with pytest.raises(UsageError):
        mhcgen.configure("kromhc", **{field: ""})


@pytest.mark.parametrize("value", ["deepseek-v4", None, {}, mhcgen.configure()])
def test_what_is_no_program(value: Any) -> None:
    with pytest.raises(UsageError, match="a Program is wanted") as caught:
        mhcgen.compile(value)
    assert caught.value.code == "U-PROGRAM"


@pytest.mark.parametrize("value", ["gpu", None, 1, np.arange(2)])
def test_what_is_no_backend(value: Any) -> None:
    with pytest.raises(UsageError, match="backend must be one of auto, host, cuda") as caught:
        mhcgen.compile(PROGRAM).load(value)
    assert caught.value.code == "U-BACKEND"


@pytest.mark.parametrize("name", [name for name, _ in PIPELINE[:-1]])
def test_an_unfinished_plan_is_only_looked_at(name: str) -> None:
    # Without barriers, or without any step, its text would compile, run and leave results unwritten.
    plan = mhcgen.compile(PROGRAM, "pre", stop_after=name)
    for use in (lambda: plan.source, lambda: plan.load("host")):
        with pytest.raises(UsageError, match=f"it stops after {name}") as caught:
            use()
        assert caught.value.code == "U-PLAN"
    assert mhcgen.compile(PROGRAM, "pre", stop_after=PIPELINE[-1][0]).source == mhcgen.compile(PROGRAM, "pre").source


@pytest.fixture(scope="module")
def module() -> Module:
    return mhcgen.compile(PROGRAM, "pre").load("host")


INPUTS = factories.inputs(PROGRAM, 2)


@pytest.mark.parametrize("what", ["out", "branches", "launch_options"])
def test_what_maps_no_names(module: Module, what: str) -> None:
    with pytest.raises(UsageError, match=f"{what} must be a mapping") as caught:
        module(**INPUTS, **{what: ["y"]})
    assert caught.value.code == "U-OPTION"


@pytest.mark.parametrize("options", [{"per_cluste": 2}, {1: 2}, {"cluster": 3}, {"stream": 0}])
@pytest.mark.parametrize("tokens", [0, 2])
def test_a_launch_option_that_there_is_not(module: Module, options: dict[Any, Any], tokens: int) -> None:
    with pytest.raises(UsageError, match="there is no launch option") as caught:
        module(**factories.inputs(PROGRAM, tokens), launch_options=options)
    assert caught.value.code == "U-OPTION" and "per_cluster, order, seed" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("seed", "1"), ("seed", 1.0), ("seed", None), ("seed", True),
        ("order", "x"), ("order", None), ("order", ["random"]),
        ("blocks", "a"), ("blocks", ["a"]), ("blocks", 1), ("blocks", [0.5]), ("blocks", np.array(3)),
        ("count_accesses", 1),
    ],
)
@pytest.mark.parametrize("tokens", [0, 2])
def test_launch_options_of_another_kind(module: Module, option: str, value: Any, tokens: int) -> None:
    before = dict(module.counts)
    with pytest.raises(UsageError, match=f"{option} is ") as caught:
        module(**factories.inputs(PROGRAM, tokens), launch_options={option: value})
    assert (caught.value.code, caught.value.where) == ("U-OPTION", f"launch_options[{option!r}]")
    assert module.counts == before


def test_launch_options_of_the_right_kind(module: Module) -> None:
    base = module(**INPUTS)
    for options in (
        {"seed": np.int64(-3), "order": "random"}, {"blocks": (b for b in (0, 1))}, {"blocks": np.arange(2)},
        {"blocks": None, "count_accesses": np.False_},
    ):
        made = module(**INPUTS, launch_options=options)
        assert all(made[name].tobytes() == base[name].tobytes() for name in base)


@pytest.mark.parametrize("backend", ["host", "cuda"])
def test_an_option_that_a_runner_has_not(backend: str) -> None:
    with pytest.raises(UsageError, match="no option 'x' of load") as caught:
        mhcgen.compile(PROGRAM).load(backend=backend, x=1)
    assert (caught.value.code, caught.value.where) == ("U-OPTION", "x")


@pytest.mark.parametrize("option", ["regime", "x", "backend_"])
def test_an_option_that_classes_have_not(option: str) -> None:
    with pytest.raises(UsageError, match=f"no option '{option}'") as caught:
        load_classes(PROGRAM, "pre", "host", **{option: "decode"})
    assert (caught.value.code, caught.value.where) == ("U-OPTION", option)


@pytest.mark.parametrize(
    ("tokens", "given", "code"),
    [
        (2, {"seed": "a"}, "U-OPTION"), (2, {"seed": 1.5}, "U-OPTION"), (2, {"seed": True}, "U-OPTION"),
        (2, {"kind": "normal"}, "U-OPTION"), (2, {"kind": None}, "U-OPTION"),
        (1.5, {}, "U-TOKENS"), ("2", {}, "U-TOKENS"), (-1, {}, "U-TOKENS"), (None, {}, "U-TOKENS"),
    ],
)
def test_inputs_that_cannot_be_made(tokens: Any, given: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        make_inputs(PROGRAM, tokens, **given)
    assert caught.value.code == code and caught.value.where
    same = make_inputs(PROGRAM, np.int64(2), seed=np.int8(-1))
    assert all(array.tobytes() == same[name].tobytes() for name, array in make_inputs(PROGRAM, 2, -1).items())


@pytest.mark.parametrize("most", [0, -1, True, 1.0, "2", [1], None])
def test_a_cluster_takes_a_number_of_tokens(module: Module, most: Any) -> None:
    with pytest.raises(UsageError, match="from 1 on") as caught:
        module(**INPUTS, launch_options={"per_cluster": most})
    assert caught.value.code == "U-OPTION"


def test_any_kind_of_integer_is_a_number_of_tokens(module: Module) -> None:
    base = module(**INPUTS)
    made = module(**INPUTS, launch_options={"per_cluster": np.int64(2), "seed": 3})
    assert all(made[name].tobytes() == base[name].tobytes() for name in base)


@pytest.mark.parametrize("branch", [None, "attention", 0])
def test_a_branch_that_cannot_be_called(branch: Any) -> None:
    site = mhcgen.build(**SMALL, scope="site")
    with pytest.raises(InputError, match=f"a {type(branch).__name__} was given for it") as caught:
        mhcgen.compile(site).load("host")(**factories.inputs(site, 2), branches={"branch": branch})
    assert caught.value.code == "I-BRANCH"


def test_a_branch_that_no_stage_has(module: Module) -> None:
    with pytest.raises(InputError, match="no opaque stage 'attn'") as caught:
        module(**INPUTS, branches={"attn": lambda z: z})
    assert caught.value.code == "I-BRANCH"
    site = mhcgen.compile(mhcgen.build(**SMALL, scope="site")).load("host")
    with pytest.raises(InputError, match="no opaque stage 'attn'") as caught:
        site(**factories.inputs(site.program, 2), branches={"branch": lambda z: z, "attn": lambda z: z})
    assert caught.value.hints == ("opaque stages: branch",) and not any(site.counts.values())


def test_raw_bytes_are_said_to_be_bf16(module: Module) -> None:
    raw = INPUTS["x"].astype(ml_dtypes.bfloat16).view("V2")
    with pytest.raises(InputTypeError, match="x has dtype void16") as caught:
        module(**{**INPUTS, "x": raw})
    assert "dtype bf16" in caught.value.hints[0] and "view(ml_dtypes.bfloat16)" in caught.value.hints[0]
    narrow = mhcgen.compile(mhcgen.build(**SMALL, dtype="bf16")).load("host")
    with pytest.raises(InputTypeError, match="x has dtype void16") as caught:
        narrow(**{**factories.inputs(narrow.program, 2), "x": raw})
    assert "view(ml_dtypes.bfloat16)" in caught.value.hints[0] and "float32" not in caught.value.hints[0]


def test_foreign_byte_order_is_another_dtype(module: Module) -> None:
    with pytest.raises(InputTypeError, match="x has dtype >f4, and float32") as caught:
        module(**{**INPUTS, "x": INPUTS["x"].astype(">f4")})
    assert (caught.value.code, caught.value.where) == ("I-DTYPE", "x")


def test_a_masked_array_is_no_array_of_all_its_elements(module: Module) -> None:
    with pytest.raises(InputTypeError, match=r"x is a numpy\.ma\..*MaskedArray") as caught:
        module(**{**INPUTS, "x": np.ma.masked_array(INPUTS["x"], INPUTS["x"] > 0)})
    assert caught.value.code == "I-ARRAY"


def test_a_read_only_result_is_named(module: Module) -> None:
    y = np.empty((2, 8), np.float32)
    y.flags.writeable = False
    with pytest.raises(InputError, match="out y is read-only") as caught:
        module(**INPUTS, out={"y": y})
    assert (caught.value.code, caught.value.where) == ("I-LAYOUT", "out['y']")


def test_race_mode_is_true_or_false() -> None:
    with pytest.raises(UsageError, match="race must be true or false"):
        mhcgen.compile(PROGRAM).load("host", race="yes")


def test_readers_named_in_any_order_and_twice_are_one_configuration() -> None:
    given = {"scope": "boundary", "projection": "fma"}
    usual = mhcgen.configure(**given, extra=("engram", "tap"))
    assert mhcgen.configure(**given, extra=["tap", "engram", "tap"]) == usual
    assert usual.extra == ("engram", "tap")
