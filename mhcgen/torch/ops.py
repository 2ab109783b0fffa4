"""`torch.library` operators: one functional and one `out` form of each operation.

```
mhcgen::pre(Tensor x, Tensor? fn, ..., str setup) -> (Tensor, ...)          CPU CUDA fake autograd
mhcgen::pre_out(Tensor x, ..., str setup, *, Tensor(a!) out_y, ...) -> ()   CPU CUDA fake
```
torch.compile takes each as one opaque node, whose shapes the fake form gives. Its backward is not opaque: it takes
the inputs again through `mhcgen.torch.eager`, so that compiled code sees and fuses it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mhcgen.errors import InputError, InternalError
from mhcgen.torch import cpu
from mhcgen.torch.calls import LAST, Call, call_of, note
from mhcgen.torch.eager import evaluate
from mhcgen.torch.launch import Prepared
from mhcgen.torch.operations import OPERATIONS, Operation

NAMESPACE = "mhcgen"
#: Results without a gradient.
INTEGRAL = ("q", "q_scale")

LIBRARY = torch.library.Library(NAMESPACE, "DEF")

#: operation -> text of its Setup, device, and which optional inputs are absent -> what launches it. Never evicted.
_ready: dict[str, dict[tuple[Any, ...], Prepared]] = {name: {} for name in OPERATIONS}


def prepared(operation: Operation, setup: str, tensors: Sequence[Tensor | None], device: int) -> Prepared:
    """What launches an operation on a device, made the first time and kept for good."""
    found = prepared_before(operation, setup, tensors, device)
    if found is None:
        key = (setup, device, *[tensors[index] is None for index in _optional(operation)])
        found = _ready[operation.name].setdefault(key, Prepared(call_of(operation.name, setup, tensors), device))
    return found


def prepared_before(
    operation: Operation, setup: str, tensors: Sequence[Tensor | None], device: int
) -> Prepared | None:
    """What `prepared` has made; None where it was never asked."""
    key = (setup, device, *[tensors[index] is None for index in _optional(operation)])
    return _ready[operation.name].get(key)


def _optional(operation: Operation) -> tuple[int, ...]:
    return tuple(index for index, name in enumerate(operation.inputs) if name.endswith("?"))


def _present(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    return [tensor for tensor in tensors if tensor is not None]


def _by_torch(call: Call, tensors: Sequence[Tensor], outs: Sequence[Tensor]) -> None:
    """Plain torch, copied into the results: what `evaluate` gives may share memory with its inputs."""
    named = {spec.name: tensor for spec, tensor in zip(call.inputs, tensors, strict=True)}
    with torch.no_grad():
        made = evaluate(call.program, named)
        for spec, out in zip(call.outputs, outs, strict=True):
            out.copy_(made[spec.name])


def _on_cpu(operation: Operation, tensors: Sequence[Tensor | None], setup: str, outs: Sequence[Tensor]) -> Any:
    call, given = call_of(operation.name, setup, tensors), _present(tensors)
    tokens = call.check(given)
    if outs:
        call.check_out(given, outs, tokens)
    made = outs or call.empty(tokens, given[0])
    host, why = cpu.decide(call, given)
    note(operation.name, "host" if host else "torch", why)
    (cpu.run_host if host else _by_torch)(call, given, made)
    return made


def _on_cuda(operation: Operation, tensors: Sequence[Tensor | None], setup: str, outs: Sequence[Tensor]) -> Any:
    """The whole way: what is quick about a call on CUDA is in `_quick`."""
    call, given = call_of(operation.name, setup, tensors), _present(tensors)
    tokens = call.check(given)
    if outs:
        call.check_out(given, outs, tokens)
    if given[0].dtype == torch.float64 or cpu.choice().path == "torch":
        made = outs or call.empty(tokens, given[0])
        note(operation.name, "torch", "float64 has no kernels" if given[0].dtype == torch.float64 else "asked for")
        _by_torch(call, given, made)
        return made
    found = prepared(operation, setup, tensors, given[0].get_device())
    launched = found.run(tensors, outs)
    if launched is None:
        raise InternalError("X-CHECK", f"{operation.name} refused what its checks let through", where=operation.name)
    note(*found.ran)
    return launched


def _quick(operation: Operation) -> Callable[..., Any]:
    """The implementation for CUDA: straight to the launches where the same call was made before."""
    count, single, optional = len(operation.inputs), len(operation.outputs) == 1, _optional(operation)
    ready = _ready[operation.name]

    def implementation(*args: Any) -> Any:
        found = ready.get((args[count], args[0].get_device(), *[args[index] is None for index in optional]))
        made = None
        if found is not None and not cpu.torch_asked_for:
            made = found.run(args)
        if made is None:
            made = _on_cuda(operation, args[:count], args[count], ())
        else:
            LAST.ran = found.ran  # type: ignore[union-attr]
        return made[0] if single else tuple(made)

    return implementation


def _define(operation: Operation) -> None:
    count, single = len(operation.inputs), len(operation.outputs) == 1
    name, out_name = operation.name, f"{operation.name}_out"
    tags = (torch.Tag.needs_fixed_stride_order,)
    LIBRARY.define(f"{name}{operation.schema}", tags=tags)
    LIBRARY.define(f"{out_name}{operation.out_schema}", tags=tags)

    def on_cpu(*args: Any) -> Any:
        made = _on_cpu(operation, args[:count], args[count], ())
        return made[0] if single else tuple(made)

    def into(run: Callable[..., Any]) -> Callable[..., None]:
        def implementation(*args: Any, **outs: Tensor) -> None:
            written = [outs[f"out_{output}"] for output in operation.outputs]
            run(operation, args[:count], args[count], written)
            for tensor in written:
                if not tensor.is_inference():  # so that autograd sees a saved tensor change
                    torch.autograd.graph.increment_version(tensor)

        return implementation

    LIBRARY.impl(name, on_cpu, "CPU")
    LIBRARY.impl(name, _quick(operation), "CUDA")
    LIBRARY.impl(out_name, into(_on_cpu), "CPU")
    LIBRARY.impl(out_name, into(_on_cuda), "CUDA")

    def fake(*args: Any) -> Any:
        call = call_of(name, args[count], args[:count])
        given = _present(args[:count])
        made = call.empty(call.check(given), given[0])
        return made[0] if single else tuple(made)

    def fake_out(*args: Any, **outs: Tensor) -> None:
        call = call_of(name, args[count], args[:count])
        call.check(_present(args[:count]))

    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=LIBRARY)
    torch.library.register_fake(f"{NAMESPACE}::{out_name}", fake_out, lib=LIBRARY)
    torch.library.register_autograd(
        f"{NAMESPACE}::{name}", _backward(operation), setup_context=_save(operation), lib=LIBRARY
    )


def _save(operation: Operation) -> Callable[..., None]:
    count = len(operation.inputs)
    integral = [index for index, output in enumerate(operation.outputs) if output in INTEGRAL]

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
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
    with torch.enable_grad(), torch.autocast(_present(tensors)[0].device.type, enabled=False):
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


def operator(name: str, out: bool = False) -> Any:
    """The overload of an operation, or of its `out` form.

    Raises:
        InputError: `I-UNKNOWN`, no such operation.
    """
    if name not in OPERATIONS:
        raise InputError(
            "I-UNKNOWN",
            f"there is no operation {name!r}",
            where="operation",
            notes=(f"operations: {', '.join(OPERATIONS)}",),
        )
    return getattr(torch.ops.mhcgen, f"{name}_out" if out else name).default


for _operation in OPERATIONS.values():
    _define(_operation)
