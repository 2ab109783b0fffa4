"""What is installed, what works, what is missing, and the one command that adds it."""

from __future__ import annotations

import contextlib
import importlib
import importlib.metadata
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from mhcgen import cache
from mhcgen.doctor_extras import CUDA_EXTRAS, USES, Need, extras, torch_cuda
from mhcgen.errors import EnvironmentFault, MhcgenError

State = Literal["ok", "missing", "broken", "note"]

_OLDEST_PYTHON = (3, 11)
# These releases break the import of networkx.
_BAD_PYTHONS = ((3, 13, 10), (3, 14, 1))
_CORE = ("jinja2", "ml_dtypes", "networkx", "numpy", "typer")
#: what somebody needs -> names of the checks that must be ok for it
NEEDS = {
    "host": ("Python", *_CORE, "C++ compiler", "cache"),
    "nvrtc": ("Python", *_CORE, "NVRTC", "CUDA headers", "cache"),
    "cuda": ("Python", *_CORE, "CuPy", "GPU", "CUDA versions", "cache"),
    "torch": ("Python", *_CORE, "torch", "cache"),
}


@dataclass(frozen=True)
class Check:
    """One line of a diagnosis.

    Args:
        name: what was looked at.
        state: `ok`; `missing`: a backend does not work without it; `broken`: it is there but does not work;
            `note`: worth knowing, nothing is wrong.
        detail: version, path, or what is wrong.
        fix: the one command or action that mends it; empty where nothing is to be done.
    """

    name: str
    state: State
    detail: str
    fix: str = ""


def diagnose() -> list[Check]:
    """Look at everything mhcgen can use; never raises, makes no CUDA context, takes about a second."""
    checks = [_guarded("Python", _python)]
    checks += [_guarded(name, lambda name=name: _core(name)) for name in _CORE]  # type: ignore[misc]
    checks += [
        _guarded("C++ compiler", _compiler),
        _guarded("NVRTC", _nvrtc),
        _guarded("CUDA headers", _headers),
        _guarded("CuPy", _cupy),
        _guarded("GPU", _gpu),
        _guarded("CUDA versions", _versions),
        _guarded("nvcc", _nvcc),
        _guarded("cache", _cache),
    ]
    for extra, needs in extras().items():
        if extra not in CUDA_EXTRAS:
            name = needs[0].package if len(needs) == 1 else f"extra {extra}"
            checks.append(_guarded(name, partial(_optional, name, extra, needs)))
    return checks


def unmet(need: str, checks: list[Check]) -> list[Check]:
    """The checks that stand in the way of a backend.

    Args:
        need: a key of `NEEDS`.
        checks: of `diagnose`.
    """
    # A cache that does not outlive a reboot is still a cache.
    fine = {"cache": ("ok", "note"), "CUDA versions": ("ok", "note")}
    return [c for c in checks if c.name in NEEDS[need] and c.state not in fine.get(c.name, ("ok",))]


def _guarded(name: str, look: Callable[[], Check]) -> Check:
    try:
        return look()
    except Exception as error:  # noqa: BLE001  (a diagnosis must survive whatever it finds)
        return Check(name, "broken", f"{type(error).__name__}: {error}".splitlines()[0])


def _of_fault(name: str, state: State, fault: MhcgenError) -> Check:
    detail = "; ".join((fault.message.rstrip("."), *fault.notes))
    return Check(name, state, detail, fault.hints[0] if fault.hints else "")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "unknown version"


def _python() -> Check:
    found = sys.version_info[:3]
    text = ".".join(map(str, found))
    if found < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return Check("Python", "broken", text, f"install Python {oldest} or later")
    if found in _BAD_PYTHONS:
        return Check("Python", "broken", f"{text} breaks the import of networkx", "install another patch release")
    return Check("Python", "ok", text)


def _core(name: str) -> Check:
    if importlib.util.find_spec(name) is None:
        return Check(name, "missing", "needed by every command", "pip install mhcgen")
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001  (any exception of a foreign package means the same)
        fix = f"pip install --force-reinstall {name}"
        return Check(name, "broken", f"its import fails: {type(error).__name__}: {error}", fix)
    return Check(name, "ok", _version(name))


def _optional(name: str, extra: str, needs: tuple[Need, ...]) -> Check:
    # Found, not imported: torch takes seconds and may make a context.
    use, fix = USES.get(extra, "see the README"), f"pip install 'mhcgen[{extra}]'"
    missing = [need.package for need in needs if not need.found]
    if missing:
        which = "not installed" if len(needs) == 1 else f"without {', '.join(missing)}"
        return Check(name, "note", f"{which}; optional: {use}", fix)
    old = [need for need in needs if need.too_old]
    if old:
        detail = ", ".join(f"{need.package} {need.found} is older than {need.oldest}" for need in old)
        return Check(name, "broken", detail, f"pip install --upgrade 'mhcgen[{extra}]'")
    found = [need.found if len(needs) == 1 else f"{need.package} {need.found}" for need in needs]
    return Check(name, "ok", ", ".join(found))


def _compiler() -> Check:
    from mhcgen.backends.host.build import find_compiler

    try:
        found = find_compiler()
    except EnvironmentFault as fault:
        if fault.code == "E-NO-CXX":
            detail = "; ".join(("the host backend needs one", *fault.notes))
            return Check("C++ compiler", "missing", detail, "pip install 'mhcgen[zig]'")
        return _of_fault("C++ compiler", "broken", fault)
    # The identity is the command in a line of its own, and what the compiler says about itself, its version early on.
    said = [line for line in found.identity.splitlines()[1:] if re.search(r"\d+\.\d+", line)]
    return Check("C++ compiler", "ok", ", ".join((" ".join(found.command), *said[:1])))


