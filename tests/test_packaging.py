"""What is in the archives, and whether an installed mhcgen emits the same text elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mhcgen"


def wanted() -> set[str]:
    """Every file of the package, as archives name it."""
    return {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


def metadata() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_every_file_of_the_package_is_declared() -> None:
    """Each folder with modules is a package, and each other file matches a pattern of package-data."""
    data = metadata()["tool"]["setuptools"]["package-data"]
    covered: set[Path] = set()
    for package, patterns in data.items():
        folder = ROOT / package.replace(".", "/")
        assert (folder / "__init__.py").is_file(), package
        for pattern in patterns:
            found = set(folder.glob(pattern))
            assert found, (package, pattern)
            covered |= found
    for name in sorted(wanted()):
        path = ROOT / name
        if path.suffix == ".py":
            assert (path.parent / "__init__.py").is_file(), f"{name} is in no package"
        else:
            assert path in covered, f"{name} is in no package-data"


def test_the_entry_point_and_the_extras_are_those_of_the_readme() -> None:
    project = metadata()["project"]
    assert project["scripts"] == {"mhcgen": "mhcgen.cli:main"}
    readme = (ROOT / "README.md").read_text()
    for extra in ("cuda12", "cuda13", "nvrtc", "zig"):
        assert extra in project["optional-dependencies"]
        assert f"`{extra}`" in readme
    assert (ROOT / project["license-files"][0]).is_file()


def test_the_scripts_of_the_checkout_run() -> None:
    for words in (["cli.py"], ["-m", "mhcgen"]):
        done = subprocess.run([sys.executable, *words, "--version"], cwd=ROOT, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("mhcgen ")


def emission(python: Path | str, folder: Path, **env: str) -> bytes:
    """What `python -m mhcgen` emits, far from the checkout."""
    words = [str(python), "-m", "mhcgen", "emit", "--streams", "4", "--fuse", "pre"]
    done = subprocess.run(words, cwd=folder, capture_output=True, env={**os.environ, **env})
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


def test_it_emits_from_a_zip(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mhcgen.zip", "w") as archive:
        for name in sorted(wanted()):
            archive.write(ROOT / name, name)
    zipped = emission(sys.executable, tmp_path, PYTHONPATH=str(tmp_path / "mhcgen.zip"))
    assert zipped == emission(sys.executable, tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built from it."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_both_archives_hold_every_file(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    (sdist,) = built.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    assert {name for name in names if name.startswith("mhcgen/")} == wanted()
    assert any(name.endswith("LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert wanted() <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "cli.py"} <= names


@pytest.mark.slow
def test_the_wheel_emits_the_same_text_elsewhere(built: Path, tmp_path: Path) -> None:
    (wheel,) = built.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (tmp_path / "away").mkdir()
    here = emission(sys.executable, tmp_path / "away")
    assert emission(python, tmp_path / "away", PYTHONPATH="") == here
    script = [str(python.parent / "mhcgen"), "emit", "--streams", "4", "--fuse", "pre", "--out", "out"]
    assert subprocess.run(script, cwd=tmp_path / "away", capture_output=True).returncode == 0
    assert (tmp_path / "away" / "out" / "kernel.cu").read_bytes() == here
