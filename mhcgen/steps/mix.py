"""Mix work: the few numbers of a token that one warp holds, up to the logits."""

from __future__ import annotations

import math
from typing import Any

from mhcgen.ir import Stage
from mhcgen.plan import Access, Declare
from mhcgen.steps.column import levels
from mhcgen.steps.context import LANE_LAYOUTS, Context, identifier


def lane_fields(context: Context) -> dict[str, Any]:
    """Sizes every lane-layout step needs."""
    n = context.n
    power = 1 << (n - 1).bit_length()
    return {"n": n, "power": power, "elements": {"element": 1, "row": n, "registers": n * n}[context.layout]}


def lane_declares(context: Context) -> tuple[Declare, ...]:
    """Index registers and the matrix registers of a lane layout."""
    fields = lane_fields(context)
    full = "full" if fields["power"] == context.n else "padded"
    shape = f"{context.layout}_{full}" if context.layout != "registers" else "registers"
    matrix = context.declare("matrix", elements=fields["elements"])
    if context.layout == "registers":
        return (context.declare("lanes_registers"), matrix)
    return (context.declare(f"lanes_{shape}", n=context.n, power=fields["power"]), matrix)


def gate_declares(context: Context) -> Declare:
    """Lane c < n also holds the two gates of stream c."""
    return context.declare("gate_registers", n=context.n)


def rowsq(context: Context, stage: Stage) -> None:
    """Sum of squares over the slab, inverse RMS, and the rescale of the mixes."""
    x = stage.operand("x")
    acc = {"fp32": "float", "fp64": "double"}[stage.attr("acc")]
    part = context.share(f"s_{identifier(stage.name)}_part", acc, context.kernel.data_warps)
    few = context.kernel.data_warps <= {"float": 32, "double": 16}[acc]
    # In a block of one warp, lane 0 alone writes the one partial sum, and reads it where lanes share the adding up.
    own = context.kernel.warps == 1 and not few
    source, reads, declares = context.streams(x)
    context.step(
        stage,
        "partial",
        "sumsq_partial",
        "data",
        (*reads, Access(part, True, own=own)),
        declares,
        part=part,
        acc=acc,
        n=context.n,
        levels=levels(context.columns.chunks),
        **source,
        **context.column_fields(),
    )
    count = context.n * context.hidden
    context.step(
        stage,
        "inverse",
        "sumsq_total_in_lane" if few else "sumsq_total",
        "mix",
        (Access(part, False, own=own),),
        (rms_declare(context, stage),),
        part=part,
        acc=acc,
        warps=context.kernel.data_warps,
        count=count,
        eps=rms_eps(context, stage),
        **root_fields(stage),
    )
    rescale(context, stage)


def _divides(stage: Stage) -> bool:
    """Whether mixes are divided by the root mean square, not multiplied by its inverse."""
    return bool(stage.option("form", "rsqrt") == "divide")


def apply_function(stage: Stage) -> str:
    """Function that rescales a mix by the register of `rms_declare`."""
    return "mhc_quotient" if _divides(stage) else "__fmul_rn"


def rms_declare(context: Context, stage: Stage) -> Declare:
    """The register that holds the root mean square or its inverse."""
    return context.declare(_rms(stage))


def _rms(stage: Stage) -> str:
    return "root_mean_square" if _divides(stage) else "inverse_rms"


def rms_eps(context: Context, stage: Stage) -> float:
    """eps as the root takes it; a clamp is of the norm of all n*H elements, and the root is of their mean."""
    eps = float(stage.attr("eps"))
    clamps = stage.option("eps_place", "in") == "clamp"
    return eps / math.sqrt(context.n * context.hidden) if clamps else eps


def root_fields(stage: Stage) -> dict[str, Any]:
    """The register, and the function that makes its value from mean and eps."""
    place = stage.option("eps_place", "in")
    suffix = "" if place == "in" else f"_{place}"
    return {"rms": _rms(stage), "root": f"{'rms' if _divides(stage) else 'inverse_rms'}{suffix}"}


def rescale(context: Context, stage: Stage) -> None:
    """Multiply the mixes by the inverse RMS, or divide by the RMS, in the lanes that will use them or in memory."""
    mixes, scaled = stage.operand("mixes"), stage.result("mixes_scaled")
    common: dict[str, Any] = {"apply": apply_function(stage), "rms": _rms(stage)}
    if context.place(scaled).space == "lane":
        _fetch_mixes(context, stage, mixes)
        context.step(
            stage,
            "scale",
            "scale_lanes",
            "mix",
            (),
            (gate_declares(context), *lane_declares(context)),
            elements=lane_fields(context)["elements"],
            **common,
        )
        return
    rows = context.elements(scaled)
    context.step(
        stage,
        "scale",
        "scale_mixes",
        "mix",
        (*context.gate_accesses(mixes, own=True), *context.small_accesses(scaled, own=True)),
        (rms_declare(context, stage),),
        rows=rows,
        source=context.gate_source(mixes),
        targets=context.small_targets(scaled),
        **common,
    )


