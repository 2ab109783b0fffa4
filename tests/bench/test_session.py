"""The measuring session, dry: what goes wrong in a script should not cost time on a GPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mhcgen.runtime import cuda_usable

SCRIPT = Path(__file__).parent.parent.parent / "benchmarks" / "session.py"


@pytest.fixture(scope="module")
def session() -> Iterator[types.ModuleType]:
    sys.path.insert(0, str(SCRIPT.parent))  # as for a script that is started
    spec = importlib.util.spec_from_file_location("session", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["session"] = module
    spec.loader.exec_module(module)
    yield module
    sys.path.remove(str(SCRIPT.parent))


def run(out: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), str(out), "--dry", *words]
    return subprocess.run(command, capture_output=True, text=True, cwd=SCRIPT.parent.parent)


@pytest.mark.skipif(cuda_usable(), reason="there is a GPU here")
@pytest.mark.parametrize("name", ["bits", "residency", "sanitize", "session"])
def test_a_script_that_needs_a_gpu_says_so_in_one_error(name: str, tmp_path: Path) -> None:
    script = [sys.executable, str(SCRIPT.with_name(f"{name}.py")), str(tmp_path / "out")]
    done = subprocess.run(script, capture_output=True, text=True, cwd=SCRIPT.parent.parent)
    assert done.returncode == 4
    assert done.stderr.startswith("error[E-") and "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_whole_session_goes_through(tmp_path: Path) -> None:
    done = run(tmp_path, "--seconds", "900")
    assert done.returncode == 0, done.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["decode.json", "peers.json", "phases.json", "prefill.json", "seed.json"]
    for path in tmp_path.iterdir():
        found = json.loads(path.read_text())
        assert found["dry"] is True
        assert "error" not in found
        rows = [row for key, value in found.items() if isinstance(value, list) for row in value]
        assert [row for row in rows if "error" in row] == []
    assert "failed: nothing" in done.stdout


def test_one_section_writes_its_file(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "peers")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "peers.json").read_text())
    assert {row["what"] for row in found["rows"]} == {"finish", "pre", "post"}
    assert "torch" in found["missing"] or any(row.get("peer") == "torch" for row in found["rows"])


def test_when_the_time_is_up_the_rest_is_left_out(tmp_path: Path, session: types.ModuleType) -> None:
    session.run_section("decode", tmp_path, dry=True, seconds=-1.0)
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["rows"]
    assert {row["error"] for row in found["rows"]} == {"out of time"}


def test_a_section_that_fails_says_so_and_keeps_what_it_had(
    tmp_path: Path, session: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(one: Any) -> None:
        one.found["rows"] = [{"what": "pre", "T": 1, "us": 1.0, "floor_us": 1.0, "GB_s": 1.0}]
        raise RuntimeError("an illegal memory access")

    monkeypatch.setitem(session.SECTIONS, "decode", broken)
    with pytest.raises(RuntimeError):
        session.run_section("decode", tmp_path, dry=True, seconds=60.0)
    found = json.loads((tmp_path / "decode.json").read_text())
    assert found["error"] == "RuntimeError: an illegal memory access"
    assert found["rows"][0]["us"] == 1.0
    lines = session.summary(tmp_path, ["decode", "absent"])
    assert "! RuntimeError: an illegal memory access" in lines


def test_a_section_that_hangs_is_stopped(
    tmp_path: Path, session: types.ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(_: Any) -> Any:
        return real([sys.executable, "-c", "import time; time.sleep(60)"])

    real = session.subprocess.Popen
    monkeypatch.setattr(session.subprocess, "Popen", hang)
    monkeypatch.setattr(session, "PATIENCE", 0.5)
    begun = time.monotonic()
    given = types.SimpleNamespace(out=tmp_path, dry=False)
    assert session.child("decode", given, 100.0) == "decode: hangs, stopped"
    assert time.monotonic() - begun < 20


def test_unknown_sections_are_an_error(tmp_path: Path) -> None:
    done = run(tmp_path, "--only", "decode,nothing")
    assert done.returncode == 2
    assert "no section nothing" in done.stderr


def test_all_that_sections_load_is_compiled_beforehand(session: types.ModuleType) -> None:
    wanted = session.to_compile(session.FULL, list(session.SECTIONS))
    assert len(set(wanted)) > 100
    for name in session.SECTIONS:
        assert session.to_compile(session.TINY, [name])


def test_the_table_of_issue_5_is_covered(session: types.ModuleType) -> None:
    have = {
        (one.what, one.program.dim("n"), one.program.dim("H"), one.program.arithmetic.functions, tokens)
        for one, tokens, _ in session.decode_cases(session.FULL)
    }
    for what in ("finish", "pre", "pre+norm+quant", "boundary", "post"):
        for hidden in (4096, 7168):
            for functions in ("fast",) if what == "post" else ("fast", "ieee"):
                for tokens in (1, 8, 64):
                    assert (what, 4, hidden, functions, tokens) in have
    for n in (2, 8):
        for what in ("finish", "pre"):
            assert (what, n, 4096, "fast", 1) in have
