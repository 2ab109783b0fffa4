"""The Program: frozen stages over named tensors, and its graph view.

A Program says *what* is computed and in which arithmetic, never how it is scheduled. networkx is a view used
for order, convexity and witness paths; the values here are what passes read and rewrite.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from mhcgen.arithmetic import Arithmetic

if TYPE_CHECKING:
    import networkx as nx

#: A dimension is a number or one of the symbols T (tokens), n (streams), H (hidden), R (mixes per token),
#: K (n*H), L (logits per token of the mixing matrix), G (quantisation groups), S (mixes per stream, where each has
#: its own), D (rank of the gates, where every element has one).
Dim = int | str

#: Attribute values are hashable and print the same in every process.
AttrValue = str | int | float | bool | tuple[str, ...]

ROLES = ("input", "parameter", "value", "result")
#: Attributes and results that never change a bit of another result, so they are not part of the class.
BITLESS_ATTRS = ("early_stop",)
BITLESS_SLOTS = ("iterations",)
DTYPES = ("fp32", "bf16", "fp16", "int8", "fp8_e4m3", "int32")


@dataclass(frozen=True)
class Tensor:
    """A named value.

    Args:
        name: name in files, in the API and in emitted text (`.` becomes `_` there).
        shape: dimensions, e.g. `("T", "n", "H")`.
        dtype: one of `DTYPES`; the dtype is the rounding point of the tensor.
        role: `input` and `parameter` are given by the caller, `result` is returned, `value` is neither.
    """

    name: str
    shape: tuple[Dim, ...]
    dtype: str
    role: str


@dataclass(frozen=True)
class Stage:
    """One node of the Program.

    Args:
        name: unique in the Program; `rowsq`, or `3.attn.rowsq` in a trunk.
        kind: a key of `mhcgen.stages.KINDS`.
        operands: (slot, tensor name) pairs in the order of the kind's signature.
        results: (slot, tensor name) pairs likewise.
        attrs: the stage's own arithmetic, sorted (key, value) pairs.
    """

    name: str
    kind: str
    operands: tuple[tuple[str, str], ...]
    results: tuple[tuple[str, str], ...]
    attrs: tuple[tuple[str, AttrValue], ...] = ()

    def operand(self, slot: str) -> str:
        """Name of the tensor in an operand slot; KeyError if the stage has no such slot."""
        return dict(self.operands)[slot]

    def result(self, slot: str) -> str:
        """Name of the tensor in a result slot; KeyError if the stage has no such slot."""
        return dict(self.results)[slot]

    def attr(self, key: str) -> Any:
        """Value of an attribute; KeyError if the stage has no such attribute."""
        return dict(self.attrs)[key]

    def option(self, key: str, default: AttrValue) -> Any:
        """Value of an attribute that may be absent, `default` if it is."""
        return dict(self.attrs).get(key, default)

    @property
    def reads(self) -> tuple[str, ...]:
        """Names of the tensors it reads, in slot order."""
        return tuple(tensor for _, tensor in self.operands)

    @property
    def writes(self) -> tuple[str, ...]:
        """Names of the tensors it writes, in slot order."""
        return tuple(tensor for _, tensor in self.results)


def make_stage(
    name: str,
    kind: str,
    operands: Mapping[str, str],
    results: Mapping[str, str],
    attrs: Mapping[str, AttrValue] | None = None,
) -> Stage:
    """A Stage from mappings; attributes are sorted so that equal stages print equally."""
    return Stage(
        name,
        kind,
        tuple(operands.items()),
        tuple(results.items()),
        tuple(sorted((attrs or {}).items())),
    )


@dataclass(frozen=True)
class Program:
    """A computation over one or more sites.

    Args:
        model: name of the model the arithmetic comes from.
        dims: sorted (symbol, size) pairs for every symbol but T.
        arithmetic: the choices shared by all stages.
        tensors: every tensor, in order of first mention.
        stages: every stage, in a topological order.
        scope: what was built: `pre`, `site`, `boundary`, `trunk` or `custom`.
        origin: the command-line options that name this Program, for headers; empty for hand-built ones.
    """

    model: str
    dims: tuple[tuple[str, int], ...]
    arithmetic: Arithmetic
    tensors: tuple[Tensor, ...]
    stages: tuple[Stage, ...]
    scope: str = "custom"
    origin: str = field(default="", compare=False)

    @cached_property
    def _by_tensor(self) -> dict[str, Tensor]:
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def _by_stage(self) -> dict[str, Stage]:
        return {stage.name: stage for stage in self.stages}

    def tensor(self, name: str) -> Tensor:
        """The tensor of that name; KeyError if there is none."""
        return self._by_tensor[name]

    def stage(self, name: str) -> Stage:
        """The stage of that name; KeyError if there is none."""
        return self._by_stage[name]

    def dim(self, symbol: Dim) -> int:
        """Size of a dimension other than T."""
        return symbol if isinstance(symbol, int) else dict(self.dims)[symbol]

    def shape(self, name: str, tokens: int) -> tuple[int, ...]:
        """Concrete shape of a tensor for a token count."""
        return tuple(tokens if d == "T" else self.dim(d) for d in self.tensor(name).shape)

    def of_role(self, *roles: str) -> tuple[Tensor, ...]:
        """Tensors with one of these roles, in order."""
        return tuple(tensor for tensor in self.tensors if tensor.role in roles)

    @cached_property
    def writers(self) -> dict[str, str]:
        """Tensor name to the name of the stage that writes it."""
        return {tensor: stage.name for stage in self.stages for tensor in stage.writes}

    @cached_property
    def readers(self) -> dict[str, tuple[str, ...]]:
        """Tensor name to the names of the stages that read it, in order."""
        found: dict[str, tuple[str, ...]] = {}
        for stage in self.stages:
            for tensor in dict.fromkeys(stage.reads):
                found[tensor] = (*found.get(tensor, ()), stage.name)
        return found

    @cached_property
    def graph(self) -> nx.DiGraph:
        """Frozen view: nodes are stage names, an edge carries the tensor that flows along it."""
        # Imported here, so that `mhcgen --help` does not pay for it.
        import networkx as nx

        graph = nx.DiGraph()
        graph.add_nodes_from(stage.name for stage in self.stages)
        for tensor, writer in self.writers.items():
            for reader in self.readers.get(tensor, ()):
                graph.add_edge(writer, reader, tensor=tensor)
        return nx.freeze(graph)

    def runs_once(self, stage: Stage) -> bool:
        """Whether a stage's results are the same for all tokens, so that it runs once and not once a token."""
        return all("T" not in self.tensor(name).shape for name in stage.writes)

    def stages_of_kind(self, *kinds: str) -> tuple[Stage, ...]:
        """Stages of one of these kinds, in order."""
        return tuple(stage for stage in self.stages if stage.kind in kinds)

    def with_stages(self, stages: Iterable[Stage], tensors: Iterable[Tensor] | None = None) -> Program:
        """A copy with other stages (and tensors)."""
        return replace(
            self,
            stages=tuple(stages),
            tensors=self.tensors if tensors is None else tuple(tensors),
        )

    @cached_property
    def numeric_class(self) -> NumericClass:
        """The class of this Program: equal classes promise equal bits for every schedule."""
        counts = {name for s in self.stages for slot, name in s.results if slot in BITLESS_SLOTS}
        lines = [self.arithmetic.describe(), " ".join(f"{k}={v}" for k, v in self.dims)]
        lines += [f"{t.name}:{t.dtype}:{','.join(map(str, t.shape))}" for t in self.tensors if t.name not in counts]
        for stage in self.stages:
            attrs = " ".join(f"{key}={value!r}" for key, value in stage.attrs if key not in BITLESS_ATTRS)
            results = tuple(pair for pair in stage.results if pair[0] not in BITLESS_SLOTS)
            lines.append(f"{stage.kind} {stage.operands} {results} {attrs}")
        digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()
        return NumericClass(self.arithmetic.functions, self.arithmetic.version, digest)

    def __str__(self) -> str:
        from mhcgen.text import print_program

        return print_program(self)


@dataclass(frozen=True)
class NumericClass:
    """Name of everything that can change a bit.

    Args:
        functions: `ieee` or `fast`.
        version: raised when the same Program gives other bits than before.
        digest: sha256 over the Program's arithmetic, dims, dtypes and stages.
    """

    functions: str
    version: int
    digest: str

    def __str__(self) -> str:
        return f"{self.functions}-{self.version}-{self.digest[:12]}"
