"""Bytes moved once, and the larger of two limits."""

from __future__ import annotations

import numpy as np
import pytest

from mhcgen.bench.device import COPY_BYTES, Dry
from mhcgen.bench.floor import Floor, bytes_once, measure_floor, tensor_bytes
from mhcgen.bench.parts import only
from mhcgen.build import build
from mhcgen.inputs import make_inputs
from mhcgen.verify import verify

N, H = 4, 4096


def test_post_reads_two_and_writes_one() -> None:
    """20 * H bytes a token in bf16 (peers count 36 for two passes), and the small gates."""
    program = build(scope="post", dtype="bf16")
    streams, branch, gates = N * H * 2, H * 2, 4 * (N + N * N)
    assert bytes_once(program, 1) == 2 * streams + branch + gates
    assert bytes_once(program, 7) == 7 * bytes_once(program, 1)


def test_parameters_count_once_whatever_the_tokens() -> None:
    program = build(projection="fma", dtype="bf16")
    parameters = 4 * (24 * N * H + 3 + 24)
    per_token = N * H * 2 + H * 2 + 4 * (N + N + N * N)
    for tokens in (0, 1, 64):
        assert bytes_once(program, tokens) == parameters + tokens * per_token


def test_values_between_stages_are_free() -> None:
    fused, apart = build(hidden=64), build(hidden=64, norm=True)
    extra = tensor_bytes(apart, "norm_weight", 3) + tensor_bytes(apart, "z", 3)
    assert bytes_once(apart, 3) == bytes_once(fused, 3) + extra


@pytest.mark.parametrize("quant", ["q8", "fp8"])
def test_bytes_are_those_of_the_arrays(quant: str) -> None:
    program = build(hidden=96, streams=3, dtype="fp16", norm=True, quant=quant)
    for name, array in make_inputs(program, 5).items():
        assert tensor_bytes(program, name, 5) == array.nbytes
    assert tensor_bytes(program, "q", 5) == 5 * 96


def test_the_floor_is_the_larger_limit() -> None:
    floor = Floor(copy_rate=4.0e6, null_us=0.9)
    assert floor.us(100) == 0.9
    assert floor.us(40_000_000) == floor.bytes_us(40_000_000) == 10.0
    assert floor.terabytes_per_second == 4.0


def test_a_copy_counts_what_it_reads_and_what_it_writes(device: Dry) -> None:
    floor = measure_floor(device)
    assert floor.copy_rate == 2 * COPY_BYTES / 2.0
    assert floor.null_us == 2.0


def test_a_part_is_a_program_of_its_own() -> None:
    whole = build(hidden=64, projection="fma")
    for stage in whole.stages:
        part = only(whole, stage.name)
        verify(part)
        assert [s.name for s in part.stages] == [stage.name]
        assert {t.name for t in part.of_role("result")} == set(stage.writes)
        assert {t.name for t in part.of_role("input", "parameter")} == set(stage.reads)
        assert np.prod(part.shape(stage.writes[0], 2)) > 0
