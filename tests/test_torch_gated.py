"""mhcgen.torch: the operators and modules of a model whose gates are of elements (gated residual)."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch import nn
from torch_cases import as_tuple, call, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen import compile
from mhcgen.errors import UsageError
from mhcgen.topology import Topology
from mhcgen.torch import OPERATIONS, Setup, operator
from mhcgen.torch.cpu import as_numpy

needs_executor = pytest.mark.skipif(bool(no_compiler()), reason=f"no CPU executor: {no_compiler()}")
GATED = [name for name, operation in OPERATIONS.items() if operation.gated]
CASES = [(name, False) for name in GATED] + [(n, True) for n in GATED if "mixes?" in OPERATIONS[n].inputs]
IDS = [f"{name}{'-mixes' if gemm else ''}" for name, gemm in CASES]
SMALL = Setup("gated-residual", hidden=16, rank=3)
BF16 = SMALL.replace(dtype="bf16")
TINY = Setup("gated-residual", streams=3, hidden=4, rank=2)


def run(name: str, setup: Setup, tensors: list[Any]) -> tuple[torch.Tensor, ...]:
    return as_tuple(operator(name)(*tensors, setup.text))


@needs_executor
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_the_executor_path_has_the_bits_of_the_host_module(name: str, gemm: bool) -> None:
    for setup in (SMALL, BF16):
        tensors = inputs(name, setup, gemm=gemm)
        with mhc.use_path("kernels"):
            made = run(name, setup, tensors)
        of = call(name, setup, tensors)
        present = [t for t in tensors if t is not None]
        given = {spec.name: as_numpy(t) for spec, t in zip(of.inputs, present, strict=True)}
        wanted = compile(of.program).load("host")(**given)
        for result, output in zip(made, OPERATIONS[name].outputs, strict=True):
            assert as_numpy(result).tobytes() == wanted[output].tobytes(), (setup, output)


@needs_executor
@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_plain_torch_agrees_with_the_executor(name: str, gemm: bool) -> None:
    for setup, limit in ((SMALL, 2e-5), (BF16, 2e-2)):
        tensors = inputs(name, setup, gemm=gemm)
        made = []
        for path in ("kernels", "torch"):
            with mhc.use_path(path):
                made.append(run(name, setup, tensors))
        for kernel, plain in zip(*made, strict=True):
            scale = max(1.0, float(kernel.double().abs().max()))
            assert float((kernel.double() - plain.double()).abs().max()) <= limit * scale


@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_gradcheck(name: str, gemm: bool) -> None:
    tensors = inputs(name, TINY, tokens=2, gemm=gemm, double=True, grad=True)
    leaves = [tensor for tensor in tensors if tensor is not None]

    def function(*given: Any) -> Any:
        rest = iter(given)
        return operator(name)(*[None if tensor is None else next(rest) for tensor in tensors], TINY.text)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_opcheck(name: str, gemm: bool) -> None:
    with mhc.use_path("torch"):
        for grad in (False, True):
            torch.library.opcheck(operator(name), (*inputs(name, SMALL, gemm=gemm, grad=grad), SMALL.text))


def test_the_functions_give_their_results_by_name() -> None:
    x, weight, fn, _, up = inputs("gated", SMALL)
    with mhc.use_path("torch"):
        site = mhc.gated(x, weight, fn, up, setup=SMALL)
        normed = mhc.gated_norm(x, weight, fn, up, torch.ones(16), setup=SMALL)
        y = mhc.gated_head(x, weight, fn[:3].contiguous(), up, setup=SMALL)
        f = torch.tanh(site.y)
        crossed = mhc.gated_boundary(x, f, site.post, site.comb, weight, fn, up, setup=SMALL)
        x_next = mhc.post(x, f, site.post, site.comb, setup=SMALL)
        following = mhc.gated(x_next, weight, fn, up, setup=SMALL)
    assert torch.equal(site.y, normed.y)
    assert torch.allclose(site.y, y)  # a matrix product of fewer rows may round apart
    assert torch.equal(crossed.x_next, x_next) and torch.equal(crossed.post_next, following.post)
    assert torch.allclose(x_next, x + site.post[:, :, None] * f[:, None])


@pytest.mark.parametrize(
    ("name", "setup", "hint"),
    [
        ("pre", SMALL, "use gated or gated_norm"),
        ("head", SMALL, "use gated_head"),
        ("boundary", SMALL, "use gated_boundary or gated_boundary_norm"),
        ("collapse", SMALL, "gated_head or mean"),
        ("gated", Setup(hidden=16), "use pre or finish or pre_norm or pre_norm_quant"),
    ],
)
def test_an_operator_of_the_other_models_refuses(name: str, setup: Setup, hint: str) -> None:
    tensors = [torch.zeros(3, 4, 16), *[None] * (len(OPERATIONS[name].inputs) - 1)]
    with pytest.raises(UsageError) as caught:
        operator(name)(*[torch.zeros(1) if t is None else t for t in tensors], setup.text)
    assert caught.value.code == "U-MODEL" and hint in caught.value.hints[0]


@pytest.mark.parametrize("exit", ["head", "mean"])
@pytest.mark.parametrize("norm", [False, True])
def test_a_stack_is_its_layers_and_trains(norm: bool, exit: str) -> None:
    torch.manual_seed(0)
    topology = Topology("gated-residual", 4, 16, 2, 0, 1e-6, 0.0, 1e-6, exit, rank=3)
    e = torch.randn(2, 3, 16)
    made = []
    for boundary in (False, True):
        torch.manual_seed(1)
        branches = [(nn.Linear(16, 16), nn.Linear(16, 16)) for _ in range(2)]
        stack = mhc.HyperConnectionStack(branches, topology, norm=norm, boundary=boundary)
        with mhc.use_path("torch"):
            y = stack(e)
            y.square().sum().backward()
        assert y.shape == e.shape
        names = {name.rpartition("_attn_")[2] for name, _ in stack.named_parameters() if "hc_attn" in name}
        assert names == {"fn", "stream_weight", "up"}
        # up starts at 0: it is what has a gradient before anything else in the gates does.
        assert stack.layers[0].hc_attn_up.grad.abs().max() > 0
        assert (stack.layers[0].hc_attn_fn.grad is not None) and (exit != "head" or stack.hc_head_up.grad is not None)
        made.append(y)
    assert torch.allclose(*made, rtol=1e-5, atol=1e-6)


def test_a_site_starts_around_its_branch() -> None:
    """Post gates are 1, and the branch reads half the mean of the normed streams."""
    torch.manual_seed(0)
    site = mhc.HyperConnection(nn.Linear(16, 16), SMALL)
    x = torch.randn(5, 4, 16)
    with torch.no_grad(), mhc.use_path("torch"):
        made = site(x)
        normed = x / (x.square().mean(2, keepdim=True) + 1e-6).sqrt()
        wanted = x + site.branch(normed.mean(1) / 2)[:, None]
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-5)


def test_what_modules_of_this_model_do_not_take() -> None:
    with pytest.raises(UsageError, match="norms first"):
        mhc.HyperConnection(nn.Identity(), SMALL, gemm=True)
    with pytest.raises(UsageError, match="no public spelling"):
        mhc.load_public_state_dict(mhc.HyperConnection(nn.Identity(), SMALL), {})


@needs_executor
def test_warm_up_builds_them() -> None:
    report = mhc.warm_up(SMALL, ["gated", "gated_head"], device="cpu")
    assert [made.arm for made in report.built] == ["gated", "gated", "gated_head", "gated_head"]
