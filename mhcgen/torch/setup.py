"""What the operations of a model compute and how they are scheduled, as one value that fits into a graph."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from functools import lru_cache
from typing import Any

from mhcgen.build import Config, configure
from mhcgen.errors import UsageError
from mhcgen.passes.fuse import PRESETS
from mhcgen.plan import Options

#: Fields of a Config that each operation sets for itself.
OPERATIONS_OWN = ("scope", "norm", "extra", "layers", "exit", "iterations_out")
#: `auto` makes each operation one launch.
FUSES = ("auto", "none", "seed")


class Setup:
    """Arithmetic and schedule of a model's operations, for one stream count, width and dtype.

    Args:
        model: a key of `mhcgen.models.MODELS`.
        fuse: `auto` (each operation is one launch), `none` (one launch a stage) or `seed`. Never changes a bit.
        schedule: further options of `mhcgen.compile` (placement, sync, threads, cluster, regime, ...), likewise.
        options: fields of `mhcgen.Config`: streams, hidden, iters, rank, rms_eps, hc_eps, norm_eps, dtype, functions,
            sumsq, projection, early_stop, quant, quant_pow2. What an operation decides (scope, norm) is not among
            them.

    Attributes:
        config: the checked Config.
        text: all of it as JSON. It is what operators take, so that an exported graph says what it computes.

    Raises:
        UsageError: `U-*`, as `mhcgen.configure`; `U-OPTION`, `U-FUSE`.

    Example:
        >>> from mhcgen.torch.setup import Setup
        >>> Setup("glm-5.3-flash", hidden=64, dtype="bf16").config.rms_eps
        1e-05
    """

    __slots__ = ("config", "fuse", "schedule", "text")

    def __init__(
        self,
        model: str = "deepseek-v4",
        *,
        fuse: str = "auto",
        schedule: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.schedule = dict(sorted((schedule or {}).items()))
        self.fuse = fuse
        _check(fuse, self.schedule, options)
        wants_quant = options.get("quant", "none") not in ("none", None)
        self.config: Config = configure(model, **options, norm=wants_quant or None)
        chosen = {
            field.name: getattr(self.config, field.name)
            for field in fields(Config)
            if field.name not in OPERATIONS_OWN and getattr(self.config, field.name) is not False
            and (field.name != "rank" or self.config.rank)
        }
        self.text = json.dumps({**chosen, "fuse": fuse, "schedule": self.schedule}, separators=(",", ":"))

    def __repr__(self) -> str:
        return f"Setup({self.text})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Setup) and self.text == other.text

    def __hash__(self) -> int:
        return hash(self.text)

    def __reduce__(self) -> tuple[Any, ...]:
        return parse, (self.text,)

    def replace(self, **options: Any) -> Setup:
        """A copy with other fields."""
        found = json.loads(self.text)
        return Setup(found.pop("model"), **{**found, **options})


def _check(fuse: str, schedule: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    if fuse not in FUSES:
        raise UsageError(
            "U-FUSE",
            f"fuse must be one of {', '.join(FUSES)}, got {fuse!r}",
            where="fuse",
            hints=("other groups are for Programs: mhcgen.compile(...) and mhcgen.torch.load(plan)",)
            if fuse in PRESETS
            else (),
        )
    for name in OPERATIONS_OWN:
        if name in options:
            raise UsageError("U-OPTION", f"{name} is the operation's to decide", where=name, hints=("leave it out",))
    known = set(Options.__dataclass_fields__) - {"fuse", "arch", "scalar", "stamps"}
    for name in schedule:
        if name not in known:
            raise UsageError(
                "U-OPTION",
                f"unknown schedule option {name!r}",
                where=f"schedule[{name!r}]",
                notes=(f"known: {', '.join(sorted(known))}; the architecture is the device's",),
            )


@lru_cache(maxsize=1024)
def parse(text: str) -> Setup:
    """The Setup behind a text.

    Raises:
        UsageError: `U-SETUP`, not such a text; as `Setup`.
    """
    try:
        found = json.loads(text)
        model = found.pop("model")
    except (ValueError, KeyError, AttributeError) as fault:
        raise UsageError(
            "U-SETUP",
            f"{text[:60]!r} is not the text of a Setup",
            where="setup",
            hints=("pass mhcgen.torch.Setup(...).text",),
        ) from fault
    return Setup(model, **found)
