"""Workspaces: nothing is allocated, everything is written before it is read, the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trunks
from trunks import turned

from mhcgen.errors import InputError, UsageError
from mhcgen.inputs import uniform
from mhcgen.module import HyperConnections
from mhcgen.runtime import Module
from mhcgen.topology import Topology
from mhcgen.workspace import Workspace

CASES = [
    (2, "none", "mean", False),
    (3, "seed", "head", False),
    (4, "boundary", "head", False),
    (3, "pre-norm", "mean", True),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda c: f"n{c[0]}-{c[1]}-{c[2]}")
def hyper(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> HyperConnections:
    streams, fuse, exit, norm = request.param
    where = trunks.topology(streams, 8, exit)
    path = trunks.checkpoint(tmp_path_factory.mktemp("workspace") / "model.safetensors", where)
    return HyperConnections(where, backend="host", fuse=fuse, norm=norm).load(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> tuple[Topology, Path]:
    where = trunks.topology(3, 8, "mean", layers=1)
    return where, trunks.checkpoint(tmp_path_factory.mktemp("small") / "model.safetensors", where)


def poison(workspace: Workspace) -> None:
    for array in workspace.arrays().values():
        array.reshape(-1).view(np.uint8)[:] = 0xFF


def forbid_allocation(hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Count what the runners allocate from now on."""
    made: list[tuple[int, ...]] = []
    for module in hyper.modules.values():
        empty = module.runner.empty

        def counted(shape: tuple[int, ...], dtype: str, empty: Any = empty) -> Any:
            made.append(shape)
            return empty(shape, dtype)

        monkeypatch.setattr(module.runner, "empty", counted)
    return made


