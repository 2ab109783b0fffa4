"""Values sent within a cluster and counted on arrival: right in every order, each wait a mutant, each rule broken."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from host_cases import ORDERS, Broken, signature, source

from mhcgen.backends.host import Finding, HostModule, LaunchReport
from mhcgen.backends.host.abi import RULES

KERNELS = ("moments", "rotate")
CLUSTER, CLUSTERS, THREADS = 4, 3, 96

Array = npt.NDArray[Any]


@cache
def module(text: str, *, race: bool) -> HostModule:
    kernels = [signature(name, x="const float*", out="float*") for name in KERNELS]
    return HostModule(text, kernels, name="arrivals", race=race)


def run_kernel(host: HostModule, kernel: str, order: str, seed: int = 0) -> tuple[Array, Array, LaunchReport]:
    """Input, output and report of one launch of three clusters."""
    x = np.random.default_rng(3).standard_normal((CLUSTER * CLUSTERS, THREADS)).astype(np.float32)
    out = np.zeros((CLUSTER * CLUSTERS, 32 if kernel == "moments" else THREADS), np.float32)
    report = host.launch(
        kernel,
        CLUSTER * CLUSTERS,
        THREADS,
        [x, out],
        cluster=CLUSTER,
        uninitialised={"out"},
        order=order,
        seed=seed,
    )
    return x, out, report


# ---- correct kernels ----------------------------------------------------------------------------------------------


def expected(kernel: str, x: Array) -> Array:
    by_cluster = x.reshape(CLUSTERS, CLUSTER, -1).astype(np.float64)
    if kernel == "moments":
        pair = np.stack([by_cluster.sum((1, 2)), (by_cluster**2).sum((1, 2))], axis=1)
        return np.repeat(np.tile(pair, 16), CLUSTER, axis=0)
    warps = [np.roll(by_cluster[:, :, 32 * w : 32 * w + 32], 1 + w, axis=1) for w in range(3)]
    return np.concatenate(warps, axis=2)[:, :, ::-1].reshape(x.shape)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("race", [False, True], ids=["plain", "race"])
def test_correct_kernels_give_the_same_bits_in_every_order(kernel: str, race: bool) -> None:
    bits = set()
    for order in ORDERS:
        for seed in range(4):
            x, out, report = run_kernel(module(source("arrivals"), race=race), kernel, order, seed)
            assert report.ok, report.text
            bits.add(out.tobytes())
    assert len(bits) == 1
    want = expected(kernel, x)
    assert np.max(np.abs(out - want)) <= 2e-6 * np.max(np.abs(want))


# ---- every statement matters --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Mutant:
    """The kernels without one statement, and the rules one of which must be named."""

    kernel: str
    line: int
    rules: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.line}"


def mutants() -> Iterator[Mutant]:
    text = source("arrivals")
    for match in re.finditer(r"\w+\([^()]*\);  // ([a-z -]+)\n", text):
        kernel = [name for name in KERNELS if f" {name}(" in text[: match.start()]][-1]
        line = text.count("\n", 0, match.start()) + 1
        yield Mutant(kernel, line, tuple(match[1].split()), f"{text[: match.start()]};\n{text[match.end() :]}")


MUTANTS = list(mutants())


def races_with_sends(report: LaunchReport) -> list[Finding]:
    """An access that comes before the send in this order is an ordinary race with it."""
    races = [f for f in report.findings if f.kind == "race" and "send" in {place.action for place in f.places}]
    for finding in races:
        assert finding.buffer.startswith("shared ") and finding.owner is not None
        assert finding.rule == ("arrivals-in-flight" if finding.places[0].action == "send" else "race")
    return races


def test_there_is_a_mutant_for_every_statement_that_orders() -> None:
    assert len(MUTANTS) == 9


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_race_mode_reports_the_missing_statement(mutant: Mutant) -> None:
    for order, seed in (("ascending", 0), ("descending", 0), ("random", 1), ("warp-greedy", 2)):
        report = run_kernel(module(mutant.text, race=True), mutant.kernel, order, seed)[2]
        if mutant.rules == ("arrivals-in-flight",):
            found = races_with_sends(report)
        else:
            found = [f for f in report.findings if f.rule in mutant.rules]
        assert found, report.text
        assert all(line > 0 for finding in found for line in finding.lines)


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.rules == ("arrivals-in-flight",)], ids=str)
def test_who_does_not_wait_reads_stale_memory_in_plain_mode(mutant: Mutant) -> None:
    outputs = [run_kernel(module(mutant.text, race=False), mutant.kernel, order)[1] for order in ORDERS]
    assert any(np.isnan(out).any() for out in outputs)


# ---- rules, with the smallest kernel that breaks each -------------------------------------------------------------

HEAD = (
    'extern "C" __global__ void k(float* o) {\n  const int t = threadIdx.x, b = blockIdx.x, other = ~b & 1;\n'
    "  __shared__ float s[8]; __shared__ __align__(8) unsigned long long c, e[65];\n"
    "  const auto sync = [] { mhc_host_cluster_arrive(); mhc_host_cluster_wait(); };\n"
)
START = "if (t == 0) mhc_host_arrivals_expect(&c, 8);\n sync();\n"  # lines 5 and 6
SENT = START + "if (t < 2)\n mhc_host_send(s + t, 1.0f + t, &c, other);\n"  # lines 7 and 8
WAIT = "mhc_host_arrivals_wait(&c);\n"


def run(body: str, *, race: bool = True, blocks: int = 2, **options: Any) -> tuple[Array, LaunchReport]:
    """Launch a kernel of blocks of 64 threads, in clusters of two; its body starts at line 5."""
    host = HostModule(HEAD + body + "\n}", [signature("k", o="float*")], name="k", race=race)
    o = np.zeros(256, np.float32)
    return o, host.launch("k", blocks, 64, [o], cluster=2, **options)


BROKEN = (
    Broken("arrivals-excess", START + "if (t < 3)\n mhc_host_send(s + t, 1.0f, &c, other);\n" + WAIT, (5, 8)),
    Broken("arrivals-no-start", "sync();\n if (t == 0)\n mhc_host_send(s, 1.0f, &c, other);", (7,), stops=True),
    Broken("arrivals-no-start", "sync();\n if (t == 9 && b == 1)\n mhc_host_arrivals_wait(&c);", (7,), stops=True),
    Broken(
        "arrivals-unordered",
        "if (t == 0) mhc_host_arrivals_expect(&c, 0);\n if (t == 33)\n mhc_host_arrivals_wait(&c);",
        (5, 7),
        in_plain_mode=False,
    ),
    Broken("arrivals-twice", SENT + WAIT + "if (t == 0)\n mhc_host_arrivals_expect(&c, 8);", (5, 11)),
    Broken("arrivals-bytes", "if (t == 0)\n mhc_host_arrivals_expect(&c, -4);\n sync();", (6,), stops=True),
    Broken("arrivals-bytes", "if (t == 0)\n mhc_host_arrivals_expect(&c, 1 << 20);\n sync();", (6,), stops=True),
    Broken(
        "arrivals-too-many",
        "if (t == 0) for (int i = 0; i < 65; ++i)\n mhc_host_arrivals_expect(e + i, 0);\n sync();",
        (6,),
        stops=True,
    ),
    Broken("arrivals-not-awaited", SENT, (5,)),
    Broken("arrivals-after-exit", START + "if (b == 1) return;\n sync();\n mhc_host_send(s, 1.0f, &c, 1);", (9,)),
    Broken("oob-rank", START + "if (t == 0)\n mhc_host_send(s, 1.0f, &c, 2);", (8,), stops=True),
    Broken("oob-rank", START + "if (t == 0)\n mhc_host_send(s, 1.0f, &c, -1);", (8,), stops=True),
    Broken("oob-map", START + "if (t == 0)\n mhc_host_send(o, 1.0f, &c, 1);", (8,), stops=True),
    Broken("oob-map", "auto* p = (unsigned long long*)o;\n mhc_host_arrivals_expect(p, 8);", (6,), stops=True),
    Broken(
        "misaligned",
        START + "if (t == 0)\n mhc_host_send((double*)(s + 1 - ((unsigned long long)s / 4 & 1)), 1.0, &c, 1);",
        (8,),
        stops=True,
    ),
)


@pytest.mark.parametrize("broken", BROKEN, ids=str)
def test_each_rule_names_its_places(broken: Broken) -> None:
    broken.check(run)


def test_every_rule_is_broken_here() -> None:
    rules = {broken.rule for broken in BROKEN} | {rule for mutant in MUTANTS for rule in mutant.rules}
    assert {rule for rule in RULES if rule.startswith("arrivals-")} <= rules


def test_a_wait_that_cannot_end_says_what_is_missing() -> None:
    for race in (False, True):
        _, report = run(START + "if (t == b)\n mhc_host_send(s + t, 1.0f, &c, 0);\n if (t < 32)\n" + WAIT, race=race)
        assert not report.completed
        (finding,) = [f for f in report.findings if f.kind == "deadlock"]
        assert "32 live threads all wait" in finding.text
        text = "warp 0 of block 1, lanes 0-31 wait in mhc_host_arrivals_wait (8 of 8 bytes are missing) at k.cu:10"
        assert text in finding.text
        _, report = run(START + "if (t == 0)\n mhc_host_send(s + t, 1.0f, &c, other);\n" + WAIT, race=race)
        assert "warps 0-1 of blocks 0-1, lanes 0-31 wait" in report.text
        assert "(4 of 8 bytes are missing)" in report.text


def test_lanes_that_wait_for_others_of_their_warp_are_no_fault_of_their_own() -> None:
    _, report = run(START + "if (t == 0)\n mhc_host_arrivals_wait(&c);\n __syncwarp();")
    assert {f.kind for f in report.findings} == {"deadlock"}


def test_a_late_send_is_reported_in_every_order() -> None:
    """Either the send comes too late, or the block had not waited for it."""
    for order in ORDERS:
        for race in (False, True):
            _, report = run(SENT, race=race, order=order, seed=2)
            assert "arrivals-not-awaited" in {f.rule for f in report.findings}
            body = START + "if (t < 2) mhc_host_send(s + t, 1.0f, &c, other);\n" + WAIT
            assert run(body, race=race, order=order, seed=2)[1].ok


FETCH = "o[64 * b + t] = s[t & 1];\n"
CLEAN = {
    "some wait and the others end": SENT + "if (t >= 32) {\n" + WAIT + FETCH + "}",
    "again, and long after": SENT + WAIT + FETCH + WAIT + "sync();\n" + WAIT + "sync();\n" + FETCH,
    "doubles to itself": (
        START
        + "double* d = (double*)(e + 1);\n if (t == 7) mhc_host_send(d, 0.1, &c, b & 1);\n"
        + WAIT
        + "o[64 * b + t] = *d;"
    ),
    "nothing to come": "if (t == 0) mhc_host_arrivals_expect(&c, 0);\n __syncthreads();\n" + WAIT,
    "a counter for each value": (
        "if (t < 2) mhc_host_arrivals_expect(e + t, 4);\n sync();\n"
        " if (t < 2) mhc_host_send(s + t, t, e + t, other);\n"
        " mhc_host_arrivals_wait(e + (t & 1));\n" + FETCH
    ),
    "a block barrier passes a wait on": SENT + "if (t == 9)\n" + WAIT + "__syncthreads();\n" + FETCH,
    "a warp barrier passes it on": SENT + "if (t % 32 == 9)\n" + WAIT + "__syncwarp();\n" + FETCH,
    "a named barrier passes it on": SENT + "if (t == 9)\n" + WAIT + "mhc_host_bar_sync(1, 64);\n" + FETCH,
    "a cluster barrier passes it on": (
        SENT + "if (t == 9)\n" + WAIT + "sync();\n"
        " o[64 * b + t] = static_cast<float*>(mhc_host_map_shared_rank(s, other))[t & 1];\n sync();"
    ),
    "the place may be written before and after": (
        "if (t < 8) s[t] = 0; " + SENT + WAIT + "__syncthreads();\n"
        " if (t < 2) s[t] += 1;\n __syncthreads();\n" + FETCH
    ),
}


@pytest.mark.parametrize("name", CLEAN)
def test_correct_synchronisation_is_not_reported(name: str) -> None:
    outputs = set()
    for race in (False, True):
        for order in ORDERS:
            o, report = run(CLEAN[name], race=race, blocks=4, order=order, seed=5)
            assert report.ok, report.text
            assert np.isfinite(o).all()
            outputs.add(o.tobytes())
    assert len(outputs) == 1


RACES = {
    "a barrier is no wait": SENT + "sync();\n" + FETCH + WAIT,
    "not even for the sender": START + "if (t == 3) { mhc_host_send(s, 1.0f, &c, b);\n o[b] = s[0];\n }",
    "the wait of another thread": SENT + "if (t == 9)\n" + WAIT + FETCH,
    "two senders to one place": START + "if (t < 2) mhc_host_send(s, 1.0f, &c, other);\n" + WAIT,
    "reading while it may come": START + "if (t == 40) s[0] = 1;\n" + SENT[len(START) :] + WAIT,
    "what the sender did before": (
        START
        + "if (t == 0) o[b] = 1;\n if (t < 2) mhc_host_send(s + t, 1.0f, &c, other);\n"
        + WAIT
        + "if (t == 0) o[9 + b] = o[other];\n"
    ),
}


@pytest.mark.parametrize("name", RACES)
def test_nothing_but_the_wait_orders_a_send(name: str) -> None:
    for order in ORDERS:
        _, report = run(RACES[name], order=order, seed=1)
        races = [f for f in report.findings if f.kind == "race"] if "before" in name else races_with_sends(report)
        assert races, report.text
