"""mhcgen.torch on a GPU: bits, streams, graphs, devices, no waiting, caller's results, training."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch_cases import CASES, IDS, PLAIN, as_tuple, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen.errors import InputError, InputTypeError
from mhcgen.torch import Setup, operator, straight
from mhcgen.torch.cpu import as_numpy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has no CUDA device"),
]
ROOT = Path(__file__).parents[1]
SETUPS = {dtype: Setup("deepseek-v4", hidden=264, dtype=dtype) for dtype in ("fp32", "bf16", "fp16")}
SETUP = SETUPS["fp32"]
needs_executor = pytest.mark.skipif(bool(no_compiler()), reason=f"no CPU executor: {no_compiler()}")
#: Clock cycles that keep a GPU busy for a few hundred milliseconds.
BUSY = 500_000_000


def on_gpu(tensors: list[Any]) -> list[Any]:
    return [None if tensor is None else tensor.cuda() for tensor in tensors]


def run(name: str, setup: Setup, tensors: list[Any]) -> tuple[Any, ...]:
    return as_tuple(operator(name)(*tensors, setup.text))


def same(made: Any, wanted: Any) -> bool:
    pairs = zip(as_tuple(made), as_tuple(wanted), strict=True)
    return all(as_numpy(a.cpu()).tobytes() == as_numpy(b.cpu()).tobytes() for a, b in pairs)


# ---- results --------------------------------------------------------------------------------------------
@needs_executor
@pytest.mark.parametrize("dtype", SETUPS)
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_the_gpu_has_the_bits_of_the_cpu(name: str, gemm: bool, dtype: str) -> None:
    tensors = inputs(name, SETUPS[dtype], tokens=5, gemm=gemm)
    with mhc.use_path("kernels"):
        wanted = run(name, SETUPS[dtype], tensors)
    given = on_gpu(tensors)
    for _ in range(4):  # by the dispatcher, and straight
        made = run(name, SETUPS[dtype], given)
        assert mhc.last_path().path == "cuda"
        assert same(made, wanted)
    assert straight.find(name, given, SETUPS[dtype].text) is not None


@needs_executor
@pytest.mark.parametrize("model", ["deepseek-v4.1", "glm-5.3-flash"])
def test_other_models_at_their_width(model: str) -> None:
    setup = Setup(model, dtype="bf16")
    for first in (True, False):
        tensors = inputs("pre_norm", setup, tokens=2, first=first)
        with mhc.use_path("kernels"):
            wanted = run("pre_norm", setup, tensors)
        assert same(run("pre_norm", setup, on_gpu(tensors)), wanted)


@pytest.mark.parametrize("tokens", [1, 31, 1000, 70000])
def test_many_tokens_agree_with_plain_torch(tokens: int) -> None:
    setup = Setup("deepseek-v4", hidden=64)
    for name in ("pre", "post"):
        tensors = on_gpu(inputs(name, setup, tokens=tokens))
        made = run(name, setup, tensors)
        with mhc.use_path("torch"):
            wanted = run(name, setup, tensors)
        for got, want in zip(made, wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_schedules_never_change_a_bit() -> None:
    tensors = on_gpu(inputs("pre", SETUP, tokens=7))
    wanted = run("pre", SETUP, tensors)
    for fuse in ("none", "seed"):
        assert same(run("pre", SETUP.replace(fuse=fuse), tensors), wanted)
    off = torch.empty(tensors[0].numel() + 1, device="cuda")[1:].view_as(tensors[0]).copy_(tensors[0])
    assert off.data_ptr() % 16 and same(run("pre", SETUP, [off, *tensors[1:]]), wanted)


@pytest.mark.parametrize("name", PLAIN)
def test_opcheck(name: str) -> None:
    for grad in (False, True):
        tensors = inputs(name, SETUP, device="cuda", grad=grad)
        torch.library.opcheck(operator(name), (*tensors, SETUP.text))


@pytest.mark.parametrize("name", PLAIN)
def test_no_tokens(name: str) -> None:
    tensors = on_gpu(inputs(name, SETUP, tokens=0))
    graph = torch.cuda.CUDAGraph()
    assert all(result.shape[0] == 0 and result.is_cuda for result in run(name, SETUP, tensors))
    with torch.cuda.graph(graph):
        run(name, SETUP, tensors)
        torch.zeros(1, device="cuda").add_(1)
    graph.replay()


# ---- streams and waiting --------------------------------------------------------------------------------
def test_work_is_on_the_current_stream_and_nothing_waits() -> None:
    mhc.warm_up(SETUP, ["pre", "post"])
    x, fn, _, scale, base, *_ = on_gpu(inputs("pre", SETUP, tokens=4))
    for _ in range(4):
        wanted = mhc.pre(x, fn, scale, base, setup=SETUP)
        mhc.post(x, wanted.y, wanted.post, wanted.comb, setup=SETUP)
    assert straight.find("pre", (x, fn, None, scale, base, None, None), SETUP.text) is not None
    late = torch.zeros_like(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.stream(side):
            torch.cuda._sleep(BUSY)
            late.copy_(x)  # what a launch on another stream would read too early
            made = mhc.pre(late, fn, scale, base, setup=SETUP)
            nxt = mhc.post(late, made.y, made.post, made.comb, setup=SETUP)
            doubled = nxt * 2
            assert not side.query(), "the calls came back while the GPU was still busy"
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side.synchronize()
    assert same(tuple(made), tuple(wanted))
    assert torch.equal(doubled, 2 * mhc.post(x, wanted.y, wanted.post, wanted.comb, setup=SETUP))


def test_threads_on_streams_of_their_own() -> None:
    mhc.warm_up(SETUP, ["pre"])
    cases = [on_gpu(inputs("pre", SETUP, tokens=3 + i, seed=i)) for i in range(4)]
    wanted = [run("pre", SETUP, tensors) for tensors in cases]
    torch.cuda.synchronize()
    failures: list[int] = []

    def work(index: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                made = run("pre", SETUP, cases[index])
                torch.cuda.current_stream().synchronize()
                if not same(made, wanted[index]):
                    failures.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_tensors_on_another_device_than_the_current_one() -> None:
    tensors = inputs("pre", SETUP, tokens=4)
    wanted = run("pre", SETUP, [None if t is None else t.to("cuda:0") for t in tensors])
    given = [None if t is None else t.to("cuda:1") for t in tensors]
    for _ in range(4):  # by the dispatcher, and straight
        with torch.cuda.device(0):
            made = run("pre", SETUP, given)
            assert torch.cuda.current_device() == 0
        assert all(result.device == torch.device("cuda:1") for result in made)
        torch.cuda.synchronize(1)
        assert same(made, wanted)
    assert straight.find("pre", given, SETUP.text) is not None


# ---- graphs ---------------------------------------------------------------------------------------------
def test_a_captured_graph_outlives_what_comes_after() -> None:
    setup = SETUPS["bf16"]
    mhc.warm_up(setup, ["pre", "post"])
    x, fn, _, scale, base, *_ = on_gpu(inputs("pre", setup, tokens=8))
    before = mhc.compile_count()

    def site(x: Any) -> Any:
        made = mhc.pre(x, fn, scale, base, setup=setup)
        return mhc.post(x, made.y, made.post, made.comb, setup=setup)

    for _ in range(4):
        site(site(x))
    still = x.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = site(site(still))
    assert mhc.compile_count() == before, "a capture compiles nothing after a warm-up"
    graph.replay()
    assert torch.equal(result, site(site(x)))
    for tokens in range(1, 101):  # other shapes, and all cached memory given back
        site(torch.randn(tokens, 4, 264, device="cuda", dtype=torch.bfloat16))
    gc.collect()
    torch.cuda.empty_cache()
    assert mhc.compile_count() == before, "no token count compiles"
    other = torch.randn_like(x)
    still.copy_(other)
    result.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(result, site(site(other)))
    kept = result.clone()
    del graph
    gc.collect()
    torch.cuda.empty_cache()
    [torch.full((8, 4, 264), torch.nan, device="cuda", dtype=torch.bfloat16) for _ in range(50)]
    assert torch.equal(result, kept), "the result's memory is its own after the graph is gone"


def test_a_capture_may_compile_too() -> None:
    setup = Setup("deepseek-v4", hidden=72, iters=7)  # no other test has it
    x = torch.randn(3, 4, 72, device="cuda")
    graph = torch.cuda.CUDAGraph()
    before = mhc.compile_count()
    with torch.cuda.graph(graph):
        y = mhc.mean(x, setup=setup)
    assert mhc.compile_count() == before + 1
    graph.replay()
    assert torch.equal(y, mhc.mean(x, setup=setup))


def test_given_results_allocate_nothing() -> None:
    mhc.warm_up(SETUP, ["pre"])
    x, fn, _, scale, base, *_ = on_gpu(inputs("pre", SETUP, tokens=6))
    wanted = mhc.pre(x, fn, scale, base, setup=SETUP)
    out = mhc.Site(*(torch.full_like(t, torch.nan) for t in wanted))
    mhc.pre(x, fn, scale, base, setup=SETUP, out=out)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    assert mhc.pre(x, fn, scale, base, setup=SETUP, out=out) is out
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
    assert same(tuple(out), tuple(wanted))
    with pytest.raises(InputError, match="overlaps x"):
        mhc.mean(x, setup=SETUP, out=x.view(-1)[: 6 * 264].view(6, 264))


# ---- compiled, trained, refused ---------------------------------------------------------------------------
def test_compiled_by_inductor() -> None:
    tensors = inputs("pre", SETUP, tokens=6, device="cuda", grad=True)
    x, fn, _, scale, base, *_ = tensors

    def site(x: Any, fn: Any, scale: Any, base: Any) -> Any:
        made = mhc.pre(x, fn, scale, base, setup=SETUP)
        return mhc.post(x, torch.tanh(made.y), made.post, made.comb, setup=SETUP)

    torch._dynamo.reset()
    found = []
    for function in (torch.compile(site, fullgraph=True), site):
        y = function(x, fn, scale, base)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, fn, scale, base])))
    for got, want in zip(*found, strict=True):
        scaled = float(want.detach().abs().max())
        assert float((got - want).detach().abs().max()) <= 1e-4 * scaled
    reduced = torch.compile(site, fullgraph=True, mode="reduce-overhead")
    with torch.no_grad():
        for _ in range(3):
            made = reduced(x, fn, scale, base).clone()
    torch.testing.assert_close(made, site(x, fn, scale, base).detach(), rtol=1e-4, atol=1e-5)


def test_a_call_that_goes_straight_has_the_same_gradients() -> None:
    tensors = inputs("pre", SETUP, tokens=6, device="cuda", grad=True)
    given = [tensor for tensor in tensors if tensor is not None]
    found = []
    for _ in range(4):
        made = run("pre", SETUP, tensors)
        assert all(result.requires_grad for result in made)
        found.append(torch.autograd.grad([result.sum() for result in made], given))
    assert straight.find("pre", tensors, SETUP.text).record is not None
    for later in found[1:]:
        torch.testing.assert_close(later, found[0])
    with torch.no_grad():
        assert not any(result.requires_grad for result in run("pre", SETUP, tensors))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_training_follows_plain_torch(dtype: str) -> None:
    command = [sys.executable, "examples/torch_block.py", "--device", "cuda", "--dtype", dtype]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**_environment()})
    assert done.returncode == 0, done.stdout + done.stderr
    assert "path='cuda'" in done.stdout


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def test_cupy_is_not_needed() -> None:
    code = """
