"""The operations torch is given: what each takes and returns, and the Program behind it.

```
expand   e -> x                                      pre            x, fn or mixes, scale, base -> y, pre, post, comb
post     x, f, post, comb -> x_next                  pre_norm       ... and norm_weight -> z, y, pre, post, comb
mean     x -> y                                      pre_norm_quant ... -> z, y, pre, post, comb, q, q_scale
sum      x -> y                                      finish         pre with the mixes given
collapse x, pre -> y                                 boundary       post, then pre of the next site
head     x, fn or mixes, scale, base -> y, pre       boundary_norm  post, then pre_norm of the next site

gated, gated_norm, gated_boundary, gated_boundary_norm, gated_head: those of a model whose gates are of elements, from
stream_weight, fn or mixes, and up; without pre. They are several launches each: one block a token would read fn and
up, which are far larger than the streams, through one SM.
```
Names and shapes are those of the Programs (`mhcgen.build`), and an operation is nothing but one: streams are
token-major, comb is (from_stream, to_stream). Nothing here imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mhcgen.build import Config, build_config, check_config
from mhcgen.chain import Builder, pre_chain, tail_results
from mhcgen.errors import InputError, UsageError
from mhcgen.ir import Program
from mhcgen.models import model as find_model


@dataclass(frozen=True)
class Operation:
    """One operation.

    Args:
        name: `mhcgen::name` in torch.
        inputs: tensors in the order of the schema, by their names in the Program; `?` marks one that may be absent.
            The first has the tokens.
        outputs: results in order, likewise.
        scope: of its Program.
        fuse: preset that makes it one launch; of `gated` ones, what spreads their weights over SMs.
        norm: whether the RMSNorm of y is in it.
        quant: whether the quantisation of z is in it.
        gated: for models with gates of low rank, for all others where it is not.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    scope: str
    fuse: str = "none"
    norm: bool = False
    quant: bool = False
    gated: bool = False

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its inputs, without the mark of those that may be absent."""
        return tuple(name.rstrip("?") for name in self.inputs)

    @property
    def schema(self) -> str:
        """Schema of the functional form for `torch.library`."""
        return f"({self._tensors}, str setup) -> ({', '.join(['Tensor'] * len(self.outputs))})"

    @property
    def out_schema(self) -> str:
        """Schema of the form that writes to tensors of the caller's."""
        made = ", ".join(f"Tensor({chr(ord('a') + i)}!) out_{name}" for i, name in enumerate(self.outputs))
        return f"({self._tensors}, str setup, *, {made}) -> ()"

    @property
    def _tensors(self) -> str:
        return ", ".join(f"Tensor{'?' if name.endswith('?') else ''} {name.rstrip('?')}" for name in self.inputs)


_GATED = ("x", "fn?", "mixes?", "scale?", "base", "comb_logits?")
_SITE = ("pre", "post", "comb")
_LOW_RANK = ("x", "stream_weight", "fn?", "mixes?", "up")
_POST = ("x", "f", "post", "comb")
_NEXT = ("pre_next", "post_next", "comb_next")

OPERATIONS: dict[str, Operation] = {
    made.name: made
    for made in (
        Operation("expand", ("e",), ("x",), "expand"),
        Operation("pre", (*_GATED, "pre_prev?"), ("y", *_SITE), "pre", "pre"),
        Operation(
            "finish", ("x", "mixes", "scale", "base", "comb_logits?", "pre_prev?"), ("y", *_SITE), "pre", "pre"
        ),
        Operation(
            "pre_norm", (*_GATED, "norm_weight?", "pre_prev?"), ("z", "y", *_SITE), "pre", "pre-norm", norm=True
        ),
        Operation(
            "pre_norm_quant",
            (*_GATED, "norm_weight?", "pre_prev?"),
            ("z", "y", *_SITE, "q", "q_scale"),
            "pre",
            "pre-norm-quant",
            norm=True,
            quant=True,
        ),
        Operation("post", _POST, ("x_next",), "post"),
        Operation(
            "boundary",
            (*_POST, "fn?", "scale?", "base", "comb_logits?", "pre_prev?"),
            ("x_next", "y", *_NEXT),
            "boundary",
            "boundary",
        ),
        Operation(
            "boundary_norm",
            (*_POST, "fn?", "scale?", "base", "comb_logits?", "norm_weight?", "pre_prev?"),
            ("x_next", "z", "y", *_NEXT),
            "boundary",
            "boundary",
            norm=True,
        ),
        Operation("collapse", ("x", "pre"), ("y",), "collapse"),
        Operation("mean", ("x",), ("y",), "mean"),
        Operation("sum", ("x",), ("y",), "sum"),
        Operation("gated", _LOW_RANK, ("y", "post", "comb"), "pre", "seed", gated=True),
        Operation(
            "gated_norm",
            (*_LOW_RANK, "norm_weight?"),
            ("z", "y", "post", "comb"),
            "pre",
            "seed",
            norm=True,
            gated=True,
        ),
        Operation(
            "gated_boundary",
            (*_POST, "stream_weight", "fn", "up"),
            ("x_next", "y", "post_next", "comb_next"),
            "boundary",
            "seed",
            gated=True,
        ),
        Operation(
            "gated_boundary_norm",
            (*_POST, "stream_weight", "fn", "up", "norm_weight?"),
            ("x_next", "z", "y", "post_next", "comb_next"),
            "boundary",
            "seed",
            norm=True,
            gated=True,
        ),
        Operation("gated_head", _LOW_RANK, ("y",), "head", "none", gated=True),
        Operation("head", ("x", "fn?", "mixes?", "scale", "base"), ("y", "pre"), "head", "pre"),
    )
}


