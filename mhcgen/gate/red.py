"""Red arms: faults planted on purpose, each of which a named check must catch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhcgen.gate.report import RedRow
from mhcgen.ir import Program

if TYPE_CHECKING:
    from mhcgen.gate.run import Ran, Session


@dataclass(frozen=True)
class RedArm:
    """A fault.

    Args:
        name: stable name.
        what: one line for people.
        applies: why it does not apply to a Program; empty where it does.
        check: the check that must catch it in an arm.
    """

    name: str
    what: str
    applies: Callable[[Program], str]
    check: str


RED: dict[str, RedArm] = {}


def run_red(session: Session, runs: Sequence[Ran]) -> tuple[tuple[RedRow, ...], tuple[tuple[str, str], ...]]:
    """Plant the faults of a request; rows, and the faults that do not apply with the reason."""
    return (), ()
