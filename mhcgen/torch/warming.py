"""Compiling and running operations before they are needed, and saying what was built."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from mhcgen.errors import InternalError, UsageError
from mhcgen.models import model as find_model
from mhcgen.torch import cpu
from mhcgen.torch.calls import Call, call_of
from mhcgen.torch.launch import compiled
from mhcgen.torch.operations import OPERATIONS, Operation, build_operation
from mhcgen.torch.ops import operator
from mhcgen.torch.setup import Setup
from mhcgen.torch.straight import prepared
from mhcgen.warm_up import Built, WarmUp

LOGGER = logging.getLogger("mhcgen")


def compile_count() -> int:
    """Emissions built by this process so far for any operation or device, fetches from the disk cache included."""
    return sum(compiled.values())


def variants(operation: Operation, setup: Setup, gemm: bool) -> list[frozenset[str]]:
    """The sets of inputs with which an operation can be called, with the projection inside or given."""
    external = "mixes" in operation.inputs or (gemm and "mixes?" in operation.inputs)
    delayed = operation.scope == "pre" and find_model(setup.config.model).delayed_pre
    programs = [
        build_operation(operation, setup.config, external=external, first=first)
        for first in ((False, True) if delayed else (False,))
    ]
    return [frozenset(tensor.name for tensor in p.of_role("input", "parameter")) for p in programs]


def warm_up(
    setup: Setup,
    operations: Iterable[str] = ("expand", "pre", "post"),
    *,
    device: Any = None,
    gemm: bool = False,
    twins: bool = True,
) -> WarmUp:
    """Compile, load and run operations once on a token of zeros, so that no later call compiles.

    Needed before a CUDA graph is captured and wherever a first call must not take seconds. The number of tokens is in
    no compiled code: one warm-up serves them all.

    Args:
        setup: arithmetic and schedule.
        operations: names of operations.
        device: a torch device; the current CUDA device, or the CPU where torch has none.
        gemm: the projection is the caller's (`mixes` are given).
        twins: also the twins for tensors that are not 16-byte aligned.

    Returns:
        What was built; `str()` of it is a line an emission.

    Raises:
        UsageError: `U-ARM`, no such operation, or none at all.
        InternalError: `X-WARM-UP`, an operation launched other kernels than its plan has.
        CompileError, EnvironmentFault: of the backend.
    """
    names = list(operations)
    unknown = [name for name in names if name not in OPERATIONS]
    if unknown or not names:
        raise UsageError(
            "U-ARM",
            f"there is no operation {unknown[0]!r}" if unknown else "there is nothing to warm up",
            where="operations",
            hints=(f"operations: {', '.join(OPERATIONS)}",),
        )
    where = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    if where.type == "cuda" and where.index is None:
        where = torch.device("cuda", torch.cuda.current_device())
    start = time.perf_counter()
    built = []
    for name in names:
        for given in variants(OPERATIONS[name], setup, gemm):
            for twin in (False, True) if twins else (False,):
                built.append(_warm(OPERATIONS[name], setup, given, twin, where))
    report = WarmUp(tuple(built), time.perf_counter() - start)
    LOGGER.info("%s", report)
    return report


def _zeros(call: Call, given: frozenset[str], twin: bool, device: torch.device) -> list[Tensor | None]:
    """One token of zeros for each input; off by one element where the twin is meant."""
    specs = {spec.name: spec for spec in call.inputs}
    tensors: list[Tensor | None] = []
    for name in call.operation.names:
        if name not in given:
            tensors.append(None)
            continue
        shape = specs[name].shape(1)
        flat = torch.zeros(int(torch.Size(shape).numel()) + twin, dtype=specs[name].dtype, device=device)
        tensors.append(flat[int(twin) :].view(shape))
    return tensors


def _warm(operation: Operation, setup: Setup, given: frozenset[str], twin: bool, device: torch.device) -> Built:
    placeholders = [torch.empty(0) if name in given else None for name in operation.names]
    call = call_of(operation.name, setup.text, placeholders)
    tensors = _zeros(call, given, twin, device)
    run = operator(operation.name)
    with torch.no_grad():
        if device.type == "cuda":
            kernels = prepared(operation, setup.text, tensors, device.index)
            plan, before = kernels.plan, kernels.launches
            run(*tensors, setup.text)
            ran, wanted = kernels.launches - before, len(plan.kernels)
        else:
            module = cpu.module_of(call)
            module.prepare(twin)
            with cpu.use_path("kernels"):
                run(*tensors, setup.text)
            plan, ran, wanted = module.plan, len(module.launches), len(module.plan.kernels)
    if ran != wanted:
        raise InternalError(
            "X-WARM-UP", f"{operation.name} launched {ran} kernels, and its plan has {wanted}", where=operation.name
        )
    names = tuple(kernel.name for kernel in plan.kernels)
    twin_name = "misaligned" if twin else "aligned"
    return Built(operation.name, twin_name, plan.options.fuse, names, plan.emitted_sha256[:12])
