"""NVIDIA/Megatron-LM #5106: reference, plain and fused code each followed a rule of their own for the Sinkhorn's eps.

The rule here: `sum + eps` everywhere, softmax first, no eps on post. D5 tells it from `max(sum, eps)`, which ends
at 0.25, 0.25, 0.25, 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import mhcgen
from mhcgen import reference
from mhcgen.inputs import discriminating

PROGRAM = mhcgen.build(hidden=16)
D5: dict[str, Any] = dict(discriminating(PROGRAM, 2, "D5") or {})
SCHEDULES: list[dict[str, Any]] = [
    {"fuse": "none"},
    {"fuse": "seed", "placement": "shared"},
    {"fuse": "pre", "placement": "shared"},
    {"fuse": "pre", "placement": "row"},
    {"fuse": "pre", "placement": "element"},
    {"fuse": "pre", "placement": "registers"},
    {"fuse": "pre", "sync": "block"},
]


def test_the_reference_ends_at_a_quarter() -> None:
    assert reference.run(PROGRAM, D5)["comb"] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_every_schedule_ends_at_a_quarter(schedule: dict[str, Any]) -> None:
    out = mhcgen.compile(PROGRAM, **schedule).load("host")(**D5)
    assert out["comb"] == pytest.approx(0.25, abs=1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES, ids=str)
def test_wide_logits_follow_the_same_rule(schedule: dict[str, Any]) -> None:
    """N(0, 10^2) logits, where adding and clamping end up to 0.9 apart."""
    inputs = dict(D5)
    generator = np.random.default_rng(4)
    inputs["mixes"] = generator.normal(0, 10, inputs["mixes"].shape).astype(np.float32)
    out = mhcgen.compile(PROGRAM, **schedule).load("host")(**inputs)
    assert out["comb"] == pytest.approx(reference.run(PROGRAM, inputs)["comb"], abs=1e-4)


def test_post_has_no_eps() -> None:
    inputs = {**D5, "base": np.full(24, -1e4, np.float32)}
    out = mhcgen.compile(PROGRAM, "pre").load("host")(**inputs)
    assert not out["post"].any()
    assert np.array_equal(out["pre"], np.full((2, 4), 1e-6, np.float32))


def test_the_text_states_the_rule() -> None:
    source = mhcgen.compile(mhcgen.build(hidden=16, hc_eps=3e-3), "pre", placement="row").source
    assert source.count("0.003f") >= 3  # pre gates, softmax, sums
