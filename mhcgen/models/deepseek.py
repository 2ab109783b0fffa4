"""DeepSeek-V4 and the models that share its arithmetic."""

from __future__ import annotations

from mhcgen.models.family import Model

_CASTS = (
    "Hugging Face's modeling code casts post and comb to bf16 and mixes in bf16; coefficients here are fp32, as in "
    "DeepSeek's own inference code"
)

MODELS = (
    Model("deepseek-v4", "DeepSeek-V4 inference code and report", notes=(_CASTS,)),
    Model(
        "deepseek-v4.1",
        "DeepSeek-V4.1: single-pass boundary; the collapse takes the pre gates made at the boundary before",
        hidden=5120,
        rms_eps=1e-20,
        norm_eps=1e-20,
        exit="pre",
        delayed_pre=True,
        notes=(
            "the first site of a trunk has no predecessor: its y is stream 0",
            "engram layers add into the streams between post and pre, so a boundary is not fused across them",
        ),
    ),
    Model(
        "glm-5.3-flash",
        "GLM-5.3-Flash configuration: input RMS eps 1e-5 beside hc_eps 1e-6, mean exit",
        rms_eps=1e-5,
        norm_eps=1e-5,
        exit="mean",
    ),
)
