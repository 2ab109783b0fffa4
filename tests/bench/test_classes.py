"""One schedule for few tokens, one for many: the same bits, and two compiles for any T."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from factories import program, stage

import mhcgen
from mhcgen.build import build
from mhcgen.classes import DECODE_TOKENS, ClassModule, plans_by_class, regime_of
from mhcgen.errors import InputError, RefusedError, UsageError
from mhcgen.inputs import make_inputs
from mhcgen.ir import Program
from mhcgen.plan import REGIMES, Kernel, Plan
from mhcgen.runtime import NUMPY_DTYPES, HostRunner, Module, load_classes

BORDER = (1, DECODE_TOKENS, DECODE_TOKENS + 1)


def bits(made: dict[str, Any], rows: slice = slice(None)) -> dict[str, bytes]:
    return {name: np.ascontiguousarray(array[rows]).tobytes() for name, array in made.items()}


def first(program: Program, inputs: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The inputs of the first tokens."""
    per_token = {tensor.name for tensor in program.tensors if tensor.shape[0] == "T"}
    return {k: np.ascontiguousarray(v[:tokens]) if k in per_token else v for k, v in inputs.items()}


@pytest.mark.parametrize(
    ("tokens", "regime"),
    [(0, "decode"), (1, "decode"), (64, "decode"), (256, "decode"), (257, "prefill"), (1 << 20, "prefill")],
)
def test_the_class_of_a_token_count(tokens: int, regime: str) -> None:
    assert regime_of(tokens) == regime


def test_classes_differ_where_the_regime_does() -> None:
    """A slab in registers for few tokens; for many the streams are read again, which was faster at every width."""
    plans = plans_by_class(build(hidden=4096, dtype="bf16"), "pre")
    assert list(plans) == list(REGIMES)
    assert [p.kernels[0].threads for p in plans.values()] == [544, 256]
    assert [p.kernels[0].own_mix_warp for p in plans.values()] == [True, False]
    (why,) = [d for d in plans["prefill"].log if "for prefill" in str(d)]
    assert "small blocks keep an SM busy" in str(why)
    for hidden in (1024, 2048):
        narrow = plans_by_class(build(hidden=hidden, dtype="bf16"), "pre")
        assert [plan.kernels[0].place("x").space for plan in narrow.values()] == ["thread", "global"]


@pytest.mark.parametrize("asked", [{"slab": "registers"}, {"slab": "global"}])
def test_what_is_asked_for_by_name_holds_in_every_class(asked: dict[str, str]) -> None:
    plans = plans_by_class(build(hidden=4096), "pre", **asked)
    assert plans["decode"].kernels == plans["prefill"].kernels


def test_an_unknown_regime_is_refused() -> None:
    with pytest.raises(UsageError) as caught:
        mhcgen.compile(build(hidden=64), "pre", regime="training")
    assert caught.value.where == "--regime"


def test_the_header_names_the_regime() -> None:
    plans = plans_by_class(build(hidden=4096), "pre")
    assert "--regime prefill" in plans["prefill"].source.splitlines()[1]
    assert "--regime" not in plans["decode"].source.splitlines()[1]


def test_both_classes_give_the_same_bits() -> None:
    program = build(streams=4, hidden=2048, iters=3, dtype="bf16", norm=True, quant="q8")
    module = load_classes(program, "pre-norm-quant", "host")
    assert module.modules["decode"] is not module.modules["prefill"]
    inputs = make_inputs(program, BORDER[-1])
    made = {t: module(**first(program, inputs, t)) for t in BORDER}
    assert [module.counts[f"{regime}: {module.used.plan.kernels[0].name}"] for regime in REGIMES] == [2, 1]
    for tokens in BORDER[:-1]:
        assert bits(made[tokens]) == bits(made[BORDER[-1]], slice(tokens))
    apart = mhcgen.compile(program, "none").load("host")
    assert bits(apart(**first(program, inputs, 3))) == bits(made[BORDER[-1]], slice(3))


