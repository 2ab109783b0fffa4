"""explain, list, doctor, cache, docs, check and run, verb by verb."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhcgen.build import build, configure
from mhcgen.errors import InternalError
from mhcgen.log import CATALOGUE
from mhcgen.models import MODELS
from mhcgen.passes import PIPELINE
from mhcgen.passes.fuse import PRESETS
from mhcgen.plan import Options

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent


# ---- explain ------------------------------------------------------------------------------------------------
def test_explain_says_what_is_computed_and_why_so(mhcgen: Cli) -> None:
    code, out, err = mhcgen("explain", "--streams", 8, "--fuse", "pre")
    assert (code, err) == (0, "")
    assert out.startswith("program deepseek-v4 scope=pre")
    assert "comb=comb <- sinkhorn: sinkhorn(logits=logits)" in out
    for step in ("fuse", "place", "sync", "launch"):
        assert f"\n{step}: " in out
    assert "8 rows do not: one row a lane" in out
    assert out.endswith("refused: nothing\n")
    assert "formulas" not in out


def test_explain_prints_formulas(mhcgen: Cli) -> None:
    out = mhcgen("explain", "--formula")[1]
    assert "formulas\n  rowsq     mixes_scaled[r] = mixes[r] * 1/sqrt(mean over c,h of x^2 + 1e-06)\n" in out
    assert "\n  source   DeepSeek-V4 inference code and report\n" in out


@pytest.mark.parametrize("name", [name for name, _ in PIPELINE])
def test_explain_stops_after_a_pass(mhcgen: Cli, name: str) -> None:
    code, out, _ = mhcgen("explain", "--fuse", "pre", "--stop-after", name)
    assert code == 0
    order = [step for step, _ in PIPELINE]
    for step in order[order.index(name) + 1 :]:
        assert f"\n{step}: " not in out


def test_explain_shows_a_refusal_where_the_rest_would_stand(mhcgen: Cli) -> None:
    code, out, _ = mhcgen("explain", "--fuse", "site")
    assert code == 3
    assert "\nrefused F-ESCAPE: group " in out
    assert "\n  path: collapse -> branch -> post\n  hint: " in out


@pytest.mark.parametrize(("language", "start"), [("dot", "digraph"), ("mermaid", "flowchart"), ("svg", "<svg")])
def test_explain_draws(mhcgen: Cli, language: str, start: str) -> None:
    code, out, err = mhcgen("explain", "--fuse", "pre", "--graph", language)
    assert (code, err) == (0, "")
    assert out.startswith(start)
    code, out, err = mhcgen("explain", "--fuse", "site", "--graph", language)
    assert code == 3
    assert out.startswith(start)
    assert "F-ESCAPE" in err


def test_explain_knows_its_words(mhcgen: Cli) -> None:
    for option in ("--stop-after", "--graph"):
        code, out, err = mhcgen("explain", option, "nothing")
        assert (code, out) == (2, "")
        assert f"error[U-OPTION]: {option} must be one of " in err


# ---- list, doctor, cache, docs --------------------------------------------------------------------------------
def test_lists(mhcgen: Cli) -> None:
    from mhcgen.gate import RED, arms

    program = build(streams=3, hidden=64)
    names = {
        "models": list(MODELS),
        "fusions": list(PRESETS),
        "archs": ["sm_90", "sm_120"],
        "red": list(RED),
        "kernels": [arm.name for arm in arms(program, Options(fuse="pre"))],
    }
    for what, wanted in names.items():
        code, out, err = mhcgen("list", what, "--streams", 3, "--hidden", 64, "--fuse", "pre")
        assert (code, err) == (0, "")
        found = {line.split("  ")[0] for line in out.splitlines()}
        assert set(wanted) <= found
    everything = mhcgen("list", "--hidden", 64)[1]
    assert [line for line in everything.splitlines() if not line.startswith(" ")] == [
        "models", "fusions", "kernels", "archs", "red",
    ]
    assert mhcgen("list", "wishes")[0] == 2


@pytest.mark.parametrize(("state", "code"), [("ok", 0), ("note", 0), ("missing", 0), ("broken", 4)])
def test_doctor(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, state: Any, code: int) -> None:
    from mhcgen import doctor

    checks = [doctor.Check("Python", "ok", "3.11"), doctor.Check("CuPy", state, "says so", "pip install it")]
    monkeypatch.setattr(doctor, "diagnose", lambda: checks)
    found, out, err = mhcgen("doctor")
    assert (found, err) == (code, "")
    assert out.splitlines()[0].split() == ["ok", "Python", "3.11"]
    assert "-> pip install it" in out


def test_cache(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from mhcgen import cache

    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    assert mhcgen("cache") == (0, f"{tmp_path}: 0 entries, 0.0 MiB\n", "")
    cache.store(cache.key_of("a"), ".bin", bytes(2**20))
    assert mhcgen("cache")[1] == f"{tmp_path}: 1 entry, 1.0 MiB\n"
    assert mhcgen("cache", "--clear")[1] == f"{tmp_path}: 1 entry removed\n"
    assert mhcgen("cache")[1] == f"{tmp_path}: 0 entries, 0.0 MiB\n"


def test_the_page_of_refusals_is_current(mhcgen: Cli) -> None:
    code, _, err = mhcgen("docs", "--check", "--checkout", ROOT)
    assert code == 0, err
    text = (ROOT / "docs" / "refusals.md").read_text()
    for entry in CATALOGUE.values():
        assert f"### {entry.code}\n\n{entry.meaning}\n" in text


def test_a_page_of_refusals_that_is_not_current(mhcgen: Cli, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    assert mhcgen("docs", "--check", "--checkout", tmp_path)[0] == 1
    assert mhcgen("docs", "--write", "--checkout", tmp_path)[0] == 0
    assert mhcgen("docs", "--check", "--checkout", tmp_path)[0] == 0
    page = tmp_path / "docs" / "refusals.md"
    assert mhcgen("docs", "--checkout", tmp_path)[1] == page.read_text()
    page.write_text(page.read_text() + "\n")
    code, out, err = mhcgen("docs", "--check", "--checkout", tmp_path)
    assert (code, out) == (1, "")
    assert err.startswith("error[C-DOCS]")


# ---- check ----------------------------------------------------------------------------------------------------
class FakeReport:
    """Stands in for the gate's report."""

    def __init__(self, exit_code: int, error: InternalError | None = None) -> None:
        self.exit_code, self.error = exit_code, error

    def table(self) -> str:
        return "the table\n"

    def json_line(self) -> str:
        return "MHCGEN_CHECK_JSON {}"