def _fetch_mixes(context: Context, stage: Stage, tensor: str) -> None:
    """Mixes into the lanes that will use them; early where they come from global memory."""
    reads = context.gate_accesses(tensor)
    fields = lane_fields(context)
    context.step(
        stage,
        "fetch",
        f"fetch_mixes_{context.layout}",
        "mix",
        reads,
        (gate_declares(context), *lane_declares(context)),
        early=not reads and not context.plan.made_in(context.kernel, tensor),
        source=context.gate_source(tensor),
        n=context.n,
        elements=fields["elements"],
    )


def gates(context: Context, stage: Stage, without_pre: bool = False) -> None:
    """pre, post and the logits of the mixing matrix from the rescaled mixes.

    `without_pre`: another warp makes the pre gates that this kernel reads; only the results are stored here.
    """
    scaled = stage.operand("mixes_scaled")
    pre, post, logits = stage.result("pre"), stage.result("post"), dict(stage.results).get("logits", "")
    scaled_form = "_scaled" if stage.option("form", "affine") == "scaled" else ""
    scale, base = context.row(stage.operand("scale")), context.row(stage.operand("base"))
    writes = (*(() if without_pre else context.small_accesses(pre)), *context.small_accesses(post))
    common: dict[str, Any] = {
        "n": context.n,
        "pre_eps": stage.attr("pre_eps"),
        "post_mult": stage.attr("post_mult"),
        "pre_act": stage.option("pre_act", "sigmoid"),
        "post_act": stage.option("post_act", "sigmoid"),
        "pre_targets": tuple(t for t in context.small_targets(pre) if not (without_pre and t == context.shared(pre))),
        "post_targets": context.small_targets(post),
    }
    if context.layout in LANE_LAYOUTS:
        elements = lane_fields(context)["elements"]
        if context.place(scaled).space != "lane":
            _fetch_mixes(context, stage, scaled)
        declares = (
            gate_declares(context),
            *lane_declares(context),
            context.declare("gate_parameters", elements=elements),
        )
        context.step(
            stage,
            "parameters",
            f"fetch_parameters_{context.layout}",
            "mix",
            (),
            declares,
            constant=True,
            scale=scale,
            base=base,
            n=context.n,
            elements=elements,
        )
        template = f"gates_lanes{scaled_form}"
        context.step(stage, "lanes", template, "mix", writes, declares, elements=elements, **common)
        if context.small_targets(logits):
            store_matrix(context, stage, "store", logits)
        return
    given: dict[str, Any] = {"source": context.gate_source(scaled), "scale": scale, "base": base, "n": context.n}
    reads = context.gate_accesses(scaled)
    context.step(stage, "strided", f"gates_shared{scaled_form}", "mix", (*reads, *writes), **{**common, **given})
    if not logits:
        return
    size = context.elements(logits)
    matrix = context.share(f"s_{identifier(logits)}", "float", size)
    targets: tuple[str, ...] = (matrix,)
    if context.plan.escapes(context.kernel, logits):
        targets += (context.row(logits),)
    act: dict[str, Any] = {"act": stage.option("pre_act", "sigmoid")} if scaled_form else {}
    context.step(
        stage,
        "logits",
        f"logits_shared{scaled_form}",
        "mix",
        (*reads, Access(matrix, True, own=True)),
        size=size,
        logit_targets=targets,
        **given,
        **act,
    )


def store_matrix(context: Context, stage: Stage, piece: str, tensor: str, suffix: str = "") -> None:
    """The lanes' matrix to where a tensor lives; suffix `_transposed` swaps its axes."""
    fields = lane_fields(context)
    context.step(
        stage,
        piece,
        f"store_matrix_{context.layout}{suffix}",
        "mix",
        context.small_accesses(tensor),
        lane_declares(context),
        n=context.n,
        elements=fields["elements"],
        targets=context.small_targets(tensor),
    )


def head_gates(context: Context, stage: Stage) -> None:
    """pre of the gated head: sigmoid of its own n mixes."""
    scaled, pre = stage.operand("mixes_scaled"), stage.result("pre")
    context.step(
        stage,
        "strided",
        "head_gates",
        "mix",
        (*context.gate_accesses(scaled, own=True), *context.small_accesses(pre)),
        n=context.n,
        source=context.gate_source(scaled),
        scale=context.row(stage.operand("scale")),
        base=context.row(stage.operand("base")),
        pre_eps=stage.attr("pre_eps"),
        pre_targets=context.small_targets(pre),
    )


def static_gates(context: Context, stage: Stage) -> None:
    """pre, post and logits that are the same for all tokens: activations of base alone, in shared memory."""
    pre, post, logits = stage.result("pre"), stage.result("post"), dict(stage.results).get("logits", "")
    base = context.row(stage.operand("base"))
    context.step(
        stage,
        "strided",
        "gates_static",
        "mix",
        (*context.small_accesses(pre), *context.small_accesses(post)),
        n=context.n,
        base=base,
        pre_eps=stage.attr("pre_eps"),
        post_mult=stage.attr("post_mult"),
        pre_act=stage.option("pre_act", "sigmoid"),
        post_act=stage.option("post_act", "sigmoid"),
        pre_targets=context.small_targets(pre),
        post_targets=context.small_targets(post),
    )
    if not logits:
        return
    context.step(
        stage,
        "logits",
        "logits_static",
        "mix",
        context.small_accesses(logits),
        n=context.n,
        base=base,
        size=context.elements(logits),
        logit_targets=context.small_targets(logits),
    )
