"""Gradients of operations, and the part of torch's autograd that each operator has.

The part is what `torch.library.register_autograd` would make, except that a call which was seen before
(`mhcgen.torch.straight`) launches from here, and that the dispatcher is asked once less.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from mhcgen.errors import InputError
from mhcgen.torch import straight
from mhcgen.torch.calls import Call, call_of
from mhcgen.torch.eager import evaluate
from mhcgen.torch.operations import Operation

#: Results without a gradient.
INTEGRAL = ("q", "q_scale")
_PRIVATE = ("_AutoDispatchBelowAutograd", "_after_autograd_keyset", "_any_requires_grad")


def register(operation: Operation, library: torch.library.Library) -> None:
    """Make an operator of a library differentiable."""
    saving, backward = _saving(operation), _backward(operation)
    if not all(hasattr(torch._C, name) for name in _PRIVATE):
        torch.library.register_autograd(
            f"{library.ns}::{operation.name}", backward, setup_context=saving, lib=library
        )
        return
    count, single = len(operation.inputs), len(operation.outputs) == 1
    overload = getattr(getattr(torch.ops, library.ns), operation.name).default
    below, after = torch._C._AutoDispatchBelowAutograd, torch._C._after_autograd_keyset
    any_requires_grad = torch._C._any_requires_grad
    name, find = operation.name, straight.find
    transformed = getattr(torch._C, "_are_functorch_transforms_active", bool)

    class Recorded(torch.autograd.Function):
        """The inputs of an operator, and either a call that was seen or the keys it is dispatched by."""

        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            *inputs, how = args
            if isinstance(how, straight.Seen):
                made = how.run(inputs)
                output: Any = made[0] if single else made
            else:
                with below():
                    output = overload.redispatch(how & after, *inputs)
            saving(ctx, inputs, output)
            return output

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Any:
            return (*backward(ctx, *grads), None)

    Recorded.__name__ = Recorded.__qualname__ = f"mhcgen_{operation.name}"
    # Function.apply asks first whether a transform is active; where a call was seen before, none is.
    straight.RECORD[operation.name] = super(torch.autograd.Function, Recorded).apply

    def kernel(keys: Any, *args: Any) -> Any:
        seen = find(name, args, args[count])
        if seen is not None:
            if seen.record is not None and torch.is_grad_enabled():
                return seen.record(*args, seen)
            made = seen.run(args)
            return made[0] if single else made
        tensors, text = args[:count], args[count]
        refuse_forward_mode(name, tensors)
        if torch.is_grad_enabled() and any_requires_grad(*tensors):
            if transformed():
                raise _no_derivative(name, "torch.func has no way through its gradient")
            output = Recorded.apply(*args, keys)
        else:
            with below():
                output = overload.redispatch(keys & after, *args)
        straight.learn(name, tensors, text)
        return output

    library.impl(operation.name, kernel, "Autograd", with_keyset=True)


def refuse_forward_mode(name: str, tensors: Sequence[Tensor | None]) -> None:
    """Tangents are refused where torch would drop them.

    Raises:
        InputError: `I-GRAD`.
    """
    if forward_ad._current_level >= 0 and any(
        tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors
    ):
        raise _no_derivative(name, "an input has a tangent, and there are no derivatives in forward mode")


def _no_derivative(name: str, why: str) -> InputError:
    return InputError(
        "I-GRAD", f"{name}: {why}", where=name, hints=("use loss.backward() or torch.autograd.grad",)
    )


def _saving(operation: Operation) -> Callable[..., None]:
    count = len(operation.inputs)
    integral = [index for index, output in enumerate(operation.outputs) if output in INTEGRAL]

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        ctx.save_for_backward(*inputs[:count])
        ctx.setup = inputs[count]
        ctx.set_materialize_grads(False)
        if integral:
            ctx.mark_non_differentiable(*[output[index] for index in integral])

    return setup_context


def _backward(operation: Operation) -> Callable[..., tuple[Tensor | None, ...]]:
    count = len(operation.inputs)

    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors
        call = call_of(operation.name, ctx.setup, tensors)
        found = gradients(call, tensors, ctx.needs_input_grad[:count], grads)
        return (*found, None)

    return backward


def gradients(
    call: Call, tensors: Sequence[Tensor | None], needed: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Gradients of an operation's inputs, by its stages in torch.

    Args:
        call: the operation.
        tensors: its inputs in the order of the schema.
        needed: which of them want a gradient.
        grads: of its results; None where nothing depends on one.

    Returns:
        One an input, in its dtype; None where it is not needed. Differentiable again where grad mode is on.
    """
    again = torch.is_grad_enabled()
    wanted = [spec.name for spec, grad in zip(call.outputs, grads, strict=True) if grad is not None]
    wanted = [name for name in wanted if name not in INTEGRAL]
    names = [name for name, need in zip(call.operation.names, needed, strict=True) if need]
    if not wanted or not names:
        return [None] * len(tensors)
    first = next(tensor for tensor in tensors if tensor is not None)
    with torch.enable_grad(), torch.autocast(first.device.type, enabled=False):
        given: dict[str, Tensor] = {}
        for name, tensor in zip(call.operation.names, tensors, strict=True):
            if tensor is not None:
                leaf = tensor.view_as(tensor) if again else tensor.detach()
                given[name] = leaf.requires_grad_() if name in names and not leaf.requires_grad else leaf
        made = evaluate(call.program, given, wanted)
        pairs = [
            (made[spec.name], grad)
            for spec, grad in zip(call.outputs, grads, strict=True)
            if grad is not None and spec.name in made and made[spec.name].requires_grad
        ]
        found = torch.autograd.grad(
            [result for result, _ in pairs],
            [given[name] for name in names],
            [grad for _, grad in pairs],
            create_graph=again,
            allow_unused=True,
        )
    by_name = dict(zip(names, found, strict=True))
    return [by_name.get(name) for name in call.operation.names]
