"""What a gate is asked for, and the checks of that wish."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, field, replace

from mhcgen.build import Config
from mhcgen.errors import UsageError
from mhcgen.inputs import DISCRIMINATING
from mhcgen.plan import Options

BACKENDS = ("auto", "host", "cuda")

#: Tokens of a run on discriminating inputs: enough for a first, a middle and a last row.
SMALL_TOKENS = 3


@dataclass(frozen=True)
class Request:
    """One run of the gate.

    Args:
        config: a checked Config, as `mhcgen.configure` makes it.
        options: the schedule asked for; it becomes the arm `asked`, and its fusion that of the named arms.
        tokens: token counts of the uniform inputs; 0 is legal.
        backend: `auto` (cuda where it is usable), `host` or `cuda`.
        race: run on the executor's race mode (host only).
        arms: empty for `unfused` and `asked`, `all`, or a comma list of names and patterns (`v3.*`).
        red: names of red arms, or `all`: faults planted one by one, each of which a named check must catch.
        seed: of the uniform inputs and of the random thread orders.
        inputs: kinds of inputs, `uniform` and keys of `mhcgen.inputs.DISCRIMINATING`; None takes every one
            that the Program has.
    """

    config: Config
    options: Options = field(default_factory=Options)
    tokens: tuple[int, ...] = (1, 4, 8)
    backend: str = "auto"
    race: bool = False
    arms: str = ""
    red: tuple[str, ...] = ()
    seed: int = 0
    inputs: tuple[str, ...] | None = None


def checked(request: Request, red_names: tuple[str, ...]) -> Request:
    """The request with repetitions removed and the backend decided.

    Args:
        request: as given.
        red_names: the known red arms.

    Raises:
        UsageError: `U-TOKENS`, `U-BACKEND`, `U-RACE`, `U-RED`, `U-INPUTS`.
    """
    for count in request.tokens:
        if isinstance(count, bool) or not isinstance(count, int) or count < 0:
            raise UsageError(
                "U-TOKENS", f"a token count is an integer >= 0, got {count!r}", where="--tokens",
                hints=("for example --tokens 1,4,8",),
            )
    if not request.tokens:
        raise UsageError("U-TOKENS", "no token count is given", where="--tokens", hints=("for example 1,4,8",))
    _member("U-BACKEND", "backend", request.backend, BACKENDS)
    wanted = red_names if "all" in request.red else request.red
    for name in wanted:
        _member("U-RED", "red", name, ("all", *red_names))
    kinds = ("uniform", *DISCRIMINATING)
    for name in request.inputs or ():
        _member("U-INPUTS", "inputs", name, kinds)
    return replace(
        request,
        tokens=tuple(dict.fromkeys(request.tokens)),
        red=tuple(dict.fromkeys(wanted)),
        backend=_backend(request),
        inputs=kinds if request.inputs is None else tuple(dict.fromkeys(request.inputs)),
    )


def _backend(request: Request) -> str:
    if request.race:
        if request.backend == "cuda":
            raise UsageError(
                "U-RACE", "race mode is the CPU executor's; a GPU cannot report races", where="--race",
                hints=("use --backend host", "on a GPU, run compute-sanitizer over the generated test"),
            )
        return "host"
    if request.backend != "auto":
        return request.backend
    from mhcgen.runtime import cuda_usable

    return "cuda" if cuda_usable() else "host"


def _member(code: str, what: str, value: str, known: tuple[str, ...]) -> None:
    if value in known:
        return
    near = difflib.get_close_matches(value, known, n=1)
    raise UsageError(
        code, f"unknown {what} {value!r}", where=f"--{what}", notes=(f"known: {', '.join(known)}",),
        hints=(f"did you mean {near[0]}?",) if near else (f"choose one of {', '.join(known)}",),
    )