import sys
sys.modules["cupy"] = None
import torch, mhcgen.torch as mhc
setup = mhc.Setup("deepseek-v4", hidden=64)
x = torch.randn(3, 4, 64, device="cuda")
assert torch.allclose(mhc.mean(x, setup=setup), x.mean(1), atol=1e-6)
assert mhc.last_path().path == "cuda"
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment())


def test_a_fork_after_import_may_use_the_gpu() -> None:
    code = """
import os, mhcgen.torch as mhc, torch
if (child := os.fork()) == 0:
    x = torch.randn(3, 4, 64, device="cuda")
    mhc.mean(x, setup=mhc.Setup(hidden=64)).cpu()
    os._exit(0)
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=_environment())


def test_refusals() -> None:
    x, fn, _, scale, base, *_ = on_gpu(inputs("pre", SETUP))
    mhc.pre(x, fn, scale, base, setup=SETUP)
    cases: list[tuple[list[Any], str]] = [
        ([x, fn.cpu(), scale, base], "I-DEVICE"),
        ([x.cpu(), fn, scale, base], "I-DEVICE"),
        ([x[::2], fn, scale, base], "I-LAYOUT"),
        ([x.bfloat16(), fn, scale, base], "I-DTYPE"),
        ([x, fn.bfloat16(), scale, base], "I-DTYPE"),
        ([x[:, :, :128].contiguous(), fn, scale, base], "I-SHAPE"),
        ([x, fn, scale, base[:-1]], "I-SHAPE"),
        ([np.zeros((3, 4, 264), np.float32), fn, scale, base], "I-ARRAY"),
    ]
    for tensors, code in cases:
        with pytest.raises((InputError, InputTypeError)) as error:
            mhc.pre(*tensors, setup=SETUP)
        assert error.value.code == code
    with mhc.use_path("torch"):
        mhc.pre(x, fn, scale, base, setup=SETUP)
    assert mhc.last_path() == ("pre", "torch", "asked for")
    wide = [t.double() for t in (x, fn, scale, base)]
    assert mhc.pre(*wide, setup=SETUP).y.dtype == torch.float64


# ---- any Plan -------------------------------------------------------------------------------------------
@needs_executor
def test_a_whole_trunk_with_branches() -> None:
    import mhcgen

    program = mhcgen.build("deepseek-v4", streams=4, hidden=64, scope="trunk", layers=1, dtype="bf16")
    plan = mhcgen.compile(program, fuse="pre", arch=mhc.arch_of(torch.cuda.current_device()))
    generator = torch.Generator().manual_seed(0)
    given = {}
    for tensor in program.of_role("input", "parameter"):
        dtype = torch.bfloat16 if tensor.dtype == "bf16" else torch.float32
        given[tensor.name] = (torch.randn(program.shape(tensor.name, 5), generator=generator) / 4).to(dtype)
    names = [stage.name for stage in program.stages_of_kind("branch")]
    module = mhc.load(plan)
    made = module(**{k: v.cuda() for k, v in given.items()}, branches={name: lambda z: z * 2 for name in names})
    host = mhcgen.compile(program, fuse="none").load("host")
    two = np.float32(2)
    wanted = host(
        **{k: as_numpy(v) for k, v in given.items()},
        branches={name: lambda z: (z.astype(np.float32) * two).astype(z.dtype) for name in names},
    )
    assert as_numpy(made["y"].cpu()).tobytes() == wanted["y"].tobytes()
    with pytest.raises(InputError, match="is on cpu"):
        module(**given, branches={name: lambda z: z for name in names})
    twin = {k: v.cuda() for k, v in given.items()}
    e = torch.empty(twin["e"].numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(5, 64).copy_(twin["e"])
    again = module(**{**twin, "e": e}, branches={name: lambda z: z * 2 for name in names})
    assert torch.equal(again["y"], made["y"])