def launched(hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Kernel and addresses of every launch from now on: what a captured graph would hold."""
    seen: list[tuple[Any, ...]] = []
    for module in hyper.modules.values():
        launch = module.runner.launch

        def noted(
            kernel: Any, scalar: bool, grid: Any, args: list[Any], *rest: Any, launch: Any = launch, **o: Any
        ) -> Any:
            addresses = tuple(a.ctypes.data for a in args if isinstance(a, np.ndarray))
            seen.append((kernel.name, grid, *addresses))
            return launch(kernel, scalar, grid, args, *rest, **o)

        monkeypatch.setattr(module.runner, "launch", noted)
    return seen


@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_a_trunk_in_a_workspace_has_the_same_bits_and_allocates_nothing(
    hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:
    embeddings = [trunks.embeddings(hyper.topology, tokens, seed) for seed in range(3)]
    workspace = hyper.workspace(5)
    made = forbid_allocation(hyper, monkeypatch)
    wanted = [hyper.run(e, turned).tobytes() for e in embeddings]
    assert made, "the allocating form is counted too"
    made.clear()
    for turn, e in enumerate(embeddings):
        if turn != 1:  # the second time on what the first left, not on poison
            poison(workspace)
        assert hyper.run(e, turned, workspace).tobytes() == wanted[turn]
    assert not made


def test_a_second_run_launches_on_the_same_addresses(
    hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trunk starts with the workspace rewound, so eager runs and a captured one use the same buffers."""
    workspace, embeddings = hyper.workspace(3), trunks.embeddings(hyper.topology, 3)

    def branch(site: str, z: Any) -> Any:
        workspace.f(3)[:] = turned(site, z)
        return workspace.f(3)

    seen = launched(hyper, monkeypatch)
    hyper.run(embeddings, branch, workspace)
    first = list(seen)
    seen.clear()
    hyper.run(embeddings, branch, workspace)
    assert first == seen and len({row[2:] for row in first}) > 6


def test_branches_may_work_in_the_workspaces_own_buffer(hyper: HyperConnections) -> None:
    workspace, embeddings = hyper.workspace(4), trunks.embeddings(hyper.topology, 4)

    def branch(site: str, z: Any) -> Any:
        workspace.f()[:] = turned(site, z)
        return workspace.f()

    assert hyper.run(embeddings, branch, workspace).tobytes() == hyper.run(embeddings, turned).tobytes()


def test_one_spare_stream_buffer_changes_places_after_each_site(hyper: HyperConnections) -> None:
    workspace = hyper.workspace(2)
    assert sum(name.startswith("streams") for name in workspace.arrays()) == 2
    x = hyper.expand(trunks.embeddings(hyper.topology, 2), workspace)
    first = x.ctypes.data
    assert x is workspace.streams(2)
    made = hyper.pre("0.attn", x, workspace)
    f = uniform("f", 0, (2, hyper.topology.hidden))
    x_next = hyper.post(f, x, made, workspace)
    assert x_next is workspace.streams(2) and x_next.ctypes.data != first
    made = hyper.pre("0.ffn", x_next, workspace)
    assert hyper.post(f, x_next, made, workspace).ctypes.data == first


def test_streams_of_another_owner_are_left_alone(hyper: HyperConnections) -> None:
    t = hyper.topology
    workspace, x = hyper.workspace(2), uniform("x", 0, (2, t.streams, t.hidden))
    before = x.tobytes()
    made = hyper.pre("0.attn", x, workspace)
    hyper.post(uniform("f", 0, (2, t.hidden)), x, made, workspace)
    assert x.tobytes() == before


def test_stale_streams_are_refused(hyper: HyperConnections) -> None:
    """The streams of the site before are the next buffer to be written."""
    workspace = hyper.workspace(1)
    x = hyper.expand(trunks.embeddings(hyper.topology, 1), workspace)
    made, f = hyper.pre("0.attn", x, workspace), uniform("f", 0, (1, hyper.topology.hidden))
    hyper.post(f, x, made, workspace)
    with pytest.raises(InputError, match="x_next overlaps input x"):
        hyper.post(f, x, made, workspace)


def test_pre_exact_and_finish_work_in_a_workspace(hyper: HyperConnections, monkeypatch: pytest.MonkeyPatch) -> None:
    t = hyper.topology
    x = uniform("x", 0, (3, t.streams, t.hidden))
    mixes = uniform("mixes", 0, (3, t.rows))
    workspace = hyper.workspace(3)
    wanted = [hyper.pre_exact("0.ffn", x), hyper.finish("0.ffn", x, mixes)]
    made = forbid_allocation(hyper, monkeypatch)
    for call, want in zip(
        (lambda: hyper.pre_exact("0.ffn", x, workspace), lambda: hyper.finish("0.ffn", x, mixes, workspace)),
        wanted,
        strict=True,
    ):
        poison(workspace)
        got = call()
        for name in ("y", "z", "pre", "post", "comb"):
            have, wish = getattr(got, name), getattr(want, name)
            assert have is wish is None or have.tobytes() == wish.tobytes(), name
    assert not made


def test_every_element_is_written_before_it_is_read(
    small: tuple[Topology, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Race mode fills what a kernel writes with poison first and reports reads of it, and what stayed unwritten."""
    where, path = small
    hyper = HyperConnections(where, backend="host", fuse="boundary", backend_options={"race": True})
    hyper.load(path, warm_up=False)
    workspace = hyper.workspace(2)
    reports = []
    call = Module.__call__

    def noted(module: Module, **tensors: Any) -> Any:
        results = call(module, **tensors)
        reports.extend(launch.report for launch in module.launches)
        return results

    monkeypatch.setattr(Module, "__call__", noted)
    hyper.run(trunks.embeddings(where, 2), turned, workspace)
    assert len(reports) == 5  # expand, pre, boundary, post, mean
    for report in reports:
        assert report.ok and report.unwritten and not any(report.unwritten.values()), report.kernel


# ---- refusals -----------------------------------------------------------------------------------------------
def test_more_tokens_than_it_is_for(hyper: HyperConnections) -> None:
    with pytest.raises(InputError, match="T = 3, and this workspace is for 2") as caught:
        hyper.expand(trunks.embeddings(hyper.topology, 3), hyper.workspace(2))
    assert caught.value.code == "I-TOKENS"
    counts: tuple[Any, ...] = (-1, "2", None, 2.0, True)
    for count in counts:
        with pytest.raises(InputError, match="tokens must be >= 0") as caught:
            hyper.workspace(count)
        assert caught.value.code == "I-TOKENS"
    assert hyper.workspace(np.int64(2)).tokens == 2  # type: ignore[arg-type]


def test_a_workspace_of_another_trunk(hyper: HyperConnections, small: tuple[Topology, Path]) -> None:
    other = HyperConnections(small[0], backend="host")
    with pytest.raises(UsageError, match="another HyperConnections"):
        hyper.expand(trunks.embeddings(hyper.topology, 1), other.workspace(1))


def test_a_gemm_allocates_and_is_refused(small: tuple[Topology, Path]) -> None:
    where, path = small
    hyper = HyperConnections(where, backend="host", gemm=lambda x, fn: x @ fn.T).load(path)
    workspace, x = hyper.workspace(1), uniform("x", 0, (1, where.streams, where.hidden))
    for call in (hyper.pre, hyper.pre_exact):
        with pytest.raises(UsageError) as caught:
            call("0.attn", x, workspace)
        assert caught.value.code == "U-WORKSPACE"
    assert hyper.finish("0.attn", x, uniform("m", 0, (1, where.rows)), workspace).y.shape == (1, where.hidden)


def test_a_branch_that_returns_its_input_is_told_apart(hyper: HyperConnections) -> None:
    workspace, embeddings = hyper.workspace(1), trunks.embeddings(hyper.topology, 1)
    if hyper.fuse == "boundary":
        with pytest.raises(InputError, match="y overlaps input f"):
            hyper.run(embeddings, lambda site, z: z, workspace)
        return
    wanted = hyper.run(embeddings, lambda site, z: z)
    assert hyper.run(embeddings, lambda site, z: z, workspace).tobytes() == wanted.tobytes()


# ---- on a GPU -----------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.parametrize("fuse", ["seed", "pre", "boundary"])
def test_a_captured_trunk_replays_after_others_came_and_went(tmp_path: Path, fuse: str) -> None:
    """Capture one trunk, run other shapes eagerly, free the pool, replay: same bits as eager and as the host."""
    import cupy

    from mhcgen.backends.cuda import to_device, to_host

    where = trunks.topology(4, 64, "head")
    path = trunks.checkpoint(tmp_path / "model.safetensors", where)
    hyper = HyperConnections(where, backend="cuda", fuse=fuse).load(path)
    workspace = hyper.workspace(2)
    embeddings = to_device(trunks.embeddings(where, 2))

    def branch(site: str, z: Any) -> Any:
        """Columns turned and halved, into the workspace, so that the capture allocates nothing."""
        f, shift = workspace.f(2), trunks.SHIFT[site] % where.hidden
        cupy.multiply(z[:, -shift:], cupy.float32(0.5), out=f[:, :shift])
        cupy.multiply(z[:, :-shift], cupy.float32(0.5), out=f[:, shift:])
        return f

    wanted = to_host(hyper.run(embeddings, turned)).tobytes()
    host = HyperConnections(where, backend="host", fuse=fuse).load(path)
    assert host.run(trunks.embeddings(where, 2), turned).tobytes() == wanted
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        hyper.run(embeddings, branch, workspace)
        stream.begin_capture()
        result = hyper.run(embeddings, branch, workspace)
        graph = stream.end_capture()
    stream.synchronize()
    for tokens in range(1, 40):
        hyper.run(to_device(trunks.embeddings(where, tokens)), turned)
    cupy.get_default_memory_pool().free_all_blocks()
    for array in workspace.arrays().values():
        array.view(cupy.uint8)[...] = 0xFF
    cupy.cuda.Device().synchronize()
    graph.launch(stream)
    stream.synchronize()
    assert to_host(result).tobytes() == wanted
