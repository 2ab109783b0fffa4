"""`run --weights`: a Program's parameters from a checkpoint, its other inputs from the user's file."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mhcgen.commands.options import Asked, integer
from mhcgen.errors import InputError, UsageError

if TYPE_CHECKING:
    from mhcgen.ir import Program
    from mhcgen.weights import WeightFile


@dataclass(frozen=True)
class Checkpoint:
    """The parameters of one site, or of the gated head, in a checkpoint.

    Args:
        path: as `mhcgen.weights.WeightFile` takes it.
        layer: number of the layer; -1 for the head.
        site: `attn`, `ffn` or `head`. In a boundary it is the site whose pre chain runs, the one after the post.
    """

    path: Path
    layer: int
    site: str

    def read(self, program: Program, provided: tuple[str, ...]) -> dict[str, Any]:
        """The Program's parameters; norm_weight only where the user's file does not provide it.

        Raises:
            UsageError: `U-WEIGHTS`, the Program has no parameters.
            InputError: `I-TWICE`, the user's file provides one of them too; others as `site_parameters`.
        """
        from mhcgen.weights import head_parameters, site_parameters

        wanted = [tensor.name for tensor in program.of_role("parameter")]
        if not wanted:
            raise UsageError(
                "U-WEIGHTS",
                f"a Program of scope {program.scope} has no parameters to read",
                where="--weights",
                hints=("leave it out",),
            )
        if program.stages_of_kind("gated_mean"):
            raise UsageError(
                "U-WEIGHTS",
                f"a checkpoint is read for fn, base and scale, and model {program.model} has {', '.join(wanted)}",
                where="--weights",
                hints=("give them with --inputs",),
            )
        n, hidden = program.dim("n"), program.dim("H")
        if self.site == "head":
            found = head_parameters(self.path, n, hidden)
        else:
            norm = "norm_weight" in wanted and "norm_weight" not in provided
            found = site_parameters(self.path, self.layer, self.site, n, hidden, rows=program.dim("R"), norm=norm)
        twice = [name for name in found if name in provided]
        if twice:
            raise InputError(
                "I-TWICE",
                f"{twice[0]} is in the inputs and in the weights",
                where="--inputs",
                hints=("remove it from the inputs, or leave --weights out",),
            )
        return {name: found[name] for name in wanted if name in found}


def checkpoint_of(asked: Asked, weights: Path | None, layer: str | None, site: str | None) -> Checkpoint | None:
    """The Checkpoint behind --weights, --layer and --site; None without them.

    Raises:
        UsageError: `U-WEIGHTS`, they do not go together or the site does not fit the scope.
    """

    def wrong(message: str, option: str, hint: str) -> UsageError:
        return UsageError("U-WEIGHTS", message, where=option, hints=(hint,))

    if weights is None:
        if layer is not None or site is not None:
            option = "--site" if layer is None else "--layer"
            raise wrong(f"{option} says where to read in --weights, which is missing", option, "give --weights FILE")
        return None
    scope = asked.config.scope
    if scope == "head":
        if layer is not None or site not in (None, "head"):
            raise wrong("the gated head belongs to no layer", "--layer" if layer else "--site", "leave it out")
        return Checkpoint(weights, -1, "head")
    if site not in ("attn", "ffn"):
        got = "nothing" if site is None else repr(site)
        raise wrong(f"scope {scope} reads a site's parameters, attn or ffn, got {got}", "--site", "give --site attn")
    if layer is None:
        raise wrong(f"which layer's {site} site?", "--layer", "give --layer N")
    number = integer("--layer", layer)
    if number < 0:
        raise wrong(f"layers are numbered from 0, got {number}", "--layer", "give 0 or more")
    return Checkpoint(weights, number, site)


def with_projection(asked: Asked, inputs: WeightFile) -> Asked:
    """The same, with mixes projected by the checkpoint's fn unless they are given or a projection was asked for."""
    chosen = "projection" in asked.given or "mixes" in inputs or asked.config.projection != "external"
    return asked if chosen else replace(asked, config=replace(asked.config, projection="fma"))
