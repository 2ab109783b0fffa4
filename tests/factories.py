"""The smallest valid Programs, every field of which a test can override.

`program()` is one `mean` stage. `program(stage("rowsq"), stage("gates"))` joins stages by the names of their
slots: a result named like a later operand feeds it, what nobody writes is given, what nobody reads is returned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from mhcgen.arithmetic import Arithmetic
from mhcgen.combs import comb_kind
from mhcgen.inputs import make_inputs
from mhcgen.ir import AttrValue, Program, Stage, Tensor, make_stage
from mhcgen.plan import Access, Kernel, Node, Options, Plan, Step
from mhcgen.runtime import NUMPY_DTYPES
from mhcgen.stages import COMB_STAGES, KINDS, STREAM_LAST

#: The least each kind needs of attributes.
ATTRS: dict[str, dict[str, AttrValue]] = {
    "project": {"method": "fma"},
    "rowsq": {"acc": "fp64", "eps": 1e-6},
    "project_streams": {"method": "fma"},
    "rowsq_streams": {"acc": "fp64", "eps": 1e-6},
    "norm_streams": {"acc": "fp64", "eps": 1e-6},
    "low_rank_gates": {"post_mult": 2.0},
    "gates": {"post_mult": 2.0, "pre_eps": 1e-6},
    "head_gates": {"pre_eps": 1e-6},
    "static_gates": {"post_mult": 2.0, "pre_eps": 0.0},
    "comb": {"comb": "plain"},
    "sinkhorn": {"comb": "sinkhorn", "early_stop": False, "eps": 1e-6, "iters": 3},
    "norm": {"acc": "fp32", "eps": 1e-6},
    "quant": {"group": 32, "pow2": False, "scheme": "q8"},
}
#: Slots whose dtype is the Program's choice; every other one is fp32, but for codes and counts.
WIDE_SLOTS = ("e", "x", "x_out", "x_next", "x_normed", "y", "z", "f", "aux")
PARAMETERS = ("fn", "scale", "base", "weight", "up")


def slots(kind: str, which: str) -> dict[str, tuple[Any, ...]]:
    """Slot -> shape of a kind's `operands` or `results`, optional ones included; M, any count of mixes, is R."""
    return {
        slot.rstrip("?"): tuple("R" if dim == "M" else dim for dim in shape)
        for slot, shape in getattr(KINDS[kind], which)
    }


def stage(
    kind: str,
    name: str = "",
    operands: Mapping[str, str] | None = None,
    results: Mapping[str, str] | None = None,
    usual: tuple[str, ...] = ("logits",),
    **attrs: AttrValue,
) -> Stage:
    """A stage of a kind; a slot that is not named gets the tensor of its own name, an optional one if `usual`."""

    def fill(which: str, given: Mapping[str, str]) -> dict[str, str]:
        return {
            slot.rstrip("?"): given.get(slot.rstrip("?"), slot.rstrip("?"))
            for slot, _ in getattr(KINDS[kind], which)
            if not slot.endswith("?") or slot.rstrip("?") in (*given, *usual)
        }

    reads, writes = fill("operands", operands or {}), fill("results", results or {})
    return make_stage(name or kind, kind, reads, writes, {**ATTRS.get(kind, {}), **attrs})


def logits_of(stages: Iterable[Stage], n: int) -> int:
    """Logits a token of the first mixing matrix among the stages; n * n where there is none."""
    return next((comb_kind(s).logits(n) for s in stages if s.kind in COMB_STAGES), n * n)


def slot_dtype(stage: Stage, slot: str, dtype: str) -> str:
    """dtype that fits a slot in a Program whose activations are `dtype`."""
    if slot == "q":
        return "int8" if stage.attr("scheme") == "q8" else "fp8_e4m3"
    if slot == "iterations":
        return "int32"
    return dtype if slot in WIDE_SLOTS else "fp32"


