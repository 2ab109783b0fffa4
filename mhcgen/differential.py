"""Compares the two texts of an emission's folder: what its `test_differential.py` calls.

Nothing is planned or emitted here. The texts are compiled as they lie in the folder and launched as the manifest
says; inputs and reference come from the Program of the manifest's configuration. Each function returns its
complaints as a list of sentences, empty if there is none.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mhcgen import bounds, reference
from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.build import build_config, configure
from mhcgen.errors import InputError
from mhcgen.folder import FORMAT, read_manifest
from mhcgen.inputs import DISCRIMINATING, discriminating, make_inputs, poison, poisoned_mask
from mhcgen.ir import Program
from mhcgen.stages import STREAM_LAST

#: Names of inputs: uniform numbers, and those that tell known mistakes apart.
INPUTS = ("uniform", *DISCRIMINATING)

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Run:
    """What one text made of one set of inputs.

    Args:
        values: every tensor in global memory by name.
        complaints: what went wrong while it ran.
        launched: names of the kernels that ran, in order.
    """

    values: dict[str, Array]
    complaints: list[str] = field(default_factory=list)
    launched: tuple[str, ...] = ()


def unusable(backend: str) -> str:
    """Why a backend cannot be used here, empty if it can."""
    if backend == "host":
        return ""
    import importlib.util

    if importlib.util.find_spec("cupy") is None:
        return "CuPy is not installed"
    from mhcgen.backends import cuda

    usable, reason = cuda.is_available()
    return "" if usable else reason


def changed_files(folder: Path) -> list[str]:
    """Files that are not those the manifest was written for."""
    complaints = []
    for name, entry in _manifest(folder)["files"].items():
        try:
            digest = hashlib.sha256((folder / name).read_bytes()).hexdigest()
        except OSError as error:
            complaints.append(f"{name} cannot be read: {error.strerror or error}")
            continue
        if digest != entry["sha256"]:
            complaints.append(f"{name} has sha256 {digest}, the manifest says {entry['sha256']}")
    return complaints


def compare_folder(folder: Path, tokens: int, inputs: str = "uniform", backend: str = "host") -> list[str]:
    """Differences between kernel.cu and unfused.cu, every result, bit for bit; NaN equals NaN.

    Args:
        folder: as `mhcgen emit --out` writes it.
        tokens: T >= 0.
        inputs: of `INPUTS`; no complaint where the Program has no such inputs.
        backend: `host` or `cuda`.
    """
    program, given = _program(folder), _inputs(folder, tokens, inputs)
    if given is None:
        return []
    want = _run(folder, "unfused.cu", given, tokens, backend)
    have = _run(folder, "kernel.cu", given, tokens, backend)
    complaints = [*want.complaints, *have.complaints]
    for tensor in program.of_role("result"):
        complaints += _difference(tensor.name, want.values[tensor.name], have.values[tensor.name])
    return [f"{complaint} ({inputs}, T = {tokens}, {backend})" for complaint in complaints]


def compare_reference(folder: Path, tokens: int, inputs: str = "uniform", backend: str = "host") -> list[str]:
    """Results of unfused.cu that are farther from the float64 reference than `mhcgen.bounds` allows.

    Args:
        folder, tokens, inputs, backend: as for `compare_folder`.
    """
    program, given = _program(folder), _inputs(folder, tokens, inputs)
    if given is None:
        return []
    ran = _run(folder, "unfused.cu", given, tokens, backend)
    # What an opaque stage made is the same array on both sides.
    branches = {
        stage.name: _constant(ran.values[stage.writes[0]]) for stage in program.stages_of_kind(*_OPAQUE)
    }
    values = reference.run(program, given, branches, all_values=True)
    got = {tensor.name: ran.values[tensor.name] for tensor in program.of_role("result")}
    complaints = list(ran.complaints)
    for outcome in bounds.compare_all(program, got, values, given):
        if not outcome.ok:
            complaints.append(
                f"{outcome.name}{list(outcome.worst_index)} is off by {outcome.error:.3g}, "
                f"{outcome.limit:.3g} is allowed: {outcome.why}"
            )
    return [f"{complaint} ({inputs}, T = {tokens}, {backend})" for complaint in complaints]


def _constant(array: Array) -> Callable[..., Array]:
    return lambda _operand: array.astype(np.float64)


# ---- the folder -----------------------------------------------------------------------------------------


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = read_manifest(folder)
    if manifest is None or manifest.get("format") != FORMAT:
        raise InputError(
            "I-FOLDER", "the folder has no manifest that this version of mhcgen reads", where=str(folder),
            hints=("write it with `mhcgen emit --out`",),
        )
    unread = _unread(manifest)
    if unread:
        raise InputError(
            "I-FOLDER", f"the folder's manifest was edited: it has no {unread} that can be read",
            where=str(folder / "manifest.json"), hints=("write the folder anew with `mhcgen emit --out`",),
        )
    return manifest


#: The two texts that are compared.
_TEXTS = ("kernel.cu", "unfused.cu")
#: Entries of a step of a schedule, and their types.
_LAUNCHED: dict[str, type] = {"kernel": str, "grid": list, "threads": int, "parameters": list}
_CALLED: dict[str, type] = {"opaque": str, "kind": str, "operands": dict, "results": dict}


def _unread(manifest: dict[str, Any]) -> str:
    """The first entry of a manifest that is not as `mhcgen.folder` writes it; empty if all are."""
    for key in ("files", "config", "class", "schedule"):
        if not isinstance(manifest.get(key), dict):
            return key
    for name in (*_TEXTS, *manifest["files"]):
        entry = manifest["files"].get(name)
        if not isinstance(entry, dict) or not isinstance(entry.get("sha256"), str):
            return f"files[{name!r}]"
    named: tuple[tuple[str, str, type], ...] = (
        ("config", "model", str), ("config", "extra", list), ("class", "digest", str),
    )
    for key, part, kind in named:
        if not isinstance(manifest[key].get(part), kind):
            return f"{key}[{part!r}]"
    for name in _TEXTS:
        steps = manifest["schedule"].get(name)
        if not isinstance(steps, list):
            return f"schedule[{name!r}]"
        for index, step in enumerate(steps):
            wanted = _CALLED if isinstance(step, dict) and "opaque" in step else _LAUNCHED
            if not isinstance(step, dict) or not all(isinstance(step.get(k), wanted[k]) for k in wanted):
                return f"schedule[{name!r}][{index}]"
    return ""


@lru_cache(maxsize=8)
def _program_of(config: str) -> Program:
    import json

    given = json.loads(config)
    return build_config(configure(given.pop("model"), **{**given, "extra": tuple(given["extra"])}))


def _program(folder: Path) -> Program:
    import json

    manifest = _manifest(folder)
    program = _program_of(json.dumps(manifest["config"]))
    if program.numeric_class.digest != manifest["class"]["digest"]:
        raise InputError(
            "I-FOLDER",
            f"this mhcgen gives that configuration the class {program.numeric_class}, "
            f"the folder was made for {manifest['class'].get('name')}",
            where=str(folder),
            hints=("their results may differ: emit the folder again, or use the mhcgen that made it",),
        )
    return program


def _inputs(folder: Path, tokens: int, inputs: str) -> dict[str, Array] | None:
    program = _program(folder)
    if inputs == "uniform":
        return make_inputs(program, tokens)
    found: dict[str, Array] | None = discriminating(program, tokens, inputs)
    return found


# ---- running --------------------------------------------------------------------------------------------

_OPAQUE = ("branch", "engram", "tap")


def _opaque(kind: str, operand: Array, last: bool) -> Array:
    """Stands in for what an opaque stage does: anything will do, as long as it is always the same."""
    if kind == "tap":
        return np.ascontiguousarray(operand[:, :, 0] if last else operand[:, 0])
    halved: Array = operand * np.asarray(0.5, operand.dtype)
    return halved.astype(operand.dtype)


def _signatures(schedule: list[dict[str, Any]]) -> tuple[KernelSignature, ...]:
    return tuple(
        KernelSignature(
            step["kernel"],
            tuple(Param(p["name"], p["ctype"], p.get("access") == "write") for p in step["parameters"]),
        )
        for step in schedule
        if "kernel" in step
    )


@lru_cache(maxsize=8)
def _module(backend: str, source: str, signatures: tuple[KernelSignature, ...], name: str) -> Any:
    if backend == "host":
        from mhcgen.backends.host import HostModule

        return HostModule(source, signatures, name=name)
    from mhcgen.backends.cuda import CudaModule

    return CudaModule(source, signatures, name=name)


def _run(folder: Path, name: str, given: dict[str, Array], tokens: int, backend: str) -> Run:
    """Compile one text of the folder as it is and launch it as the manifest says."""
    program, schedule = _program(folder), _manifest(folder)["schedule"][name]
    source = (folder / name).read_text(encoding="utf-8")
    module = _module(backend, source, _signatures(schedule), name)
    values = dict(given)
    complaints: list[str] = []
    launched: list[str] = []
    for step in schedule:
        if "opaque" in step:
            (operand,), (made,) = step["operands"].values(), step["results"].values()
            values[made] = _opaque(step["kind"], values[operand], program.tensor(operand).shape == STREAM_LAST)
            continue
        written = [p["tensor"] for p in step["parameters"] if p.get("access") == "write" and "tensor" in p]
        for tensor in written:
            values[tensor] = poison(program.shape(tensor, tokens), program.tensor(tensor).dtype)
        if tokens or step["grid"][0] == 1:  # one block for all tokens
            launched.append(step["kernel"])
            complaints += _launch(module, backend, step, values, tokens)
        for tensor in written:
            left = int(np.count_nonzero(poisoned_mask(values[tensor])))
            if left:
                complaints.append(f"{name}: {left} of {values[tensor].size} elements of {tensor} were not written")
    for tensor, array in given.items():
        if values[tensor].tobytes() != array.tobytes():
            complaints.append(f"{name}: input {tensor} was changed")
    return Run(values, complaints, tuple(launched))


def _launch(module: Any, backend: str, step: dict[str, Any], values: dict[str, Array], tokens: int) -> list[str]:
    """One launch; results replace their poison in `values`."""
    kernel = step["kernel"]
    per_cluster = max(1, min(step.get("tokens_per_cluster", 1), tokens))
    grid = _sizes(step["grid"], -(-tokens // per_cluster))
    scalars = {"tokens": tokens, "per_cluster": per_cluster}
    options = {"cluster": tuple(step["cluster"])} if "cluster" in step else {}
    tensors: dict[str, str] = {}
    arrays: dict[str, Array] = {}
    for param, entry in zip(module.kernels[kernel].params, step["parameters"], strict=True):
        if "tensor" in entry:
            tensors[param.name] = entry["tensor"]
            # A view, since fp8 travels as bytes.
            arrays[param.name] = values[entry["tensor"]].view(param.dtype)
        elif "shape" in entry:
            arrays[param.name] = np.zeros(_sizes(entry["shape"], tokens), param.dtype)
    names = [param.name for param in module.kernels[kernel].params]
    if backend == "host":
        args: list[Any] = [arrays[name] if name in arrays else scalars[name] for name in names]
        report = module.launch(kernel, grid, step["threads"], args, **options)
        wrong = report.text or ("" if report.blocks_run == np.prod(grid) else f"{report.blocks_run} blocks ran")
    else:
        from mhcgen.backends.cuda import to_device, to_host

        before = module.launches[kernel]
        device = {name: to_device(array) for name, array in arrays.items()}
        args = [device[name] if name in device else scalars[name] for name in names]
        module.launch(kernel, grid, (step["threads"], 1, 1), args, **options)
        arrays = {name: to_host(array) for name, array in device.items()}
        wrong = "" if module.launches[kernel] == before + 1 else "it was not launched"
    for name, tensor in tensors.items():
        values[tensor] = arrays[name].view(values[tensor].dtype)
    return [f"{kernel}: {wrong}"] if wrong else []


def _sizes(symbolic: list[int | str], tokens: int) -> tuple[int, ...]:
    return tuple(tokens if isinstance(size, str) else size for size in symbolic)


def _difference(name: str, want: Array, have: Array) -> list[str]:
    bits = np.dtype(f"u{want.dtype.itemsize}")
    same = want.view(bits) == have.view(bits)
    if want.dtype.kind in "fV":  # V: the small floats of ml_dtypes
        # NaN bits depend on the order in which hardware met its operands; that there is one does not.
        with np.errstate(all="ignore"):
            same |= (want != want) & (have != have)
    if same.all():
        return []
    index = tuple(int(i) for i in np.argwhere(~same)[0])
    count = int(np.count_nonzero(~same))
    return [
        f"{name}: {count} of {same.size} elements differ, first at {list(index)}: "
        f"{have[index]} instead of {want[index]}"
    ]
