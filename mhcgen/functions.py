"""The device functions emitted text may call, in the order they are printed.

A kernel's text names the functions it uses; the emitter links in those and what they use themselves, so no
stage lists helpers by hand and none is printed unused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mhcgen.combs import DirectMap, comb_program
from mhcgen.ir import Program
from mhcgen.stages import COMB_STAGES

CTYPES = {
    "fp32": "float",
    "bf16": "__nv_bfloat16",
    "fp16": "__half",
    "int8": "signed char",
    "fp8_e4m3": "unsigned char",
    "int32": "int",
}
ITEMSIZES = {"fp32": 4, "bf16": 2, "fp16": 2, "int8": 1, "fp8_e4m3": 1, "int32": 4}
#: Rounding of a float on its way into memory, nearest even.
NARROW = {"fp32": "", "bf16": "__float2bfloat16_rn", "fp16": "__float2half_rn"}
INCLUDES = {"bf16": "cuda_bf16.h", "fp16": "cuda_fp16.h"}


@dataclass(frozen=True)
class Function:
    """A helper of emitted text.

    Args:
        name: the name it defines.
        template: file under templates/.
        fields: what the template needs.
    """

    name: str
    template: str
    fields: Mapping[str, Any]


#: name -> template for functions that are the same in every class; in printing order.
_COMMON_BEFORE = (
    ("mhc_refuse_fast_math", "refuse_fast_math"),
    ("mhc_fma", "fma"),
    ("mhc_sum", "sum"),
    ("mhc_sum_identity", "sum"),
    ("mhc_max", "max"),
    ("mhc_max_identity", "max"),
    ("mhc_tree_sum", "tree_sum"),
    ("mhc_tree_max", "tree_max"),
    ("mhc_pairs", "pairs"),
    ("mhc_warp_sum", "warp_sum"),
    ("mhc_mean", "mean"),
    ("mhc_dependent_launch", "dependent"),
    ("mhc_dependent_wait", "dependent"),
    ("mhc_copy_floats", "copy_floats"),
    ("mhc_reciprocal", "reciprocal"),
    ("mhc_bounded_quotient", "bounded_quotient"),
    ("mhc_cluster_arrive", "cluster_barrier"),
    ("mhc_cluster_wait", "cluster_barrier"),
    ("mhc_arrivals_expect", "arrivals_expect"),
    ("mhc_arrivals_wait", "arrivals_wait"),
    ("mhc_send", "send"),
    ("mhc_copy_async", "copy_async"),
    ("mhc_copies_wait", "copies_wait"),
    ("mhc_past_l1", "past_l1"),
)
#: name -> template stem; `_ieee` or `_fast` is appended.
_BY_SET = (
    ("mhc_exp", "exp"),
    ("mhc_quotient", "quotient"),
    ("mhc_inverse_sqrt", "inverse_sqrt"),
    ("mhc_log", "log"),
)
_COMMON_AFTER = tuple(
    (f"mhc_{stem}", stem)
    for stem in (
        "rms",
        "rms_out",
        "rms_clamp",
        "inverse_rms",
        "inverse_rms_out",
        "inverse_rms_clamp",
        "sigmoid",
        "silu",
        "tanh",
        "plain",
        "add_eps",
        "divide",
        "divide_bounded",
        "divide_then_add_eps",
        "divide_above",
        "exp_of_difference",
        "exp_element",
        "potential",
        "sync_data",
        "stamp",
        "amax",
        "inverse_scale",
        "scale_q8",
        "scale_fp8",
        "power_of_two_up",
        "scale_q8_pow2",
        "scale_fp8_pow2",
        "quantise_q8",
        "quantise_fp8",
        "round_fp32",
        "round_bf16",
        "round_fp16",
    )
)


def functions(program: Program, chunk: int, scalar: bool) -> tuple[Function, ...]:
    """Every function text may call, in printing order.

    Args:
        program: its arithmetic picks the function set.
        chunk: columns handled at once, which bounds the width of loads and stores.
        scalar: load and store one element at a time.
    """
    suffix = program.arithmetic.functions
    found = [Function(name, f"functions/{stem}.cu.j2", {}) for name, stem in _COMMON_BEFORE]
    found += [
        Function(name, f"functions/{stem}_{suffix}.cu.j2", {})
        for name, stem in _BY_SET
    ]
    found += [Function(name, f"functions/{stem}.cu.j2", {}) for name, stem in _COMMON_AFTER]
    found += _comb_functions(program)
    for dtype in ("fp32", "bf16", "fp16", "int8", "fp8_e4m3"):
        found += _memory_functions(dtype, chunk, scalar)
    for dtype, narrow in NARROW.items():
        fields = {"dtype": dtype, "ctype": CTYPES[dtype]}
        found.append(Function(f"mhc_load_last_{dtype}", "io/load_last.cu.j2", fields))
        found.append(Function(f"mhc_store_last_{dtype}", "io/store_last.cu.j2", {**fields, "narrow": narrow}))
    return tuple(found)


def _comb_functions(program: Program) -> list[Function]:
    """Direct maps of the mixing matrices of a Program, each kind once."""
    maps = {s.attr("comb"): comb_program(s, program.dim("n")) for s in program.stages_of_kind(*COMB_STAGES)}
    return [
        Function(f"mhc_comb_{kind}", made.template, dict(made.fields))
        for kind, made in maps.items()
        if isinstance(made, DirectMap)
    ]


def vector_of(dtype: str, chunk: int, scalar: bool) -> int:
    """Elements per load or store: 16 bytes where the chunk allows."""
    return 1 if scalar else min(chunk, 16 // ITEMSIZES[dtype])


#: Kinds of loads: part of the name -> (what stands before and after the address, what the comment adds).
LOADS = {
    "": ("*", "", ""),
    "_once": ("__ldcs(", ")", ", which nothing reads again: the caches may drop them first"),
    "_past_l1": ("mhc_past_l1(", ")", ", past the L1"),
}


def _loads(template: str, dtype: str, fields: Mapping[str, Any], nbytes: int) -> list[Function]:
    """The kinds of loads of a dtype, `nbytes` at a time; the L1 can be passed by 16 bytes only."""
    made = []
    for kind, form in LOADS.items():
        before, after, note = LOADS[""] if kind == "_past_l1" and nbytes != 16 else form
        how = {"kind": kind, "open": before, "close": after, "note": note}
        made.append(Function(f"mhc_load{kind}_{dtype}", template, {**fields, **how}))
    return made


def _memory_functions(dtype: str, chunk: int, scalar: bool) -> list[Function]:
    vector = vector_of(dtype, chunk, scalar)
    if ITEMSIZES[dtype] * vector < 4 or (vector == 1):
        return _scalar_functions(dtype)
    words = ITEMSIZES[dtype] * vector // 4
    # One word is a plain `unsigned`; more are the members of a vector type.
    type_ = f"uint{words}" if words > 1 else "unsigned"
    members = [f"q.{name}" for name in "xyzw"[:words]] if words > 1 else ["q"]
    if dtype == "fp32":
        fields = {
            "vector": vector,
            "type": f"float{words}",
            "members": tuple({"word": word, "index": i} for i, word in enumerate(members)),
        }
        return [
            *_loads("io/load_vector_fp32.cu.j2", dtype, fields, 4 * words),
            Function("mhc_store_fp32", "io/store_vector_fp32.cu.j2", fields),
        ]
    if dtype in ("bf16", "fp16"):
        fields = {
            "vector": vector,
            "type": type_,
            "members": tuple({"word": w, "low": 2 * i, "high": 2 * i + 1} for i, w in enumerate(members)),
        }
        return [
            *_loads(f"io/load_vector_{dtype}.cu.j2", dtype, fields, 4 * words),
            Function(f"mhc_store_{dtype}", f"io/store_vector_{dtype}.cu.j2", fields),
        ]
    fields = {
        "dtype": dtype,
        "ctype": CTYPES[dtype],
        "vector": vector,
        "type": type_,
        "members": tuple({"word": w, **{f"b{b}": 4 * i + b for b in range(4)}} for i, w in enumerate(members)),
    }
    return [Function(f"mhc_store_{dtype}", "io/store_vector_8bit.cu.j2", fields)]


def _scalar_functions(dtype: str) -> list[Function]:
    widen = {"bf16": "__bfloat162float", "fp16": "__half2float"}.get(dtype, "")
    narrow = NARROW.get(dtype, "")
    ctype = CTYPES[dtype]
    source = ctype if dtype in ("int8", "fp8_e4m3") else "float"
    stores = Function(
        f"mhc_store_{dtype}",
        "io/store_scalar.cu.j2",
        {"dtype": dtype, "ctype": ctype, "from": source, "narrow": narrow},
    )
    if dtype in ("int8", "fp8_e4m3"):
        return [stores]
    fields = {"dtype": dtype, "ctype": ctype, "widen": widen}
    return [*_loads("io/load_scalar.cu.j2", dtype, fields, ITEMSIZES[dtype]), stores]
