"""mhcgen: a compiler for hyper-connections (mHC).

    program = mhcgen.build("deepseek-v4", streams=4, hidden=4096)
    plan = mhcgen.compile(program, fuse="pre", arch="sm_90")
    module = plan.load(backend="host")
    out = module(x=x, mixes=mixes, scale=scale, base=base)
    ref = mhcgen.reference.run(program, inputs)

Importing it needs no GPU, no driver, no CuPy and no compiler.
"""

from mhcgen import reference
from mhcgen._version import __version__
from mhcgen.api import compile
from mhcgen.build import Config, build, configure
from mhcgen.errors import MhcgenError, RefusedError
from mhcgen.ir import Program, Stage, Tensor
from mhcgen.plan import Options, Plan

__all__ = [
    "Config",
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
