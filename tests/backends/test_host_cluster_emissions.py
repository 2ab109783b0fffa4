"""Emissions with clusters: the bits of the unfused emission in every order, and nothing for race mode to report."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from host_cases import ORDERS, signature

import mhcgen
from mhcgen.backends.host import HostModule
from mhcgen.errors import RefusedError
from mhcgen.inputs import make_inputs
from mhcgen.models import MODELS
from mhcgen.runtime import Module, load

TOKENS = (1, 3, 8, 20)
#: fusion -> what is built for it
FUSIONS: dict[str, dict[str, Any]] = {
    "pre": {},
    "pre-norm": {"norm": True},
    "pre-norm-quant": {"norm": True, "quant": "q8"},
    "boundary": {"scope": "boundary"},
}
QUICK = {(1024, 4, "pre-norm-quant"), (1024, 3, "boundary"), (520, 2, "pre"), (257, 4, "pre-norm")}
#: Other matrices than the Sinkhorn's, and streams that lie side by side, have no steps for a cluster.
NO_CLUSTER = {
    "circulant-hc", "dhc", "ihc", "kromhc", "mhc-lite", "mhc.cu-static", "plain-hc", "transformer-engine",
}
SHAPES = [
    pytest.param(hidden, streams, fusion, marks=[pytest.mark.slow] * ((hidden, streams, fusion) not in QUICK))
    for hidden in (1024, 4096, 520, 257)
    for streams in (2, 3, 4, 8)
    for fusion in FUSIONS
]


def modules(hidden: int, streams: int, fusion: str, *, race: bool) -> tuple[Module, Module]:
    """The emission without fusion and the one with clusters."""
    program = mhcgen.build(streams=streams, hidden=hidden, projection="fma", **FUSIONS[fusion])
    clustered = mhcgen.compile(program, fusion, cluster=16)
    (kernel,) = (kernel for kernel in clustered.kernels if kernel.cluster > 1)
    assert "mhc_host_cluster_arrive" in clustered.source and kernel.cluster <= 16
    return load(mhcgen.compile(program), "host"), load(clustered, "host", race=race)


def same_bits(unfused: Module, clustered: Module, tokens: int, *orders: str) -> None:
    """With as many tokens a cluster as a launch of this size takes, and in the first order with all that fit."""
    inputs = make_inputs(unfused.program, tokens, tokens)
    want = unfused(**inputs)
    for order, full in ((orders[0], {"per_cluster": 16}), *((order, {}) for order in orders)):
        got = clustered(**inputs, launch_options={"order": order, "seed": tokens, **full})
        for launch in clustered.launches:
            assert launch.report.ok, launch.report.text
        assert [name for name in want if want[name].tobytes() != got[name].tobytes()] == []


@pytest.mark.parametrize(("hidden", "streams", "fusion"), SHAPES)
def test_clusters_give_the_bits_of_the_unfused_emission(hidden: int, streams: int, fusion: str) -> None:
    unfused, clustered = modules(hidden, streams, fusion, race=False)
    for tokens in TOKENS:
        same_bits(unfused, clustered, tokens, *ORDERS)


@pytest.mark.parametrize(("hidden", "streams", "fusion"), SHAPES)
def test_race_mode_finds_nothing(hidden: int, streams: int, fusion: str) -> None:
    unfused, clustered = modules(hidden, streams, fusion, race=True)
    for tokens in TOKENS[: 3 if hidden < 4096 else 2]:
        same_bits(unfused, clustered, tokens, "ascending", *(("random",) if tokens < 8 else ()))


@pytest.mark.parametrize(
    "model",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name not in {"deepseek-v4.1", "liger", *NO_CLUSTER}))
        for name in sorted(MODELS)
        if not name.startswith("gated")
    ],
)
def test_every_model_on_a_cluster(model: str) -> None:
    """deepseek-v4.1 norms what it collapses before it projects: its sends once went out before blocks had started."""
    program = mhcgen.build(model, streams=4, hidden=1024, dtype="bf16", projection="fma", norm=True)
    if model in NO_CLUSTER:
        with pytest.raises(RefusedError, match="P-CLUSTER"):
            mhcgen.compile(program, "pre-norm", cluster=16)
        return
    plan = mhcgen.compile(program, "pre-norm", cluster=16)
    assert max(kernel.cluster for kernel in plan.kernels) > 1
    same_bits(load(mhcgen.compile(program), "host"), load(plan, "host", race=True), 3, "ascending", "random")


def test_fp8_groups_lie_within_a_block() -> None:
    program = mhcgen.build(streams=4, hidden=1024, projection="fma", norm=True, quant="fp8")
    clustered = load(mhcgen.compile(program, "pre-norm-quant", cluster=16), "host", race=True)
    same_bits(load(mhcgen.compile(program), "host"), clustered, 5, *ORDERS)


def reported(changes: dict[str, str]) -> set[tuple[str, str]]:
    """Rules and scopes that race mode reports of a changed emission."""
    program = mhcgen.build(streams=4, hidden=1024, projection="fma")
    plan = mhcgen.compile(program, "pre", cluster=16)
    text = plan.source
    for old, new in changes.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    changed = load(plan, "host", race=True, source=text)
    changed(**make_inputs(program, 3, 0))
    return {(finding.rule, finding.scope) for finding in changed.launches[-1].report.findings}


def test_an_emission_that_does_not_wait_for_the_start_of_blocks_is_reported() -> None:
    halves = {
        "\n  mhc_cluster_arrive();  // waited": "\n  // waited",
        "\n  mhc_cluster_wait();  // every": "\n  // every",
    }
    assert ("arrivals-unordered", "") in reported(halves)


def test_an_emission_whose_arrivals_publish_nothing_is_reported() -> None:
    assert ("arrivals-unordered", "") in reported({"mhc_host_cluster_arrive()": "mhc_host_cluster_arrive_relaxed()"})


def test_an_emission_that_does_not_wait_for_its_copies_is_reported() -> None:
    assert ("copy-in-flight", "across-warps") in reported({"mhc_host_copies_wait();": ""})


def test_the_largest_cluster_of_the_largest_blocks() -> None:
    text = """extern "C" __global__ void k(int* o) {
  __shared__ int s[1024];
  const int t = threadIdx.x;
  s[t] = blockIdx.x;
  mhc_host_cluster_arrive();
  mhc_host_cluster_wait();
  o[blockIdx.x * 1024 + t] = *static_cast<int*>(mhc_host_map_shared_rank(s + t, t % 16));
  mhc_host_cluster_arrive();
  mhc_host_cluster_wait();
}
"""
    host = HostModule(text, [signature("k", o="int*")], race=True)
    o = np.zeros((16, 1024), np.int32)
    for order in ORDERS:
        report = host.launch("k", 16, 1024, [o], cluster=16, order=order)
        assert report.ok, report.text
        assert (o == np.arange(1024) % 16).all()
