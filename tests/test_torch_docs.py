"""The Python of docs/pytorch.md, run in order on a CPU."""

from __future__ import annotations

import doctest
import importlib
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import mhcgen.torch

ROOT = Path(__file__).parents[1]


def test_the_page_runs() -> None:
    text = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(blocks) >= 6
    code = "\n".join(blocks)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "warm-up: 6 emissions" in done.stdout and "path='" in done.stdout


def test_every_operation_is_on_the_page() -> None:
    from mhcgen.torch import OPERATIONS

    text = (ROOT / "docs" / "pytorch.md").read_text(encoding="utf-8")
    assert [name for name in OPERATIONS if f"`{name}`" not in text] == []


def test_examples_in_docstrings() -> None:
    """`make test` leaves this package out, since it has no torch."""
    tried = 0
    for found in pkgutil.iter_modules(mhcgen.torch.__path__, "mhcgen.torch."):
        failed, ran = doctest.testmod(importlib.import_module(found.name))
        assert failed == 0, found.name
        tried += ran
    assert tried
