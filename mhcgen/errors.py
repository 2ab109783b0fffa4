"""The errors a user can meet, each with a stable code, a place, and what to do.

Whose fault each class usually is, and the exit code of `mhcgen` for it:

- `UsageError`        the caller's: an option, a name, a value (2)
- `InputError`        the caller's: an array, a file, a tensor (2)
- `ProgramError`      the builder's of a Program: the verifier found violations (2)
- `RefusedError`      nobody's: a legal question with the answer no (3)
- `CheckFailed`       the emission's or the schedule's: a gate found a difference (1)
- `EnvironmentFault`  the machine's: no compiler, no GPU, a missing package (4)
- `CompileError`      ours or the compiler's: emitted text does not compile (4)
- `LaunchError`       the launch's: the executor or the driver refused or reported (4)
- `TemplateError`     ours: a template and its plan disagree (70)
- `InternalError`     ours: anything else that should not happen (70)
"""

from __future__ import annotations

import sys
from collections.abc import Callable

EXIT_OK = 0
EXIT_DIFFERS = 1
EXIT_USAGE = 2
EXIT_REFUSED = 3
EXIT_ENVIRONMENT = 4
EXIT_INTERNAL = 70


class MhcgenError(Exception):
    """Base of every error of this package.

    Args:
        code: stable identifier such as `U-STREAMS`; tests and scripts may rely on it.
        message: one sentence that says what is wrong.
        where: the option, tensor, file, stage or kernel it is about; empty where there is none.
        notes: facts that help to understand it.
        hints: actions that mend it.
    """

    exit_code: int = EXIT_INTERNAL

    def __init__(
        self,
        code: str,
        message: str,
        *,
        where: str = "",
        notes: tuple[str, ...] = (),
        hints: tuple[str, ...] = (),
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.where = where
        self.notes = notes
        self.hints = hints

    def __str__(self) -> str:
        return render(self)


class UsageError(MhcgenError, ValueError):
    """An option or argument has a value that means nothing here."""

    exit_code = EXIT_USAGE


class InputError(MhcgenError, ValueError):
    """A tensor or file given by the caller is missing or malformed."""

    exit_code = EXIT_USAGE


class InputTypeError(InputError, TypeError):
    """A tensor has a dtype or array type that is never converted silently."""


class ProgramError(MhcgenError, ValueError):
    """A Program breaks rules of the verifier; `notes` lists every violation."""

    exit_code = EXIT_USAGE


class RefusedError(MhcgenError):
    """What was asked for by name is not legal; carries the path that proves it in `notes`."""

    exit_code = EXIT_REFUSED
    #: the `mhcgen.log.Refusal` behind it, set by the pass that refused
    refusal: object = None


class CheckFailed(MhcgenError):
    """A gate found a difference."""

    exit_code = EXIT_DIFFERS


class EnvironmentFault(MhcgenError, RuntimeError):
    """This machine lacks something: a compiler, a GPU, a package."""

    exit_code = EXIT_ENVIRONMENT


class CompileError(MhcgenError, RuntimeError):
    """A compiler rejected emitted text; `notes` carries its log, `where` the path of the text."""

    exit_code = EXIT_ENVIRONMENT


class LaunchError(MhcgenError, RuntimeError):
    """A launch failed or the executor reported a finding that was not asked for."""

    exit_code = EXIT_ENVIRONMENT


class TemplateError(MhcgenError, RuntimeError):
    """A template and its plan disagree."""


class InternalError(MhcgenError, RuntimeError):
    """A bug of mhcgen."""


def render(error: MhcgenError) -> str:
    """The one textual form of an error: headline, where, notes, hints."""
    lines = [f"error[{error.code}]: {error.message}"]
    if error.where:
        lines.append(f"  where: {error.where}")
    lines += [f"  note: {note}" for note in error.notes]
    lines += [f"  hint: {hint}" for hint in error.hints]
    return "\n".join(lines)


def exit_code(call: Callable[[], None]) -> int:
    """Make a call of a module that is run by itself: 0, or an error's exit code after its one form on stderr."""
    try:
        call()
    except MhcgenError as error:
        print(render(error), file=sys.stderr)
        return error.exit_code
    return EXIT_OK
