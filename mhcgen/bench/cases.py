"""The named cases of the tables: what is measured, by the words people use for it."""

from __future__ import annotations

from typing import Any

from mhcgen.bench.measure import Case
from mhcgen.build import build
from mhcgen.plan import Options

#: what -> (fields of a Config, schedule). `finish` has its mixes given; `pre` projects them.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "finish": ({}, {"fuse": "pre"}),
    "finish+norm+quant": ({"norm": True, "quant": "q8"}, {"fuse": "pre-norm-quant"}),
    "pre": ({"projection": "fma"}, {"fuse": "pre"}),
    "pre+norm+quant": ({"projection": "fma", "norm": True, "quant": "q8"}, {"fuse": "pre-norm-quant"}),
    "boundary": ({"projection": "fma", "scope": "boundary", "norm": True}, {"fuse": "boundary"}),
    "post": ({"scope": "post"}, {"fuse": "none"}),
}


def case(what: str, schedule: dict[str, Any] | None = None, note: str = "", **config: Any) -> Case:
    """A case by name.

    Args:
        what: a key of `CASES`.
        schedule: fields of Options beside or instead of the case's own.
        note: see `Case`.
        config: fields of a Config beside the case's own: dtype, hidden, functions, ...
    """
    own, options = CASES[what]
    return Case(what, build(**{**own, **config}), Options(**{**options, **(schedule or {})}), note)
