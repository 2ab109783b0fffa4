"""A dry device, and a bench on it."""

from __future__ import annotations

import pytest

from mhcgen.bench.device import Dry, ticking
from mhcgen.bench.floor import Floor
from mhcgen.bench.measure import Bench


@pytest.fixture
def device() -> Dry:
    return Dry(ticking(2.0))


@pytest.fixture
def bench(device: Dry) -> Bench:
    return Bench(device, Floor(copy_rate=4.0e6, null_us=1.0))
