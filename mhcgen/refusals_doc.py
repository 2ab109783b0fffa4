"""Writes docs/refusals.md from the catalogue of refusal codes.

The smallest example of a code is the first of its entry in tests/catalogue.py that a command line can ask for, else
the first; it is run, and shown with what it gets. An installed mhcgen has no tests, and shows no examples.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mhcgen.errors import InternalError, RefusedError
from mhcgen.log import CATALOGUE
from mhcgen.lower import command_of
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options, Plan
from mhcgen.text import print_program

#: First letter of a code to the pass that refuses.
PASSES = {
    "F": "fuse: stages to kernels",
    "P": "place: tensors to homes",
    "L": "launch: threads, shared memory",
    "S": "sync: barriers",
}

_HEAD = """\
# Refusals

Written by `mhcgen docs --write` from `mhcgen/log.py` and `tests/catalogue.py`; do not edit.

A refusal is the answer no to a legal question. It carries one of these codes, where a path proves it that path as
a witness, and a hint. Asked for by name on the command line it ends every verb with exit code 3; in Python it is
raised as `mhcgen.RefusedError`. It is shown here as logs and `explain` have it; the error that ends a command has the
same code, reason, path and hint in the form of all errors.
"""


def refusals_text(examples: Mapping[str, str]) -> str:
    """The document.

    Args:
        examples: code to what asks for it and what it gets; codes without one show none.
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
    """Code to example of a checkout's tests/catalogue.py, empty without that file.

    Raises:
        InternalError: `D-EXAMPLE`, an example is not refused with the code it stands for.
    """
    folder = checkout.absolute() / "tests"
    if not (folder / "catalogue.py").is_file():
        return {}
    sys.path.insert(0, str(folder))
    try:
        catalogue = importlib.import_module("catalogue")
    finally:
        sys.path.remove(str(folder))
    return {code: _shown(code, examples) for code, examples in catalogue.EXAMPLES.items() if examples}


def _shown(code: str, examples: Sequence[Any]) -> str:
    """What asks for a refusal, and the refusal."""
    made = [(example.program(), Options(**example.options)) for example in examples]
    program, options = next(((p, o) for p, o in made if p.origin), made[0])
    try:
        run_pipeline(program, options)
    except RefusedError as error:
        if error.code == code:
            if program.origin:
                return f"$ {command_of(Plan(program, options))}\n{error.refusal}"
            asked = ", ".join(f"{key}={value!r}" for key, value in examples[0].options.items())
            sizes = ", ".join(f"{dim} = {size}" for dim, size in program.dims if dim in ("n", "H"))
            stages = [line for line in print_program(program).splitlines() if " <- " in line]
            head = f"a Program of one's own, {sizes}, with the stages"
            return "\n".join([head, *stages, f">>> mhcgen.compile(program, {asked})", str(error.refusal)])
    raise InternalError("D-EXAMPLE", f"the example of {code} is not refused with it", where="tests/catalogue.py")
