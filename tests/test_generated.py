"""The emissions under generated/, their folders, and the test that each folder carries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mhcgen import differential
from mhcgen.build import build_config
from mhcgen.errors import InputError
from mhcgen.files import write_folder
from mhcgen.folder import FILES, folder_texts
from mhcgen.generated_set import GENERATED, check_generated, generated_texts, write_generated
from mhcgen.lower import signature, tensors_of
from mhcgen.passes import run_pipeline
from mhcgen.plan import PLACEMENTS, Options
from mhcgen.request import request

ROOT = Path(__file__).parent.parent


# ---- the set ------------------------------------------------------------------------------------------------
def test_generated_is_what_this_version_emits() -> None:
    assert check_generated(ROOT / "generated") == []


def test_the_set_holds_unfused_seed_and_every_placement_and_sync() -> None:
    options = [options for _, options in GENERATED.values()]
    assert {o.fuse for o in options} >= {"none", "seed", "pre"}
    assert {o.placement for o in options} == set(PLACEMENTS)
    assert {(o.placement, o.sync) for o in options} >= {("shared", "warp"), ("shared", "block")}
    texts = generated_texts()
    kernels = [files["kernel.cu"] for name, files in texts.items() if name]
    assert len(set(kernels)) == len(GENERATED)
    bodies = {re.sub(r"^// .*$", "", kernel, flags=re.M) for kernel in kernels}
    assert len(bodies) == len(GENERATED)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("set") / "generated"
    assert write_generated(folder) == []
    return folder


@pytest.fixture
def copied(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "generated"))


def test_what_was_written_is_current(whole: Path) -> None:
    assert check_generated(whole) == []
    assert sorted(path.name for path in whole.iterdir()) == sorted([*GENERATED, "README.md", "pytest.ini"])


def test_each_departure_is_named(copied: Path) -> None:
    (copied / "pre" / "kernel.cu").write_text("edited")
    (copied / "seed" / "log.txt").unlink()
    (copied / "pre" / "notes.txt").write_text("mine")
    (copied / "stray.cu").write_text("mine")
    (copied / "README.md").write_text("edited")
    shutil.copytree(copied / "seed", copied / "seeds")
    (copied / "pre" / "__pycache__").mkdir()
    assert check_generated(copied) == [
        "differs: README.md",
        "differs: pre/kernel.cu",
        "missing: seed/log.txt",
        "orphan: pre/notes.txt",
        "orphan: seeds",
        "orphan: stray.cu",
    ]


def test_writing_again_mends_what_is_ours_and_leaves_the_rest(copied: Path) -> None:
    (copied / "pre" / "kernel.cu").write_text("edited")
    (copied / "pre" / "notes.txt").write_text("mine")
    (copied / "stray.cu").write_text("mine")
    shutil.copytree(copied / "seed", copied / "an-old-name")
    shutil.copytree(copied / "seed", copied / "not-only-ours")
    (copied / "not-only-ours" / "mine.txt").write_text("mine")
    assert write_generated(copied) == ["not-only-ours", "pre/notes.txt", "stray.cu"]
    assert check_generated(copied) == ["orphan: not-only-ours", "orphan: pre/notes.txt", "orphan: stray.cu"]
    assert not (copied / "an-old-name").exists()
    assert (copied / "not-only-ours" / "mine.txt").exists()


def test_a_missing_set_is_all_missing(tmp_path: Path) -> None:
    found = check_generated(tmp_path / "generated")
    assert len(found) == len(GENERATED) * len(FILES) + 2
    assert all(line.startswith("missing: ") for line in found)


def test_a_folder_of_someone_else_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "pre").mkdir()
    (tmp_path / "pre" / "kernel.cu").write_text("mine")
    with pytest.raises(InputError):
        write_generated(tmp_path)
    assert (tmp_path / "pre" / "kernel.cu").read_text() == "mine"


# ---- one folder ---------------------------------------------------------------------------------------------
def emitted(folder: Path, **options: Any) -> Path:
    write_folder(folder, folder_texts(*request(**options)))
    return folder


CASES: dict[str, dict[str, Any]] = {
    "pre": {"fuse": "pre", "hidden": 64},
    "odd": {"fuse": "pre", "hidden": 37, "streams": 3},
    "quantised": {"fuse": "pre-norm-quant", "hidden": 96, "dtype": "bf16"},
    "fp8": {"fuse": "pre-norm-quant", "quant": "fp8", "hidden": 128, "dtype": "fp16"},
    "boundary": {"fuse": "boundary", "hidden": 64},
    "readers": {"fuse": "rowsq+gates", "hidden": 64, "extra": "engram,tap"},
    "stream last": {"model": "transformer-engine", "fuse": "pre", "hidden": 24, "streams": 3, "extra": "tap"},
    "site": {"scope": "site", "fuse": "pre", "hidden": 32},
    "stamps": {"fuse": "pre", "hidden": 64, "stamps": True, "scalar": True},
    "counted": {"fuse": "seed", "hidden": 32, "early_stop": True, "iterations_out": True},
}


@pytest.mark.parametrize("case", CASES)
def test_the_manifest_says_what_the_plan_says(case: str) -> None:
    config, options = request(**CASES[case])
    program = build_config(config)
    plan = run_pipeline(program, options)
    manifest = json.loads(folder_texts(config, options)["manifest.json"])
    assert manifest["class"]["digest"] == program.numeric_class.digest
    assert manifest["command"] in plan.source
    assert replace(Options(), **manifest["options"]) == options
    kernels = {step["kernel"]: step for step in manifest["schedule"]["kernel.cu"] if "kernel" in step}
    assert set(kernels) == {kernel.name for kernel in plan.kernels}
    for kernel in plan.kernels:
        entry = kernels[kernel.name]
        assert (entry["threads"], entry["shared_bytes"]) == (kernel.threads, kernel.shared_bytes)
        assert [(p["name"], p["ctype"]) for p in entry["parameters"]] == [
            (p.name, p.ctype) for p in signature(plan, kernel).params
        ]
        tensors = [p for p in entry["parameters"] if "tensor" in p]
        assert [p["tensor"] for p in tensors] == list(tensors_of(plan, kernel))
        for p in tensors:
            tensor = program.tensor(p["tensor"])
            assert (p["dtype"], p["role"]) == (tensor.dtype, tensor.role)
            assert p["shape"] == ["T" if d == "T" else program.dim(d) for d in tensor.shape]
            assert p["alignment"] == 16 or options.scalar


@pytest.mark.parametrize("case", CASES)
def test_a_fresh_folder_has_no_complaints(tmp_path: Path, case: str) -> None:
    folder = emitted(tmp_path / "out", **CASES[case])
    assert differential.changed_files(folder) == []
    for inputs in ("uniform", "D1", "D15", "extreme"):
        for tokens in (0, 2):
            assert differential.compare_folder(folder, tokens, inputs) == []
            assert differential.compare_reference(folder, tokens, inputs) == []


def replace_one(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new))


TAMPERED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "comb transposed": (
        lambda f: replace_one(f / "kernel.cu", "comb_t[row_j * 4 + col_k] =", "comb_t[col_k * 4 + row_j] ="),
        "D1",
        "comb: ",
    ),
    "a row left out": (
        lambda f: replace_one(f / "kernel.cu", "comb_t[row_j * 4", "if (row_j) comb_t[row_j * 4"),
        "uniform",
        "were not written",
    ),
    "an input written": (
        lambda f: replace_one(
            f / "kernel.cu",
            "comb_t[row_j * 4 + col_k] =",
            "const_cast<float*>(base)[0] = 0.0f;\n      comb_t[row_j * 4 + col_k] =",
        ),
        "uniform",
        "base",
    ),
}


@pytest.mark.parametrize("what", TAMPERED)
def test_an_edited_kernel_is_caught_by_its_results(tmp_path: Path, what: str) -> None:
    tamper, inputs, said = TAMPERED[what]
    folder = emitted(tmp_path / "out", fuse="pre", hidden=64, placement="element")
    tamper(folder)
    assert differential.changed_files(folder)[0].startswith("kernel.cu has sha256 ")
    complaints = differential.compare_folder(folder, 2, inputs)
    assert any(said in complaint for complaint in complaints), complaints
    assert complaints[0].endswith(f"({inputs}, T = 2, host)")


def test_an_edited_baseline_is_caught_by_the_reference(tmp_path: Path) -> None:
    folder = emitted(tmp_path / "out", fuse="pre", hidden=64)
    for name in ("kernel.cu", "unfused.cu"):
        replace_one(folder / name, "1e-06f)", "1e-02f)")
    complaints = differential.compare_reference(folder, 2)
    assert any("is allowed" in complaint for complaint in complaints)


def test_a_folder_of_another_class_or_without_manifest_is_refused(tmp_path: Path) -> None:
    folder = emitted(tmp_path / "out", fuse="pre", hidden=32)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["class"]["digest"] = "0" * 64
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="the folder was made for") as caught:
        differential.compare_folder(folder, 1)
    assert caught.value.code == "I-FOLDER"
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError) as caught:
        differential.changed_files(folder)
    assert caught.value.code == "I-FOLDER"


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"files": None}, "files"),
        ({"files": {}}, "files"),
        ({"files": {"kernel.cu": {}}}, "kernel.cu"),
        ({"files": {"kernel.cu": {"sha256": "0"}, "unfused.cu": {"sha256": "0"}, "log.txt": 1}}, "log.txt"),
        ({"config": []}, "config"),
        ({"config": {"extra": []}}, "model"),
        ({"class": {}}, "digest"),
        ({"schedule": {}}, "kernel.cu"),
        ({"schedule": {"kernel.cu": [{}], "unfused.cu": []}}, "kernel.cu"),
    ],
)
def test_an_edited_manifest_is_one_clear_error(tmp_path: Path, change: dict[str, Any], what: str) -> None:
    folder = emitted(tmp_path / "out", fuse="pre", hidden=32)
    path = folder / "manifest.json"
    edited = {**json.loads(path.read_text()), **change}
    path.write_text(json.dumps({key: value for key, value in edited.items() if value is not None}))
    for use in (differential.changed_files, lambda at: differential.compare_folder(at, 1)):
        with pytest.raises(InputError, match=what) as caught:
            use(folder)
        assert (caught.value.code, caught.value.where) == ("I-FOLDER", str(path))


def test_a_missing_file_is_a_complaint(tmp_path: Path) -> None:
    folder = emitted(tmp_path / "out", fuse="pre", hidden=32)
    (folder / "log.txt").unlink()
    assert differential.changed_files(folder) == ["log.txt cannot be read: No such file or directory"]


def pytest_in(folder: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder)


def test_the_test_of_a_folder_passes_alone_and_fails_on_an_edit(tmp_path: Path) -> None:
    """Run from the folder, as its reader would; the edit is one that only some inputs can show."""
    folder = emitted(tmp_path / "out", fuse="pre", hidden=64, placement="element")
    done = pytest_in(folder)
    assert done.returncode == 0, done.stdout
    assert re.search(r"\d+ passed", done.stdout)
    TAMPERED["comb transposed"][0](folder)
    done = pytest_in(folder)
    assert done.returncode == 1
    for name in ("test_the_files_are_those_of_the_manifest", "test_kernel_equals_unfused_bit_for_bit[host-D1-1]"):
        assert re.search(rf"FAILED \S*::{re.escape(name)}", done.stdout), done.stdout
    assert "FAILED test_differential.py::test_unfused_is_within" not in done.stdout


def test_the_gpu_half_is_skipped_where_there_is_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    assert differential.unusable("host") == ""
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    assert differential.unusable("cuda") == "CuPy is not installed"


class HostInPlaceOfCuda:
    """CudaModule's interface over the CPU executor: shapes and arguments as the GPU half passes them."""

    def __init__(self, source: str, kernels: Any, *, name: str) -> None:
        from mhcgen.backends.host import HostModule

        self.host = HostModule(source, kernels, name=name)
        self.kernels = self.host.kernels
        self.launches: Counter[str] = Counter()

    def launch(self, kernel: str, grid: tuple[int, ...], block: tuple[int, ...], args: list[Any], **_: Any) -> None:
        assert len(grid) == len(block) == 3
        self.host.launch(kernel, grid, block, args).raise_if_found()
        self.launches[kernel] += 1


def test_the_gpu_half_copies_launches_and_compares(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen.backends import cuda

    monkeypatch.setattr(cuda, "CudaModule", HostInPlaceOfCuda)
    monkeypatch.setattr(cuda, "to_device", lambda array: array.copy())
    monkeypatch.setattr(cuda, "to_host", lambda array: array)
    folder = emitted(tmp_path / "out", fuse="pre-norm-quant", quant="fp8", hidden=128, placement="element")
    assert differential.compare_folder(folder, 2, "D1", "cuda") == []
    assert differential.compare_reference(folder, 2, "uniform", "cuda") == []
    TAMPERED["comb transposed"][0](folder)
    assert differential.compare_folder(folder, 2, "D1", "cuda")[0].endswith("(D1, T = 2, cuda)")
