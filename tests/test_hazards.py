"""Hazards between steps, the weakest barrier for each, and what is bare once a barrier goes or weakens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import factories
import pytest
from factories import kernel, read, step, write

import mhcgen
from mhcgen.hazards import STRENGTH, classify, scope_between, walk_hazards, with_reasons
from mhcgen.log import Hazard
from mhcgen.plan import Access, Kernel, Loop, Node, Plan, Sync, edit_sync
from mhcgen.verify_plan import plan_violations


def barriers(made: Kernel, at_least: str = "warp") -> list[tuple[str, str, list[str]]]:
    """(scope, team, hazards) of the barriers that a kernel gets."""
    walked = walk_hazards(made, made.body, insert=True, at_least=at_least)
    done = replace(made, body=with_reasons(made, walked.body))
    assert walk_hazards(done, done.body, insert=False).bare == ()
    return [(s.scope, s.team, [str(h) for h in s.because]) for s in done.syncs()]


# ---- kinds ------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("first", "second", "kind"),
    [
        (write("b"), read("b"), "RAW"),
        (read("b"), write("b"), "WAR"),
        (write("b"), write("b"), "WAW"),
        (read("b"), read("b"), None),
        (write("a"), read("b"), None),
        (write("b", own=True), read("b", own=True), None),
        (write("b", own=True), read("b"), "RAW"),
        (write("b"), read("b", own=True), "RAW"),
    ],
)
def test_kinds(first: Access, second: Access, kind: str | None) -> None:
    assert classify(first, second) == kind


@pytest.mark.parametrize(
    ("first", "second", "kind"), [(write, read, "RAW"), (read, write, "WAR"), (write, write, "WAW")]
)
def test_each_kind_gets_a_barrier(first: Any, second: Any, kind: str) -> None:
    made = kernel(step("a", "mix", first("s")), step("b", "mix", second("s")))
    assert barriers(made) == [("warp", "mix", [f"{kind} s: a -> b"])]


def test_no_barrier_where_none_is_needed() -> None:
    made = kernel(
        step("a", "mix", read("s"), write("t", own=True)),
        step("b", "mix", read("s"), read("t", own=True)),
        step("c", "data", read("s")),
    )
    assert barriers(made) == []


# ---- scopes -----------------------------------------------------------------------------------------
def test_a_warp_covers_the_mix_warp_alone() -> None:
    assert scope_between(kernel(), "mix", "mix") == ("warp", "mix")


def test_the_data_warps_have_a_barrier_of_their_own_beside_a_mix_warp() -> None:
    assert scope_between(kernel(), "data", "data") == ("data", "data")
    together = kernel(data_warps=2, mix_warp=0, warps=2)
    assert scope_between(together, "data", "data") == ("block", "all")


def test_across_teams_takes_the_block() -> None:
    assert scope_between(kernel(), "data", "mix") == ("block", "all")
    assert scope_between(kernel(), "mix", "data") == ("block", "all")
    assert scope_between(kernel(), "all", "mix") == ("block", "all")


def test_one_warp_takes_a_warp_barrier_whichever_team_it_is() -> None:
    alone = kernel(data_warps=1, mix_warp=0, warps=1)
    assert scope_between(alone, "data", "mix") == scope_between(alone, "mix", "data") == ("warp", "all")
    assert scope_between(kernel(data_warps=1, mix_warp=1, warps=2), "data", "data")[0] == "warp"


def test_in_one_warp_one_barrier_orders_both_teams() -> None:
    made = kernel(
        step("a", "data", write("s"), write("t")),
        step("b", "mix", read("s")),
        step("c", "data", read("t")),
        data_warps=1, mix_warp=0, warps=1,
    )  # fmt: skip
    assert [s for s, _, _ in barriers(made)] == ["warp"]


def test_the_strongest_of_several_hazards_decides() -> None:
    made = kernel(
        step("a", "data", write("s"), write("t")),
        step("b", "mix", write("u")),
        step("c", "mix", read("s"), read("u")),
    )
    assert barriers(made) == [("block", "all", ["RAW s: a -> c", "RAW u: b -> c"])]


def test_a_barrier_covers_what_comes_later_too() -> None:
    made = kernel(step("a", "data", write("s"), write("t")), step("b", "mix", read("s")), step("c", "mix", read("t")))
    assert barriers(made) == [("block", "all", ["RAW s: a -> b", "RAW t: a -> c"])]


def test_a_weak_barrier_does_not_cover_a_wider_hazard() -> None:
    made = kernel(step("a", "mix", write("s"), write("t")), step("b", "mix", read("s")), step("c", "data", read("t")))
    assert barriers(made) == [("warp", "mix", ["RAW s: a -> b"]), ("block", "all", ["RAW t: a -> c"])]


def test_block_barriers_can_be_asked_for() -> None:
    made = kernel(step("a", "mix", write("s")), step("b", "mix", read("s")))
    assert barriers(made, at_least="block") == [("block", "all", ["RAW s: a -> b"])]


# ---- loops ------------------------------------------------------------------------------------------
def test_a_loop_waits_for_its_own_last_iteration() -> None:
    made = kernel(Loop("l", 3, (step("a", "mix", read("s")), step("b", "mix", write("s")))))
    assert barriers(made) == [
        ("warp", "mix", ["RAW s: b -> a (next iteration)"]),
        ("warp", "mix", ["WAR s: a -> b"]),
    ]


def test_a_step_may_wait_for_itself() -> None:
    made = kernel(Loop("l", 3, (step("a", "mix", write("s")),)))
    assert barriers(made) == [("warp", "mix", ["WAW s: a -> a (next iteration)"])]


def test_what_came_before_a_loop_is_waited_for_once_inside() -> None:
    made = kernel(
        step("before", "data", write("s")),
        Loop("l", 3, (step("a", "mix", read("s")), step("b", "mix", write("t")))),
        step("after", "mix", read("t")),
    )
    assert barriers(made) == [
        ("block", "all", ["RAW s: before -> a", "WAW t: b -> b (next iteration)"]),
        ("warp", "mix", ["RAW t: b -> after"]),
    ]


def test_hazards_after_a_loop_are_not_carried() -> None:
    made = kernel(Loop("l", 2, (step("a", "mix", write("s")),)), step("b", "data", read("s")))
    assert barriers(made)[-1] == ("block", "all", ["RAW s: a -> b"])


def test_without_barriers_a_loop_reports_both_directions() -> None:
    made = kernel(Loop("l", 2, (step("a", "mix", read("s")), step("b", "mix", write("s")))))
    assert {str(h) for h in walk_hazards(made, made.body, insert=False).bare} == {
        "WAR s: a -> b",
        "WAR s: a -> b (next iteration)",
        "RAW s: b -> a (next iteration)",
        "WAW s: b -> b (next iteration)",
    }


# ---- reasons ----------------------------------------------------------------------------------------
def test_a_barrier_that_orders_nothing_is_dropped() -> None:
    spare = Sync("block", "all", (Hazard("RAW", "s", "a", "b", "block"),))
    made = kernel(step("a", "mix", write("s")), step("b", "mix", read("t")), spare)
    assert not any(isinstance(node, Sync) for node in with_reasons(made, made.body))


def test_inserting_twice_changes_nothing() -> None:
    made = kernel(
        step("a", "data", write("s")),
        Loop("l", 3, (step("b", "mix", read("s"), write("t")), step("c", "mix", read("t"), write("s")))),
    )
    once = with_reasons(made, walk_hazards(made, made.body, insert=True).body)
    again = with_reasons(made, walk_hazards(made, once, insert=True).body)
    assert again == once


def test_edit_sync_counts_through_loops() -> None:
    syncs = [Sync("warp", "mix", (Hazard("RAW", f"s{i}", "a", "b", "warp"),)) for i in range(3)]
    body: tuple[Node, ...] = (syncs[0], Loop("l", 2, (syncs[1],)), syncs[2])
    for index in range(3):
        kept = list(kernel(*edit_sync(body, index, lambda _: None)).syncs())
        assert kept == [s for s in syncs if s is not syncs[index]]
    changed = edit_sync(body, 1, lambda s: replace(s, scope="block"))
    assert [s.scope for s in kernel(*changed).syncs()] == ["warp", "block", "warp"]


# ---- real plans -------------------------------------------------------------------------------------
def arms() -> Iterator[tuple[str, Plan]]:
    """Plans whose barriers differ: placements, where the mix warp is, block barriers, early stop, quantisation."""
    chain = {"norm": True, "quant": "q8", "projection": "fma", "early_stop": True, "iterations_out": True}
    for streams, hidden in ((4, 257), (8, 520)):
        for name, build, options in (
            ("shared", {}, {"placement": "shared"}),
            ("lanes", {}, {}),
            ("mix in a data warp", {}, {"placement": "shared", "mix_warp": "shared", "threads": 64}),
            ("block", {}, {"sync": "block"}),
            ("streamed", {}, {"placement": "shared", "slab": "global"}),
            ("plain boundary", {"scope": "boundary", "quant": "none", "early_stop": False}, {"fuse": "boundary"}),
        ):
            program = mhcgen.build(streams=streams, hidden=hidden, **{**chain, **build})
            plan = mhcgen.compile(program, **{"fuse": "pre-norm-quant", "cluster": 1, **options})
            yield f"{name}, n = {streams}", plan
    program = mhcgen.build(hidden=1024, projection="fma", norm=True)
    yield "cluster", mhcgen.compile(program, "pre-norm", cluster=4)


ARMS = dict(arms())


def violations(plan: Plan, index: int, body: tuple[Node, ...]) -> set[str]:
    """What the verifier says of a Plan with another body, without the kernel's name."""
    name = plan.kernels[index].name
    said = plan_violations(factories.with_body(plan, index, body))
    bare = [text for text in said if text.startswith("no_hazard_is_bare")]
    return {text.removeprefix(f"no_hazard_is_bare: {name}: ") for text in bare}


