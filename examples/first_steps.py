"""First steps in Python: build a Program, compile it, run its text on the CPU, compare with the reference.

    python examples/first_steps.py

Needs a C++ compiler (the extra `zig` brings one), no GPU; takes some seconds, for the compiler.
"""

from __future__ import annotations

import numpy as np

import mhcgen
from mhcgen import reference

TOKENS, STREAMS, HIDDEN = 3, 4, 256


def inputs(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Streams and raw mixes of some tokens, and the parameters of one site."""
    rows = (2 + STREAMS) * STREAMS  # pre, post, and the n x n mixing matrix
    return {
        "x": rng.standard_normal((TOKENS, STREAMS, HIDDEN), dtype=np.float32),
        "mixes": rng.standard_normal((TOKENS, rows), dtype=np.float32),
        "scale": np.full(3, 0.5, np.float32),
        "base": np.zeros(rows, np.float32),
    }


def main() -> None:
    """The same Program by two schedules: one kernel, and one kernel a stage."""
    program = mhcgen.build("deepseek-v4", streams=STREAMS, hidden=HIDDEN)
    fused = mhcgen.compile(program, fuse="pre")
    unfused = mhcgen.compile(program, fuse="none")
    print(f"{len(unfused.kernels)} stages, fused into {[kernel.name for kernel in fused.kernels]}")
    print(f"numeric class {fused.numeric_class}")

    arrays = inputs(np.random.default_rng(0))
    got = fused.load("host")(**arrays)
    other = unfused.load("host")(**arrays)
    exact = reference.run(program, arrays)
    for name, values in got.items():
        same = np.array_equal(values.view(np.uint32), other[name].view(np.uint32))
        error = np.abs(values - exact[name]).max()
        print(f"{name:5} {values.shape!s:12} same bits as unfused: {same}, off from float64 by {error:.1e}")
        assert same
        assert error < 1e-4

    # comb mixes streams with streams: every row and every column of it sums to about 1.
    print("rows of comb sum to", got["comb"][0].sum(axis=1).round(4))


if __name__ == "__main__":
    main()
