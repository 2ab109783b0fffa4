"""ml-explore/mlx #4273: modules were kept by the name of their kernel, so a second kernel of that name ran the first
one's code; a stale entry on disk did the same.

Programs here differ in one number and share their kernel's name; in either order, in one process and in two that
share a cache, each gives its own result.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen import reference
from mhcgen.backends.host import HostModule, KernelSignature, Param

BASE: dict[str, Any] = {"hidden": 16, "iters": 2, "projection": "fma"}
#: name -> what differs; each changes a result.
ONE_APART: dict[str, dict[str, Any]] = {
    "as it is": {},
    "rms_eps": {"rms_eps": 1e-1},
    "hc_eps": {"hc_eps": 1e-1},
    "iters": {"iters": 3},
    "dtype": {"dtype": "bf16"},
    "model": {"model": "glm-5.3-flash", "rms_eps": 0.2},
}
SCHEDULES: dict[str, dict[str, Any]] = {"pre": {"fuse": "pre"}, "row": {"fuse": "pre", "placement": "row"}}


@cache
def plan(name: str, schedule: str = "pre") -> mhcgen.Plan:
    return mhcgen.compile(mhcgen.build(**{**BASE, **ONE_APART[name]}), **SCHEDULES[schedule])


def results(name: str, schedule: str = "pre") -> dict[str, Any]:
    made = plan(name, schedule)
    given = factories.inputs(made.program, 2, seed=3)
    out: dict[str, Any] = made.load("host")(**given)
    want = reference.run(made.program, given)
    near = 1e-2 if made.program.tensor("y").dtype == "bf16" else 1e-4
    for key, array in out.items():
        assert array.astype(np.float64) == pytest.approx(want[key], abs=near), (name, key)
    return out


def test_they_have_one_name_and_a_text_each() -> None:
    names = {plan(name, schedule).kernels[0].name for name in ONE_APART for schedule in SCHEDULES}
    assert len(names) == 1
    assert len({plan(name, schedule).emitted_sha256 for name in ONE_APART for schedule in SCHEDULES}) == 12


def test_each_gives_its_own_result_in_either_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    made = {name: results(name) for name in ONE_APART}
    again = {name: results(name) for name in reversed(ONE_APART)}
    for name, out in made.items():
        assert all(again[name][key].tobytes() == array.tobytes() for key, array in out.items())
    for one, other in itertools.combinations(made, 2):
        assert any(made[one][key].tobytes() != made[other][key].tobytes() for key in made[one]), (one, other)


def test_another_process_with_the_same_cache_takes_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two texts of a kernel k: one stores 1, here, the other 2, elsewhere."""
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    code = (
        "import numpy as np\n"
        "from mhcgen.backends.host import HostModule, KernelSignature, Param\n"
        "text = 'extern \"C\" __global__ void k(float* y) {{ y[0] = {}.0f; }}'\n"
        "y = np.zeros(1, np.float32)\n"
        "HostModule(text, [KernelSignature('k', (Param('y', 'float*', True),))]).launch('k', 1, 1, [y])\n"
        "found = int(y[0])\n"
    )
    here: dict[str, Any] = {}
    exec(code.format(1), here)
    env = {**os.environ, "PYTHONPATH": str(Path(mhcgen.__file__).parents[1])}
    words = [sys.executable, "-c", code.format(2) + "print(found)"]
    there = subprocess.run(words, env=env, capture_output=True, text=True, check=True).stdout.strip()
    assert (here["found"], there) == (1, "2")


def test_a_signature_is_part_of_the_key() -> None:
    text = 'extern "C" __global__ void k(float* y, {} a) {{ y[0] = (float)(a); }}'
    for ctype, value, want in (("int", 3, 3.0), ("float", 2.5, 2.5), ("long long", 2**40, 2.0**40)):
        parameters = (Param("y", "float*", True), Param("a", ctype, False))
        made = HostModule(text.format(ctype), [KernelSignature("k", parameters)])
        y = np.zeros(1, np.float32)
        made.launch("k", 1, 1, [y, value])
        assert y[0] == want
