"""Kernel arguments and streams for a launch: checked, converted and packed as the C parameters want them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import numpy as np

from mhcgen.backends.driver import LaunchBuffer
from mhcgen.backends.signature import KernelSignature, Param, cast_scalar
from mhcgen.errors import InputError, InputTypeError

_FORMATS = {
    "float32": "f4x",
    "float64": "d",
    "int32": "i4x",
    "uint32": "I4x",
    "int64": "q",
    "uint64": "Q",
}
_POINTER = "Q"
_CACHED_SCALARS = 64


def as_carrier(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """The dtype with which CuPy copies elements it cannot name itself (bf16, fp8): unsigned, same size."""
    if dtype.kind != "V":
        return dtype
    return np.dtype(f"u{dtype.itemsize}")


class Packer:
    """Fills launch buffers for one kernel.

    Args:
        signature: the kernel.
        array_type: `cupy.ndarray`.
    """

    def __init__(self, signature: KernelSignature, array_type: type) -> None:
        self._signature = signature
        self._array_type = array_type
        # Per parameter: itself, dtype (None for a scalar), the Python type of its values, and values seen.
        self._plan: tuple[tuple[Param, np.dtype[Any] | None, type, dict[Any, Any]], ...] = tuple(
            (
                param,
                param.dtype if param.is_pointer else None,
                float if param.dtype.kind == "f" else int,
                {},
            )
            for param in signature.params
        )
        # CuPy builds an object for every look at `flags`; the attribute behind it costs a tenth.
        self._is_contiguous: Callable[[Any], bool] = (
            attrgetter("_c_contiguous") if hasattr(array_type, "_c_contiguous") else attrgetter("flags.c_contiguous")
        )
        formats = (_POINTER if param.is_pointer else _FORMATS[param.dtype.name] for param in signature.params)
        self._pack: Callable[..., None] = struct.Struct("=" + "".join(formats)).pack_into
        self._free: list[LaunchBuffer] = []

    def take(self) -> LaunchBuffer:
        """A buffer for the sole use of the caller; two threads never share one."""
        try:
            return self._free.pop()
        except IndexError:
            return LaunchBuffer(len(self._plan))

    def give(self, buffer: LaunchBuffer) -> None:
        """Return a buffer for reuse."""
        self._free.append(buffer)

    def pack(self, args: Sequence[Any], buffer: LaunchBuffer) -> int | None:
        """Check and write the arguments; returns the device of the arrays, None where there are none.

        Raises:
            InputError: `I-ARGS`, `I-SCALAR`, `I-CONTIGUOUS`, `I-DEVICE`.
            InputTypeError: `I-ARRAY`, `I-DTYPE`.
        """
        if len(args) != len(self._plan):
            raise InputError(
                "I-ARGS",
                f"{self._signature.name} takes {len(self._plan)} arguments, not {len(args)}.",
                where=self._signature.name,
                notes=(", ".join(f"{param.ctype} {param.name}" for param in self._signature.params),),
            )
        device: int | None = None
        values: list[Any] = []
        for (param, dtype, natural, seen), value in zip(self._plan, args, strict=True):
            if dtype is None:
                known = seen.get(value) if value.__class__ is natural else None
                values.append(_scalar(param, value, natural, seen) if known is None else known)
                continue
            if not isinstance(value, self._array_type):
                raise _not_an_array(param, value)
            array: Any = value
            found = array.dtype
            # Comparing dtypes is slow, and numpy keeps one object per dtype.
            if found is not dtype and found != dtype:
                raise _wrong_dtype(param, array)
            if not self._is_contiguous(array):
                raise InputError(
                    "I-CONTIGUOUS",
                    f"{param.name} is not contiguous (shape {array.shape}, strides {array.strides}).",
                    where=param.name,
                    hints=("pass cupy.ascontiguousarray(...); it is never copied silently",),
                )
            memory = array.data
            if device is None:
                device = memory.device_id
            elif memory.device_id != device:
                raise InputError(
                    "I-DEVICE",
                    f"{param.name} is on device {memory.device_id}, other arrays are on device {device}.",
                    where=param.name,
                )
            values.append(memory.ptr)
        self._pack(buffer.arguments, 0, *values)
        return device


def _scalar(param: Param, value: Any, natural: type, seen: dict[Any, Any]) -> Any:
    # Plain Python numbers repeat from launch to launch. A zero is left out: -0.0 would find the entry of 0.0.
    known = cast_scalar(param, value).item()
    if value.__class__ is natural and value and len(seen) < _CACHED_SCALARS:
        seen[value] = known
    return known


def _not_an_array(param: Param, value: Any) -> InputTypeError:
    kind = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, np.ndarray):
        hint = f"move it first: mhcgen.backends.cuda.to_device({param.name})"
    elif hasattr(value, "__dlpack__"):
        hint = (
            f"cupy.from_dlpack({param.name}) shares the memory of a tensor; one of bf16 goes through "
            "a view of 16-bit integers: cupy.from_dlpack(t.view(torch.int16)).view(ml_dtypes.bfloat16)"
        )
    else:
        hint = f"pass a cupy.ndarray of dtype {param.dtype}"
    return InputTypeError(
        "I-ARRAY",
        f"{param.name} must be a cupy.ndarray, not {kind}.",
        where=param.name,
        hints=(hint,),
    )


def _wrong_dtype(param: Param, array: Any) -> InputTypeError:
    hint = f"convert it: {param.name}.astype({param.dtype.name!r})"
    if param.dtype.kind == "V":
        hint = f"convert it, on the host if need be: array.astype(ml_dtypes.{param.dtype})"
        if array.dtype.kind in "iu" and array.dtype.itemsize == param.dtype.itemsize:
            hint = f"if its bits are {param.dtype}, say so: {param.name}.view(ml_dtypes.{param.dtype})"
    return InputTypeError(
        "I-DTYPE",
        f"{param.name} has dtype {array.dtype}, but `{param.ctype}` needs {param.dtype}.",
        where=param.name,
        notes=("arrays are never converted silently",),
        hints=(hint,),
    )


def stream_handle(cupy: Any, stream: Any, device: int) -> int:
    """The CUstream of what a caller passes as a stream; CuPy's current stream of `device` for None.

    Raises:
        InputError: `I-DEVICE`, the stream belongs to another device.
        InputTypeError: `I-STREAM`, not a stream.
    """
    if stream is None:
        return int(cupy.cuda.get_current_stream(device).ptr)
    if isinstance(stream, (int, np.integer)) and not isinstance(stream, bool):
        return int(stream)
    pointer = getattr(stream, "ptr", None)
    if pointer is not None:
        owner = getattr(stream, "device_id", -1)
        if owner not in (-1, device):
            raise InputError("I-DEVICE", f"the stream belongs to device {owner}, the arrays are on device {device}.")
        return int(pointer)
    if (handle := getattr(stream, "cuda_stream", None)) is not None:
        return int(handle)
    if (protocol := getattr(stream, "__cuda_stream__", None)) is not None:
        # (version, handle); a method in the protocol, an attribute in its first draft
        return int((protocol() if callable(protocol) else protocol)[1])
    raise InputTypeError(
        "I-STREAM",
        f"{type(stream).__qualname__} is not a stream.",
        hints=("pass a CuPy or torch stream, or the integer handle",),
    )
