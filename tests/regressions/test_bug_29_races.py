"""tile-ai/TileOPs #1584: a shared buffer was indexed with the stride of another. tile-ai/tilelang #2556: a barrier
was dropped where not every thread takes part.

Race mode over what a search of schedules may choose: each value of each axis of `mhcgen tune`, one axis at a time.
Mutants of every barrier: `tests/test_mutations.py`; compute-sanitizer: `benchmarks/sanitize.py`.
"""

from __future__ import annotations

from typing import Any

import factories
import pytest
from differential import Ran, differing

import mhcgen
from mhcgen.errors import RefusedError
from mhcgen.tune import VALUES

PROGRAMS: dict[str, tuple[dict[str, Any], str]] = {
    "pre": ({"hidden": 72}, "pre"),
    "projection": ({"streams": 3, "hidden": 1030, "projection": "fma", "norm": True}, "pre-norm"),
    "boundary": ({"hidden": 1024, "scope": "boundary", "projection": "fma", "dtype": "bf16"}, "boundary"),
    "five streams": ({"streams": 5, "hidden": 257, "norm": True, "quant": "q8"}, "pre-norm-quant"),
    "sixteen streams": ({"streams": 16, "hidden": 40}, "pre"),
}
QUICK = {("pre", "placement"), ("pre", "mix_warp"), ("projection", "cluster"), ("five streams", "slab")}
CASES = [
    pytest.param(name, axis, marks=[pytest.mark.slow] * ((name, axis) not in QUICK))
    for name in PROGRAMS
    for axis in VALUES
]


@pytest.mark.parametrize(("name", "axis"), CASES)
def test_no_value_of_an_axis_has_a_race(name: str, axis: str) -> None:
    build, fuse = PROGRAMS[name]
    program = mhcgen.build(**{"iters": 2, **build})
    given = factories.inputs(program, 3)
    base = Ran(mhcgen.compile(program, "none"), given, 3).results
    seen: set[str] = set()
    for value in VALUES[axis]:
        try:
            plan = mhcgen.compile(program, fuse, **{axis: value})
        except RefusedError:
            continue
        if plan.emitted_sha256 in seen:
            continue
        seen.add(plan.emitted_sha256)
        assert differing(base, Ran(plan, given, 3, race=True, order="random", seed=7).results) == [], value
    assert seen


@pytest.mark.parametrize("model", ["deepseek-v4", "mhc.cu-static"])
def test_a_load_that_a_compiler_moved_is_no_race(model: str) -> None:
    """With one stream the matrix has one place, so that its load cannot fault and leaves its loop and if."""
    program = mhcgen.build(model, streams=1, hidden=8, iters=2, early_stop=True)
    plan = mhcgen.compile(program, "none", placement="shared")
    Ran(plan, factories.inputs(program, 1), 1, race=True)


def test_a_wrong_stride_in_shared_memory_is_reported() -> None:
    """The fault of the report, planted: rows of the matrix overlap."""
    program = mhcgen.build(hidden=72, iters=2)
    plan = mhcgen.compile(program, "pre", placement="shared")
    assert plan.source.count("s_logits[e] = logit;") == 1
    text = plan.source.replace("s_logits[e] = logit;", "s_logits[e / 2] = logit;")
    module = plan.load("host", race=True, source=text)
    module(**factories.inputs(program, 1))
    (launch,) = module.launches
    assert {finding.rule for finding in launch.report.findings} & {"race", "uninitialised"}
