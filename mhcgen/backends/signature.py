"""The parameters of an emitted kernel, and the one place where a Python value becomes a C scalar.

Every backend launches through the same signature: CUDA and the host executor pass raw bytes to a C
function, so a value of the wrong width is not converted by anyone. A Python float handed to a `float`
parameter would arrive as the first four bytes of a double.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import ml_dtypes
import numpy as np

from mhcgen.errors import InputError, InternalError

# Spelling of the C type, without const and restrict, to the dtype that carries it in numpy.
_DTYPES: dict[str, np.dtype[Any]] = {
    "float": np.dtype(np.float32),
    "double": np.dtype(np.float64),
    "signed char": np.dtype(np.int8),
    "int8_t": np.dtype(np.int8),
    "unsigned char": np.dtype(np.uint8),
    "uint8_t": np.dtype(np.uint8),
    "short": np.dtype(np.int16),
    "int16_t": np.dtype(np.int16),
    "unsigned short": np.dtype(np.uint16),
    "uint16_t": np.dtype(np.uint16),
    "int": np.dtype(np.int32),
    "int32_t": np.dtype(np.int32),
    "unsigned": np.dtype(np.uint32),
    "unsigned int": np.dtype(np.uint32),
    "uint32_t": np.dtype(np.uint32),
    "long long": np.dtype(np.int64),
    "int64_t": np.dtype(np.int64),
    "unsigned long long": np.dtype(np.uint64),
    "uint64_t": np.dtype(np.uint64),
    "size_t": np.dtype(np.uint64),
    "__half": np.dtype(np.float16),
    "half": np.dtype(np.float16),
    "__nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "nv_bfloat16": np.dtype(ml_dtypes.bfloat16),
    "__nv_fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "__nv_fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
    "__nv_fp8_e8m0": np.dtype(ml_dtypes.float8_e8m0fnu),
}
_SCALARS = frozenset({"float32", "float64", "int32", "uint32", "int64", "uint64"})
_QUALIFIERS = frozenset({"const", "__restrict__", "__restrict", "restrict"})


@lru_cache(maxsize=256)
def parse_ctype(ctype: str) -> tuple[np.dtype[Any], bool, bool]:
    """Split a declared C type into `(element dtype, is a pointer, points to const)`.

    Raises:
        InternalError: `X-CTYPE`, the type is none that an emission may use in a parameter.
    """
    words = ctype.replace("*", " * ").split()
    stars = words.count("*")
    base = words[: words.index("*")] if stars else words
    name = " ".join(word for word in base if word not in _QUALIFIERS)
    dtype = _DTYPES.get(name)
    rest = words[len(base) :]
    if stars > 1 or dtype is None or any(word != "*" and word not in _QUALIFIERS for word in rest):
        raise InternalError("X-CTYPE", f"{ctype!r} is not a parameter type of an emission.")
    if not stars and dtype.name not in _SCALARS:
        raise InternalError("X-CTYPE", f"{ctype!r} cannot be passed by value, only through a pointer.")
    return dtype, stars == 1, "const" in base


@dataclass(frozen=True)
class Param:
    """One parameter of a kernel.

    Args:
        name: the name in the emitted text, also the keyword under which a caller gives the value.
        ctype: the declared C type, e.g. `const float*`, `__nv_bfloat16* __restrict__`, `long long`.
        writable: whether the kernel writes through the pointer; always False for a scalar.

    Raises:
        InternalError: `X-CTYPE`, unknown type, or `writable` contradicts it.
    """

    name: str
    ctype: str
    writable: bool

    def __post_init__(self) -> None:
        _, pointer, const = parse_ctype(self.ctype)
        if self.writable and (const or not pointer):
            raise InternalError("X-CTYPE", f"{self.ctype!r} cannot be writable.", where=self.name)

    @cached_property
    def is_pointer(self) -> bool:
        """Whether an array is passed (by address) rather than a value."""
        return parse_ctype(self.ctype)[1]

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The numpy dtype of the value or of the elements pointed to (bf16 and fp8 from ml_dtypes)."""
        return parse_ctype(self.ctype)[0]


