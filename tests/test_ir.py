"""The Program is a value: frozen, comparable, with a frozen graph as its view."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace

import factories
import networkx as nx
import pytest

from mhcgen.arithmetic import Arithmetic
from mhcgen.build import build
from mhcgen.errors import UsageError
from mhcgen.ir import Program, Tensor, make_stage


def test_values_are_frozen_and_comparable() -> None:
    made = factories.program()
    assert made == factories.program()
    assert hash(made.tensors) == hash(factories.program().tensors)
    for value in (made, made.tensors[0], made.stages[0], made.arithmetic):
        with pytest.raises(FrozenInstanceError):
            value.name = "other"  # type: ignore[union-attr]


def test_a_stage_is_the_same_in_any_order_of_its_attributes() -> None:
    one = make_stage("s", "rowsq", {"x": "x"}, {"y": "y"}, {"eps": 1.0, "acc": "fp64"})
    two = make_stage("s", "rowsq", {"x": "x"}, {"y": "y"}, {"acc": "fp64", "eps": 1.0})
    assert one == two
    assert one.attrs == (("acc", "fp64"), ("eps", 1.0))


def test_a_stage_answers_by_slot() -> None:
    stage = factories.stage("collapse", operands={"x": "streams"}, results={"y": "out"})
    assert (stage.operand("x"), stage.operand("pre"), stage.result("y")) == ("streams", "pre", "out")
    assert (stage.reads, stage.writes) == (("streams", "pre"), ("out",))
    assert factories.stage("rowsq", eps=0.5).attr("eps") == 0.5
    for ask in (stage.operand, stage.result, stage.attr):
        with pytest.raises(KeyError):
            ask("nothing")


def test_shapes_and_dims() -> None:
    made = factories.program(n=3, hidden=7)
    assert made.shape("x", 5) == (5, 3, 7)
    assert made.shape("y", 0) == (0, 7)
    assert (made.dim("n"), made.dim(4)) == (3, 4)
    with pytest.raises(KeyError):
        made.dim("T")
    with pytest.raises(KeyError):
        made.tensor("nothing")
    with pytest.raises(KeyError):
        made.stage("nothing")


def test_writers_readers_and_roles() -> None:
    made = factories.program(*factories.chain())
    assert made.writers["comb"] == "sinkhorn"
    assert made.readers["x"] == ("rowsq", "collapse")
    assert [t.name for t in made.of_role("result")] == ["post", "comb", "y"]
    assert [t.name for t in made.of_role("parameter")] == ["scale", "base"]
    assert [s.name for s in made.stages_of_kind("collapse", "gates")] == ["gates", "collapse"]


def test_a_tensor_read_twice_by_one_stage_has_it_as_reader_once() -> None:
    twice = factories.stage("post", operands={"post": "g", "comb": "comb", "f": "f", "x": "x"})
    again = replace(twice, operands=(("x", "x"), ("f", "f"), ("post", "g"), ("comb", "g")))
    made = factories.program(twice)
    assert replace(made, stages=(again,)).readers["g"] == ("post",)


def test_the_graph_is_a_frozen_view_of_the_stages() -> None:
    made = factories.program(*factories.chain())
    assert set(made.graph.edges) == {("rowsq", "gates"), ("gates", "sinkhorn"), ("gates", "collapse")}
    assert made.graph.edges["gates", "sinkhorn"]["tensor"] == "logits"
    assert made.graph is made.graph
    with pytest.raises(nx.NetworkXError):
        made.graph.add_edge("collapse", "rowsq")


def test_with_stages_leaves_the_original_alone() -> None:
    made = factories.program(*factories.chain())
    cut = made.with_stages(made.stages[:2])
    assert [s.name for s in cut.stages] == ["rowsq", "gates"]
    assert cut.tensors == made.tensors
    assert len(made.stages) == 4
    assert made.with_stages(made.stages, made.tensors[:1]).tensors == made.tensors[:1]


CHANGES: dict[str, Callable[[Program], Program]] = {
    "a size": lambda p: replace(p, dims=factories.program(*factories.chain(), n=3).dims),
    "a dtype": lambda p: replace(
        p, tensors=tuple(replace(t, dtype="bf16") if t.name == "x" else t for t in p.tensors)
    ),
    "an attribute": lambda p: p.with_stages(
        (factories.stage("rowsq", eps=1e-5), *p.stages[1:]),
    ),
    "the function set": lambda p: replace(p, arithmetic=Arithmetic(functions="fast")),
    "the accumulator": lambda p: replace(p, arithmetic=Arithmetic(sumsq="fp32")),
    "the projection": lambda p: replace(p, arithmetic=Arithmetic(projection="fma")),
    "flushed subnormals": lambda p: replace(p, arithmetic=Arithmetic(flush_subnormals=True)),
    "the class version": lambda p: replace(p, arithmetic=Arithmetic(version=99)),
    "a stage": lambda p: p.with_stages(p.stages[:-1]),
    "an operand": lambda p: p.with_stages(
        (*p.stages[:-1], factories.stage("collapse", operands={"pre": "post"})),
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_numeric_class_sees(change: str) -> None:
    made = factories.program(*factories.chain())
    changed = CHANGES[change](made)
    assert changed.numeric_class.digest != made.numeric_class.digest


def test_the_numeric_class_is_blind_to_where_a_program_came_from() -> None:
    made = build(hidden=64)
    renamed = replace(made, origin="elsewhere", model="other", scope="custom")
    assert renamed.numeric_class == made.numeric_class
    assert str(made.numeric_class).startswith("ieee-1-")


def test_arithmetic_refuses_unknown_words() -> None:
    for field in ("functions", "sumsq", "projection"):
        with pytest.raises(UsageError, match=f"{field} must be one of") as caught:
            Arithmetic(**{field: "guess"})
        assert caught.value.code == "U-CLASS"


def test_tensors_of_one_shape_differ_by_name() -> None:
    assert Tensor("a", ("T",), "fp32", "input") != Tensor("b", ("T",), "fp32", "input")
