"""Writes docs/refusals.md from the catalogue of refusal codes.

The smallest example of a code is a command line of the table `COMMANDS` in tests/catalogue.py, where the checkout has
that file.
"""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path

from mhcgen.log import CATALOGUE

#: First letter of a code to the pass that refuses.
PASSES = {
    "F": "fuse: stages to kernels",
    "P": "place: tensors to homes",
    "L": "launch: threads, shared memory",
    "S": "sync: barriers",
}

_HEAD = """\
# Refusals

Written by `mhcgen docs --write` from `mhcgen/log.py`; do not edit.

A refusal is the answer no to a legal question. It carries one of these codes, where a path proves it that path as
a witness, and a hint. Asked for by name on the command line it ends every verb with exit code 3; in Python it is
raised as `mhcgen.RefusedError`.
"""


def refusals_text(examples: Mapping[str, str]) -> str:
    """The document.

    Args:
        examples: code to the smallest command that is refused with it; codes without one show none.
    """
    parts = [_HEAD]
    for letter in dict.fromkeys(code[0] for code in CATALOGUE):
        parts.append(f"\n## {PASSES.get(letter, letter)}\n")
        for code, entry in CATALOGUE.items():
            if code[0] != letter:
                continue
            parts.append(f"\n### {code}\n\n{entry.meaning}\n\nWhat to do: {entry.advice}\n")
            if code in examples:
                parts.append(f"\n```\n{examples[code]}\n```\n")
    return "".join(parts)


def examples_of(checkout: Path) -> dict[str, str]:
    """Code to command of a checkout's tests/catalogue.py, empty without that file or its table."""
    file = checkout / "tests" / "catalogue.py"
    if not file.is_file():
        return {}
    found = runpy.run_path(str(file)).get("COMMANDS", {})
    return {str(code): str(command) for code, command in dict(found).items()}
