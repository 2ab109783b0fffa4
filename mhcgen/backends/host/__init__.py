"""The host backend: runs unmodified emitted CUDA on the CPU, and checks it while it runs.

`HostModule` compiles an emission with a C++ compiler and launches its kernels with one fiber per CUDA thread.
Shared memory starts poisoned, thread orders can be adversarial, barriers and masks are always checked;
`race=True` adds data races, reads of unwritten memory and accesses out of bounds, with source lines.
"""

from mhcgen.backends.host.buffers import HostBuffer
from mhcgen.backends.host.build import Compiler, find_compiler
from mhcgen.backends.host.findings import AccessCounts, Finding, LaunchReport, Place
from mhcgen.backends.host.module import HostModule
from mhcgen.backends.signature import KernelSignature, Param

ORDERS = ("ascending", "descending", "random", "warp-greedy")

__all__ = [
    "ORDERS",
    "AccessCounts",
    "Compiler",
    "Finding",
    "HostBuffer",
    "HostModule",
    "KernelSignature",
    "LaunchReport",
    "Param",
    "Place",
    "find_compiler",
]
