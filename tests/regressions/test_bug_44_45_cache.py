"""CHIP-SPV/chipStar #1335 and cupy/cupy #8588: an edited header left a stale binary in use.
deepseek-ai/DeepGEMM #301: processes raced on the files of one kernel.

Emissions include nothing of ours; what the executor adds to them does lie in files. Many processes at once and
damaged entries: `tests/backends/test_host_build.py` and `test_nvrtc.py`.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sweep

import mhcgen
from mhcgen import cache

PACKAGE = Path(mhcgen.__file__).parent
ADD = """
import numpy as np
from mhcgen.backends.host import HostModule, KernelSignature, Param
text = 'extern "C" __global__ void k(float* y) { y[0] = __fadd_rn(y[0], 2.0f); }'
made = HostModule(text, [KernelSignature("k", (Param("y", "float*", True),))])
y = np.full(1, 5, np.float32)
made.launch("k", 1, 1, [y]).raise_if_found()
print(int(y[0]), made.compiled)
"""


def python(code: str, folder: Path, package: Path) -> str:
    env = {**os.environ, "PYTHONPATH": str(package), "MHCGEN_CACHE_DIR": str(folder / "cache")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_an_edited_header_of_the_executor_is_noticed(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(PACKAGE, copy / "mhcgen", ignore=shutil.ignore_patterns("__pycache__"))
    assert [python(ADD, tmp_path, copy) for _ in range(2)] == ["7 True", "7 False"]
    header = copy / "mhcgen" / "backends" / "host" / "prelude_math.h"
    text = header.read_text()
    assert text.count("(float a, float b), a + b)") == 1
    header.write_text(text.replace("(float a, float b), a + b)", "(float a, float b), a - b)"))
    assert python(ADD, tmp_path, copy) == "3 True"


def test_another_version_in_the_same_place_is_another_text() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=8))
    assert f"mhcgen {mhcgen.__version__};" in plan.source.splitlines()[0]


def test_emissions_include_no_file_of_ours() -> None:
    for name, plan in sweep.plans(every=5).items():
        included = {line.split()[1] for line in plan.source.splitlines() if line.startswith("#include")}
        assert included <= {"<cuda_bf16.h>", "<cuda_fp16.h>", "<cuda_fp8.h>"}, name


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL")
@pytest.mark.parametrize("where", ["before the rename", "in the middle of the bytes"])
def test_a_process_killed_while_it_writes_leaves_a_miss(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    key = cache.key_of("killed")
    die = "lambda *_: os.kill(os.getpid(), signal.SIGKILL)"
    half = "class Half(io.FileIO):\n    def write(self, data):\n        super().write(data[:3]); die()\n"
    plant = {
        "before the rename": "pathlib.Path.replace = die\n",
        "in the middle of the bytes": f"{half}os.fdopen = lambda handle, mode: Half(handle, 'w')\n",
    }[where]
    code = f"import io, os, pathlib, signal\nfrom mhcgen import cache\ndie = {die}\n{plant}"
    code += f"with cache.building({key!r}): cache.store({key!r}, '.so', b'whole')\n"
    env = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert [path.name[:6] for path in (tmp_path / key).iterdir() if path.name != ".lock"] == [".part-"]
    assert cache.load(key, ".so") is None and list(cache.entries()) == []
    with cache.building(key):  # its lock went with it
        made = cache.store(key, ".so", b"whole")
    assert cache.load(key, ".so") == made
    assert cache.clear() == 1 and list(tmp_path.iterdir()) == []