def test_results_go_where_the_caller_wants_them() -> None:
    program = build(streams=2, hidden=64, iters=2)
    module = load_classes(program, "none", "host")
    inputs = make_inputs(program, 3)
    out = {t.name: np.zeros(program.shape(t.name, 3), NUMPY_DTYPES[t.dtype]) for t in module.outputs}
    made = module(out=out, **inputs)
    assert all(made[name] is out[name] for name in made)
    assert len(module.launches) == 4


def test_mistakes_are_those_of_a_module() -> None:
    program = build(streams=2, hidden=64)
    module = load_classes(program, "pre", "host")
    inputs = make_inputs(program, 2)
    for change, code in (({"x": None}, "I-ARRAY"), ({"x": inputs["x"][0]}, "I-SHAPE"), ({"z": 1}, "I-UNKNOWN")):
        with pytest.raises(InputError) as caught:
            module(**{**inputs, **change})
        assert caught.value.code == code
    with pytest.raises(InputError):
        module()
    with pytest.raises(RefusedError):
        load_classes(program, "pre", "host", threads=33)


def test_one_text_serves_both_where_the_regime_makes_no_difference() -> None:
    module = load_classes(program(stage("gates"), n=4), "none", "host")  # no columns, so nothing to choose
    assert module.modules["decode"] is module.modules["prefill"]
    assert len(module.counts) == 1


# ---- compiles -----------------------------------------------------------------------------------------------
class Counting(HostRunner):
    """Counts what it would compile, and launches nothing."""

    compiled: list[tuple[str, bool]]

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._twins: set[bool] = set()

    def module(self, scalar: bool = False) -> None:
        if scalar not in self._twins:
            self._twins.add(scalar)
            Counting.compiled.append((self.plan.options.regime, scalar))

    def is_compiled(self, scalar: bool) -> bool:
        return scalar in self._twins

    def launch(
        self, kernel: Kernel, scalar: bool, grid: tuple[int, int], args: list[Any], fresh: tuple[str, ...], **_: Any
    ) -> None:
        self.module(scalar)


def counting(program: Program, fuse: str) -> ClassModule:
    Counting.compiled = []
    return ClassModule({r: Module(p, Counting(p)) for r, p in plans_by_class(program, fuse).items()})


def shifted(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers one element past an aligned address."""
    flat = np.empty(array.size + 1, array.dtype)
    flat[1:] = array.reshape(-1)
    return flat[1:].reshape(array.shape)


def test_any_number_of_tokens_compiles_two_emissions_and_their_twins() -> None:
    """T = 1 to 8192: two, and two more where arrays are misaligned."""
    program = build(streams=4, hidden=4096)
    module = counting(program, "pre")
    big = {t.name: np.zeros(program.shape(t.name, 8192), np.float32) for t in program.of_role("input")}
    parameters = {t.name: np.zeros(program.shape(t.name, 1), np.float32) for t in program.of_role("parameter")}
    out = {t.name: np.zeros(program.shape(t.name, 8192), NUMPY_DTYPES[t.dtype]) for t in module.outputs}
    for tokens in range(1, 8193):
        given = {name: array[:tokens] for name, array in big.items()}
        module(out={name: array[:tokens] for name, array in out.items()}, **given, **parameters)
        if tokens == 1:
            assert Counting.compiled == [("decode", False)]
    assert Counting.compiled == [("decode", False), ("prefill", False)]
    odd = {"scale": shifted(parameters["scale"]), "base": parameters["base"]}
    for tokens in (1, 2, 300, 8192):
        module(out={n: a[:tokens] for n, a in out.items()}, **{n: a[:tokens] for n, a in big.items()}, **odd)
    assert Counting.compiled == [(regime, twin) for twin in (False, True) for regime in REGIMES]


def test_everything_can_be_compiled_beforehand() -> None:
    program = build(streams=4, hidden=4096)
    module = counting(program, "pre")
    module.prepare()
    module.prepare(misaligned=True)
    assert sorted(Counting.compiled) == sorted((regime, twin) for regime in REGIMES for twin in (False, True))
    module.prepare()
    assert len(Counting.compiled) == 4
