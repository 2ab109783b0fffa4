"""What only a device shows. deepseek-ai/DeepGEMM #448: registers were used again before an asynchronous product had
read them, seen only under load, in chains of launches and on side streams.

Also the GPU's half of other entries: D9 (11), T = 1024 to 8192 (14), an empty batch under capture (20), D13 (23) and
D14 (26).
"""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen.inputs import discriminating
from mhcgen.ir import Program

pytestmark = pytest.mark.gpu

CHAIN: dict[str, Any] = {"scope": "boundary", "projection": "fma", "dtype": "bf16", "hidden": 4096}
SCHEDULES: dict[str, dict[str, Any]] = {
    "unfused": {"fuse": "none"},
    "one block": {"fuse": "boundary", "cluster": 1},
    "cluster": {"fuse": "boundary", "cluster": 16},
    "dependent": {"fuse": "boundary", "cluster": 16, "dependent": True},
}


def to_device(arrays: dict[str, Any]) -> dict[str, Any]:
    from mhcgen.backends import cuda

    return {name: cuda.to_device(array) for name, array in arrays.items()}


def to_host(arrays: dict[str, Any]) -> dict[str, Any]:
    from mhcgen.backends import cuda

    return {name: cuda.to_host(array) for name, array in arrays.items()}


def per_token(program: Program) -> set[str]:
    return {t.name for t in program.tensors if t.shape[0] == "T"}


def repeated(program: Program, few: dict[str, Any], tokens: int) -> dict[str, Any]:
    """On the device: the rows of `few` over and over."""

    def many(array: Any) -> Any:
        return np.resize(array, (tokens, *array.shape[1:]))

    return to_device({name: many(array) if name in per_token(program) else array for name, array in few.items()})


def chain(module: Any, given: dict[str, Any], steps: int = 3) -> dict[str, Any]:
    """Boundaries one after another, each on what the last one made."""
    now = dict(given)
    for _ in range(steps):
        out: dict[str, Any] = module(**now)
        now |= {"x": out["x_next"], "post": out["post_next"], "comb": out["comb_next"]}
    return out


@pytest.mark.parametrize("tokens", [1, 20, 300])
@pytest.mark.parametrize("name", SCHEDULES)
def test_chains_repeat_on_two_streams_under_load(name: str, tokens: int) -> None:
    """500 chains without a wait between them: the bits of the host's unfused chain each time."""
    import cupy

    program = mhcgen.build(**CHAIN)
    module = mhcgen.compile(program, **SCHEDULES[name]).load("cuda")
    few = factories.inputs(program, 2)
    host = chain(mhcgen.compile(program, "none").load("host"), few)
    first = chain(module, repeated(program, few, tokens))
    for key, array in to_host(first).items():
        assert all(array[t].tobytes() == host[key][t % 2].tobytes() for t in range(tokens)), key
    cupy.cuda.Device().synchronize()
    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    wrong, own = [], []
    for stream in streams:
        with stream:
            own.append(repeated(program, few, tokens))
            wrong.append(cupy.zeros((), cupy.int64))
    for _ in range(250):
        for stream, given, count in zip(streams, own, wrong, strict=True):
            with stream:
                for key, array in chain(module, given).items():
                    count += (array.view(cupy.uint8) != first[key].view(cupy.uint8)).sum()
    for stream in streams:
        stream.synchronize()
    assert [int(count) for count in wrong] == [0, 0]


@pytest.mark.parametrize("hidden", [4096, 7168])
@pytest.mark.parametrize("tokens", [1024, 2048, 8192])
def test_fused_is_unfused_at_many_tokens(tokens: int, hidden: int) -> None:
    program = mhcgen.build(**{**CHAIN, "hidden": hidden})
    given = repeated(program, factories.inputs(program, 61), tokens)
    apart = mhcgen.compile(program, "none").load("cuda")(**given)
    for regime in ("decode", "prefill"):
        fused = mhcgen.compile(program, "boundary", regime=regime).load("cuda")(**given)
        for name, array in apart.items():
            assert int((array.view(np.uint8) != fused[name].view(np.uint8)).sum()) == 0, (name, regime)


@pytest.mark.parametrize("hidden", [256, 4096, 7168])
def test_the_projection_keeps_every_bit_of_its_weights(hidden: int) -> None:
    program = factories.program(factories.stage("project"), n=4, hidden=hidden)
    given = discriminating(program, 1, "D9")
    assert given is not None
    out = to_host(mhcgen.compile(program).load("cuda")(**to_device(dict(given))))
    assert (out["mixes"] == hidden * 2 * 2.0**-12).all()


@pytest.mark.parametrize(("streams", "hidden", "wrap"), [(4, 4096, 131072), (4, 7168, 74898), (16, 8192, 16384)])
@pytest.mark.parametrize("fuse", ["none", "pre"])
def test_rows_beyond_31_bits_of_offset_are_the_rows_alone(streams: int, hidden: int, wrap: int, fuse: str) -> None:
    """D13: about 4 GiB of streams in bf16, of which the rows around the wrap are looked at."""
    import cupy

    program = mhcgen.build(streams=streams, hidden=hidden, dtype="bf16", iters=3)
    few = factories.inputs(program, 3)
    alone = to_host(mhcgen.compile(program, "none").load("cuda")(**to_device(few)))
    given = to_device(few)
    for name in per_token(program) & given.keys():
        whole = cupy.zeros((wrap + 2, *given[name].shape[1:]), given[name].dtype)
        whole[-3:] = given[name]
        given[name] = whole
    out = mhcgen.compile(program, fuse).load("cuda")(**given)
    for name, array in to_host({name: array[-3:].copy() for name, array in out.items()}).items():
        assert array.tobytes() == alone[name].tobytes(), name


SCOPES = [("pre", "none"), ("pre", "pre"), ("post", "none"), ("boundary", "boundary")]


@pytest.mark.parametrize("tokens", [65535, 65536, 70000])
@pytest.mark.parametrize(("scope", "fuse"), SCOPES)
def test_more_tokens_than_two_axes_of_the_grid_have(scope: str, fuse: str, tokens: int) -> None:
    program = mhcgen.build(scope=scope, hidden=64, projection="external" if scope == "post" else "fma", iters=2)
    few = factories.inputs(program, 7)
    host = mhcgen.compile(program, "none").load("host")(**few)
    out = to_host(mhcgen.compile(program, fuse).load("cuda")(**repeated(program, few, tokens)))
    for name, array in out.items():
        for token in (0, 65534, 65535, 65536, tokens - 1):
            if token < tokens:
                assert array[token].tobytes() == host[name][token % 7].tobytes(), (name, token)


def test_an_empty_batch_under_capture_is_no_launch() -> None:
    import cupy

    program = mhcgen.build(hidden=64)
    module = mhcgen.compile(program, "pre").load("cuda")
    module.prepare()
    given = to_device(factories.inputs(program, 0))
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        out = module(**given)
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    assert all(array.shape[0] == 0 for array in out.values())
    assert module.launches == []
