"""What a bench run says: tables, JSON, Markdown, a picture; and what it refuses."""

from __future__ import annotations

import copy
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mhcgen import cli
from mhcgen.bench import facts, plot, report
from mhcgen.bench.device import Dry
from mhcgen.bench.run import BenchReport, BenchRequest, bench, name_of
from mhcgen.build import build
from mhcgen.errors import EnvironmentFault, InputError, RefusedError, UsageError, exit_code
from mhcgen.request import request

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., tuple[int, str, str]]


def asked(tokens: tuple[int, ...] = (1, 2), **given: Any) -> BenchRequest:
    own = {name: given.pop(name) for name in list(given) if name in BenchRequest.__dataclass_fields__}
    config, options = request(**{"hidden": 64, "streams": 2, "iters": 2, "fuse": "pre", **given})
    return BenchRequest(config, options, tokens, **own)


@pytest.fixture(scope="module")
def made() -> BenchReport:
    everything = asked(arms="v4.auto,v1", peers="all", phases=True, bandwidth=1, rounds=2, dtype="bf16")
    return bench(everything, Dry())


def test_every_arm_has_a_row_at_every_token_count(made: BenchReport) -> None:
    rows = made.sections["rows"]
    assert [(r["note"], r["T"]) for r in rows] == [(n, t) for t in (1, 2) for n in ("unfused", "v1", "v4.auto")]
    assert all(r["what"] == "finish" and r["differing_bytes"] == 0 and r["method"] == "graph" for r in rows)
    keys = {"us", "low", "high", "floor_us", "bytes", "GB_s", "runs", "kernels", "sha256"}
    assert all(set(r) >= keys for r in rows)


def test_rivals_without_a_function_are_a_note(made: BenchReport) -> None:
    assert "liger has no public function for finish" in made.notes
    assert len(made.notes) == len(set(made.notes))
    assert {row["peer"] for row in made.sections["peers"]} == {"torch", "torch-compile", "flashinfer"}


def test_json_says_where_the_figures_come_from(made: BenchReport) -> None:
    found = json.loads(made.json())
    assert found["format"] == facts.FORMAT
    assert found["dry"] is True
    assert set(found) >= {"gpu", "driver", "date", "commit", "command", "copy_TB_s", "null_us", "rows", "phases"}
    assert found["bandwidth"][0]["MiB"] == 1


def test_the_table_has_a_column_for_each_token_count(made: BenchReport) -> None:
    text = made.table()
    assert "A dry run: nothing here was measured." in text
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line == "rows: n = 2, H = 64, bf16 ieee fp64, graph replay")
    assert lines[start + 1].split() == ["us", "T", "=", "1", "T", "=", "2"]
    assert [line.split()[1] for line in lines[start + 2 : start + 5]] == ["unfused", "v1", "v4.auto"]
    assert lines[start + 5].split() == ["floor", "1.00", "1.00"]
    assert any(line.startswith("phases: ") for line in lines)
    assert any("liger has no public function" in line for line in lines)


def test_markdown_has_the_same_cells(made: BenchReport) -> None:
    lines = report.markdown(made.as_dict()).splitlines()
    assert "| finish v1 | 1.00 (1.00 to 1.00) | 1.00 (1.00 to 1.00) |" in lines
    assert "| us | T = 1 | T = 2 |" in lines
    assert lines[lines.index("| us | T = 1 | T = 2 |") + 1] == "| --- | --- | --- |"
    assert lines[0].startswith("none: dry run, driver none; copy ")


def test_bars_in_cells_do_not_break_a_table() -> None:
    row = {"what": "a|b", "T": 1, "us": 1.0, "floor_us": 0.5, "method": "graph"}
    assert "| a\\|b | 1.00 |" in report.markdown({"rows": [row]})


def test_a_dry_run_is_never_taken_for_figures(made: BenchReport, tmp_path: Path) -> None:
    path = tmp_path / "dry.json"
    path.write_text(made.json())
    with pytest.raises(InputError, match="dry run") as caught:
        report.read(path)
    assert caught.value.code == "I-BENCH"
    path.write_text(json.dumps({**made.as_dict(), "dry": False}))
    assert report.read(path)["rows"]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": "other"}', "\xff"])
def test_other_files_are_no_figures(tmp_path: Path, text: str) -> None:
    path = tmp_path / "f.json"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        report.read(path)
    assert caught.value.code == "I-BENCH"
    with pytest.raises(InputError):
        report.read(tmp_path / "absent.json")


def _cut(value: Any) -> Any:
    """Lists cut to their first entry, at every depth."""
    if isinstance(value, dict):
        return {key: _cut(part) for key, part in value.items()}
    return [_cut(part) for part in value[:1]] if isinstance(value, list) else value


