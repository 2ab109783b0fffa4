"""What public libraries compute, where it differs from DeepSeek-V4's rule."""

from __future__ import annotations

from mhcgen.models.family import Model

#: Machine epsilon of fp32.
FP32_EPSILON = 2.0**-23

_OUT = ("orient", "out")
_LOADER = "fn is [N, n*H] here, stream-major; the library stores it {}, so a loader permutes it once"

MODELS = (
    Model(
        "transformer-engine",
        "NVIDIA TransformerEngine: log-domain Sinkhorn without eps, streams stored [T, H, n]",
        iters=20,
        rms_eps=FP32_EPSILON,
        hc_eps=0.0,
        zero_eps=True,
        exit="mean",
        comb_options=(("domain", "log"),),
        pre_eps=0.0,
        rms=(("form", "divide"),),
        stream_last=True,
        notes=(
            "alpha is applied before the division by the RMS there and after it here: one rounding apart",
            _LOADER.format("with columns h*n + stream"),
            "the optional bias of the branch output belongs to the branch here",
            "the library has no exit; mean is a choice",
        ),
    ),
    Model(
        "liger",
        "Liger Kernel: DeepSeek-V4's rule on comb as [out, in]",
        comb_options=(_OUT,),
        pre_eps=0.0,
        exit="mean",
        notes=(
            "softmax runs over sources and the last normalisation over destinations",
            _LOADER.format("[n*H, N], fp16 by default"),
            "collapse and post kernels write fp32 there",
            "the library has no exit; mean is a choice",
        ),
    ),
    Model(
        "megatron",
        "Megatron-LM native hyper-connections: eps of the RMS outside the root",
        rms=(("eps_place", "out"),),
        exit="mean",
        notes=(
            "not modelled: fused kernels there use exp2 of pre-scaled logits and cast gates to the activation dtype",
            "the RMS eps is the layernorm's configured one; 1e-6 is a default",
        ),
    ),
    Model(
        "tileops",
        "TileOPs: starts from exp(L - row maximum), eps 0.02, comb as [out, in]",
        rms_eps=1e-4,
        hc_eps=0.02,
        comb_options=(_OUT, ("start", "exp_rowmax")),
        pre_eps=0.0,
        rms=(("eps_place", "out"),),
        exit="mean",
        notes=(
            "C R is accumulated in bf16 and rounded again in post there; here post rounds once",
            _LOADER.format("[n*H, N]"),
            "gates are taken as sigmoid and 2 sigmoid; the library has no exit, mean is a choice",
        ),
    ),
    Model(
        "gated-residual",
        "GatedResidual of qwen4_exp in Hugging Face Transformers (Qwen3.8-Flash-Next): no mixing matrix, a gate for "
        "every element",
        hidden=2560,
        iters=0,
        hc_eps=0.0,
        comb="identity",
        pre_eps=0.0,
        rank=320,
        notes=(
            "fn [D + n, n*H] is input_mix_weight_down on top of block_inject_weight, which share their input",
            "up [D, n*H] is input_mix_weight_up transposed, so that neighbouring columns lie side by side; a loader "
            "transposes it once",
            "stream_weight [n*H] is the weight of hc_norm, to which 1 is added here",
            "D is --rank; the default is the published 320 at H = 2560 and H/8 below, at least 1",
            "every module there rounds to the streams' dtype; here x_normed and y do, mixes and gates stay fp32",
            "the sub-layers there have no norm of their own; norm=True adds one",
            "layers of ple_layer_ids there add to the streams before the attention site, as an engram does",
            "entry is n copies; exit head is the same mixer without post; the published model refuses n = 1",
        ),
    ),
    Model(
        "mhc.cu",
        "mHC.cu: exp without a maximum, division only where a sum exceeds 1e-5, comb as [out, in]",
        rms_eps=1e-5,
        hc_eps=1e-5,
        comb_options=(_OUT, ("start", "exp"), ("eps_mode", "threshold")),
        pre_eps=0.0,
        exit="mean",
        notes=(
            "logits beyond 80 overflow fp32, as they do there",
            "one kernel there zeroes a column whose sum is at most eps; the others leave it, as here",
            "exp is the hardware approximation there: --class fast",
        ),
    ),
    Model(
        "mhc.cu-static",
        "mHC.cu, static form: pre, post and comb are the same for every token",
        rms_eps=1e-5,
        hc_eps=1e-5,
        comb_options=(_OUT, ("start", "exp"), ("eps_mode", "threshold")),
        pre_eps=0.0,
        exit="mean",
        static="all",
        notes=("logits beyond 80 overflow fp32, as they do there",),
    ),
)
