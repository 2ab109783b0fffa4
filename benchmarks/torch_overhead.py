"""Host time of an operator call from PyTorch until its kernel is launched, with kernels of the smallest size.

    python benchmarks/torch_overhead.py                 # a table
    python benchmarks/torch_overhead.py --json out.json --calls 5000

Three views of a call of `mhcgen.torch` on one token of 8 columns, medians in microseconds:

    launch    from the call to the entry of cuLaunchKernelEx, by a clock in its place; nothing is launched
    call      the whole call with its launch, back to back; the GPU is ahead of the host, so only the host is seen
    profiler  from the start of the operator's event to the start of the driver's, as torch.profiler records them;
              the profiler's own cost is in it

`grad` calls an operator with inputs that require a gradient, and so records a backward. `empty_like` is torch's own
operator that does the least, for scale. Target: launch under 15 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import mhcgen.torch as mhc
from mhcgen.backends.driver import load_driver
from mhcgen.torch.calls import Call
from mhcgen.torch.warming import variants

TARGET = 15.0
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


def until_launch(run: Callable[[], Any], calls: int) -> float:
    """Median time from a call to the entry of the driver's launch."""
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
    return statistics.median(times) / 1e3


def whole_call(run: Callable[[], Any], calls: int) -> float:
    """Median time of a call, in bursts that the GPU's queue holds."""
    times = []
    for _ in range(max(1, calls // 100)):
        torch.cuda.synchronize()
        for _ in range(100):
            start = time.perf_counter_ns()
            run()
            times.append(time.perf_counter_ns() - start)
    torch.cuda.synchronize()
    return statistics.median(times) / 1e3


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


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("torch has no CUDA device: nothing is measured", file=sys.stderr)
        return 4
    mhc.warm_up(SETUP, NAMES, twins=False)
    rows = []
    x = torch.zeros(1, 4, 8, device="cuda", dtype=torch.bfloat16)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {sys.version.split()[0]}")
    print(f"{'operator':16} {'outputs':>7} {'launch':>8} {'call':>8} {'profiler':>9}   us, medians of {chosen.calls}")
    print(f"{'empty_like':16} {1:>7} {'':>8} {whole_call(lambda: torch.empty_like(x), chosen.calls):>8.1f}")
    for name in NAMES:
        for grad in (False, True):
            run = function(name, tensors_for(name, grad))
            for _ in range(200):
                run()
            torch.cuda.synchronize()
            with torch.set_grad_enabled(grad):
                row = {
                    "operator": name + " grad" * grad,
                    "outputs": len(mhc.OPERATIONS[name].outputs),
                    "launch": until_launch(run, chosen.calls),
                    "call": whole_call(run, chosen.calls),
                    "profiler": by_profiler(name, run, min(500, chosen.calls)),
                }
            rows.append(row)
            seen = "-" if row["profiler"] is None else f"{row['profiler']:.1f}"
            print(f"{row['operator']:16} {row['outputs']:>7} {row['launch']:>8.1f} {row['call']:>8.1f} {seen:>9}")
    worst = max(row["launch"] for row in rows if not row["operator"].endswith("grad"))
    print(f"largest time to launch without gradients: {worst:.1f} us, target {TARGET:.0f} us: "
          f"{'met' if worst < TARGET else 'MISSED'}")  # fmt: skip
    if chosen.json:
        chosen.json.write_text(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__,
                                           "rows": rows}, indent=1))  # fmt: skip
    return 0 if worst < TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
