"""Medians of stamps, phase by phase, for both teams."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from mhcgen.bench.cases import case
from mhcgen.bench.measure import Bench
from mhcgen.bench.phases import measure_phases, phases_of
from mhcgen.plan import Kernel

#: data has three stamps and two phases; mix two stamps and one phase.
KERNEL = Kernel("k", ("rowsq", "sinkhorn", "collapse"), phases=("data: rowsq", "data: collapse", "mix: sinkhorn"))


def stamps(*tokens: list[int]) -> np.ndarray:
    """Cycles as given, nanoseconds half of them, on a clock that starts anywhere."""
    cycles = np.array(tokens, np.int64)
    return np.stack([7_000 + cycles // 2, 1_000_000 + cycles], axis=2)


def test_a_phase_is_from_one_stamp_of_its_team_to_the_next() -> None:
    table = phases_of(KERNEL, [stamps([0, 100, 400, 20, 220])])
    assert [(p.team, p.stage, p.begin, p.cycles, p.ns) for p in table.phases] == [
        ("data", "rowsq", 0, 100, 50),
        ("data", "collapse", 100, 300, 150),
        ("mix", "sinkhorn", 20, 200, 100),
    ]
    assert (table.cycles, table.ns, table.samples) == (400, 200, 1)


def test_shares_are_of_the_team() -> None:
    table = phases_of(KERNEL, [stamps([0, 100, 400, 20, 220])])
    assert [p.share for p in table.phases] == [0.25, 0.75, 1.0]
    assert phases_of(KERNEL, [stamps([0, 0, 0, 0, 0])]).phases[0].share == 0.0


def test_medians_are_over_tokens_and_launches() -> None:
    first = stamps([0, 100, 200, 0, 10], [0, 110, 200, 0, 10])
    second = stamps([0, 120, 200, 0, 10], [0, 900, 950, 0, 10])
    table = phases_of(KERNEL, [first, second])
    assert table.samples == 4
    assert table.phases[0].cycles == 115


def test_a_table_prints_and_goes_to_json() -> None:
    table = phases_of(KERNEL, [stamps([0, 100, 400, 20, 220])])
    assert table.lines()[0] == ("team", "phase", "begin", "cycles", "ns", "share")
    assert table.lines()[2] == ("data", "collapse", "100", "300", "150", "75.0 %")
    assert table.as_dict()["phases"][2]["stage"] == "sinkhorn"


@pytest.mark.parametrize("what", ["finish", "pre"])
def test_stamped_kernels_have_both_teams_and_the_same_bits(bench: Bench, what: str) -> None:
    one = case(what, {"mix_warp": "own", "slab": "registers"}, dtype="bf16", hidden=64, streams=2, iters=2)
    (table,) = measure_phases(bench, one, tokens=2, launches=3)
    assert table.samples == 2 * 3
    assert {p.team for p in table.phases} == {"data", "mix"}
    assert {"rowsq", "gates", "sinkhorn", "collapse"} <= {p.stage for p in table.phases}
    assert all(p.cycles >= 0 and p.begin >= 0 for p in table.phases)
    for team in ("data", "mix"):
        assert sum(p.share for p in table.phases if p.team == team) == pytest.approx(1.0)


def test_every_kernel_of_a_plan_has_its_table(bench: Bench) -> None:
    one = case("finish", {"fuse": "none"}, hidden=64, streams=2, iters=2)
    tables = measure_phases(bench, replace(one, note="unfused"), launches=1)
    assert [table.kernel for table in tables] == ["mhc_rowsq", "mhc_gates", "mhc_sinkhorn", "mhc_collapse"]
