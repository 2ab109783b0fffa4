"""mhcgen: a compiler for hyper-connections (mHC).

    program = mhcgen.build("deepseek-v4", streams=4, hidden=4096)
    plan = mhcgen.compile(program, fuse="pre", arch="sm_90")
    module = plan.load(backend="host")
    out = module(x=x, mixes=mixes, scale=scale, base=base)
    ref = mhcgen.reference.run(program, inputs)

Importing it needs no GPU, no driver, no CuPy and no compiler.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from mhcgen._version import __version__

# `build` is a module too: imported first, or a later import of the module would hide the function.
from mhcgen.build import Config, build, configure
from mhcgen.errors import MhcgenError, RefusedError
from mhcgen.ir import Program, Stage, Tensor
from mhcgen.plan import Options, Plan

if TYPE_CHECKING:
    from mhcgen import reference
    from mhcgen.api import compile
    from mhcgen.module import HyperConnections

__all__ = [
    "Config",
    "HyperConnections",
    "MhcgenError",
    "Options",
    "Plan",
    "Program",
    "RefusedError",
    "Stage",
    "Tensor",
    "__version__",
    "build",
    "compile",
    "configure",
    "reference",
]


def __getattr__(name: str) -> object:
    """Names whose modules import numpy or networkx are looked up on first use: the command line starts fast."""
    import importlib

    if name == "compile":
        return importlib.import_module("mhcgen.api").compile
    if name == "reference":
        return importlib.import_module("mhcgen.reference")
    if name == "HyperConnections":
        return importlib.import_module("mhcgen.module").HyperConnections
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
