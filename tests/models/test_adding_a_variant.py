"""docs/adding-a-variant.md: the page's own text, written to files and run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import mhcgen
from mhcgen import combs, emit, models, reference_combs
from mhcgen.gate import Request, run
from mhcgen.plan import Options

PAGE = Path(__file__).parents[2] / "docs" / "adding-a-variant.md"


def blocks(language: str) -> list[str]:
    """Fenced blocks of a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.S | re.M)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The page's two files, importable; what they register is taken back afterwards."""
    (template,), (kind, _) = blocks("cuda"), blocks("python")
    (tmp_path / "comb_lazy_cycle.cu.j2").write_text(template, encoding="utf-8")
    (tmp_path / "lazy_cycle.py").write_text(kind, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registries = (combs.COMB_KINDS, models.MODELS, reference_combs.COMBS, emit.EXTRA_TEMPLATES)
    before = [dict(registry) for registry in registries]
    yield tmp_path
    sys.modules.pop("lazy_cycle", None)
    for registry, kept in zip(registries, before, strict=True):
        registry.clear()
        registry.update(kept)


def test_the_pages_own_code_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[1], str(PAGE), "exec"), {})
    out = capsys.readouterr().out
    assert "R=7" in out and "mhc_comb_lazy_cycle" in out
    assert "comb = (1 - a) I + a P" in out and "all equal and clean" in out


def test_its_planted_faults_are_caught(folder: Path) -> None:
    import lazy_cycle  # type: ignore[import-not-found]

    config = mhcgen.configure(lazy_cycle.MODEL.name, streams=3, hidden=40, projection="fma")
    faults = ("transpose-comb", "skip-stream", "stale-output", "eps-outside-root")
    report = run(Request(config, Options(fuse="pre"), tokens=(3,), backend="host", red=faults))
    assert {red.fault for red in report.reds} == set(faults)
    assert all(red.caught for red in report.reds)


@pytest.mark.parametrize("n", [1, 2, 5, 16])
def test_it_works_at_any_stream_count(folder: Path, n: int) -> None:
    import lazy_cycle  # noqa: F401

    config = mhcgen.configure("lazy-cycle-hc", streams=n, hidden=7, dtype="bf16")
    assert run(Request(config, Options(fuse="pre"), tokens=(2,), backend="host")).exit_code == 0


def test_a_registered_kind_is_gone_after_the_test() -> None:
    assert "lazy_cycle" not in combs.COMB_KINDS and "lazy-cycle-hc" not in models.MODELS


def test_a_kind_may_be_registered_again(folder: Path) -> None:
    import lazy_cycle

    again = combs.register(lazy_cycle.KIND, lazy_cycle.reference)
    assert combs.COMB_KINDS["lazy_cycle"] is again
    assert np.allclose(lazy_cycle.reference(np.zeros((1, 1)), 3, {}).sum(axis=1), 1.0)


def test_a_direct_map_refuses_lanes(folder: Path) -> None:
    import lazy_cycle  # noqa: F401

    with pytest.raises(mhcgen.RefusedError) as caught:
        mhcgen.compile(mhcgen.build("lazy-cycle-hc", hidden=8), "pre", placement="row")
    assert caught.value.code == "P-MATRIX"
