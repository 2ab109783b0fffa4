"""The kinds of stages: what each reads, writes and is parameterised by.

A kind is *column* work (every thread owns columns of the hidden axis), *mix* work (a few numbers per token,
one warp's worth) or *opaque* (a branch: nothing is known of its inside).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mhcgen.ir import Dim

#: Shapes of slots; T, n, H, K, R, L, G, S, D are the symbols of `mhcgen.ir`, M is one of `LOCAL`.
STREAMS: tuple[Dim, ...] = ("T", "n", "H")
#: Streams whose memory has the streams of a column side by side; fits any slot of shape STREAMS.
STREAM_LAST: tuple[Dim, ...] = ("T", "H", "n")
COLUMNS: tuple[Dim, ...] = ("T", "H")
MIXES: tuple[Dim, ...] = ("T", "R")
#: What a projection gives: R mixes at a site; at a gated head n, or D where its gates are of low rank.
PROJECTED: tuple[Dim, ...] = ("T", "M")
#: Symbols that a signature leaves open: one stage takes one of these for all of its slots.
LOCAL: dict[Dim, tuple[Dim, ...]] = {"M": ("R", "n", "D")}
GATE: tuple[Dim, ...] = ("T", "n")
MATRIX: tuple[Dim, ...] = ("T", "n", "n")
#: What the gates of every element of the streams are made of.
BOTTLENECK: tuple[Dim, ...] = ("T", "D")

#: Kinds that do for each stream alone what `project` and `rowsq` do for all of a token.
EACH_STREAM = ("project_streams", "rowsq_streams")

#: Kinds that make the bottleneck of low-rank gates: with post gates at a site, without at a head.
LOW_RANK = ("low_rank_gates", "head_low_rank_gates")

#: Kinds that make the mixing matrix: iterated, and a direct map of the logits. Their attribute `comb` names an entry
#: of `mhcgen.combs.COMB_KINDS`, which may have attributes of its own.
COMB_STAGES = ("sinkhorn", "comb")


@dataclass(frozen=True)
class StageKind:
    """Signature of a kind of stage.

    Args:
        name: key in `KINDS`.
        work: `column`, `mix` or `opaque`.
        operands: (slot, shape) pairs; a slot ending in `?` may be absent.
        results: (slot, shape) pairs likewise.
        attrs: names of the attributes it must have.
        meaning: the formula, for `mhcgen explain`.
        options: attributes that may be absent -> legal values, the first being meant then.
        shared: slots whose tensor may be the same for all tokens, and then has no T. A stage whose results have no T
            runs once, not once a token.
    """

    name: str
    work: str
    operands: tuple[tuple[str, tuple[Dim, ...]], ...]
    results: tuple[tuple[str, tuple[Dim, ...]], ...]
    attrs: tuple[str, ...]
    meaning: str
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    shared: tuple[str, ...] = ()


KINDS: dict[str, StageKind] = {
    kind.name: kind
    for kind in (
        StageKind(
            "expand",
            "column",
            (("e", COLUMNS),),
            (("x", STREAMS),),
            (),
            "x[t,c,:] = e[t,:]",
        ),
        StageKind(
            "project",
            "column",
            (("x", STREAMS), ("fn", ("M", "K"))),
            (("mixes", PROJECTED),),
            ("method",),
            "mixes[t,r] = sum_{c,h} fn[r, c*H+h] x[t,c,h]",
        ),
        StageKind(
            "rowsq",
            "column",
            (("x", STREAMS), ("mixes", PROJECTED)),
            (("mixes_scaled", PROJECTED),),
            ("acc", "eps"),
            "mixes_scaled[t,:] = mixes[t,:] / sqrt(mean(x[t]^2) + eps)",
            # in: sqrt(mean + eps). out: sqrt(mean) + eps. clamp: max(sqrt(mean), eps).
            # rsqrt: times the inverse. divide: divided by the root.
            {"eps_place": ("in", "out", "clamp"), "form": ("rsqrt", "divide")},
        ),
        StageKind(
            "project_streams",
            "column",
            (("x", STREAMS), ("fn", ("S", "H"))),
            (("mixes", MIXES),),
            ("method",),
            "mixes[t, c | n + c | 2n + c n + k] = sum_h fn[0 | 1 | 2 + k, h] x[t,c,h]",
        ),
        StageKind(
            "rowsq_streams",
            "column",
            (("x", STREAMS), ("mixes", MIXES)),
            (("mixes_scaled", MIXES),),
            ("acc", "eps"),
            "mixes_scaled of stream c = its mixes / sqrt(mean(x[t,c]^2) + eps)",
            {"eps_place": ("in", "out"), "form": ("rsqrt", "divide")},
        ),
        StageKind(
            "gates",
            "mix",
            (("mixes_scaled", MIXES), ("scale", (3,)), ("base", ("R",))),
            (("pre", GATE), ("post", GATE), ("logits?", ("T", "L"))),
            ("post_mult", "pre_eps"),
            "l = mixes_scaled * scale_g + base; pre = sigmoid(l_pre) + pre_eps; post = post_mult sigmoid(l_post)",
            # scaled: the activation first, of all mixes, then scale and base.
            {"form": ("affine", "scaled"), "pre_act": ("sigmoid", "tanh"), "post_act": ("sigmoid", "tanh")},
        ),
        StageKind(
            "head_gates",
            "mix",
            (("mixes_scaled", ("T", "n")), ("scale", (1,)), ("base", ("n",))),
            (("pre", GATE),),
            ("pre_eps",),
            "pre = sigmoid(mixes_scaled * scale + base) + pre_eps",
        ),
        StageKind(
            "norm_streams",
            "column",
            (("x", STREAMS), ("weight", ("K",))),
            (("x_normed", STREAMS),),
            ("acc", "eps"),
            "x_normed[t,c,h] = x[t,c,h] / sqrt(mean(x[t,c]^2) + eps) * (1 + weight[c*H+h])",
            {"eps_place": ("in", "out")},
        ),
        StageKind(
            "low_rank_gates",
            "mix",
            (("mixes", MIXES),),
            (("bottleneck", BOTTLENECK), ("post", GATE)),
            ("post_mult",),
            "bottleneck[t,r] = silu(mixes[t,r] / n), r < D; post[t,c] = post_mult sigmoid(mixes[t,D+c] / n)",
        ),
        StageKind(
            "head_low_rank_gates",
            "mix",
            (("mixes", BOTTLENECK),),
            (("bottleneck", BOTTLENECK),),
            (),
            "bottleneck[t,r] = silu(mixes[t,r] / n)",
        ),
        StageKind(
            "gated_mean",
            "column",
            (("x", STREAMS), ("bottleneck", BOTTLENECK), ("up", ("D", "K"))),
            (("y", COLUMNS),),
            (),
            "y[t,h] = mean over c of sigmoid(sum_r up[r,c*H+h] bottleneck[t,r]) x[t,c,h]",
        ),
        StageKind(
            "sinkhorn",
            "mix",
            (("logits", ("T", "L")),),
            (("comb", MATRIX), ("iterations?", ("T",))),
            ("comb", "early_stop", "eps", "iters"),
            "comb[t,j,k] = C after `iters` rounds of row and column normalisation of softmax(logits)",
            shared=("logits", "comb"),
        ),
        StageKind(
            "comb",
            "mix",
            (("logits?", ("T", "L")),),
            (("comb", MATRIX),),
            ("comb",),
            "comb[t,j,k] = the kind's function of the logits",
            shared=("logits", "comb"),
        ),
        StageKind(
            "static_gates",
            "mix",
            (("base", ("R",)),),
            (("pre", GATE), ("post", GATE), ("logits?", ("T", "L"))),
            ("post_mult", "pre_eps"),
            "pre = sigmoid(base_pre) + pre_eps; post = post_mult sigmoid(base_post); logits = base_comb",
            {"pre_act": ("sigmoid", "tanh"), "post_act": ("sigmoid", "tanh")},
            shared=("pre", "post", "logits"),
        ),
        StageKind(
            "collapse",
            "column",
            (("x", STREAMS), ("pre", GATE)),
            (("y", COLUMNS),),
            (),
            "y[t,h] = sum_c pre[t,c] x[t,c,h]",
            shared=("pre",),
        ),
        StageKind(
            "norm",
            "column",
            (("y", COLUMNS), ("weight?", ("H",))),
            (("z", COLUMNS),),
            ("acc", "eps"),
            "z[t,h] = y[t,h] / sqrt(mean(y[t]^2) + eps) * weight[h]",
        ),
        StageKind(
            "quant",
            "column",
            (("z", COLUMNS),),
            (("q", COLUMNS), ("q_scale", ("T", "G"))),
            ("group", "pow2", "scheme"),
            "q_scale = amax(group) / qmax; q = round(z / q_scale)",
        ),
        StageKind(
            "branch",
            "opaque",
            (("z", COLUMNS),),
            (("f", COLUMNS),),
            (),
            "f = branch(z): attention or FFN, opaque",
        ),
        StageKind(
            "engram",
            "opaque",
            (("x", STREAMS),),
            (("x_out", STREAMS),),
            (),
            "adds into the streams between post and the next pre, opaque",
        ),
        StageKind(
            "tap",
            "opaque",
            (("x", STREAMS),),
            (("aux", COLUMNS),),
            (),
            "an auxiliary reader of the streams between post and the next pre, opaque",
        ),
        StageKind(
            "post",
            "column",
            (("x", STREAMS), ("f", COLUMNS), ("post", GATE), ("comb", MATRIX)),
            (("x_next", STREAMS),),
            (),
            "x_next[t,k,h] = post[t,k] f[t,h] + sum_j comb[t,j,k] x[t,j,h]",
            shared=("post", "comb"),
        ),
        StageKind(
            "mean",
            "column",
            (("x", STREAMS),),
            (("y", COLUMNS),),
            (),
            "y[t,h] = (sum_c x[t,c,h]) / n",
        ),
        StageKind(
            "sum",
            "column",
            (("x", STREAMS),),
            (("y", COLUMNS),),
            (),
            "y[t,h] = sum_c x[t,c,h]",
        ),
        StageKind(
            "first",
            "column",
            (("x", STREAMS),),
            (("y", COLUMNS),),
            (),
            "y[t,h] = x[t,0,h]",
        ),
    )
}
