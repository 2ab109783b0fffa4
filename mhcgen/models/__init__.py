"""Named models: their constants, legal stream counts and where the formula comes from."""

from __future__ import annotations

import difflib

from mhcgen.errors import UsageError
from mhcgen.models import deepseek, libraries, papers
from mhcgen.models.family import EXITS, Model

__all__ = ["EXITS", "MODELS", "Model", "model", "register"]

MODELS: dict[str, Model] = {
    made.name: made for made in (*deepseek.MODELS, *libraries.MODELS, *papers.MODELS)
}


def register(made: Model) -> Model:
    """Add a model under its name, so that `mhcgen.build` and tests find it."""
    MODELS[made.name] = made
    return made


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        UsageError: `U-MODEL`, with the nearest known name as a hint.
    """
    if isinstance(name, str) and name in MODELS:
        return MODELS[name]
    near = difflib.get_close_matches(str(name), MODELS, n=1)
    raise UsageError(
        "U-MODEL",
        f"unknown model {name!r}",
        where="--model",
        notes=(f"known models: {', '.join(sorted(MODELS))}",),
        hints=((f"did you mean {near[0]}?",) if near else ("`mhcgen list models` shows them",)),
    )
