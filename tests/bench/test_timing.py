"""Medians, counts and rotation."""

from __future__ import annotations

import pytest

from mhcgen.bench import timing
from mhcgen.bench.device import Dry, ticking


def test_a_timing_is_the_median_and_the_spread_of_its_runs() -> None:
    taken = timing.summarise(iter([3.0, 1.0, 2.0, 9.0, 2.5]))
    assert (taken.median, taken.low, taken.high) == (2.5, 1.0, 9.0)
    assert taken.runs == (3.0, 1.0, 2.0, 9.0, 2.5)
    assert taken.as_dict() == {"us": 2.5, "low": 1.0, "high": 9.0}


def test_more_tokens_are_timed_fewer_times() -> None:
    work = [count * replays for count, replays in map(timing.counts_for, (1, 64, 512, 4096, 16384))]
    assert work == sorted(work, reverse=True)
    assert all(replays >= 8 for _, replays in map(timing.counts_for, (1, 1 << 20)))


@pytest.mark.parametrize(("nbytes", "sets"), [(1, 64), (4 << 20, 64), (32 << 20, 8), (256 << 20, 1), (1 << 40, 1)])
def test_inputs_rotate_over_several_times_the_l2(nbytes: int, sets: int) -> None:
    assert timing.sets_for(nbytes) == sets


@pytest.mark.parametrize("kernels", [1, 2, 3, 4, 7, 900, 5000])
def test_queued_calls_fit_the_queue_of_a_stream(kernels: int) -> None:
    calls = timing.queued_calls(kernels)
    assert 1 <= calls <= timing.BACK_TO_BACK
    assert calls * kernels <= timing.QUEUE or calls == 1
    assert timing.queued_calls(1) == timing.BACK_TO_BACK


def test_a_dry_clock_measures_nothing_and_says_the_same_every_time() -> None:
    calls: list[int] = []
    first, second = (Dry(ticking(2.0)).graph(calls.append, count=32, replays=20) for _ in range(2))
    assert first == second
    assert first.median == 2.0
    assert calls == [0, 1, 0, 1]
