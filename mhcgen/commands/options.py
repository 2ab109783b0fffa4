"""Options that several verbs share, defined once.

A verb that works on an emission takes `asked: Asked` first and is decorated with `takes_request`; the decorator
puts every option of `SHARED` in front of the verb's own:

```python
@takes_request
def bench(asked: Asked, tokens: Tokens = "1,64", json: Annotated[Path | None, typer.Option("--json")] = None) -> None:
    say(measure(asked.plan(), token_counts(tokens)))
```
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mhcgen.arithmetic import ACCUMULATORS, FUNCTION_SETS, PROJECTIONS
from mhcgen.build import QUANTS, SCOPES, STREAM_DTYPES, Config
from mhcgen.errors import UsageError
from mhcgen.models import EXITS
from mhcgen.plan import MIX_WARPS, PLACEMENTS, REGIMES, SLABS, SYNCS, Options, Plan

if TYPE_CHECKING:
    from mhcgen.ir import Program
    from mhcgen.log import Decision

BACKENDS = ("auto", "host", "cuda")
MAX_TOKENS = 2**31 - 1


def _choice(values: tuple[str, ...]) -> str:
    return "|".join(values)


Backend = Annotated[
    str,
    typer.Option(
        "--backend", metavar=_choice(BACKENDS), help="auto is a GPU where one is usable, else the CPU executor."
    ),
]
Tokens = Annotated[str, typer.Option("--tokens", metavar="T,T,...", help="Token counts, each 0 or more.")]
Seed = Annotated[str, typer.Option("--seed", metavar="N", help="Another seed gives other inputs.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that mhcgen did not make.")]


@dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Args:
        config: what to compute.
        options: how to schedule it.
        given: names of the shared options that were given.
        origin: where the schedule comes from, if not from the options alone: the first entry of a Plan's log.
    """

    config: Config
    options: Options
    given: tuple[str, ...] = ()
    origin: Decision | None = None

    @cached_property
    def program(self) -> Program:
        """The unfused Program of the configuration."""
        from mhcgen.build import build_config

        return build_config(self.config)

    def plan(self, stop_after: str | None = None) -> Plan:
        """The Plan; `stop_after` names the last pass to run.

        Raises:
            RefusedError: what was asked for by name is not legal.
        """
        from mhcgen.passes import run_pipeline

        plan = run_pipeline(self.program, self.options, stop_after=stop_after)
        return plan if self.origin is None else replace(plan, log=(self.origin, *plan.log))


#: Parameter name of a numeric option -> its reader.
_READERS: dict[str, Callable[[str, str], int | float]] = {}


def _shared(name: str, kind: Any, flags: str, metavar: str, text: str) -> inspect.Parameter:
    """One shared option; its default is None, which means not given."""
    if kind in (int, float):
        # Numbers arrive as text and are read here: versions of typer disagree on whether 4.0 is an integer.
        _READERS[name] = integer if kind is int else number
        kind = str
    option = typer.Option(*flags.split(), metavar=metavar or None, help=text)
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, option]
    )


def integer(option: str, text: str) -> int:
    """An integer in decimal digits.

    Raises:
        UsageError: `U-USAGE`.
    """
    if not re.fullmatch(r"[+-]?[0-9]{1,40}", text):
        raise _not_a(option, "an integer", text)
    return int(text)


def number(option: str, text: str) -> float:
    """A decimal number; nan and inf are numbers too, and refused by whoever cannot use them.

    Raises:
        UsageError: `U-USAGE`.
    """
    try:
        if not text.isascii() or "_" in text:
            raise ValueError
        return float(text)
    except ValueError:
        raise _not_a(option, "a number", text) from None


def _not_a(option: str, what: str, text: str) -> UsageError:
    return UsageError(
        "U-USAGE", f"{option} takes {what}, got {text!r}", where=option, hints=(f"give {what}, or leave it out",)
    )


