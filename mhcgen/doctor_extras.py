"""What the extras of the package bring, and whether they are there: read from metadata, nothing is imported."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path

#: extra -> what it is good for. Those of CUDA have checks of their own.
USES = {
    "zig": "a C++ compiler where the system has none",
    "safetensors": "`mhcgen run` reads .safetensors",
    "torch": "mhcgen.torch: operators, modules, training",
    "plot": "`mhcgen bench --plot`",
    "report": "`mhcgen report`",
    "docs": "`make docs-site`",
    "test": "the tests of a checkout",
}
CUDA_EXTRAS = ("cuda12", "cuda13", "nvrtc")

#: Where the metadata is not at hand (a checkout that is not installed) or older than the checkout.
_ALONE = {
    "zig": "ziglang", "safetensors": "safetensors", "torch": "torch", "plot": "matplotlib", "report": "pygments",
    "docs": "mkdocs", "test": "pytest",
}
_REQUIREMENT = re.compile(r"""\s*([\w.-]+)\s*([^;]*);\s*.*\bextra\s*==\s*["']([\w.-]+)["']""")


@dataclass(frozen=True)
class Need:
    """One package that an extra brings; `oldest` is its lowest version, empty where any will do."""

    package: str
    oldest: str = ""

    @property
    def found(self) -> str:
        """Its version, `unknown version` where only a module is there, empty where nothing is."""
        module = self.package.replace("-", "_")
        try:
            version = importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:
            return "unknown version" if importlib.util.find_spec(module) is not None else ""
        # What pip knows of may be gone: a module that is looked for and not found is missing.
        by_name = module in _ALONE.values()
        return version if not by_name or importlib.util.find_spec(module) is not None else ""

    @property
    def too_old(self) -> bool:
        """It is there in a version below the lowest."""
        found = self.found
        return bool(self.oldest and found[:1].isdigit() and _numbers(found) < _numbers(self.oldest))


def extras() -> dict[str, tuple[Need, ...]]:
    """What each extra brings, by its name, in the order of the metadata."""
    needs: dict[str, list[Need]] = {}
    try:
        lines = importlib.metadata.requires("mhcgen") or []
    except importlib.metadata.PackageNotFoundError:
        lines = []
    for line in lines:
        if match := _REQUIREMENT.match(line):
            oldest = re.search(r">=\s*([\d.]+)", match[2])
            needs.setdefault(match[3], []).append(Need(match[1], oldest[1] if oldest else ""))
    for name, package in _ALONE.items():
        needs.setdefault(name, [Need(package)])
    return {name: tuple(packages) for name, packages in needs.items()}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def torch_cuda() -> str:
    """The CUDA version that the installed PyTorch was built for, read from its files; empty where it has none."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return ""
    for folder in spec.submodule_search_locations:
        path = Path(folder) / "version.py"
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([\d.]+)['\"]", text, re.MULTILINE)
            return match[1] if match else ""
    return ""
