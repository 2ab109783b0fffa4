"""What the scripts of this folder share: a GPU, or one line that says why there is none."""

from __future__ import annotations

import sys
from typing import Any

from mhcgen.backends.cupy_state import require_gpu
from mhcgen.errors import EnvironmentFault


def need_gpu() -> Any:
    """CuPy, on a machine where kernels can run; elsewhere the script ends with exit code 4."""
    try:
        return require_gpu()[0]
    except EnvironmentFault as fault:
        print(fault, file=sys.stderr)
        sys.exit(fault.exit_code)