SHARED: tuple[inspect.Parameter, ...] = (
    _shared("model", str, "--model", "NAME", "Its constants are the defaults of what follows. Default deepseek-v4."),
    _shared(
        "config", Path, "--config", "F.json|toml",
        "A file with these options as keys (streams, rms_eps, fuse, ...), or a model's own config.json. "
        "What is given beside it wins.",
    ),
    _shared("streams", int, "--streams", "N", "Residual streams n, 1 to 16."),
    _shared("hidden", int, "--hidden", "H", "Hidden size H."),
    _shared(
        "scope", str, "--scope", _choice(SCOPES),
        "The pre chain; a site with its branch; post with the next pre chain; a trunk; or one stage of these.",
    ),
    _shared(
        "dtype", str, "--dtype", _choice(STREAM_DTYPES),
        "Of streams, branch output and y. Coefficients are fp32.",
    ),
    _shared(
        "functions", str, "--class", _choice(FUNCTION_SETS),
        "Correctly rounded functions, or hardware approximations.",
    ),
    _shared(
        "sumsq", str, "--sumsq", _choice(ACCUMULATORS),
        "Accumulator of the sum of squares. Default fp64, fp32 for --class fast.",
    ),
    _shared(
        "projection", str, "--projection", _choice(PROJECTIONS),
        "Mixes are given as an input, or projected from the streams.",
    ),
    _shared("layers", int, "--layers", "N", "Layers of a trunk, two sites each."),
    _shared("exit", str, "--exit", _choice(EXITS), "How a trunk ends."),
    _shared("iters", int, "--iters --sinkhorn-iters", "N", "Sinkhorn iterations."),
    _shared("rank", int, "--rank", "N", "Rank of the gates, in a model that has one for every element."),
    _shared("rms_eps", float, "--rms-eps", "E", "eps of the RMS over the streams."),
    _shared("hc_eps", float, "--hc-eps", "E", "eps of the pre gates and inside the Sinkhorn."),
    _shared("norm_eps", float, "--norm-eps", "E", "eps of the RMSNorm of y."),
    _shared("norm", bool, "--norm/--no-norm", "", "RMSNorm of y. Fusions that name it imply it."),
    _shared("quant", str, "--quant", _choice(QUANTS), "Quantisation of the normalised y."),
    _shared("quant_pow2", bool, "--quant-pow2/--no-quant-pow2", "", "Scales are rounded up to powers of two."),
    _shared(
        "early_stop", bool, "--early-stop/--no-early-stop", "",
        "End the Sinkhorn once an iteration changes no bit. The result is the same.",
    ),
    _shared("iterations_out", bool, "--iterations-out", "", "Also return how many iterations each token took."),
    _shared(
        "extra", list[str], "--with", "engram|tap",
        "An opaque reader between post and the next pre. May be given twice.",
    ),
    _shared(
        "fuse", str, "--fuse", "NAME|GROUPS",
        "A name of `mhcgen list fusions`, or groups of stages: rowsq+gates,collapse. Default none. This and what "
        "follows is the schedule, and never changes a bit of a result.",
    ),
    _shared(
        "placement", str, "--placement", _choice(PLACEMENTS),
        "Home of the mixing matrix: shared memory, a row a lane, an element a lane, all in every lane.",
    ),
    _shared(
        "sync", str, "--sync", _choice(SYNCS),
        "The weakest correct barriers (auto, warp), or block barriers throughout.",
    ),
    _shared("threads", int, "--threads", "N", "Threads per block, every warp counted: a multiple of 32 to 1024."),
    _shared("cluster", int, "--cluster", "N", "Most thread blocks that share a token's columns; 1 for no cluster."),
    _shared(
        "slab", str, "--slab", _choice(SLABS), "Where the streams wait between square sum and collapse."
    ),
    _shared("mix_warp", str, "--mix-warp", _choice(MIX_WARPS), "Whether the mixes have a warp of their own."),
    _shared(
        "regime", str, "--regime", _choice(REGIMES),
        "What the schedule is chosen for: few tokens, or many. Default decode.",
    ),
    _shared("arch", str, "--arch", "sm_XX", "Target, of `mhcgen list archs`. Default sm_90."),
    _shared(
        "scalar", bool, "--scalar/--no-scalar", "",
        "Element loads and stores only, for arrays that are not aligned to 16 bytes.",
    ),
    _shared(
        "dependent", bool, "--dependent", "",
        "Dependent launch: parameters are read before the wait for the preceding launch (sm_90 and later).",
    ),
    _shared(
        "stamps", bool, "--stamps", "",
        "Time stamps at the borders of phases, as one more result: `stamps.KERNEL` of `run`.",
    ),
    _shared("tuned", bool, "--tuned", "", "The schedule that `mhcgen tune` found for this on this GPU, if it did."),
)


