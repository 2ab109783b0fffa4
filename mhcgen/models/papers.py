"""Forms given by papers, and restricted residual maps."""

from __future__ import annotations

from mhcgen.models.family import Model

#: F.normalize of the lucidrains line of code: x / max(|x|, 1e-12).
_NORMALIZE = {"rms_eps": 1e-12, "rms": (("eps_place", "clamp"),)}
_GAMMA = "the norm's weight (gamma + 1) is folded into fn, which is exact algebra"

MODELS = (
    Model(
        "mhc-paper",
        "mHC, arXiv 2512.24880: exp, then 20 times columns and rows; C is [out, in]",
        hc_eps=0.0,
        zero_eps=True,
        comb_options=(("orient", "out"), ("start", "exp"), ("eps_mode", "none"), ("order", "col-row")),
        pre_eps=0.0,
        exit="mean",
        notes=(
            "the last step divides rows, which run over sources: each destination is a convex mix",
            "the paper states no eps of the RMS and no exit: 1e-6 and mean are choices; --rms-eps 0 is legal",
            "logits beyond 40 in magnitude may divide by a sum of zeros in fp32",
            "public code of this line works in the log domain with mixes interleaved per stream; not modelled",
        ),
    ),
    Model(
        "mhc-lite",
        "mHC-lite, arXiv 2601.05732: a convex mix of all n! permutations, no iterations",
        iters=0,
        hc_eps=0.0,
        zero_eps=True,
        comb="birkhoff",
        pre_eps=0.0,
        exit="sum",
        notes=(_GAMMA, "one scale each for pre, post and residual"),
        **_NORMALIZE,  # type: ignore[arg-type]
    ),
    Model(
        "kromhc",
        "KromHC, arXiv 2601.21579: a Kronecker product of 2 x 2 matrices, 2 log2 n logits",
        iters=0,
        hc_eps=0.0,
        zero_eps=True,
        comb="kronecker",
        pre_eps=0.0,
        exit="sum",
        notes=(_GAMMA, "one residual scale for all factors"),
        **_NORMALIZE,  # type: ignore[arg-type]
    ),
    Model(
        "plain-hc",
        "Hyper-Connections, arXiv 2409.19606: tanh(norm of a stream . W) scale + static, no constraint",
        iters=0,
        hc_eps=0.0,
        post_mult=1.0,
        comb="plain",
        pre_eps=0.0,
        exit="sum",
        gates=(("form", "scaled"), ("post_act", "tanh"), ("pre_act", "tanh")),
        norm_each=True,
        notes=(
            "column 0 of alpha is pre, the others are comb, beta is post: fn is [2 + n, H], rows pre | post | comb",
            "scale is s_alpha, s_beta, s_alpha; base is the static alpha column 0 | beta | alpha",
            "the norm is an RMSNorm with its weight folded into fn; the paper used LayerNorm, later code RMSNorm",
        ),
    ),
    Model(
        "ihc",
        "identity residual map: C = I",
        iters=0,
        hc_eps=0.0,
        comb="identity",
        pre_eps=0.0,
        exit="mean",
        notes=("gates and RMS as in the mHC paper",),
    ),
    Model(
        "dhc",
        "diagonal residual map: C = diag(sigmoid)",
        iters=0,
        hc_eps=0.0,
        comb="diagonal",
        pre_eps=0.0,
        exit="mean",
        notes=("gates and RMS as in the mHC paper",),
    ),
    Model(
        "static-mhc",
        "mHC with a residual map that is the same for every token",
        hc_eps=0.0,
        zero_eps=True,
        comb_options=(("orient", "out"), ("start", "exp"), ("eps_mode", "none"), ("order", "col-row")),
        pre_eps=0.0,
        exit="mean",
        static="comb",
        notes=(
            "pre and post as in mhc-paper, of 2n mixes; comb of n*n parameters, made once and not once a token",
            "logits beyond 40 in magnitude may divide by a sum of zeros in fp32",
        ),
    ),
    Model(
        "circulant-hc",
        "circulant residual map: C[j,k] = softmax(l)[(k - j) mod n]",
        iters=0,
        hc_eps=0.0,
        comb="circulant",
        pre_eps=0.0,
        exit="mean",
        notes=("gates and RMS as in the mHC paper",),
    ),
)
