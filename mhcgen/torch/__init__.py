"""Hyper-connections in PyTorch: operators, their gradients, and modules.

    import mhcgen.torch as mhc

    setup = mhc.Setup("deepseek-v4", streams=4, hidden=4096, dtype="bf16")
    made = mhc.pre(x, fn, scale, base, setup=setup)          # x [T, n, H] on a GPU or in host memory
    x = mhc.post(x, attention(made.y), made.post, made.comb, setup=setup)

Every operation is a `torch.library` operator (`torch.ops.mhcgen.pre`, ...): torch.compile takes it whole, CUDA graphs
capture it, and torch differentiates it. On a GPU it runs on the tensors' device and torch's current stream, without
a copy and without waiting. docs/pytorch.md has the rest. Importing `mhcgen` alone does not import torch.
"""

from __future__ import annotations

from mhcgen.torch._require import TorchMissing
from mhcgen.torch.calls import Ran, last_path
from mhcgen.torch.combs import register as register_comb
from mhcgen.torch.cpu import Choice, set_path, use_path
from mhcgen.torch.eager import evaluate
from mhcgen.torch.functions import (
    Boundary,
    GatedBoundary,
    GatedNormBoundary,
    GatedNormSite,
    GatedSite,
    Head,
    NormBoundary,
    NormSite,
    QuantSite,
    Site,
    boundary,
    boundary_norm,
    collapse,
    expand,
    finish,
    gated,
    gated_boundary,
    gated_boundary_norm,
    gated_head,
    gated_norm,
    head,
    mean,
    post,
    pre,
    pre_norm,
    pre_norm_quant,
    sum,
)
from mhcgen.torch.launch import arch_of
from mhcgen.torch.modules import HyperConnection, HyperConnectionStack, HyperLayer
from mhcgen.torch.operations import OPERATIONS
from mhcgen.torch.ops import operator
from mhcgen.torch.runner import TorchRunner, load
from mhcgen.torch.setup import Setup
from mhcgen.torch.state import load_public_state_dict
from mhcgen.torch.warming import compile_count, warm_up

__all__ = [
    "OPERATIONS",
    "Boundary",
    "Choice",
    "GatedBoundary",
    "GatedNormBoundary",
    "GatedNormSite",
    "GatedSite",
    "Head",
    "HyperConnection",
    "HyperConnectionStack",
    "HyperLayer",
    "NormBoundary",
    "NormSite",
    "QuantSite",
    "Ran",
    "Setup",
    "Site",
    "TorchMissing",
    "TorchRunner",
    "arch_of",
    "boundary",
    "boundary_norm",
    "collapse",
    "compile_count",
    "evaluate",
    "expand",
    "finish",
    "gated",
    "gated_boundary",
    "gated_boundary_norm",
    "gated_head",
    "gated_norm",
    "head",
    "last_path",
    "load",
    "load_public_state_dict",
    "mean",
    "operator",
    "post",
    "pre",
    "pre_norm",
    "pre_norm_quant",
    "register_comb",
    "set_path",
    "sum",
    "use_path",
    "warm_up",
]
