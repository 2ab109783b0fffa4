"""Jobs: the inputs that every arm runs on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from mhcgen.gate.execute import Array
from mhcgen.gate.request import SMALL_TOKENS, Request
from mhcgen.inputs import discriminating, make_inputs
from mhcgen.ir import Program


@dataclass(frozen=True, eq=False)
class Job:
    """Inputs of one kind for one token count."""

    kind: str
    tokens: int
    inputs: Mapping[str, Array] = field(repr=False)

    def __str__(self) -> str:
        return f"{self.kind} T={self.tokens}"


def jobs_of(program: Program, request: Request) -> list[Job]:
    """Uniform inputs for every token count, then every applicable discriminating input at a small one."""
    found = []
    for kind in request.inputs or ():
        if kind == "uniform":
            found += [
                Job(kind, tokens, make_inputs(program, tokens, seed=request.seed)) for tokens in request.tokens
            ]
            continue
        made = discriminating(program, SMALL_TOKENS, kind)
        if made is not None:
            found.append(Job(kind, SMALL_TOKENS, made))
    return found


def reversed_rows(program: Program, job: Job) -> Mapping[str, Array]:
    """The inputs of a job with the rows of every per-token input in reverse order."""
    return {
        name: np.ascontiguousarray(array[::-1]) if program.tensor(name).shape[:1] == ("T",) else array
        for name, array in job.inputs.items()
    }
