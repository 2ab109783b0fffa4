"""A small trunk for tests: its topology, a checkpoint with public names, and branches that compute exactly."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from mhcgen.build import build_config
from mhcgen.inputs import uniform
from mhcgen.ir import Program
from mhcgen.topology import Topology
from mhcgen.trunk import site_names
from mhcgen.weights import SPELLINGS

Tensors = dict[str, np.ndarray[Any, Any]]
LAYERS = 3
SITES = site_names(LAYERS)
#: How far a branch turns its columns, by site; none is 0, so a branch that was skipped shows.
SHIFT = {site: index + 1 for index, site in enumerate(SITES)}


def topology(streams: int, hidden: int, exit: str, layers: int = LAYERS) -> Topology:
    """Three layers, RMS eps and hc eps apart."""
    model = {"head": "deepseek-v4", "mean": "glm-5.3-flash"}[exit]
    return Topology(model, streams, hidden, layers, 20, rms_eps=1e-5, hc_eps=1e-6, norm_eps=1e-5, exit=exit)


def program(where: Topology, **options: Any) -> Program:
    """The whole trunk."""
    return build_config(where.config(scope="trunk", **options))


def checkpoint(path: Path, where: Topology) -> Path:
    """A .safetensors file: DeepSeek-V4's names for a gated head, GLM's and bf16 fn for a mean."""
    name = {"head": "deepseek-v4", "mean": "glm-5.3-flash"}[where.exit]
    spelling = next(s for s in SPELLINGS if s.name == name)
    tensors: Tensors = {}
    for tensor in program(where, norm=True).of_role("parameter"):
        site, _, part = tensor.name.rpartition(".")
        shape = tuple(
            where.rows if d == "R" else {"n": where.streams, "H": where.hidden}.get(d, d) for d in tensor.shape
        )
        if site == "head":
            name = spelling.head.format(part=part)
        elif part == "norm_weight":
            layer, kind = site.split(".")
            name = spelling.norms[kind].format(layer=layer)
        else:
            layer, kind = site.split(".")
            name = spelling.site.format(layer=layer, site=kind, part=part)
        shape = tuple(where.streams * where.hidden if d == "K" else int(d) for d in shape)
        # fn so that mixes are of order 1, scales away from 0 so that the gates depend on them
        array = uniform(name, 0, shape, factor=3.0 / shape[-1] ** 0.5 if part == "fn" else 1.0)
        array = np.sign(array) * (np.abs(array) + np.float32(0.5)) if part == "scale" else array
        tensors[name] = array.astype(ml_dtypes.bfloat16) if where.exit == "mean" and part == "fn" else array
    save_file(tensors, path)
    return path


def embeddings(where: Topology, tokens: int, seed: int = 0, dtype: str = "fp32") -> np.ndarray[Any, Any]:
    """[T, H] in [-1, 1)."""
    return uniform("embeddings", seed, (tokens, where.hidden), dtype)


def turned(site: str, values: Any) -> Any:
    """The branch of a site: half of its input, columns turned. Exact in any float, and linear."""
    half = values * values.dtype.type(0.5)
    shift = SHIFT[site] % max(1, half.shape[1])
    # Concatenation, since CuPy's roll does not know every dtype.
    module = np if isinstance(half, np.ndarray) else __import__("cupy")
    return module.concatenate([half[:, -shift:], half[:, :-shift]], axis=1)


def stage_branches(sites: tuple[str, ...] = SITES) -> dict[str, Any]:
    """`turned` by the names of a Program's opaque stages."""
    return {f"{site}.branch": (lambda z, site=site: turned(site, z)) for site in sites}
