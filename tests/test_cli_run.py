"""run: a user's arrays in, results out."""

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

from mhcgen.build import build
from mhcgen.errors import EnvironmentFault
from mhcgen.files import write_file
from mhcgen.inputs import make_inputs

Cli = Callable[..., tuple[int, str, str]]


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
    loop, broken = tmp_path / "loop.npz", tmp_path / "broken.npz"
    loop.symlink_to("loop.npz")
    broken.symlink_to("nowhere/x.npz")
    for path, wrong in ((loop, "it is no regular file"), (broken, "its folder does not exist")):
        code, _, err = mhcgen(*RUN, "--inputs", source, "--outputs", path, "--force")
        assert (code, path.is_symlink()) == (2, True) and err.startswith(f"error[U-OUTPUT]: {wrong}")
    write_file(tmp_path / ("a" * 250), "a name may be as long as the system takes")


def test_run_keeps_time_stamps(mhcgen: Cli, tmp_path: Path, given: dict[str, Any]) -> None:
    target = tmp_path / "out.npz"
    assert mhcgen(*RUN, "--stamps", "--inputs", save(tmp_path, given), "--outputs", target)[0] == 0
    found = np.load(target)
    (name,) = (name for name in found if name.startswith("stamps."))
    assert found[name].dtype == np.int64 and found[name].shape[::2] == (len(given["x"]), 2)


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
