"""Where kernels run: the CPU executor, or CuPy on the caller's current stream and device."""

from __future__ import annotations

from typing import Any, Protocol

import ml_dtypes
import numpy as np

from mhcgen.backends.signature import KernelSignature
from mhcgen.errors import InputTypeError
from mhcgen.lower import signature
from mhcgen.plan import Kernel, Plan
from mhcgen.values import switch

#: dtype name -> numpy dtype that carries it on the host; bf16 is ml_dtypes', never plain uint16. fp8 is its code in a
#: byte, since CuPy has no such dtype.
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "fp8_e4m3": np.dtype(np.uint8),
    "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64),
}


class Runner(Protocol):
    """Where kernels run; `options` are those of `launch` that callers may give."""

    name: str
    options: tuple[str, ...]

    def check_array(self, name: str, value: Any) -> Any:
        """The array itself, or an InputTypeError if it is not of this runner's kind."""

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An array whose contents mean nothing; poisoned with 0xff bytes on the host."""

    def address(self, array: Any) -> int:
        """Address of its first element."""

    def dtype_name(self, array: Any) -> str:
        """Its dtype as errors name it."""

    def module(self, scalar: bool = False) -> Any:
        """The compiled emission, or its twin with element loads; compiles the first time."""

    def is_compiled(self, scalar: bool) -> bool:
        """Whether `module(scalar)` has nothing left to compile."""

    def launch(
        self,
        kernel: Kernel,
        scalar: bool,
        grid: tuple[int, int],
        args: list[Any],
        fresh: tuple[str, ...],
        **options: Any,
    ) -> Any:
        """Launch one kernel; `fresh` names parameters it is the first to write."""


class HostRunner:
    """The CPU executor; arrays are numpy's.

    Args:
        plan: what to run.
        race: instrument memory accesses; several times slower.
        compiler: C++ compiler command; None searches.
        order, seed: default thread order of launches.
        source: the text to compile in place of the plan's own.
        opt: optimisation level; it changes no bit, only the time to compile and to run.
    """

    name = "host"
    options: tuple[str, ...] = ("order", "seed", "blocks", "count_accesses")

    def __init__(
        self,
        plan: Plan,
        *,
        race: bool = False,
        compiler: str | None = None,
        order: str = "ascending",
        seed: int = 0,
        source: str | None = None,
        opt: str = "-O2",
    ) -> None:
        switch("race", race)
        self.plan = plan
        self.race = race
        self.opt = opt
        self.compiler = compiler
        self.order = order
        self.seed = seed
        self._source = source
        self._modules: dict[bool, Any] = {}

    def check_array(self, name: str, value: Any) -> Any:
        """numpy arrays only; a masked one has elements that are not there, and kernels read them all."""
        if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
            raise InputTypeError(
                "I-ARRAY",
                f"{name} is a {type(value).__module__}.{type(value).__name__}, and the host backend "
                "takes numpy arrays",
                where=name,
                hints=("convert it explicitly, e.g. cupy.asnumpy(array) or tensor.cpu().numpy()",),
            )
        return value

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """A guard-banded, poisoned array."""
        from mhcgen.backends.host import HostBuffer

        return HostBuffer(shape, NUMPY_DTYPES[dtype]).array

    def address(self, array: Any) -> int:
        """Address of the first byte."""
        return int(array.ctypes.data) if array.size else 0

    def dtype_name(self, array: Any) -> str:
        """numpy's name of the dtype; with the byte order where that is not this machine's."""
        return str(array.dtype.name if array.dtype.isnative else array.dtype.str)

    def module(self, scalar: bool = False) -> Any:
        """The compiled emission, or its twin with element loads."""
        from mhcgen.backends import host

        if scalar not in self._modules:
            source, signatures = text_of(self.plan, scalar)
            if self._source is not None:
                source = self._source
            host_signatures = [
                host.KernelSignature(s.name, tuple(host.Param(p.name, p.ctype, p.writable) for p in s.params))
                for s in signatures
            ]
            self._modules[scalar] = host.HostModule(
                source, host_signatures, race=self.race, compiler=self.compiler, opt=self.opt
            )
        return self._modules[scalar]

    def is_compiled(self, scalar: bool) -> bool:
        """Whether `module(scalar)` has nothing left to compile."""
        return scalar in self._modules

    def launch(
        self,
        kernel: Kernel,
        scalar: bool,
        grid: tuple[int, int],
        args: list[Any],
        fresh: tuple[str, ...],
        **options: Any,
    ) -> Any:
        """Run one kernel and return its LaunchReport."""
        settings = {"order": self.order, "seed": self.seed, **options}
        return self.module(scalar).launch(
            kernel.name,
            grid,
            kernel.threads,
            args,
            uninitialised=fresh if self.race else frozenset(),
            **settings,
        )


def text_of(plan: Plan, scalar: bool) -> tuple[str, list[KernelSignature]]:
    """Source and signatures of a plan, or of its twin with element loads."""
    from dataclasses import replace

    from mhcgen.passes import run_pipeline

    if scalar and not plan.options.scalar:
        plan = run_pipeline(plan.program, replace(plan.options, scalar=True), command=plan.command)
    return plan.source, [signature(plan, kernel) for kernel in plan.kernels]


class CudaRunner:
    """CuPy: the caller's current stream and device; arrays are CuPy's.

    Args:
        plan: what to run.
        compile: `auto`, `nvrtc` (exact) or `cupy` (flushes subnormals).
    """

    name = "cuda"
    options: tuple[str, ...] = ("stream",)

    def __init__(self, plan: Plan, *, compile: str = "auto", source: str | None = None) -> None:
        from mhcgen.backends import cuda
        from mhcgen.backends.cupy_state import require_gpu

        self.plan = plan
        self._cuda = cuda
        self._compile = compile
        self._source = source
        self._modules: dict[bool, Any] = {}
        require_gpu()

    def check_array(self, name: str, value: Any) -> Any:
        """CuPy arrays only."""
        if not type(value).__module__.startswith("cupy"):
            raise InputTypeError(
                "I-ARRAY",
                f"{name} is a {type(value).__module__}.{type(value).__name__}, and the cuda backend "
                "takes CuPy arrays",
                where=name,
                hints=("move it explicitly, e.g. cupy.asarray(array)",),
            )
        return value

    def empty(self, shape: tuple[int, ...], dtype: str) -> Any:
        """An uninitialised array on the current device."""
        import cupy

        return cupy.empty(shape, NUMPY_DTYPES[dtype])

    def address(self, array: Any) -> int:
        """Device address of the first byte."""
        return int(array.data.ptr) if array.size else 0

    def dtype_name(self, array: Any) -> str:
        """Name of the dtype."""
        return str(array.dtype.name)

    def module(self, scalar: bool = False) -> Any:
        """The compiled emission, or its twin with element loads."""
        if scalar not in self._modules:
            source, signatures = text_of(self.plan, scalar)
            if self._source is not None:
                source = self._source
            self._modules[scalar] = self._cuda.CudaModule(source, signatures, compile=self._compile)
        return self._modules[scalar]

    def is_compiled(self, scalar: bool) -> bool:
        """Whether `module(scalar)` has nothing left to compile."""
        return scalar in self._modules

    def launch(
        self,
        kernel: Kernel,
        scalar: bool,
        grid: tuple[int, int],
        args: list[Any],
        fresh: tuple[str, ...],
        **options: Any,
    ) -> Any:
        """Launch one kernel on the current stream; returns None, nothing is waited for."""
        settings = {"dependent": kernel.dependent, **options}
        self.module(scalar).launch(kernel.name, (*grid, 1), (kernel.threads, 1, 1), args, **settings)


def cuda_usable() -> bool:
    """Whether CuPy and a device are there; imports CuPy only if it is installed."""
    import importlib.util

    if importlib.util.find_spec("cupy") is None:
        return False
    from mhcgen.backends import cuda

    return cuda.is_available()[0]
