"""Markers, Hypothesis profiles, and what is skipped where.

Default runs are short: tests marked `slow` are left out and property tests draw few examples. `pytest --slow`
runs both in full. Under CI (the environment variable `CI`) examples are derandomized, so that a red run is red
again on the next try.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings

_COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.filter_too_much]}
settings.register_profile("default", max_examples=15, **_COMMON)
settings.register_profile("ci", max_examples=15, derandomize=True, **_COMMON)
settings.register_profile("slow", max_examples=400, **_COMMON)


@pytest.fixture
def mhcgen(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Runs one command line in this process: exit code, stdout, stderr."""
    from mhcgen import cli

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = cli.run([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run slow tests, and property tests with many examples")


def pytest_configure(config: pytest.Config) -> None:
    ci = "ci" if os.environ.get("CI") else "default"
    settings.load_profile("slow" if config.getoption("--slow") else ci)


def _gpu() -> str:
    from mhcgen.backends import cuda

    usable, reason = cuda.is_available()
    return "" if usable else f"no usable CUDA device: {reason}"


def _nvrtc() -> str:
    from mhcgen.backends.nvrtc import find_nvrtc
    from mhcgen.errors import EnvironmentFault

    try:
        find_nvrtc()
    except EnvironmentFault as fault:
        return f"no NVRTC: {fault.message}"
    return ""


#: marker -> why its tests cannot run here, empty where they can; asked only if such a test was collected
_NEEDS: dict[str, Callable[[], str]] = {"gpu": _gpu, "sanitizer": _gpu, "nvrtc": _nvrtc}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons: dict[str, str] = {} if config.getoption("--slow") else {"slow": "slow: run with --slow"}
    for item in items:
        for marker in ("slow", *_NEEDS):
            if item.get_closest_marker(marker) is None:
                continue
            if marker not in reasons:
                reasons[marker] = _NEEDS[marker]() if marker in _NEEDS else ""
            if reasons[marker]:
                item.add_marker(pytest.mark.skip(reason=reasons[marker]))
