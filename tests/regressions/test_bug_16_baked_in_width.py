"""NVIDIA/TensorRT-LLM #13710: kernels built for width 4096 let a model of width 7168 in, and spoiled it silently."""

from __future__ import annotations

from typing import Any

import factories
import numpy as np
import pytest

import mhcgen
from mhcgen.errors import InputError, RefusedError


@pytest.mark.parametrize("fuse", ["none", "pre"])
@pytest.mark.parametrize(("built", "called"), [(4096, 7168), (7168, 4096)])
def test_another_width_is_refused_naming_both(built: int, called: int, fuse: str) -> None:
    module = mhcgen.compile(mhcgen.build(hidden=built), fuse).load("host")
    inputs = factories.inputs(mhcgen.build(hidden=called), 1)
    with pytest.raises(InputError) as caught:
        module(**inputs)
    text = str(caught.value)
    assert caught.value.code == "I-SHAPE"
    assert str(built) in text and str(called) in text
    assert not module.launches


@pytest.mark.parametrize(("built", "called"), [(4, 2), (2, 4), (4, 5)])
def test_another_stream_count_is_refused(built: int, called: int) -> None:
    module = mhcgen.compile(mhcgen.build(streams=built, hidden=8), "pre").load("host")
    with pytest.raises(InputError, match=f"n = {built}"):
        module(**factories.inputs(mhcgen.build(streams=called, hidden=8), 1))


def changed(inputs: dict[str, Any], name: str) -> dict[str, Any]:
    array = inputs[name]
    wider = np.zeros((*array.shape[:-1], array.shape[-1] + 1), array.dtype)
    return {**inputs, name: wider}


@pytest.mark.parametrize("name", ["x", "mixes", "scale", "base"])
def test_every_argument_is_checked(name: str) -> None:
    module = mhcgen.compile(mhcgen.build(hidden=8), "pre").load("host")
    inputs = changed(factories.inputs(module.program, 2), name)
    with pytest.raises(InputError) as caught:
        module(**inputs)
    assert (caught.value.code, caught.value.where) == ("I-SHAPE", name)


def test_token_counts_must_agree() -> None:
    module = mhcgen.compile(mhcgen.build(hidden=8), "pre").load("host")
    inputs = factories.inputs(module.program, 2)
    inputs["mixes"] = inputs["mixes"][:1].copy()
    with pytest.raises(InputError, match="has 1 tokens and x has 2"):
        module(**inputs)


@pytest.mark.parametrize("hidden", [5120, 6144, 7168])
def test_every_cluster_size_covers_the_columns_or_is_refused(hidden: int) -> None:
    """The counts of blocks that split the columns, which there were illegal at one width and legal at another."""
    program = mhcgen.build(hidden=hidden, projection="fma", iters=1)
    inputs = factories.inputs(program, 2)
    usual = mhcgen.compile(program, "none").load("host")(**inputs)
    tried: set[tuple[int, int]] = set()
    for blocks in range(-1, 34):
        try:
            plan = mhcgen.compile(program, "pre", cluster=blocks)
        except RefusedError as refused:
            assert refused.code == "P-CLUSTER", blocks
            assert not 1 < blocks <= 16 or "registers" in str(refused), blocks
            continue
        (kernel,) = plan.kernels
        assert kernel.columns is not None and kernel.cluster <= blocks
        each = 32 * kernel.columns.run  # columns of a block, where it is one of a cluster
        assert kernel.cluster == 1 or (kernel.cluster - 1) * each < hidden <= kernel.cluster * each
        if (kernel.cluster, each) not in tried:
            tried.add((kernel.cluster, each))
            out = plan.load("host")(**inputs)
            assert all(usual[name].tobytes() == array.tobytes() for name, array in out.items()), blocks
    assert len(tried) > 2
