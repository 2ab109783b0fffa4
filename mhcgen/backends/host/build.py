"""From emitted text to a loadable module: find a compiler, compile, link, cache."""

from __future__ import annotations

import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Literal

from mhcgen import cache
from mhcgen.backends.host.unit import unit_text
from mhcgen.backends.signature import KernelSignature
from mhcgen.errors import CompileError, EnvironmentFault, UsageError

Fibers = Literal["asm", "ucontext"]

ENV_CXX = "MHCGEN_CXX"
_HERE = Path(__file__).parent
_OPTIMISATION = re.compile(r"-O[0123s]")
# First versions with __builtin_bit_cast and constinit.
_OLDEST = {"gcc": 11, "clang": 10}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler that was found and can build modules.

    Args:
        command: the words that start it.
        family: `gcc`, `clang` or `zig` (which is clang with other defaults).
        identity: path and version output; part of every cache key.
    """

    command: tuple[str, ...]
    family: Literal["gcc", "clang", "zig"]
    identity: str


@dataclass(frozen=True)
class Built:
    """A module on disk.

    Args:
        path: the shared object in the cache.
        compiled: False where it came from the cache.
    """

    path: Path
    compiled: bool


def find_compiler(explicit: str | None = None) -> Compiler:
    """The compiler to use: `explicit`, else `MHCGEN_CXX`, else g++, clang++, c++, else the ziglang package.

    Raises:
        EnvironmentFault: `E-CXX` if the one asked for cannot be used, `E-NO-CXX` if there is none.
    """
    wish = explicit or os.environ.get(ENV_CXX)
    if wish:
        found = _probe(tuple(shlex.split(wish)))
        if isinstance(found, Compiler):
            return found
        source = "the compiler argument" if explicit else ENV_CXX
        raise EnvironmentFault("E-CXX", f"{source} names a compiler that cannot be used", where=wish, notes=(found,))
    rejected = []
    for name in ("g++", "clang++", "c++"):
        path = shutil.which(name)
        if path is None:
            continue
        found = _probe((path,))
        if isinstance(found, Compiler):
            return found
        rejected.append(found)
    if importlib.util.find_spec("ziglang") is not None:
        found = _probe((sys.executable, "-m", "ziglang", "c++"))
        if isinstance(found, Compiler):
            return found
        rejected.append(found)
    raise EnvironmentFault(
        "E-NO-CXX",
        "the host backend needs a C++ compiler and found none",
        notes=tuple(rejected),
        hints=("apt-get install g++", "pip install 'mhcgen[zig]'", f"set {ENV_CXX} to a compiler"),
    )


def build(
    source: str,
    kernels: Sequence[KernelSignature],
    *,
    name: str,
    race: bool,
    compiler: str | None,
    fibers: Fibers | None,
    opt: str,
) -> Built:
    """Compile `source`, or take the module from the cache.

    Raises:
        EnvironmentFault: no usable compiler, an unsupported platform, or an unwritable cache.
        CompileError: `X-COMPILE` if the compiler rejects the emission; `where` is the file with its text.
        UsageError: `X-OPT`, `X-FIBERS` for options that mean nothing here.
    """
    _check_platform()
    if not _OPTIMISATION.fullmatch(opt):
        raise UsageError("X-OPT", f"not an optimisation level: {opt!r}", hints=("-O0, -O1, -O2, -O3 or -Os",))
    cxx = find_compiler(compiler)
    unit = unit_text(source, kernels, name)
    # The debug information that dwarf.py reads, and a check of every pointer's alignment: a GPU faults where x86
    # mostly does not care.
    extra = ("-g1", "-gdwarf-4", "-fsanitize=alignment", *(_race_flags(cxx) if race else ()))
    compile_flags = (*_flags(cxx, opt), *extra)
    runtime_flags = (*_flags(cxx, "-O2"), *_fiber_flags(fibers))
    runtime_key = cache.key_of("runtime", _our_text(), cxx.identity, " ".join(runtime_flags))
    key = cache.key_of("module", unit, runtime_key, " ".join(compile_flags), " ".join(_link_flags(cxx)))
    found = cache.load(key, ".so")
    if found is not None:
        return Built(found, compiled=False)
    with cache.building(key):
        found = cache.load(key, ".so")
        if found is not None:
            return Built(found, compiled=False)
        with cache.workspace() as work:
            runtime = _runtime_object(cxx, runtime_key, runtime_flags, work)
            (work / "unit.cpp").write_text(unit)
            # Relative names, so that the same emission gives the same bytes in every directory.
            mapped = f"-ffile-prefix-map={work}=."
            _run(cxx, (*compile_flags, mapped, "-c", "unit.cpp", "-o", "unit.o"), work, key, unit)
            # A second command: with -fsanitize=thread on it, the driver would link the sanitizer's own runtime.
            _run(cxx, (*_link_flags(cxx), "unit.o", str(runtime), "-lm", "-o", "module.so"), work, key, unit)
            return Built(cache.store(key, ".so", work / "module.so"), compiled=True)


def _check_platform() -> None:
    if sys.platform != "linux":
        raise EnvironmentFault("E-PLATFORM", f"the host backend runs on Linux only, not on {sys.platform}")


@lru_cache(maxsize=32)
def _probe(command: tuple[str, ...]) -> Compiler | str:
    """The compiler behind `command`, or a sentence that says why it cannot be used."""
    shown = shlex.join(command)
    try:
        answer = subprocess.run(
            (*command, "--version"),
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env=_environment(),
        )
    except (OSError, subprocess.SubprocessError) as fault:
        return f"{shown}: {fault}"
    if answer.returncode != 0:
        return f"{shown} --version ended with exit status {answer.returncode}"
    clang = re.search(r"clang version (\d+)", answer.stdout)
    gcc = re.search(r"^\S.*?(\d+)\.\d+\.\d+\s*$", answer.stdout.splitlines()[0]) if answer.stdout else None
    match = clang or gcc
    if match is None:
        return f"{shown} is neither GCC nor Clang"
    family: Literal["gcc", "clang"] = "clang" if clang else "gcc"
    if int(match.group(1)) < _OLDEST[family]:
        return f"{shown} is {family} {match.group(1)}; at least {_OLDEST[family]} is needed"
    is_zig = Path(command[0]).name.startswith("zig") or "ziglang" in command
    # Absolute, because the compiler runs in another directory than the caller's.
    program = str(Path(shutil.which(command[0]) or command[0]).absolute())
    return Compiler((program, *command[1:]), "zig" if is_zig else family, f"{program} {shown}\n{answer.stdout}")


def _environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def _flags(cxx: Compiler, opt: str) -> tuple[str, ...]:
    flags = [
        "-std=c++20",
        opt,
        "-fPIC",
        "-w",
        "-ffp-contract=off",  # a product and a sum are two roundings, on every CPU
        "-fno-fast-math",
        "-fno-math-errno",
        "-fno-strict-aliasing",  # device code reinterprets memory freely, and nvcc lets it
        "-fno-delete-null-pointer-checks",  # so that a race build sees the access
        "-fno-exceptions",
        "-fno-rtti",
        "-ftls-model=local-dynamic",  # shared memory is thread-local and never leaves the module
        f"-I{_HERE}",
        f"-I{_HERE / 'shim'}",
    ]
    if platform.machine() == "x86_64":
        flags.append("-fcf-protection=none")  # a shadow stack would not survive our stack switch
        if cxx.family == "gcc":
            flags.append("-mtls-dialect=gnu")  # the one that module_map.h builds on; clang's default
    if cxx.family == "gcc":
        # Where variables live is asked by nobody, and a fifth of the time; the code is the same.
        flags += ["-fno-var-tracking", "-fno-var-tracking-assignments"]
    if cxx.family == "zig":
        flags += ["-fno-sanitize=undefined", "-mcpu=baseline"]  # zig's defaults are UBSan and the native CPU
    return tuple(flags)


def _race_flags(cxx: Compiler) -> tuple[str, ...]:
    # Loads, stores and indexes call back into our runtime; no sanitizer library is linked.
    if cxx.family == "gcc":
        # GCC moves a load that cannot fault out of a loop, and then lanes make it that never would.
        return ("-fsanitize=thread", "-fsanitize=bounds", "-fno-partial-inlining", "-fno-tree-loop-im")
    # Clang leaves out a read that a write to the same place follows; we want it, for reads of unwritten memory.
    # Its index checks include pointer arithmetic that nobody follows, which is no bug of a kernel: left out.
    return ("-fsanitize=thread", "-mllvm", "-tsan-instrument-read-before-write")


def _link_flags(cxx: Compiler) -> tuple[str, ...]:
    # -z defs: an intrinsic that nobody defines fails here, not at the launch. -Bsymbolic: our callbacks win
    # even in a process that has loaded a sanitizer.
    flags = ("-shared", "-Wl,-z,defs", "-Wl,-Bsymbolic", "-Wl,--as-needed")
    return flags if cxx.family == "gcc" else (*flags, "-nostdlib++")


def _fiber_flags(fibers: Fibers | None) -> tuple[str, ...]:
    if fibers is None:
        return ()
    if fibers == "ucontext":
        return ("-DMHC_FIBERS_UCONTEXT=1",)
    if fibers != "asm":
        raise UsageError("X-FIBERS", f"unknown kind of fiber {fibers!r}", hints=("asm, ucontext or None",))
    if platform.machine() != "x86_64":
        raise UsageError("X-FIBERS", f"the hand-written switch is for x86_64, not {platform.machine()}")
    return ()


@lru_cache(maxsize=1)
def _our_text() -> str:
    files = sorted([*_HERE.glob("*.h"), *_HERE.glob("*.cpp"), *(_HERE / "shim").glob("*.h")])
    return "\n".join(f"{path.name}\n{path.read_text()}" for path in files)


def _runtime_object(cxx: Compiler, key: str, flags: tuple[str, ...], work: Path) -> Path:
    with cache.building(key):
        found = cache.load(key, ".o")
        if found is not None:
            return found
        mapped = f"-ffile-prefix-map={work}=."
        _run(cxx, (*flags, mapped, "-c", str(_HERE / "runtime.cpp"), "-o", "runtime.o"), work, key, "")
        return cache.store(key, ".o", work / "runtime.o")


def _run(cxx: Compiler, arguments: tuple[str, ...], work: Path, key: str, unit: str) -> None:
    try:
        answer = subprocess.run(
            (*cxx.command, *arguments),
            capture_output=True,
            text=True,
            check=False,
            cwd=work,
            env=_environment(),
        )
    except OSError as fault:
        raise EnvironmentFault("E-CXX", f"the compiler cannot be started: {fault}", where=cxx.command[0]) from fault
    if answer.returncode == 0:
        return
    where = str(cache.store(key, ".failed.cpp", unit.encode())) if unit else str(_HERE / "runtime.cpp")
    what = "the emission" if unit else "the runtime of the host backend"
    ended = "" if answer.returncode > 0 else f" (killed by signal {-answer.returncode})"
    raise CompileError(
        "X-COMPILE",
        f"{shlex.join(cxx.command)} rejects {what}{ended}",
        where=where,
        notes=((answer.stderr or answer.stdout).strip(), f"flags: {shlex.join(arguments)}"),
    )
