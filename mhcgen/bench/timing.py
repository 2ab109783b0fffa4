"""How a launch is timed: many in one captured graph, or back to back under one sync; medians.

A graph of `count` launches is replayed; the time of a replay over `count` is the time of one launch with the
launch gap of graphs included, which is what serving pays. Inputs rotate over several sets, so that a launch does
not find its operands in the L2 that the one before it filled.

Back to back, launches are queued behind a kernel that only waits, so that the GPU and not Python sets the pace;
`wall` is the same loop without it, as a Python caller sees it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

Launch = Callable[[int], Any]

#: An H200 has 60 MB of L2; rotating over this much makes each launch read from memory.
ROTATION_BYTES = 256 << 20
MAX_SETS = 64

BACK_TO_BACK = 300
#: Kernels that a stream takes before the host has to wait; the driver's queue holds 1024.
QUEUE = 900


@dataclass(frozen=True)
class Timing:
    """Times of one launch, microseconds.

    Args:
        median, low, high: over the runs.
        runs: every run's time per launch, in the order taken.
    """

    median: float
    low: float
    high: float
    runs: tuple[float, ...]

    def as_dict(self) -> dict[str, float]:
        """Median, low and high, rounded to nanoseconds."""
        return {"us": round(self.median, 3), "low": round(self.low, 3), "high": round(self.high, 3)}


def summarise(times: Iterable[float]) -> Timing:
    """A Timing from microseconds per launch."""
    runs = list(times)
    return Timing(statistics.median(runs), min(runs), max(runs), tuple(round(t, 4) for t in runs))


def counts_for(tokens: int) -> tuple[int, int]:
    """(launches of a graph, replays) for a token count: enough for a steady median, little enough to be quick."""
    if tokens <= 64:
        return 32, 20
    if tokens <= 1024:
        return 16, 20
    return (8, 12) if tokens <= 4096 else (4, 8)


def graph_time(launch: Launch, *, count: int = 32, replays: int = 20, warmup: int = 3) -> Timing:
    """Time `launch(i)` for i in range(count) as one captured graph.

    Args:
        launch: enqueues one launch on CuPy's current stream; `i` picks the buffer set. It must not allocate.
        count: launches per graph.
        replays: timed replays.
        warmup: replays before the first timed one; `launch` also runs uncaptured, which loads modules.
    """
    import cupy

    cupy.cuda.Device().synchronize()  # what made the operands may still run on another stream
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


_WAIT_SOURCE = r"""
extern "C" __global__ void wait_ns(long long duration) {
    long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do { asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now)); } while (now - start < duration);
}
"""


def queued_calls(kernels: int, wanted: int = BACK_TO_BACK) -> int:
    """How many calls of `kernels` launches each are timed back to back, so that all of them fit the queue."""
    return max(1, min(wanted, QUEUE // max(1, kernels)))


def back_to_back(launch: Launch, *, kernels: int = 1, launches: int = BACK_TO_BACK, rounds: int = 5) -> Timing:
    """Time calls of `launch` queued one behind the other under one sync, events around them.

    Args:
        launch: as for `graph_time`; one call may launch several kernels.
        kernels: how many it launches.
        launches: calls of a round; fewer where their kernels would not fit the queue of a stream.
        rounds: timed rounds.
    """
    import cupy

    count = queued_calls(kernels, launches)
    wait = cupy.RawKernel(_WAIT_SOURCE, "wait_ns")
    cupy.cuda.Device().synchronize()
    cuda_stream = cupy.cuda.Stream(non_blocking=True)
    times = []
    with cuda_stream:
        begun = time.perf_counter()
        for i in range(count):
            launch(i)
        # As long as the host needs to queue a round, and half as long again.
        duration = int(1.5e9 * (time.perf_counter() - begun)) + 1_000_000
        cuda_stream.synchronize()
        for _ in range(rounds):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            wait((1,), (1,), (cupy.int64(duration),))
            begin.record(cuda_stream)
            for i in range(count):
                launch(i)
            end.record(cuda_stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3 / count)
    return summarise(times)


def wall_time(launch: Launch, *, launches: int = BACK_TO_BACK, rounds: int = 5) -> Timing:
    """Host time of a call in a loop of them under one sync, as a Python caller sees it."""
    import cupy

    cupy.cuda.Device().synchronize()
    cuda_stream = cupy.cuda.Stream(non_blocking=True)
    times = []
    with cuda_stream:
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            for i in range(launches):
                launch(i)
            cuda_stream.synchronize()
            times.append((time.perf_counter() - begun) * 1e6 / launches)
    return summarise(times[1:])


def event_time(work: Callable[[], Any], *, rounds: int = 7) -> Timing:
    """Time `work()` between two events on one stream, launch latency included; for what no graph can hold."""
    import cupy

    cupy.cuda.Device().synchronize()
    cuda_stream = cupy.cuda.Stream(non_blocking=True)
    times = []
    with cuda_stream:
        for _ in range(rounds + 1):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record(cuda_stream)
            work()
            end.record(cuda_stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) * 1e3)
    return summarise(times[1:])


def sets_for(bytes_per_set: int) -> int:
    """How many input sets to rotate over so that together they exceed the L2 several times."""
    return max(1, min(MAX_SETS, -(-ROTATION_BYTES // max(1, bytes_per_set))))
