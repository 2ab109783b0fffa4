"""What Python must know of a kernel to call it, and the conversion of scalar arguments."""

from __future__ import annotations

import ctypes
import operator
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mhcgen.errors import UsageError

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")

# Canonical spelling -> (ctypes type, "int" | "float" | "bool").
_SCALARS: dict[str, tuple[type, str]] = {
    "bool": (ctypes.c_bool, "bool"),
    "char": (ctypes.c_int8, "int"),
    "signed char": (ctypes.c_int8, "int"),
    "unsigned char": (ctypes.c_uint8, "int"),
    "short": (ctypes.c_int16, "int"),
    "unsigned short": (ctypes.c_uint16, "int"),
    "int": (ctypes.c_int32, "int"),
    "unsigned": (ctypes.c_uint32, "int"),
    "unsigned int": (ctypes.c_uint32, "int"),
    "long": (ctypes.c_int64, "int"),
    "unsigned long": (ctypes.c_uint64, "int"),
    "long long": (ctypes.c_int64, "int"),
    "unsigned long long": (ctypes.c_uint64, "int"),
    "size_t": (ctypes.c_uint64, "int"),
    "float": (ctypes.c_float, "float"),
    "double": (ctypes.c_double, "float"),
}

_BYTES = ("uint8", "float8_e4m3fn", "float8_e5m2")
# Element type of a pointer -> dtypes of arrays that may be passed; a type that is not here takes any array.
_ELEMENTS: dict[str, tuple[str, ...]] = {
    "float": ("float32",),
    "float2": ("float32",),
    "float4": ("float32",),
    "double": ("float64",),
    "double2": ("float64",),
    "__nv_bfloat16": ("bfloat16", "uint16"),
    "nv_bfloat16": ("bfloat16", "uint16"),
    "__nv_bfloat162": ("bfloat16", "uint16"),
    "__half": ("float16", "uint16"),
    "half": ("float16", "uint16"),
    "__half2": ("float16", "uint16"),
    "__nv_fp8_e4m3": _BYTES,
    "__nv_fp8_storage_t": _BYTES,
    "bool": ("bool",),
    "char": ("int8",),
    "signed char": ("int8",),
    "unsigned char": _BYTES,
    "short": ("int16",),
    "unsigned short": ("uint16", "bfloat16", "float16"),
    "int": ("int32",),
    "unsigned": ("uint32",),
    "unsigned int": ("uint32",),
    "long long": ("int64",),
    "unsigned long long": ("uint64",),
}


@dataclass(frozen=True)
class Param:
    """One kernel parameter.

    Args:
        name: used in findings, reports and errors.
        ctype: as in the source, e.g. `const float*`, `__nv_bfloat16*`, `int`, `long long`, `float`.
            `__restrict__` and the spacing do not matter.
        writable: the kernel may write through this pointer. Writing through any other one is a finding, and
            only writable arrays are copied back to the caller.

    Raises:
        UsageError: `X-CTYPE` for a scalar type that the host cannot pass, or a const pointer marked writable.
    """

    name: str
    ctype: str
    writable: bool = False

    def __post_init__(self) -> None:
        if not self.is_pointer and self.c_spelling not in _SCALARS:
            raise UsageError(
                "X-CTYPE",
                f"a parameter of type {self.ctype!r} cannot be passed by the host executor",
                where=self.name,
                hints=("pass a pointer, an integer, a float or a double",),
            )
        if self.writable and self.c_spelling.startswith("const "):
            raise UsageError("X-CTYPE", f"{self.ctype!r} is const, yet marked writable", where=self.name)

    @property
    def is_pointer(self) -> bool:
        """Whether an array is passed for it."""
        return "*" in self.ctype

    @property
    def c_spelling(self) -> str:
        """The type in one fixed spelling, `const` first, without `__restrict__`."""
        text = re.sub(r"__restrict__|__restrict|\brestrict\b", " ", self.ctype)
        words = text.replace("*", " * ").split()
        stars = words.count("*")
        base = [word for word in words if word not in ("*", "const")]
        is_const = stars > 0 and "const" in words[: words.index("*")]
        return " ".join((["const"] if is_const else []) + base) + "*" * stars

    @property
    def element_dtypes(self) -> tuple[str, ...]:
        """Names of the array dtypes a pointer accepts; empty where every dtype is fine."""
        return _ELEMENTS.get(self.c_spelling.removeprefix("const ").rstrip("*"), ())


@dataclass(frozen=True)
class KernelSignature:
    """The name and the parameters of one `__global__` function; the build checks them against the source."""

    name: str
    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        if not _IDENTIFIER.fullmatch(self.name):
            raise UsageError("X-KERNEL-NAME", f"not a kernel name the host can call: {self.name!r}")
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            raise UsageError("X-KERNEL-NAME", "two parameters have the same name", where=self.name)

    @property
    def entry(self) -> str:
        """The line that exports the kernel from a unit."""
        types = ", ".join(param.c_spelling for param in self.params)
        return f"MHC_HOST_ENTRY({self.name}, void({types}))"


def scalar_value(param: Param, value: object) -> ctypes._SimpleCData[object]:
    """`value` as the bytes of the parameter's type: a Python float for a `float` goes as 4 bytes.

    Raises:
        UsageError: `X-ARG-TYPE` for a value of the wrong sort, `X-ARG-RANGE` for one that does not fit.
    """
    kind_type, kind = _SCALARS[param.c_spelling]
    if kind == "bool" and isinstance(value, (bool, np.bool_)):
        return _make(kind_type, bool(value))
    if kind == "int" and isinstance(value, (int, np.integer)):
        number = operator.index(value)
        bits = 8 * ctypes.sizeof(kind_type)
        low = -(1 << bits - 1) if _is_signed(kind_type) else 0
        if not low <= number < low + (1 << bits):
            raise UsageError("X-ARG-RANGE", f"{number} does not fit in {param.c_spelling}", where=param.name)
        return _make(kind_type, number)
    if (
        kind == "float"
        and isinstance(value, (int, float, np.integer, np.floating))
        and not isinstance(value, bool)
    ):
        try:
            number_f = float(value)
            if kind_type is ctypes.c_float:
                struct.pack("f", number_f)
        except OverflowError:
            raise UsageError(
                "X-ARG-RANGE", f"{value!r} does not fit in {param.c_spelling}", where=param.name
            ) from None
        return _make(kind_type, number_f)
    raise UsageError(
        "X-ARG-TYPE",
        f"{type(value).__name__} {value!r} given for a parameter of type {param.c_spelling}",
        where=param.name,
    )


def normalise_shape(shape: int | Sequence[int], what: str) -> tuple[int, int, int]:
    """A grid or block shape as three integers.

    Raises:
        UsageError: `X-SHAPE` if it is not one to three integers, none negative.
    """
    parts = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if not 1 <= len(parts) <= 3 or not all(isinstance(p, (int, np.integer)) and p >= 0 for p in parts):
        raise UsageError("X-SHAPE", f"{what} must be one to three non-negative integers, not {shape!r}")
    x, y, z = (*(int(p) for p in parts), 1, 1)[:3]
    return x, y, z


def _make(kind_type: type, value: object) -> ctypes._SimpleCData[object]:
    made: ctypes._SimpleCData[object] = kind_type(value)
    return made


def _is_signed(kind_type: type) -> bool:
    return bool(kind_type(-1).value < 0)
