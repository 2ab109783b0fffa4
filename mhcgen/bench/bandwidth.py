"""The bandwidth probe: how fast the collapse kernel streams a given amount of memory.

It reads n streams and writes one, so it reads n times what it writes; the copy that gives the floor reads as much as
it writes. Both rates are printed, since they bound different kernels.
"""

from __future__ import annotations

from typing import Any

from mhcgen.bench.device import Device
from mhcgen.bench.floor import tensor_bytes
from mhcgen.bench.measure import Bench, Row, Unmeasurable, error_text
from mhcgen.bench.parts import only
from mhcgen.build import build
from mhcgen.plan import Options

BEST_OF = 7


def measure_bandwidth(bench: Bench, mebibytes: int, **config: Any) -> Row:
    """Streaming rate of the collapse kernel over so many MiB of streams, the best of seven launches.

    Args:
        bench: where.
        mebibytes: size of the streams that one launch reads.
        config: fields of a Config: streams, hidden, dtype, ...
    """
    program = only(build(**config), "collapse")
    token = tensor_bytes(program, "x", 1)
    tokens = max(1, (mebibytes << 20) // token)
    row: Row = {"what": "bandwidth", "MiB": mebibytes, "T": tokens, "n": program.dim("n"), "H": program.dim("H")}
    row["dtype"] = program.tensor("x").dtype
    try:
        module = bench.module(program, Options())
        differing = bench.differing_bytes(module, tokens)
        if differing:
            raise Unmeasurable(f"{differing} bytes differ between two runs of one kernel")
        inputs, outputs = bench.inputs(program, tokens), bench.outputs(module, tokens)
        taken = events(bench.device, lambda _: module(out=outputs, **inputs))
    except Exception as error:  # noqa: BLE001  (a probe less; the run goes on)
        return {**row, "error": error_text(error)}
    read = sum(tensor_bytes(program, t.name, tokens) for t in program.of_role("input", "parameter"))
    written = sum(tensor_bytes(program, t.name, tokens) for t in program.of_role("result"))
    best = min(taken)
    return row | {
        "us": round(best, 3),
        "runs": [round(t, 3) for t in taken],
        "read_GB_s": round(read / best * 1e-3, 1) if best else 0.0,
        "read_write_GB_s": round((read + written) / best * 1e-3, 1) if best else 0.0,
        "copy_GB_s": round(bench.floor.copy_rate * 1e-3, 1),
    }


def events(device: Device, launch: Any) -> tuple[float, ...]:
    """Microseconds of each of seven launches, events around every one."""
    return device.graph(launch, count=1, replays=BEST_OF).runs
