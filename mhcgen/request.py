"""What a user asked for, option by option -> the Config to build and the Options to schedule it with.

```
--streams 8 --fuse pre-norm      ->   Config(streams=8, norm=True)   Options(fuse="pre-norm")
```
A fusion that names a stage implies the Program that has it; what is given explicitly is never overridden. Pure:
reading files and printing are the command line's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from mhcgen.build import EXTRAS, Config, configure
from mhcgen.errors import InputError, UsageError
from mhcgen.plan import Options

#: What each name is, in types. Numbers are checked by `configure` and the passes, which know their ranges.
_TEXT = (
    "model", "dtype", "functions", "sumsq", "projection", "scope", "exit", "quant", "fuse", "arch", "placement",
    "sync", "slab", "mix_warp", "regime",
)
_NUMBER = ("streams", "hidden", "layers", "iters", "rank", "rms_eps", "hc_eps", "norm_eps", "threads", "cluster")
_SWITCH = ("norm", "quant_pow2", "early_stop", "iterations_out", "scalar", "stamps", "dependent")
NAMES = (*_TEXT, *_NUMBER, *_SWITCH, "extra")

_CONFIG = {field.name for field in fields(Config)}

#: Where errors of inner parts point, in the words of the command line.
_WHERE = {
    "--extra": "--with",
    "arithmetic.functions": "--class",
    "arithmetic.sumsq": "--sumsq",
    "arithmetic.projection": "--projection",
    "quant": "--quant",
}


def request(**given: Any) -> tuple[Config, Options]:
    """The Config and Options behind what was given; names as in `NAMES`, None means not given.

    Presets and groups imply their Program: `pre-norm` a norm; `pre-norm-quant`, norm and q8; `site`, the scope
    site; `boundary` and `delayed`, the scope boundary; a group that names `norm`, `quant`, `project`, `post`,
    `branch`, `engram` or `tap`, likewise; one that names `3.attn.post`, a trunk of four layers. In a boundary the
    mixes are projected from the new streams.

    Example:
        >>> config, options = request(fuse="pre-norm", hidden=64)
        >>> config.norm, options.fuse
        (True, 'pre-norm')

    Raises:
        UsageError: `U-*`, naming the option, the value and what is legal.
    """
    chosen = {name: value for name, value in given.items() if value is not None}
    _check_types(chosen)
    fuse = "".join(str(chosen.get("fuse", "none")).split())
    extra = _extra(chosen.pop("extra", ()))
    stages = _stages(fuse)
    extra = tuple(name for name in EXTRAS if name in extra or name in stages)
    wanted = {**_implied(fuse, stages, extra), **chosen}
    if wanted.get("scope") == "boundary":
        wanted.setdefault("projection", "fma")
    if wanted.get("quant", "none") != "none":
        wanted.setdefault("norm", True)
    if extra and wanted.get("scope") not in ("boundary", "trunk"):
        raise UsageError(
            "U-WITH",
            f"{', '.join(extra)} stands between post and the next pre, and scope {wanted.get('scope', 'pre')} "
            "has no such place",
            where="--with",
            hints=("use --scope boundary, or trunk",),
        )
    config_part = {name: value for name, value in wanted.items() if name in _CONFIG}
    try:
        config = configure(**config_part, extra=extra)
    except UsageError as error:
        error.where = _WHERE.get(error.where, error.where)
        raise
    return config, _options({**wanted, "fuse": fuse})


def _options(wanted: Mapping[str, Any]) -> Options:
    from mhcgen.backends.archs import parse_arch

    given = {field.name: wanted[field.name] for field in fields(Options) if field.name in wanted}
    if "arch" in given:
        try:
            given["arch"] = parse_arch(given["arch"]).name
        except UsageError as error:
            error.where = "--arch"
            raise
    return Options(**given)


def _stages(fuse: str) -> set[str]:
    """Names in groups, without the site they belong to: `post` of `3.attn.post`."""
    return {name.rpartition(".")[2] for name in re.split(r"[,+]", fuse)}


def _implied(fuse: str, stages: set[str], extra: tuple[str, ...]) -> dict[str, Any]:
    """What the fusion and the extra readers need that nobody spelled out."""
    found: dict[str, Any] = {}
    if fuse in ("pre-norm", "pre-norm-quant") or stages & {"norm", "quant"}:
        found["norm"] = True
    if fuse == "pre-norm-quant" or "quant" in stages:
        found["quant"] = "q8"
    if "project" in stages:
        found["projection"] = "fma"
    layers = [int(layer) for layer in re.findall(r"(?:^|[,+])(\d{1,9})\.", fuse)]
    if layers:
        found |= {"scope": "trunk", "layers": max(layers) + 1}
    elif fuse == "site" or "branch" in stages:
        found["scope"] = "site"
    elif fuse in ("boundary", "delayed") or extra or "post" in stages:
        found["scope"] = "boundary"
    return found


def _extra(value: Any) -> tuple[str, ...]:
    """The extra readers that were given; `engram,tap` and repetition both work."""
    given = [value] if isinstance(value, str) else list(value)
    names = [part.strip() for item in given for part in str(item).split(",")]
    for name in names:
        if name not in EXTRAS:
            raise UsageError(
                "U-WITH",
                f"extra readers are {', '.join(EXTRAS)}, got {name!r}",
                where="--with",
                hints=(f"choose among {', '.join(EXTRAS)}",),
            )
    return tuple(names)


def _check_types(chosen: Mapping[str, Any]) -> None:
    """Types that a file may get wrong; the command line's parser has checked its own."""
    for name, value in chosen.items():
        if name not in NAMES:
            raise UsageError(
                "U-OPTION",
                f"unknown configuration key {name!r}",
                where=name,
                notes=(f"known keys: {', '.join(sorted(NAMES))}",),
                hints=("remove it or correct its spelling",),
            )
        if name in _TEXT and not isinstance(value, str):
            wanted = "a text"
        elif name in _SWITCH and not isinstance(value, bool):
            wanted = "true or false"
        elif name in _NUMBER and (isinstance(value, bool) or not isinstance(value, int | float)):
            wanted = "a number"
        elif name == "extra" and not (
            isinstance(value, str)
            or (isinstance(value, list | tuple) and all(isinstance(item, str) for item in value))
        ):
            wanted = "a list of texts"
        else:
            continue
        raise UsageError(
            "U-OPTION",
            f"{name} must be {wanted}, got {value!r}",
            where=name,
            hints=(f"give {wanted}",),
        )