@dataclass(frozen=True)
class KernelSignature:
    """An `extern "C"` kernel: its symbol and its parameters in order.

    Raises:
        InternalError: `X-SIGNATURE`, two parameters share a name.
    """

    name: str
    params: tuple[Param, ...]

    def __post_init__(self) -> None:
        names = [param.name for param in self.params]
        if len(set(names)) != len(names):
            raise InternalError("X-SIGNATURE", "two parameters have one name.", where=self.name)


def _refuse(param: Param, value: object, why: str) -> InputError:
    shown = repr(value)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return InputError(
        "I-SCALAR",
        f"{shown} does not fit the parameter `{param.ctype} {param.name}`: {why}.",
        where=param.name,
    )


def _plain(param: Param, value: Any) -> Any:
    """The number inside numpy scalars and one-element host arrays; anything else unchanged."""
    if isinstance(value, (str, bytes, bytearray)):
        raise _refuse(param, value, "a number is needed, not text")
    if hasattr(value, "__cuda_array_interface__"):
        # Reading it would synchronise the device behind the caller's back.
        raise _refuse(param, type(value).__name__, "it lives on the device; pass a Python number")
    if not isinstance(value, np.generic) and hasattr(value, "__array__"):
        value = np.asarray(value)
    if isinstance(value, np.ndarray):
        if value.size != 1:
            raise _refuse(param, value, f"an array of {value.size} elements is not one number")
        value = value.reshape(())[()]
    if isinstance(value, np.generic) and value.dtype.kind in "bSUOMm":
        raise _refuse(param, value, f"dtype {value.dtype} is not a number")
    return value


def _cast_integer(param: Param, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        pass
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refuse(param, value, "it is not a number") from error
    if not math.isfinite(number):
        raise _refuse(param, value, "an integer is needed")
    if not number.is_integer():
        raise _refuse(param, value, "it has a fraction and would be cut")
    return int(number)


def cast_scalar(param: Param, value: Any) -> np.generic:
    """The numpy scalar with exactly the bytes that the C parameter expects.

    Args:
        param: a scalar parameter; `int`, `unsigned`, `long long`, `unsigned long long`, `float` or `double`.
        value: a Python or numpy number, or a host array with one element. Conversion to `float` rounds
            to nearest; infinities and NaN pass to floating parameters as they are.

    Returns:
        np.int32, np.uint32, np.int64, np.uint64, np.float32 or np.float64.

    Raises:
        InputError: `I-SCALAR`: text, bool, complex, an array of more than one element or on a device, an
            integer out of range, a fraction or NaN for an integer, a finite value that overflows, or a
            value other than zero that becomes zero (an epsilon of 1e-50 in a `float`).
        InternalError: `X-CTYPE`, the parameter is a pointer.
    """
    if param.is_pointer:
        raise InternalError("X-CTYPE", f"{param.ctype!r} is no scalar.", where=param.name)
    dtype = param.dtype
    plain = _plain(param, value)
    if isinstance(plain, bool):
        raise _refuse(param, value, "a bool is not a number here")
    if isinstance(plain, (complex, np.complexfloating)):
        raise _refuse(param, value, "it is complex")
    if dtype.kind in "iu":
        integer = _cast_integer(param, plain)
        info = np.iinfo(dtype)
        if not info.min <= integer <= info.max:
            raise _refuse(param, value, f"the range is {info.min} to {info.max}")
        scalar: np.generic = dtype.type(integer)
        return scalar
    if not isinstance(plain, (numbers.Real, np.generic)):
        raise _refuse(param, value, "it is not a number")
    try:
        number = float(plain)
    except (TypeError, ValueError, OverflowError) as error:
        raise _refuse(param, value, "it is not a number of that range") from error
    with np.errstate(over="ignore", under="ignore"):
        result = dtype.type(number)
    if math.isfinite(number) and not np.isfinite(result):
        raise _refuse(param, value, f"it overflows {dtype.name}")
    if number != 0.0 and result == 0:
        raise _refuse(param, value, f"it is too small for {dtype.name} and would become 0")
    rounded: np.generic = result
    return rounded