def test_check_hands_everything_to_the_gate(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen import gate

    asked: list[gate.Request] = []

    def run(request: gate.Request) -> FakeReport:
        asked.append(request)
        return FakeReport(1)

    monkeypatch.setattr(gate, "run", run)
    words = ["--streams", 3, "--hidden", 64, "--fuse", "seed", "--tokens", "1,0", "--backend", "host", "--race"]
    words += ["--arms", "v1,v2", "--red", "skip-stream,swap-eps", "--red", "drop-barrier", "--seed", 7]
    assert mhcgen("check", *words) == (1, "the table\nMHCGEN_CHECK_JSON {}\n", "")
    assert asked == [
        gate.Request(
            config=configure(streams=3, hidden=64), options=Options(fuse="seed"), tokens=(1, 0), backend="host",
            race=True, arms="v1,v2", red=("skip-stream", "swap-eps", "drop-barrier"), seed=7,
        )
    ]
    assert mhcgen("check")[0] == 1
    assert asked[1] == gate.Request(config=configure(), tokens=(1, 4, 8))


def test_check_of_a_gate_that_misses_a_fault_is_a_bug(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen import gate

    monkeypatch.setattr(gate, "run", lambda _: FakeReport(70, InternalError("G-UNCAUGHT", "missed one")))
    code, out, err = mhcgen("check")
    assert code == 70
    assert out.startswith("the table")
    assert err.startswith("error[G-UNCAUGHT]: missed one\n")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--tokens", "x"], "U-TOKENS"),
        (["--tokens", "-1"], "U-TOKENS"),
        (["--backend", "tpu"], "U-BACKEND"),
        (["--seed", "1.5"], "U-USAGE"),
        (["--arms", "fastest", "--hidden", "64"], "U-ARM"),
        (["--red", "typo", "--hidden", "64"], "U-RED"),
    ],
)
def test_check_refuses_what_means_nothing(mhcgen: Cli, words: list[str], code: str) -> None:
    found, out, err = mhcgen("check", *words)
    assert (found, out) == (2, "")
    assert err.startswith(f"error[{code}]: ")


def test_check_runs_the_gate(mhcgen: Cli) -> None:
    words = ["--hidden", 32, "--fuse", "pre", "--tokens", "2", "--backend", "host"]
    code, out, err = mhcgen("check", *words)
    assert (code, err) == (0, "")
    assert out.splitlines()[-1].startswith("MHCGEN_CHECK_JSON {")


@pytest.mark.parametrize("tokens", ["1" * 5000, "9" * 41, "1,-1", "1,,2", "١"])
def test_check_reads_token_counts(mhcgen: Cli, tokens: str) -> None:
    code, _, err = mhcgen("check", "--hidden", "8", "--tokens", tokens)
    assert code == 2 and err.startswith("error[U-TOKENS]: ")


@pytest.mark.parametrize("red", ["", ",", "swap-eps,"])
def test_check_plants_no_fault_without_a_name(mhcgen: Cli, red: str) -> None:
    code, _, err = mhcgen("check", "--hidden", "8", "--tokens", "1", "--red", red)
    assert code == 2 and err.startswith("error[U-RED]: ")
