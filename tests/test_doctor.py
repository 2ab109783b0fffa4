"""The diagnosis: complete, honest in every broken state, and it never raises."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mhcgen import cli, doctor
from mhcgen.backends import cupy_state, driver, nvrtc_library
from mhcgen.doctor import NEEDS, Check, diagnose, unmet
from mhcgen.doctor_extras import CUDA_EXTRAS, USES, Need, extras
from mhcgen.errors import EnvironmentFault


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path / "cache"))


def named(name: str) -> Check:
    (check,) = [check for check in diagnose() if check.name == name]
    return check


def test_everything_is_looked_at_once() -> None:
    checks = diagnose()
    names = [check.name for check in checks]
    assert len(set(names)) == len(names)
    assert {
        "Python",
        "numpy",
        "C++ compiler",
        "NVRTC",
        "CUDA headers",
        "CuPy",
        "GPU",
        "cache",
        "torch",
    } <= set(names)
    assert all(check.detail for check in checks)
    assert all(check.fix for check in checks if check.state in ("missing", "broken"))
    assert all(not check.fix for check in checks if check.state == "ok")


def test_core_packages_and_python_are_ok_here() -> None:
    for name in ("Python", "numpy", "jinja2", "networkx", "ml_dtypes", "typer", "cache"):
        assert named(name).state == "ok", named(name)


def test_an_optional_package_is_found_without_importing_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    assert named("torch").state == "ok"
    assert "torch" not in sys.modules


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    original = importlib.util.find_spec

    def without(name: str, package: str | None = None) -> Any:
        return None if name in ("matplotlib", "jinja2") else original(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", without)
    optional, core = named("matplotlib"), named("jinja2")
    assert (optional.state, optional.fix) == ("note", "pip install 'mhcgen[plot]'")
    assert (core.state, core.fix) == ("missing", "pip install mhcgen")


@pytest.mark.parametrize(
    ("version", "state"),
    [
        ((3, 10, 4), "broken"),
        ((3, 11, 0), "ok"),
        ((3, 13, 10), "broken"),
        ((3, 14, 1), "broken"),
        ((3, 14, 2), "ok"),
    ],
)
def test_python_versions(monkeypatch: pytest.MonkeyPatch, version: tuple[int, int, int], state: str) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    assert doctor._python().state == state


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing() -> None:
        raise EnvironmentFault("E-NO-CXX", "none found", hints=("apt-get install g++",))

    monkeypatch.setattr("mhcgen.backends.host.build.find_compiler", nothing)
    check = named("C++ compiler")
    assert (check.state, check.fix) == ("missing", "pip install 'mhcgen[zig]'")


def test_a_compiler_is_shown_with_what_it_says_of_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("/venv3/bin/python3", "-m", "ziglang", "c++")
    said = "/venv3/bin/python3 python3 -m ziglang c++\nclang version 22.1.8\nTarget: x86_64-linux\n"
    monkeypatch.setattr(
        "mhcgen.backends.host.build.find_compiler", lambda: SimpleNamespace(command=command, identity=said)
    )
    assert named("C++ compiler").detail == "/venv3/bin/python3 -m ziglang c++, clang version 22.1.8"


def test_a_compiler_that_was_asked_for_and_fails_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_CXX", "/nowhere/g++")
    assert named("C++ compiler").state == "broken"


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHCGEN_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc_library, "_library_files", lambda: iter(()))
    check = named("NVRTC")
    assert (check.state, check.fix) == ("missing", "pip install 'mhcgen[nvrtc]'")
    assert named("CUDA headers").state == "note"


def test_headers_of_the_wrong_version(monkeypatch: pytest.MonkeyPatch) -> None:
    class Library:
        path, version, version_text, archs, runtime_package = (
            "x",
            (13, 5),
            "13.5",
            (75, 121),
            "nvidia-cuda-runtime",
        )

        def include_dirs(self) -> tuple[()]:
            return ()

    monkeypatch.setattr(nvrtc_library, "find_nvrtc", Library)
    check = named("CUDA headers")
    assert (check.state, check.fix) == ("missing", "pip install nvidia-cuda-runtime")
    assert named("NVRTC").detail == "13.5, sm_75 to sm_121, x"


@pytest.mark.parametrize(
    ("code", "state"), [("E-NO-CUPY", "missing"), ("E-TWO-CUPY", "broken"), ("E-CUPY-BROKEN", "broken")]
)
def test_states_of_cupy(monkeypatch: pytest.MonkeyPatch, code: str, state: str) -> None:
    def fail() -> None:
        raise EnvironmentFault(code, "message", notes=("a note",), hints=("do this",))

    monkeypatch.setattr(cupy_state, "import_cupy", fail)
    assert named("CuPy") == Check("CuPy", state, "message; a note", "do this")  # type: ignore[arg-type]


def test_cupy_of_another_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    def mismatch() -> None:
        raise EnvironmentFault("E-CUDA-MAJOR", "CuPy needs CUDA 13", hints=("pip uninstall",))

    monkeypatch.setattr(cupy_state, "import_cupy", lambda: None)
    monkeypatch.setattr(cupy_state, "installed", lambda: (("cupy-cuda13x", "14"),))
    monkeypatch.setattr(cupy_state, "require_gpu", mismatch)
    assert named("CuPy").state == "broken"


def test_a_machine_without_a_gpu_is_not_at_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY_NAMES", ("libnothing.so.1",))
    monkeypatch.setattr(driver, "_loaded", None)
    check = named("GPU")
    assert check.state == "note" and "host backend" in check.detail


def test_a_gpu_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        version, device_count = 12080, 2

        def device_name(self, device: int) -> str:
            return "H" + str(device)

        def capability(self, device: int) -> int:
            return 90

    monkeypatch.setattr(driver, "load_driver", Fake)
    assert named("GPU").detail == "driver for CUDA 12.8; 0: H0 (sm_90), 1: H1 (sm_90)"


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path / "file" / "below"))
    check = named("cache")
    assert check.state == "broken" and "MHCGEN_CACHE_DIR" in check.fix


def test_every_extra_is_looked_at() -> None:
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())["project"]
    names = {check.name for check in diagnose()}
    for extra, packages in project["optional-dependencies"].items():
        if extra in CUDA_EXTRAS:
            assert {"CuPy", "NVRTC"} <= names
            continue
        assert extra in USES
        alone = re.split(r"[<>=!]", packages[0])[0]
        assert (f"extra {extra}" if len(packages) > 1 else alone) in names | {f"extra {extra}", alone} & names


def test_extras_are_those_of_the_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["numpy>=1.26", 'odd-thing>=2.1,<4; extra == "odd"', "other ; python_version < '4' and extra == 'odd'"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: lines)
    assert extras()["odd"] == (Need("odd-thing", "2.1"), Need("other"))
    check = named("extra odd")
    assert (check.state, check.fix) == ("note", "pip install 'mhcgen[odd]'")
    assert "without odd-thing, other" in check.detail


def test_a_package_that_is_too_old_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: ['numpy>=99.0; extra == "odd"'])
    check = doctor._optional("numpy", "odd", extras()["odd"])
    assert (check.state, check.fix) == ("broken", "pip install --upgrade 'mhcgen[odd]'")
    assert "is older than 99.0" in check.detail
    for found, oldest, old in (("2.10.1", "2.9", False), ("2.6.0+cu126", "2.6", False), ("1.9", "1.10", True)):
        monkeypatch.setattr(importlib.metadata, "version", lambda name, found=found: found)
        assert Need("anything", oldest).too_old is old


@pytest.mark.parametrize(("built", "state"), [("13.0", "broken"), ("12.6", "ok"), ("", "ok")])
def test_a_torch_for_a_newer_cuda_than_the_driver(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, built: str, state: str
) -> None:
    class Fake:
        version = 12080

    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    line = f"cuda: Optional[str] = '{built}'" if built else "cuda: Optional[str] = None"
    (tmp_path / "torch" / "version.py").write_text(f"__version__ = '2.9'\n{line}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(driver, "load_driver", Fake)
    monkeypatch.setattr(nvrtc_library, "find_nvrtc", lambda major=None: None)
    check = doctor._versions()
    assert check.state == state
    assert bool(check.fix) is (state == "broken")


def test_an_nvrtc_for_a_newer_cuda_than_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fake:
        version = 12080

    def find(major: int | None = None) -> Any:
        if major is not None:
            raise EnvironmentFault("E-NO-NVRTC", "none", hints=("pip install nvidia-cuda-nvrtc-cu12",))
        return type("Library", (), {"version": (13, 5)})

    monkeypatch.setattr(driver, "load_driver", Fake)
    monkeypatch.setattr(nvrtc_library, "find_nvrtc", find)
    check = doctor._versions()
    assert (check.state, check.fix) == ("broken", "pip install nvidia-cuda-nvrtc-cu12")


def test_what_a_backend_needs() -> None:
    names = {check.name for check in diagnose()}
    for need, wanted in NEEDS.items():
        assert set(wanted) <= names, need
    checks = [Check(name, "ok", "") for name in sorted({n for wanted in NEEDS.values() for n in wanted})]
    assert not any(unmet(need, checks) for need in NEEDS)
    worse = [replace(c, state="missing") if c.name == "C++ compiler" else c for c in checks]
    assert [c.name for c in unmet("host", worse)] == ["C++ compiler"]
    assert not unmet("nvrtc", worse)
    without = [replace(c, state="note") if c.name in ("GPU", "torch") else c for c in checks]
    assert [c.name for c in unmet("cuda", without)] == ["GPU"]
    assert [c.name for c in unmet("torch", without)] == ["torch"]


def test_the_verb_ends_with_4_where_a_need_is_not_met(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    checks = [Check(name, "ok", "x") for name in sorted({n for wanted in NEEDS.values() for n in wanted})]
    checks = [replace(c, state="broken", fix="mend it") if c.name == "CuPy" else c for c in checks]
    monkeypatch.setattr(doctor, "diagnose", lambda: checks)
    assert cli.run(["doctor"]) == 4
    assert cli.run(["doctor", "--need", "host"]) == 0
    assert cli.run(["doctor", "--need", "host,cuda"]) == 4
    out = capsys.readouterr().out
    assert "host: works\ncuda: does not work: CuPy\n" in out
    assert cli.run(["doctor", "--need", "abacus"]) == 2
    assert "error[U-OPTION]" in capsys.readouterr().err


def test_nothing_that_goes_wrong_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode(*_: object) -> None:
        raise RuntimeError("unforeseen\nwith a second line")

    for name in (
        "_python",
        "_core",
        "_optional",
        "_compiler",
        "_nvrtc",
        "_headers",
        "_cupy",
        "_gpu",
        "_versions",
        "_nvcc",
        "_cache",
    ):
        monkeypatch.setattr(doctor, name, explode)
    checks = diagnose()
    assert len(checks) > 10
    assert {(check.state, check.detail) for check in checks} == {("broken", "RuntimeError: unforeseen")}