def build_operation(operation: Operation, config: Config, *, external: bool = False, first: bool = False) -> Program:
    """The Program of an operation.

    Args:
        operation: which.
        config: its arithmetic; scope, norm and the kind of projection follow from the operation and what is below.
        external: the mixes are given.
        first: it is the first site of a trunk, in a model with delayed pre: its y is stream 0.

    Raises:
        UsageError: of `mhcgen.build`.
    """
    _fits(operation, config)
    config = replace(
        config,
        scope="pre" if operation.scope == "collapse" else operation.scope,
        norm=operation.norm,
        quant=(config.quant if config.quant != "none" else "q8") if operation.quant else "none",
        projection="external" if external else "fma" if config.projection == "external" else config.projection,
    )
    check_config(config, find_model(config.model))
    if operation.scope == "collapse":
        b = Builder(config)
        b.add("collapse", "collapse", {"x": "x", "pre": "pre"}, {"y": "y"})
        return b.finish(("y",))
    if operation.scope == "pre" and first and find_model(config.model).delayed_pre:
        b = Builder(config)
        pre_chain(b, pre_prev="")
        return b.finish(("pre", "post", "comb", "y", *tail_results(config)))
    return build_config(config)


#: Scopes whose Programs hold gates.
_WITH_GATES = ("pre", "boundary", "head", "collapse")


def _fits(operation: Operation, config: Config) -> None:
    gated = find_model(config.model).rank > 0
    if operation.scope in _WITH_GATES and operation.gated != gated:
        wanted = [
            name for name, other in OPERATIONS.items() if other.gated == gated and other.scope == operation.scope
        ]
        raise UsageError(
            "U-MODEL",
            f"{operation.name} is not for model {config.model}, whose gates are "
            + ("of elements and made at low rank" if gated else "one a stream"),
            where="setup",
            hints=(f"use {' or '.join(wanted)}" if wanted else "a trunk of this model ends by gated_head or mean",),
        )


def program_of(operation: Operation, config: Config, given: frozenset[str]) -> Program:
    """The Program of an operation for the inputs that are given, by their names.

    Raises:
        InputError: `I-MISSING`, `I-UNKNOWN`: what is given does not make up the operation.
        UsageError: of `mhcgen.build`.
    """
    program = build_operation(operation, config, external="mixes" in given, first="pre_prev" not in given)
    wanted = {tensor.name for tensor in program.of_role("input", "parameter")}
    missing, unknown = sorted(wanted - given), sorted(given - wanted)
    if {"fn", "mixes"} & {*missing, *unknown} and "mixes" in operation.names:
        both = "fn" in given
        raise InputError(
            "I-UNKNOWN" if both else "I-MISSING",
            f"{operation.name} takes fn, to project the streams, or their mixes, "
            + ("not both" if both else "and neither is given"),
            where="mixes" if both else "fn",
            hints=("pass fn=... or mixes=...",),
        )
    for names, code, verb, hint in (
        (missing, "I-MISSING", "needs", "pass {}=..."),
        (unknown, "I-UNKNOWN", "takes no", "leave {} out"),
    ):
        if names:
            raise InputError(
                code,
                f"{operation.name} {verb} {names[0]} with model {config.model}",
                where=names[0],
                notes=(f"its inputs: {', '.join(name for name in operation.names if name in wanted)}",),
                hints=(hint.format(names[0]),),
            )
    return program
