"""Memory for kernels: arrays between guard bands.

A band is filled with a byte pattern that reads as NaN in fp32, fp64, fp16 and bf16. A kernel that reads past an
array gets NaN; one that writes past it changes the pattern, which is checked after every launch.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.errors import EnvironmentFault, UsageError

GUARD_BYTES = 4096
# cudaMalloc's alignment: what an emission may assume of a whole array.
_ALIGNMENT = 256
# As 16-bit words this is 0xfffd, a NaN in bf16 and fp16; any two of them make an fp32 NaN.
_BAND = np.frombuffer(b"\xfd\xff" * (GUARD_BYTES // 2), np.uint8)
POISON = 0xFF
#: Linux's flag for memory that is not set aside before it is touched; Python names it from 3.13 on.
_NO_RESERVE = 0x4000

# id of a buffer's raw memory -> where its array starts and ends there. Lets a plain numpy view lead back to its
# guard bands, also when the HostBuffer that made it is gone.
_live: dict[int, tuple[int, int]] = {}


class HostBuffer:
    """An array between guard bands, which launches use in place: nothing is copied in or out.

    Args:
        shape: of the array; sizes of 0 are fine.
        dtype: of the array.
        misalign: bytes by which the array starts after a 256-byte boundary, to test an emission's promises.
        sparse: take no memory before it is touched, so that the array may be larger than there is memory; it holds
            zeros at first. For launches that run a few blocks of very many.

    Attributes:
        array: the numpy array, filled with 0xff bytes (NaN) at first. It and views of it may be passed to launches
            as well, and outlive this object.

    Raises:
        UsageError: `X-BUFFER` if `misalign` is negative, 256 or more, or no multiple of 1 byte.
        EnvironmentFault: `E-MEMORY` if the system does not give a sparse array that many addresses.
    """

    def __init__(
        self, shape: int | Sequence[int], dtype: npt.DTypeLike, *, misalign: int = 0, sparse: bool = False
    ) -> None:
        if not 0 <= misalign < _ALIGNMENT:
            raise UsageError("X-BUFFER", f"misalign must be 0 to {_ALIGNMENT - 1} bytes, not {misalign}")
        kind = np.dtype(dtype)
        dims = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
        nbytes = int(np.prod(dims, dtype=np.int64)) * kind.itemsize
        size = nbytes + 2 * GUARD_BYTES + 2 * _ALIGNMENT
        raw = _untouched(size) if sparse else np.empty(size, np.uint8)
        start = GUARD_BYTES + -(raw.ctypes.data + GUARD_BYTES) % _ALIGNMENT + misalign
        # ndarray rather than a reshaped view: it accepts any dtype at any alignment.
        self._attach(raw, start, start + nbytes, np.ndarray(dims, kind, buffer=raw.data, offset=start))
        self.fill_guards()
        if not sparse:
            self.bytes.fill(POISON)
        _live[id(raw)] = (self._start, self._end)
        weakref.finalize(raw, _live.pop, id(raw))

    def _attach(self, raw: npt.NDArray[np.uint8], start: int, end: int, array: npt.NDArray[Any]) -> None:
        self._raw, self._start, self._end = raw, start, end
        self.nbytes = end - start
        self.array = array

    @property
    def address(self) -> int:
        """Of the first byte of the array."""
        return int(self._raw.ctypes.data) + self._start

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """The array's memory as bytes, without the guard bands."""
        return self._raw[self._start : self._end]

    def fill_guards(self) -> None:
        """Write the pattern into both bands."""
        for band in self._bands():
            band[:] = _BAND

    def broken_guard(self) -> int | None:
        """Offset from the array's first byte of a changed guard byte (the one nearest to it), else None."""
        front, back = self._bands()
        if np.array_equal(front, _BAND) and np.array_equal(back, _BAND):
            return None
        after = np.flatnonzero(back != _BAND)
        if after.size:
            return self.nbytes + int(after[0])
        return int(np.flatnonzero(front != _BAND)[-1]) - GUARD_BYTES

    def _bands(self) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        front = self._raw[self._start - GUARD_BYTES : self._start]
        # Words of the pattern start at the array's end, which may be odd.
        return front, self._raw[self._end : self._end + GUARD_BYTES]


def _untouched(size: int) -> npt.NDArray[np.uint8]:
    try:
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE)
    except OSError as fault:
        raise EnvironmentFault("E-MEMORY", f"no {size} bytes of addresses: {fault}") from fault
    return np.frombuffer(pages, np.uint8)


def buffer_of(array: npt.NDArray[Any]) -> HostBuffer | None:
    """The buffer whose memory `array` is a view of (its own `array` may be bytes), else None."""
    base: object = array
    while isinstance(base, (np.ndarray, memoryview)):
        if isinstance(base, np.ndarray) and (found := _live.get(id(base))) is not None:
            buffer = HostBuffer.__new__(HostBuffer)
            buffer._attach(base, *found, base[slice(*found)])
            return buffer
        base = base.base if isinstance(base, np.ndarray) else base.obj
    return None