def read_config(path: Path) -> dict[str, Any]:
    """The keys and values of a configuration file: a table of `NAMES`, or a topology (see `mhcgen.topology`).

    A Hugging Face config.json, and a file with a table for each layer, give what all layers agree on.

    Raises:
        InputError: `I-CONFIG`, the file is missing, unreadable or no table of names and values.
    """
    import json
    import tomllib

    toml = path.suffix.lower() == ".toml"
    try:
        text = path.read_text(encoding="utf-8")
        loaded: object = tomllib.loads(text) if toml else json.loads(text)
    except OSError as error:
        raise _bad(path, f"cannot be read: {error.strerror or error}", "name a file that exists") from error
    except (ValueError, RecursionError) as error:
        hint = "files that end in .toml are read as TOML, all others as JSON"
        raise _bad(path, f"is not {'TOML' if toml else 'JSON'}: {error}", hint) from error
    if not isinstance(loaded, dict):
        raise _bad(path, "is not a table of names and values", 'write e.g. {"streams": 4, "fuse": "pre"}')
    if any(key in loaded for key in _FOREIGN) or isinstance(loaded.get("layers"), list):
        return _topology(path)
    aliases = {"class": "functions", "with": "extra", "sinkhorn_iters": "iters"}
    names = {key: key.replace("-", "_") for key in loaded}
    return {aliases.get(name, name): loaded[key] for key, name in names.items()}


#: Keys that only a model's own configuration has.
_FOREIGN = ("model_type", "architectures", "text_config", "hidden_size", "hc_mult")


def _topology(path: Path) -> dict[str, Any]:
    from mhcgen.topology import read_topology

    found = read_topology(path)
    if found is None:
        raise _bad(path, "describes a trunk without hyper-connections", "there is nothing to emit for it")
    # A rank of 0 is the default of the model.
    return {name: value for name, value in asdict(found).items() if name != "rank" or value}


def _bad(path: Path, what: str, hint: str) -> InputError:
    return InputError("I-CONFIG", f"the configuration {what}", where=str(path), hints=(hint,))
