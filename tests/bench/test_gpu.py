"""On a GPU: that times are of what they claim to be of."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from mhcgen.bench import timing
from mhcgen.bench.bandwidth import measure_bandwidth
from mhcgen.bench.cases import CASES, case
from mhcgen.bench.device import Gpu
from mhcgen.bench.facts import facts
from mhcgen.bench.floor import Floor, measure_floor
from mhcgen.bench.measure import Bench
from mhcgen.bench.peers import PEERS, measure_peer
from mhcgen.bench.phases import measure_phases
from mhcgen.bench.seed_tables import SeedTables
from mhcgen.build import build
from mhcgen.plan import Options
from mhcgen.tune import tune

pytestmark = pytest.mark.gpu
SMALL: dict[str, Any] = {"dtype": "bf16", "hidden": 1024, "functions": "fast", "sumsq": "fp32"}


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(scope="module")
def floor(gpu: Gpu) -> Floor:
    return measure_floor(gpu)


@pytest.fixture
def bench(gpu: Gpu, floor: Floor) -> Bench:
    return Bench(gpu, floor)


def test_the_limits_are_plausible(gpu: Gpu, floor: Floor) -> None:
    assert 0.05 < floor.terabytes_per_second < 50
    assert 0.1 < floor.null_us < 20
    head = facts(gpu, floor)
    assert head["dry"] is False
    assert json.loads(json.dumps(head))["gpu"]


@pytest.mark.parametrize("what", list(CASES))
@pytest.mark.parametrize("tokens", [1, 64, 300])
def test_every_case_is_above_its_floor(bench: Bench, what: str, tokens: int) -> None:
    row = bench.measure(case(what, **SMALL), tokens, methods=("graph", "back_to_back", "wall"), rounds=2)
    assert row["differing_bytes"] == 0
    assert row["us"] > 0.8 * bench.floor.bytes_us(row["bytes"])
    assert row["wall"]["us"] > row["back_to_back"]["low"] * 0.5


def test_arrays_go_and_come_unchanged(gpu: Gpu) -> None:
    import ml_dtypes

    host = np.arange(24, dtype=np.float32).reshape(4, 6).astype(ml_dtypes.bfloat16)
    there = gpu.put(host)
    again = gpu.repeated(there, 3)
    assert gpu.fetch(again).tobytes() == host.tobytes() * 3
    assert gpu.differing(there, gpu.put(host)) == 0
    host[3, 5] = -1
    assert gpu.differing(there, gpu.put(host)) in (1, 2)
    assert set(gpu.fetch(gpu.filled((3, 2), "bf16", 0xA5)).tobytes()) == {0xA5}


def test_twice_the_launches_take_twice_the_time(gpu: Gpu) -> None:
    import cupy

    source = cupy.full(1 << 24, 1.5, np.float32)
    target = cupy.empty_like(source)

    def copies(count: int) -> Any:
        def launch(_: int) -> None:
            for _ in range(count):
                target.data.copy_from_device_async(source.data, source.nbytes, cupy.cuda.get_current_stream())

        return launch

    one, two = (timing.graph_time(copies(count), count=8).median for count in (1, 2))
    assert 1.6 < two / one < 2.4
    assert timing.back_to_back(copies(1), launches=50, rounds=3).median == pytest.approx(one, rel=0.5)


def test_phases_are_within_the_kernel(bench: Bench) -> None:
    (table,) = measure_phases(bench, case("finish", {"mix_warp": "own", "slab": "registers"}, **SMALL), launches=10)
    assert 0 < table.cycles < 1_000_000
    assert all(0 <= p.begin + p.cycles <= 2 * table.cycles for p in table.phases)


def test_the_probe_streams(bench: Bench) -> None:
    row = measure_bandwidth(bench, 256, hidden=4096)
    assert row["read_GB_s"] > 0.3 * row["copy_GB_s"]


@pytest.mark.parametrize("name", list(PEERS))
@pytest.mark.parametrize("what", ["finish", "pre", "post"])
def test_rivals_agree_and_are_timed(bench: Bench, name: str, what: str) -> None:
    if PEERS[name].missing():
        pytest.skip(PEERS[name].missing())
    row = measure_peer(bench, PEERS[name], case(what, **{**SMALL, "hidden": 4096}), 8)
    if row is None:
        pytest.skip(f"{name} has no public function for {what}")
    assert "error" not in row, row
    assert row["us"] > 0


@pytest.mark.slow
def test_seed_tables(bench: Bench) -> None:
    tables = SeedTables({"streams": 4, "hidden": 4096}, (1,), 2)
    rows = [row for _, rows in tables.run(bench) for row in rows]
    assert [row for row in rows if "error" in row] == []


@pytest.mark.slow
def test_a_search_finds_nothing_slower(gpu: Gpu) -> None:
    report = tune(build(**SMALL), Options(fuse="pre"), (1,), gpu, keep=False)
    assert report.best.us <= report.trials[0].us
    assert [trial for trial in report.trials if trial.error] == []
