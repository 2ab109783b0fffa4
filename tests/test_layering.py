"""Imports point one way, the reference imports nothing of ours, and an import of mhcgen stays light.

```
errors, arithmetic, log <- ir <- plan, hazards, combs <- verify, functions, steps, passes <- lower <- emit
                                                    <- runtime, backends <- gate <- commands, cli
```
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mhcgen

PACKAGE = Path(mhcgen.__file__).parent

#: From the bottom up. A module may import what is in a layer below its own, or in its own.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors", "log"),
    ("arithmetic", "cache", "values"),
    ("ir", "backends.archs", "backends.signature"),
    ("stages", "text", "reference", "reference_combs", "reference_each"),
    ("combs", "plan"),
    ("hazards", "functions", "models", "formulas", "inputs", "aim"),
    ("verify",),
    ("steps", "passes", "verify_plan", "chain", "trunk", "build", "topology", "graph"),
    ("lower",),
    ("emit",),
    ("error_model", "error_combs", "bounds"),
    ("backends", "runtime", "runners", "module"),
    ("gate",),
    ("commands", "cli", "__main__"),
)
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def layer_of(module: str) -> str | None:
    """The longest listed prefix of a module's name; None for modules that have no place in the order."""
    parts = module.split(".")
    names = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
    return next((name for name in names if name in RANK), None)


def imports(path: Path) -> Iterator[tuple[str, int]]:
    """(module of this package, line) of imports that run when a module is imported, type checking apart."""

    def visit(body: list[ast.stmt]) -> Iterator[tuple[str, int]]:
        for node in body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "mhcgen":
                inner = (node.module or "").removeprefix("mhcgen").lstrip(".")
                for alias in node.names:
                    submodule = PACKAGE / inner.replace(".", "/") / f"{alias.name}.py"
                    yield (f"{inner}.{alias.name}".lstrip(".") if submodule.exists() else inner), node.lineno
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.startswith("mhcgen."):
                        yield alias.name.removeprefix("mhcgen."), node.lineno
            elif isinstance(node, ast.If) and "TYPE_CHECKING" not in ast.dump(node.test):
                yield from visit(node.body)
                yield from visit(node.orelse)
            elif isinstance(node, ast.Try):
                yield from visit(node.body)

    yield from visit(ast.parse(path.read_text()).body)


def modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = path
    return found


def test_imports_point_one_way() -> None:
    wrong = []
    for module, path in modules().items():
        own = layer_of(module)
        for imported, line in imports(path):
            other = layer_of(imported)
            if own is not None and other is not None and RANK[other] > RANK[own]:
                wrong.append(f"{module}:{line} ({own}) imports {imported} ({other})")
    assert wrong == []


def test_the_layers_name_modules_that_exist() -> None:
    known = set(modules())
    assert [name for name in RANK if name not in known and name not in ("models", "combs")] == []


@pytest.mark.parametrize("module", ["reference", "reference_combs", "reference_each"])
def test_the_reference_imports_numpy_alone(module: str) -> None:
    tree = ast.parse((PACKAGE / f"{module}.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module or "")
    allowed = {"__future__", "collections.abc", "typing", "itertools", "math", "numpy", "numpy.typing", "ml_dtypes"}
    assert found <= allowed | {"mhcgen.reference_combs", "mhcgen.reference_each"}


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("mhcgen", ("cupy", "torch", "typer", "rich", "matplotlib", "hypothesis")),
        ("mhcgen.cli", ("cupy", "torch", "matplotlib", "networkx", "jinja2", "mhcgen.gate", "mhcgen.backends.host")),
    ],
)
def test_importing_stays_light(module: str, heavy: tuple[str, ...]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent)}
    code = f"import sys, {module}; print(*sorted(sys.modules))"
    ran = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert sorted(set(heavy) & set(ran.stdout.split())) == []


def test_passes_read_no_environment_and_write_nothing() -> None:
    forbidden = {"os", "sys", "pathlib", "subprocess", "random", "time", "datetime", "socket", "logging"}
    wrong = []
    for module, path in modules().items():
        if module.split(".")[0] in ("passes", "steps", "ir", "plan", "hazards", "verify", "lower", "emit", "combs"):
            for node in ast.walk(ast.parse(path.read_text())):
                names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                wrong += [f"{module} imports {name}" for name in names if name.split(".")[0] in forbidden]
                if (
                    isinstance(node, ast.Call)
                    and isinstance(node.func, ast.Name)
                    and node.func.id in ("open", "print")
                ):
                    wrong.append(f"{module} calls {node.func.id}")
    assert wrong == []