def _edits(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Figures with one value taken out, or another in its place, at any depth that is read."""
    if name.endswith((".kernels.", ".options.", ".runs.", ".us_by_iterations.")):
        return
    places = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in list(places):
        for change in ("gone", "word", 7, 0, None, [1], [{}], {"a": 1}):
            edited = copy.copy(value)
            if change == "gone":
                del edited[key]
            else:
                edited[key] = change
            yield f"{name}{key} {change}", edited
        for told, inner in _edits(part, f"{name}{key}."):
            edited = copy.copy(value)
            edited[key] = inner
            yield told, edited


def _read_or_refused(path: Path, name: str, edited: Any) -> bool:
    """Whether a file is refused; one that is read has its tables, and a picture can be made of it."""
    path.write_text(json.dumps(edited))
    try:
        found = report.read(path)
    except InputError as error:
        assert error.code == "I-BENCH"
        return True
    assert report.markdown(found) and report.text(found), name
    lines = plot.curves(found)
    assert plot.looks(lines).keys() == lines.keys(), name
    assert not lines or found["copy_TB_s"] / found["null_us"] > 0, name
    assert all(us / t > 0 and b / us > 0 for points in lines.values() for t, us, b in points), name
    return False


@pytest.mark.parametrize(
    ("of", "refused"),
    [
        ("decode", "rows.0.us word, rows.0.T gone, null_us None, format 7, rows.0.what gone, rows.0.us 0"),
        (
            "phases",
            "phases.0.phases [1], phases.0.phases [{}], phases.0.phases.0.phases [{}], phases.0.T gone, "
            "phases.0.phases.0.phases.0.share None, phases.0.phases.0.ns word, bandwidth.0.MiB gone",
        ),
        (
            "seed",
            "arms.0.graph.us word, arms.0.graph {'a': 1}, arms.0.graph.high gone, iterations.0.us_at_none None, "
            "iterations.0.us_per_iteration word",
        ),
    ],
)
def test_an_edited_file_is_read_or_refused(tmp_path: Path, of: str, refused: str) -> None:
    figures = json.loads((ROOT / f"docs/measurements/2026-12-01-h200-{of}.json").read_text())
    alike = ("post", "norm_quant", "early_stop") + ("phases",) * (of == "seed")
    figures = {key: _cut(value) for key, value in figures.items() if key not in alike}
    path = tmp_path / "f.json"
    assert not _read_or_refused(path, "unedited", figures)
    found = [name for name, edited in _edits(figures) if _read_or_refused(path, name, edited)]
    assert set(refused.split(", ")) <= set(found)


@pytest.mark.parametrize(
    "row",
    [
        {"what": "a", "phases": [1]},
        {"what": "a", "T": 1, "phases": [{"phases": [{}], "cycles": 1, "ns": 1}]},
        {"what": "a", "T": 1, "us": 1, "floor_us": 1, "back_to_back": {"us": "x"}},
        {"what": "a", "T": 1, "us": 1, "floor_us": 1, "wall": {"us": 1, "low": "q"}},
        {"what": "a", "T": 1, "us": 1, "floor_us": 1, "wall": {"us": 1, "low": 1}},
        {"what": "a", "T": 1, "us": 1, "floor_us": 1, "graph": {"us": 1, "T": [1]}},
        {"what": "a", "us_per_iteration": "x", "us_at_none": 1},
        {"what": "a", "us_per_iteration": 1, "us_at_none": None},
        {"what": "bandwidth", "us": 1},
        {"what": "bandwidth", "T": 1, "us": 1},
        {"what": " ", "T": 1, "us": 1, "floor_us": 1, "bytes": 1},
        {"what": "a", "T": 1, "us": 10**400, "floor_us": 1},
        {"what": "a", "T": True, "us": 1, "floor_us": 1},
    ],
)
def test_rows_that_no_table_can_be_made_of(tmp_path: Path, row: dict[str, Any]) -> None:
    head = {"format": facts.FORMAT, "copy_TB_s": 4.0, "null_us": 0.5}
    assert _read_or_refused(tmp_path / "f.json", str(row), {**head, "rows": [row]})


def test_every_file_of_figures_is_read() -> None:
    paths = sorted((ROOT / "docs/measurements").glob("*.json"))
    read = [path for path in paths if json.loads(path.read_text()).get("format") == facts.FORMAT]
    assert len(read) > 8 and all(report.markdown(report.read(path)) for path in read)


def test_modules_run_by_themselves_end_with_one_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for call in (lambda: report.main([str(tmp_path / "absent.json")]), lambda: plot.main(["one"])):
        assert exit_code(call) == 2
        assert re.match(r"error\[[IU]-[A-Z]+\]: ", capsys.readouterr().err)


def test_a_row_with_an_error_is_listed_and_not_tabled() -> None:
    rows = [
        {"what": "pre", "note": "a", "T": 1, "n": 4, "error": "E-X: no"},
        {"what": "pre", "note": "b", "T": 1, "n": 4, "us": 2.0, "floor_us": 1.0},
    ]
    text = report.text({"rows": rows})
    assert "pre a" not in text.split("not measured")[0]
    assert "rows: pre a, n = 4, T = 1: E-X: no" in text


def test_commands_name_no_folders(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["/usr/bin/mhcgen", "bench", "--json", "/home/me/x.json", "--plot=~/a/b.png", "--arms", "group.a/b"]
    monkeypatch.setattr(sys, "argv", words)
    assert facts.command() == "mhcgen bench --json x.json --plot=b.png --arms group.a/b"


def test_commit_is_known_or_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(*_: object) -> str:
        raise FileNotFoundError("git")

    monkeypatch.setattr(facts, "_git", absent)
    assert facts.commit() == "unknown"
    monkeypatch.setattr(facts, "_git", lambda _, *words: "abc" if words[0] == "rev-parse" else " M file")
    assert facts.commit() == "abc+"
    monkeypatch.setattr(facts, "_git", lambda _, *words: "abc" if words[0] == "rev-parse" else "")
    assert facts.commit() == "abc"


# ---- refused before anything is measured --------------------------------------------------------------------
@pytest.mark.parametrize(
    ("given", "code"),
    [
        ({"tokens": (0, 1)}, "U-TOKENS"),
        ({"tokens": ()}, "U-TOKENS"),
        ({"rounds": 0}, "U-ROUNDS"),
        ({"bandwidth": 0}, "U-BANDWIDTH"),
        ({"bandwidth": 1 << 20}, "U-BANDWIDTH"),
        ({"peers": "nobody"}, "U-PEER"),
        ({"arms": "nothing"}, "U-ARM"),
        ({"scope": "site", "fuse": "none"}, "U-BRANCH"),
    ],
)
def test_requests_that_mean_nothing(given: dict[str, Any], code: str) -> None:
    with pytest.raises(UsageError) as caught:
        bench(asked(**given), Dry())
    assert caught.value.code == code


def test_an_illegal_schedule_is_refused() -> None:
    with pytest.raises(RefusedError):
        bench(asked(threads=33), Dry())


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({}, "finish"),
        ({"projection": "fma"}, "pre"),
        ({"projection": "fma", "norm": True}, "pre+norm"),
        ({"norm": True, "quant": "q8"}, "finish+norm+quant"),
        ({"scope": "boundary", "projection": "fma", "norm": True}, "boundary"),
        ({"scope": "boundary", "projection": "fma"}, "boundary without norm"),
        ({"scope": "post"}, "post"),
        ({"scope": "mean"}, "mean"),
    ],
)
def test_names_of_programs(config: dict[str, Any], name: str) -> None:
    assert name_of(build(hidden=64, **config)) == name


# ---- the verb -----------------------------------------------------------------------------------------------
@pytest.fixture
def mhcgen(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.mark.parametrize("verb", ["bench", "tune"])
def test_without_a_gpu_there_is_one_clear_error(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, verb: str) -> None:
    from mhcgen.backends import cupy_state

    def absent() -> None:
        raise EnvironmentFault("E-NO-CUPY", "CuPy is not installed.", hints=("pip install it",))

    monkeypatch.setattr(cupy_state, "require_gpu", absent)
    code, out, err = mhcgen(verb, "--fuse", "pre", "--tokens", 1)
    assert (code, out) == (4, "")
    assert err == (
        "error[E-NO-GPU]: times are taken on a GPU, and none can be used here\n"
        "  note: E-NO-CUPY: CuPy is not installed.\n  hint: pip install it\n"
    )


@pytest.fixture
def on_dry(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen.bench import run

    monkeypatch.setattr(run, "gpu", Dry)


SMALL = ("--streams", 2, "--hidden", 64, "--iters", 2, "--fuse", "pre")


def test_figures_go_to_a_file_and_to_the_terminal(mhcgen: Cli, on_dry: None, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    words = ("bench", *SMALL, "--tokens", "1", "--rounds", 1, "--json", path)
    code, out, err = mhcgen(*words)
    assert (code, err) == (0, "")
    assert "finish asked" in out and "finish unfused" in out
    found = json.loads(path.read_text())
    assert [row["note"] for row in found["rows"]] == ["unfused", "asked"]
    assert mhcgen(*words)[0] == 0  # its own file is overwritten
    path.write_text("mine")
    code, _, err = mhcgen(*words)
    assert code == 2
    assert "error[U-OUTPUT]: mhcgen did not make the file that is there" in err
    assert path.read_text() == "mine"
    assert mhcgen(*words, "--force")[0] == 0


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_output_is_checked_before_anything_is_measured(mhcgen: Cli, tmp_path: Path, option: str) -> None:
    assert mhcgen("bench", *SMALL, option, tmp_path / "no" / "x")[2].startswith("error[U-OUTPUT]")
    assert mhcgen("bench", *SMALL, option, tmp_path)[2].startswith("error[U-OUTPUT]")


def test_seed_tables_by_the_verb(on_dry: None, monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen.bench import run

    class Few:
        count = 2

        def __init__(self, config: dict[str, Any], rounds: int) -> None:
            assert config == {"streams": 2, "hidden": 64}

        def run(self, _: object) -> Any:
            yield "arms", [{"what": "finish", "T": 1, "us": 1.0, "floor_us": 1.0}]
            yield "arms", [{"what": "finish", "T": 4, "us": 1.0, "floor_us": 1.0}]

    monkeypatch.setattr(run, "SeedTables", Few)
    made = bench(asked((1,), seed_tables=True), Dry())
    assert [row["T"] for row in made.sections["seed arms"]] == [1, 4]


# ---- the picture --------------------------------------------------------------------------------------------
def test_without_matplotlib_there_is_one_clear_error(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = mhcgen("bench", *SMALL, "--plot", tmp_path / "out.png")
    assert (code, out) == (4, "")
    assert err.startswith("error[E-NO-PLOT]: matplotlib is not installed")
    assert list(tmp_path.iterdir()) == []


def test_curves_are_arms_and_rivals_by_tokens(made: BenchReport) -> None:
    lines = plot.curves(made.as_dict())
    assert set(lines) == {"finish unfused", "finish v1", "finish v4.auto"}
    assert [t for t, _, _ in lines["finish v1"]] == [1, 2]


def test_only_the_fastest_curves_are_drawn() -> None:
    rows = [{"what": "w", "note": str(i), "T": 1, "us": float(i + 1), "bytes": 1} for i in range(30)]
    lines = plot.curves({"rows": rows})
    assert list(lines) == [f"w {i}" for i in range(plot.MOST_LINES)]


def test_the_floor_of_what_is_launched_may_differ(made: BenchReport) -> None:
    found = made.as_dict()
    wide = [{**row, "what": "post", "floor_us": 3.0 + row["floor_us"]} for row in found["rows"]]
    both = {**found, "rows": [*found["rows"], *wide]}
    lines, one = ([x for x in report.markdown(made).splitlines() if "floor" in x] for made in (both, found))
    assert lines and all(" to " in line for line in lines) and not any(" to " in line for line in one)


def test_a_graph_that_could_not_be_taken_is_said(made: BenchReport) -> None:
    found = made.as_dict()
    rows = [{**found["rows"][0], "graph_error": "no capture"}]
    assert any("graph replay: no capture" in line for line in report.failures({**found, "rows": rows}))


def test_of_several_sizes_one_is_drawn(made: BenchReport) -> None:
    found = made.as_dict()
    wide = [{**row, "H": 2 * row["H"]} for row in found["rows"]]
    both = {**found, "rows": [*found["rows"], *wide]}
    assert plot.curves(both) == plot.curves(found) and plot.drawn(both) == plot.drawn(found)
    assert plot.curves({**found, "rows": wide}).keys() == plot.curves(found).keys()


def test_what_is_launched_has_a_colour_and_by_whom_a_form() -> None:
    look = plot.looks(["finish", "finish torch", "post", "post torch"])
    assert look["finish"]["color"] == look["finish torch"]["color"] != look["post"]["color"]
    assert look["finish torch"]["marker"] == look["post torch"]["marker"] != look["post"]["marker"]


def test_without_a_time_there_is_nothing_to_draw(made: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(InputError, match="nothing to draw") as caught:
        plot.plot({**made.as_dict(), "rows": []}, tmp_path / "out.png")
    assert caught.value.code == "I-BENCH" and not list(tmp_path.iterdir())


def test_a_picture_is_drawn(made: BenchReport, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    plot.plot(made.as_dict(), path)
    assert path.read_bytes()[:4] == b"\x89PNG"
    assert b"mhcgen" in path.read_bytes()[:512]
