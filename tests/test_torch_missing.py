"""mhcgen.torch where torch is not installed: one clear error, and nothing else is touched."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_without_torch() -> None:
    code = """
import importlib.util, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *a: None if name == "torch" else find(name, *a)
import mhcgen
from mhcgen.errors import EnvironmentFault
for wanted in (ImportError, EnvironmentFault):
    try:
        import mhcgen.torch
    except wanted as error:
        assert error.code == "E-NO-TORCH" and "mhcgen[torch]" in str(error), error
    else:
        raise SystemExit("imported")
assert "torch" not in sys.modules
mhcgen.compile(mhcgen.build("deepseek-v4", hidden=64), fuse="pre")
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
