"""Imported before anything that imports torch, so that its absence is one clear error."""

from __future__ import annotations

import importlib.util

from mhcgen.errors import EnvironmentFault


class TorchMissing(EnvironmentFault, ImportError):
    """`E-NO-TORCH`: PyTorch is not installed. Also an ImportError, for code that asks by trying."""


if importlib.util.find_spec("torch") is None:
    raise TorchMissing(
        "E-NO-TORCH",
        "PyTorch is not installed.",
        hints=("pip install 'mhcgen[torch]'",),
    )
