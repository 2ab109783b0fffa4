"""As much of PyTorch as the adapters use, on numpy, for machines without it: what they compute can be checked, and
that their graphs are captured and replayed, but nothing about time."""

from __future__ import annotations

import types
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np


class Tensor(np.ndarray):
    """A numpy array with the methods of a tensor."""

    def float(self) -> Tensor:
        return self.astype(np.float32)

    def double(self) -> Tensor:
        return self.astype(np.float64)

    def to(self, dtype: Any) -> Tensor:
        return self.astype(dtype)

    def clone(self) -> Tensor:
        return np.ndarray.copy(self).view(Tensor)

    def contiguous(self) -> Tensor:
        return np.ascontiguousarray(self).view(Tensor)

    def flatten(self, start: int = 0) -> Tensor:  # type: ignore[override]
        return self.reshape(*self.shape[:start], -1)

    def square(self) -> Tensor:
        return self * self

    def unsqueeze(self, axis: int) -> Tensor:
        return np.expand_dims(self, axis).view(Tensor)

    def transpose(self, a: int, b: int) -> Tensor:  # type: ignore[override]
        return np.swapaxes(self, a, b).view(Tensor)

    def view(self, *shape: Any) -> Any:  # type: ignore[override]
        return np.ndarray.view(self, *shape) if not isinstance(shape[0], int) else self.reshape(shape)

    def mean(self, axis: int, keepdim: bool = False) -> Any:  # type: ignore[override]
        return np.mean(np.asarray(self), axis=axis, keepdims=keepdim).view(Tensor)

    def sum(self, axis: int, keepdim: bool = False) -> Any:  # type: ignore[override]
        return np.sum(np.asarray(self), axis=axis, keepdims=keepdim).view(Tensor)

    def norm(self) -> Any:
        return np.linalg.norm(np.asarray(self))


def _softmax(t: Any, axis: int) -> Any:
    e = np.exp(np.asarray(t) - np.max(np.asarray(t), axis=axis, keepdims=True))
    return (e / e.sum(axis=axis, keepdims=True)).view(Tensor)


class _Event:
    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self, stream: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, other: _Event) -> float:
        return 0.032


class _Graph:
    replays = 0

    def replay(self) -> None:
        type(self).replays += 1


def module() -> types.ModuleType:
    """A module to put in place of `torch`."""
    torch = types.ModuleType("torch")
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        synchronize=lambda: None,
        Stream=lambda: types.SimpleNamespace(synchronize=lambda: None),
        stream=lambda stream: nullcontext(),
        CUDAGraph=_Graph,
        graph=lambda graph, stream: nullcontext(),
        Event=_Event,
    )
    names = {
        "bfloat16": ml_dtypes.bfloat16,
        "__version__": "2.0+numpy",
        "cuda": cuda,
        "no_grad": nullcontext,
        "compile": lambda op, dynamic, fullgraph: op,
        "compiler": types.SimpleNamespace(reset=lambda: None),
        "from_dlpack": lambda array: np.array(array).view(Tensor),
        "einsum": lambda how, *tensors: np.einsum(how, *map(np.asarray, tensors)).view(Tensor),
        "rsqrt": lambda t: 1.0 / np.sqrt(t),
        "sigmoid": lambda t: 1.0 / (1.0 + np.exp(-t)),
        "softmax": _softmax,
    }
    for name, value in names.items():
        setattr(torch, name, value)
    return torch
