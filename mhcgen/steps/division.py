"""Where the Sinkhorn may divide without branches: an invariant bounds its operands.

With softmax + eps at the start every element is at least eps, and every row and column sum is at most
n (1 + eps) + eps, because elements never exceed 1 + eps. Each half-step divides by at most that, so after k
half-steps an element is at least eps / (n (1 + 2 eps))^k. While this stays at or above 2^-100, nothing on the way
of the refined quotient is subnormal or infinite, and it equals the correctly rounded one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from mhcgen.combs import CombProgram, HalfStep
from mhcgen.combs.family import CombStep
from mhcgen.ir import Stage
from mhcgen.steps.context import Context

#: log2 of the least operand the refined quotient is proven for, with room for its residuals.
LEAST_LOG2 = -100.0


def bounded_divisions(context: Context, stage: Stage, program: CombProgram) -> CombProgram:
    """The program with `divide` replaced by `divide_bounded` where the invariant holds (ieee class only)."""
    if context.program.arithmetic.functions != "ieee" or not invariant_holds(context.n, stage, program):
        return program
    return replace(
        program,
        start=tuple(_bounded(step) for step in program.start),
        loop=tuple(_bounded(step) for step in program.loop),
    )


def invariant_holds(n: int, stage: Stage, program: CombProgram) -> bool:
    """Whether every element and sum of the linear Sinkhorn stays within the proven range."""
    steps = (*program.start, *program.loop)
    starts_at_eps = any(isinstance(s, HalfStep) and s.fn == "divide_then_add_eps" for s in program.start)
    divides = [s for s in steps if isinstance(s, HalfStep) and s.fn == "divide"]
    if program.potentials or not starts_at_eps or not all(s.finish == "add_eps" for s in divides):
        return False
    eps = float(stage.attr("eps"))
    if eps <= 0.0:
        return False
    halves = len([s for s in program.start if s in divides]) + program.count * len(program.loop)
    return math.log2(eps) - halves * math.log2(n * (1.0 + 2.0 * eps) + eps) >= LEAST_LOG2


def _bounded(step: CombStep) -> CombStep:
    if isinstance(step, HalfStep) and step.fn == "divide":
        return replace(step, fn="divide_bounded")
    return step
