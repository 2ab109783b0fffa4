"""Any Plan on torch's CUDA tensors: the runner behind `mhcgen.torch.load`.

The operators have launches of their own with less to do a call (`mhcgen.torch.launch`); this one is for Programs that
no operator is, such as a whole trunk with branches. Both load and launch through the same objects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mhcgen.errors import EnvironmentFault, InputError, InputTypeError
from mhcgen.plan import Kernel, Plan
from mhcgen.runtime import Module
from mhcgen.torch.eager import DTYPES
from mhcgen.torch.launch import Launcher, cluster_of, load_launchers, raw_stream

_NAMES = {torch.float8_e4m3fn: "uint8"}


@dataclass(frozen=True)
class _Flags:
    c_contiguous: bool


@dataclass(frozen=True)
class _Described:
    """A tensor as `Module` looks at arrays."""

    tensor: Tensor
    ndim: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    flags: _Flags


class TorchRunner:
    """CUDA tensors, on their device and torch's current stream of it.

    Args:
        plan: what to run; its architecture must be one that the device runs.
        device: number of the device; torch's current one if None. All tensors of a call must be on it.

    Raises:
        EnvironmentFault: `E-NO-GPU`, torch has no CUDA device.
    """

    name = "torch"
    options: tuple[str, ...] = ()

    def __init__(self, plan: Plan, device: int | None = None) -> None:
        if not torch.cuda.is_available():
            raise EnvironmentFault(
                "E-NO-GPU",
                "torch has no CUDA device.",
                notes=(f"torch {torch.__version__}, built for CUDA {torch.version.cuda}",),
                hints=("mhcgen's operators run on CPU tensors too",),
            )
        self.plan = plan
        self.device = torch.cuda.current_device() if device is None else device
        self._launchers: dict[bool, dict[str, Launcher]] = {}

    def check_array(self, name: str, value: Any) -> Any:
        """CUDA tensors of the runner's device only."""
        if isinstance(value, _Described):
            return value
        if not isinstance(value, Tensor):
            raise InputTypeError(
                "I-ARRAY",
                f"{name} is a {type(value).__module__}.{type(value).__name__}, and this runner takes torch tensors",
                where=name,
                hints=("torch.from_dlpack(array) shares the memory of a CuPy array",),
            )
        if value.get_device() != self.device:
            raise InputError(
                "I-DEVICE",
                f"{name} is on {value.device}, and this runner works on cuda:{self.device}",
                where=name,
                hints=(f"move it explicitly: {name}.to('cuda:{self.device}')",),
            )
        strides = tuple(value.element_size() * step for step in value.stride())
        return _Described(value, value.ndim, tuple(value.shape), strides, _Flags(value.is_contiguous()))

    def empty(self, shape: tuple[int, ...], dtype: str) -> Tensor:
        """An uninitialised tensor of torch's allocator."""
        return torch.empty(shape, dtype=DTYPES[dtype], device=torch.device("cuda", self.device))

    def address(self, array: Any) -> int:
        """Device address of the first byte; 0 of an empty tensor."""
        return int(_tensor(array).data_ptr())

    def dtype_name(self, array: Any) -> str:
        """numpy's name of the dtype, as errors give it."""
        dtype = _tensor(array).dtype
        return _NAMES.get(dtype, str(dtype).removeprefix("torch."))

    def module(self, scalar: bool = False) -> dict[str, Launcher]:
        """The kernels by name, or those of the twin with element loads; compiles the first time."""
        if scalar not in self._launchers:
            loaded = load_launchers(self.plan, scalar, self.device, self.plan.program.scope)
            self._launchers[scalar] = {launcher.name: launcher for launcher in loaded}
        return self._launchers[scalar]

    def is_compiled(self, scalar: bool) -> bool:
        """Whether `module(scalar)` has nothing left to compile."""
        return scalar in self._launchers

    def launch(
        self,
        kernel: Kernel,
        scalar: bool,
        grid: tuple[int, int],
        args: list[Any],
        fresh: tuple[str, ...],
        **options: Any,
    ) -> None:
        """Enqueue one kernel on torch's current stream of the device; nothing is waited for."""
        values = [int(arg.data_ptr()) if isinstance(arg, Tensor) else int(arg) for arg in args]
        shape = ((*grid, 1), (kernel.threads, 1, 1), 0, cluster_of(kernel), kernel.dependent)
        self.module(scalar)[kernel.name].launch(values, shape, raw_stream(self.device))


def _tensor(array: Any) -> Tensor:
    return array.tensor if isinstance(array, _Described) else array


def load(plan: Plan, device: int | None = None) -> Module:
    """A callable of CUDA tensors by name, for any Plan; see `mhcgen.runtime.Module`.

    It has no gradients and torch.compile does not see into it; the operators have and do.

    Args:
        plan: a finished Plan for the device's architecture (`mhcgen.torch.arch_of`).
        device: number of the device; torch's current one if None.
    """
    return Module(plan, TorchRunner(plan, device))
