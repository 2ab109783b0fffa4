"""Machines without CuPy, with a broken one, with two, without a driver: what is missing is said."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from cuda_fakes import fake_cupy

from mhcgen.backends import cuda, cupy_state, driver
from mhcgen.errors import EnvironmentFault

MODULES = (
    "mhcgen",
    "mhcgen.backends.archs",
    "mhcgen.backends.cuda",
    "mhcgen.backends.cupy_state",
    "mhcgen.backends.driver",
    "mhcgen.backends.nvrtc",
    "mhcgen.backends.ptx",
    "mhcgen.backends.signature",
    "mhcgen.doctor",
)


@pytest.fixture
def no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "LIBRARY_NAMES", ("libnothing.so.1",))
    monkeypatch.setattr(driver, "_loaded", None)


def with_packages(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


def test_importing_touches_neither_cupy_nor_the_driver() -> None:
    script = (
        "import sys, ctypes\n"
        "class Loud:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name.split('.')[0] in ('cupy', 'torch', 'cuda'): raise SystemExit('imported ' + name)\n"
        "sys.meta_path.insert(0, Loud())\n"
        "class NoLibrary:\n"
        "    def __init__(self, *a, **k): raise SystemExit('loaded a library')\n"
        "ctypes.CDLL = NoLibrary\n"
        f"import {', '.join(MODULES)}\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


def test_no_cupy_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch)
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EnvironmentFault) as caught:
        cupy_state.import_cupy()
    assert caught.value.code == "E-NO-CUPY"
    assert "mhcgen[cuda13]" in str(caught.value)
    ready, reason = cuda.is_available()
    assert not ready and "CuPy is not installed" in reason and "mhcgen[cuda13]" in reason
    with pytest.raises(EnvironmentFault):
        cuda.CudaModule("", [])


@pytest.mark.parametrize(
    "body", ["raise RuntimeError('libcublas of another world')", "1/0", "import no_such_part"]
)
def test_a_cupy_that_raises_anything_on_import_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str
) -> None:
    (tmp_path / "cupy.py").write_text(body)
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    with_packages(monkeypatch, cupy_cuda12x="13.6.0")
    with pytest.raises(EnvironmentFault) as caught:
        cupy_state.import_cupy()
    assert caught.value.code == "E-CUPY-BROKEN"
    assert "pip uninstall --yes cupy-cuda12x" in str(caught.value)
    assert cuda.is_available()[0] is False


def test_two_cupys_are_refused_before_import(monkeypatch: pytest.MonkeyPatch) -> None:
    with_packages(monkeypatch, cupy_cuda12x="13.6.0", cupy_cuda13x="14.2.0")
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(EnvironmentFault) as caught:
        cupy_state.import_cupy()
    assert caught.value.code == "E-TWO-CUPY"
    assert "pip uninstall --yes cupy-cuda12x cupy-cuda13x" in str(caught.value)


def test_cupy_without_a_driver(monkeypatch: pytest.MonkeyPatch, no_driver: None) -> None:
    with_packages(monkeypatch, cupy_cuda13x="14.2.0")
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    with pytest.raises(EnvironmentFault) as caught:
        cupy_state.require_gpu()
    assert caught.value.code == "E-NO-GPU"
    assert "libnothing.so.1" in str(caught.value)
    assert cuda.is_available() == (False, cuda.is_available()[1])
    with pytest.raises(EnvironmentFault, match="no NVIDIA driver"):
        cuda.CudaModule("", [])


def test_hints_follow_the_driver() -> None:
    assert cupy_state.install_hint(12) == "pip install 'mhcgen[cuda12]'"
    assert cupy_state.install_hint(13) == "pip install 'mhcgen[cuda13]'"
    assert cupy_state.install_hint(14) == "pip install 'mhcgen[cuda13]'"
