"""Bounds of the finite elements of a mixing matrix that has NaN elsewhere."""

from __future__ import annotations

import numpy as np
import pytest

from mhcgen import reference
from mhcgen.bounds import compare
from mhcgen.build import build
from mhcgen.inputs import discriminating


@pytest.mark.parametrize("functions", ["ieee", "fast"])
def test_a_line_of_nan_leaves_the_other_lines_their_bound(functions: str) -> None:
    # Columns first, then rows, once: a row of zeros is NaN, and the other rows are not.
    program = build("mhc-paper", streams=3, hidden=2, iters=1, functions=functions)
    inputs = discriminating(program, 3, "-inf base")
    assert inputs is not None
    values = reference.run(program, inputs, all_values=True)
    comb = values["comb"]
    assert 0 < np.count_nonzero(np.isnan(comb[-1])) < comb[-1].size
    for off, ok in ((1.0, True), (1.0 + 2.0**-23, True), (1.0 + 1e-5, False)):
        got = comb.copy()
        got[-1] *= off
        assert compare(program, "comb", got, values, inputs).ok == ok, off
    got = comb.copy()
    got[-1, 1, 0] = 2.0**-60  # a 0 of the reference stays one
    assert not compare(program, "comb", got, values, inputs).ok
