"""Calls that go straight to their launches, past torch's dispatcher.

The way through the dispatcher into Python and back costs more than the launch. It is needed once: a call that looks
in every respect like one that took it and ran on kernels has no need of it again. One look of torch's own tells
(`TensorGuards`, by which compiled torch code recognises its inputs): types, devices, dtypes, sizes, strides, what
dispatches on a tensor and in this thread, and what requires a gradient. Whatever else sees operators in torch (modes,
the profiler, compilation, tracing, transforms, subclasses) has the call by the dispatcher, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from mhcgen.torch import cpu
from mhcgen.torch.calls import LAST
from mhcgen.torch.launch import Prepared
from mhcgen.torch.operations import OPERATIONS
from mhcgen.torch.ops import prepared_before

#: Looks that are kept for one token count, and token counts that an operation keeps any for.
_LOOKS, _SIZES = 8, 4096
_NONE = frozenset((None,))
#: What may take part in a call that needs no dispatcher.
_TYPES = (Tensor, torch.nn.Parameter)
_KEYS = ("BackendSelect", "ADInplaceOrView")
_KEYS_ON = ("{}", "Autograd{}", "Autocast{}")


def _always() -> bool:
    return True


# Whoever watches operators. Where this torch cannot say, somebody always does.
_dispatch_modes = getattr(torch._C, "_len_torch_dispatch_stack", _always)
_function_modes = getattr(torch._C, "_len_torch_function_stack", _always)
_profiler = getattr(torch._C._autograd, "_profiler_enabled", _always)


def _look(tensors: Sequence[Tensor]) -> Callable[..., bool]:
    """What says of as many tensors, in the state of the thread that calls it, whether they look like these here."""
    guards = torch._C._dynamo.guards.TensorGuards(
        *tensors,
        dynamic_dims_sizes=[list(tensor.shape) for tensor in tensors],
        dynamic_dims_strides=[list(tensor.stride()) for tensor in tensors],
    )
    check: Callable[..., bool] = guards.check
    return check


@lru_cache(maxsize=1)
def usable() -> bool:
    """Whether this torch has what is needed and it tells tensors apart."""
    if _always in (_dispatch_modes, _function_modes, _profiler):
        return False
    try:
        one = torch.zeros(2, 3)
        same = _look([one, one.clone()])
        others = [one.double(), torch.zeros(3, 2), torch.zeros(3, 2).T, torch._neg_view(one), one[0], one.to("meta")]
        others += [torch.nn.Parameter(one), torch.zeros(2, 3, requires_grad=True)]
        with torch.enable_grad():
            return same(one, one.clone()) and not any(same(one, other) for other in others)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, SystemError, TypeError, ValueError):
        return False


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing but a device's kernels, autograd and autocast take part in a call."""
    keys = torch._C.DispatchKey
    allowed = 0
    for key in (*_KEYS, *(key.format(on) for on in ("CPU", "CUDA") for key in _KEYS_ON)):
        allowed |= torch._C.DispatchKeySet(getattr(keys, key)).raw_repr()
    here = torch._C._dispatch_tls_local_include_set().raw_repr()
    return all(
        type(tensor) in _TYPES and (torch._C._dispatch_keys(tensor).raw_repr() | here) & ~allowed == 0
        for tensor in tensors
    )


def _picker(indexes: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these of a sequence."""
    if len(indexes) > 1:
        return itemgetter(*indexes)
    return lambda values: tuple(values[index] for index in indexes)


class Seen:
    """A call that was seen.

    Args:
        prepared: what launches it.
        tensors: its inputs in the order of the schema.
    """

    __slots__ = ("absent", "given", "launch", "ran", "same", "sized")

    def __init__(self, prepared: Prepared, tensors: Sequence[Tensor | None]) -> None:
        self.given = _picker(prepared.given)
        self.absent = _picker([index for index, tensor in enumerate(tensors) if tensor is None])
        present = self.given(tensors)
        self.same = _look(present)
        self.sized = prepared.sized(present[0].shape[0])
        self.launch = prepared.launch
        self.ran = prepared.ran


#: operation -> text of its Setup and token count -> calls that were seen.
_known: dict[str, dict[tuple[str, int], tuple[Seen, ...]]] = {name: {} for name in OPERATIONS}


def attempt(name: str, tensors: Sequence[Any], text: str) -> tuple[Tensor, ...] | None:
    """Results of a call that was seen before; None, with nothing done, where the dispatcher must have it."""
    try:
        for seen in _known[name].get((text, tensors[0].shape[0]), ()):
            given = seen.given(tensors)
            if _NONE.issuperset(seen.absent(tensors)) and seen.same(*given):
                break
        else:
            return None
    except (AttributeError, IndexError, TypeError):  # no tensors, or no plain ones
        return None
    if _function_modes() or _dispatch_modes() or _profiler() or cpu.torch_asked_for:
        return None
    made = seen.launch(seen.sized, given)
    LAST.ran = seen.ran
    return made


def learn(name: str, tensors: Sequence[Tensor | None], text: str) -> None:
    """Remember a call that came back from the dispatcher, if it may go straight the next time."""
    ran = getattr(LAST, "ran", None)
    if ran is None or ran[1] != "cuda" or _function_modes() or _dispatch_modes() or _profiler() or not usable():
        return
    present = [tensor for tensor in tensors if tensor is not None]
    known, key = _known[name], (text, present[0].shape[0])
    seen = known.get(key, ())
    prepared = prepared_before(OPERATIONS[name], text, tensors, present[0].get_device())
    if prepared is None or ran is not prepared.ran or len(seen) >= _LOOKS or not _plain(present):
        return
    if len(known) >= _SIZES:
        known.clear()
    known[key] = (*seen, Seen(prepared, tensors))
