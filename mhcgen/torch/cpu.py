"""CPU tensors: the emitted text on the CPU executor where the call is small, plain torch where it is not.

The executor gives the very bits of a GPU in the ieee class and takes a few milliseconds a token; plain torch is fast
and agrees within rounding. Which one ran is never a secret: `mhcgen.torch.last_path()` and the log say so.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from mhcgen.api import compile
from mhcgen.errors import EnvironmentFault, UsageError
from mhcgen.runners import HostRunner
from mhcgen.runtime import Module
from mhcgen.torch.calls import Call
from mhcgen.torch.launch import compiled
from mhcgen.values import plain

PATHS = ("auto", "kernels", "torch")
#: Elements of the streams up to which `auto` takes the executor: one token of 4 streams of 4096 columns.
HOST_LIMIT = 16384


@dataclass(frozen=True)
class Choice:
    """Which path operations take.

    Args:
        path: `auto`, `kernels` (the CPU executor on CPU tensors whatever the size) or `torch` (plain torch on any
            device).
        host_limit: elements T*n*H of the streams up to which `auto` takes the executor.
    """

    path: str = "auto"
    host_limit: float = HOST_LIMIT


_choice = Choice()
#: Whether the choice is plain torch, for a look that costs nothing.
torch_asked_for = False


def choice() -> Choice:
    """The present choice, of the whole process."""
    return _choice


def set_path(path: str = "auto", host_limit: float = HOST_LIMIT) -> Choice:
    """Choose the path of operations from now on; returns the choice before. See `Choice`.

    Raises:
        UsageError: `U-PATH`.
    """
    global _choice, torch_asked_for
    limit = plain("host_limit", host_limit)
    known = isinstance(path, str) and path in PATHS
    if not known or isinstance(limit, bool) or not isinstance(limit, int | float) or not limit >= 0:
        raise UsageError(
            "U-PATH",
            f"path must be one of {', '.join(PATHS)} and the limit at least 0, got {path!r} and {host_limit!r}",
            where="host_limit" if known else "path",
            hints=("leave host_limit out for the default" if known else f"choose one of {', '.join(PATHS)}",),
        )
    before, _choice = _choice, Choice(path, limit)
    torch_asked_for = path == "torch"
    return before


@contextlib.contextmanager
def use_path(path: str = "auto", host_limit: int | None = None) -> Iterator[None]:
    """`set_path` inside a with block."""
    before = set_path(path, _choice.host_limit if host_limit is None else host_limit)
    try:
        yield
    finally:
        set_path(before.path, before.host_limit)


def decide(call: Call, tensors: Sequence[Tensor]) -> tuple[bool, str]:
    """Whether CPU tensors go to the executor, and why or why not."""
    config = call.setup.config
    if tensors[0].dtype == torch.float64:
        return False, "float64 has no kernels"
    if _choice.path == "torch":
        return False, "asked for"
    size = tensors[0].shape[0] * config.streams * config.hidden
    if _choice.path == "auto" and size > _choice.host_limit:
        return False, f"T*n*H = {size} > {_choice.host_limit}"
    missing = _no_compiler()
    if missing and _choice.path == "auto":
        return False, missing
    return True, "asked for" if _choice.path == "kernels" else f"T*n*H = {size} <= {_choice.host_limit}"


_missing: list[str] = []


def _no_compiler() -> str:
    """Why the executor has no compiler; empty where it has."""
    if not _missing:
        from mhcgen.backends.host.build import find_compiler

        try:
            find_compiler()
            _missing.append("")
        except EnvironmentFault as fault:
            _missing.append(f"the executor cannot be built here: {fault.message}")
    return _missing[0]


_modules: dict[int, tuple[Module, threading.Lock]] = {}
_lock = threading.Lock()


def module_of(call: Call) -> Module:
    """The operation's emission on the CPU executor; the text is the one that a GPU of sm_90 gets."""
    return _module_and_lock(call)[0]


def _module_and_lock(call: Call) -> tuple[Module, threading.Lock]:
    with _lock:
        if id(call) not in _modules:  # a Call lives as long as the process
            plan = compile(call.program, call.fuse, **call.setup.schedule)
            _modules[id(call)] = Module(plan, HostRunner(plan)), threading.Lock()
            compiled[f"{call.operation.name}, host"] += 1
        return _modules[id(call)]


def run_host(call: Call, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Run an operation on the executor, into tensors for its results.

    Raises:
        EnvironmentFault, CompileError: the executor cannot be built.
        LaunchError: the executor found something.
    """
    module, lock = _module_and_lock(call)
    given: dict[str, Any] = {spec.name: as_numpy(tensor) for spec, tensor in zip(call.inputs, tensors, strict=True)}
    made = {spec.name: as_numpy(tensor) for spec, tensor in zip(call.outputs, outs, strict=True)}
    with lock:
        module(out=made, **given)
        reports = [launch.report for launch in module.launches]
    for report in reports:
        report.raise_if_found()


#: torch dtypes that numpy has under another name or not at all: integers of their size, and what those mean.
_CARRIERS = {
    torch.bfloat16: (torch.int16, np.dtype(ml_dtypes.bfloat16)),
    torch.float8_e4m3fn: (torch.uint8, np.dtype(np.uint8)),
}


def as_numpy(tensor: Tensor) -> np.ndarray[Any, Any]:
    """The memory of a contiguous CPU tensor as a numpy array; bf16 as ml_dtypes', fp8 as uint8."""
    tensor = tensor.detach()
    if tensor.dtype not in _CARRIERS:
        plain: np.ndarray[Any, Any] = tensor.numpy()
        return plain
    carrier, dtype = _CARRIERS[tensor.dtype]
    carried: np.ndarray[Any, Any] = tensor.view(carrier).numpy()
    return carried.view(dtype)
