"""Values of every type at the two calls of Python: one clear error or what was meant, never a stray exception."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

import mhcgen
from mhcgen.build import Config
from mhcgen.errors import RefusedError, UsageError
from mhcgen.plan import Options

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