def _nvrtc() -> Check:
    from mhcgen.backends.nvrtc_library import ENV_LIBRARY, find_nvrtc

    try:
        library = find_nvrtc()
    except EnvironmentFault as fault:
        return _of_fault("NVRTC", "broken" if ENV_LIBRARY in fault.where else "missing", fault)
    archs = f"sm_{library.archs[0]} to sm_{library.archs[-1]}" if library.archs else "no architectures"
    return Check("NVRTC", "ok", f"{library.version_text}, {archs}, {library.path}")


def _headers() -> Check:
    from mhcgen.backends.nvrtc_library import find_nvrtc, header_dirs

    try:
        library = find_nvrtc()
    except EnvironmentFault:
        return Check("CUDA headers", "note", "not looked for: they belong to NVRTC")
    matching = library.include_dirs()
    if matching:
        return Check("CUDA headers", "ok", f"{matching[0].version_text}, {matching[0].path}")
    others = ", ".join(f"{folder.path} ({folder.version_text})" for folder in header_dirs(library.path))
    return Check(
        "CUDA headers",
        "missing",
        f"bf16 and fp16 need those of CUDA {library.version[0]}; found: {others or 'none'}",
        f"pip install {library.runtime_package}",
    )


def _cupy() -> Check:
    from mhcgen.backends.cupy_state import import_cupy, installed, require_gpu

    try:
        cupy = import_cupy()
    except EnvironmentFault as fault:
        return _of_fault("CuPy", "missing" if fault.code == "E-NO-CUPY" else "broken", fault)
    packages = ", ".join(f"{name} {version}" for name, version in installed())
    detail = packages or f"cupy {cupy.__version__}"
    try:
        require_gpu()
    except EnvironmentFault as fault:
        if fault.code == "E-CUDA-MAJOR":
            return _of_fault("CuPy", "broken", fault)
        return Check("CuPy", "ok", f"{detail}; imports, but there is no GPU to use it on")
    return Check("CuPy", "ok", detail)


def _gpu() -> Check:
    from mhcgen.backends.driver import load_driver

    try:
        driver = load_driver()
    except EnvironmentFault as fault:
        if fault.code == "E-CUDA-MAJOR":
            return _of_fault("GPU", "broken", fault)
        why = [note for note in fault.notes if "cannot open" not in note]
        detail = "; ".join((fault.message.rstrip("."), *why, "emit, explain and the host backend need none"))
        return Check("GPU", "note", detail, "install the NVIDIA driver, where there is a GPU")
    devices = ", ".join(
        f"{number}: {driver.device_name(number)} (sm_{driver.capability(number)})"
        for number in range(driver.device_count)
    )
    version = driver.version
    return Check("GPU", "ok", f"driver for CUDA {version // 1000}.{version % 1000 // 10}; {devices}")


def _versions() -> Check:
    """Whether what compiles and what runs agree on CUDA's major version."""
    from mhcgen.backends.driver import load_driver
    from mhcgen.backends.nvrtc_library import find_nvrtc

    try:
        driver = load_driver().version // 1000
    except EnvironmentFault:
        return Check("CUDA versions", "note", "not compared: there is no driver")
    parts, wrong = [f"driver {driver}"], ""
    try:
        find_nvrtc(driver)
    except EnvironmentFault as fault:
        with contextlib.suppress(EnvironmentFault):
            parts.append(f"NVRTC {find_nvrtc().version[0]}, which makes machine code that the driver does not load")
            wrong = fault.hints[0] if fault.hints else ""
    if built := torch_cuda():
        parts.append(f"torch {built}")
        if int(built.split(".")[0]) > driver:
            parts[-1] += ", which needs a newer driver"
            wrong = wrong or f"update the NVIDIA driver, or install PyTorch's build for CUDA {driver}"
    return Check("CUDA versions", "broken" if wrong else "ok", "; ".join(parts), wrong)


def _nvcc() -> Check:
    path = shutil.which("nvcc")
    if path is None:
        return Check("nvcc", "note", "not found; optional: only engines that compile the text themselves need it")
    said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20, check=True).stdout
    release = re.search(r"release ([\d.]+)", said)
    return Check("nvcc", "ok", f"{release[1] if release else 'unknown version'}, {path}")


def _cache() -> Check:
    try:
        root = cache.cache_root()
        with tempfile.TemporaryFile(dir=root):
            pass
    except EnvironmentFault as fault:
        return _of_fault("cache", "broken", fault)
    except OSError as error:
        fix = f"set {cache.ENV_DIR} to a directory with room that you may write"
        return Check("cache", "broken", f"{root}: {error.strerror or error}", fix)
    if root.is_relative_to(Path(tempfile.gettempdir())) and not _asked_for(root):
        fix = f"set {cache.ENV_DIR} to a directory that is kept"
        return Check("cache", "note", f"{root} does not outlive a reboot: no writable home", fix)
    return Check("cache", "ok", str(root))


def _asked_for(root: Path) -> bool:
    import os

    wish = os.environ.get(cache.ENV_DIR)
    return bool(wish) and Path(wish or "").expanduser().absolute() == root
