"""Inputs for the operators of mhcgen.torch; import only where torch is."""

from __future__ import annotations

from typing import Any

import torch

from mhcgen.errors import EnvironmentFault
from mhcgen.torch import OPERATIONS, Setup
from mhcgen.torch.calls import Call, call_of
from mhcgen.torch.warming import variants

#: Operations of models with a gate a stream; the others are in test_torch_gated.
PLAIN = [name for name, operation in OPERATIONS.items() if not operation.gated]
#: An operation and whether its projection is given, for each way in which operators are called.
CASES = [(name, False) for name in PLAIN] + [("pre", True), ("pre_norm", True), ("head", True)]
IDS = [f"{name}{'-mixes' if gemm else ''}" for name, gemm in CASES]
SMALL = Setup("deepseek-v4", hidden=16, iters=3)


def inputs(
    name: str,
    setup: Setup = SMALL,
    *,
    tokens: int = 3,
    gemm: bool = False,
    first: bool = False,
    double: bool = False,
    device: Any = "cpu",
    grad: bool = False,
    seed: int = 0,
) -> list[torch.Tensor | None]:
    """Tensors for an operation, in the order of its schema.

    Args:
        gemm: give mixes rather than fn.
        first: leave out the gates of the site before, in a model with delayed pre.
    """
    operation = OPERATIONS[name]
    given = variants(operation, setup, gemm)[-1 if first else 0]
    specs = {spec.name: spec for spec in Call(operation, setup, given).inputs}
    generator = torch.Generator().manual_seed(seed)
    made: list[torch.Tensor | None] = []
    for tensor in operation.names:
        if tensor not in given:
            made.append(None)
            continue
        spec = specs[tensor]
        shape = spec.shape(tokens)
        value = torch.randn(shape, generator=generator, dtype=torch.float64)
        if tensor in ("fn", "up"):
            value /= spec.tail[-1] ** 0.5
        if tensor in ("scale", "norm_weight"):
            value = value.abs() + 0.5
        if tensor in ("comb", "post", "pre", "pre_prev"):
            value = value.sigmoid()
        value = value.to(torch.float64 if double else spec.dtype).to(device)
        made.append(value.requires_grad_(grad))
    return made


def call(name: str, setup: Setup, tensors: list[torch.Tensor | None]) -> Call:
    """The Call behind an operator's inputs."""
    return call_of(name, setup.text, tensors)


def as_tuple(made: Any) -> tuple[torch.Tensor, ...]:
    """Results of an operator, one or many."""
    return (made,) if isinstance(made, torch.Tensor) else tuple(made)


def no_compiler() -> str:
    """Why the CPU executor cannot be built here; empty where it can."""
    from mhcgen.backends.host.build import find_compiler

    try:
        find_compiler()
    except EnvironmentFault as fault:
        return fault.message
    return ""
