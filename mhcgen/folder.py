"""The folder `mhcgen emit --out` writes: an emission, what it must equal, and what is needed to test it alone.

```
kernel.cu             the emission asked for
unfused.cu            the same Program, one kernel a stage
program.txt, log.txt  what is computed; what was decided and why
test_differential.py  a pytest file that compares the two texts
manifest.json         configuration, launch facts, and the sha256 of every other file
```
With `--abi` there are more, see `mhcgen.abi`; the manifest names them too.

Every text is a function of Config and Options alone. The manifest says enough to launch both texts without
planning again, so that a later mhcgen still tests the text that is in the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mhcgen._version import __version__
from mhcgen.abi import AbiRequest, abi_files, abi_words, cubin_archs
from mhcgen.build import Config, build_config
from mhcgen.files import LITTER
from mhcgen.functions import ITEMSIZES
from mhcgen.ir import Program
from mhcgen.lower import command_of, signature, tensors_of
from mhcgen.passes import run_pipeline
from mhcgen.passes.stamp import stamp_count
from mhcgen.plan import Kernel, Options, Plan
from mhcgen.runtime import VECTOR_ALIGNMENT, launch_order
from mhcgen.text import print_log, print_program

#: Files of a folder in the order they are written; the manifest last, since it vouches for the others.
FILES = ("kernel.cu", "unfused.cu", "program.txt", "log.txt", "test_differential.py", "manifest.json")
#: Raised when a reader of older manifests would go wrong.
FORMAT = 1
_WIDTH = 110


def folder_texts(config: Config, options: Options) -> dict[str, str]:
    """File name to text of the folder of one emission.

    Raises:
        UsageError, RefusedError: what was asked for means nothing, or is not legal.
    """
    return {name: str(content) for name, content in folder_files(config, options).items()}


def folder_files(config: Config, options: Options, abi: AbiRequest | None = None) -> dict[str, str | bytes]:
    """File name to contents of the folder of one emission, with a C interface where one is asked for.

    Raises:
        UsageError, RefusedError: what was asked for means nothing, or is not legal.
        EnvironmentFault, CompileError: machine code was asked for and cannot be made.
    """
    program = build_config(config)
    plan = run_pipeline(program, options)
    unfused = run_pipeline(program, Options(arch=options.arch))
    texts: dict[str, str | bytes] = {
        "kernel.cu": plan.source,
        "unfused.cu": unfused.source,
        "program.txt": print_program(program),
        "log.txt": print_log(plan.log),
        "test_differential.py": TEST_TEXT.replace("COMMAND", command_of(plan)).replace("VERSION", __version__),
    }
    manifest = _manifest(config, options, program, {"kernel.cu": plan, "unfused.cu": unfused})
    if abi is not None:
        manifest["command"] += f" {abi_words(abi, cubin_archs(abi.cubins))}"
        texts |= abi_files(plan, abi)
    manifest["files"] = {name: {"sha256": _sha256(text)} for name, text in texts.items()}
    texts["manifest.json"] = _json(manifest) + "\n"
    return texts


def foreign(folder: Path) -> list[str]:
    """Names in an existing folder that mhcgen did not write; without its manifest that is all of them."""
    others = [entry.name for entry in folder.iterdir() if entry.name not in LITTER]
    manifest = read_manifest(folder)
    if manifest is not None:
        others = [name for name in others if name not in FILES and name not in _listed(manifest)]
    return sorted(others)


def remove_stale(folder: Path, before: dict[str, Any] | None, kept: Iterable[str]) -> None:
    """Remove what an earlier emission into the folder left, unchanged since, and the new one does not write.

    Args:
        folder: where the new emission is.
        before: the manifest of the earlier one, None if there was none.
        kept: names of the new files.
    """
    names = set(kept)
    for name, digest in _listed(before or {}).items():
        path = folder / name
        # Only a plain name: a manifest that was tampered with must not reach another folder.
        if name in names or Path(name).name != name or not path.is_file():
            continue
        if hashlib.sha256(path.read_bytes()).hexdigest() == digest:
            path.unlink()


def _listed(manifest: dict[str, Any]) -> dict[str, str]:
    """Names and digests of the files that a manifest vouches for."""
    files = manifest.get("files")
    if not isinstance(files, dict):
        return {}
    return {name: str(entry.get("sha256")) for name, entry in files.items() if isinstance(entry, dict)}


def read_manifest(folder: Path) -> dict[str, Any] | None:
    """The manifest of a folder, None if there is none that mhcgen wrote."""
    try:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) and "mhcgen" in manifest else None


def _json(value: Any, indent: str = "") -> str:
    """JSON for readers: what fits a line stands on one."""
    line = json.dumps(value)
    if len(indent) + len(line) <= _WIDTH or not isinstance(value, dict | list):
        return line
    deeper = indent + "  "
    if isinstance(value, dict):
        parts = [f"{deeper}{json.dumps(key)}: {_json(item, deeper)}" for key, item in value.items()]
    else:
        parts = [f"{deeper}{_json(item, deeper)}" for item in value]
    return ("{\n%s\n%s}" if isinstance(value, dict) else "[\n%s\n%s]") % (",\n".join(parts), indent)


def _sha256(content: str | bytes) -> str:
    return hashlib.sha256(content.encode() if isinstance(content, str) else content).hexdigest()


def _manifest(config: Config, options: Options, program: Program, plans: dict[str, Plan]) -> dict[str, Any]:
    numeric = program.numeric_class
    return {
        "mhcgen": __version__,
        "format": FORMAT,
        "command": command_of(plans["kernel.cu"]),
        "model": config.model,
        "config": config.as_dict(),
        # Only what was asked for: an option that is new and not used changes no snapshot.
        "options": {
            key: value for key, value in asdict(options).items() if value != getattr(Options(), key)
        },
        "class": {
            "name": str(numeric),
            "functions": numeric.functions,
            "version": numeric.version,
            "digest": numeric.digest,
            "arithmetic": program.arithmetic.describe(),
        },
        "tensors": [
            {"name": t.name, "dtype": t.dtype, "shape": _shape(program, t.name), "role": t.role}
            for t in program.tensors
        ],
        "schedule": {name: _schedule(plan) for name, plan in plans.items()},
    }


def _shape(program: Program, tensor: str) -> list[int | str]:
    return ["T" if d == "T" else program.dim(d) for d in program.tensor(tensor).shape]


def _schedule(plan: Plan) -> list[dict[str, Any]]:
    """Kernels and opaque stages in the order they run."""
    steps: list[dict[str, Any]] = []
    for unit in launch_order(plan):
        if isinstance(unit, Kernel):
            steps.append(_kernel(plan, unit))
        else:
            steps.append(
                {
                    "opaque": unit.name, "kind": unit.kind, "operands": dict(unit.operands),
                    "results": dict(unit.results),
                }
            )
    return steps


def _kernel(plan: Plan, kernel: Kernel) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = []
    names = tensors_of(plan, kernel)
    for index, param in enumerate(signature(plan, kernel).params):
        entry: dict[str, Any] = {"name": param.name, "ctype": param.ctype}
        if index >= len(names):
            entry["role"] = param.name
            if param.name == "stamps":
                entry |= {"shape": ["T", stamp_count(kernel), 2], "access": "write"}
        else:
            name = names[index]
            tensor = plan.program.tensor(name)
            entry |= {
                "tensor": name,
                "dtype": tensor.dtype,
                "shape": _shape(plan.program, name),
                "role": tensor.role,
                "access": "write" if param.writable else "read",
                "alignment": ITEMSIZES[tensor.dtype] if plan.options.scalar else VECTOR_ALIGNMENT,
            }
        parameters.append(entry)
    blocks = kernel.grid_blocks
    found: dict[str, Any] = {
        "kernel": kernel.name,
        "stages": list(kernel.stages),
        "grid": [1 if kernel.grid == "once" else "T", blocks, 1],
        "threads": kernel.threads,
        "shared_bytes": kernel.shared_bytes,
    }
    if kernel.cluster > 1:
        # Each cluster takes `per_cluster` tokens, a run-time argument of 1 to this many.
        found |= {
            "grid": ["ceil(T / per_cluster)", blocks, 1], "cluster": [1, kernel.cluster, 1],
            "tokens_per_cluster": kernel.tokens,
        }
    return {**found, "parameters": parameters}


#: Text of test_differential.py; VERSION and COMMAND are filled in.
TEST_TEXT = '''\
"""Does kernel.cu compute, bit for bit, what unfused.cu computes? And is that right?

