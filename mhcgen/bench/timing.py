"""How a launch is timed: many in one captured graph, replayed between events; medians.

A graph of `count` launches is replayed; the time of a replay over `count` is the time of one launch with the
launch gap of graphs included, which is what serving pays. Inputs rotate over several sets, so that a launch does
not find its operands in the L2 that the one before it filled.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Launch = Callable[[int], Any]

#: An H200 has 60 MB of L2; rotating over this much makes each launch read from memory.
ROTATION_BYTES = 256 << 20
MAX_SETS = 64


@dataclass(frozen=True)
class Timing:
    """Times of one launch, microseconds.

    Args:
        median, low, high: over the replays.
        runs: every replay's time per launch, in the order taken.
    """

    median: float
    low: float
    high: float
    runs: tuple[float, ...]


def summarise(times: list[float]) -> Timing:
    """A Timing from microseconds per launch."""
    return Timing(statistics.median(times), min(times), max(times), tuple(round(t, 4) for t in times))


def graph_time(launch: Launch, *, count: int = 32, replays: int = 20, warmup: int = 3) -> Timing:
    """Time `launch(i)` for i in range(count) as one captured graph.

    Args:
        launch: enqueues one launch on CuPy's current stream; `i` picks the buffer set. It must not allocate.
        count: launches per graph.
        replays: timed replays.
        warmup: replays before the first timed one; `launch` also runs once uncaptured, which loads modules.
    """
    import cupy

    cuda_stream = cupy.cuda.Stream(non_blocking=True)
    with cuda_stream:
        for i in range(min(count, 2)):
            launch(i)
        cuda_stream.synchronize()
        cuda_stream.begin_capture()
        for i in range(count):
            launch(i)
        graph = cuda_stream.end_capture()
        for _ in range(warmup):
            graph.launch(cuda_stream)
        cuda_stream.synchronize()
        times = []
        for _ in range(replays):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(cuda_stream)
            graph.launch(cuda_stream)
            end.record(cuda_stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / count)
    return summarise(times)


def sets_for(bytes_per_set: int) -> int:
    """How many input sets to rotate over so that together they exceed the L2 several times."""
    return max(1, min(MAX_SETS, -(-ROTATION_BYTES // max(1, bytes_per_set))))
