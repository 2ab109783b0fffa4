"""Drawings: what is in them, in each language, the same in every process, and nothing on top of anything else."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from typing import Any

import pytest

from mhcgen.build import build
from mhcgen.errors import RefusedError, UsageError
from mhcgen.graph import LANGUAGES, draw, drawing_of
from mhcgen.graph_svg import Box, _Layout
from mhcgen.ir import Program
from mhcgen.log import Refusal
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options, Plan
from mhcgen.request import request

CASES: dict[str, dict[str, Any]] = {
    "unfused": {},
    "pre": {"fuse": "pre"},
    "groups": {"fuse": "gates+sinkhorn"},
    "boundary": {"fuse": "boundary"},
    "readers": {"fuse": "rowsq+gates", "extra": "engram,tap"},
    "site": {"scope": "site", "fuse": "pre"},
    "trunk": {"scope": "trunk", "fuse": "boundary", "layers": 2},
    "cluster": {"fuse": "pre", "projection": "fma", "cluster": 4, "hidden": 1024},
}
SVG = "{http://www.w3.org/2000/svg}"


def planned(case: str) -> Plan:
    from mhcgen.build import build_config

    config, options = request(**{"hidden": 64, **CASES[case]})
    return run_pipeline(build_config(config), options)


def refusal_of(program: Program, fuse: str) -> Refusal:
    with pytest.raises(RefusedError) as caught:
        run_pipeline(program, Options(fuse=fuse))
    assert isinstance(caught.value.refusal, Refusal)
    return caught.value.refusal


@pytest.mark.parametrize("case", CASES)
def test_every_stage_tensor_and_edge_is_drawn(case: str) -> None:
    plan = planned(case)
    program = plan.program
    drawing = drawing_of(program, plan.kernels)
    names = {node.name for node in drawing.nodes}
    assert names >= {stage.name for stage in program.stages}
    ends = [t.name for t in program.tensors if t.role in ("input", "parameter", "result")]
    assert names == {stage.name for stage in program.stages} | {f"tensor:{name}" for name in ends}
    edges = {(e.source, e.target, e.tensor) for e in drawing.edges}
    for writer, reader in program.graph.edges:
        assert any((writer, reader) == (source, target) for source, target, _ in edges)
    assert [unit.stages for unit in drawing.units if unit.title] and {
        unit.title: unit.stages for unit in drawing.units if unit.title
    } == {kernel.name: kernel.stages for kernel in plan.kernels}
    seen: set[str] = set()
    for unit in drawing.units:
        for stage in unit.stages:
            before = {a for a, b in program.graph.edges if b == stage}
            assert before <= seen | set(unit.stages)
        seen |= set(unit.stages)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("language", LANGUAGES)
def test_a_drawing_is_a_function_of_the_plan(case: str, language: str) -> None:
    first, second = planned(case), planned(case)
    text = draw(first.program, language, kernels=first.kernels)
    assert text == draw(second.program, language, kernels=second.kernels)
    assert text.isascii()
    for kernel in first.kernels:
        assert kernel.name in text
    for stage in first.program.stages:
        assert stage.name in text


def test_opaque_stages_look_different() -> None:
    program = build(scope="site", hidden=8)
    assert re.search(r'"branch" \[label="branch", shape=box, style="filled,dashed"', draw(program, "dot"))
    mermaid = draw(program, "mermaid")
    number = re.search(r'(n\d+)\[\["branch"\]\]', mermaid)
    assert number is not None
    assert f"class {number[1]} opaque" in mermaid
    assert "stroke-dasharray" in draw(program, "svg")
    assert "stroke-dasharray" not in draw(build(hidden=8), "svg")


def test_the_witness_of_a_refusal_is_marked() -> None:
    program = build(scope="site", hidden=8)
    refusal = refusal_of(program, "site")
    marked = {(e.source, e.target) for e in drawing_of(program, refusal=refusal).edges if e.witness}
    assert marked == {("collapse", "branch"), ("branch", "post")}
    nodes = {node.name for node in drawing_of(program, refusal=refusal).nodes if node.witness}
    assert nodes == {"collapse", "branch", "post"}
    assert draw(program, "dot", refusal=refusal).count("#cc0000") == 5
    assert draw(program, "mermaid", refusal=refusal).count("==>") == 2
    assert 'stroke="#cc0000"' in draw(program, "svg", refusal=refusal)
    for language in LANGUAGES:
        assert draw(program, language, refusal=replace(refusal, witness=None)) == draw(program, language)


@pytest.mark.parametrize("case", CASES)
def test_every_barrier_is_on_an_edge_or_inside_a_stage(case: str) -> None:
    plan = planned(case)
    drawing = drawing_of(plan.program, plan.kernels)
    shown = {(edge.source, edge.target): edge.barrier for edge in drawing.edges if edge.barrier}
    inside = {node.name for node in drawing.nodes if node.label[-1].endswith((" barrier inside)", " sent inside)"))}
    for kernel in plan.kernels:
        stage = {step.name: step.stage for step in kernel.steps()}
        for sync in kernel.syncs():
            ends = [(stage[h.first], stage[h.second]) for h in sync.because if not h.carried]
            assert not ends or any(end in shown or (end[0] == end[1] and end[0] in inside) for end in ends)
    assert not drawing_of(plan.program).edges or not any(e.barrier for e in drawing_of(plan.program).edges)


def test_a_barrier_is_shown_in_each_language() -> None:
    plan = planned("pre")
    edge = next(e for e in drawing_of(plan.program, plan.kernels).edges if e.barrier)
    assert (edge.source, edge.target, edge.words) == ("gates", "collapse", ("pre", "block barrier"))
    assert 'label="pre\\nblock barrier", color="#1f5fbf"' in draw(plan.program, "dot", kernels=plan.kernels)
    assert "pre<br/>block barrier" in draw(plan.program, "mermaid", kernels=plan.kernels)
    svg = draw(plan.program, "svg", kernels=plan.kernels)
    assert "block barrier</text>" in svg and 'stroke="#1f5fbf"' in svg


def test_a_wait_for_what_other_blocks_send_is_shown() -> None:
    plan = planned("cluster")
    edges = {(edge.source, edge.target): edge.barrier for edge in drawing_of(plan.program, plan.kernels).edges}
    assert edges["gates", "collapse"] == edges["rowsq", "gates"] == "wait for what is sent"
    for language in LANGUAGES:
        assert "wait for what is sent" in draw(plan.program, language, kernels=plan.kernels)


def test_text_is_escaped() -> None:
    program = build(hidden=8)
    odd = 'a"<b>&\\c'
    stages = tuple(replace(s, name=odd) if s.name == "collapse" else s for s in program.stages)
    program = replace(program, stages=stages)
    assert 'a\\"<b>&\\\\c' in draw(program, "dot")
    assert "a&quot;&lt;b&gt;&amp;\\c" in draw(program, "mermaid")
    words = [element.text for element in ET.fromstring(draw(program, "svg")).iter(f"{SVG}text")]
    assert odd in words


def test_dot_is_balanced_and_its_nodes_are_declared() -> None:
    plan = planned("boundary")
    text = draw(plan.program, "dot", kernels=plan.kernels)
    assert text.count("{") == text.count("}")
    declared = set(re.findall(r'^ +"([^"]+)" \[label', text, re.M))
    for source, target in re.findall(r'"([^"]+)" -> "([^"]+)"', text):
        assert {source, target} <= declared


def _apart(a: Box, b: Box) -> bool:
    return a.right <= b.x or b.right <= a.x or a.bottom <= b.y or b.bottom <= a.y


@pytest.mark.parametrize("case", CASES)
def test_svg_is_well_formed_and_no_box_covers_another(case: str) -> None:
    plan = planned(case)
    layout = _Layout(drawing_of(plan.program, plan.kernels))
    root = ET.fromstring(layout.text())
    assert root.tag == f"{SVG}svg"
    assert {float(root.get("width", "0")), float(root.get("height", "0"))}.isdisjoint({0.0})
    for (a, box_a), (b, box_b) in combinations(layout.boxes.items(), 2):
        assert _apart(box_a, box_b), (a, b)
    for frame, unit in zip(layout.frames, layout.units, strict=True):
        for name, box in layout.boxes.items():
            inside = frame.x <= box.x and box.right <= frame.right and frame.y <= box.y and box.bottom <= frame.bottom
            assert inside if name in unit.stages else _apart(frame, box), name
    for box in layout.boxes.values():
        assert box.x >= 0
        assert box.y >= 0
        assert box.right <= layout.width + 1
        assert box.bottom <= layout.height + 1


@pytest.mark.parametrize("case", CASES)
def test_no_routed_edge_crosses_a_box(case: str) -> None:
    """Edges between neighbours are curves in the gap between them; the others keep to gaps, tracks and lanes."""
    plan = planned(case)
    layout = _Layout(drawing_of(plan.program, plan.kernels))
    for edge in layout.drawing.edges:
        if layout._direct(edge):
            continue
        points = layout._route(edge, layout.boxes[edge.source], layout.boxes[edge.target])
        for (x1, y1), (x2, y2) in pairwise(points):
            assert x1 == x2 or y1 == y2
            line = Box(min(x1, x2), min(y1, y2), abs(x2 - x1), abs(y2 - y1))
            for name, box in layout.boxes.items():
                if name not in (edge.source, edge.target):
                    assert _apart(line, box), (edge, name)


def test_unknown_languages_are_refused() -> None:
    with pytest.raises(UsageError) as caught:
        draw(build(hidden=8), "png")
    assert caught.value.code == "U-GRAPH"