def sentence(hazard: Hazard) -> str:
    what = "wait for what is sent" if hazard.scope == "arrival" else f"{hazard.scope} barrier"
    return f"{hazard} needs a {what} and has none"


@pytest.mark.parametrize("arm", ARMS)
def test_a_dropped_barrier_is_named_by_exactly_its_hazards(arm: str) -> None:
    plan, tried = ARMS[arm], 0
    for index, made in enumerate(plan.kernels):
        for number, sync in enumerate(made.syncs()):
            body = edit_sync(made.body, number, lambda _: None)
            assert violations(plan, index, body) == {sentence(h) for h in sync.because}
            tried += 1
    assert tried >= 3


@pytest.mark.parametrize("arm", ARMS)
def test_a_weakened_barrier_is_named_by_the_hazards_it_no_longer_covers(arm: str) -> None:
    plan, tried = ARMS[arm], 0
    for index, made in enumerate(plan.kernels):
        for number, sync in enumerate(made.syncs()):
            needed = max(STRENGTH[h.scope] for h in sync.because)
            for scope, team in (("warp", "mix"), ("warp", "data"), ("data", "data"), ("block", "all")):
                if STRENGTH[scope] >= needed or (scope == "data" and not made.own_mix_warp):
                    continue
                body = edit_sync(made.body, number, lambda s, w=scope, t=team: replace(s, scope=w, team=t))  # type: ignore[misc]
                said = violations(plan, index, body)
                assert {sentence(h) for h in sync.because if STRENGTH[h.scope] > STRENGTH[scope]} <= said
                assert said <= {sentence(h) for h in sync.because}
                tried += 1
    assert tried >= 2


@pytest.mark.parametrize("arm", ARMS)
def test_a_strengthened_barrier_is_fine(arm: str) -> None:
    plan = ARMS[arm]
    for index, made in enumerate(plan.kernels):
        for number, sync in enumerate(made.syncs()):
            if sync.scope == "arrival":
                continue  # no barrier of a block is stronger
            body = edit_sync(made.body, number, lambda s: replace(s, scope="block", team="all"))
            assert violations(plan, index, body) == set()
