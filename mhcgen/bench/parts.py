"""Programs of a single stage, cut out of a larger one, for figures about one kernel."""

from __future__ import annotations

from dataclasses import replace

from mhcgen.ir import Program, Tensor


def only(program: Program, *names: str) -> Program:
    """The Program of these stages alone: what they read and do not make becomes an input, what they make a result.

    Example:
        >>> from mhcgen.build import build
        >>> [t.name for t in only(build(streams=4, hidden=64), "collapse").of_role("input", "result")]
        ['x', 'pre', 'y']
    """
    stages = [stage for stage in program.stages if stage.name in names]
    read = {tensor for stage in stages for tensor in stage.reads}
    made = {tensor for stage in stages for tensor in stage.writes}

    def role(tensor: Tensor) -> str:
        if tensor.name in made:
            return "result"
        return "parameter" if tensor.role == "parameter" else "input"

    tensors = [replace(t, role=role(t)) for t in program.tensors if t.name in read | made]
    return replace(program.with_stages(stages, tensors), scope="custom", origin="")
