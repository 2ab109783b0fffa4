"""The command line: verbs, exit codes, the texts of errors, and what it must not do."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mhcgen.errors import InternalError, LaunchError
from mhcgen.folder import FILES

VERBS = ("list", "emit", "explain", "check", "run", "report", "doctor", "cache", "docs")
Cli = Callable[..., tuple[int, str, str]]


def process(*arguments: str, env: dict[str, str] | None = None, **options: Any) -> subprocess.CompletedProcess[bytes]:
    """Runs one command line in a process of its own."""
    words = [sys.executable, "-m", "mhcgen", *arguments]
    return subprocess.run(words, capture_output=True, env={**os.environ, **(env or {})}, **options)


def one_error(err: str, code: str) -> None:
    """stderr is one error in the one form, and no traceback."""
    assert err.startswith(f"error[{code}]: ")
    assert err.count("error[") == 1
    assert "Traceback" not in err
    assert all(line.startswith(("  where: ", "  note: ", "  hint: ")) for line in err.splitlines()[1:])


# ---- help, version, start --------------------------------------------------------------------------------
@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(mhcgen: Cli, verb: str) -> None:
    code, out, err = mhcgen(verb, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: mhcgen {verb}")
    if verb in ("list", "emit", "explain", "check", "run"):
        for option in ("--streams", "--fuse", "--class", "--sinkhorn-iters", "--with", "--mix-warp", "--config"):
            assert option in out


def test_help_lists_the_verbs_and_exit_codes(mhcgen: Cli) -> None:
    for words in ((), ("--help",), ("-h",)):
        code, out, _ = mhcgen(*words)
        assert code == 0
        for verb in ("list", "emit", "explain", "check", "run", "doctor", "cache"):
            assert re.search(rf"^  {verb} ", out, re.M)
        assert "Exit codes:" in out
        assert "docs" not in out


def test_version(mhcgen: Cli) -> None:
    from mhcgen import __version__

    assert mhcgen("--version") == (0, f"mhcgen {__version__}\n", "")


BROKEN_CUPY = "raise RuntimeError('this CuPy is broken')\n"


@pytest.mark.parametrize(
    ("words", "unwanted"),
    [
        (["--help"], {"numpy", "networkx", "jinja2", "cupy", "ml_dtypes"}),
        (["emit", "--help"], {"numpy", "networkx", "jinja2", "cupy", "ml_dtypes"}),
        (["emit", "--fuse", "pre"], {"cupy", "mhcgen.backends.cuda", "mhcgen.backends.host", "mhcgen.gate"}),
        (["explain", "--fuse", "pre"], {"cupy", "mhcgen.backends.cuda", "mhcgen.backends.host", "jinja2"}),
    ],
)
def test_what_a_verb_does_not_need_is_not_imported(tmp_path: Path, words: list[str], unwanted: set[str]) -> None:
    """Also with a CuPy whose import raises something that is no ImportError."""
    (tmp_path / "cupy.py").write_text(BROKEN_CUPY)
    text = (
        "import sys; from mhcgen.cli import run\n"
        f"assert run({words!r}) == 0\n"
        f"print(sorted(set({sorted(unwanted)!r}) & set(sys.modules)), file=sys.stderr)"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, env=env)
    assert (done.returncode, done.stderr.strip()) == (0, "[]")


# ---- bad values -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("options", "code", "exit_code"),
    [
        (["--streams", "0"], "U-STREAMS", 2),
        (["--streams", "-1"], "U-STREAMS", 2),
        (["--streams", "17"], "U-STREAMS", 2),
        (["--streams", "1000000000"], "U-STREAMS", 2),
        (["--streams", "10**9"], "U-USAGE", 2),
        (["--streams", "17x"], "U-USAGE", 2),
        (["--streams", "4.0"], "U-USAGE", 2),
        (["--streams", "four"], "U-USAGE", 2),
        (["--streams", ""], "U-USAGE", 2),
        (["--streams", " 4"], "U-USAGE", 2),
        (["--streams", "1_0"], "U-USAGE", 2),
        (["--streams", "9" * 5000], "U-USAGE", 2),
        (["--streams"], "U-USAGE", 2),
        (["--strems", "4"], "U-USAGE", 2),
        (["surplus"], "U-USAGE", 2),
        (["--hidden", "0"], "U-HIDDEN", 2),
        (["--hidden", "-8"], "U-HIDDEN", 2),
        (["--hidden", "1e3"], "U-USAGE", 2),
        (["--iters", "0"], "U-ITERS", 2),
        (["--sinkhorn-iters", "-1"], "U-ITERS", 2),
        (["--rms-eps", "0"], "U-EPS", 2),
        (["--rms-eps", "-1e-6"], "U-EPS", 2),
        (["--hc-eps", "nan"], "U-EPS", 2),
        (["--norm-eps", "inf"], "U-EPS", 2),
        (["--rms-eps", "small"], "U-USAGE", 2),
        (["--model", "deepseek-v5"], "U-MODEL", 2),
        (["--dtype", "fp64"], "U-DTYPE", 2),
        (["--class", "exact"], "U-CLASS", 2),
        (["--scope", "model"], "U-SCOPE", 2),
        (["--projection", "tf64"], "U-CLASS", 2),
        (["--quant", "q4"], "U-QUANT", 2),
        (["--with", "lora"], "U-WITH", 2),
        (["--arch", "sm_61"], "U-ARCH", 2),
        (["--arch", "hopper"], "U-ARCH", 2),
        (["--placement", "moon"], "U-OPTION", 2),
        (["--sync", "grid"], "U-OPTION", 2),
        (["--slab", "disk"], "U-OPTION", 2),
        (["--mix-warp", "lent"], "U-OPTION", 2),
        (["--config", "no/such.json"], "I-CONFIG", 2),
        (["--threads", "0"], "L-THREADS", 3),
        (["--threads", "33"], "L-THREADS", 3),
        (["--threads", "2048"], "L-THREADS", 3),
        (["--cluster", "0"], "P-CLUSTER", 3),
        (["--cluster", "-4"], "P-CLUSTER", 3),
        (["--cluster", "17"], "P-CLUSTER", 3),
        (["--fuse", "everything"], "F-UNKNOWN", 3),
        (["--fuse", ""], "F-UNKNOWN", 3),
        (["--fuse", "rowsq+rowsq"], "F-OVERLAP", 3),
        (["--fuse", "site"], "F-ESCAPE", 3),
        (["--fuse", "pre", "--streams", "5", "--placement", "element"], "P-ELEMENT", 3),
    ],
)
@pytest.mark.parametrize("to_folder", [False, True])
def test_bad_values(
    mhcgen: Cli, tmp_path: Path, options: list[str], code: str, exit_code: int, to_folder: bool
) -> None:
    """One error in the one form, nothing on stdout, no file written."""
    out = tmp_path / "out"
    words = ["emit", *(["--out", str(out)] if to_folder else []), *options]
    found, stdout, err = mhcgen(*words)
    assert (found, stdout) == (exit_code, "")
    one_error(err, code)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("streams", ["1", "2", "3", "5", "7", "16"])
def test_stream_counts_that_are_no_power_of_two_work(mhcgen: Cli, streams: str) -> None:
    code, out, err = mhcgen("emit", "--streams", streams, "--fuse", "pre")
    assert (code, err) == (0, "")
    assert f"n = {streams} streams" in out


def test_texts_of_the_errors_users_meet_most(mhcgen: Cli) -> None:
    assert mhcgen("emit", "--streams", "17x")[2] == (
        "error[U-USAGE]: --streams takes an integer, got '17x'\n"
        "  where: --streams\n"
        "  hint: give an integer, or leave it out\n"
    )
    assert mhcgen("emit", "--streams", "0")[2] == (
        "error[U-STREAMS]: streams must be an integer from 1 to 16, got 0\n"
        "  where: --streams\n"
        "  hint: give an integer from 1 to 16\n"
    )
    assert mhcgen("emit", "--fuse", "site")[2] == (
        "error[F-ESCAPE]: group rowsq+gates+sinkhorn+collapse+post: a path between collapse and post leaves the "
        "group through the opaque branch\n"
        "  where: pass fuse\n"
        "  note: path: collapse -> branch -> post\n"
        "  hint: fuse the two sides of branch apart: --fuse rowsq+gates+collapse,sinkhorn+post\n"
    )
    code, _, err = mhcgen("emit", "--strems", "4")
    assert code == 2
    assert "--strems" in err
    assert "--streams" in err
    assert err.endswith("  where: mhcgen emit\n  hint: `mhcgen emit --help` shows the options\n")


@pytest.mark.parametrize("verb", ["emit", "explain", "check", "run"])
def test_a_refusal_ends_every_verb_alike(mhcgen: Cli, tmp_path: Path, verb: str) -> None:
    files = ["--inputs", str(tmp_path / "in.npz"), "--outputs", str(tmp_path / "out.npz")]
    code, out, err = mhcgen(verb, "--fuse", "site", *(files if verb == "run" else []))
    assert code == 3
    one_error(err, "F-ESCAPE")
    assert "path: collapse -> branch -> post" in err
    assert "hint: " in err
    assert (out == "") == (verb != "explain")


def test_options_that_do_not_go_together(mhcgen: Cli) -> None:
    for words in (["--check"], ["--dir", "x"], ["--force"], ["--all", "--streams", "4"], ["--all", "--out", "x"]):
        code, out, err = mhcgen("emit", *words)
        assert (code, out) == (2, "")
        one_error(err, "U-USAGE")


# ---- what is no user's mistake ------------------------------------------------------------------------------
def test_an_unexpected_exception_is_a_bug_of_ours(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def explode(**_: object) -> None:
        raise RuntimeError("two\nlines")

    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("mhcgen.request.request", explode)
    code, out, err = mhcgen("emit", "--streams", "4")
    assert (code, out) == (70, "")
    one_error(err, "INTERNAL")
    assert err.startswith("error[INTERNAL]: RuntimeError: two lines\n")
    (kept,) = tmp_path.iterdir()
    assert f"the traceback is in {kept}" in err
    text = kept.read_text()
    assert "Traceback" in text
    assert "'--streams', '4'" in text


def test_an_internal_error_keeps_its_code(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def explode(**_: object) -> None:
        raise InternalError("X-CTYPE", "no such type", hints=("report it",))

    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("mhcgen.request.request", explode)
    code, _, err = mhcgen("emit")
    assert code == 70
    one_error(err, "X-CTYPE")
    assert "the traceback is in " in err


def test_no_place_for_the_traceback_is_no_reason_to_fail_again(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def explode(**_: object) -> None:
        raise KeyError("gone")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mhcgen.request.request", explode)
    monkeypatch.setattr("tempfile.NamedTemporaryFile", full)
    code, _, err = mhcgen("emit")
    assert code == 70
    assert "could not be kept: No space left on device" in err


def test_an_interrupt_is_130(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("mhcgen.request.request", interrupt)
    assert mhcgen("emit") == (130, "", "")


def test_environment_faults_are_4(mhcgen: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: object) -> None:
        raise LaunchError("X-FINDING", "found a race")

    monkeypatch.setattr("mhcgen.request.request", fail)
    assert mhcgen("emit")[0] == 4


def test_a_closed_pipe_is_no_error() -> None:
    for words in (["emit", "--fuse", "pre"], ["explain", "--fuse", "pre"], ["--help"], ["list", "archs"]):
        reading, writing = os.pipe()
        os.close(reading)
        with os.fdopen(writing, "wb") as pipe:
            done = subprocess.run([sys.executable, "-m", "mhcgen", *words], stdout=pipe, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"")


def test_a_refusal_into_a_closed_pipe_is_still_a_refusal() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "wb") as pipe:
        done = subprocess.run(
            [sys.executable, "-m", "mhcgen", "explain", "--fuse", "site"], stdout=pipe, stderr=subprocess.PIPE
        )
    assert done.returncode == 3
    assert done.stderr.startswith(b"error[F-ESCAPE]")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_one_error() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mhcgen", "emit", "--fuse", "pre"], stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 4
    one_error(done.stderr, "E-OUTPUT")


def test_no_stdout_at_all_is_fine() -> None:
    done = subprocess.run(f"{sys.executable} -m mhcgen emit --fuse pre >&-", shell=True, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_name_that_stdout_cannot_encode_is_fine(tmp_path: Path) -> None:
    words = ["emit", "--hidden", "64", "--out", str(tmp_path / "größe\udcff")]
    done = process(*words, env={"PYTHONIOENCODING": "ascii"})
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe\\udcff: kernel.cu" in done.stdout


# ---- the same text, always ----------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "words",
    [
        ["emit", "--streams", "4", "--fuse", "pre"],
        ["emit", "--fuse", "boundary", "--norm", "--quant", "fp8", "--dtype", "bf16"],
        ["explain", "--scope", "trunk", "--graph", "svg"],
    ],
)
def test_the_hash_seed_and_the_place_do_not_show(tmp_path: Path, words: list[str]) -> None:
    found = set()
    for seed in ("0", "1", "20"):
        place = tmp_path / seed
        place.mkdir()
        done = process(*words, env={"PYTHONHASHSEED": seed, "HOME": str(place)}, cwd=place)
        assert done.returncode == 0, done.stderr
        found.add(hashlib.sha256(done.stdout).hexdigest())
    assert len(found) == 1


def test_what_was_emitted_before_does_not_show(mhcgen: Cli) -> None:
    first = ["emit", "--streams", "8", "--fuse", "pre", "--dtype", "bf16"]
    second = ["emit", "--streams", "3", "--fuse", "seed", "--class", "fast"]
    alone = process(*second).stdout.decode()
    mhcgen(*first)
    assert mhcgen(*second)[1] == alone


@pytest.mark.parametrize(
    "words",
    [
        ["--fuse", "pre"],
        ["--model", "glm-5.3-flash", "--streams", "3", "--hidden", "7", "--fuse", "gates+sinkhorn"],
        ["--fuse", "pre-norm-quant", "--quant-pow2", "--threads", "128", "--placement", "row", "--sync", "block"],
        ["--fuse", "boundary", "--rms-eps", "1e-5", "--dtype", "bf16", "--slab", "global"],
        ["--fuse", "rowsq+gates", "--with", "engram", "--with", "tap"],
        ["--scope", "boundary", "--projection", "external", "--fuse", "none", "--arch", "100a"],
        ["--fuse", "pre", "--mix-warp", "shared", "--scalar", "--stamps", "--early-stop", "--iters", "5"],
    ],
)
def test_the_command_in_the_header_makes_the_same_text(mhcgen: Cli, words: list[str]) -> None:
    code, text, err = mhcgen("emit", *words)
    assert (code, err) == (0, "")
    command = re.search(r"^// command:  mhcgen (.*)$", text, re.M)
    assert command is not None
    assert mhcgen(*command[1].split())[1] == text


# ---- emit --out ---------------------------------------------------------------------------------------------
SMALL = ("emit", "--hidden", "64", "--fuse", "pre", "--out")


def test_a_folder_holds_an_emission_and_its_test(mhcgen: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "deep" / "er"
    assert mhcgen(*SMALL, str(folder))[::2] == (0, "")
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    assert (folder / "kernel.cu").read_text() == mhcgen("emit", "--hidden", "64", "--fuse", "pre")[1]
    assert (folder / "unfused.cu").read_text() == mhcgen("emit", "--hidden", "64")[1]
    assert list(folder.parent.iterdir()) == [folder]


def test_a_folder_of_ours_is_overwritten_and_any_other_is_not(mhcgen: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    assert mhcgen(*SMALL, str(folder))[0] == 0
    (folder / "__pycache__").mkdir()
    (folder / "kernel.cu").write_text("edited")
    assert mhcgen(*SMALL, str(folder))[0] == 0
    assert "edited" not in (folder / "kernel.cu").read_text()
    (folder / "mine.txt").write_text("keep me")
    (folder / "kernel.cu").write_text("edited")
    code, out, err = mhcgen(*SMALL, str(folder))
    assert (code, out) == (2, "")
    one_error(err, "I-EXISTS")
    assert "mine.txt" in err
    assert (folder / "kernel.cu").read_text() == "edited"
    assert mhcgen(*SMALL, str(folder), "--force")[0] == 0
    assert "edited" not in (folder / "kernel.cu").read_text()
    assert (folder / "mine.txt").read_text() == "keep me"
    (folder / "mine.txt").unlink()
    (folder / "manifest.json").write_text('{"name": "somebody else"}')
    assert mhcgen(*SMALL, str(folder))[0] == 2


def test_a_file_in_the_way(mhcgen: Cli, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    for force in ([], ["--force"]):
        code, _, err = mhcgen(*SMALL, str(tmp_path / "file"), *force)
        assert code == 2
        one_error(err, "I-EXISTS")
    code, _, err = mhcgen(*SMALL, str(tmp_path / "file" / "below"))
    assert code == 4
    one_error(err, "E-WRITE")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_a_failure_in_mid_write_leaves_no_half(
    mhcgen: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, there: bool
) -> None:
    from mhcgen import files

    folder = tmp_path / "out"
    if there:
        assert mhcgen(*SMALL, str(folder))[0] == 0
    before = {path.name: path.read_bytes() for path in folder.iterdir()} if there else {}
    write, left = files._write, [2]

    def failing(path: Path, text: str) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        write(path, text)

    monkeypatch.setattr(files, "_write", failing)
    code, out, err = mhcgen("emit", "--hidden", "32", "--fuse", "pre", "--out", str(folder))
    assert (code, out) == (4, "")
    one_error(err, "E-WRITE")
    assert {path.name: path.read_bytes() for path in folder.rglob("*")} == before if there else not folder.exists()
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if there else [])