def asked_of(given: dict[str, Any]) -> Asked:
    """The Asked behind values of the shared options.

    Raises:
        UsageError, InputError: see `mhcgen.request`.
    """
    from mhcgen.request import read_config, request

    path, tuned = given.pop("config", None), given.pop("tuned", None)
    names = tuple(name for name, value in given.items() if value is not None and value != [])
    chosen = {name: given[name] for name in names}
    for name in [name for name in _READERS if name in chosen]:
        chosen[name] = _READERS[name](f"--{name.replace('_', '-')}", chosen[name])
    from_file = {} if path is None else read_config(path)
    try:
        config, options = request(**{**from_file, **chosen})
    except UsageError as error:
        name = error.where.lstrip("-").replace("-", "_")
        if name in from_file and name not in chosen:
            error.notes = (*error.notes, f"{name} = {from_file[name]!r} is from {path}")
        raise
    asked = Asked(config, options, (*names, *(() if path is None else ("config",))))
    if not tuned:
        return asked
    from mhcgen.tuned import resolve

    options, origin = resolve(asked.program, options)
    return replace(asked, options=options, given=(*asked.given, "tuned"), origin=origin)


def takes_request(verb: Callable[..., None]) -> Callable[..., None]:
    """A verb whose parameter `asked` is filled from the shared options, which come before its own."""
    own = inspect.signature(verb, eval_str=True).parameters
    names = tuple(parameter.name for parameter in SHARED)

    def wrapper(**values: Any) -> None:
        given = {name: values.pop(name) for name in names}
        verb(asked=asked_of(given), **values)

    parameters = [
        *SHARED,
        *(p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for name, p in own.items() if name != "asked"),
    ]
    wrapper.__name__, wrapper.__doc__ = verb.__name__, verb.__doc__
    wrapper.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    # Older versions of typer read the annotations apart from the signature.
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    return wrapper


def token_counts(text: str) -> tuple[int, ...]:
    """`1,4,8` as numbers.

    Raises:
        UsageError: `U-TOKENS`.
    """
    parts = [part.strip() for part in text.split(",")]
    # The length first: int() has a limit of its own.
    if not all(re.fullmatch("[0-9]{1,40}", part) and int(part) <= MAX_TOKENS for part in parts):
        raise UsageError(
            "U-TOKENS",
            f"token counts are integers from 0 to {MAX_TOKENS} with commas between, got {text!r}",
            where="--tokens",
            hints=("give e.g. --tokens 1,4,8",),
        )
    return tuple(dict.fromkeys(int(part) for part in parts))


def backend_name(text: str) -> str:
    """The backend, checked before any work is done.

    Raises:
        UsageError: `U-BACKEND`.
    """
    if text not in BACKENDS:
        raise UsageError(
            "U-BACKEND",
            f"backend must be one of {', '.join(BACKENDS)}, got {text!r}",
            where="--backend",
            hints=(f"choose one of {', '.join(BACKENDS)}",),
        )
    return text
