"""Rivals side by side: other implementations of the same stages, where they are installed.

Each is called through its own public function, in CUDA-graph replays of PyTorch on the same inputs, and its result is
compared with ours before it is timed. What an adapter prepares (a transposed weight, another layout of the streams)
is done before the clock starts, in the rival's favour. `torch` and `torch-compile` are the plain formula.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mhcgen.bench import timing
from mhcgen.bench.floor import bytes_once, tensor_bytes
from mhcgen.bench.measure import ROTATED_TOKENS, Bench, Case, Row, Unmeasurable, describe, error_text
from mhcgen.bench.timing import Timing, summarise
from mhcgen.errors import UsageError
from mhcgen.ir import Program
from mhcgen.plan import Options

#: torch.Tensor by the names of a Program.
Tensors = dict[str, Any]
Op = Callable[[Tensors], Tensors]

#: Largest distance from our result, as a share of its norm, that is still the same computation: bf16 results, and
#: projections in tf32 or bf16.
TOLERANCE = 2e-2
#: A distance that JSON can hold.
FAR = 1e30


@dataclass(frozen=True)
class Settings:
    """The constants of a Program that rivals take as arguments."""

    n: int
    iters: int
    rms_eps: float
    hc_eps: float
    post_mult: float


def settings_of(program: Program) -> Settings:
    """The constants of a Program; zeros for stages it does not have."""

    def attr(kind: str, key: str, default: Any) -> Any:
        return next((s.option(key, default) for s in program.stages_of_kind(kind)), default)

    return Settings(
        program.dim("n"),
        int(attr("sinkhorn", "iters", 0)),
        float(attr("rowsq", "eps", 0.0)),
        float(attr("sinkhorn", "eps", 0.0)),
        float(attr("gates", "post_mult", 2.0)),
    )


@dataclass(frozen=True)
class Peer:
    """A rival.

    Args:
        name: on the command line.
        module: what must be importable.
        ops: case name (`finish`, `pre`, `post`) to a maker: from the tensors of one set and the settings, a
            callable that runs it once and returns its results by our names.
    """

    name: str
    module: str
    ops: dict[str, Callable[[Tensors, Settings], Callable[[], Tensors]]]

    def missing(self) -> str:
        """Why it cannot be used here; empty where it can."""
        for module in ("torch", self.module):
            try:
                if importlib.util.find_spec(module.split(".")[0]) is None:
                    return f"not installed: {module.split('.')[0]}"
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001  (a rival's import may fail in any way)
                return f"not usable: import of {module}: {error_text(error)}"
        import torch

        return "" if torch.cuda.is_available() else f"not usable: torch {torch.__version__} sees no GPU"


# ---- the plain formula ------------------------------------------------------------------------------
def formula(what: str, s: Settings) -> Op:
    """The stages in PyTorch, fp32 inside, streams and results in the dtype of x; for eager and compiled use."""
    import torch

    def post(t: Tensors) -> Tensors:
        mixed = torch.einsum("tjk,tjh->tkh", t["comb"], t["x"].float())
        return {"x_next": (mixed + t["post"].unsqueeze(2) * t["f"].float().unsqueeze(1)).to(t["x"].dtype)}

    def finish(t: Tensors) -> Tensors:
        x = t["x"].float()
        flat, n = x.flatten(1), s.n
        mixes = flat @ t["fn"].T if "fn" in t else t["mixes"]
        mixes = mixes * torch.rsqrt(flat.square().mean(1, keepdim=True) + s.rms_eps)
        scale, base = t["scale"], t["base"]
        pre = torch.sigmoid(mixes[:, :n] * scale[0] + base[:n]) + s.hc_eps
        gate = s.post_mult * torch.sigmoid(mixes[:, n : 2 * n] * scale[1] + base[n : 2 * n])
        comb = torch.softmax((mixes[:, 2 * n :] * scale[2] + base[2 * n :]).view(-1, n, n), 2) + s.hc_eps
        comb = comb / (comb.sum(1, keepdim=True) + s.hc_eps)
        for _ in range(s.iters - 1):
            comb = comb / (comb.sum(2, keepdim=True) + s.hc_eps)
            comb = comb / (comb.sum(1, keepdim=True) + s.hc_eps)
        y = (pre.unsqueeze(2) * x).sum(1).to(t["x"].dtype)
        return {"pre": pre, "post": gate, "comb": comb, "y": y}

    return post if what == "post" else finish


def _eager(what: str) -> Callable[[Tensors, Settings], Callable[[], Tensors]]:
    def make(tensors: Tensors, s: Settings) -> Callable[[], Tensors]:
        op = formula(what, s)
        return lambda: op(tensors)

    return make


_compiled: dict[tuple[str, Settings, tuple[int, ...]], Op] = {}


def _compile(what: str) -> Callable[[Tensors, Settings], Callable[[], Tensors]]:
    def make(tensors: Tensors, s: Settings) -> Callable[[], Tensors]:
        import torch

        key = (what, s, tuple(tensors["x"].shape))
        if key not in _compiled:
            # A function is compiled a few times and then runs eagerly, as if that were its compiled form.
            torch.compiler.reset()
            _compiled[key] = torch.compile(formula(what, s), dynamic=False, fullgraph=True)
        op = _compiled[key]
        return lambda: op(tensors)

    return make


# ---- libraries --------------------------------------------------------------------------------------
def _liger_pre(t: Tensors, s: Settings) -> Callable[[], Tensors]:
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_pre

    phi = t["fn"].T.contiguous()
    a, b, c = (t["scale"][i].clone() for i in range(3))

    def run() -> Tensors:
        pre, post, comb = liger_mhc_coeffs(
            t["x"], phi, t["base"], a, b, c, tmax=s.iters, rms_eps=s.rms_eps, pre_eps=s.hc_eps,
            sinkhorn_eps=s.hc_eps, post_mult=s.post_mult,
        )
        return {"pre": pre, "post": post, "comb": comb, "y": liger_mhc_pre(t["x"], pre)}

    return run


def _liger_post(t: Tensors, _: Settings) -> Callable[[], Tensors]:
    from liger_kernel.transformers.functional import liger_mhc_post_res

    turned = t["comb"].transpose(1, 2).contiguous()  # Liger's is (to, from)
    return lambda: {"x_next": liger_mhc_post_res(t["x"], t["f"], t["post"], turned)}


def _flashinfer_finish(t: Tensors, s: Settings) -> Callable[[], Tensors]:
    from flashinfer.mhc import mhc_pre_big_fuse_with_prenorm

    def run() -> Tensors:
        post, comb, y = mhc_pre_big_fuse_with_prenorm(
            t["mixes"], t["x"], t["scale"], t["base"], rms_eps=s.rms_eps, mhc_pre_eps=s.hc_eps,
            mhc_sinkhorn_eps=s.hc_eps, mhc_post_mult_value=s.post_mult, sinkhorn_repeat=s.iters,
        )
        return {"post": post.squeeze(-1), "comb": comb, "y": y}

    return run


def _flashinfer_post(t: Tensors, _: Settings) -> Callable[[], Tensors]:
    from flashinfer.mhc import mhc_post

    return lambda: {"x_next": mhc_post(t["f"], t["x"], t["post"], t["comb"])}


def _tilekernels_pre(t: Tensors, s: Settings) -> Callable[[], Tensors]:
    from tile_kernels.modeling.mhc.functional import mhc_pre

    x = t["x"].unsqueeze(0)

    def run() -> Tensors:
        y, (post, comb) = mhc_pre(
            x, t["fn"], t["scale"], t["base"], norm_eps=s.rms_eps, mhc_mult=s.n, post_mult_value=s.post_mult,
            pre_eps=s.hc_eps, sinkhorn_eps=s.hc_eps, sinkhorn_repeat=s.iters,
        )
        return {"post": post.reshape(-1, s.n), "comb": comb.reshape(-1, s.n, s.n), "y": y[0]}

    return run


def _tilekernels_post(t: Tensors, _: Settings) -> Callable[[], Tensors]:
    from tile_kernels.modeling.mhc.ops import mhc_post

    x, f, post, comb = t["x"][None], t["f"][None], t["post"][None, ..., None], t["comb"][None]
    return lambda: {"x_next": mhc_post(f, x, post, comb)[0]}


def _transformer_engine_pre(t: Tensors, s: Settings) -> Callable[[], Tensors]:
    from transformer_engine.pytorch.triton.mhc import mhc_generate_mix_and_aggregate

    x = t["x"].transpose(1, 2).contiguous().unsqueeze(1)  # its streams lie side by side: [s, b, C, n]
    phi = t["fn"].unflatten(1, (s.n, -1)).transpose(1, 2).flatten(1)  # its columns likewise
    base = t["base"].unsqueeze(0)

    def run() -> Tensors:
        y, post, comb = mhc_generate_mix_and_aggregate(x, phi, t["scale"], base)
        return {"post": post.reshape(-1, s.n), "comb": comb.reshape(-1, s.n, s.n), "y": y[:, 0]}

    return run


def _transformer_engine_post(t: Tensors, s: Settings) -> Callable[[], Tensors]:
    from transformer_engine.pytorch.triton.mhc import mhc_fused_expand_combine

    x = t["x"].transpose(1, 2).contiguous().unsqueeze(1)
    f, post, comb = (t[name].unsqueeze(1) for name in ("f", "post", "comb"))
    return lambda: {"x_next": mhc_fused_expand_combine(f, None, post, x, comb, s.n)[:, 0].transpose(1, 2)}


_PLAIN = ("finish", "pre", "post")
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        Peer("torch", "torch", {what: _eager(what) for what in _PLAIN}),
        Peer("torch-compile", "torch", {what: _compile(what) for what in _PLAIN}),
        Peer("liger", "liger_kernel.transformers.functional", {"pre": _liger_pre, "post": _liger_post}),
        Peer("flashinfer", "flashinfer.mhc", {"finish": _flashinfer_finish, "post": _flashinfer_post}),
        Peer("tilekernels", "tile_kernels", {"pre": _tilekernels_pre, "post": _tilekernels_post}),
        Peer(
            "transformer-engine",
            "transformer_engine.pytorch.triton.mhc",
            {"pre": _transformer_engine_pre, "post": _transformer_engine_post},
        ),
    )
}


def peers_of(text: str) -> tuple[Peer, ...]:
    """The rivals of a comma list, or `all`.

    Raises:
        UsageError: `U-PEER`.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name != "all" and name not in PEERS:
            raise UsageError(
                "U-PEER",
                f"there is no adapter for {name!r}",
                where="--peers",
                hints=(f"choose among all, {', '.join(PEERS)}",),
            )
    return tuple(PEERS.values()) if "all" in names else tuple(PEERS[name] for name in dict.fromkeys(names))


