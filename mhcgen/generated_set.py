"""The emissions kept under `generated/`: snapshots whose diff a reviewer reads, and whose tests CI runs.

One folder an emission, as `mhcgen emit --out` writes it, all for n = 4 and H = 4096: the unfused program, the three
launches of the seed system, the fused pre chain with each placement and sync at two block sizes, and what an engine
takes for decode: pre with its projection, and the whole boundary, each one launch on clusters of blocks.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from mhcgen.build import configure
from mhcgen.errors import InputError
from mhcgen.files import LITTER, write_file, write_folder
from mhcgen.folder import FILES, folder_texts, foreign, read_manifest
from mhcgen.plan import Options

THREADS = (128, 512)
#: Suffix of a name to where the matrix lives and which barriers order it.
FORMS: dict[str, tuple[str, str]] = {
    "shared-warp": ("shared", "warp"),
    "shared-block": ("shared", "block"),
    "row": ("row", "auto"),
    "element": ("element", "auto"),
    "registers": ("registers", "auto"),
}

DECODE: dict[str, Any] = {"dtype": "bf16", "projection": "fma"}
#: Name of a folder -> what is computed, beside the defaults; schedule.
GENERATED: dict[str, tuple[dict[str, Any], Options]] = {
    "unfused": ({}, Options()),
    "seed": ({}, Options(fuse="seed")),
    "pre": ({}, Options(fuse="pre")),
    "decode-pre": (DECODE, Options(fuse="pre")),
    "decode-boundary": ({**DECODE, "scope": "boundary", "norm": True}, Options(fuse="boundary")),
    **{
        f"pre-{form}-{threads}": ({}, Options(fuse="pre", placement=placement, sync=sync, threads=threads))
        for form, (placement, sync) in FORMS.items()
        for threads in THREADS
    },
}

_README = """\
# Generated emissions

Written by `mhcgen emit --all`, never by hand. `mhcgen emit --all --check` fails on any difference from what this
version of mhcgen emits, on a missing file and on a file that nothing explains.

Each folder stands for itself: `kernel.cu`, the `unfused.cu` it must equal bit for bit, `program.txt`, `log.txt`
with every decision and its reason, `manifest.json` and `test_differential.py`. Run the tests with `pytest generated`.

| folder | made by |
| --- | --- |
{rows}
"""

#: Several files of one name in folders that are no packages.
_PYTEST = "[pytest]\naddopts = -q --import-mode=importlib\n"


def generated_texts() -> dict[str, dict[str, str]]:
    """Folder name -> file name -> text; the files of the top folder are under the empty name."""
    import json

    folders = {name: folder_texts(configure(**what), options) for name, (what, options) in GENERATED.items()}
    commands = {name: json.loads(texts["manifest.json"])["command"] for name, texts in folders.items()}
    rows = "\n".join(f"| [{name}]({name}/kernel.cu) | `{command}` |" for name, command in commands.items())
    return {"": {"README.md": _README.format(rows=rows), "pytest.ini": _PYTEST}, **folders}


def write_generated(root: Path) -> list[str]:
    """Write the set and remove folders of ours that are no longer part of it.

    Returns:
        Names of entries that nothing explains and that were left alone.

    Raises:
        InputError: `I-EXISTS`, the place is a file, or a folder of the set has no manifest of ours.
        EnvironmentFault: `E-WRITE`.
    """
    texts = generated_texts()
    if root.exists() and not root.is_dir():
        raise InputError("I-EXISTS", "there is a file of that name", where=str(root), hints=("name a folder",))
    for name, files in texts.items():
        if name:
            folder = root / name
            ours = not folder.is_dir() or read_manifest(folder) is not None
            write_folder(folder, files, foreign=() if ours else foreign(folder))
    for name, text in texts[""].items():
        write_file(root / name, text)
    left = []
    for entry in _orphans(root, texts):
        if entry.is_dir() and set(FILES) <= {file.name for file in entry.iterdir()} and not foreign(entry):
            shutil.rmtree(entry)
        else:
            left.append(entry.relative_to(root).as_posix())
    return left


def check_generated(root: Path) -> list[str]:
    """One sentence for each file that is missing, differs or is an orphan; empty if the set is current."""
    texts = generated_texts()
    found = []
    for name, files in texts.items():
        for file, text in files.items():
            path = root / name / file
            shown = path.relative_to(root).as_posix()
            if not path.is_file():
                found.append(f"missing: {shown}")
            elif path.read_bytes() != text.encode():
                found.append(f"differs: {shown}")
    found += [f"orphan: {entry.relative_to(root).as_posix()}" for entry in _orphans(root, texts)]
    return sorted(found)


def _orphans(root: Path, texts: dict[str, dict[str, str]]) -> list[Path]:
    """Entries that are neither of the set nor litter of test runs."""
    if not root.is_dir():
        return []
    known = {*texts, *texts[""]} - {""}
    found = [entry for entry in root.iterdir() if entry.name not in known]
    for name in texts:
        if name and (root / name).is_dir():
            found += [entry for entry in (root / name).iterdir() if entry.name not in texts[name]]
    return sorted(entry for entry in found if entry.name not in LITTER)