def program(
    *stages: Stage,
    n: int = 2,
    hidden: int = 8,
    dtype: str = "fp32",
    results: tuple[str, ...] = (),
    dtypes: Mapping[str, str] | None = None,
    **overrides: Any,
) -> Program:
    """A Program of these stages.

    Args:
        stages: in a topological order; one `mean` if none is given.
        n, hidden: sizes.
        dtype: of activations.
        results: tensors to return although a stage reads them.
        dtypes: dtypes of single tensors.
        overrides: fields of `Program`.
    """
    chosen = stages or (stage("mean"),)
    tensors: dict[str, Tensor] = {}
    group = 32
    for s in chosen:
        shapes = {**slots(s.kind, "operands"), **slots(s.kind, "results")}
        group = s.attr("group") if s.kind == "quant" else group
        for slot, name in (*s.operands, *s.results):
            wanted = (dtypes or {}).get(name, slot_dtype(s, slot, dtype))
            role = "parameter" if slot in PARAMETERS else "input"
            tensors.setdefault(name, Tensor(name, shapes[slot], wanted, role))
    read = {name for s in chosen for name in s.reads}
    for name in (name for s in chosen for name in s.writes):
        role = "value" if name in read and name not in results else "result"
        tensors[name] = replace(tensors[name], role=role)
    logits = logits_of(chosen, n)
    dims = {"n": n, "H": hidden, "K": n * hidden, "R": 2 * n + logits, "L": logits, "G": -(-hidden // group)}
    # Gates of low rank take all mixes but those of post.
    dims |= {"D": n + logits} if any("D" in tensor.shape for tensor in tensors.values()) else {}
    made = Program("hand", tuple(sorted(dims.items())), Arithmetic(), tuple(tensors.values()), tuple(chosen))
    return replace(made, **overrides)


def chain(suffix: str = "", x: str = "x", **options: Mapping[str, AttrValue]) -> tuple[Stage, ...]:
    """rowsq, gates, sinkhorn, collapse over streams `x`; tensors and stages carry the suffix.

    Args:
        suffix: of every name but `x`.
        x: the streams.
        options: attributes by kind of stage, `sinkhorn={"iters": 5}`.
    """

    def make(kind: str, *given: str, **fixed: str) -> Stage:
        names = {slot: f"{slot}{suffix}" for slot in (*slots(kind, "operands"), *slots(kind, "results"))}
        reads = {slot: fixed.get(slot, names[slot]) for slot in given}
        writes = {slot: names[slot] for slot in slots(kind, "results") if slot != "iterations"}
        return stage(kind, f"{kind}{suffix}", reads, writes, **options.get(kind, {}))

    return (
        make("rowsq", "x", "mixes", x=x),
        make("gates", "mixes_scaled", "scale", "base"),
        make("sinkhorn", "logits"),
        make("collapse", "x", "pre", x=x),
    )


def step(name: str, team: str, *accesses: Access) -> Step:
    """A step that only has what hazards look at."""
    return Step(name, name.split(".")[0], "none", team, accesses)


def read(buffer: str, own: bool = False) -> Access:
    """A read access."""
    return Access(buffer, False, own)


def write(buffer: str, own: bool = False) -> Access:
    """A write access."""
    return Access(buffer, True, own)


def kernel(*body: Node, data_warps: int = 2, mix_warp: int = 2, warps: int = 3, **overrides: Any) -> Kernel:
    """A kernel of steps: two data warps and a warp for the mixes."""
    return Kernel("k", (), data_warps, mix_warp, warps, body=tuple(body), **overrides)


def plan(*kernels: Kernel, program_: Program | None = None, **options: Any) -> Plan:
    """A Plan of hand-made kernels."""
    return Plan(program_ or program(), Options(**options), kernels)


def with_body(made: Plan, index: int, body: tuple[Node, ...]) -> Plan:
    """The Plan with another body in one kernel, unverified."""
    return made.with_kernel(index, replace(made.kernels[index], body=body))


def inputs(made: Program, tokens: int, seed: int = 0) -> dict[str, Any]:
    """Random inputs of a Program."""
    return dict(make_inputs(made, tokens, seed))


def branches(made: Program) -> dict[str, Callable[..., Any]]:
    """Opaque stages of a Program as functions of the right shapes: halve what they read."""

    def make(s: Stage) -> Callable[..., Any]:
        dtype = NUMPY_DTYPES[made.tensor(s.writes[0]).dtype]

        def run(**operands: Any) -> Any:
            (value,) = operands.values()
            half = value.astype(np.float32) * np.float32(0.5)
            if s.kind == "tap":  # the first stream, wherever the memory has it
                half = half[:, :, 0] if made.tensor(s.operand("x")).shape == STREAM_LAST else half[:, 0]
            return np.ascontiguousarray(half.astype(dtype))

        return run

    return {s.name: make(s) for s in made.stages_of_kind("branch", "engram", "tap")}