# ---- measuring --------------------------------------------------------------------------------------
def measure_peer(bench: Bench, peer: Peer, case: Case, tokens: int) -> Row | None:
    """A row for a rival; None where it has no function for this case.

    Args:
        bench: where; its floor and its results are those of our own rows.
        peer: who.
        case: what, by the names of `cases.CASES`; its schedule is ours and does not concern the rival.
        tokens: T.
    """
    if case.what not in peer.ops:
        return None
    row = {**describe(case, None, tokens), "options": {}, "note": peer.name, "peer": peer.name}
    try:
        missing = peer.missing()
        if missing:
            return {**row, "error": missing}
        return row | _measured(bench, peer, case, tokens)
    except Exception as error:  # noqa: BLE001  (rivals fail in ways of their own; the run goes on)
        return {**row, **getattr(error, "row", {}), "error": error_text(error)}


def _measured(bench: Bench, peer: Peer, case: Case, tokens: int) -> Row:
    import torch

    program = case.program
    base = {name: to_torch(array) for name, array in bench.inputs(program, tokens).items()}
    turning = [t.name for t in program.of_role("input") if t.shape[:1] == ("T",)]
    read = sum(tensor_bytes(program, name, tokens) for name in turning)
    count = timing.sets_for(read) if tokens >= ROTATED_TOKENS else 1
    settings = settings_of(program)
    with torch.no_grad():
        sets = [base] + [{**base, **{k: base[k].clone() for k in turning}} for _ in range(count - 1)]
        runs = [peer.ops[case.what](tensors, settings) for tensors in sets]
        want = {k: to_torch(v) for k, v in bench.expected(program, tokens, Options().arch).items()}
        row: Row = {"distance": distances(runs[0](), want), "bytes": bytes_once(program, tokens), "sets": count}
        worst = max(row["distance"].values())
        if not worst < TOLERANCE:
            raise Unmeasurable(f"its result is {worst:.1e} of our norm away", row)
        launches, replays = timing.counts_for(tokens)
        taken = torch_graph_time(lambda i: runs[i % count](), count=max(launches, count), replays=replays)
    bench.note(row, "graph", taken, first=True)
    return row


def distances(got: Tensors, want: Tensors) -> dict[str, float]:
    """Distance of each result that both have, as a share of our norm; `FAR` where it is not a finite number."""
    found = {}
    for name in got:
        if name in want:
            ours = want[name].double()
            share = float((got[name].reshape(ours.shape).double() - ours).norm() / ours.norm())
            found[name] = share if share < FAR else FAR
    return {name: float(f"{share:.2e}") for name, share in found.items()}


def to_torch(array: Any) -> Any:
    """A tensor over the memory of a device array; bf16 goes as 16-bit integers, which every exchange knows."""
    import numpy as np
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def torch_graph_time(launch: Callable[[int], Any], *, count: int, replays: int, warmup: int = 3) -> Timing:
    """`timing.graph_time` with PyTorch's own capture, whose allocator knows of graphs.

    Args:
        launch: runs one call; `i` picks the set of tensors.
        count: calls per graph.
        replays: timed replays.
        warmup: replays, and calls before the capture, that are not timed.
    """
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for i in range(warmup):
            launch(i)
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for i in range(count):
                launch(i)
        for _ in range(warmup):
            graph.replay()
        times = []
        for _ in range(replays):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1e3 / count)
    return summarise(times)
