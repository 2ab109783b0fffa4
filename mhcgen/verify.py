"""Rules a Program must keep, one function each; all violations are reported together.

Rules about schedules live with the Plan (`mhcgen.plan.verify_plan`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from mhcgen.arithmetic import PROJECTIONS
from mhcgen.combs import COMB_KINDS
from mhcgen.errors import ProgramError
from mhcgen.ir import DTYPES, ROLES, Dim, Program, Stage
from mhcgen.stages import COMB_STAGES, KINDS, LOCAL, LOW_RANK, STREAM_LAST, STREAMS

Rule = Callable[[Program], Iterator[str]]


def sizes_are_given(program: Program) -> Iterator[str]:
    """n and H (D too, if gates have a rank) are positive integers, and the sizes that follow from them agree.

    All other rules rest on it.
    """
    sizes = dict(program.dims)
    ranked = ("D",) * any(stage.kind in (*LOW_RANK, "gated_mean") for stage in program.stages)
    wrong = [symbol for symbol in ("n", "H", *ranked) if not _is_count(sizes.get(symbol))]
    for symbol in wrong:
        yield f"size {symbol} is {sizes.get(symbol)!r}, not a positive integer"
    if wrong:
        return
    follows = {"K": sizes["n"] * sizes["H"]}
    for stage in program.stages_of_kind("quant"):
        if _is_count(stage.option("group", 1)):
            follows["G"] = -(-sizes["H"] // stage.option("group", 1))
    if program.stages_of_kind("low_rank_gates"):
        follows["R"] = sizes["D"] + sizes["n"]
    for symbol, size in follows.items():
        if sizes.get(symbol, size) != size:
            yield f"size {symbol} is {sizes[symbol]}, and {size} follows from the others"


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_real(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


#: attribute -> what it must be, and whether a value is that; in every kind that has it.
_LEGAL: dict[str, tuple[str, Callable[[Any], bool]]] = {
    "acc": ("fp32 or fp64", lambda value: value in ("fp32", "fp64")),
    "early_stop": ("a bool", lambda value: isinstance(value, bool)),
    "eps": ("a number >= 0 that fp32 can hold", lambda value: _is_real(value) and fp32_holds(value)),
    "group": ("a power of two from 8 on", lambda value: _is_count(value) and value >= 8 and not value & (value - 1)),
    "iters": ("a positive integer", _is_count),
    "method": ("fma", lambda value: value in PROJECTIONS and value != "external"),
    "post_mult": ("a finite number", _is_real),
    "pow2": ("a bool", lambda value: isinstance(value, bool)),
    "pre_eps": ("a number >= 0 that fp32 can hold", lambda value: _is_real(value) and fp32_holds(value)),
    "scheme": ("q8 or fp8", lambda value: value in ("q8", "fp8")),
}


def fp32_holds(value: float) -> bool:
    """Whether a number >= 0 is neither lost in fp32 nor too large for it."""
    import numpy as np

    with np.errstate(over="ignore"):
        narrow = float(np.float32(value))
    return value >= 0 and math.isfinite(narrow) and (narrow > 0 or value == 0)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: What the top of a kernel's text declares, besides its parameters.
TEXT_NAMES = _words(
    "token tokens token_first per_cluster rank count lane warp column_first column_block row_first stamps iteration "
    "base_comb base_post base_pre before col_k col_potential fn_rows gate inverse_rms iterations_run live mix_comb "
    "mix_post mix_pre owner pre_base pre_scale root_mean_square row_j row_potential scale_comb scale_post scale_pre "
    "threadIdx blockIdx blockDim gridDim"
)
#: What inner scopes declare. Tensors with a token axis are named at the top only; weights are named inside too.
INNER_NAMES = _words(
    "all_same amax b by_column by_rank by_warp c chunk_sum chunk_sums col comb_of cs d dots e element first g "
    "gate_logits gate_of_d gates i inverse j k logit low mix most moved next now own post_gate post_of pre_gate r "
    "reduced row same stream sum task terms to total v value w warp_sum was ws xs"
)
_WORDS = _words(
    "alignas alignof and asm auto bool break case catch char class concept const consteval constexpr constinit "
    "const_cast continue decltype default delete do double dynamic_cast else enum explicit export extern false float "
    "for friend goto if inline int long mutable namespace new noexcept not nullptr operator or private protected "
    "public register reinterpret_cast requires return short signed sizeof static static_assert static_cast struct "
    "switch template this throw true try typedef typeid typename union unsigned using virtual void volatile wchar_t "
    "while xor"
)
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_]*(\.[A-Za-z0-9_]+)*")


def names_can_stand_in_text(program: Program) -> Iterator[str]:
    """Names make C identifiers (`.` becomes `_`), each its own, and none that C++ or the text itself uses."""
    for what, names in (("stage", [s.name for s in program.stages]), ("tensor", [t.name for t in program.tensors])):
        for name in names:
            if not _NAME.fullmatch(name) or "__" in name:
                yield f"{what} {name!r} is not made of letters, digits, single underscores and dots"
    seen: dict[str, str] = {}
    for tensor in program.tensors:
        name = tensor.name.replace(".", "_")
        taken = TEXT_NAMES | _WORDS | (_words("") if "T" in tensor.shape else INNER_NAMES)
        if name in taken or name.startswith(("mhc_", "s_", "r_")):
            yield f"tensor {tensor.name} has a name that the emitted text uses for something else"
        for text in (name, f"{name}_t", f"{name}_c"):  # the tensor, its token's row, its cluster's first row
            if seen.setdefault(text, tensor.name) != tensor.name:
                yield f"tensors {seen[text]} and {tensor.name} would both be {text} in the emitted text"


def attributes_have_legal_values(program: Program) -> Iterator[str]:
    """Numbers that templates print are numbers, and words are ones that steps know."""
    for stage in program.stages:
        for key, value in stage.attrs:
            if key in _LEGAL and not _LEGAL[key][1](value):
                yield f"stage {stage.name} ({stage.kind}): {key} is {value!r}, and must be {_LEGAL[key][0]}"


def names_are_unique(program: Program) -> Iterator[str]:
    """Stage names and tensor names are each unique."""
    for what, names in (
        ("stage", [s.name for s in program.stages]),
        ("tensor", [t.name for t in program.tensors]),
    ):
        for name in sorted({n for n in names if names.count(n) > 1}):
            yield f"{what} {name} is defined twice"


def every_stage_matches_its_kind(program: Program) -> Iterator[str]:
    """Kind, slots and attributes of each stage are those of its signature."""
    for stage in program.stages:
        kind = KINDS.get(stage.kind)
        if kind is None:
            yield f"stage {stage.name} has unknown kind {stage.kind}"
            continue
        for what, have, signature in (
            ("operand", stage.operands, kind.operands),
            ("result", stage.results, kind.results),
        ):
            needed = {slot for slot, _ in signature if not slot.endswith("?")}
            allowed = {slot.rstrip("?") for slot, _ in signature}
            slots = {slot for slot, _ in have}
            for slot in sorted(needed - slots):
                yield f"stage {stage.name} ({stage.kind}) lacks {what} {slot}"
            for slot in sorted(slots - allowed):
                yield f"stage {stage.name} ({stage.kind}) has unknown {what} {slot}"
        have_attrs = {key for key, _ in stage.attrs}
        for key in sorted(set(kind.attrs) - have_attrs):
            yield f"stage {stage.name} ({stage.kind}) lacks attribute {key}"
        options = {**kind.options, **_comb_options(stage)}
        for key in sorted(have_attrs - set(kind.attrs) - set(options)):
            yield f"stage {stage.name} ({stage.kind}) has unknown attribute {key}"
        for key, legal in options.items():
            have = stage.option(key, legal[0])
            if have not in legal:
                yield f"stage {stage.name} ({stage.kind}): {key} is {have!r}, not one of {', '.join(legal)}"


def _comb_options(stage: Stage) -> Mapping[str, tuple[str, ...]]:
    kind = COMB_KINDS.get(stage.option("comb", ""))
    return kind.options if stage.kind in COMB_STAGES and kind is not None else {}


def every_matrix_is_of_a_kind(program: Program) -> Iterator[str]:
    """A stage that makes a mixing matrix names a kind of that stage, with logits and streams the kind takes."""
    n = program.dim("n")
    for stage in program.stages_of_kind(*COMB_STAGES):
        kind = COMB_KINDS.get(stage.option("comb", ""))
        if kind is None:
            yield f"stage {stage.name} has unknown comb {stage.option('comb', '')!r}"
        elif kind.stage != stage.kind:
            yield f"stage {stage.name}: comb {kind.name} is made by stages of kind {kind.stage}, not {stage.kind}"
        elif kind.streams(n):
            yield f"stage {stage.name}: comb {kind.name}: {kind.streams(n)}"
        elif kind.check(stage):
            yield f"stage {stage.name}: comb {kind.name}: {kind.check(stage)}"
        elif (kind.logits(n) > 0) != ("logits" in dict(stage.operands)):
            yield f"stage {stage.name}: comb {kind.name} takes {kind.logits(n)} logits at n = {n}"
        elif "logits" in dict(stage.operands) and _size(program, "L") != kind.logits(n):
            yield f"stage {stage.name}: comb {kind.name} takes {kind.logits(n)} logits, and L = {_size(program, 'L')}"


def every_operand_is_declared(program: Program) -> Iterator[str]:
    """Each tensor a stage mentions exists."""
    known = {tensor.name for tensor in program.tensors}
    for stage in program.stages:
        for name in (*stage.reads, *stage.writes):
            if name not in known:
                yield f"stage {stage.name} mentions undeclared tensor {name}"


def every_tensor_has_one_writer(program: Program) -> Iterator[str]:
    """Inputs and parameters have no writer; values and results have exactly one."""
    writers: dict[str, list[str]] = {}
    for stage in program.stages:
        for name in stage.writes:
            writers.setdefault(name, []).append(stage.name)
    for tensor in program.tensors:
        by = writers.get(tensor.name, [])
        if tensor.role in ("input", "parameter") and by:
            yield f"{tensor.role} {tensor.name} is written by {', '.join(by)}"
        if tensor.role in ("value", "result") and len(by) != 1:
            yield f"{tensor.role} {tensor.name} has {len(by)} writers ({', '.join(by) or 'none'})"


def every_value_is_used(program: Program) -> Iterator[str]:
    """An intermediate value has a reader, an input or parameter too."""
    for tensor in program.tensors:
        if tensor.role != "result" and tensor.name not in program.readers:
            yield f"{tensor.role} {tensor.name} is never read"


def shapes_agree_with_the_kinds(program: Program) -> Iterator[str]:
    """Each slot's tensor has the shape of the kind's signature, symbol by symbol or by size.

    What the signature leaves open (`mhcgen.stages.LOCAL`) is settled by the first slot that has it.
    """
    by_name = {tensor.name: tensor for tensor in program.tensors}
    for stage in program.stages:
        kind = KINDS.get(stage.kind)
        if kind is None:
            continue
        shapes = {slot.rstrip("?"): shape for slot, shape in (*kind.operands, *kind.results)}
        settled: dict[Dim, Dim] = {}
        for slot, name in (*stage.operands, *stage.results):
            tensor, want = by_name.get(name), shapes.get(slot)
            if tensor is None or want is None:
                continue
            for symbol, dim in zip(want, tensor.shape, strict=False):
                if symbol in LOCAL:
                    settled.setdefault(symbol, _settle(program, symbol, dim))
            want = tuple(settled.get(symbol, symbol) for symbol in want)
            if want == STREAMS and tensor.shape == STREAM_LAST:
                continue
            if slot in kind.shared and "T" not in tensor.shape:
                want = want[1:]
            have_sizes = tuple("T" if d == "T" else _size(program, d) for d in tensor.shape)
            want_sizes = tuple("T" if d == "T" else _size(program, d) for d in want)
            if have_sizes != want_sizes:
                yield (
                    f"stage {stage.name}: {slot} is {name} of shape {have_sizes}, "
                    f"and kind {stage.kind} wants {want_sizes}"
                )


def what_runs_once_reads_no_token(program: Program) -> Iterator[str]:
    """A stage whose results are the same for all tokens reads nothing of a token, and all its results are that."""
    by_name = {tensor.name: tensor for tensor in program.tensors}
    for stage in program.stages:
        if stage.kind not in KINDS or not KINDS[stage.kind].shared or stage.kind in ("collapse", "post"):
            continue
        shapes = {name: by_name[name].shape for name in (*stage.reads, *stage.writes) if name in by_name}
        token = [name for name, shape in shapes.items() if "T" in shape]
        once = [name for name in stage.writes if name in shapes and "T" not in shapes[name]]
        if once and token:
            yield f"stage {stage.name} makes {once[0]} for all tokens, and {token[0]} is one token's"
        if stage.kind in COMB_STAGES and not once and "logits" in dict(stage.operands):
            logits = stage.operand("logits")
            if "T" not in shapes.get(logits, ("T",)):
                yield f"stage {stage.name} makes a matrix a token of {logits}, which is the same for all tokens"


def _settle(program: Program, symbol: Dim, have: Dim) -> Dim:
    """The choice of an open symbol whose size is that of `have`; the first choice where none is."""
    choices = LOCAL[symbol]
    sizes = [_size(program, choice) for choice in choices]
    return choices[sizes.index(size)] if (size := _size(program, have)) in sizes else choices[0]


def _size(program: Program, dim: int | str) -> int | str:
    sizes = dict(program.dims)
    return dim if isinstance(dim, int) else sizes.get(dim, f"?{dim}")


def dtypes_and_roles_are_known(program: Program) -> Iterator[str]:
    """dtype and role of each tensor are of the lists in `mhcgen.ir`."""
    for tensor in program.tensors:
        if tensor.dtype not in DTYPES:
            yield f"tensor {tensor.name} has unknown dtype {tensor.dtype}"
        if tensor.role not in ROLES:
            yield f"tensor {tensor.name} has unknown role {tensor.role}"


def dtypes_fit_the_slots(program: Program) -> Iterator[str]:
    """Columns and streams are of a float dtype, codes of their scheme's, counts integers; all else is fp32.

    Coefficients and weights in a narrow dtype would be widened by whoever reads them, each in its own way.
    """
    by_name = {tensor.name: tensor for tensor in program.tensors}
    for stage in program.stages:
        kind = KINDS.get(stage.kind)
        if kind is None:
            continue
        shapes = {slot.rstrip("?"): shape for slot, shape in (*kind.operands, *kind.results)}
        for slot, name in (*stage.operands, *stage.results):
            tensor, shape = by_name.get(name), shapes.get(slot)
            if tensor is None or shape is None or tensor.dtype not in DTYPES:
                continue
            fitting = _fitting(stage, slot, shape)
            if tensor.dtype not in fitting:
                yield (
                    f"stage {stage.name}: {slot} is {name} of dtype {tensor.dtype}, "
                    f"and only {' or '.join((', '.join(fitting[:-1]), fitting[-1])) if fitting[1:] else fitting[0]} "
                    "fits there"
                )
        dtypes = {by_name[name].dtype for name in (*stage.reads, *stage.writes) if name in by_name}
        if stage.kind in ("expand", "first") and len(dtypes) > 1:
            yield f"stage {stage.name}: {stage.kind} copies, so its dtypes cannot be {' and '.join(sorted(dtypes))}"


def _fitting(stage: Stage, slot: str, shape: tuple[Dim, ...]) -> tuple[str, ...]:
    if slot == "q":
        return ("fp8_e4m3",) if dict(stage.attrs).get("scheme") == "fp8" else ("int8",)
    if slot == "iterations":
        return ("int32",)
    return ("fp32", "bf16", "fp16") if shape[0] == "T" and shape[-1] == "H" else ("fp32",)


def stages_are_in_a_topological_order(program: Program) -> Iterator[str]:
    """A stage reads only what is given or was written before it (so there is no cycle)."""
    written: set[str] = set()
    produced = set(program.writers)
    for stage in program.stages:
        for name in stage.reads:
            if name in produced and name not in written:
                yield f"stage {stage.name} reads {name} before {program.writers[name]} writes it"
        written.update(stage.writes)


def a_program_has_results(program: Program) -> Iterator[str]:
    """There is at least one stage and one result."""
    if not program.stages:
        yield "the Program has no stage"
    if not program.of_role("result"):
        yield "the Program has no result"


def tokens_are_counted(program: Program) -> Iterator[str]:
    """Some input has a token axis: T is taken from it when the Program runs."""
    if program.stages and not any("T" in tensor.shape for tensor in program.of_role("input")):
        yield "no input has a token axis T"


RULES: tuple[Rule, ...] = (
    sizes_are_given,
    names_are_unique,
    names_can_stand_in_text,
    attributes_have_legal_values,
    every_stage_matches_its_kind,
    every_matrix_is_of_a_kind,
    what_runs_once_reads_no_token,
    every_operand_is_declared,
    every_tensor_has_one_writer,
    every_value_is_used,
    shapes_agree_with_the_kinds,
    dtypes_and_roles_are_known,
    dtypes_fit_the_slots,
    stages_are_in_a_topological_order,
    a_program_has_results,
    tokens_are_counted,
)


def violations(program: Program) -> list[str]:
    """All violations of all rules, each `rule: sentence`; of the sizes alone where they are wrong."""
    sizes = [f"{sizes_are_given.__name__}: {text}" for text in sizes_are_given(program)]
    return sizes or [f"{rule.__name__}: {text}" for rule in RULES for text in rule(program)]


def verify(program: Program) -> None:
    """Check every rule.

    Raises:
        ProgramError: `V-PROGRAM`, its notes list every violation.
    """
    found = violations(program)
    if found:
        raise ProgramError(
            "V-PROGRAM",
            f"the Program breaks {len(found)} rule(s)",
            where=f"model {program.model}, scope {program.scope}",
            notes=tuple(found),
            hints=("each note names the rule, the stage and the tensor",),
        )
