"""The error tree: one renderer, exit codes by whose fault it is, and the texts a user meets, pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import factories
import jinja2
import numpy as np
import pytest

import mhcgen
from mhcgen import emit, errors
from mhcgen.backends.archs import parse_arch
from mhcgen.errors import MhcgenError
from mhcgen.lower import lower
from mhcgen.models import MODELS
from mhcgen.plan import PLACEMENTS
from mhcgen.runtime import HostRunner, Module

EXITS = {
    "UsageError": 2,
    "InputError": 2,
    "InputTypeError": 2,
    "ProgramError": 2,
    "RefusedError": 3,
    "CheckFailed": 1,
    "EnvironmentFault": 4,
    "CompileError": 4,
    "LaunchError": 4,
    "TemplateError": 70,
    "InternalError": 70,
}


def tree() -> dict[str, type[MhcgenError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, MhcgenError) and value is not MhcgenError
    }


def test_every_class_has_its_exit_code() -> None:
    assert {name: cls.exit_code for name, cls in tree().items()} == EXITS
    assert MhcgenError.exit_code == 70


def test_classes_are_also_what_python_expects() -> None:
    assert issubclass(errors.InputTypeError, TypeError)
    for name in ("UsageError", "InputError", "ProgramError"):
        assert issubclass(tree()[name], ValueError)
    for name in ("EnvironmentFault", "CompileError", "LaunchError", "TemplateError", "InternalError"):
        assert issubclass(tree()[name], RuntimeError)


def test_the_renderer_prints_all_parts_in_order() -> None:
    error = MhcgenError("X-CODE", "what", where="place", notes=("fact", "another"), hints=("do this", "or that"))
    assert str(error) == (
        "error[X-CODE]: what\n  where: place\n  note: fact\n  note: another\n  hint: do this\n  hint: or that"
    )
    assert str(MhcgenError("X-CODE", "what")) == "error[X-CODE]: what"
    assert error.args == ("what",)


def module() -> Module:
    plan = mhcgen.compile(mhcgen.build(streams=2, hidden=8), "pre")
    return Module(plan, HostRunner(plan))


def call(**changes: Any) -> Callable[[], object]:
    def run() -> object:
        loaded = module()
        given = {**factories.inputs(loaded.program, 2), **changes}
        return loaded(**{name: value for name, value in given.items() if value is not None})

    return run


def broken_template() -> object:
    plan = mhcgen.compile(factories.program())
    step = lower(plan).kernels[0].body[0]
    return emit.render(step.template, {})


F64 = np.zeros((2, 2, 8))
#: case -> (what goes wrong, the whole text)
TEXTS: dict[str, tuple[Callable[[], object], str]] = {
    "streams": (
        lambda: mhcgen.build(streams=17),
        "error[U-STREAMS]: streams must be an integer from 1 to 16, got 17\n"
        "  where: --streams\n"
        "  hint: give an integer from 1 to 16",
    ),
    "eps": (
        lambda: mhcgen.build(rms_eps=0),
        "error[U-EPS]: rms_eps must be a positive finite number up to 1, got 0\n"
        "  where: --rms-eps\n"
        "  hint: model deepseek-v4 uses 1e-06",
    ),
    "dtype": (
        lambda: mhcgen.build(dtype="fp8"),
        "error[U-DTYPE]: dtype must be one of fp32, bf16, fp16, got 'fp8'\n"
        "  where: --dtype\n"
        "  hint: choose one of fp32, bf16, fp16",
    ),
    "quantisation without a norm": (
        lambda: mhcgen.build(quant="q8"),
        "error[U-QUANT]: quantisation reads the normalised y, and this Program has no norm\n"
        "  where: quant\n"
        "  hint: build with norm=True, or use --fuse pre-norm-quant",
    ),
    "model": (
        lambda: mhcgen.build("deepseek-v5"),
        "error[U-MODEL]: unknown model 'deepseek-v5'\n"
        "  where: --model\n"
        f"  note: known models: {', '.join(sorted(MODELS))}\n"
        "  hint: did you mean deepseek-v4?",
    ),
    "placement": (
        lambda: mhcgen.compile(factories.program(), placement="cupboard"),
        f"error[U-OPTION]: placement must be one of {', '.join(PLACEMENTS)}, got 'cupboard'\n"
        "  where: --placement\n"
        f"  hint: choose one of {', '.join(PLACEMENTS)}",
    ),
    "program": (
        lambda: mhcgen.compile(factories.program(stages=())),
        "error[V-PROGRAM]: the Program breaks 3 rule(s)\n"
        "  where: model hand, scope custom\n"
        "  note: every_tensor_has_one_writer: result y has 0 writers (none)\n"
        "  note: every_value_is_used: input x is never read\n"
        "  note: a_program_has_results: the Program has no stage\n"
        "  hint: each note names the rule, the stage and the tensor",
    ),
    "site": (
        lambda: mhcgen.compile(mhcgen.build(scope="site"), "site"),
        "error[F-ESCAPE]: group rowsq+gates+sinkhorn+collapse+post: a path between collapse and post leaves the "
        "group through the opaque branch\n"
        "  where: pass fuse\n"
        "  note: path: collapse -> branch -> post\n"
        "  hint: fuse the two sides of branch apart: --fuse rowsq+gates+collapse,sinkhorn+post",
    ),
    "missing input": (
        call(mixes=None),
        "error[I-MISSING]: input mixes is missing\n"
        "  where: mixes\n"
        "  note: it is fp32 of shape [T, 8]\n"
        "  hint: pass mixes=...",
    ),
    "unknown input": (
        call(mixs=F64),
        "error[I-UNKNOWN]: the Program has no input 'mixs'\n"
        "  where: mixs\n"
        "  note: inputs: base, mixes, scale, x\n"
        "  hint: remove it or correct its name",
    ),
    "dtype of an input": (
        call(x=F64),
        "error[I-DTYPE]: x has dtype float64, and float32 (fp32) is wanted\n"
        "  where: x\n"
        "  hint: convert it explicitly to float32",
    ),
    "width of an input": (
        call(x=np.zeros((2, 2, 9), np.float32)),
        "error[I-SHAPE]: x has shape [2, 2, 9], and [T, 2, 8] is wanted\n"
        "  where: x\n"
        "  note: this emission is for n = 2, H = 8\n"
        "  hint: emit for the shape you have, or pass the array of this shape",
    ),
    "layout of an input": (
        call(x=np.zeros((2, 8, 2), np.float32).swapaxes(1, 2)),
        "error[I-LAYOUT]: x is not C-contiguous (strides (64, 4, 8))\n"
        "  where: x\n"
        "  hint: pass a contiguous copy, e.g. np.ascontiguousarray or cupy.ascontiguousarray",
    ),
    "template": (
        broken_template,
        "error[T-RENDER]: template guards/step.cu.j2 does not render: 'name' is undefined\n"
        "  where: guards/step.cu.j2\n"
        "  hint: the plan's fields and the template's names must agree",
    ),
}


@pytest.mark.parametrize("case", TEXTS)
def test_text(case: str) -> None:
    run, text = TEXTS[case]
    with pytest.raises(MhcgenError) as caught:
        run()
    assert str(caught.value) == text


def test_a_refusal_is_data_too() -> None:
    with pytest.raises(errors.RefusedError) as caught:
        mhcgen.compile(mhcgen.build(scope="site"), "site")
    refusal: Any = caught.value.refusal
    assert (refusal.code, refusal.step) == ("F-ESCAPE", "fuse")
    assert refusal.witness.path == ("collapse", "branch", "post")
    assert refusal.hint == caught.value.hints[0]


def test_an_unknown_architecture_is_the_callers_fault() -> None:
    with pytest.raises(errors.UsageError) as caught:
        parse_arch("sm_9000x")
    assert caught.value.code == "U-ARCH"
    assert caught.value.exit_code == 2


def test_template_errors_keep_their_cause() -> None:
    with pytest.raises(errors.TemplateError) as caught:
        broken_template()
    assert isinstance(caught.value.__cause__, jinja2.UndefinedError)
