"""Asynchronous copies to shared memory: right in every order, each wait and barrier a mutant, every rule broken."""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_cases import ORDERS, Broken, signature, source

from mhcgen.backends.host import HostModule, LaunchReport

KERNEL = "reverse_rows"
BLOCKS, ROUNDS, COLUMNS = 3, 5, 256

Array = npt.NDArray[Any]


@cache
def module(text: str, *, race: bool) -> HostModule:
    return HostModule(
        text, [signature(KERNEL, x="const float*", out="float*", rounds="int")], name="copies", race=race
    )


def run_kernel(host: HostModule, order: str, seed: int = 0, **options: Any) -> tuple[Array, Array, LaunchReport]:
    """Input, output and report of one launch."""
    x = np.random.default_rng(3).standard_normal((BLOCKS, ROUNDS, COLUMNS)).astype(np.float32)
    out = np.zeros_like(x)
    args: list[Any] = [x, out, ROUNDS]
    return x, out, host.launch(KERNEL, BLOCKS, 64, args, uninitialised={"out"}, order=order, seed=seed, **options)


@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_the_correct_kernel_is_clean_in_every_order(race: bool) -> None:
    for order in ORDERS:
        for seed in range(4):
            x, out, report = run_kernel(module(source("copies"), race=race), order, seed)
            assert report.ok, report.text
            assert np.array_equal(out, x[:, :, ::-1])


def test_a_copy_counts_as_one_load_of_its_source() -> None:
    report = run_kernel(module(source("copies"), race=True), "ascending", count_accesses=True)[2]
    assert (report.accesses["x"].loads == 1).all()


MUTANTS = {  # by the line of the statement that is missing: the scope, and the text
    source("copies").count("\n", 0, match.start()) + 1: (
        match[2],
        source("copies").replace(match[0], ";\n"),
    )
    for match in re.finditer(r"(\w+\(\));  // ([\w-]+)\n", source("copies"))
}


@pytest.mark.parametrize("line", MUTANTS)
def test_race_mode_reports_the_missing_statement(line: int) -> None:
    scope, text = MUTANTS[line]
    for order, seed in (("ascending", 0), ("descending", 0), ("random", 1), ("warp-greedy", 2)):
        report = run_kernel(module(text, race=True), order, seed)[2]
        found = [f for f in report.findings if f.kind == "race" and f.scope == scope]
        assert found, report.text
        assert all(f.buffer == "shared tile" and "copy" in {p.action for p in f.places} for f in found)


@pytest.mark.parametrize("line", MUTANTS)
def test_stale_memory_shows_in_the_results_of_some_order(line: int) -> None:
    runs = [run_kernel(module(MUTANTS[line][1], race=False), order) for order in ORDERS]
    assert any(not np.array_equal(out, x[:, :, ::-1]) for x, out, _ in runs)


def test_there_is_a_mutant_for_the_wait_and_the_barrier() -> None:
    assert [scope for scope, _ in MUTANTS.values()] == ["same-warp", "across-warps"]


# ---- rules, with the smallest kernel that breaks each -------------------------------------------------------------

HEAD = (
    'extern "C" __global__ void k(const float* x, float* o) {\n  const int t = threadIdx.x;\n'
    "  __shared__ __align__(16) float s[256], r[4];\n"
)
WAIT = "mhc_host_copies_wait();\n"


def run(body: str, *, race: bool = True, **options: Any) -> tuple[Array, LaunchReport]:
    """Launch a kernel of 64 threads; its body starts at line 4."""
    host = HostModule(HEAD + body + "\n}", [signature("k", x="const float*", o="float*")], name="k", race=race)
    o = np.zeros(256, np.float32)
    return o, host.launch("k", 1, 64, [np.arange(260, dtype=np.float32), o], dynamic_shared=64, **options)


