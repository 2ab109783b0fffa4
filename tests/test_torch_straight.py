"""mhcgen.torch past the dispatcher: which calls go straight, which never do, and that nothing else changes.

The implementation for CUDA is put in the place of the one for CPU tensors, with launchers that only count.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch_cases import SMALL, as_tuple, inputs

import mhcgen.torch as mhc
from mhcgen.errors import InputError, InputTypeError
from mhcgen.torch import launch, ops, straight

TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])
NAMES = ("mean", "pre", "post", "head", "boundary")


class Counter:
    """Calls of operators that the dispatcher had, launches, and how many of them went straight."""

    def __init__(self) -> None:
        self.dispatched = self.launched = 0

    def launchers(self, plan: Any, scalar: bool, device: int, name: str) -> tuple[Any, ...]:
        def count(values: Any, shape: Any, stream: int) -> None:
            self.launched += 1

        return tuple(SimpleNamespace(launch=count, launches=0) for _ in plan.kernels)

    def straight(self, run: Any) -> bool:
        """Whether a call launched without the dispatcher; whether it launched at all is checked."""
        dispatched, launched = self.dispatched, self.launched
        run()
        assert self.launched == launched + 1
        assert self.dispatched - dispatched in (0, 1)
        return self.dispatched == dispatched


@pytest.fixture
def counter(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter]:
    if TORCH < (2, 11) and not (straight.usable() and straight.RECORD):
        pytest.skip(f"torch {torch.__version__} has not all that going straight takes")
    made = Counter()
    allocate = lambda sizes, strides, dtype: torch.empty_strided(sizes, strides, dtype=dtype).zero_()  # noqa: E731
    monkeypatch.setattr(launch, "load_launchers", made.launchers)
    monkeypatch.setattr(launch, "arch_of", lambda device: "sm_90")
    monkeypatch.setattr(launch, "_allocators", lambda device: (allocate, allocate))
    monkeypatch.setattr(launch, "_stream", lambda device: 0)
    monkeypatch.setattr(launch, "_current", lambda: -1)
    ready: dict[str, Any] = {name: {} for name in mhc.OPERATIONS}
    monkeypatch.setattr(ops, "READY", ready)
    monkeypatch.setattr(straight, "READY", ready)
    monkeypatch.setattr(straight, "_known", {name: {} for name in mhc.OPERATIONS})

    def implementation(name: str) -> Any:
        run = ops._quick(mhc.OPERATIONS[name])

        def counted(*args: Any) -> Any:
            made.dispatched += 1
            return run(*args)

        return counted

    with torch.library._scoped_library("mhcgen", "IMPL") as library:
        for name in NAMES:
            library.impl(name, implementation(name), "CPU", allow_override=True)
        yield made


def ready(counter: Counter) -> tuple[Any, torch.Tensor]:
    """`mean` of a tensor, which goes straight."""
    assert straight.usable(), "this torch tells tensors apart as the others do"
    (x,) = inputs("mean")
    for _ in range(3):
        mhc.mean(x, setup=SMALL)
    assert counter.straight(lambda: mhc.mean(x, setup=SMALL))
    return (lambda tensor=x: mhc.mean(tensor, setup=SMALL)), x


def test_a_call_goes_straight_when_it_was_seen(counter: Counter) -> None:
    x, fn, _, scale, base, *_ = inputs("pre")
    runs = {
        "pre": lambda: mhc.pre(x, fn, scale, base, setup=SMALL),
        "mean": lambda: mhc.mean(x, setup=SMALL),
        "head": lambda: mhc.head(*[t for t in inputs("head") if t is not None], setup=SMALL),
    }
    for run in runs.values():
        assert [counter.straight(run) for _ in range(4)] == [False, False, True, True]
    made = runs["pre"]()
    assert isinstance(made, mhc.Site) and [tuple(t.shape) for t in made] == [(3, 16), (3, 4), (3, 4), (3, 4, 4)]
    assert mhc.last_path() == ("pre", "cuda", "CUDA tensors")
    assert len({t.untyped_storage().data_ptr() for t in made}) == 4


def test_another_token_count_or_state_is_learned_by_itself(counter: Counter) -> None:
    run, x = ready(counter)
    longer = torch.zeros(5, 4, 16)
    assert [counter.straight(lambda: run(longer)) for _ in range(3)] == [False, False, True]
    assert run(longer).shape == (5, 16)
    with torch.inference_mode():
        assert [counter.straight(run) for _ in range(2)] == [False, True]
        assert run().is_inference()
    assert not run().is_inference()
    with torch.no_grad():
        assert counter.straight(run)
    assert counter.straight(run)
    assert counter.straight(lambda: run(x.clone()))


def test_what_is_not_as_before_has_the_old_errors(counter: Counter) -> None:
    ready(counter)
    x, fn, _, scale, base, *_ = inputs("pre")
    for _ in range(3):
        mhc.pre(x, fn, scale, base, setup=SMALL)
    launched = counter.launched
    for tensors, code in (
        ((x[:, :, :8].contiguous(), fn, scale, base), "I-SHAPE"),
        ((x, fn[:-1], scale, base), "I-SHAPE"),
        ((x.bfloat16(), fn, scale, base), "I-DTYPE"),
        ((x.transpose(1, 2).contiguous().transpose(1, 2), fn, scale, base), "I-LAYOUT"),
        ((x, fn, None, base), "I-MISSING"),
        ((x.numpy(), fn, scale, base), "I-ARRAY"),
        ((x, fn, scale, base.numpy()), "I-ARRAY"),
        ((x, fn, scale, 1.0), "I-ARRAY"),
        (([[1.0]], fn, scale, base), "I-ARRAY"),
        ((None, fn, scale, base), None),
    ):
        with pytest.raises((InputError, InputTypeError) if code else Exception) as error:
            mhc.pre(*tensors, setup=SMALL)
        assert code is None or error.value.code == code
    with pytest.raises(InputError) as error:
        mhc.pre(x, fn, scale, base, mixes=torch.zeros(3, 24), setup=SMALL)
    assert error.value.code == "I-UNKNOWN"
    assert counter.launched == launched
    assert counter.straight(lambda: mhc.pre(x, fn, scale, base, setup=SMALL))


def test_one_tensor_as_two_inputs_is_not_learned(counter: Counter) -> None:
    setup = mhc.Setup("deepseek-v4.1", hidden=16, iters=3)
    tensors = inputs("boundary", setup)
    tensors[-1] = tensors[2]  # pre_prev is post
    for _ in range(5):
        assert not counter.straight(lambda: mhc.operator("boundary")(*tensors, setup.text))
    assert not any(straight._known["boundary"].values())


def test_modes_and_the_profiler_see_every_call(counter: Counter) -> None:
    run, _ = ready(counter)
    seen: list[Any] = []

    class Dispatch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    class Function(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    for mode in (Dispatch, Function):
        seen.clear()
        with mode():
            [run() for _ in range(3)]
        assert seen.count(mhc.operator("mean")) == 3
    with torch.profiler.profile() as recorded:
        [run() for _ in range(3)]
    assert sum(event.count for event in recorded.key_averages() if event.key == "mhcgen::mean") == 3
    assert counter.straight(run)


def test_transforms_tracing_fakes_and_subclasses_have_the_dispatcher(counter: Counter) -> None:
    from torch._subclasses import FakeTensorMode
    from torch.fx.experimental.proxy_tensor import make_fx

    run, x = ready(counter)
    graph = make_fx(lambda tensor: run(tensor))(x)
    assert any(node.target is mhc.operator("mean") for node in graph.graph.nodes)
    launched = counter.launched
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert run(fake).shape == (3, 16)
    assert run(fake).shape == (3, 16) and counter.launched == launched, "a fake one is never launched"

    def captured(scaled: torch.Tensor) -> torch.Tensor:
        assert straight.attempt("mean", (x,), SMALL.text) is None
        assert run().shape == (3, 16)
        return scaled + 1

    torch.vmap(captured)(torch.zeros(2, 3))
    torch.func.grad(lambda y: captured(y).sum())(torch.zeros(3))
    assert torch.vmap(run)(torch.stack([x, x])).shape == (2, 3, 16)
    negated = torch._neg_view(x)
    assert not counter.straight(lambda: run(negated)) and not counter.straight(lambda: run(negated))
    assert counter.straight(run)


def test_an_operator_called_by_itself_learns_too(counter: Counter) -> None:
    (x,) = inputs("mean")
    run = lambda: mhc.operator("mean")(x, SMALL.text)  # noqa: E731
    assert [counter.straight(run) for _ in range(3)] == [False, False, True]
    assert counter.straight(lambda: mhc.mean(x, setup=SMALL)), "for the functions as well"


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_recorded_and_only_where_one_is_wanted(counter: Counter, name: str) -> None:
    tensors = inputs(name, grad=True)
    run = lambda: as_tuple(mhc.operator(name)(*tensors, SMALL.text))  # noqa: E731
    assert [counter.straight(run) for _ in range(3)] == [False, False, True]
    with torch.no_grad():
        assert counter.straight(run)
        assert not any(result.requires_grad for result in run())
    made = run()
    assert all(result.requires_grad and result.grad_fn is not None for result in made)
    given = [t for t in tensors if t is not None]
    found = torch.autograd.grad([t.sum() for t in made], given, create_graph=True)
    with mhc.use_path("torch"):
        wanted = torch.autograd.grad([t.sum() for t in run()], given)
    for got, want in zip(found, wanted, strict=True):
        torch.testing.assert_close(got.detach(), want)
    assert found[0].grad_fn is not None or name == "mean", "differentiable again"
    half = [t if t is None or index else t.detach() for index, t in enumerate(tensors)]
    if len(given) > 1:
        assert all(t.requires_grad for t in as_tuple(mhc.operator(name)(*half, SMALL.text)))
    made = run()
    with torch.no_grad():
        given[0].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad([t.sum() for t in made], given)


def test_plain_torch_when_it_is_asked_for(counter: Counter) -> None:
    run, x = ready(counter)
    launched = counter.launched
    with mhc.use_path("torch"):
        made = run()
    assert counter.launched == launched and torch.allclose(made, x.mean(1), atol=1e-6)
    assert counter.straight(run)


def test_without_the_look_nothing_goes_straight(counter: Counter, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(straight, "usable", lambda: False)
    (x,) = inputs("mean")
    assert [counter.straight(lambda: mhc.mean(x, setup=SMALL)) for _ in range(4)] == [False] * 4