Made by mhcgen VERSION; do not edit, run the command again:

    COMMAND

Run it with `pytest` where mhcgen is installed; several such folders at once with
`pytest --import-mode=importlib`. The two texts of this folder are compiled as they are and run on the CPU
executor, and on the GPU where there is one. Outputs start poisoned. The inputs tell known mistakes apart
(comb transposed, the two eps exchanged, a missing maximum in the softmax, ...): mhcgen.inputs says how.
"""

from pathlib import Path

import pytest

from mhcgen import differential

FOLDER = Path(__file__).parent
BACKENDS = ("host", "cuda")
TOKENS = (1, 3)


@pytest.fixture(params=BACKENDS)
def backend(request):
    reason = differential.unusable(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def test_the_files_are_those_of_the_manifest():
    assert differential.changed_files(FOLDER) == []


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inputs", differential.INPUTS)
def test_kernel_equals_unfused_bit_for_bit(backend, inputs, tokens):
    assert differential.compare_folder(FOLDER, tokens, inputs, backend) == []


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inputs", differential.INPUTS)
def test_unfused_is_within_its_bound_of_the_reference(backend, inputs, tokens):
    assert differential.compare_reference(FOLDER, tokens, inputs, backend) == []


def test_no_token_is_fine(backend):
    assert differential.compare_folder(FOLDER, 0, "uniform", backend) == []
'''
