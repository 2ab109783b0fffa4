"""Finding NVRTC and the CUDA headers that belong to it, and calling it through ctypes.

ctypes because that needs neither CuPy nor a driver: `import mhcgen` stays light and a machine without a GPU
can compile for every architecture.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mhcgen.errors import EnvironmentFault

ENV_LIBRARY = "MHCGEN_NVRTC"
INSTALL_HINT = "pip install 'mhcgen[nvrtc]'"

_MAJORS = (13, 12)


@dataclass(frozen=True)
class NvrtcResult:
    """What NVRTC said and made: `code` 0 is success; `cubin` is None for PTX-only targets."""

    code: int
    status: str
    log: str
    ptx: str
    cubin: bytes | None


class Nvrtc:
    """One NVRTC library.

    Args:
        path: file name of the shared library, or a bare name for the system's loader.

    Raises:
        OSError: the library cannot be loaded or is none.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._library = ctypes.CDLL(path)
        try:
            self._declare()
        except AttributeError as error:
            raise OSError(f"{path} is not an NVRTC library: {error}") from error
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
        self.version: tuple[int, int] = (major.value, minor.value)
        amount = ctypes.c_int()
        self._library.nvrtcGetNumSupportedArchs(ctypes.byref(amount))
        numbers = (ctypes.c_int * amount.value)()
        self._library.nvrtcGetSupportedArchs(numbers)
        self.archs: tuple[int, ...] = tuple(sorted(numbers))

    def _declare(self) -> None:
        handle, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_size_t)
        strings = ctypes.POINTER(ctypes.c_char_p)
        library = self._library
        library.nvrtcGetErrorString.restype = text
        for name, types in {
            "nvrtcGetErrorString": (ctypes.c_int,),
            "nvrtcCreateProgram": (ctypes.POINTER(handle), text, text, ctypes.c_int, strings, strings),
            "nvrtcCompileProgram": (handle, ctypes.c_int, strings),
            "nvrtcDestroyProgram": (ctypes.POINTER(handle),),
            **{f"nvrtcGet{what}Size": (handle, size) for what in ("ProgramLog", "PTX", "CUBIN")},
            **{f"nvrtcGet{what}": (handle, handle) for what in ("ProgramLog", "PTX", "CUBIN")},
        }.items():
            getattr(library, name).argtypes = types

    @property
    def version_text(self) -> str:
        """E.g. `13.5`."""
        return f"{self.version[0]}.{self.version[1]}"

    @property
    def runtime_package(self) -> str:
        """The package on PyPI with the headers of this major version."""
        return "nvidia-cuda-runtime" if self.version[0] >= 13 else "nvidia-cuda-runtime-cu12"

    def include_dirs(self) -> tuple[HeaderDir, ...]:
        """The directory with the headers of the same major version; empty where there is none.

        Headers of another major version are never used: they compile or fail by luck.
        """
        for found in header_dirs(self.path):
            if found.version // 1000 == self.version[0]:
                return (found,)
        return ()

    def compile(self, source: str, options: tuple[str, ...], name: str) -> NvrtcResult:
        """Run one program through NVRTC; safe to call from several threads."""
        program = ctypes.c_void_p()
        code = self._library.nvrtcCreateProgram(
            ctypes.byref(program), source.encode(), name.encode(), 0, None, None
        )
        if code:
            return NvrtcResult(code, self._status(code), "", "", None)
        try:
            encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            code = self._library.nvrtcCompileProgram(program, len(options), encoded)
            log = self._fetch(program, "ProgramLog").rstrip(b"\0").decode(errors="replace")
            if code:
                return NvrtcResult(code, self._status(code), log, "", None)
            ptx = self._fetch(program, "PTX").rstrip(b"\0").decode()
            return NvrtcResult(0, "", log, ptx, self._fetch(program, "CUBIN") or None)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _status(self, code: int) -> str:
        text: bytes = self._library.nvrtcGetErrorString(code)
        return text.decode()

    def _fetch(self, program: ctypes.c_void_p, what: str) -> bytes:
        size = ctypes.c_size_t()
        if getattr(self._library, f"nvrtcGet{what}Size")(program, ctypes.byref(size)) or not size.value:
            return b""
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self._library, f"nvrtcGet{what}")(program, buffer)
        return buffer.raw


