"""fuse: which groups become kernels, in which order, and what stays as it was."""

from __future__ import annotations

import itertools

import factories
import networkx as nx
import pytest
import strategies
from factories import chain, program, stage
from hypothesis import given, settings
from hypothesis import strategies as st

import mhcgen
from mhcgen.errors import RefusedError
from mhcgen.ir import Program
from mhcgen.log import Decision
from mhcgen.passes.fuse import OPAQUE_KINDS, PRESETS, escaping_path, fuse, requested_groups
from mhcgen.plan import Options, Plan


def groups(made: Program, wish: str) -> list[tuple[str, ...]]:
    return [kernel.stages for kernel in fuse(Plan(made, Options(fuse=wish))).kernels]


def site(**options: object) -> Program:
    return mhcgen.build(scope="site", hidden=8, norm=True, **options)


CHAIN = program(*chain())


# ---- presets ----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("wish", "made", "expected"),
    [
        ("none", CHAIN, [("rowsq",), ("gates",), ("sinkhorn",), ("collapse",)]),
        ("seed", CHAIN, [("rowsq",), ("gates", "sinkhorn"), ("collapse",)]),
        ("pre", CHAIN, [("rowsq", "gates", "sinkhorn", "collapse")]),
        (
            "pre",
            mhcgen.build(hidden=8, projection="fma"),
            [("project", "rowsq", "gates", "sinkhorn", "collapse")],
        ),
        ("pre-norm", site(), [("rowsq", "gates", "sinkhorn", "collapse", "norm"), ("post",)]),
        (
            "pre-norm-quant",
            mhcgen.build(hidden=8, norm=True, quant="q8"),
            [("rowsq", "gates", "sinkhorn", "collapse", "norm", "quant")],
        ),
        (
            "boundary",
            mhcgen.build(hidden=8, scope="boundary", projection="fma"),
            [("post", "project", "rowsq", "gates", "sinkhorn", "collapse")],
        ),
    ],
)
def test_presets(wish: str, made: Program, expected: list[tuple[str, ...]]) -> None:
    assert groups(made, wish) == expected


def test_every_preset_has_a_meaning_and_is_tried() -> None:
    made = mhcgen.build(scope="trunk", hidden=8, norm=True, quant="q8")
    for wish, meaning in PRESETS.items():
        assert meaning
        if wish in ("site", "delayed"):  # this trunk's collapse waits for the gates of its own site
            with pytest.raises(RefusedError):
                groups(made, wish)
        else:
            assert groups(made, wish)


# ---- explicit groups --------------------------------------------------------------------------------
def test_groups_are_written_in_any_order_with_any_spaces() -> None:
    assert groups(CHAIN, " collapse + gates+rowsq ") == [("rowsq", "gates", "collapse"), ("sinkhorn",)]


def test_kernels_launch_in_an_order_that_respects_every_tensor() -> None:
    assert groups(CHAIN, "gates+collapse") == [("rowsq",), ("gates", "collapse"), ("sinkhorn",)]


def test_names_of_kernels_follow_from_their_stages() -> None:
    plan = fuse(Plan(CHAIN, Options(fuse="rowsq+gates")))
    assert [kernel.name for kernel in plan.kernels] == ["mhc_rowsq_gates", "mhc_sinkhorn", "mhc_collapse"]


def test_stages_that_share_nothing_may_be_fused() -> None:
    made = program(stage("mean", "a", {"x": "x1"}, {"y": "y1"}), stage("mean", "b", {"x": "x2"}, {"y": "y2"}))
    assert groups(made, "a+b") == [("a", "b")]


def test_an_opaque_stage_is_never_in_a_kernel() -> None:
    assert all("branch" not in group for group in groups(site(), "pre"))


def test_decisions_say_what_was_asked_for() -> None:
    plan = fuse(Plan(CHAIN, Options(fuse="gates+sinkhorn")))
    said = {entry.subject: entry.choice for entry in plan.log if isinstance(entry, Decision)}
    assert said == {
        "gates+sinkhorn": "one kernel",
        "rowsq": "a kernel of its own",
        "collapse": "a kernel of its own",
    }


# ---- convexity --------------------------------------------------------------------------------------
def convex(graph: nx.DiGraph, group: tuple[str, ...]) -> bool:
    """By definition: no stage outside lies on a path between two stages of the group."""
    outside = [name for name in graph if name not in group]
    return not any(
        any(nx.has_path(graph, a, name) for a in group) and any(nx.has_path(graph, name, b) for b in group)
        for name in outside
    )


@settings(max_examples=200)  # few random groups are not convex
@given(strategies.hand_built(), st.data())
def test_a_path_is_found_exactly_where_the_group_is_not_convex(made: Program, data: st.DataObject) -> None:
    names = [s.name for s in made.stages]
    group = tuple(data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True)))
    path = escaping_path(made, group)
    assert (path is None) == convex(made.graph, group)
    if path is not None:
        assert path[0] in group and path[-1] in group
        assert set(itertools.pairwise(path)) <= set(made.graph.edges)
        assert path[1] not in group


def test_the_witness_is_a_shortest_path() -> None:
    long = program(
        stage("expand", "a", {"e": "e"}, {"x": "x1"}),
        stage("mean", "b", {"x": "x1"}, {"y": "y1"}),
        stage("norm", "c", {"y": "y1"}, {"z": "z1"}),
        stage("expand", "d", {"e": "z1"}, {"x": "x2"}),
        stage("post", "e", {"x": "x2", "f": "y1"}),
    )
    assert escaping_path(long, ("a", "e")) == ["a", "b", "e"]


@given(strategies.programs(), st.data())
def test_legal_groups_are_accepted_as_they_are(made: Program, data: st.DataObject) -> None:
    wanted = data.draw(strategies.legal_groups(made))
    found = groups(made, strategies.wish(wanted))
    assert {frozenset(group) for group in found} == {frozenset(group) for group in wanted}
    seen: set[str] = {t.name for t in made.of_role("input", "parameter")}
    opaque = {t for s in made.stages_of_kind(*OPAQUE_KINDS) for t in s.writes}
    for group in found:
        stages = [made.stage(name) for name in group]
        seen |= {t for s in stages for t in s.writes}
        assert {t for s in stages for t in s.reads} <= seen | opaque


def test_fusing_twice_changes_nothing() -> None:
    plan = fuse(Plan(CHAIN, Options(fuse="pre")))
    assert fuse(plan).kernels == plan.kernels
    assert factories.program(*chain()) == plan.program


@pytest.mark.parametrize(
    ("wish", "reason"),
    [
        ("pre,", "pre is a preset, which stands alone: a comma parts groups of stages"),
        ("rowsq+pre", "pre is a preset, which stands alone: a comma parts groups of stages"),
        ("rowsq+gates,", "a name is missing: a comma parts groups of stages, a + the stages of one"),
        ("rowsq++gates", "a name is missing: a comma parts groups of stages, a + the stages of one"),
        ("median", "there is no stage or preset 'median'"),
        ("", "there is no stage or preset ''"),
    ],
)
def test_a_wish_that_does_not_parse_says_why(wish: str, reason: str) -> None:
    with pytest.raises(RefusedError) as caught:
        requested_groups(mhcgen.build(hidden=64), wish)
    assert caught.value.code == "F-UNKNOWN" and reason in str(caught.value)
