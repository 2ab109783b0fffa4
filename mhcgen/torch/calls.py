"""One operation with its inputs known: what it takes and returns, checks, and where it ran."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mhcgen.errors import InputError, InputTypeError
from mhcgen.torch.eager import DTYPES
from mhcgen.torch.operations import OPERATIONS, Operation, program_of
from mhcgen.torch.setup import Setup, parse

LOGGER = logging.getLogger("mhcgen")
_WIDENED = (torch.float32, torch.bfloat16, torch.float16)


class Spec(NamedTuple):
    """A tensor as an operation wants or makes it; `tail` is its shape without the tokens where it has them."""

    name: str
    dtype: torch.dtype
    per_token: bool
    tail: tuple[int, ...]

    def shape(self, tokens: Any) -> tuple[Any, ...]:
        """Its shape for a token count, which may be symbolic."""
        return (tokens, *self.tail) if self.per_token else self.tail

    def made(self, double: bool) -> torch.dtype:
        """Its dtype as a result, float64 inputs or not."""
        return torch.float64 if double and self.dtype in _WIDENED else self.dtype


class Call:
    """An operation for one Setup and one choice of its optional inputs.

    Attributes:
        operation, setup: as given.
        program: what is computed.
        inputs: specs of the given inputs, in the order of the schema.
        outputs: specs of the results, likewise.
        limit: most tokens.
    """

    def __init__(self, operation: Operation, setup: Setup, given: frozenset[str]) -> None:
        self.operation = operation
        self.setup = setup
        self.program = program_of(operation, setup.config, given)
        self.inputs = tuple(self.spec(name) for name in operation.names if name in given)
        self.outputs = tuple(self.spec(name) for name in operation.outputs)
        self.limit = 2**31 // self.program.dim("n") - 1

    @property
    def fuse(self) -> str:
        """The fusion of its Plan: `seed` is one of the pre chain, and other operations have none in it."""
        own, wish = self.operation.fuse, self.setup.fuse
        if wish == "auto":
            return own
        chain = own.startswith(("pre", "seed")) and self.operation.scope == "pre"
        return wish if wish == "seed" and chain else "none"

    def spec(self, name: str) -> Spec:
        """The spec of one of the Program's tensors."""
        tensor = self.program.tensor(name)
        per_token = tensor.shape[0] == "T"
        tail = tuple(self.program.dim(d) for d in tensor.shape[per_token:])
        return Spec(name, DTYPES[tensor.dtype], per_token, tail)

    def check(self, tensors: Sequence[Tensor]) -> Any:
        """The token count of legal inputs; may be symbolic.

        Raises:
            InputError: `I-SHAPE`, `I-LAYOUT`, `I-DEVICE`, `I-TOKENS`.
            InputTypeError: `I-DTYPE`.
        """
        first = tensors[0]
        spec = self.inputs[0]
        if first.ndim != len(spec.tail) + 1:
            raise self._wrong_shape(spec, first)
        tokens = first.shape[0]
        double = all(tensor.dtype == torch.float64 for tensor in tensors)
        for tensor, wanted in zip(tensors, self.inputs, strict=True):
            self.check_one(wanted, tensor, tokens, torch.float64 if double else wanted.dtype, first.device)
        if isinstance(tokens, int) and tokens > self.limit:
            raise InputError(
                "I-TOKENS", f"T = {tokens} exceeds {self.limit}", where=spec.name, hints=("split the batch",)
            )
        return tokens

    def check_one(self, spec: Spec, tensor: Tensor, tokens: Any, dtype: torch.dtype, device: torch.device) -> None:
        """Raise the error of the first thing that is wrong with a tensor; see `check`."""
        if tensor.dtype != dtype:
            wide = "" if tensor.dtype != torch.float64 else "; float64 runs only where every tensor is float64"
            raise InputTypeError(
                "I-DTYPE",
                f"{spec.name} has dtype {_short(tensor.dtype)}, and {_short(dtype)} is wanted",
                where=spec.name,
                notes=(f"the Setup is for dtype {self.setup.config.dtype}, and coefficients are float32{wide}",),
                hints=(f"convert it explicitly: {spec.name}.to({dtype})",),
            )
        if tensor.shape != spec.shape(tokens):
            raise self._wrong_shape(spec, tensor)
        if not tensor.is_contiguous():
            raise InputError(
                "I-LAYOUT",
                f"{spec.name} is not contiguous (shape {list(tensor.shape)}, strides {list(tensor.stride())})",
                where=spec.name,
                notes=("tensors are never copied silently",),
                hints=(f"pass {spec.name}.contiguous()",),
            )
        if tensor.device != device:
            raise InputError(
                "I-DEVICE",
                f"{spec.name} is on {tensor.device}, and {self.inputs[0].name} on {device}",
                where=spec.name,
                hints=(f"move it explicitly: {spec.name}.to({str(device)!r})",),
            )

    def _wrong_shape(self, spec: Spec, tensor: Tensor) -> InputError:
        wanted = ", ".join(map(str, spec.shape("T")))
        config = self.setup.config
        return InputError(
            "I-SHAPE",
            f"{spec.name} has shape {list(tensor.shape)}, and [{wanted}] is wanted",
            where=spec.name,
            notes=(
                f"this Setup is for n = {config.streams}, H = {config.hidden}",
                "every per-token tensor has the same T",
            ),
            hints=("make a Setup for the shape you have, or pass a tensor of this shape",),
        )

    def check_out(self, tensors: Sequence[Tensor], outs: Sequence[Tensor], tokens: int) -> None:
        """Raise if a tensor to write to is not legal, or shares memory with an input or another of them.

        Raises:
            InputError: `I-OVERLAP`, and as `check`.
            InputTypeError: `I-DTYPE`.
        """
        double = tensors[0].dtype == torch.float64
        taken = [(spec.name, *_span(tensor)) for spec, tensor in zip(self.inputs, tensors, strict=True)]
        for spec, out in zip(self.outputs, outs, strict=True):
            self.check_one(spec, out, tokens, spec.made(double), tensors[0].device)
            start, end = _span(out)
            for other, begin, stop in taken:
                if start < stop and begin < end:
                    raise InputError(
                        "I-OVERLAP",
                        f"out {spec.name} overlaps {other}",
                        where=f"out {spec.name}",
                        hints=("give each result memory of its own; inputs are never mutated",),
                    )
            taken.append((f"out {spec.name}", start, end))

    def empty(self, tokens: Any, like: Tensor) -> list[Tensor]:
        """Tensors for the results, on the device of `like`; float64 where that is."""
        double = like.dtype == torch.float64
        return [like.new_empty(spec.shape(tokens), dtype=spec.made(double)) for spec in self.outputs]


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _span(tensor: Tensor) -> tuple[int, int]:
    start = tensor.data_ptr()
    return start, start + tensor.nbytes


