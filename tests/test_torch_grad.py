"""mhcgen.torch: gradients by gradcheck in float64, and of the kernels' forward in fp32 and bf16."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch_cases import CASES, IDS, PLAIN, SMALL, as_tuple, inputs, no_compiler

import mhcgen.torch as mhc
from mhcgen.errors import UsageError
from mhcgen.models import MODELS
from mhcgen.models import model as find_model
from mhcgen.torch import OPERATIONS, Setup, operator
from mhcgen.torch.autograd import INTEGRAL

TINY = Setup("deepseek-v4", streams=3, hidden=4, iters=3)


def differentiable(name: str, setup: Setup, made: Any) -> tuple[Any, ...]:
    pairs = zip(OPERATIONS[name].outputs, as_tuple(made), strict=True)
    return tuple(result for output, result in pairs if output not in INTEGRAL)


@pytest.mark.parametrize(("name", "gemm"), CASES, ids=IDS)
def test_gradcheck(name: str, gemm: bool) -> None:
    tensors = inputs(name, TINY, tokens=2, gemm=gemm, double=True, grad=True)
    leaves = [tensor for tensor in tensors if tensor is not None]

    def function(*given: Any) -> Any:
        rest = iter(given)
        filled = [None if tensor is None else next(rest) for tensor in tensors]
        return differentiable(name, TINY, operator(name)(*filled, TINY.text))

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, leaves, fast_mode=True, atol=1e-4)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_gradcheck_of_every_model(model: str) -> None:
    streams = 3 if not find_model(model).refuses_streams(3) else 4
    setup = Setup(model, streams=streams, hidden=4)
    name = "gated_boundary_norm" if find_model(model).rank else "boundary_norm"
    tensors = inputs(name, setup, tokens=2, double=True, grad=True)
    leaves = [tensor for tensor in tensors if tensor is not None]

    def function(*given: Any) -> Any:
        rest = iter(given)
        filled = [None if tensor is None else next(rest) for tensor in tensors]
        return operator(name)(*filled, setup.text)

    assert torch.autograd.gradcheck(function, leaves, fast_mode=True)


@pytest.mark.parametrize("name", PLAIN)
def test_gradients_of_fp32_are_those_of_float64(name: str) -> None:
    """The forward may be a kernel; its backward takes the inputs again, whatever made the results."""
    found = []
    for double in (False, True):
        tensors = inputs(name, SMALL, double=double, grad=True)
        path = "torch" if no_compiler() else "kernels"
        with mhc.use_path(path):
            made = differentiable(name, SMALL, operator(name)(*tensors, SMALL.text))
        weights = [torch.linspace(-1, 1, t.numel(), dtype=t.dtype).view_as(t) for t in made]
        total = sum((w * t).sum() for w, t in zip(weights, made, strict=True))
        leaves = [tensor for tensor in tensors if tensor is not None]
        found.append(torch.autograd.grad(total, leaves))
        assert all(g.dtype == leaf.dtype for g, leaf in zip(found[-1], leaves, strict=True))
    for single, exact in zip(*found, strict=True):
        scale = float(exact.abs().max())
        assert float((single.double() - exact).abs().max()) <= 2e-5 * scale + 1e-9


def test_gradients_of_bf16_are_computed_in_fp32() -> None:
    setup = SMALL.replace(dtype="bf16")
    x, fn, _, scale, base, *_ = inputs("pre", setup, grad=True)
    wide = x.detach().float().requires_grad_()
    with mhc.use_path("torch"):
        (got,) = torch.autograd.grad(mhc.pre(x, fn, scale, base, setup=setup).comb.square().sum(), [x])
        (want,) = torch.autograd.grad(mhc.pre(wide, fn, scale, base, setup=SMALL).comb.square().sum(), [wide])
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, want.to(torch.bfloat16)), "rounded once, at the end"


def test_only_what_is_needed_gets_a_gradient() -> None:
    x, fn, _, scale, base, *_ = inputs("pre")
    fn.requires_grad_()
    made = mhc.pre(x, fn, scale, base, setup=SMALL)
    made.y.sum().backward()
    assert x.grad is None and base.grad is None and fn.grad is not None
    assert bool((fn.grad[:4] != 0).any()) and not bool(fn.grad[4:].any()), "y depends on the pre rows alone"


def test_quantised_results_have_no_gradient() -> None:
    tensors = inputs("pre_norm_quant", grad=True)
    made = mhc.QuantSite(*operator("pre_norm_quant")(*tensors, SMALL.text))
    assert not made.q.requires_grad and not made.q_scale.requires_grad and made.z.requires_grad


def test_autocast_does_not_narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    x, fn, _, scale, base, *_ = inputs("pre", grad=True)
    found = []
    for enabled in (False, True):
        with mhc.use_path("torch"), torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            made = mhc.pre(x, fn, scale, base, setup=SMALL)
            found.append((*made, *torch.autograd.grad(made.y.sum() + made.comb.square().sum(), [x, fn, scale, base])))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_kind_without_a_form_in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    from mhcgen.torch import combs

    monkeypatch.setattr(combs, "_COMBS", {})
    with mhc.use_path("torch"), pytest.raises(UsageError) as error:
        mhc.pre(*[t for t in inputs("pre") if t is not None], setup=SMALL)
    assert error.value.code == "U-COMB"
    mhc.register_comb("sinkhorn", lambda logits, n, attrs: logits.reshape(-1, n, n))
    with mhc.use_path("torch"):
        mhc.pre(*[t for t in inputs("pre") if t is not None], setup=SMALL)
