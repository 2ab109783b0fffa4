"""Stable printer of Programs and logs, for snapshots, errors and the command line."""

from __future__ import annotations

from collections.abc import Iterable

from mhcgen.ir import Program, Tensor
from mhcgen.log import LogEntry


def print_tensor(tensor: Tensor) -> str:
    """`x: bf16[T, n, H] input`."""
    return f"{tensor.name}: {tensor.dtype}[{', '.join(map(str, tensor.shape))}] {tensor.role}"


def print_program(program: Program) -> str:
    """Every tensor and stage, one line each, in order; the same text in every process."""
    dims = " ".join(f"{key}={value}" for key, value in program.dims)
    lines = [
        f"program {program.model} scope={program.scope} {dims}",
        f"class {program.numeric_class}",
        f"arithmetic {program.arithmetic.describe()}",
    ]
    lines += [f"  {print_tensor(tensor)}" for tensor in program.tensors]
    for stage in program.stages:
        operands = ", ".join(f"{slot}={name}" for slot, name in stage.operands)
        results = ", ".join(f"{slot}={name}" for slot, name in stage.results)
        attrs = "".join(f" {key}={value}" for key, value in stage.attrs)
        lines.append(f"  {results} <- {stage.name}: {stage.kind}({operands}){attrs}")
    return "\n".join(lines) + "\n"


def print_log(log: Iterable[LogEntry]) -> str:
    """One entry a line (refusals take several)."""
    return "".join(f"{entry}\n" for entry in log)