_calls: dict[tuple[str, str, frozenset[str]], Call] = {}


def call_of(name: str, setup: str, tensors: Sequence[Tensor | None]) -> Call:
    """The Call of an operation by name, text of its Setup, and inputs in the order of the schema.

    Raises:
        InputError, UsageError: what is given does not make up the operation.
    """
    operation = OPERATIONS[name]
    given = frozenset(n for n, tensor in zip(operation.names, tensors, strict=True) if tensor is not None)
    key = (name, setup, given)
    if key not in _calls:
        _calls[key] = Call(operation, parse(setup), given)
    return _calls[key]


# ---- where it ran -------------------------------------------------------------------------------------------
class Ran(NamedTuple):
    """Where the last operation of this thread ran.

    Args:
        operation: its name.
        path: `cuda` (kernels), `host` (the same text on the CPU executor) or `torch` (plain torch operations).
        why: what decided.
    """

    operation: str
    path: str
    why: str


#: `ran` of it is what this thread ran last.
LAST = threading.local()
_seen: set[tuple[str, ...]] = set()


def note(operation: str, path: str, why: str) -> None:
    """Remember where an operation ran; the first time on each path is logged."""
    LAST.ran = (operation, path, why)
    if (operation, path) not in _seen:
        _seen.add((operation, path))
        LOGGER.info("mhcgen::%s runs on path %s: %s", operation, path, why)


def last_path() -> Ran | None:
    """Where the last operation of this thread ran, None before the first; backward passes do not count."""
    found = getattr(LAST, "ran", None)
    return None if found is None else Ran(*found)
