"""What a figure is worth without: which GPU, driver, date, commit and command it came from."""

from __future__ import annotations

import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

from mhcgen._version import __version__
from mhcgen.bench.device import Device
from mhcgen.bench.floor import Floor

FORMAT = "mhcgen-bench-1"


def commit() -> str:
    """The commit of the checkout this mhcgen runs from, with `+` if files differ from it; `unknown` without one."""
    root = Path(__file__).parent.parent.parent
    try:
        found = _git(root, "rev-parse", "--short=12", "HEAD")
        changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return found + ("+" if changed else "")


def _git(root: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, timeout=20, check=True)
    return done.stdout.strip()


def command() -> str:
    """The command line of this process; folders are left out, since they say nothing about a figure."""
    return " ".join(re.sub(r"(^|=)[/~]\S*/", r"\1", word) for word in sys.argv)


def facts(device: Device, floor: Floor | None = None) -> dict[str, object]:
    """The head of every JSON file of figures."""
    found: dict[str, object] = {
        "format": FORMAT,
        "mhcgen": __version__,
        "commit": commit(),
        "command": command(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "dry": device.dry,
        **device.describe(),
    }
    if floor is not None:
        found |= {"copy_TB_s": round(floor.terabytes_per_second, 3), "null_us": round(floor.null_us, 3)}
    return found
