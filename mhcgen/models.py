"""Named models: their constants, legal stream counts and where the formula comes from."""

from __future__ import annotations

import difflib
from dataclasses import dataclass

from mhcgen.errors import UsageError


@dataclass(frozen=True)
class Model:
    """What a name stands for.

    Args:
        name: as given on the command line.
        source: public source of the formula.
        hidden: default hidden size H.
        streams: default stream count n.
        iters: Sinkhorn iterations.
        rms_eps: eps of the RMS over the streams.
        hc_eps: eps added to pre and inside the Sinkhorn.
        norm_eps: eps of the sub-layer's RMSNorm.
        norm_weight: whether that RMSNorm has a weight.
        post_mult: factor of the post gates.
        zero_eps: whether eps 0 has a meaning in this model.
        exit: `head` (gated head) or `mean`.
        delayed_pre: the collapse uses the pre gates of the previous boundary.
    """

    name: str
    source: str
    hidden: int = 4096
    streams: int = 4
    iters: int = 20
    rms_eps: float = 1e-6
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    norm_weight: bool = True
    post_mult: float = 2.0
    zero_eps: bool = False
    exit: str = "head"
    delayed_pre: bool = False
    comb: str = "sinkhorn"


MODELS: dict[str, Model] = {
    model.name: model
    for model in (
        Model("deepseek-v4", "DeepSeek-V4 inference code and report"),
        Model(
            "glm-5.3-flash",
            "GLM-5.3-Flash configuration: input RMS eps 1e-5 beside hc_eps 1e-6, mean exit",
            rms_eps=1e-5,
            norm_eps=1e-5,
            exit="mean",
        ),
    )
}


def model(name: str) -> Model:
    """The model of that name.

    Raises:
        UsageError: `U-MODEL`, with the nearest known name as a hint.
    """
    try:
        return MODELS[name]
    except KeyError:
        near = difflib.get_close_matches(name, MODELS, n=1)
        raise UsageError(
            "U-MODEL",
            f"unknown model {name!r}",
            where="--model",
            notes=(f"known models: {', '.join(sorted(MODELS))}",),
            hints=((f"did you mean {near[0]}?",) if near else ("`mhcgen list models` shows them",)),
        ) from None