BROKEN = (
    Broken("misaligned", "if (t == 3)\n mhc_host_copy_async(s + 2, x);\n" + WAIT, (5,), stops=True),
    Broken("misaligned", "if (t == 3)\n mhc_host_copy_async(s, x + 1);\n" + WAIT, (5,), stops=True),
    Broken("copy-memory", "if (t == 3)\n mhc_host_copy_async(o, x);\n" + WAIT, (5,), stops=True),
    Broken("copy-memory", "if (t == 3)\n mhc_host_copy_async(s, r);\n" + WAIT, (5,), stops=True),
    Broken("copy-not-awaited", "if (t == 3)\n mhc_host_copy_async(s, x);", (5,)),
    Broken("copy-not-awaited", WAIT + "mhc_host_copy_async(s + 4 * t, x + 4 * t);", (5,)),
    Broken(
        "copy-in-flight",
        "mhc_host_copy_async(s + 4 * t, x);\n o[t] = s[4 * t];\n" + WAIT,
        (4, 5),
        kind="race",
        in_plain_mode=False,
    ),
    Broken(  # a barrier does not help: nobody has waited
        "copy-in-flight",
        "mhc_host_copy_async(s + 4 * t, x);\n __syncthreads();\n o[t] = s[t ^ 32];\n __syncthreads();\n" + WAIT,
        (4, 6),
        kind="race",
        in_plain_mode=False,
    ),
    Broken(
        "copy-in-flight",
        "mhc_host_copy_async(s + 4 * t, x);\n s[4 * t] = 1;\n" + WAIT,
        (4, 5),
        kind="race",
        in_plain_mode=False,
    ),
    Broken(
        "copy-in-flight",
        "mhc_host_copy_async(s + 4 * t, x);\n mhc_host_copy_async(s + 4 * t, x);\n" + WAIT,
        (4, 5),
        kind="race",
        in_plain_mode=False,
    ),
    Broken(
        "race",
        "s[t] = t;\n __syncthreads();\n o[t] = s[t ^ 32];\n if (t < 16) mhc_host_copy_async(s + 4 * t, x);\n"
        " __syncthreads();\n" + WAIT,
        (6, 7),
        in_plain_mode=False,
    ),
    Broken("oob-guard", "mhc_host_copy_async(s + 4 * t, x + 4 * t + 8);\n" + WAIT, (4,), in_plain_mode=False),
    Broken(
        "oob-shared",
        "extern __shared__ float d[];\n mhc_host_copy_async(d + 4 * t, x);\n" + WAIT,
        (5,),
        in_plain_mode=False,
    ),
)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_each_rule_names_its_places(broken: Broken) -> None:
    broken.check(run)


def test_who_forgets_the_wait_reads_poison() -> None:
    o, report = run("mhc_host_copy_async(s + 4 * t, x + 4 * t);\n __syncthreads();\n o[t] = s[t];", race=False)
    assert np.isnan(o[:64]).all()
    assert "has never waited for 1 of its asynchronous copies (64 times)" in report.text


CLEAN = {
    "no copies at all": WAIT,
    "own bytes need no barrier": "mhc_host_copy_async(s + 4 * t, x + 4 * t);\n" + WAIT + "o[t] = s[4 * t] - 3 * t;",
    "again into the same place": (
        "for (int i = 0; i < 2; ++i) { mhc_host_copy_async(s + 4 * t, x + 4 * t);\n" + WAIT + "}\n __syncthreads();\n"
        " o[t] = s[t];"
    ),
    "many at once": (
        "if (t == 0) for (int i = 0; i < 64; ++i) mhc_host_copy_async(s + 4 * i, x + 4 * i);\n"
        + WAIT
        + "__syncthreads();\n"
        " o[t] = s[t];"
    ),
    "the source may change after the copy is issued": (
        "o[t] = t;\n __syncthreads();\n if (t < 16) mhc_host_copy_async(s + 4 * t, o + 4 * t);\n __syncthreads();\n"
        " o[t] = 0;\n" + WAIT + "__syncthreads();\n o[t] = s[t];"
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_correct_copies_are_not_reported(name: str) -> None:
    for race in (False, True):
        for order in ORDERS:
            o, report = run(CLEAN[name], race=race, order=order, seed=5)
            assert report.ok, report.text
            assert name == "no copies at all" or np.array_equal(o[:64], np.arange(64))
