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
from mhcgen.torch import autograd, cpu
from mhcgen.torch.calls import LAST, Call, call_of, note
from mhcgen.torch.eager import evaluate
from mhcgen.torch.operations import OPERATIONS, Operation
from mhcgen.torch.straight import READY, key_of, optional, prepared

NAMESPACE = "mhcgen"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")


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
    count, single, marked = len(operation.inputs), len(operation.outputs) == 1, optional(operation)
    ready = READY[operation.name]

    def implementation(*args: Any) -> Any:
        found = ready.get(key_of(args[count], args[0].get_device(), args, marked))
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
    autograd.register(operation, LIBRARY)


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
