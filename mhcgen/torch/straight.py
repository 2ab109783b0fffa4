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
from torch.autograd import forward_ad

from mhcgen.torch import cpu
from mhcgen.torch.calls import LAST, call_of
from mhcgen.torch.launch import Prepared
from mhcgen.torch.operations import OPERATIONS, Operation

#: operation -> text of its Setup, device, and which optional inputs are absent -> what launches it. Never evicted.
READY: dict[str, dict[tuple[Any, ...], Prepared]] = {name: {} for name in OPERATIONS}

#: operation -> what records a call that was seen: autograd's part of the operator, for inputs, text and the call.
RECORD: dict[str, Callable[..., Any]] = {}

#: Looks that are kept for one token count, and token counts that an operation keeps any for.
_LOOKS, _SIZES = 8, 4096
_NONE = frozenset((None,))
#: What may take part in a call that needs no dispatcher.
_TYPES = (Tensor, torch.nn.Parameter)
_KEYS = ("BackendSelect", "ADInplaceOrView")
_KEYS_ON = ("{}", "Autograd{}", "Autocast{}")


def prepared(operation: Operation, setup: str, tensors: Sequence[Tensor | None], device: int) -> Prepared:
    """What launches an operation on a device, made the first time and kept for good."""
    found = prepared_before(operation, setup, tensors, device)
    if found is None:
        made = Prepared(call_of(operation.name, setup, tensors), device)
        found = READY[operation.name].setdefault(key_of(setup, device, tensors, optional(operation)), made)
    return found


def prepared_before(
    operation: Operation, setup: str, tensors: Sequence[Tensor | None], device: int
) -> Prepared | None:
    """What `prepared` has made; None where it was never asked."""
    return READY[operation.name].get(key_of(setup, device, tensors, optional(operation)))


def key_of(setup: str, device: int, tensors: Sequence[Any], marked: Sequence[int]) -> tuple[Any, ...]:
    """Key in `READY`; `marked` is what `optional` says of the operation."""
    return (setup, device, *[tensors[index] is None for index in marked])


def optional(operation: Operation) -> tuple[int, ...]:
    """Which of an operation's inputs may be absent."""
    return tuple(index for index, name in enumerate(operation.inputs) if name.endswith("?"))


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


@lru_cache(maxsize=1)
def _allowed() -> int:
    """The bits of `_KEYS`."""
    bits = 0
    for key in (*_KEYS, *(key.format(on) for on in ("CPU", "CUDA") for key in _KEYS_ON)):
        bits |= torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)).raw_repr()
    return bits


def _plain(tensors: Sequence[Tensor]) -> bool:
    """Whether nothing but a device's kernels, autograd and autocast take part in a call."""
    others = ~_allowed()
    if torch._C._dispatch_tls_local_include_set().raw_repr() & others:
        return False
    return all(
        type(tensor) in _TYPES and not torch._C._dispatch_keys(tensor).raw_repr() & others for tensor in tensors
    )


def _picker(indexes: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What takes these of a sequence."""
    if len(indexes) > 1:
        return itemgetter(*indexes)
    first = indexes[0] if indexes else 0
    return (lambda values: (values[first],)) if indexes else lambda values: ()


class Seen:
    """A call that was seen.

    Args:
        prepared: what launches it.
        tensors: its inputs in the order of the schema.

    Attributes:
        record: what records it for a backward and runs it then; None where no input requires a gradient.
        absent, given: what takes the inputs that are not given, and those that are.
        same: whether other inputs that are given look the same.
    """

    __slots__ = ("_launch", "_ran", "_sized", "absent", "given", "record", "same")

    def __init__(self, prepared: Prepared, tensors: Sequence[Tensor | None]) -> None:
        self.given = _picker(prepared.given)
        self.absent = _picker([index for index, tensor in enumerate(tensors) if tensor is None])
        present = self.given(tensors)
        self.same = _look(present)
        needed = any(tensor.requires_grad for tensor in present)
        self.record = RECORD[prepared.call.operation.name] if needed else None
        self._sized = prepared.sized(present[0].shape[0])
        self._launch = prepared.launch
        self._ran = prepared.ran

    def run(self, tensors: Sequence[Any]) -> tuple[Tensor, ...]:
        """Enqueue it with other tensors that look the same."""
        made = self._launch(self._sized, self.given(tensors))
        LAST.ran = self._ran
        return made


#: operation -> text of its Setup and token count -> calls that were seen.
_known: dict[str, dict[tuple[str, int], tuple[Seen, ...]]] = {name: {} for name in OPERATIONS}


def find(name: str, tensors: Sequence[Any], text: str) -> Seen | None:
    """The call that was seen before and looks the same; None where there is none, or a mode has to see this one."""
    if _dispatch_modes() or cpu.torch_asked_for or forward_ad._current_level >= 0:
        return None
    try:
        for seen in _known[name].get((text, tensors[0].shape[0]), ()):
            if _NONE.issuperset(seen.absent(tensors)) and seen.same(*seen.given(tensors)):
                return seen
    except (AttributeError, IndexError, RuntimeError, TypeError):  # no tensors, or no plain ones
        pass
    return None


def attempt(name: str, tensors: Sequence[Any], text: str) -> tuple[Tensor, ...] | None:
    """Results of a call that was seen before; None, with nothing done, where the dispatcher must have it."""
    seen = None if _function_modes() or _profiler() else find(name, tensors, text)
    if seen is None:
        return None
    if seen.record is None or not torch.is_grad_enabled():
        return seen.run(tensors)
    made = seen.record(*tensors, text, seen)
    return (made,) if isinstance(made, Tensor) else made


def learn(name: str, tensors: Sequence[Tensor | None], text: str) -> None:
    """Remember a call that came back from the dispatcher, if it may go straight the next time."""
    ran = getattr(LAST, "ran", None)
    if ran is None or ran[1] != "cuda" or name not in RECORD or _dispatch_modes() or not usable():
        return
    present = [tensor for tensor in tensors if tensor is not None]
    known, key = _known[name], (text, present[0].shape[0])
    seen = known.get(key)
    if seen is None:  # a token count that comes once is not worth the look
        if len(known) >= _SIZES:
            known.clear()
        known[key] = ()
        return
    found = prepared_before(OPERATIONS[name], text, tensors, present[0].get_device())
    if found is None or ran is not found.ran or len(seen) >= _LOOKS or not _plain(present):
        return
    made = Seen(found, tensors)
    if made.same(*present):  # not where one tensor is two inputs
        known[key] = (*seen, made)
