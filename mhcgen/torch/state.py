"""Parameters of modules from public checkpoints, whatever their spelling.

```
module                        DeepSeek-V4, V4.1  GLM-5.3-Flash (after model.language_model.)  Hugging Face modules
layers.{i}.hc_attn_fn         the same           layers.{i}.hc_attn_fn                        layers.{i}.attn_hc.fn
layers.{i}.hc_ffn_scale       the same           layers.{i}.hc_ffn_scale                      layers.{i}.ffn_hc.scale
hc_head_fn                    the same (V4)      none                                         hc_head.hc_fn
layers.{i}.attn_norm.weight   the same           layers.{i}.input_layernorm.weight            as GLM's
```
`mhcgen.weights.SPELLINGS` has all of them; which one a checkpoint is in follows from its names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mhcgen.errors import InputTypeError, UsageError
from mhcgen.models import model as find_model
from mhcgen.torch.cpu import as_numpy
from mhcgen.torch.modules import HyperConnection, HyperConnectionStack, HyperLayer
from mhcgen.trunk import SITES
from mhcgen.weights import WeightFile, find_spelling, head_parameters, norm_wish, site_parameters

Source = Mapping[str, Tensor] | str | Path | WeightFile


class StateDict(WeightFile):
    """A state dict in memory, read as a checkpoint is.

    Args:
        tensors: by name; fp32 or bf16 where they are read, on any device.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.path = Path("state_dict")
        self.names = tuple(name for name in tensors if isinstance(name, str))
        self._known = frozenset(self.names)
        self._tensors = tensors

    def read(self, name: str) -> np.ndarray[Any, Any]:
        """One tensor in host memory; KeyError if there is none of that name."""
        tensor = self._tensors[name]
        if not isinstance(tensor, Tensor):
            raise InputTypeError(
                "I-ARRAY",
                f"tensor {name} is a {type(tensor).__module__}.{type(tensor).__name__}, and torch's are wanted",
                where=name,
                hints=("convert it explicitly, e.g. torch.from_numpy(array)",),
            )
        try:
            return as_numpy(tensor.detach().cpu().contiguous())
        except TypeError as fault:  # a dtype that numpy has no name for
            raise InputTypeError(
                "I-DTYPE",
                f"tensor {name} has dtype {tensor.dtype}; fp32 is read, bf16 is widened, nothing else is",
                where=name,
            ) from fault


def load_public_state_dict(
    module: HyperConnectionStack | HyperLayer | HyperConnection,
    source: Source,
    *,
    layer: int = 0,
    norms: Mapping[str, str] | bool = True,
) -> dict[str, str]:
    """Take the hyper-connection parameters of a public checkpoint; branches and all else are left alone.

    Args:
        module: what to fill; its own spelling is one of the public ones, so its own state dict works too.
        source: a state dict, or a file, index or folder as `mhcgen.weights.WeightFile` reads.
        layer: number of the layer in the checkpoint, for a module that is one layer or one site.
        norms: names of norm weights, as in `mhcgen.weights.trunk_parameters`; read only by a module with a norm.

    Returns:
        The module's keys and the names in the checkpoint that they were read from.

    Raises:
        InputError: `I-SPELLING`, `I-TENSOR`, `I-FILE`.
        InputTypeError: `I-DTYPE`, neither fp32 nor bf16 (bf16 is widened, which is exact); `I-ARRAY`, no tensor.
        UsageError: `U-MODEL`, no checkpoint has the parameters; `U-OPTION`, norms that name no tensor.
    """
    if find_model(module.setup.config.model).rank:
        raise UsageError(
            "U-MODEL",
            f"no public spelling of the parameters of model {module.setup.config.model} is read",
            where="module",
            hints=("load_state_dict takes the module's own names",),
        )
    weights = StateDict(source) if isinstance(source, Mapping) else source
    weights = weights if isinstance(weights, WeightFile) else WeightFile(weights)
    spelling = find_spelling(weights)
    config = module.setup.config
    found: dict[str, tuple[str, np.ndarray[Any, Any]]] = {}
    for number, prefix, site in _places(module, layer):
        owner = module.layers[number] if isinstance(module, HyperConnectionStack) else module
        wish = norm_wish(norms, site) if owner.norm_weight(site) is not None else False
        if owner.part(site, "fn") is None or owner.part(site, "comb_logits") is not None:
            raise UsageError(
                "U-MODEL",
                f"model {config.model} has other parameters than fn, base and scale; no public checkpoint has them",
                where=site,
                hints=("load_state_dict takes the module's own",),
            )
        rows = int(getattr(owner, f"hc_{site}_base").numel())
        read = site_parameters(weights, number, site, config.streams, config.hidden, rows=rows, norm=wish)
        for part, array in read.items():
            if part == "norm_weight":
                name = spelling.norms[site] if wish is True else str(wish)
                found[f"{prefix}{site}_norm.weight"] = (name.format(layer=number, site=site), array)
            else:
                name = spelling.site.format(layer=number, site=site, part=part)
                found[f"{prefix}hc_{site}_{part}"] = (name, array)
    if isinstance(module, HyperConnectionStack) and module.topology.exit == "head":
        for part, array in head_parameters(weights, config.streams, config.hidden).items():
            found[f"hc_head_{part}"] = (spelling.head.format(part=part), array)
    own = dict(module.named_parameters())
    with torch.no_grad():
        for key, (_, array) in found.items():
            own[key].copy_(torch.from_numpy(array))
    return {key: name for key, (name, _) in found.items()}


def _places(module: HyperConnectionStack | HyperLayer | HyperConnection, layer: int) -> list[tuple[int, str, str]]:
    """Layer, prefix of the module's keys, and site."""
    if isinstance(module, HyperConnectionStack):
        return [(number, f"layers.{number}.", site) for number in range(len(module.layers)) for site in SITES]
    if isinstance(module, HyperLayer):
        return [(layer, "", site) for site in SITES]
    return [(layer, "", module.site_name)]
