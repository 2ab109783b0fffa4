"""explain, list, doctor, cache, docs, check and run, verb by verb."""

from __future__ import annotations

import os
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from mhcgen import cli
from mhcgen.build import build, configure
from mhcgen.errors import EnvironmentFault, InternalError
from mhcgen.files import write_file
from mhcgen.inputs import make_inputs
from mhcgen.log import CATALOGUE
from mhcgen.models import MODELS
from mhcgen.passes import PIPELINE
from mhcgen.passes.fuse import PRESETS
from mhcgen.plan import Options

Cli = Callable[..., tuple[int, str, str]]
ROOT = Path(__file__).parent.parent


@pytest.fixture
def mhcgen(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs one command line in this process: exit code, stdout, stderr."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


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


# ---- run --------------------------------------------------------------------------------------------------------
@pytest.fixture
def given() -> dict[str, Any]:
    return make_inputs(build(hidden=64), 3)


RUN = ("run", "--hidden", 64, "--fuse", "pre", "--backend", "host")


def save(folder: Path, arrays: dict[str, Any]) -> Path:
    path = folder / "in.npz"
    np.savez(path, **arrays)
    return path


def test_run_writes_what_the_module_returns(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    from safetensors.numpy import save_file

    from mhcgen import compile

    save_file(given, tmp_path / "in.safetensors")
    want = compile(build(hidden=64), "pre").load("host")(**given)
    for source in (save(tmp_path, given), tmp_path / "in.safetensors"):
        target = tmp_path / f"{source.name}.out.npz"
        code, out, err = mhcgen(*RUN, "--inputs", source, "--outputs", target)
        assert (code, err) == (0, "")
        assert "comb: float32[3, 4, 4]\n" in out
        have = np.load(target, allow_pickle=False)
        assert list(have) == list(want)
        for name in have:
            assert have[name].tobytes() == want[name].tobytes()


def test_run_knows_an_archive_in_capitals(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    source = save(tmp_path, given).rename(tmp_path / "OK.NPZ")
    assert mhcgen(*RUN, "--inputs", source, "--outputs", tmp_path / "out.npz")[::2] == (0, "")
    assert list(np.load(tmp_path / "out.npz")) == ["pre", "post", "comb", "y"]


def test_run_of_no_token_gives_empty_results(mhcgen: Cli, tmp_path: Path) -> None:
    source = save(tmp_path, make_inputs(build(hidden=64), 0))
    assert mhcgen(*RUN, "--inputs", source, "--outputs", tmp_path / "out.npz")[0] == 0
    have = np.load(tmp_path / "out.npz")
    assert {name: have[name].shape for name in have} == {
        "pre": (0, 4), "post": (0, 4), "comb": (0, 4, 4), "y": (0, 64),
    }


def test_run_takes_bf16_from_an_archive(mhcgen: Cli, tmp_path: Path) -> None:
    """numpy stores it as raw bytes; plain uint16 is never taken for it."""
    arrays = make_inputs(build(hidden=64, dtype="bf16"), 2)
    target = tmp_path / "out.npz"
    code, out, _ = mhcgen(*RUN, "--dtype", "bf16", "--inputs", save(tmp_path, arrays), "--outputs", target)
    assert code == 0
    assert "y: bfloat16[2, 64]\n" in out
    assert "array.view(ml_dtypes.bfloat16)" in out
    y = np.load(target)["y"].view(ml_dtypes.bfloat16)
    assert np.isfinite(y.astype(np.float32)).all()
    arrays["x"] = arrays["x"].view(np.uint16)
    code, _, err = mhcgen(
        *RUN, "--dtype", "bf16", "--inputs", save(tmp_path, arrays), "--outputs", target, "--force"
    )
    assert code == 2
    assert err.startswith("error[I-DTYPE]: x has dtype uint16")


BAD: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str]] = {
    "missing": (lambda a: {k: v for k, v in a.items() if k != "scale"}, "I-MISSING"),
    "surplus": (lambda a: {**a, "scal": a["scale"]}, "I-UNKNOWN"),
    "wide": (lambda a: {**a, "x": a["x"].astype(np.float64)}, "I-DTYPE"),
    "integer": (lambda a: {**a, "mixes": a["mixes"].astype(np.int32)}, "I-DTYPE"),
    "big-endian": (lambda a: {**a, "x": a["x"].astype(">f4")}, "I-DTYPE"),
    "short": (lambda a: {**a, "base": a["base"][:-1]}, "I-SHAPE"),
    "flat": (lambda a: {**a, "x": a["x"].reshape(3, -1)}, "I-SHAPE"),
    "number": (lambda a: {**a, "x": np.float32(1)}, "I-SHAPE"),
    "other width": (lambda a: {**a, "x": a["x"][:, :, :32].copy()}, "I-SHAPE"),
    "other tokens": (lambda a: {**a, "x": a["x"][:2].copy()}, "I-SHAPE"),
    "fortran": (lambda a: {**a, "x": np.asfortranarray(a["x"])}, "I-LAYOUT"),
    "objects": (lambda a: {**a, "x": np.array([{}])}, "I-FILE"),
}


@pytest.mark.parametrize("what", BAD)
def test_run_refuses_arrays_that_do_not_fit(
    mhcgen: Cli, tmp_path: Path, given: dict[str, Any], what: str
) -> None:
    spoil, error = BAD[what]
    source = save(tmp_path, spoil(given))
    code, out, err = mhcgen(*RUN, "--inputs", source, "--outputs", tmp_path / "out.npz")
    assert (code, out) == (2, "")
    assert err.startswith(f"error[{error}]: ")
    assert "Traceback" not in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


@pytest.mark.parametrize(
    "arguments",
    [
        (*RUN, "--inputs", "NAME.npz", "--outputs", "out.npz"),
        (*RUN, "--inputs", "in.npz", "--outputs", "NAME.npz"),
        (*RUN, "--inputs", "in.npz", "--outputs", "NAME/out.npz"),
        (*RUN, "--inputs", "in.npz", "--outputs", "out.npz", "--layer", "0", "--site", "attn", "--weights=NAME"),
        ("emit", "--streams", "2", "--hidden", "8", "--out", "NAME"),
        ("report", "--streams", "2", "--hidden", "8", "--out", "NAME.html"),
        ("bench", "--streams", "2", "--hidden", "8", "--json", "NAME"),
    ],
)
def test_a_path_that_the_system_does_not_take(
    mhcgen: Cli, tmp_path: Path, given: dict[str, Any], monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    save(tmp_path, given)
    code, out, err = mhcgen(*(str(part).replace("NAME", "n" * 300) for part in arguments))
    assert (code, out) == (2, "")
    assert err.startswith("error[I-") and "name too long" in err and "hint: " in err
    assert [path.name for path in tmp_path.iterdir()] == ["in.npz"]


def test_an_error_of_the_system_about_a_path_of_ours_is_a_bug(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "/our/own/file")

    monkeypatch.setattr("mhcgen.commands.options.asked_of", fail)
    code, _, err = mhcgen("explain", "--streams", "2")
    assert (code, err.split(":")[0]) == (70, "error[INTERNAL]")


def damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)


def cut_header(path: Path) -> None:
    """The shape of an array loses its closing bracket, under a checksum that fits."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data.replace(b"), }", b"   }") if name == "x.npy" else data)


def encrypted(path: Path) -> None:
    """Every member says that it needs a password."""
    data = bytearray(path.read_bytes())
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = data.find(signature)
        while at >= 0:
            data[at + flags] |= 1
            at = data.find(signature, at + 1)
    path.write_bytes(data)


FILES: dict[str, Callable[[Path], object]] = {
    "cut header": cut_header,
    "encrypted": encrypted,
    "none": Path.unlink,
    "text": lambda path: path.write_text("no archive"),
    "empty": lambda path: path.write_bytes(b""),
    "cut": lambda path: path.write_bytes(path.read_bytes()[:-100]),
    "damaged": damage,
    "one array": lambda path: path.open("wb").write(bytes.fromhex("934e554d5059")),
    "folder": lambda path: (path.unlink(), path.mkdir()),
}


@pytest.mark.parametrize("what", FILES)
def test_run_refuses_files_that_are_no_archive(
    mhcgen: Cli, tmp_path: Path, given: dict[str, Any], what: str
) -> None:
    source = save(tmp_path, given)
    FILES[what](source)
    code, out, err = mhcgen(*RUN, "--inputs", source, "--outputs", tmp_path / "out.npz")
    assert (code, out) == (2, "")
    assert err.startswith("error[I-FILE]: ")
    assert "Traceback" not in err
    assert "pickle" not in err
    assert not (tmp_path / "out.npz").exists()


def test_run_looks_at_its_output_before_it_computes(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    from mhcgen.plan import Plan

    source = save(tmp_path, given)
    (tmp_path / "there.npz").write_text("mine")
    (tmp_path / "folder.npz").mkdir()

    def load(*_: object) -> None:
        raise AssertionError("it computes")

    monkeypatch.setattr(Plan, "load", load)
    for name in ("no/such/out.npz", "there.npz", "folder.npz", "out.npy", "in.npz"):
        code, out, err = mhcgen(*RUN, "--inputs", source, "--outputs", tmp_path / name)
        assert (code, out) == (2, "")
        assert err.startswith("error[U-OUTPUT]: ")
    assert mhcgen(*RUN, "--inputs", source, "--outputs", source, "--force")[0] == 2
    assert (tmp_path / "there.npz").read_text() == "mine"


def test_run_overwrites_only_when_told(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    source, target = save(tmp_path, given), tmp_path / "out.npz"
    target.write_text("mine")
    assert mhcgen(*RUN, "--inputs", source, "--outputs", target)[0] == 2
    assert mhcgen(*RUN, "--inputs", source, "--outputs", target, "--force")[0] == 0
    first = target.read_bytes()
    assert mhcgen(*RUN, "--inputs", source, "--outputs", target, "--force")[0] == 0
    assert target.read_bytes() == first


def test_run_replaces_what_a_link_leads_to_and_no_pipe(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    source, link, pipe = save(tmp_path, given), tmp_path / "link.npz", tmp_path / "pipe.npz"
    (tmp_path / "target.npz").write_text("old")
    link.symlink_to("target.npz")
    os.mkfifo(pipe)
    assert mhcgen(*RUN, "--inputs", source, "--outputs", link, "--force")[0] == 0
    assert link.is_symlink() and "y" in np.load(tmp_path / "target.npz")
    code, _, err = mhcgen(*RUN, "--inputs", source, "--outputs", pipe, "--force")
    assert code == 2 and err.startswith("error[U-OUTPUT]: it is no regular file")
    code, _, err = mhcgen("report", "--fuse", "pre", "--hidden", "8", "--archs", "none", "--out", pipe, "--force")
    assert code == 2 and err.startswith("error[U-OUTPUT]: it is no regular file")
    with pytest.raises(EnvironmentFault, match="no regular file"):
        write_file(pipe, "text")
    assert pipe.is_fifo()


def test_run_keeps_time_stamps(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    target = tmp_path / "out.npz"
    assert mhcgen(*RUN, "--stamps", "--inputs", save(tmp_path, given), "--outputs", target)[0] == 0
    found = np.load(target)
    (name,) = (name for name in found if name.startswith("stamps."))
    assert found[name].dtype == np.int64 and found[name].shape[::2] == (len(given["x"]), 2)


@pytest.mark.parametrize("tokens", ["1" * 5000, "9" * 41, "1,-1", "1,,2", "١"])
def test_check_reads_token_counts(mhcgen: Cli, tokens: str) -> None:
    code, _, err = mhcgen("check", "--hidden", "8", "--tokens", tokens)
    assert code == 2 and err.startswith("error[U-TOKENS]: ")


@pytest.mark.parametrize("red", ["", ",", "swap-eps,"])
def test_check_plants_no_fault_without_a_name(mhcgen: Cli, red: str) -> None:
    code, _, err = mhcgen("check", "--hidden", "8", "--tokens", "1", "--red", red)
    assert code == 2 and err.startswith("error[U-RED]: ")


def test_run_needs_both_files_and_a_program_without_a_branch(mhcgen: Cli, tmp_path: Path) -> None:
    code, _, err = mhcgen("run", "--fuse", "pre")
    assert code == 2
    assert err.startswith("error[U-USAGE]: Missing option '--inputs'")
    files = ["--inputs", tmp_path / "in.npz", "--outputs", tmp_path / "out.npz"]
    assert mhcgen("run", "--scope", "site", *files)[2].startswith("error[U-BRANCH]: ")
    assert mhcgen("run", "--backend", "tpu", *files)[2].startswith("error[U-BACKEND]: ")


def test_run_without_a_compiler_says_what_to_do(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, given: dict[str, Any]
) -> None:
    for name in ("CXX", "MHCGEN_CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda *_, **__: None)
    code, out, err = mhcgen(*RUN, "--inputs", save(tmp_path, given), "--outputs", tmp_path / "out.npz")
    assert (code, out) == (4, "")
    assert err.startswith("error[E-NO-CXX]: ")
    assert "mhcgen[zig]" in err
    assert not (tmp_path / "out.npz").exists()
