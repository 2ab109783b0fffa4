"""Running Plans on the CPU executor and comparing what comes out, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import factories
import ml_dtypes
import numpy as np

from mhcgen import reference
from mhcgen.bounds import Comparison, compare_all
from mhcgen.inputs import poison, poisoned_mask
from mhcgen.ir import Program
from mhcgen.plan import Plan
from mhcgen.runtime import NUMPY_DTYPES

Arrays = dict[str, Any]


class Ran:
    """A call of a Plan: results, what its opaque stages gave, the launches it took.

    Args:
        plan: what to run.
        inputs: by name.
        tokens: T.
        options: of `Plan.load`, such as `race` and `order`.

    Raises:
        AssertionError: the executor found something, an input changed, or part of a result was not written.
    """

    def __init__(self, plan: Plan, inputs: Arrays, tokens: int, **options: Any) -> None:
        module = plan.load("host", **options)
        before = {name: array.tobytes() for name, array in inputs.items()}
        self.opaque: Arrays = {}
        run = factories.branches(plan.program)

        def remember(name: str) -> Any:
            def call(**operands: Any) -> Any:
                self.opaque[name] = run[name](**operands)
                return self.opaque[name]

            return call

        made_by_kernels = [t for t in plan.program.of_role("result") if not _opaque(plan.program, t.name)]
        out = {
            t.name: poison(plan.program.shape(t.name, tokens), t.dtype).view(NUMPY_DTYPES[t.dtype])
            for t in made_by_kernels
        }
        branches = {name: remember(name) for name in run}
        # So few tokens get a cluster each; an even count shares one.
        full = {} if tokens % 2 else {"per_cluster": 16}
        self.results = module(out=out, branches=branches, launch_options=full, **inputs)
        self.launches = module.launches
        for launch in self.launches:
            assert launch.report.ok, launch.report.text
            assert not any(launch.report.unwritten.values()), launch.report.unwritten
        assert {name: array.tobytes() for name, array in inputs.items()} == before, "an input changed"
        for t in made_by_kernels:
            if t.dtype != "fp8_e4m3":  # every byte is a code of fp8, so poison cannot be told from it
                assert not poisoned_mask(self.results[t.name]).any(), f"part of {t.name} was not written"


def _opaque(program: Program, tensor: str) -> bool:
    return program.stage(program.writers[tensor]).kind in ("branch", "engram", "tap")


def differing(a: Arrays, b: Mapping[str, Any]) -> list[str]:
    """Names of results whose bits differ; NaN equals NaN whatever its payload."""
    assert list(a) == list(b)
    return [name for name in a if not _same(np.asarray(a[name]), np.asarray(b[name]))]


def _same(a: Any, b: Any) -> bool:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    word = {1: np.uint8, 2: np.uint16, 4: np.uint32}[a.dtype.itemsize]
    same = a.view(word) == b.view(word)
    if a.dtype == np.uint8:  # codes of fp8, whose two NaNs are one here as in the gate
        same |= (a & 0x7F == 0x7F) & (b & 0x7F == 0x7F)
    elif a.dtype.kind != "i":
        same |= np.isnan(a.astype(np.float32)) & np.isnan(b.astype(np.float32))
    return bool(same.all())


def _first(value: Any, *_: Any) -> Any:
    return value


def beyond_bounds(plan: Plan, inputs: Arrays, ran: Ran) -> list[Comparison]:
    """Comparisons with the reference that are not within the bound; opaque stages give it what they gave `ran`."""
    program = plan.program
    same = {name: partial(_first, value) for name, value in ran.opaque.items()}
    values = reference.run(program, inputs, same, all_values=True)
    decoded = {
        name: array.view(ml_dtypes.float8_e4m3fn) if program.tensor(name).dtype == "fp8_e4m3" else array
        for name, array in ran.results.items()
    }
    return [c for c in compare_all(program, decoded, values, inputs) if not c.ok]
