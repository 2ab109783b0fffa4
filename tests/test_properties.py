"""Random Programs, random legal groups, random schedules: the same bits, and within bounds of the reference."""

from __future__ import annotations

from typing import Any

import factories
import pytest
import strategies
from differential import Ran, beyond_bounds, differing
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

import mhcgen
from mhcgen.errors import RefusedError
from mhcgen.inputs import DISCRIMINATING, discriminating
from mhcgen.ir import Program
from mhcgen.log import CATALOGUE
from mhcgen.plan import Plan

ORDERS = st.sampled_from(["ascending", "descending", "random", "warp-greedy"])


def scheduled(made: Program, data: st.DataObject) -> Plan | None:
    """A random legal schedule; None where the random options are refused with a code that may be."""
    groups = data.draw(strategies.legal_groups(made))
    options = data.draw(strategies.schedules())
    try:
        return mhcgen.compile(made, strategies.wish(groups), **options)
    except RefusedError as refused:
        assert refused.code in CATALOGUE
        # Legal groups are never refused by fuse, and without wishes nothing is refused but shared memory.
        assert not refused.code.startswith("F-"), refused
        event(refused.code)
        return None


def agree(plan: Plan, inputs: dict[str, Any], tokens: int, **options: Any) -> None:
    """The Plan against the unfused emission, and that against the reference."""
    unfused = mhcgen.compile(plan.program, "none")
    base = Ran(unfused, inputs, tokens)
    assert beyond_bounds(unfused, inputs, base) == []
    ran = Ran(plan, inputs, tokens, **options)
    assert differing(base.results, ran.results) == []
    # Kernels that wait for no opaque stage may run before those that do.
    wanted = [kernel.name for kernel in plan.kernels if tokens > 0 or kernel.grid == "once"]
    assert sorted(launch.kernel for launch in ran.launches) == sorted(wanted)


@given(strategies.programs(), st.data(), strategies.TOKENS, st.integers(0, 2**31), ORDERS)
def test_no_schedule_changes_a_bit(made: Program, data: st.DataObject, tokens: int, seed: int, order: str) -> None:
    plan = scheduled(made, data)
    if plan is not None:
        agree(plan, factories.inputs(made, tokens, seed), tokens, order=order, seed=seed)


@given(strategies.built(), st.data(), st.integers(1, 5), st.sampled_from(sorted(DISCRIMINATING)))
def test_discriminating_inputs_change_nothing_either(
    made: Program, data: st.DataObject, tokens: int, kind: str
) -> None:
    inputs = discriminating(made, tokens, kind)
    plan = scheduled(made, data)
    if inputs is not None and plan is not None:
        agree(plan, dict(inputs), tokens)


@given(strategies.programs(), st.data(), st.integers(1, 3), st.integers(0, 99), ORDERS)
@settings(suppress_health_check=list(HealthCheck))
def test_no_schedule_has_a_race(made: Program, data: st.DataObject, tokens: int, seed: int, order: str) -> None:
    plan = scheduled(made, data)
    if plan is not None:
        Ran(plan, factories.inputs(made, tokens, seed), tokens, race=True, order=order, seed=seed)


@given(strategies.programs(), st.data())
def test_a_token_does_not_depend_on_its_neighbours(made: Program, data: st.DataObject) -> None:
    plan = scheduled(made, data)
    if plan is None:
        return
    inputs = factories.inputs(made, 5)
    whole = Ran(plan, inputs, 5).results
    token = data.draw(st.integers(0, 4))
    per_token = {t.name for t in made.tensors if "T" in t.shape}

    def row(arrays: dict[str, Any]) -> dict[str, Any]:
        return {k: v[token : token + 1].copy() if k in per_token else v for k, v in arrays.items()}

    assert differing(Ran(plan, row(inputs), 1).results, row(whole)) == []


@given(strategies.programs())
def test_schedules_left_to_the_passes_are_never_refused(made: Program) -> None:
    for fuse in ("none", "+".join(s.name for s in made.stages if s.kind in ("rowsq", "gates")) or "none"):
        try:
            plan = mhcgen.compile(made, fuse)
        except RefusedError as refused:
            assert refused.code == "F-ESCAPE" and fuse != "none"
            continue
        assert plan.source


@pytest.mark.parametrize("threads", [32, 64, 256, 1024])
def test_the_bits_do_not_depend_on_the_block(threads: int) -> None:
    made = mhcgen.build(streams=3, hidden=777, norm=True)
    inputs = factories.inputs(made, 2)
    options: dict[str, Any] = {"threads": threads, "mix_warp": "shared"}
    agree(mhcgen.compile(made, "pre-norm", **options), inputs, 2)
