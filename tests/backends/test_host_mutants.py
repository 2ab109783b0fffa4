"""Every barrier of the test kernels matters: without it, or with a weaker one, race mode names the race."""

from __future__ import annotations

import pytest
from host_cases import KERNELS, Mutant, launch, mutants, signature, source

from mhcgen.backends.host import HostModule

MUTANTS = list(mutants())


def test_there_is_a_mutant_for_every_barrier() -> None:
    assert len(MUTANTS) == 29


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_race_mode_reports_the_missing_barrier(mutant: Mutant) -> None:
    file, ctypes = KERNELS[mutant.kernel]
    host = HostModule(mutant.text, [signature(mutant.kernel, **ctypes)], name=file, race=True)
    for threads, order in ((128, "ascending"), (128, "random"), (256, "descending")):
        _, report = launch(host, mutant.kernel, threads, order)
        races = [f for f in report.findings if f.kind == "race" and f.scope == mutant.scope]
        assert races, report.text
        assert any(f.buffer.startswith(("shared ", "dynamic shared")) for f in races)
        assert all(line > 0 for f in races for line in f.lines)
    if mutant.change == "weakened":
        assert all(f.scope != "same-warp" for f in report.findings), report.text


def test_a_named_barrier_of_one_warp_may_be_a_warp_barrier() -> None:
    """With 64 threads one warp owns all data: weakening is right, and nothing is reported."""
    checked = 0
    for mutant in MUTANTS:
        if mutant.kernel != "split_roles" or mutant.change != "weakened" or "sync_data" not in _line(mutant):
            continue
        host = HostModule(mutant.text, [signature("split_roles", **KERNELS["split_roles"][1])], race=True)
        made, report = launch(host, "split_roles", 64)
        assert report.ok, report.text
        made.assert_correct()
        checked += 1
    assert checked == 2


def _line(mutant: Mutant) -> str:
    return source(KERNELS[mutant.kernel][0]).split("\n")[mutant.line - 1]
