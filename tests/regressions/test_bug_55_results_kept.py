"""NVIDIA/Fuser #3833: a pass replaced one output by another, and the definition returned an empty list."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import factories
import numpy as np
import pytest
from differential import Ran, differing
from factories import chain, program, stage

import mhcgen
from mhcgen.errors import ProgramError
from mhcgen.ir import Program
from mhcgen.passes import PIPELINE
from mhcgen.plan import Options, Plan

#: Graphs whose results are also read inside, or are read by nobody, or come out of order.
GRAPHS: dict[str, tuple[Program, str]] = {
    "x_next is a result and read": (mhcgen.build(scope="boundary", hidden=12), "boundary"),
    "every value is a result": (program(*chain(), n=3, hidden=12, results=("mixes_scaled", "pre", "logits")), "pre"),
    "y is a result and normalised": (program(*chain(), stage("norm"), n=3, hidden=12, results=("y",)), "pre-norm"),
    "a result read twice": (
        program(
            stage("expand", results={"x": "x"}),
            stage("mean", "a", {"x": "x"}, {"y": "ya"}),
            stage("mean", "b", {"x": "x"}, {"y": "yb"}),
            results=("x",),
            n=3,
            hidden=12,
        ),
        "expand+a+b",
    ),
    "a stage without consumer": (program(*chain(), stage("mean", results={"y": "spare"}), hidden=12), "pre"),
    "equal stages of equal operands": (
        program(stage("mean", "a", {}, {"y": "ya"}), stage("mean", "b", {}, {"y": "yb"}), hidden=12),
        "a+b",
    ),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_each_pass_keeps_number_order_and_identity(name: str) -> None:
    made, fuse = GRAPHS[name]
    results = made.of_role("result")
    plan = Plan(made, Options(fuse=fuse))
    for step, run in PIPELINE:
        once = replace(run(plan), done=(*plan.done, step))
        assert once.program == made
        assert once.program.of_role("result") == results
        assert run(once) == once
        plan = once


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.parametrize("placement", ["auto", "shared"])
def test_all_results_come_out_with_the_bits_of_the_unfused(name: str, placement: str) -> None:
    made, fuse = GRAPHS[name]
    inputs = factories.inputs(made, 3)
    base = Ran(mhcgen.compile(made, "none"), inputs, 3)
    fused = Ran(mhcgen.compile(made, fuse, placement=placement), inputs, 3)
    assert list(fused.results) == [t.name for t in made.of_role("result")]
    assert differing(base.results, fused.results) == []
    addresses = {array.ctypes.data for array in fused.results.values()}
    assert len(addresses) == len(fused.results)


def test_an_output_that_is_an_input_is_refused() -> None:
    made = factories.program()
    tensors = tuple(replace(t, role="result") if t.name == "x" else t for t in made.tensors)
    with pytest.raises(ProgramError, match=r"result x has 0 writers"):
        mhcgen.compile(replace(made, tensors=tensors))


def test_an_output_listed_twice_is_refused() -> None:
    made = factories.program()
    with pytest.raises(ProgramError, match="tensor y is defined twice"):
        mhcgen.compile(replace(made, tensors=(*made.tensors, made.tensors[-1])))


def test_results_may_not_overlap_inputs() -> None:
    made: Any = factories.program(stage("expand"), n=1)
    module = mhcgen.compile(made).load("host")
    inputs = factories.inputs(made, 2)
    with pytest.raises(mhcgen.MhcgenError, match="I-OVERLAP"):
        module(out={"x": inputs["e"].reshape(2, 1, 8)}, **inputs)


@pytest.mark.parametrize("fuse", ["none", "pre"])
def test_results_may_not_overlap_each_other(fuse: str) -> None:
    """The second would overwrite part of the first."""
    made = mhcgen.build(hidden=8)
    module = mhcgen.compile(made, fuse).load("host")
    room = np.zeros((3, 4), np.float32)
    for other in (room[1:], room[:2]):
        with pytest.raises(mhcgen.MhcgenError, match=r"I-OVERLAP.*out post overlaps out pre"):
            module(out={"pre": room[:2], "post": other}, **factories.inputs(made, 2))
    beside = np.zeros((4, 4), np.float32)
    usual = module(**factories.inputs(made, 2))
    out = module(out={"pre": beside[:2], "post": beside[2:]}, **factories.inputs(made, 2))
    assert differing(usual, out) == []


def test_a_branch_may_not_return_memory_that_is_written_later() -> None:
    made = mhcgen.build(scope="site", streams=1, hidden=8)
    module = mhcgen.compile(made, "pre").load("host")
    out = {"x_next": np.zeros((2, 1, 8), np.float32)}
    inputs = factories.inputs(made, 2)
    with pytest.raises(mhcgen.MhcgenError, match=r"I-OVERLAP.*f, which branch returned, overlaps out x_next"):
        module(out=out, branches={"branch": lambda **_: out["x_next"][:, 0]}, **inputs)
    assert np.isfinite(module(branches={"branch": lambda z: z}, **inputs)["x_next"]).all()  # an operand is fine
