"""What no kernel can beat: every byte moved once at the rate of a large copy, and the time of an empty kernel."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mhcgen.bench.device import Device
from mhcgen.ir import Program
from mhcgen.runtime import NUMPY_DTYPES


@dataclass(frozen=True)
class Floor:
    """The two limits of a device, measured.

    Args:
        copy_rate: bytes a microsecond of a device-to-device copy, bytes read and bytes written both counted.
        null_us: time of an empty kernel in the same kind of graph, microseconds.
    """

    copy_rate: float
    null_us: float

    def bytes_us(self, nbytes: int) -> float:
        """Microseconds that moving so many bytes takes at the copy rate."""
        return nbytes / self.copy_rate

    def us(self, nbytes: int) -> float:
        """The floor of a launch that moves so many bytes: the larger of the two limits, microseconds."""
        return max(self.bytes_us(nbytes), self.null_us)

    @property
    def terabytes_per_second(self) -> float:
        """The copy rate in TB/s."""
        return self.copy_rate * 1e-6


def measure_floor(device: Device) -> Floor:
    """Both limits, measured now."""
    nbytes, copy = device.copy_time()
    return Floor(nbytes / copy.median, device.null_time().median)


def tensor_bytes(program: Program, name: str, tokens: int) -> int:
    """Bytes of one tensor of a Program for a token count."""
    itemsize = NUMPY_DTYPES[program.tensor(name).dtype].itemsize
    return int(np.prod(program.shape(name, tokens), dtype=np.int64)) * itemsize


def bytes_once(program: Program, tokens: int) -> int:
    """Bytes a Program must move at least: each input and parameter read once, each result written once.

    Values that pass from stage to stage are left out, as are parameters' re-reads: a perfect kernel has neither.

    Example:
        >>> from mhcgen.build import build
        >>> bytes_once(build(streams=4, hidden=64), tokens=1)  # x, mixes, scale, base in; y, pre, post, comb out
        1580
    """
    named = program.of_role("input", "parameter", "result")
    return sum(tensor_bytes(program, tensor.name, tokens) for tensor in named)
