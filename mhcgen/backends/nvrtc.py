"""Compile an emission for any architecture with NVRTC: no GPU, no driver, no CuPy.

The flags are fixed, because they are part of the numerics: contraction is off (every fused multiply-add is
written in the text), subnormals are kept, division and square root are correctly rounded.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mhcgen import cache
from mhcgen.backends.archs import Arch, parse_arch
from mhcgen.backends.nvrtc_library import HeaderDir, Nvrtc, find_nvrtc
from mhcgen.backends.ptx import (
    Counts,
    KernelResources,
    block_barrier_in_loop,
    parse,
    ptx_loops,
    resources,
    sync_sites,
)
from mhcgen.errors import CompileError, EnvironmentFault, UsageError

__all__ = [
    "FLAGS",
    "Compiled",
    "KernelResources",
    "block_barrier_in_loop",
    "compile",
    "find_nvrtc",
    "ptx_loops",
    "sync_sites",
    "target_for",
]

#: Since this release NVRTC keeps what it compiled, and `--no-cache` is an option.
OWN_CACHE = (12, 9)
FLAGS = ("-std=c++17", "--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")

# Compile options that would change what the text computes, in every spelling NVRTC takes.
_FORBIDDEN = re.compile(
    r"-{1,2}(use_fast_math|ftz|prec-div|prec-sqrt|fmad|extra-device-vectorization|gpu-arch.*|arch)\b"
)
_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*([<\"])([^>\"\n]+)[>\"]", re.MULTILINE)
_MISSING = re.compile(r"could not open source file \"([^\"]+)\"|cannot open source file \"([^\"]+)\"")
_WARNING = re.compile(r"\bwarning\b|\(C7\d{3}\)", re.IGNORECASE)
_AT_LINE = re.compile(r"\((\d+)\): (?:catastrophic )?error")
_KERNEL = re.compile(r"__global__\s+(?:void\s+)?(?:__launch_bounds__\s*\([^)]*\)\s*)?(?:void\s+)?(\w+)\s*\(")
_TIMING = re.compile(r"^.*Compile time = .*\n?", re.MULTILINE)
_FORMAT = "nvrtc-entry-1"


@dataclass(frozen=True)
class Compiled:
    """An emission compiled for one target.

    Args:
        ptx: the PTX of the module.
        cubin: machine code, or None for a PTX-only target.
        log: the compiler's log, `ptxas -v` lines included.
        resources: what each kernel needs, by kernel name in order of the text.
        counts: instructions of the whole module, device functions that were not inlined included.
        warnings: lines of the log that warn (a lost unroll, an ignored launch bound, ...).
        notes: what `compile` decided on its own, e.g. a fallback to PTX.
        nvrtc_version: (major, minor).
        arch: the target that was asked for, e.g. `sm_90a`.
        target: the target that was compiled; differs from `arch` after a fallback.
    """

    ptx: str
    cubin: bytes | None
    log: str
    resources: dict[str, KernelResources]
    counts: Counts
    warnings: tuple[str, ...]
    notes: tuple[str, ...]
    nvrtc_version: tuple[int, int]
    arch: str
    target: str

    @property
    def image(self) -> bytes:
        """What a driver loads: the cubin, or the PTX with its terminating zero."""
        return self.cubin if self.cubin is not None else self.ptx.encode() + b"\0"


def target_for(arch: Arch, supported: tuple[int, ...]) -> tuple[Arch, str]:
    """The target to compile for and a note; the note is empty where it is the one asked for.

    An architecture that this NVRTC does not know gets PTX of the highest one below it, which the driver of
    the newer device compiles when it loads the module.

    Raises:
        UsageError: `U-ARCH`, older than everything this NVRTC compiles for.
    """
    if arch.number in supported:
        return arch, ""
    below = [number for number in supported if number < arch.number]
    if not below:
        raise UsageError(
            "U-ARCH",
            f"{arch.name} is too old for the installed NVRTC: its minimum is sm_{min(supported)}.",
            where=arch.name,
            hints=("an NVRTC of CUDA 12 goes lower: pip install nvidia-cuda-nvrtc-cu12",),
        )
    fallback = Arch(max(below), virtual=True)
    return fallback, (
        f"{arch.name} is unknown to this NVRTC; compiled to PTX of {fallback.name} instead, "
        "without the instructions and the machine code of the newer architecture"
    )


def compile(
    source: str,
    arch: str | Arch,
    *,
    name: str = "emission.cu",
    extra: tuple[str, ...] = (),
    max_major: int | None = None,
) -> Compiled:
    """Compile CUDA source, or fetch the result of the same compilation from the cache.

    Args:
        source: the text; it may include CUDA's own headers with `<...>`.
        arch: `sm_90`, `sm_90a`, ..., or `compute_90` for PTX only.
        name: the file name in messages; ends in `.cu`.
        extra: further options such as `-lineinfo` or `-DNAME=1`; none that changes arithmetic.
        max_major: highest acceptable CUDA major version of NVRTC.

    Raises:
        UsageError: `U-ARCH`, unknown or too old; `U-OPTION`, an option that changes arithmetic or the target.
        EnvironmentFault: `E-NO-NVRTC`, or `E-NO-CUDA-HEADERS` where a header is not installed.
        CompileError: `E-COMPILE`, the text does not compile; the notes carry the log.
    """
    wanted = parse_arch(arch)
    for option in extra:
        if _FORBIDDEN.match(option):
            raise UsageError(
                "U-OPTION",
                f"{option} is not passed to NVRTC: the target and the arithmetic options are fixed.",
                where=option,
                notes=("fixed: " + " ".join(FLAGS),),
            )
    library = find_nvrtc(max_major)
    target, note = target_for(wanted, library.archs)
    headers = library.include_dirs()
    options = (f"--gpu-architecture={target.name}", *FLAGS, *extra)
    if not target.virtual:
        options += ("--ptxas-options=-v",)

    key = _key(source, name, options, library, headers)
    entry = _load(key) if key else None
    if entry is None:
        includes = tuple(f"-I{header.path}" for header in headers)
        # NVRTC has a cache of its own on machines with a GPU, and what comes from there has no ptxas log.
        fresh = ("--no-cache",) if library.version >= OWN_CACHE else ()
        result = library.compile(source, options + includes + fresh, name)
        if result.code:
            raise _failure(source, name, options, library, headers, result.log or result.status)
        entry = (result.ptx, result.cubin, _TIMING.sub("", result.log))
        if key:
            _store(key, *entry)
    ptx, cubin, log = entry
    return Compiled(
        ptx=ptx,
        cubin=cubin,
        log=log,
        resources=resources(ptx, log),
        counts=sum((function.counts for function in parse(ptx).values()), Counts()),
        warnings=tuple(
            line.strip() for line in log.splitlines() if _WARNING.search(line) and not line.startswith("Remark:")
        ),
        notes=(note,) if note else (),
        nvrtc_version=library.version,
        arch=wanted.name,
        target=target.name,
    )


def _key(source: str, name: str, options: tuple[str, ...], library: Nvrtc, headers: tuple[HeaderDir, ...]) -> str:
    """The cache key; empty where the result depends on files that the key cannot cover."""
    included = _INCLUDE.findall(source)
    if any(quote == '"' for quote, _ in included) or any(
        option.startswith(("-I", "-i", "--include", "--pre-include")) for option in options
    ):
        return ""
    fingerprints = [header.fingerprint() for header in headers] if included else []
    return cache.key_of(
        _FORMAT, source, name, *options, library.version_text, *_library_state(library), *fingerprints
    )


def _library_state(library: Nvrtc) -> tuple[str, ...]:
    """Path and, where it is a file, size and time of the library: builds of one version differ in patches."""
    with suppress(OSError):
        state = Path(library.path).stat()
        return (library.path, str(state.st_size), str(state.st_mtime_ns))
    return (library.path,)


def _store(key: str, ptx: str, cubin: bytes | None, log: str) -> None:
    head = json.dumps({"format": _FORMAT, "ptx": ptx, "log": log}).encode()
    content = len(head).to_bytes(8, "little") + head + (cubin or b"")
    # A full disk costs time on the next run, not the result of this one.
    with suppress(EnvironmentFault):
        cache.store(key, ".nvrtc", content)


def _load(key: str) -> tuple[str, bytes | None, str] | None:
    path = cache.load(key, ".nvrtc")
    if path is None:
        return None
    try:
        content = path.read_bytes()
        size = int.from_bytes(content[:8], "little")
        head = json.loads(content[8 : 8 + size])
        if head["format"] != _FORMAT:
            return None
        return str(head["ptx"]), content[8 + size :] or None, str(head["log"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _package_of(header: str, library: Nvrtc) -> str:
    suffix = "" if library.version[0] >= 13 else "-cu12"
    top = header.split("/")[0]
    if top in ("cuda", "cub", "thrust", "nv"):
        return f"nvidia-cuda-cccl{suffix}"
    if top == "crt":
        return "nvidia-cuda-crt" if not suffix else "nvidia-cuda-nvcc-cu12"
    return library.runtime_package


def _failure(
    source: str,
    name: str,
    options: tuple[str, ...],
    library: Nvrtc,
    headers: tuple[HeaderDir, ...],
    log: str,
) -> CompileError | EnvironmentFault:
    shown = ", ".join(f"{header.path} (CUDA {header.version_text})" for header in headers)
    facts = (
        f"NVRTC {library.version_text}: {library.path}",
        f"include paths: {shown or 'none'}",
        "options: " + " ".join(options),
    )
    if match := _MISSING.search(log):
        header = match[1] or match[2]
        if ('"', header) not in _INCLUDE.findall(source):
            return EnvironmentFault(
                "E-NO-CUDA-HEADERS",
                f"the header {header} of CUDA {library.version[0]} was not found.",
                where=name,
                notes=facts,
                hints=(f"pip install {_package_of(header, library)}",),
            )
    where, kernel = name, ""
    if match := _AT_LINE.search(log):
        above = "\n".join(source.splitlines()[: int(match[1])])
        kernels = _KERNEL.findall(above)
        kernel = kernels[-1] if kernels else ""
    with suppress(EnvironmentFault):
        where = str(cache.store(cache.key_of("failed", source), ".cu", source.encode()))
    return CompileError(
        "E-COMPILE",
        f"NVRTC rejected {name}" + (f" in kernel {kernel}." if kernel else "."),
        where=where,
        notes=(*log.strip().splitlines(), *facts),
    )
