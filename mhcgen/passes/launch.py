"""launch: grid, threads, shared bytes.

```
kernel of one block a token        grid (T)
kernel of k blocks a token         grid (T, k)      tokens on grid.x, which reaches 2^31 - 1
```
T is a run-time argument and never part of the text. Refusal codes: L-SHARED, L-DEPENDENT.

Deliberately not done here: choosing threads, which place does, because registers depend on them.
"""

from __future__ import annotations

from dataclasses import replace

from mhcgen.backends.archs import parse_arch
from mhcgen.log import Decision
from mhcgen.passes.refuse import refuse
from mhcgen.plan import Plan

#: Static shared memory of a block on every architecture.
STATIC_SHARED = 48 * 1024


def launch(plan: Plan) -> Plan:
    """Plan -> Plan with launch facts in every kernel.

    Raises:
        RefusedError: L-SHARED, L-DEPENDENT.
    """
    if "launch" in plan.done:
        return plan
    for index, kernel in enumerate(plan.kernels):
        total = sum(buffer.nbytes for buffer in kernel.buffers)
        # The compiler aligns each array to up to 16 bytes.
        needed = sum(-(-buffer.nbytes // 16) * 16 for buffer in kernel.buffers)
        if needed > STATIC_SHARED:
            raise refuse(
                "launch",
                "L-SHARED",
                kernel.name,
                f"it needs {needed} bytes of shared memory, and a block has {STATIC_SHARED}",
                "split the group, or use a register placement",
            )
        if kernel.dependent and not parse_arch(plan.options.arch).facts.has_dependent_launch:
            raise refuse(
                "launch",
                "L-DEPENDENT",
                kernel.name,
                f"{plan.options.arch} has no dependent launch",
                "target sm_90 or later, or leave --dependent out",
            )
        plan = plan.with_kernel(index, replace(kernel, shared_bytes=total))
        grid = f"grid {kernel.grid_text}"
        plan = replace(
            plan,
            log=(
                *plan.log,
                Decision(
                    "launch",
                    kernel.name,
                    f"{grid}, {kernel.threads} threads, {total} bytes shared",
                    "tokens are on grid.x, and T is a run-time argument",
                ),
            ),
        )
    return plan
