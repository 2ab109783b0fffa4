"""The translation unit around an emission: prelude, the unchanged text, dynamic shared memory, entries."""

from __future__ import annotations

import re
from collections.abc import Sequence

from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.errors import UsageError

# Dynamic shared memory that a block can have at most: 227 KB on sm_90 and sm_100.
MAX_DYNAMIC_SHARED = 232448

_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")


def source_name(name: str) -> str:
    """The file name of an emission in compiler messages and findings."""
    return re.sub(r'["\\\n]', "_", name if name.endswith(".cu") else f"{name}.cu")


def unit_text(source: str, kernels: Sequence[KernelSignature], name: str) -> str:
    """The text that is compiled; the emission keeps its own line numbers.

    Raises:
        UsageError: `X-KERNEL-NAME` if a kernel's name is no C identifier.
    """
    names = dynamic_shared_names(source)
    tail = ['#line 1 "mhcgen-host-entries"']
    bounds = "*low = *high = 0;"
    if names:
        bounds = "*low = (char*)mhc_unit_dynamic; *high = *low + sizeof mhc_unit_dynamic;"
        tail.append(
            'extern "C" { __attribute__((aligned(1024))) thread_local unsigned char '
            f"mhc_unit_dynamic[{MAX_DYNAMIC_SHARED}]; }}"
        )
        # All dynamic arrays of a module are one memory, whatever their names and types.
        tail += [f'__asm__(".globl {n}\\n.set {n}, mhc_unit_dynamic\\n");' for n in names]
    tail.append(
        'extern "C" __attribute__((no_sanitize("thread"))) void mhc_unit_shared(char** low, char** high) '
        f"{{ {bounds} }}"
    )
    tail += [_entry(kernel) for kernel in kernels]
    return "\n".join(['#include "prelude.h"', f'#line 1 "{source_name(name)}"', source, *tail, ""])


def dynamic_shared_names(source: str) -> tuple[str, ...]:
    """The names of the `extern __shared__` arrays that an emission declares, sorted."""
    bare = re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.DOTALL)
    declarations = re.findall(r"\b(?:extern\s+__shared__|__shared__\s+extern)\b([^;]*);", bare)
    names = (re.search(r"([A-Za-z_]\w*)\s*\[[^\]]*\]\s*$", text) for text in declarations)
    return tuple(sorted({match.group(1) for match in names if match}))


def uses_clusters(source: str) -> bool:
    """Whether an emission knows of clusters at all."""
    return any(f"mhc_host_{name}" in source for name in ("cluster_", "map_shared_rank", "send"))


def launch_bound(source: str, kernel: str) -> int | None:
    """The threads that `__launch_bounds__` allows the kernel; None where the emission says nothing plain."""
    match = re.search(rf"__launch_bounds__\s*\(\s*(\d+)\s*[,)][^;{{}}]*?\b{re.escape(kernel)}\s*\(", source)
    return int(match.group(1)) if match else None


def _entry(kernel: KernelSignature) -> str:
    if not _IDENTIFIER.fullmatch(kernel.name):
        raise UsageError("X-KERNEL-NAME", f"not a kernel name that the host can call: {kernel.name!r}")
    types = ", ".join(_c_type(param) for param in kernel.params)
    return f"MHC_HOST_ENTRY({kernel.name}, void({types}))"


def _c_type(param: Param) -> str:
    """The parameter's type as part of a function type: without `__restrict__` and top-level const."""
    words = param.ctype.replace("*", " * ").split()
    base = words[: words.index("*")] if "*" in words else words
    name = " ".join(word for word in base if word != "const")
    if not param.is_pointer:
        return name
    return f"const {name}*" if "const" in base else f"{name}*"
