"""ROCm/aiter #3033: rows got the RMS of their neighbours, on some runs. sgl-project/sglang #39664 and
deepseek-ai/FlashMLA #212: the bits of a row depended on how many rows shared the launch.

A row's bits here depend on that row alone: on each side of every token count at which a schedule changes (the class
of T, the tokens a cluster takes), at the first, a middle and the last place, whatever the other rows hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import factories
import numpy as np
import pytest
import sparse

import mhcgen
from mhcgen.classes import DECODE_TOKENS, plans_by_class, regime_of
from mhcgen.inputs import discriminating
from mhcgen.plan import REGIMES, Kernel, Plan

#: Rows that tokens repeat: an odd count, so that a cluster's tokens and a row's neighbours come in every order.
POOL = 7
WIDE = {"projection": "fma", "dtype": "bf16"}
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "unfused": ({"hidden": 520, "projection": "fma"}, "none"),
    "slab and streamed": ({"hidden": 2048, "dtype": "bf16", "norm": True, "iters": 3}, "pre-norm"),
    "cluster of 4": ({"hidden": 1024, "norm": True, **WIDE}, "pre-norm"),
    "cluster of 16": ({"hidden": 4096, "iters": 3, **WIDE}, "pre"),
    "boundary cluster": ({"hidden": 1024, "scope": "boundary", **WIDE}, "boundary"),
    "three streams": ({"streams": 3, "hidden": 777, "iters": 5, "projection": "fma"}, "pre"),
    "post": ({"hidden": 4096, "scope": "post", "dtype": "bf16"}, "none"),
    "head": ({"hidden": 1030, "scope": "head", "projection": "fma"}, "none"),
}


def changes_at(kernel: Kernel) -> set[int]:
    """Token counts from which on each cluster of a kernel takes one token more."""
    most = kernel.tokens * 130  # clusters are never so many at once
    shares = [kernel.tokens_per_cluster(tokens) for tokens in range(most)]
    assert shares[-1] == kernel.tokens == kernel.tokens_per_cluster(2**20)
    return {tokens for tokens in range(1, most) if shares[tokens] != shares[tokens - 1]}


def thresholds(plans: Iterable[Plan]) -> list[int]:
    """Token counts on both sides of each change of schedule, and those that issues name."""
    borders = {DECODE_TOKENS + 1, *(t for plan in plans for kernel in plan.kernels for t in changes_at(kernel))}
    around = {border + step for border in borders for step in (-1, 0)}
    return sorted(around | {1, 2, 63, 64, 65})


@cache
def plans(name: str) -> dict[str, Plan]:
    build, fuse = CASES[name]
    return plans_by_class(mhcgen.build(**build), fuse)


@cache
def alone(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Rows, and the results of each as the one token of an unfused launch."""
    program = plans(name)["decode"].program
    rows = factories.inputs(program, POOL)
    module = mhcgen.compile(program, "none", cluster=1).load("host")
    per_token = {t.name for t in program.of_role("input")}
    return rows, [module(**{k: a[i : i + 1] if k in per_token else a for k, a in rows.items()}) for i in range(POOL)]


def dependent(name: str, tokens: int, plan: Plan, **options: Any) -> list[tuple[str, int]]:
    """(result, token) of the first, the middle and the last row that are not the row alone."""
    rows, results = alone(name)
    program = plan.program
    index = np.arange(tokens) % POOL
    inputs = {k: np.take(a, index, axis=0) if "T" in program.tensor(k).shape else a for k, a in rows.items()}
    wanted = sorted({0, tokens // 2, tokens - 1})
    out = sparse.module(plan, wanted, **options)(**inputs)
    return [
        (result, token)
        for token in wanted
        for result, array in out.items()
        if array[token].tobytes() != results[token % POOL][result][0].tobytes()
    ]


def test_every_kind_of_threshold_is_tried() -> None:
    clusters = {kernel.cluster for name in CASES for plan in plans(name).values() for kernel in plan.kernels}
    assert {1, 4, 16} <= clusters
    apart = plans("slab and streamed")
    assert apart["decode"].kernels != apart["prefill"].kernels
    assert {7, 8, 14, 15, 21, 22, 30, 31, 60, 61, 256, 257} <= {
        *thresholds(plans("cluster of 16").values()),
        *thresholds(plans("cluster of 4").values()),
    }
    assert all(regime_of(t) == regime for t, regime in zip((256, 257), REGIMES, strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_row_is_itself_on_both_sides_of_every_threshold(name: str) -> None:
    for tokens in thresholds(plans(name).values()):
        assert dependent(name, tokens, plans(name)[regime_of(tokens)]) == [], tokens


@pytest.mark.parametrize("name", CASES)
def test_no_rows_are_no_launch_in_either_class(name: str) -> None:
    for plan in plans(name).values():
        module = plan.load("host")
        out = module(**factories.inputs(plan.program, 0))
        assert all(array.shape[0] == 0 for array in out.values()) and module.launches == []


@pytest.mark.parametrize("tokens", [1024, 8192])
@pytest.mark.parametrize("name", ["slab and streamed", "cluster of 4", "boundary cluster"])
def test_a_row_is_itself_among_many(name: str, tokens: int) -> None:
    assert dependent(name, tokens, plans(name)["prefill"]) == []


@pytest.mark.parametrize(("name", "change"), [
    ("cluster of 4", ("mhc_load_bf16(s_x + (k * 4 + c)", "mhc_load_bf16(s_x + (0 * 4 + c)")),
    ("slab and streamed", ("+ token * 24", "+ (token & ~1LL) * 24")),
])  # fmt: skip
def test_a_row_that_reads_its_neighbours_is_seen(name: str, change: tuple[str, str]) -> None:
    plan = plans(name)["decode"]
    assert change[0] in plan.source
    assert dependent(name, 64, plan, source=plan.source.replace(*change))


# ---- D10 ------------------------------------------------------------------------------------------------------
ORDERS = ("descending", "random", "warp-greedy", "ascending")
FORMS: dict[str, dict[str, Any]] = {
    "unfused": {"fuse": "none"},
    "one block a token": {"fuse": "pre", "cluster": 1},
    "clusters": {"fuse": "pre", "cluster": 4},
    "streamed": {"fuse": "pre", "cluster": 1, "slab": "global", "regime": "prefill"},
}


@pytest.mark.parametrize("form", FORMS)
def test_no_row_takes_the_norm_of_another(form: str) -> None:
    """Rows that double from token to token, in every order of threads: each is the row alone."""
    program = mhcgen.build(hidden=1024, projection="fma", iters=2)
    plan, apart = mhcgen.compile(program, **FORMS[form]), mhcgen.compile(program, "none").load("host")
    module = plan.load("host")
    inputs = discriminating(program, 100, "D10")
    assert inputs is not None
    alone = [apart(**{**inputs, "x": inputs["x"][t : t + 1]}) for t in range(100)]
    for tokens, order in zip((17, 31, 33, 64, 100), (*ORDERS, "random"), strict=True):
        out = module(**{**inputs, "x": inputs["x"][:tokens]}, launch_options={"order": order, "seed": tokens})
        for name, array in out.items():
            wrong = [t for t in range(tokens) if array[t].tobytes() != alone[t][name][0].tobytes()]
            assert wrong == [], (name, tokens, order)
