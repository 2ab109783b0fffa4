"""Binding the caller's arguments to a kernel's parameters: checks, guarded copies, aliasing, copying back."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen.backends.host.buffers import GUARD_BYTES, POISON, HostBuffer, buffer_of
from mhcgen.backends.signature import KernelSignature, Param, cast_scalar
from mhcgen.errors import InputError, InputTypeError, UsageError


@dataclass(eq=False)
class BoundBuffer:
    """One stretch of memory that one or more pointer parameters point into.

    Args:
        buffer: the guarded memory it lies in; `start` bytes into it, `nbytes` long.
        name: of its parameters, joined with `|`.
        writable: some parameter may write to it.
        uninitialised: its contents mean nothing before the launch.
        element: bytes per element, the smallest of its arrays.
        original: the caller's bytes of an input that was copied, else None.
    """

    buffer: HostBuffer
    start: int
    nbytes: int
    name: str
    writable: bool
    uninitialised: bool
    element: int
    original: npt.NDArray[np.uint8] | None = None

    @property
    def address(self) -> int:
        """Of its first byte."""
        return self.buffer.address + self.start

    @property
    def bytes(self) -> npt.NDArray[np.uint8]:
        """Its memory."""
        return self.buffer.bytes[self.start : self.start + self.nbytes]

    @property
    def guard(self) -> int:
        """Bytes of guard band around it; a part of a HostBuffer has none."""
        return GUARD_BYTES if self.nbytes == self.buffer.nbytes else 0

    def changed_input(self) -> int | None:
        """Offset of the first byte of a read-only copy that the kernel changed, else None."""
        if self.original is None or np.array_equal(self.original, self.bytes):
            return None
        return int(np.flatnonzero(self.original != self.bytes)[0])


@dataclass(frozen=True, eq=False)
class View:
    """Where one array parameter lies: `offset` bytes into `Bound.buffers[index]`."""

    index: int
    offset: int
    array: npt.NDArray[Any]
    copied: bool
    writable: bool


@dataclass(eq=False)
class Bound:
    """Arguments ready for a launch.

    Args:
        pointers: the `void**` of the entry; `keep` holds what it points to.
        buffers: without duplicates, in order of first use.
        views: per array parameter.
    """

    pointers: ctypes.Array[ctypes.c_void_p]
    buffers: list[BoundBuffer]
    views: dict[str, View]
    keep: list[object] = field(default_factory=list)

    def copy_back(self) -> None:
        """Copy writable arrays that were copied in back to the caller."""
        for view in self.views.values():
            if view.copied and view.writable and view.array.size:
                memory = self.buffers[view.index].bytes
                _bytes_of(view.array)[:] = memory[view.offset : view.offset + view.array.nbytes]


def bind(signature: KernelSignature, args: Sequence[object], uninitialised: frozenset[str]) -> Bound:
    """Check `args` against `signature` and lay out their memory (see `HostModule.launch` for the errors)."""
    if len(args) != len(signature.params):
        raise UsageError(
            "X-ARGS", f"{len(args)} arguments for {len(signature.params)} parameters", where=signature.name
        )
    unknown = uninitialised - {param.name for param in signature.params if param.is_pointer}
    if unknown:
        raise UsageError("X-UNINIT", f"not a pointer parameter: {sorted(unknown)[0]}", where=signature.name)
    keep: list[object] = []
    arrays: dict[str, tuple[Param, npt.NDArray[Any]]] = {}
    slots: list[ctypes.c_void_p | npt.NDArray[Any]] = []
    for param, value in zip(signature.params, args, strict=True):
        if not param.is_pointer:
            slots.append(np.array([cast_scalar(param, value)]))
            continue
        slots.append(ctypes.c_void_p(None))
        if value is not None:
            arrays[param.name] = (param, _checked_array(param, value))
    buffers, views = _lay_out(arrays, uninitialised)
    for param, slot in zip(signature.params, slots, strict=True):
        if param.name in views:
            view = views[param.name]
            assert isinstance(slot, ctypes.c_void_p)
            slot.value = buffers[view.index].address + view.offset
    keep += slots
    places = [slot.ctypes.data if isinstance(slot, np.ndarray) else ctypes.addressof(slot) for slot in slots]
    pointers = (ctypes.c_void_p * max(1, len(slots)))(*places)
    return Bound(pointers, buffers, views, keep)


def _checked_array(param: Param, value: object) -> npt.NDArray[Any]:
    array = value.array if isinstance(value, HostBuffer) else value
    if not isinstance(array, np.ndarray):
        raise InputTypeError(
            "X-DTYPE",
            f"a {type(value).__name__} given for {param.ctype}; pass a numpy array",
            where=param.name,
        )
    # Raw bits of a 16-bit or 8-bit float type are fine; converting dtypes silently is not.
    raw_bits = np.dtype(f"u{param.dtype.itemsize}") if param.dtype.itemsize <= 2 else param.dtype
    if array.dtype not in (param.dtype, raw_bits):
        raise InputTypeError(
            "X-DTYPE",
            f"an array of {array.dtype} given for {param.ctype}",
            where=param.name,
            hints=(f"pass an array of {param.dtype}",),
        )
    if not array.flags.c_contiguous:
        raise InputError(
            "X-LAYOUT",
            "the array is not C-contiguous",
            where=param.name,
            hints=("numpy.ascontiguousarray(array)",),
        )
    if param.writable and not array.flags.writeable:
        raise InputError("X-LAYOUT", "the kernel writes to an array that is read-only in numpy", where=param.name)
    return array


def _lay_out(
    arrays: dict[str, tuple[Param, npt.NDArray[Any]]], uninitialised: frozenset[str]
) -> tuple[list[BoundBuffer], dict[str, View]]:
    """One BoundBuffer per stretch of the caller's memory: arrays that overlap go on overlapping."""
    buffers: list[BoundBuffer] = []
    views: dict[str, View] = {}
    for names, low, high in _stretches({name: array for name, (_, array) in arrays.items()}):
        members = [arrays[name] for name in names]
        owner = buffer_of(members[0][1])
        poisoned = [array for name, (_, array) in zip(names, members, strict=True) if name in uninitialised]
        item = BoundBuffer(
            buffer=owner or HostBuffer(high - low, np.uint8),
            start=low - owner.address if owner else 0,
            nbytes=high - low,
            name="|".join(names),
            writable=any(param.writable for param, _ in members),
            uninitialised=bool(poisoned),
            element=min(array.itemsize for _, array in members),
        )
        for _, array in members:
            offset = array.ctypes.data - low
            if owner is None:
                item.bytes[offset : offset + array.nbytes] = _bytes_of(array)
        for array in poisoned:
            offset = array.ctypes.data - low
            item.bytes[offset : offset + array.nbytes] = POISON
        if owner is None and not item.writable:
            item.original = item.bytes.copy()
        for name, (param, array) in zip(names, members, strict=True):
            views[name] = View(len(buffers), array.ctypes.data - low, array, owner is None, param.writable)
        buffers.append(item)
    return buffers, views


def _stretches(arrays: dict[str, npt.NDArray[Any]]) -> list[tuple[list[str], int, int]]:
    """Groups of arrays that share memory, with their first address and the one behind their last.

    In order of the first parameter of each group.
    """
    groups: list[tuple[list[str], int, int]] = []
    for name, array in arrays.items():
        low, high = array.ctypes.data, array.ctypes.data + array.nbytes
        touching = [g for g in groups if (low < g[2] and g[1] < high) or (low, high) == g[1:]]
        merged = (
            [n for group in touching for n in group[0]] + [name],
            min([low, *(group[1] for group in touching)]),
            max([high, *(group[2] for group in touching)]),
        )
        position = groups.index(touching[0]) if touching else len(groups)
        groups = [group for group in groups if group not in touching]
        groups.insert(position, merged)
    return groups


def _bytes_of(array: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return array.reshape(-1).view(np.uint8)
