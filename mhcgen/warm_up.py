"""Compiling and running an emission once before it is needed, and saying what was built.

A serving loop must not compile: the twin for misaligned arrays, which nothing may have used yet, is built too, and a
warm-up that finds nothing to build is an error, not a success.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mhcgen.errors import InternalError
from mhcgen.runtime import NUMPY_DTYPES, Module


@dataclass(frozen=True)
class Built:
    """One emission that warm-up compiled and ran.

    Args:
        arm: the arm it is for.
        twin: `aligned`, or `misaligned` for arrays that are not 16-byte aligned.
        fuse: its fusion.
        kernels: names of its kernels.
        text: first digits of the sha256 of the aligned text.
    """

    arm: str
    twin: str
    fuse: str
    kernels: tuple[str, ...]
    text: str


@dataclass(frozen=True)
class WarmUp:
    """What was built, in how long; prints one line an emission."""

    built: tuple[Built, ...]
    seconds: float

    def __str__(self) -> str:
        lines = [f"warm-up: {len(self.built)} emissions in {self.seconds:.2f} s"]
        lines += [f"  {b.arm} ({b.twin}): fuse {b.fuse}, {len(b.kernels)} kernels, text {b.text}" for b in self.built]
        return "\n".join(lines)


def warm(arm: str, module: Module, misaligned: bool, place: Callable[[Any], Any]) -> Built:
    """Compile one twin and run it on one token of zeros.

    Args:
        arm: name in the report.
        module: what to warm.
        misaligned: the twin for arrays that are not 16-byte aligned.
        place: moves a numpy array to where the backend wants it.

    Raises:
        InternalError: `X-WARM-UP`, the call launched other kernels than the plan has.
        CompileError, EnvironmentFault: of the backend.
    """
    module.prepare(misaligned)
    zeros = {}
    for tensor in module.program.of_role("input", "parameter"):
        shape = module.program.shape(tensor.name, 1)
        # One element more, left out at the front, so that the twin's arrays are off by one element.
        flat = np.zeros(int(np.prod(shape)) + misaligned, NUMPY_DTYPES[tensor.dtype])
        zeros[tensor.name] = place(flat)[int(misaligned) :].reshape(shape)
    module(**zeros)
    ran = sorted(launch.kernel for launch in module.launches)
    names = tuple(kernel.name for kernel in module.plan.kernels)
    if ran != sorted(names):
        raise InternalError("X-WARM-UP", f"arm {arm} launched {ran}, and its plan has {sorted(names)}", where=arm)
    twin = "misaligned" if misaligned else "aligned"
    return Built(arm, twin, module.plan.options.fuse, names, module.plan.emitted_sha256[:12])
