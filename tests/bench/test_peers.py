"""Rivals: said so where they are absent, compared with our own result before they are timed."""

from __future__ import annotations

import sys
import types
from typing import Any

import fake_torch
import numpy as np
import pytest

from mhcgen.bench import peers
from mhcgen.bench.cases import case
from mhcgen.bench.device import Dry
from mhcgen.bench.floor import Floor
from mhcgen.bench.measure import Bench
from mhcgen.bench.peers import PEERS, Peer, measure_peer, peers_of, settings_of
from mhcgen.build import build
from mhcgen.errors import UsageError
from mhcgen.inputs import make_inputs
from mhcgen.reference import run as reference

SMALL: dict[str, Any] = {"dtype": "bf16", "hidden": 64, "functions": "fast", "sumsq": "fp32"}


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A `torch` in numpy."""
    made = fake_torch.module()
    monkeypatch.setitem(sys.modules, "torch", made)
    monkeypatch.setattr(peers, "_compiled", {})  # what a torch on a GPU compiled stays its own
    found = peers.importlib.util.find_spec
    monkeypatch.setattr(
        peers.importlib.util, "find_spec", lambda name: object() if name == "torch" else found(name)
    )
    return made


@pytest.mark.parametrize("name", list(PEERS))
def test_an_absent_rival_is_said_to_be_absent(bench: Bench, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: None)
    what = next(iter(PEERS[name].ops))
    row = measure_peer(bench, PEERS[name], case(what, **SMALL), 1)
    assert row is not None
    assert row["error"] == "not installed: torch"
    assert (row["note"], row["what"]) == (name, what)
    assert "us" not in row


def test_a_torch_that_sees_no_gpu_is_said_once(torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PEERS["torch"].missing() == ""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert PEERS["torch"].missing() == f"not usable: torch {torch.__version__} sees no GPU"


def test_a_rival_whose_import_fails_is_no_accident(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers.importlib.util, "find_spec", lambda module: object())

    def broken(name: str) -> Any:
        raise OSError("libcudart.so.12: cannot open shared object file")

    monkeypatch.setattr(peers.importlib, "import_module", broken)
    assert PEERS["liger"].missing() == (
        "not usable: import of torch: OSError: libcudart.so.12: cannot open shared object file"
    )


def test_a_rival_without_such_a_function_has_no_row(bench: Bench) -> None:
    assert measure_peer(bench, PEERS["liger"], case("finish", **SMALL), 1) is None
    assert measure_peer(bench, PEERS["torch"], case("boundary", **SMALL), 1) is None


def test_names_of_rivals() -> None:
    assert peers_of("") == ()
    assert [p.name for p in peers_of("liger, torch,liger")] == ["liger", "torch"]
    assert peers_of("all") == tuple(PEERS.values())
    assert list(PEERS) == ["torch", "torch-compile", "liger", "flashinfer", "tilekernels", "transformer-engine"]
    with pytest.raises(UsageError) as caught:
        peers_of("torch,lgier")
    assert caught.value.code == "U-PEER"


def test_rivals_get_the_constants_of_the_program() -> None:
    settings = settings_of(build(iters=7, rms_eps=1e-5, hc_eps=1e-4))
    assert settings == peers.Settings(n=4, iters=7, rms_eps=1e-5, hc_eps=1e-4, post_mult=2.0)


@pytest.mark.parametrize("what", ["finish", "pre", "post"])
def test_the_plain_formula_is_the_program(torch: types.ModuleType, what: str) -> None:
    """In fp32, against the float64 reference."""
    program = case(what, **{**SMALL, "dtype": "fp32"}).program
    inputs = make_inputs(program, 5)
    tensors = {name: array.view(fake_torch.Tensor) for name, array in inputs.items()}
    made = peers.formula(what, settings_of(program))(tensors)
    want = reference(program, inputs)
    assert set(made) == set(want)
    for name in want:
        assert np.abs(np.asarray(made[name]) - want[name]).max() <= 2e-5 * np.abs(want[name]).max(), name


def test_each_token_count_is_compiled_anew(
    torch: types.ModuleType, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: done.append("reset"))

    def compile(op: Any, dynamic: bool, fullgraph: bool) -> Any:
        assert fullgraph and not dynamic
        done.append("compile")
        return op

    monkeypatch.setattr(torch, "compile", compile)
    for tokens in (1, 3, 3):
        measure_peer(bench, PEERS["torch-compile"], case("post", **SMALL), tokens)
    assert done == ["reset", "compile"] * 2


@pytest.mark.parametrize("name", ["torch", "torch-compile"])
@pytest.mark.parametrize("what", ["finish", "pre", "post"])
def test_a_rival_is_checked_then_timed(torch: types.ModuleType, bench: Bench, name: str, what: str) -> None:
    before = torch.cuda.CUDAGraph.replays
    row = measure_peer(bench, PEERS[name], case(what, **SMALL), 3)
    assert row is not None and "error" not in row, row.get("error")
    assert row["us"] == 1.0  # 32 us over 32 launches, by the clock of the fake
    assert max(row["distance"].values()) < peers.TOLERANCE
    assert row["options"] == {}
    assert torch.cuda.CUDAGraph.replays - before == 3 + 20


@pytest.mark.parametrize("spoiled", [1.1, float("nan"), float("inf")])
def test_a_rival_that_computes_something_else_is_not_timed(
    torch: types.ModuleType, bench: Bench, spoiled: float
) -> None:
    def wrong(tensors: peers.Tensors, settings: peers.Settings) -> Any:
        run = PEERS["torch"].ops["post"](tensors, settings)
        return lambda: {name: (value.float() * spoiled).view(fake_torch.Tensor) for name, value in run().items()}

    row = measure_peer(bench, Peer("wrong", "torch", {"post": wrong}), case("post", **SMALL), 2)
    assert row is not None
    assert "us" not in row
    assert "of our norm away" in row["error"]
    assert row["distance"]["x_next"] > peers.TOLERANCE


def test_rivals_rotate_as_we_do(torch: types.ModuleType, monkeypatch: pytest.MonkeyPatch, device: Dry) -> None:
    monkeypatch.setattr(peers.timing, "ROTATION_BYTES", 200_000)
    bench = Bench(device, Floor(1.0, 1.0))
    one = case("post", **SMALL)
    ours = bench.measure(one, 64)
    row = measure_peer(bench, PEERS["torch"], one, 64)
    assert row is not None
    assert row["sets"] == ours["sets"] > 1