@dataclass(frozen=True)
class HeaderDir:
    """A directory with CUDA headers; `version` is CUDA_VERSION, 1000 * major + 10 * minor."""

    path: Path
    version: int

    @property
    def version_text(self) -> str:
        """E.g. `13.0`."""
        return f"{self.version // 1000}.{self.version % 1000 // 10}"

    def fingerprint(self) -> str:
        """Changes when a header is replaced or edited: over path, version, and each file's size and time."""
        digest = hashlib.sha256(f"{self.path}\n{self.version}\n".encode())
        for file in sorted(self.path.glob("*.h*")):
            state = file.stat()
            digest.update(f"{file.name} {state.st_size} {state.st_mtime_ns}\n".encode())
        return digest.hexdigest()


def _wheel_roots() -> Iterator[Path]:
    for entry in dict.fromkeys(sys.path):
        root = Path(entry or ".") / "nvidia"
        if root.is_dir():
            yield root


def _toolkit_roots() -> Iterator[Path]:
    for name in ("CUDA_PATH", "CUDA_HOME"):
        if value := os.environ.get(name):
            yield Path(value)
    for major in _MAJORS:
        yield Path(f"/usr/local/cuda-{major}")
    yield Path("/usr/local/cuda")


def _library_files() -> Iterator[str]:
    """Candidates, best first: wheels of this environment, toolkits, then whatever the loader knows."""
    for root in _wheel_roots():
        for package in ("cu13", "cuda_nvrtc", "cu12"):
            for major in _MAJORS:
                yield from map(str, sorted((root / package / "lib").glob(f"libnvrtc.so.{major}*")))
    for root in _toolkit_roots():
        for folder in ("lib64", "lib", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib"):
            for major in _MAJORS:
                yield from map(str, sorted((root / folder).glob(f"libnvrtc.so.{major}*"))[:1])
    for major in _MAJORS:
        yield f"libnvrtc.so.{major}"


def _header_candidates(library: str) -> Iterator[Path]:
    # Beside the library in use first: a toolkit or a wheel of CUDA 13 keeps both under one root.
    folder = Path(library).parent
    if folder.name:
        yield folder.parent / "include"
        yield folder.parent.parent / "include"
        yield folder.parent.parent / "cuda_runtime" / "include"
    for root in _wheel_roots():
        yield from sorted(root.glob("*/include"))
    for root in _toolkit_roots():
        yield root / "include"
        yield from sorted(root.glob("targets/*/include"))


def header_dirs(library: str = "") -> tuple[HeaderDir, ...]:
    """Every directory with CUDA headers, of any version, those beside `library` first."""
    found = []
    for folder in dict.fromkeys(_header_candidates(library)):
        if version := _header_version(folder):
            found.append(HeaderDir(folder, version))
    return tuple(found)


def _header_version(folder: Path) -> int:
    """CUDA_VERSION of the headers for device code in `folder`; 0 where they are not."""
    if not (folder / "cuda_bf16.h").is_file():
        return 0
    for file, macro in (("cuda_runtime_api.h", "CUDART_VERSION"), ("cuda.h", "CUDA_VERSION")):
        try:
            text = (folder / file).read_text(errors="replace")
        except OSError:
            continue
        if match := re.search(rf"#define\s+{macro}\s+(\d+)", text):
            return int(match[1])
    return 0


@lru_cache(maxsize=16)
def _open(path: str) -> Nvrtc | str:
    try:
        return Nvrtc(path)
    except OSError as error:
        return str(error)


def find_nvrtc(max_major: int | None = None) -> Nvrtc:
    """The NVRTC to use: `MHCGEN_NVRTC` if set, else of a wheel, else of a toolkit, else of the system.

    Args:
        max_major: highest acceptable CUDA major version (a driver loads no machine code of a newer one).

    Raises:
        EnvironmentFault: `E-NO-NVRTC`; the notes say what was tried.
    """
    explicit = os.environ.get(ENV_LIBRARY)
    tried = []
    for path in [explicit] if explicit else dict.fromkeys(_library_files()):
        library = _open(path)
        if isinstance(library, str):
            tried.append(library)
        elif max_major is not None and library.version[0] > max_major:
            tried.append(f"{path} is version {library.version_text}, newer than CUDA {max_major}")
        else:
            return library
    hint = INSTALL_HINT
    if max_major is not None and max_major < 13:
        hint = "pip install nvidia-cuda-nvrtc-cu12 nvidia-cuda-runtime-cu12"
    raise EnvironmentFault(
        "E-NO-NVRTC",
        "no usable NVRTC, the run-time compiler of CUDA, was found.",
        where=f"{ENV_LIBRARY}={explicit}" if explicit else "",
        notes=tuple(dict.fromkeys(tried)),
        hints=(f"unset {ENV_LIBRARY} or correct it",) if explicit else (hint,),
    )
