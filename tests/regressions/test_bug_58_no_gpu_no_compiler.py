"""sgl-project/sglang #30732: one import of a GPU-only package made a module unusable on every other machine."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import mhcgen
from mhcgen.backends import host
from mhcgen.errors import EnvironmentFault

PACKAGE = str(Path(mhcgen.__file__).parents[1])
#: What an import of cupy does, by name of the case; a module that is None cannot be imported.
CUPY = {
    "missing": "",
    "broken": "raise RuntimeError('the installed driver is none')",
    "without a library": "raise OSError('libcuda.so.1: cannot open shared object file')",
}


def python(code: str, tmp_path: Path, cupy: str = "", **variables: str) -> subprocess.CompletedProcess[str]:
    """Run code in another process, where importing cupy runs other code."""
    if cupy:
        (tmp_path / "cupy").mkdir(exist_ok=True)
        (tmp_path / "cupy" / "__init__.py").write_text(cupy + "\n")
    else:
        code = f"import sys; sys.modules['cupy'] = None\n{code}"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{PACKAGE}", **variables}
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)


def test_importing_imports_no_gpu_package(tmp_path: Path) -> None:
    there = "{name.split('.')[0] for name, module in sys.modules.items() if module is not None}"
    code = f"import sys, mhcgen, mhcgen.cli; print({there} & {{'cupy', 'torch', 'cuda'}})"
    assert python(code, tmp_path).stdout.strip() == "set()"


def test_importing_opens_no_driver(tmp_path: Path) -> None:
    code = "import mhcgen; print('libcuda' in open('/proc/self/maps').read())"
    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc")
    assert python(code, tmp_path).stdout.strip() == "False"


@pytest.mark.parametrize("case", CUPY)
def test_emitting_and_explaining_need_no_cupy(case: str, tmp_path: Path) -> None:
    code = (
        "import mhcgen; plan = mhcgen.compile(mhcgen.build(hidden=64), 'pre'); "
        "print(len(plan.source) > 1000, len(plan.log) > 3)"
    )
    ran = python(code, tmp_path, CUPY[case])
    assert ran.stdout.strip() == "True True", ran.stderr


@pytest.mark.parametrize("case", CUPY)
def test_the_cuda_backend_says_what_is_missing(case: str, tmp_path: Path) -> None:
    code = (
        "import mhcgen\n"
        "try: mhcgen.compile(mhcgen.build(hidden=8)).load('cuda')\n"
        "except mhcgen.MhcgenError as error: print(error.code, error.exit_code, bool(error.hints))\n"
    )
    ran = python(code, tmp_path, CUPY[case])
    said = "E-NO-CUPY" if case == "missing" else "E-CUPY-BROKEN"
    assert ran.stdout.strip() == f"{said} 4 True", ran.stderr


@pytest.mark.parametrize("verb", [["--help"], ["emit", "--streams", "4", "--fuse", "pre"], ["explain"], ["list"]])
def test_verbs_that_need_nothing_need_nothing(verb: list[str], tmp_path: Path) -> None:
    code = f"import sys; sys.argv = ['mhcgen', *{verb!r}]; from mhcgen.cli import main; main()"
    ran = python(code, tmp_path, CUPY["broken"], PATH="", MHCGEN_CXX="")
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout


def test_no_compiler_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("MHCGEN_CXX", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    with pytest.raises(EnvironmentFault) as caught:
        host.find_compiler()
    assert (caught.value.code, caught.value.exit_code) == ("E-NO-CXX", 4)
    assert any("apt" in hint for hint in caught.value.hints) and any("zig" in hint for hint in caught.value.hints)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_forked_after_the_import_can_run(tmp_path: Path) -> None:
    code = (
        "import os, sys, mhcgen, numpy as np\n"
        "plan = mhcgen.compile(mhcgen.build(streams=2, hidden=4, scope='mean'))\n"
        "x = np.ones((1, 2, 4), np.float32)\n"
        "first = plan.load('host')(x=x)['y']\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    os._exit(0 if np.array_equal(plan.load('host')(x=x)['y'], first) else 9)\n"
        "sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
    )
    ran = python(code, tmp_path)
    assert ran.returncode == 0, ran.stderr
