"""mhcgen.torch: what a CUDA call hands to the driver, seen without a GPU.

`Prepared` is given CPU tensors under a device number of their own, and launchers that run each launch on the CPU
executor: addresses, scalars, grids, clusters and order must be right for the bits to be.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch_cases import CASES, IDS, PLAIN, SMALL, as_tuple, call, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen.errors import InputError, InputTypeError
from mhcgen.plan import Plan
from mhcgen.runners import HostRunner
from mhcgen.torch import Setup, launch
from mhcgen.torch.cpu import as_numpy

STREAM = 0x77
#: Where a CPU tensor says it is.
CPU = -1


class Recorder:
    """Stands for a `Launcher`: runs the launch on the executor, with arrays found by their addresses."""

    def __init__(self, world: World, plan: Plan, scalar: bool, name: str) -> None:
        self.world, self.name, self.launches = world, name, 0
        self.runner, self.scalar = HostRunner(plan), scalar
        self.signature = self.runner.module(scalar).kernels[name]

    def launch(self, values: list[int], shape: launch.Shape, stream: int) -> None:
        assert stream == STREAM and len(values) == len(self.signature.params)
        arguments = [
            self.world.arrays[value] if param.ctype.endswith("*") else value
            for param, value in zip(self.signature.params, values, strict=True)
        ]
        grid, block, _, cluster, _ = shape
        options = {} if cluster is None else {"cluster": cluster}
        report = self.runner.module(self.scalar).launch(self.name, grid, block, arguments, **options)
        report.raise_if_found()
        self.launches += 1
        self.world.launched.append((self.name, self.scalar, grid, cluster))


class World:
    """Arrays by address, and launches in order."""

    def __init__(self) -> None:
        self.arrays: dict[int, np.ndarray[Any, Any]] = {}
        self.tensors: list[Any] = []
        self.launched: list[tuple[Any, ...]] = []

    def add(self, tensor: Any) -> Any:
        self.arrays[tensor.data_ptr()] = as_numpy(tensor)
        self.tensors.append(tensor)
        return tensor

    def allocate(self, sizes: Any, strides: Any, dtype: Any) -> Any:
        made = torch.empty_strided(sizes, strides, dtype=dtype)
        assert made.is_contiguous()
        return self.add(made)


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    if no_compiler():
        pytest.skip(f"no CPU executor: {no_compiler()}")
    made = World()

    def load(plan: Plan, scalar: bool, device: int, name: str) -> tuple[Recorder, ...]:
        assert device == CPU
        return tuple(Recorder(made, plan, scalar, kernel.name) for kernel in plan.kernels)

    monkeypatch.setattr(launch, "load_launchers", load)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(launch, "_allocators", lambda device: (made.allocate, made.allocate))
    monkeypatch.setattr(launch, "_stream", lambda device: STREAM)
    monkeypatch.setattr(launch, "_current", lambda: -1)
    return made


def prepared(world: World, name: str, setup: Setup, tensors: list[Any]) -> tuple[launch.Prepared, list[Any]]:
    given = [None if tensor is None else world.add(tensor) for tensor in tensors]
    return launch.Prepared(call(name, setup, tensors), CPU), given


def expected(name: str, setup: Setup, tensors: list[Any]) -> tuple[Any, ...]:
    with mhc.use_path("kernels"):
        return as_tuple(mhc.operator(name)(*tensors, setup.text))


@pytest.mark.parametrize("setup", [SMALL, SMALL.replace(fuse="none", dtype="bf16")], ids=["auto", "none-bf16"])
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_launches_give_the_bits_of_the_host_path(world: World, name: str, gemm: bool, setup: Setup) -> None:
    tensors = inputs(name, setup, gemm=gemm)
    record, given = prepared(world, name, setup, tensors)
    made = record.run(given)
    wanted = expected(name, setup, tensors)
    for result, want in zip(made, wanted, strict=True):
        assert as_numpy(result).tobytes() == as_numpy(want).tobytes()
    assert record.launches == len(record.plan.kernels) == len(world.launched)
    if setup.fuse == "auto":
        assert record.launches == 1 and not record.scratch


def test_clusters_and_many_tokens(world: World) -> None:
    setup = Setup("deepseek-v4", hidden=2048, iters=2)
    tensors = inputs("pre", setup, tokens=9)
    record, given = prepared(world, "pre", setup, tensors)
    made = record.run(given)
    assert world.launched[0][3] is not None, "sm_90 projects on a cluster"
    wanted = expected("pre", setup, tensors)
    assert all(torch.equal(a, b) for a, b in zip(made, wanted, strict=True))


def test_the_twin_runs_where_an_address_is_not_aligned(world: World) -> None:
    tensors = inputs("mean")
    flat = torch.zeros(tensors[0].numel() + 1)
    flat[1:] = tensors[0].flatten()
    record, _ = prepared(world, "mean", SMALL, tensors)
    off = world.add(flat[1:].view(3, 4, 16))
    (made,) = record.run([off])
    assert [scalar for _, scalar, *_ in world.launched] == [True]
    assert torch.equal(made, expected("mean", SMALL, tensors)[0])


def test_no_tokens_no_launch(world: World) -> None:
    for name in PLAIN:
        tensors = inputs(name, tokens=0)
        record, given = prepared(world, name, SMALL, tensors)
        assert all(result.shape[0] == 0 for result in record.run(given))
    assert world.launched == []


def test_no_token_count_compiles(world: World) -> None:
    tensors = inputs("pre", tokens=1)
    record, given = prepared(world, "pre", SMALL, tensors)
    record.run(given)
    loaded = dict(record._launchers)
    for tokens in (2, 3, 17):
        given[0] = world.add(torch.randn(tokens, 4, 16))
        record.run(given)
    assert record._launchers == loaded


def test_given_results_are_written_in_place(world: World) -> None:
    tensors = inputs("pre")
    record, given = prepared(world, "pre", SMALL, tensors)
    outs = [world.add(torch.full_like(t, torch.nan)) for t in expected("pre", SMALL, tensors)]
    made = record.run(given, outs)
    assert all(a is b for a, b in zip(made, outs, strict=True))
    assert not any(t.isnan().any() for t in outs)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (lambda x: x[:, :, :8].contiguous(), "I-SHAPE"),
        (lambda x: x.to(torch.bfloat16), "I-DTYPE"),
        (lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), "I-LAYOUT"),
        (lambda x: x[0], "I-SHAPE"),
        (lambda x: torch.tensor(1.0), "I-SHAPE"),
        (lambda x: x[:0, :, :8], "I-SHAPE"),
    ],
)
def test_the_quick_checks_end_in_the_slow_ones(world: World, change: Any, code: str) -> None:
    record, given = prepared(world, "pre", SMALL, inputs("pre"))
    assert record.run(given) is not None
    wrong = [change(given[0]), *given[1:]]
    assert record.run(wrong) is None
    with pytest.raises((InputError, InputTypeError)) as error:
        record.call.check([tensor for tensor in wrong if tensor is not None])
    assert error.value.code == code
    assert record.run([given[0], given[1][:-1], *given[2:]]) is None
    assert len(world.launched) == 1


def test_an_unequal_token_count_is_refused(world: World) -> None:
    record, given = prepared(world, "post", SMALL, inputs("post"))
    assert record.run([given[0], torch.zeros(2, 16), *given[2:]]) is None


def test_importing_and_tracing_touch_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mhcgen.torch.launch.load_driver", lambda: pytest.fail("a driver was asked for"))
    mhc.mean(inputs("mean")[0], setup=SMALL)
    torch.compile(lambda x: mhc.mean(x, setup=SMALL), fullgraph=True, backend="eager")(inputs("mean")[0])
