"""What a user asked for, option by option -> the Config to build and the Options to schedule it with.

```
--streams 8 --fuse pre-norm      ->   Config(streams=8, norm=True)   Options(fuse="pre-norm")
```
A fusion that names a stage implies the Program that has it; what is given explicitly is never overridden. Pure:
reading files and printing are the command line's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from mhcgen.build import Config, configure
from mhcgen.errors import InputError, UsageError
from mhcgen.plan import Options

#: What each name is, in types. Numbers are checked by `configure` and the passes, which know their ranges.
_TEXT = (
    "model", "dtype", "functions", "sumsq", "projection", "scope", "quant", "fuse", "arch", "placement", "sync",
    "slab", "mix_warp",
)
_NUMBER = ("streams", "hidden", "iters", "rms_eps", "hc_eps", "norm_eps", "threads")
_SWITCH = ("norm", "quant_pow2", "scalar")
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
    `branch`, `engram` or `tap`, likewise. In a boundary the mixes are projected from the new streams.

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
    wanted = {**_implied(fuse, extra, chosen), **chosen}
    if wanted.get("scope") == "boundary":
        wanted.setdefault("projection", "fma")
    if wanted.get("quant", "none") != "none":
        wanted.setdefault("norm", True)
    if "engram" in _stages(fuse) or "tap" in _stages(fuse):
        extra = tuple(name for name in ("engram", "tap") if name in extra or name in _stages(fuse))
    if extra and wanted.get("scope") != "boundary":
        raise UsageError(
            "U-WITH",
            f"{', '.join(extra)} stands between post and the next pre, and scope {wanted.get('scope', 'pre')} "
            "has no such place",
            where="--with",
            hints=("use --scope boundary",),
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
    return {name for group in fuse.split(",") for name in group.split("+")}


def _implied(fuse: str, extra: tuple[str, ...], chosen: Mapping[str, Any]) -> dict[str, Any]:
    """What the fusion and the extra readers need that nobody spelled out."""
    stages = _stages(fuse)
    found: dict[str, Any] = {}
    if fuse in ("pre-norm", "pre-norm-quant") or stages & {"norm", "quant"}:
        found["norm"] = True
    if fuse == "pre-norm-quant" or "quant" in stages:
        found["quant"] = "q8"
    if "project" in stages:
        found["projection"] = "fma"
    if fuse == "site" or "branch" in stages:
        found["scope"] = "site"
    elif fuse in ("boundary", "delayed") or extra or stages & {"post", "engram", "tap"}:
        found["scope"] = "boundary"
    return found


def _extra(value: Any) -> tuple[str, ...]:
    """The extra readers in Program order, each once; `engram,tap` and repetition both work."""
    given = [value] if isinstance(value, str) else list(value)
    names = {part.strip() for item in given for part in str(item).split(",")} - {""}
    known = ("engram", "tap")
    unknown = sorted(names - set(known))
    if unknown:
        raise UsageError(
            "U-WITH",
            f"extra readers are {', '.join(known)}, got {unknown[0]!r}",
            where="--with",
            hints=(f"choose among {', '.join(known)}",),
        )
    return tuple(name for name in known if name in names)


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
    """The keys and values of a configuration file, JSON or TOML; keys are those of `NAMES`.

    Raises:
        InputError: `I-FILE`, the file is missing, unreadable or no table of names and values.
    """
    import json
    import tomllib

    try:
        text = path.read_text(encoding="utf-8")
        loaded: object = tomllib.loads(text) if path.suffix.lower() == ".toml" else json.loads(text)
    except OSError as error:
        raise InputError(
            "I-FILE", f"cannot read the configuration: {error.strerror or error}", where=str(path),
            hints=("name a JSON or TOML file that exists",),
        ) from error
    except (ValueError, RecursionError) as error:
        kind = "TOML" if path.suffix.lower() == ".toml" else "JSON"
        raise InputError(
            "I-FILE", f"the configuration is not {kind}: {error}", where=str(path),
            hints=("files that end in .toml are read as TOML, all others as JSON",),
        ) from error
    if not isinstance(loaded, dict):
        raise InputError(
            "I-FILE", f"the configuration is a {type(loaded).__name__}, not a table of names and values",
            where=str(path), hints=('write e.g. {"streams": 4, "hidden": 4096, "fuse": "pre"}',),
        )
    aliases = {"class": "functions", "with": "extra", "sinkhorn_iters": "iters"}
    keys = {str(key): str(key).replace("-", "_") for key in loaded}
    return {aliases.get(name, name): loaded[key] for key, name in keys.items()}
