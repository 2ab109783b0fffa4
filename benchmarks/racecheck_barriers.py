"""What racecheck reports where a named barrier comes before a block barrier: one emission, three ways.

    for form in emitted joined without; do
      PYTHONPATH=. compute-sanitizer --tool racecheck python3 benchmarks/racecheck_barriers.py $form
    done

In the chain of deepseek-v4.1 on one block the data warps pass a barrier of their own (norm); the warp of the mixes is
then at the next `__syncthreads()`, behind which it reads what the data warps write before that.

    emitted   as it is
    joined    every warp joins that first barrier; what is reported of `emitted` lies behind it, and is as it was
    without   the first barrier is gone, which is a race between the data warps: the red arm
"""

from __future__ import annotations

import sys

from gpu import need_gpu

import mhcgen
from mhcgen.backends import cuda
from mhcgen.inputs import make_inputs

FORMS = ("emitted", "joined", "without")
BARRIER = "    mhc_sync_data(128);"
MIX_WARP = "  if (warp == 4) {  // the warp of the mixes\n    // gates.parameters\n"


def changed(text: str, form: str) -> str:
    """The emission in one of the forms."""
    assert text.count(BARRIER) == 1 and text.count(MIX_WARP) == 1
    if form == "joined":
        text = text.replace(BARRIER, "    __syncthreads();").replace(MIX_WARP, f"{MIX_WARP}    __syncthreads();\n")
    return text.replace(BARRIER, "    ;") if form == "without" else text


def main(form: str) -> int:
    if form not in FORMS:
        print(f"one of {', '.join(FORMS)}", file=sys.stderr)
        return 2
    need_gpu()
    program = mhcgen.build("deepseek-v4.1", hidden=1024, dtype="bf16", projection="fma", norm=True)
    plan = mhcgen.compile(program, "pre-norm", cluster=1)
    module = plan.load("cuda", source=changed(plan.source, form))
    made = module(**{name: cuda.to_device(value) for name, value in make_inputs(program, 9).items()})
    for array in made.values():
        cuda.to_host(array)  # which waits: a process that ends before its kernel has nothing reported
    print(f"{form}: ran")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1] if len(sys.argv) > 1 else ""))
