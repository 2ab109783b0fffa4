"""Schedules that `mhcgen tune` found, kept in the cache directory and used where `tuned` is asked for.

An entry belongs to one GPU, one version of mhcgen, one configuration and one schedule as it was asked for (arch,
fusion and regime among it). What is in the cache is never trusted: bytes that do not match their name, values that
are no options, and schedules that the passes refuse are as if they were not there. A schedule changes no bit of a
result, so an entry can cost time but never correctness.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from mhcgen import cache
from mhcgen._version import __version__
from mhcgen.errors import EnvironmentFault, RefusedError, UsageError
from mhcgen.ir import Program
from mhcgen.log import Decision
from mhcgen.plan import MIX_WARPS, PLACEMENTS, SLABS, Options, Plan

FORMAT = "mhcgen-tuned-1"
SUFFIX = ".tuned"

#: Fields of Options that are searched; all others are part of what was asked for.
AXES = ("cluster", "slab", "threads", "mix_warp", "placement")
_CHOICES = {"slab": SLABS, "mix_warp": MIX_WARPS, "placement": PLACEMENTS}
#: Fields that do not say what is wanted: an instrument, and the twin that a module makes by itself.
_ASIDE = ("stamps", "scalar")


@dataclass(frozen=True)
class Tuned:
    """A schedule that was found to be the fastest.

    Args:
        gpu: name of the GPU it was found on.
        changes: values of `AXES` by name.
        tokens: token counts it was timed at.
        us: its times there, microseconds.
        default_us: times of the schedule as asked for, microseconds.
        date: when, YYYY-MM-DD.
    """

    gpu: str
    changes: dict[str, Any]
    tokens: tuple[int, ...]
    us: tuple[float, ...]
    default_us: tuple[float, ...]
    date: str

    def __str__(self) -> str:
        chosen = ", ".join(f"{name} {value}" for name, value in self.changes.items())
        return chosen or "the schedule as asked for"

    @property
    def because(self) -> str:
        """Where it comes from, in one sentence."""
        pairs = zip(self.tokens, self.us, self.default_us, strict=True)
        times = ", ".join(f"T = {t}: {us:.2f} us against {default:.2f}" for t, us, default in pairs)
        return f"measured on {self.gpu} on {self.date}: {times} of the schedule as asked for"


def key_of(gpu: str, program: Program, options: Options) -> str:
    """Cache key of a GPU, a configuration and a schedule as asked for."""
    from mhcgen.text import print_program

    asked = {name: value for name, value in asdict(options).items() if name not in _ASIDE}
    return cache.key_of(FORMAT, __version__, gpu, print_program(program), json.dumps(asked, sort_keys=True))


def store(program: Program, options: Options, tuned: Tuned) -> Path:
    """Keep a schedule in place of what was kept for the same request; returns its file.

    Raises:
        EnvironmentFault: `E-CACHE`.
    """
    text = json.dumps({"format": FORMAT, **asdict(tuned)}, sort_keys=True)
    path = cache.store(key_of(tuned.gpu, program, options), SUFFIX, text.encode())
    for other in path.parent.glob(f"*{SUFFIX}"):
        if other != path:
            with contextlib.suppress(OSError):
                other.unlink()
    return path


def find(gpu: str, program: Program, options: Options) -> Tuned | None:
    """The schedule kept for a request; None where there is none that can be believed."""
    path = cache.load(key_of(gpu, program, options), SUFFIX)
    if path is None:
        return None
    try:
        found = json.loads(path.read_bytes())
        if found.pop("format") != FORMAT or found["gpu"] != gpu:
            return None
        for name in ("tokens", "us", "default_us"):
            found[name] = tuple(found[name])
        tuned = Tuned(**found)
        believable = all(_is_value(name, value) for name, value in tuned.changes.items())
        return tuned if believable and tuned.because else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _is_value(axis: str, value: object) -> bool:
    if axis in _CHOICES:
        return value in _CHOICES[axis]
    if axis not in AXES:
        return False
    return value is None or (isinstance(value, int) and not isinstance(value, bool))


def current_gpu() -> str:
    """Name of the current CUDA device; empty where there is none."""
    from mhcgen.backends.cupy_state import require_gpu

    try:
        cupy, driver = require_gpu()
        return str(driver.device_name(int(cupy.cuda.runtime.getDevice())))
    except EnvironmentFault:
        return ""


def resolve(program: Program, options: Options, gpu: str | None = None) -> tuple[Options, Decision]:
    """The schedule to use for a request, and where it comes from.

    Args:
        program: the unfused Program.
        options: the schedule as asked for.
        gpu: name of the GPU to run on; the current one's if None.
    """
    from mhcgen.passes import run_pipeline

    def as_asked(why: str) -> tuple[Options, Decision]:
        return options, Decision("tune", "schedule", "as asked for", why)

    gpu = current_gpu() if gpu is None else gpu
    if not gpu:
        return as_asked("no GPU can be used here, so none has been tuned for")
    tuned = find(gpu, program, options)
    if tuned is None:
        return as_asked(f"nothing was tuned for this configuration in class {options.regime} on {gpu}")
    chosen = replace(options, **tuned.changes)
    try:
        run_pipeline(program, chosen)
    except (RefusedError, UsageError) as error:
        return as_asked(f"the tuned schedule ({tuned}) is not legal: {error.message}")
    return chosen, Decision("tune", "schedule", str(tuned), tuned.because)


def run_tuned(
    program: Program, options: Options, *, stop_after: str | None = None, gpu: str | None = None
) -> Plan:
    """The Plan of the tuned schedule, or of the one asked for where there is none; its log says which.

    Raises:
        RefusedError, UsageError: what was asked for is not legal.
    """
    from mhcgen.passes import run_pipeline

    chosen, decision = resolve(program, options, gpu)
    plan = run_pipeline(program, chosen, stop_after=stop_after)
    return replace(plan, log=(decision, *plan.log))
