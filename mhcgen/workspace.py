"""Caller-owned buffers for `HyperConnections`: nothing is allocated while they are in use.

```
streams   [now] [next]    post writes next, then the two change places: nothing is copied
post comb [now] [next]    two of each only where a boundary reads the old ones while it writes the new
y z mixes logits ...      one of each, written whole before anything reads it
```
A buffer is as long as the most tokens it is for; fewer tokens use its first rows, which are contiguous because the
layout is token-major. The arrays stay where they are for the life of the Workspace, so a captured CUDA graph may
hold their addresses for as long as its owner keeps the Workspace; no cache can drop them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mhcgen.errors import InputError
from mhcgen.ir import Tensor
from mhcgen.runtime import Module
from mhcgen.values import plain

#: Slots with two buffers that change places.
TURNING = ("streams", "post", "comb")
#: (arm, tensor) -> slot and whether its next buffer is meant, where that is not the tensor's own name.
_SLOTS = {
    ("expand", "x"): ("streams", False),
    ("post", "x_next"): ("streams", True),
    ("boundary", "x_next"): ("streams", True),
    ("boundary", "pre_next"): ("pre", False),
    ("boundary", "post_next"): ("post", True),
    ("boundary", "comb_next"): ("comb", True),
}
#: Arms whose tensors share names with a site's and not their shapes or lifetimes.
_APART = ("head", "mean", "sum")


def slot_of(arm: str, tensor: str) -> tuple[str, bool]:
    """The slot that holds what an arm writes, and whether it goes to the slot's next buffer."""
    if (arm, tensor) in _SLOTS:
        return _SLOTS[arm, tensor]
    return (f"{arm}.{tensor}" if arm in _APART else tensor), False


class Workspace:
    """Buffers for every arm of a `HyperConnections`, up to a number of tokens.

    Args:
        modules: arm to its Module; `HyperConnections.workspace` gives its own.
        tokens: most tokens of a call.

    Attributes:
        modules: as given; an arm writes only to the workspace of its own modules.
        tokens: as given.
        nbytes: bytes of all buffers.

    Raises:
        InputError: `I-TOKENS`, no count, or a negative one.
    """

    def __init__(self, modules: Mapping[str, Module], tokens: int) -> None:
        wanted = plain("tokens", tokens)
        if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 0:
            what = f"tokens must be >= 0, an integer, got {tokens!r}"
            raise InputError("I-TOKENS", what, where="tokens", hints=("give a count",))
        tokens = wanted
        self.tokens = tokens
        self.modules = modules
        self._now = dict.fromkeys(TURNING, 0)
        self._buffers: dict[tuple[str, int], Any] = {}
        self._views: dict[tuple[str, int, int], Any] = {}
        for arm, module in self.modules.items():
            for tensor in module.outputs:
                slot, following = slot_of(arm, tensor.name)
                self._allocate(module, slot, int(following), tensor)
                if slot == "streams":
                    self._allocate(module, slot, 1 - int(following), tensor)
                if slot == "streams" and ("f", 0) not in self._buffers:
                    columns = Tensor("f", ("T", "H"), tensor.dtype, "input")
                    self._allocate(module, "f", 0, columns)
        self.nbytes = sum(int(buffer.nbytes) for buffer in self._buffers.values())

    def _allocate(self, module: Module, slot: str, index: int, tensor: Tensor) -> None:
        sizes = tuple(self.tokens if d == "T" else module.program.dim(d) for d in tensor.shape)
        key = (slot, index)
        if key not in self._buffers:
            self._buffers[key] = module.runner.empty(sizes, tensor.dtype)
        assert tuple(self._buffers[key].shape) == sizes, f"arms disagree on {slot}"

    def _view(self, slot: str, following: bool, tokens: int) -> Any:
        index = self._now.get(slot, 0) ^ int(following)
        # A slot that turns and was given one buffer has no other to turn to.
        index = index if (slot, index) in self._buffers else 0
        key = (slot, index, tokens)
        if key not in self._views:
            if tokens > self.tokens:
                raise InputError(
                    "I-TOKENS",
                    f"T = {tokens}, and this workspace is for {self.tokens}",
                    where="workspace",
                    hints=("make a workspace for the largest T",),
                )
            self._views[key] = self._buffers[slot, index][:tokens]
        return self._views[key]

    def streams(self, tokens: int | None = None) -> Any:
        """The streams in flight [T, n, H]: what the last expand, post or boundary wrote."""
        return self._view("streams", False, self.tokens if tokens is None else tokens)

    def f(self, tokens: int | None = None) -> Any:
        """A buffer [T, H] for a branch to leave its result in; nothing here reads or writes it."""
        return self._view("f", False, self.tokens if tokens is None else tokens)

    def outputs(self, arm: str, tokens: int) -> dict[str, Any]:
        """Where an arm writes, by tensor name."""
        return {tensor.name: self._view(*slot_of(arm, tensor.name), tokens) for tensor in self.modules[arm].outputs}

    def rewind(self) -> None:
        """Start of a trunk: every slot at its first buffer, so that each trunk launches on the same addresses."""
        self._now = dict.fromkeys(TURNING, 0)

    def turn(self, arm: str) -> None:
        """After an arm ran: what it wrote to a slot's next buffer is the slot's present one."""
        for tensor in self.modules[arm].outputs:
            slot, following = slot_of(arm, tensor.name)
            if following:
                self._now[slot] ^= 1

    def arrays(self) -> dict[str, Any]:
        """Every buffer by `slot` or `slot.next`, whole; for tests that poison them."""
        return {slot + ".next" * index: buffer for (slot, index), buffer in sorted(self._buffers.items())}
