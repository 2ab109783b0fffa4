"""Shapes of launches: what a GPU takes, and which blocks run in which order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from mhcgen.backends.host.unit import MAX_DYNAMIC_SHARED
from mhcgen.errors import UsageError

Shape = tuple[int, int, int]

MAX_THREADS = 1024
#: Blocks of a cluster; a GPU takes more than 8 only when asked to.
MAX_CLUSTER = 16
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


def shape_of(shape: int | Sequence[int], what: str) -> Shape:
    parts = (shape,) if isinstance(shape, (int, np.integer)) else tuple(shape)
    if not 1 <= len(parts) <= 3 or not all(isinstance(p, (int, np.integer)) and p >= 0 for p in parts):
        raise UsageError("X-SHAPE", f"{what} must be one to three non-negative integers, not {shape!r}")
    x, y, z = (*(int(p) for p in parts), 1, 1)[:3]
    return x, y, z


def check_shapes(grid: Shape, block: Shape, dynamic_shared: int) -> None:
    if any(size > limit for size, limit in zip(grid, _MAX_GRID, strict=True)):
        raise UsageError("X-GRID", f"no GPU takes a grid of {grid}", hints=(f"at most {_MAX_GRID}",))
    threads = block[0] * block[1] * block[2]
    if not 1 <= threads <= MAX_THREADS or any(s > limit for s, limit in zip(block, _MAX_BLOCK, strict=True)):
        raise UsageError("X-BLOCK", f"no GPU takes a block of {block}", hints=("1 to 1024 threads, z at most 64",))
    if not 0 <= dynamic_shared <= MAX_DYNAMIC_SHARED:
        raise UsageError(
            "X-SHARED", f"dynamic shared memory must be 0 to {MAX_DYNAMIC_SHARED} bytes, not {dynamic_shared}"
        )


def cluster_of(cluster: int | Sequence[int] | None, grid: Shape) -> Shape | None:
    """The blocks of a cluster in each direction; None for a launch without clusters.

    Raises:
        UsageError: `X-CLUSTER` if no GPU takes such a cluster, or if it does not divide the grid.
    """
    if cluster is None:
        return None
    shape = shape_of(cluster, "cluster")
    if not 1 <= shape[0] * shape[1] * shape[2] <= MAX_CLUSTER:
        raise UsageError("X-CLUSTER", f"no GPU takes a cluster of {shape}", hints=(f"1 to {MAX_CLUSTER} blocks",))
    if any(size % part for size, part in zip(grid, shape, strict=True)):
        raise UsageError("X-CLUSTER", f"clusters of {shape} do not divide a grid of {grid}")
    return shape


def block_ids(
    blocks: Iterable[int] | None, grid: Shape, cluster: Shape | None, order: str, seed: int
) -> npt.NDArray[np.uint64] | None:
    """The blocks in the order to run; None for all of them, ascending, which needs no list.

    With clusters the order is one of clusters, and each contributes all its blocks by rank.
    """
    wanted = None if blocks is None else np.array(sorted({int(b) for b in blocks}), dtype=np.int64)
    total = grid[0] * grid[1] * grid[2]
    if wanted is not None and len(wanted) and (wanted[0] < 0 or wanted[-1] >= total):
        raise UsageError("X-BLOCKS", f"block ids must lie in 0 to {total - 1}", where=str(wanted[-1]))
    if cluster is None:
        if wanted is None and order in ("ascending", "warp-greedy"):
            return None
        return _ordered(np.arange(total) if wanted is None else wanted, order, seed).astype(np.uint64)
    across = (grid[0] // cluster[0], grid[1] // cluster[1], grid[2] // cluster[2])
    if wanted is None:
        ids = np.arange(across[0] * across[1] * across[2])
    else:
        x, y, z = _coordinates(wanted, grid)
        ids = np.unique(_linear(x // cluster[0], y // cluster[1], z // cluster[2], across))
    x, y, z = (part[:, None] for part in _coordinates(_ordered(ids, order, seed), across))
    rank_x, rank_y, rank_z = _coordinates(np.arange(cluster[0] * cluster[1] * cluster[2]), cluster)
    members = _linear(x * cluster[0] + rank_x, y * cluster[1] + rank_y, z * cluster[2] + rank_z, grid)
    return members.reshape(-1).astype(np.uint64)


def _ordered(ids: npt.NDArray[np.int64], order: str, seed: int) -> npt.NDArray[np.int64]:
    if order == "descending":
        return ids[::-1]
    if order == "random":
        return np.random.default_rng(seed & (2**64 - 1)).permutation(ids)
    return ids


def _coordinates(ids: npt.NDArray[np.int64], shape: Shape) -> tuple[npt.NDArray[np.int64], ...]:
    """x, y, z of linear ids; x runs fastest."""
    return ids % shape[0], ids // shape[0] % shape[1], ids // shape[0] // shape[1]


def _linear(
    x: npt.NDArray[np.int64], y: npt.NDArray[np.int64], z: npt.NDArray[np.int64], shape: Shape
) -> npt.NDArray[np.int64]:
    return (z * shape[1] + y) * shape[0] + x
