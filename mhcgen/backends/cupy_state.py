"""Which CuPy is installed, whether it imports, and whether it fits the driver.

CuPy is imported here and nowhere else, and only when a CUDA backend is asked for.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any

from mhcgen.backends.driver import Driver, load_driver
from mhcgen.errors import EnvironmentFault

# The names under which CuPy is published; each installs the same folder, so two of them overwrite each other.
DISTRIBUTIONS = (
    "cupy",
    "cupy-cuda11x",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "cupy-rocm-4-3",
    "cupy-rocm-5-0",
    "cupy-rocm-7-0",
)


def installed() -> tuple[tuple[str, str], ...]:
    """(name, version) of every installed distribution of CuPy; more than one is a fault."""
    found = []
    for name in DISTRIBUTIONS:
        try:
            found.append((name, importlib.metadata.version(name)))
        except importlib.metadata.PackageNotFoundError:
            continue
    return tuple(found)


def install_hint(driver_major: int | None = None) -> str:
    """The command that installs the CuPy for a driver of that CUDA version; of this machine's if None."""
    if driver_major is None:
        try:
            driver_major = load_driver().version // 1000
        except EnvironmentFault:
            driver_major = 13
    return f"pip install 'mhcgen[cuda{max(12, min(driver_major, 13))}]'"


def import_cupy() -> Any:
    """The module `cupy`, imported but not used yet: no context is made and no GPU is needed.

    Raises:
        EnvironmentFault: `E-NO-CUPY`, not installed; `E-TWO-CUPY`, installed twice; `E-CUPY-BROKEN`, its
            import fails with whatever exception.
    """
    packages = installed()
    if len(packages) > 1:
        names = [name for name, _ in packages]
        raise EnvironmentFault(
            "E-TWO-CUPY",
            "CuPy is installed "
            + ("twice" if len(names) == 2 else f"{len(names)} times")
            + ", and the installations overwrite each other.",
            notes=tuple(f"{name} {version}" for name, version in packages),
            hints=(f"pip uninstall --yes {' '.join(names)} && {install_hint()}",),
        )
    if sys.modules.get("cupy") is None and not packages and importlib.util.find_spec("cupy") is None:
        raise EnvironmentFault(
            "E-NO-CUPY",
            "CuPy is not installed.",
            notes=("the extra must be of the driver's CUDA version: cuda12 or cuda13",),
            hints=(install_hint(),),
        )
    try:
        return importlib.import_module("cupy")
    except Exception as error:  # a broken CuPy raises anything, and must not take mhcgen along
        raise EnvironmentFault(
            "E-CUPY-BROKEN",
            f"CuPy is installed but cannot be imported: {type(error).__name__}.",
            notes=tuple(line for line in str(error).splitlines() if line.strip(" ="))[:12],
            hints=(f"pip uninstall --yes {packages[0][0] if packages else 'cupy'} && {install_hint()}",),
        ) from error


def require_gpu() -> tuple[Any, Driver]:
    """`(cupy, driver)` of a machine that can run kernels.

    Starts the driver but makes no context. A process that forks must fork before this.

    Raises:
        EnvironmentFault: what `import_cupy` raises; `E-NO-GPU`; `E-CUDA-MAJOR`, CuPy was built for a newer
            major version of CUDA than the driver supports.
    """
    cupy = import_cupy()
    driver = load_driver()
    built_for = _runtime_version(cupy)
    if built_for // 1000 > driver.version // 1000:
        packages = installed()
        raise EnvironmentFault(
            "E-CUDA-MAJOR",
            f"CuPy needs CUDA {built_for // 1000}, but the driver supports CUDA {driver.version // 1000}.",
            notes=tuple(f"{name} {version}" for name, version in packages),
            hints=(
                f"pip uninstall --yes {packages[0][0] if packages else 'cupy'} && "
                f"{install_hint(driver.version // 1000)}",
            ),
        )
    if driver.device_count == 0:
        raise EnvironmentFault("E-NO-GPU", "no CUDA device is visible.")
    return cupy, driver


def _runtime_version(cupy: Any) -> int:
    try:
        return int(cupy.cuda.runtime.runtimeGetVersion())
    except Exception:  # noqa: BLE001  (its own error class needs a working CuPy to be named)
        return 0
