"""Turns a Refusal into the error of a request made by name."""

from __future__ import annotations

from mhcgen.errors import RefusedError
from mhcgen.log import CATALOGUE, Refusal, Witness


def refuse(
    step: str, code: str, subject: str, because: str, hint: str, witness: Witness | None = None
) -> RefusedError:
    """A RefusedError that carries the Refusal as `refusal`; codes are those of the catalogue."""
    assert code in CATALOGUE, code
    refusal = Refusal(step, code, subject, because, witness, hint)
    notes = (f"path: {witness}",) if witness is not None else ()
    error = RefusedError(code, f"{subject}: {because}", where=f"pass {step}", notes=notes, hints=(hint,))
    error.refusal = refusal
    return error
