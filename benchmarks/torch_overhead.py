"""Host time of an operator call from PyTorch until its kernel is launched, with kernels of the smallest size.

    python benchmarks/torch_overhead.py                 # a table
    python benchmarks/torch_overhead.py --json out.json --calls 5000

Three views of a call of `mhcgen.torch` on one token of 8 columns, medians in microseconds:

    launch    from the call to the entry of cuLaunchKernelEx, by a clock in its place; nothing is launched
    call      the whole call with its launch, back to back; the GPU is ahead of the host, so only the host is seen
    profiler  from the start of the operator's event to the start of the driver's, as torch.profiler records them;
              the profiler's own cost is in it

`grad` calls an operator with inputs that require a gradient, and so records a backward; `operator` calls
`torch.ops.mhcgen`, and so goes through torch's dispatcher, which the public functions pass by. `empty_like` is the
operator of torch's own that does the least, for scale. Target: launch under 15 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch

import mhcgen.torch as mhc
from mhcgen.backends.driver import load_driver
from mhcgen.torch.calls import Call
from mhcgen.torch.warming import variants

TARGET = 15.0
#: Every operator is measured in each of these and no two rounds of one follow each other, so that what disturbs a
#: machine for a while shows in one round of a few operators and not in the median of one.
ROUNDS = 10
#: By the public function, by it with inputs that require a gradient, and by `torch.ops.mhcgen`.
WAYS = ("", "grad", "operator")
NAMES = ("expand", "mean", "post", "finish", "pre", "pre_norm", "boundary", "boundary_norm", "head")
SETUP = mhc.Setup("deepseek-v4", streams=4, hidden=8, dtype="bf16")


def tensors_for(name: str, grad: bool) -> list[torch.Tensor | None]:
    """One token of zeros for each input."""
    operation = mhc.OPERATIONS[name]
    given = variants(operation, SETUP, gemm=False)[0]
    specs = {spec.name: spec for spec in Call(operation, SETUP, given).inputs}
    return [
        torch.zeros(specs[n].shape(1), dtype=specs[n].dtype, device="cuda", requires_grad=grad)
        if n in given
        else None
        for n in operation.names
    ]


def function(name: str, tensors: list[torch.Tensor | None]) -> Callable[[], Any]:
    """The public function on these tensors."""
    call, names = getattr(mhc, name), mhc.OPERATIONS[name].names
    keywords = {"comb_logits", "pre_prev"} | ({"mixes"} if name != "finish" else set())
    positional = [t for n, t in zip(names, tensors, strict=True) if n not in keywords]
    return lambda: call(*positional, setup=SETUP)


def until_launch(run: Callable[[], Any], calls: int) -> list[int]:
    """Times in ns from a call to the entry of the driver's launch."""
    driver, entered = load_driver(), [0]
    real = driver.launch_kernel

    def clock(*arguments: Any) -> int:
        entered[0] = time.perf_counter_ns()
        return 0

    driver.launch_kernel = clock
    try:
        times = []
        for _ in range(calls):
            start = time.perf_counter_ns()
            run()
            times.append(entered[0] - start)
    finally:
        driver.launch_kernel = real
    return times


def whole_call(run: Callable[[], Any], calls: int) -> list[int]:
    """Times in ns of a call, in bursts that the GPU's queue holds."""
    times = []
    for _ in range(max(1, calls // 100)):
        torch.cuda.synchronize()
        for _ in range(100):
            start = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return times


def by_profiler(name: str, run: Callable[[], Any], calls: int) -> float | None:
    """Median distance of the operator's event and the next launch of the driver; None where none was recorded."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        for _ in range(calls):
            run()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    starts = sorted(e["ts"] for e in events if e.get("name") == f"mhcgen::{name}" and e.get("cat") == "cpu_op")
    launches = sorted(e["ts"] for e in events if str(e.get("name", "")).startswith("cuLaunchKernel"))
    found, index = [], 0
    for start, following in zip(starts, [*starts[1:], float("inf")], strict=True):
        while index < len(launches) and launches[index] < start:
            index += 1
        if index < len(launches) and launches[index] < following:
            found.append(launches[index] - start)
    return statistics.median(found) if found else None


class Case:
    """An operator called in one way, and the times of its calls, a list a round."""

    def __init__(self, name: str, way: str) -> None:
        self.name, self.way, self.grad = name, way, way == "grad"
        tensors = tensors_for(name, self.grad)
        self.run = function(name, tensors)
        if way == "operator":
            overload, text = mhc.operator(name), SETUP.text
            self.run = lambda: overload(*tensors, text)
        self.launch: list[list[int]] = []
        self.call: list[list[int]] = []

    def measure(self, calls: int) -> None:
        """One round."""
        with torch.set_grad_enabled(self.grad):
            for _ in range(20):
                self.run()
            self.launch.append(until_launch(self.run, calls))
            self.call.append(whole_call(self.run, calls))

    def row(self, profiled: int) -> dict[str, Any]:
        """Medians of all rounds in us."""
        with torch.set_grad_enabled(self.grad):
            profiler = by_profiler(self.name, self.run, profiled)
        return {
            "operator": f"{self.name} {self.way}".strip(),
            "outputs": len(mhc.OPERATIONS[self.name].outputs),
            "launch": statistics.median(list(chain(*self.launch))) / 1e3,
            "slowest round": max(map(statistics.median, self.launch)) / 1e3,
            "call": statistics.median(list(chain(*self.call))) / 1e3,
            "profiler": profiler,
        }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch has no CUDA device: nothing is measured", file=sys.stderr)
        return 4
    mhc.warm_up(SETUP, NAMES, twins=False)
    cases = [Case(name, way) for name in NAMES for way in WAYS]
    for case in cases:
        case.measure(200)
        case.launch.clear()
        case.call.clear()
    for _ in range(ROUNDS):
        for case in cases:
            case.measure(max(1, chosen.calls // ROUNDS))
    x = torch.zeros(1, 4, 8, device="cuda", dtype=torch.bfloat16)
    least = statistics.median(whole_call(lambda: torch.empty_like(x), chosen.calls)) / 1e3
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"{'operator':24} {'outputs':>7} {'launch':>8} {'slowest round':>14} {'call':>8} {'profiler':>9}   us")
    print(f"{'empty_like':24} {1:>7} {'':>8} {'':>14} {least:>8.1f}")
    rows = [case.row(min(200, chosen.calls)) for case in cases]
    for row in rows:
        seen = "-" if row["profiler"] is None else f"{row['profiler']:.1f}"
        print(f"{row['operator']:24} {row['outputs']:>7} {row['launch']:>8.1f} {row['slowest round']:>14.1f} "
              f"{row['call']:>8.1f} {seen:>9}")  # fmt: skip
    worst = max(row["launch"] for row in rows if not row["operator"].endswith("grad"))
    print(f"largest time to launch without gradients: {worst:.1f} us, target {TARGET:.0f} us: "
          f"{'met' if worst < TARGET else 'MISSED'}")  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                           "rows": rows}, indent=1))  # fmt: skip
    return 0 if worst < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
