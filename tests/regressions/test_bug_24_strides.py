"""ROCm/aiter #4432: the distance of two streams was taken as stride(0) / n, which holds for packed arrays only; and
an odd row count read one row too far. Arrays that are not packed are refused here, each argument in each way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import factories
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import mhcgen
from mhcgen.backends.host import HostBuffer
from mhcgen.errors import InputError
from mhcgen.runtime import NUMPY_DTYPES

BOUNDARY = mhcgen.build(scope="boundary", hidden=16, projection="fma", norm=True)
ARGUMENTS = [t.name for t in BOUNDARY.of_role("input", "parameter")]


def cut(axis: int, step: int) -> Callable[[Any], Any]:
    """A view of a larger array that has the given one's shape and every `step`th of the axis; step 0: its start."""

    def view(array: Any) -> Any:
        at = min(axis, array.ndim - 1)
        shape = list(array.shape)
        shape[at] *= max(2, abs(step))
        index: list[Any] = [slice(None)] * array.ndim
        index[at] = slice(0, array.shape[at]) if step == 0 else slice(None, None, step)
        return np.zeros(shape, array.dtype)[tuple(index)]

    return view


VIEWS: dict[str, Callable[[Any], Any]] = {
    "every second token": cut(0, 2),
    "part of the second axis": cut(1, 0),
    "every second of the second axis": cut(1, 2),
    "part of the last axis": cut(2, 0),
    "every second of the last axis": cut(2, 2),
    "backwards": lambda array: np.zeros_like(array)[..., ::-1],
    "one row for all": lambda array: np.broadcast_to(array[:1], array.shape),
    "transposed": lambda array: np.zeros(array.shape[::-1], array.dtype).T,
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_view_that_is_not_packed_is_refused(name: str, view: str) -> None:
    module = mhcgen.compile(BOUNDARY, "boundary", cluster=1).load("host")
    inputs = factories.inputs(BOUNDARY, 2)
    shape = inputs[name].shape
    inputs[name] = VIEWS[view](inputs[name])
    if inputs[name].shape != shape or inputs[name].flags.c_contiguous:
        pytest.skip("that is no view of a vector, or a packed one")
    with pytest.raises(InputError) as caught:
        module(**inputs)
    assert (caught.value.code, caught.value.where) == ("I-LAYOUT", name)
    assert not module.launches


@pytest.mark.parametrize("name", ["y", "x_next", "comb_next"])
def test_so_is_one_to_write_to(name: str) -> None:
    module = mhcgen.compile(BOUNDARY, "none").load("host")
    tensor = BOUNDARY.tensor(name)
    out = np.zeros((4, *BOUNDARY.shape(name, 2)[1:]), NUMPY_DTYPES[tensor.dtype])[::2]
    with pytest.raises(InputError, match=f"{name} is not C-contiguous"):
        module(out={name: out}, **factories.inputs(BOUNDARY, 2))


def test_the_stride_of_an_axis_of_one_means_nothing() -> None:
    """The view of the report: shape (1, 4, H), one token of a buffer with room for eight."""
    program = mhcgen.build(hidden=7168)
    inputs = factories.inputs(program, 1)
    room = np.zeros((8, 4, 7168), np.float32)
    room[0] = inputs["x"][0]
    one = as_strided(room, (1, 4, 7168), (4 * 229376, 4 * 7168, 4))
    module = mhcgen.compile(program, "pre").load("host")
    usual, viewed = module(**inputs), module(**{**inputs, "x": one})
    assert all(usual[name].tobytes() == viewed[name].tobytes() for name in usual)


def test_parts_of_a_larger_buffer_are_read_where_they_lie() -> None:
    """The first tokens, and later ones at an address of their own, between rows of NaN."""
    program = mhcgen.build(hidden=24, dtype="bf16")
    module = mhcgen.compile(program, "pre").load("host")
    inputs = factories.inputs(program, 3)
    usual = module(**inputs)
    for start in (0, 2, 5):
        rooms = {name: np.full((8, *inputs[name].shape[1:]), np.nan, inputs[name].dtype) for name in ("x", "mixes")}
        for name, room in rooms.items():
            room[start : start + 3] = inputs[name]
        viewed = module(**inputs | {name: room[start : start + 3] for name, room in rooms.items()})
        assert all(usual[name].tobytes() == viewed[name].tobytes() for name in usual)


@pytest.mark.parametrize("tokens", [1, 31, 61])
@pytest.mark.parametrize("options", [{"fuse": "none"}, {"fuse": "boundary", "cluster": 4}], ids=str)
def test_an_odd_count_of_tokens_ends_where_it_ends(tokens: int, options: dict[str, Any]) -> None:
    """Past the last token lies NaN to read and a pattern to keep; clusters take 2 and 3 tokens each here."""
    program = mhcgen.build(scope="boundary", hidden=1024, projection="fma", iters=2)
    given = factories.inputs(program, tokens)
    fenced: dict[str, Any] = {}
    for name, array in given.items():
        fenced[name] = HostBuffer(array.shape, array.dtype).array
        fenced[name][...] = array
    module = mhcgen.compile(program, **options).load("host")
    out = module(**fenced)
    assert all(launch.report.ok for launch in module.launches), [launch.report.text for launch in module.launches]
    assert all(np.isfinite(array).all() for array in out.values())
