"""Plans and helpers of the tests of the C interface: what a launcher is built with and called by."""

from __future__ import annotations

import ctypes as c
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

import mhcgen
from mhcgen.abi import AbiRequest, abi_files, lower_abi
from mhcgen.inputs import make_inputs
from mhcgen.plan import Plan
from mhcgen.runtime import NUMPY_DTYPES

HOST = Path(mhcgen.__file__).parent / "backends" / "host"

CC, CXX = shutil.which("gcc") or shutil.which("cc"), shutil.which("g++")
NONE: Mapping[str, Any] = {}


def plan_of(fuse: str, streams: int = 4, hidden: int = 64, options: Mapping[str, Any] = NONE, **config: Any) -> Plan:
    """A plan of the default model."""
    return mhcgen.compile(mhcgen.build("deepseek-v4", streams=streams, hidden=hidden, **config), fuse, **options)


def boundary(hidden: int = 512, **options: Any) -> Plan:
    """A plan with clusters."""
    return plan_of("boundary", hidden=hidden, scope="boundary", projection="fma", options=options)


PLANS: dict[str, Callable[[], Plan]] = {
    "pre": lambda: plan_of("pre"),
    "none": lambda: plan_of("none"),
    "odd": lambda: plan_of("none", streams=3, hidden=50),
    "bf16": lambda: plan_of("pre", dtype="bf16"),
    "scalar": lambda: plan_of("pre", options={"scalar": True}),
    "groups": lambda: plan_of("rowsq+gates,collapse"),
    "norm-quant": lambda: plan_of("pre-norm-quant", hidden=256, norm=True, quant="fp8"),
    "q8": lambda: plan_of("pre-norm-quant", hidden=256, norm=True, quant="q8"),
    "dependent": lambda: plan_of("none", options={"dependent": True}),
    "cluster": boundary,
    "cluster-dependent": lambda: boundary(dependent=True),
}


def run(*command: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """A command that must end well; returns what it printed."""
    done = subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, check=False,
        env=None if env is None else {**os.environ, **env},
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def write(folder: Path, files: dict[str, str | bytes]) -> None:
    """Files of a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)


def host_library(launchers: Sequence[Path], out: Path) -> c.CDLL:
    """Launchers built as docs/engines.md says."""
    flags = (f"@{HOST / 'launcher_flags.txt'}", f"-I{HOST}", f"-I{HOST / 'shim'}")
    run(CXX or "", *flags, "-x", "c++", *launchers, HOST / "runtime.cpp", HOST / "launcher.cpp", "-o", out, "-lm")
    library = c.CDLL(str(out), mode=c.RTLD_LOCAL)
    library.mhc_status_string.restype = c.c_char_p
    return library


class Emitted:
    """A plan's launcher behind ctypes."""

    def __init__(self, plan: Plan, library: c.CDLL, name: str = "") -> None:
        self.plan, self.library = plan, library
        lowered = lower_abi(plan, AbiRequest(name))
        self.name = lowered.name
        self.members = [member["name"] for member in lowered.fields["members"]]
        fields: list[Any] = [(member, c.c_void_p) for member in self.members]
        self.args_type = type("Args", (c.Structure,), {"_fields_": [*fields, ("tokens", c.c_int64)]})

    def args(self, arrays: dict[str, npt.NDArray[Any]], tokens: int) -> Any:
        given = {name: arrays[name].ctypes.data if arrays[name].size else None for name in self.members}
        return self.args_type(**given, tokens=tokens)

    def launch(self, args: Any, workspace: int | None, size: int, stream: int | None = None) -> int:
        function = self.library[f"mhc_{self.name}_launch"]
        return int(function(c.byref(args), c.c_void_p(workspace), c.c_size_t(size), c.c_void_p(stream)))

    def workspace(self, tokens: int) -> int:
        size = c.c_size_t(99)
        assert self.library[f"mhc_{self.name}_workspace_bytes"](c.c_int64(tokens), c.byref(size)) == 0
        return size.value


def aligned(shape: tuple[int, ...], dtype: Any, offset: int = 0) -> npt.NDArray[Any]:
    """A poisoned array whose address is a multiple of 256, plus `offset`."""
    dtype = np.dtype(dtype)
    count = int(np.prod(shape)) * dtype.itemsize
    memory = np.full(count + 512, 0xFF, np.uint8)
    start = -memory.ctypes.data % 256 + offset
    return memory[start : start + count].view(dtype).reshape(shape)


def copied(array: npt.NDArray[Any], offset: int = 0) -> npt.NDArray[Any]:
    """A copy at such an address."""
    made = aligned(array.shape, array.dtype, offset)
    made[...] = array
    return made


@dataclass
class Call:
    """Arrays for one call."""

    arrays: dict[str, npt.NDArray[Any]]
    space: npt.NDArray[np.uint8]


def call_for(emitted: Emitted, tokens: int, offset: int = 0) -> Call:
    """Inputs, poisoned results and a poisoned workspace."""
    program = emitted.plan.program
    arrays = {name: copied(array, offset) for name, array in make_inputs(program, tokens).items()}
    for tensor in program.of_role("result"):
        arrays[tensor.name] = aligned(program.shape(tensor.name, tokens), NUMPY_DTYPES[tensor.dtype], offset)
    return Call(arrays, aligned((emitted.workspace(tokens),), np.uint8))


@cache
def shared_folder() -> Path:
    """Where launchers are built, for all tests of a module."""
    return Path(tempfile.mkdtemp(prefix="mhcgen-test-abi-"))


@cache
def emitted(name: str) -> Emitted:
    """The launcher of one of `PLANS`, built once."""
    plan = PLANS[name]()
    folder = shared_folder() / name
    write(folder, {"kernel.cu": plan.source, **abi_files(plan, AbiRequest())})
    (launcher,) = folder.glob("*_launcher.cu")
    return Emitted(plan, host_library([launcher], folder / "lib.so"))


def same_as_module(it: Emitted, tokens: int, offset: int = 0) -> None:
    """A launch writes the bits that a Module does, and nothing else."""
    call = call_for(it, tokens, offset)
    before = {name: array.tobytes() for name, array in call.arrays.items()}
    assert it.launch(it.args(call.arrays, tokens), call.space.ctypes.data, call.space.size) == 0
    inputs = make_inputs(it.plan.program, tokens)
    want = it.plan.load("host")(**inputs)
    for name, array in want.items():
        assert call.arrays[name].tobytes() == array.tobytes(), name
    for name in inputs:
        assert call.arrays[name].tobytes() == before[name], f"{name} was changed"
