"""What is in the archives, and whether an installed mhcgen emits the same text elsewhere."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from mhcgen._version import __version__

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


PYTHONS = ("3.11", "3.12", "3.13")


def interpreter(version: str) -> str | None:
    """A Python of that version: this one, one of the PATH, or one of pyenv's."""
    if version == ".".join(map(str, sys.version_info[:2])):
        return sys.executable
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser()
    found = [shutil.which(f"python{version}"), *map(str, sorted(pyenv.glob(f"versions/{version}.*/bin/python")))]
    for path in filter(None, found):
        said = subprocess.run([path, "-c", "import sys, venv; print(sys.version_info[:2])"], capture_output=True)
        if said.returncode == 0 and said.stdout.decode().strip() == str(tuple(map(int, version.split(".")))):
            return path
    return None


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS)
def test_the_wheel_emits_the_same_text_elsewhere(built: Path, tmp_path: Path, version: str) -> None:
    base = interpreter(version)
    if base is None:
        pytest.skip(f"no Python {version} here")
    (wheel,) = built.glob("*.whl")
    subprocess.run([base, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel)]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    away = tmp_path / "away"
    away.mkdir()
    here = emission(sys.executable, away)
    assert emission(python, away, PYTHONPATH="") == here
    script = [str(python.parent / "mhcgen"), "emit", "--streams", "4", "--fuse", "pre", "--out", "out"]
    assert subprocess.run(script, cwd=away, capture_output=True).returncode == 0
    assert (away / "out" / "kernel.cu").read_bytes() == here
    said = subprocess.run([str(python), "-c", FACTS], cwd=away, capture_output=True, text=True)
    assert (said.returncode, said.stdout) == (0, f"{version}\n"), said.stderr
    # What the core dependencies bring must do for all of these.
    for words in (["list"], ["explain", "--graph", "svg"], ["doctor"], ["docs"]):
        run = subprocess.run([str(python.parent / "mhcgen"), *words], cwd=away, capture_output=True, text=True)
        assert run.returncode == 0, (words, run.stdout, run.stderr)


@pytest.mark.slow
def test_the_lowest_versions_do(built: Path, tmp_path: Path) -> None:
    """What `dependencies` promises: with the oldest of each, the same text and the same answers."""
    if sys.version_info >= (3, 13):
        pytest.skip("the oldest numpy has no wheel for this Python")
    (wheel,) = built.glob("*.whl")
    lowest = [re.sub(r">=([\d.]+).*", r"==\1", word) for word in metadata()["project"]["dependencies"]]
    assert all("==" in word for word in lowest)
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), *lowest]
    done = subprocess.run(install, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert emission(python, tmp_path, PYTHONPATH="") == emission(sys.executable, tmp_path)
    for words, code in ((["--help"], 0), (["list", "models"], 0), (["explain"], 0), (["run", "--inputs", "x"], 2)):
        run = subprocess.run([str(python), "-m", "mhcgen", *words], cwd=tmp_path, capture_output=True, text=True)
        assert run.returncode == code, (words, run.stdout, run.stderr)


#: Version and type information of what is installed, and that no part of it needs what an extra brings.
FACTS = """
import importlib.metadata, importlib.resources, sys
import mhcgen, mhcgen.cli, mhcgen.gate
assert mhcgen.__version__ == importlib.metadata.version("mhcgen")
assert importlib.resources.files("mhcgen").joinpath("py.typed").is_file()
assert not {"torch", "cupy", "pygments", "matplotlib"} & set(sys.modules)
print("%d.%d" % sys.version_info[:2])
"""


def test_the_version_stands_in_one_place() -> None:
    data = metadata()
    assert data["project"]["dynamic"] == ["version"]
    assert data["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "mhcgen._version.__version__"}
    places = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if f'"{__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert places == ["_version.py"]


def test_the_declared_pythons_are_the_tested_ones() -> None:
    said = [line.rpartition(" ")[2] for line in metadata()["project"]["classifiers"] if "Python :: 3." in line]
    assert tuple(said) == PYTHONS
