"""Plans by token class: one for few tokens, one for many, picked when a call comes.

```
T <= 256  decode    the latency of a launch counts
T >  256  prefill   the rate of many tokens counts
```
T is an argument of every kernel and never part of its text, so a class is a schedule and not a size: all of
T = 1 to 2^31 compiles two emissions, and their twins for arrays that are not 16-byte aligned where such are used.
Both give the same bits, as every schedule does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mhcgen.api import compile
from mhcgen.ir import Program, Tensor
from mhcgen.plan import REGIMES, Plan
from mhcgen.runtime import Launch, Module, known_options, load

#: Largest T of the class decode. Measured on an H200 (n = 4, H = 4096): at 64 tokens the decode schedule is the
#: faster, at 512 the other; see docs/cost-model.md.
DECODE_TOKENS = 256


def regime_of(tokens: int) -> str:
    """The class of a token count, a member of `mhcgen.plan.REGIMES`."""
    return REGIMES[0] if tokens <= DECODE_TOKENS else REGIMES[1]


class ClassModule:
    """A Module for each token class; calls go to the one of their T.

    Args:
        modules: by regime; one Module may serve several.

    Attributes:
        modules: as given.
        used: the Module of the last call; the first one's before any.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self.modules = dict(modules)
        self.used = self.modules[REGIMES[0]]
        self.program: Program = self.used.program

    def __call__(self, **arguments: Any) -> dict[str, Any]:
        """Run the Program; arguments, results and errors are those of `Module.__call__`."""
        self.used = self.modules[regime_of(self._tokens(arguments))]
        return self.used(**arguments)

    def _tokens(self, arguments: Mapping[str, Any]) -> int:
        """T of a call; 0 where no input says it, which the Module will complain about."""
        for tensor in self.program.of_role("input"):
            shape = getattr(arguments.get(tensor.name), "shape", ())
            if "T" in tensor.shape and len(shape) == len(tensor.shape):
                return int(shape[tensor.shape.index("T")])
        return 0

    def prepare(self, misaligned: bool = False) -> None:
        """Compile every class now, so that no call has to; see `Module.prepare`.

        Raises:
            CompileError, EnvironmentFault: as the first call would.
        """
        for module in self._distinct():
            module.prepare(misaligned)

    def _distinct(self) -> list[Module]:
        return list({id(module): module for module in self.modules.values()}.values())

    @property
    def outputs(self) -> tuple[Tensor, ...]:
        """Tensors that a call of some class writes to global memory; see `Module.outputs`."""
        found = {tensor.name: tensor for module in self._distinct() for tensor in module.outputs}
        return tuple(found.values())

    @property
    def counts(self) -> dict[str, int]:
        """Launches by `regime: kernel`, since loading; a Module of several classes counts for the first."""
        found: dict[str, int] = {}
        seen: list[Module] = []
        for regime, module in self.modules.items():
            if not any(module is other for other in seen):
                found |= {f"{regime}: {kernel}": count for kernel, count in module.counts.items()}
            seen.append(module)
        return found

    @property
    def launches(self) -> list[Launch]:
        """The launches of the last call, in order."""
        return self.used.launches


def plans_by_class(program: Program, fuse: str = "none", **options: Any) -> dict[str, Plan]:
    """The Plan of each regime; options are those of `mhcgen.compile`, but for `regime`.

    Raises:
        RefusedError, UsageError: as `mhcgen.compile`; `U-OPTION`, it has no such option, or it is `regime`.
    """
    known_options(options, compile, ("program", "fuse", "regime"), "a schedule for every token class")
    return {regime: compile(program, fuse, regime=regime, **options) for regime in REGIMES}


def load_classes(
    program: Program,
    fuse: str = "none",
    backend: str = "auto",
    *,
    backend_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> ClassModule:
    """A callable for any T that launches the schedule of T's class.

    Args:
        program: what to compute.
        fuse: as for `mhcgen.compile`.
        backend: `host`, `cuda` or `auto`.
        backend_options: further options of the runner.
        options: further options of `mhcgen.compile`: arch, placement, tuned, ...

    Raises:
        RefusedError, UsageError: as `mhcgen.compile`.
        EnvironmentFault: no compiler, no GPU.

    Example:
        >>> import mhcgen
        >>> from mhcgen.classes import load_classes
        >>> module = load_classes(mhcgen.build(hidden=4096), "pre", "host")
        >>> {regime: m.plan.kernels[0].threads for regime, m in module.modules.items()}
        {'decode': 544, 'prefill': 256}
    """
    modules: dict[str, Module] = {}
    for regime, plan in plans_by_class(program, fuse, **options).items():
        # Where the regime makes no difference, one text is compiled and serves both.
        same = next((m for m in modules.values() if m.plan.kernels == plan.kernels), None)
        modules[regime] = load(plan, backend, **(backend_options or {})) if same is None else same
    return ClassModule(modules)
