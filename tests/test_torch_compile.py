"""mhcgen.torch under torch.compile: every operator in a full graph, with gradients and a dynamic token count."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch_cases import CASES, IDS, SMALL, as_tuple, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen.torch import OPERATIONS, Setup
from mhcgen.torch.autograd import INTEGRAL


@pytest.fixture(autouse=True)
def plain_torch() -> Iterator[None]:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with mhc.use_path("torch"):
        yield
    torch._dynamo.reset()


def function(name: str) -> Any:
    """The public function of an operation, of positional tensors."""
    call = getattr(mhc, name)
    names = OPERATIONS[name].names
    keywords = ["comb_logits", "pre_prev", *(["mixes"] if name != "finish" else [])]

    def run(*tensors: Any) -> Any:
        named = dict(zip(names, tensors, strict=True))
        extra = {key: named.pop(key) for key in keywords if key in named}
        return call(*named.values(), setup=SMALL, **extra)

    return run


def gradients(run: Any, name: str, tensors: list[Any]) -> tuple[Any, ...]:
    made = as_tuple(run(*tensors))
    total = sum(t.square().sum() for o, t in zip(OPERATIONS[name].outputs, made, strict=True) if o not in INTEGRAL)
    return (*made, *torch.autograd.grad(total, [tensor for tensor in tensors if tensor is not None]))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_every_operator_compiles_in_full(name: str, gemm: bool, backend: str) -> None:
    run = function(name)
    compiled = torch.compile(run, fullgraph=True, backend=backend)
    for tokens in (3, 5, 7):
        tensors = inputs(name, tokens=tokens, gemm=gemm, grad=True)
        for got, want in zip(gradients(compiled, name, tensors), gradients(run, name, tensors), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 2, "a new token count is no new graph"


@pytest.mark.skipif(bool(no_compiler()), reason="inductor needs a C++ compiler")
def test_inductor() -> None:
    setup = SMALL.replace(iters=1)

    def site(x: Any, fn: Any, scale: Any, base: Any) -> Any:
        made = mhc.pre(x, fn, scale, base, setup=setup)
        return mhc.post(x, torch.tanh(made.y), made.post, made.comb, setup=setup)

    x, fn, _, scale, base, *_ = inputs("pre", setup, grad=True)
    found = []
    for run in (torch.compile(site, fullgraph=True), site):
        y = run(x, fn, scale, base)
        found.append((y, *torch.autograd.grad(y.square().sum(), [x, fn, scale, base])))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_out_compiles() -> None:
    def run(x: Any, y: Any) -> Any:
        mhc.mean(x, setup=SMALL, out=y)
        return y + 1

    x = inputs("mean")[0]
    y = torch.zeros(3, 16)
    made = torch.compile(run, fullgraph=True, backend="aot_eager")(x, y)
    assert torch.equal(y, mhc.mean(x, setup=SMALL)) and torch.equal(made, y + 1)


def test_a_module_compiles() -> None:
    from mhcgen.topology import Topology

    torch.manual_seed(0)
    topology = Topology("deepseek-v4.1", 4, 16, 2, 3, 1e-20, 1e-6, 1e-20, "pre")
    branches = [(torch.nn.Linear(16, 16), torch.nn.Linear(16, 16)) for _ in range(2)]
    stack = mhc.HyperConnectionStack(branches, topology, norm=True)
    e = torch.randn(2, 5, 16)
    compiled = torch.compile(stack, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(e), stack(e), rtol=1e-5, atol=1e-6)
    compiled(e).sum().backward()
    assert all(parameter.grad is not None for parameter in stack.parameters())


def test_a_graph_says_what_it_computes() -> None:
    setup = Setup("glm-5.3-flash", hidden=16)
    found: list[str] = []

    def look(graph: Any, _: Any) -> Any:
        found.extend(str(node) for node in graph.graph.nodes for node in node.args if isinstance(node, str))
        return graph

    torch.compile(lambda x: mhc.mean(x, setup=setup), backend=look)(torch.randn(3, 4, 16))
    assert found == [setup.text]


def test_export() -> None:
    class Block(torch.nn.Module):
        def forward(self, x: Any, fn: Any, scale: Any, base: Any) -> Any:
            made = mhc.pre(x, fn, scale, base, setup=SMALL)
            return mhc.post(x, made.y, made.post, made.comb, setup=SMALL)

    x, fn, _, scale, base, *_ = inputs("pre")
    tokens = torch.export.Dim("tokens", min=2, max=64)
    program = torch.export.export(Block(), (x, fn, scale, base), dynamic_shapes=({0: tokens}, None, None, None))
    longer = torch.randn(9, 4, 16)
    assert torch.equal(program.module()(longer, fn, scale, base), Block()(longer, fn, scale, base))
