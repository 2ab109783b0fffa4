"""The hyper-connections of a whole trunk, read from a model configuration.

Two formats are read. A Hugging Face `config.json`, whose keys (possibly under `text_config`) are `hc_mult`,
`hc_sinkhorn_iters`, `hc_eps`, `rms_norm_eps`, `hidden_size`, `num_hidden_layers` (where gates are of elements
`hc_count` and `hc_lowrank` in place of the first three); other keys are ignored. And one of our own, as TOML or JSON,
whose keys are `OWN_KEYS`; other keys are errors:

```toml
model = "glm-5.3-flash"     # arithmetic, and the defaults of what is left out
streams = 4
hidden = 4096
exit = "mean"
layers = 45                 # or one [[layers]] table a layer, each with its own overrides
```
The streams between two layers have one shape and one arithmetic, so a trunk whose layers disagree, or that mixes
hyper-connections with plain residual layers, is refused with the layer named. A trunk without any is `None`.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from mhcgen.build import MAX_HIDDEN, MAX_ITERS, MAX_LAYERS, MAX_RANK, MAX_STREAMS, Config, configure
from mhcgen.errors import InputError
from mhcgen.models import EXITS
from mhcgen.models import model as find_model
from mhcgen.values import member

#: Keys of a table of `layers`; at the top they hold for every layer.
LAYER_KEYS = ("streams", "iters", "rms_eps", "hc_eps", "norm_eps", "exit", "residual")
#: Keys of our own format.
OWN_KEYS = ("model", "hidden", "layers", "rank", *LAYER_KEYS)
RESIDUALS = ("hyper", "plain")

_LARGEST = {
    "streams": MAX_STREAMS, "hidden": MAX_HIDDEN, "layers": MAX_LAYERS, "iters": MAX_ITERS, "rank": MAX_RANK,
}  # fmt: skip
#: What a layer has, to its key in a Hugging Face configuration.
_HUGGING_FACE = {
    "streams": "hc_mult",
    "iters": "hc_sinkhorn_iters",
    "hc_eps": "hc_eps",
    "rms_eps": "rms_norm_eps",
    "norm_eps": "rms_norm_eps",
}
#: The same of a model whose gates are of elements.
_LOW_RANK = {"streams": "hc_count", "rank": "hc_lowrank", "rms_eps": "rms_norm_eps", "norm_eps": "rms_norm_eps"}
#: Keys that say a trunk has hyper-connections.
_MARKS = ("hc_mult", "hc_sinkhorn_iters", "hc_eps", "hc_count", "hc_lowrank")
#: Keys that list layers which add to the streams between sites, and the model they are of.
_ADDING = {"engram_layer_ids": "deepseek-v4.1", "ple_layer_ids": "gated-residual"}
#: Keys by which a JSON file is known for a Hugging Face configuration.
_THEIRS = ("model_type", "architectures", "text_config", "hidden_size", "num_hidden_layers", "hc_mult")
#: Names of models (`model_type`, `architectures`, lower case) to ours. DeepSeek-V4.1 is another arithmetic than V4.
_MODELS = (
    (re.compile(r"deepseek_?v4(?!\d|[._]\d|p\d)"), "deepseek-v4"),
    (re.compile(r"deepseek_?v4[._p]?1(?!\d)"), "deepseek-v4.1"),
    (re.compile(r"glm"), "glm-5.3-flash"),
    (re.compile(r"qwen4_?exp"), "gated-residual"),
)


@dataclass(frozen=True)
class Topology:
    """What every layer of a trunk agrees on.

    Args:
        model: a key of `mhcgen.models.MODELS`; it fixes the arithmetic that no number here does.
        streams: n.
        hidden: H.
        layers: layers of the trunk, with an attention and an FFN site each.
        iters: Sinkhorn iterations; 0 only in a model that has none.
        rms_eps: eps of the RMS over the streams.
        hc_eps: eps of pre and Sinkhorn, never the same knob as rms_eps; 0 only in a model that has none.
        norm_eps: eps of the sub-layers' RMSNorm.
        exit: one of `mhcgen.models.EXITS`: `head` is the gated head.
        rank: of gates that every element has of its own; 0 is the model's default.

    Raises:
        UsageError: `U-EXIT`, no such exit.
    """

    model: str
    streams: int
    hidden: int
    layers: int
    iters: int
    rms_eps: float
    hc_eps: float
    norm_eps: float
    exit: str
    rank: int = 0

    def __post_init__(self) -> None:
        # A Config takes None for the model's own exit, and who builds from a topology reads the exit here.
        member("exit", self.exit, EXITS, "U-EXIT")

    @property
    def rows(self) -> int:
        """Mixes a token at a site: pre n, post n, and the logits of the mixing matrix; or rank and post n."""
        spec = find_model(self.model)
        return spec.mixes(self.streams, self.rank or spec.rank_at(self.hidden))

    def config(self, **options: object) -> Config:
        """A checked Config of this topology; options are further fields of it (scope, norm, projection, ...).

        Raises:
            UsageError: a value out of range.
        """
        own = {field.name: getattr(self, field.name) for field in fields(self)}
        own["rank"] = self.rank or None
        return configure(**{**own, **options})


def read_topology(path: str | Path, *, model: str | None = None, exit: str | None = None) -> Topology | None:
    """The topology of a configuration file, None if its trunk has plain residuals throughout.

    Args:
        path: a Hugging Face config.json, or a .toml or .json file of our own format.
        model: arithmetic to assume, a key of `mhcgen.models.MODELS`; by default what the file says.
        exit: `mean` or `head`, where the file's model does not say it right.

    Raises:
        InputError: `I-CONFIG`, the file is missing or malformed, a key is missing or a value out of range;
            `I-TRUNK`, its layers disagree or mix with plain residual layers; where names the layer.
        UsageError: `U-MODEL`, unknown model.
    """
    file = Path(path)
    table = _read(file)
    own = file.suffix.lower() == ".toml" or not any(key in table for key in _THEIRS)
    return topology_of(table, str(file), own=own, model=model, exit=exit)


def hyper_topology(path: str | Path, *, model: str | None = None, exit: str | None = None) -> Topology:
    """As `read_topology`, for who can do nothing with plain residuals.

    Raises:
        InputError: `I-SERIAL` where the trunk has them, and those of `read_topology`.
    """
    topology = read_topology(path, model=model, exit=exit)
    if topology is None:
        raise InputError(
            "I-SERIAL",
            "this trunk has plain residuals: there are no hyper-connections here",
            where=str(path),
            hints=("mhcgen.topology.read_topology gives None for such a trunk",),
        )
    return topology


def topology_of(
    table: Mapping[str, Any],
    where: str = "configuration",
    *,
    own: bool,
    model: str | None = None,
    exit: str | None = None,
) -> Topology | None:
    """As `read_topology`, from a table already read; `where` names it in errors, `own` says which format it is."""
    layers = _own_layers(table, where, model) if own else _hugging_face_layers(table, where, model)
    found: Topology | None = None
    for index, layer in enumerate(layers):
        if layer is None:
            if found is not None:
                raise _mixed(where, index, "is a plain residual layer, and earlier layers have hyper-connections")
            continue
        this = _checked({**layer, **({} if exit is None else {"exit": exit})}, where, index)
        if found is None and index > 0:
            raise _mixed(where, index, "has hyper-connections, and earlier layers are plain residual layers")
        if found is None:
            found = this
        elif this != found:
            key = next(f.name for f in fields(Topology) if getattr(this, f.name) != getattr(found, f.name))
            raise _mixed(
                where, index, f"has {key} {getattr(this, key)!r}, and the layers before it {getattr(found, key)!r}"
            )
    return found


def _mixed(where: str, layer: int, what: str) -> InputError:
    return InputError(
        "I-TRUNK",
        f"layer {layer} {what}",
        where=f"{where}, layer {layer}",
        notes=("the streams between layers have one shape and one arithmetic",),
        hints=("give every layer of the trunk the same hyper-connections, or none of them any",),
    )


def _wrong(where: str, message: str, *hints: str) -> InputError:
    return InputError("I-CONFIG", message, where=where, hints=hints)


def _read(file: Path) -> dict[str, Any]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, ValueError) as fault:  # not UTF-8, or a name that no file has
        raise _wrong(
            str(file), f"the configuration cannot be read: {fault}", "name a config.json or .toml"
        ) from fault
    try:
        table = tomllib.loads(text) if file.suffix.lower() == ".toml" else json.loads(text)
    except (ValueError, RecursionError) as fault:
        raise _wrong(str(file), f"the configuration does not parse: {fault}", "mend the file") from fault
    if not isinstance(table, dict):
        raise _wrong(str(file), "the configuration is not a table of keys", "wrap it in { }")
    return table


# ---- formats: each gives one table a layer, None for a plain residual layer -----------------------------------
def _own_layers(table: Mapping[str, Any], where: str, model: str | None) -> list[dict[str, Any] | None]:
    _known(table, OWN_KEYS, where)
    spec = find_model(model or _text(table.get("model", "deepseek-v4"), "model", where))
    defaults = {key: getattr(spec, key) for key in ("iters", "rms_eps", "hc_eps", "norm_eps", "exit")}
    layers = table.get("layers")
    if isinstance(layers, list):
        for index, layer in enumerate(layers):
            if not isinstance(layer, dict):
                raise _wrong(where, f"layers[{index}] is {layer!r}, not a table", "use one [[layers]] table a layer")
            _known(layer, LAYER_KEYS, f"{where}, layer {index}")
    else:
        layers = [{}] * _integer("layers", layers, where)
    if not layers:
        raise _wrong(where, "the trunk has no layer", "give layers as a number or as [[layers]] tables")
    shared = {key: table[key] for key in LAYER_KEYS if key in table}
    fixed = {"model": spec.name, "hidden": table.get("hidden"), "layers": len(layers)}
    fixed |= {"rank": table["rank"]} if "rank" in table else {}
    found: list[dict[str, Any] | None] = []
    for index, layer in enumerate(layers):
        merged = {**defaults, **shared, **layer}
        residual = merged.pop("residual", "hyper")
        if residual not in RESIDUALS:
            raise _wrong(f"{where}, layer {index}", f"residual must be hyper or plain, got {residual!r}")
        found.append({**fixed, **merged} if residual == "hyper" else None)
    return found


def _known(table: Mapping[str, Any], keys: Sequence[str], where: str) -> None:
    for key in table:
        if key not in keys:
            raise _wrong(where, f"unknown key {key!r}", f"known keys: {', '.join(keys)}")


def _marked(table: Mapping[str, Any]) -> bool:
    return any(key in table for key in _MARKS)


def _hugging_face_layers(table: Mapping[str, Any], where: str, model: str | None) -> list[dict[str, Any] | None]:
    text = table.get("text_config")
    # A nested key wins: the outer level of a multimodal model speaks of other parts too.
    merged = {**table, **(text if isinstance(text, Mapping) else {})}
    if not _marked(merged) or merged.get("mhc") is False:
        return [None]
    for key in [key for key in _ADDING if merged.get(key)]:
        raise _wrong(
            where,
            f"{key}: layers of this trunk add to the streams between its sites, and a topology of equal "
            "layers does not say where",
            f"build its boundaries one by one: mhcgen emit --model {_ADDING[key]} --scope boundary --with engram",
        )
    spec = find_model(model or _model_of(table, merged, where))
    layers = _integer("layers", _get(merged, "num_hidden_layers", where), where, "num_hidden_layers")
    fixed = {"model": spec.name, "hidden": _get(merged, "hidden_size", where), "layers": layers, "exit": spec.exit}
    fixed |= {"iters": 0, "hc_eps": 0.0} if spec.rank else {}
    found: list[dict[str, Any] | None] = [dict(fixed) for _ in range(layers)]
    for key, name in (_LOW_RANK if spec.rank else _HUGGING_FACE).items():
        value = _get(merged, name, where)
        if isinstance(value, list) and len(value) != layers:
            raise _wrong(
                where, f"{name} has {len(value)} entries for {layers} layers", "give one number, or one each"
            )
        for index, layer in enumerate(found):
            assert layer is not None
            layer[key] = value[index] if isinstance(value, list) else value
    # A per-layer count of null is how a list says that a layer has none.
    return [layer if layer is not None and layer["streams"] is not None else None for layer in found]


def _get(table: Mapping[str, Any], key: str, where: str) -> Any:
    if key not in table:
        present = ", ".join(mark for mark in _MARKS if mark in table)
        raise _wrong(
            where, f"key {key} is missing", f"the file has {present}, and all of the trunk's keys are needed"
        )
    return table[key]


def _model_of(table: Mapping[str, Any], merged: Mapping[str, Any], where: str) -> str:
    """Our name of the model; nothing is guessed, since models differ in what no key says."""
    said: list[str] = []
    for source in (table, merged):
        names = source.get("architectures")
        listed = names if isinstance(names, list) else []
        said += [str(name) for name in (source.get("model_type"), *listed) if name]
    said = list(dict.fromkeys(said))
    found = {ours for pattern, ours in _MODELS if any(pattern.search(name.lower()) for name in said)}
    if len(found) != 1:
        raise _wrong(
            where,
            f"model_type and architectures ({', '.join(said) or 'absent'}) name "
            f"{'no model that is known here' if not found else 'more than one model'}",
            f"say which arithmetic it is with model=, one of {', '.join(dict.fromkeys(m for _, m in _MODELS))}",
        )
    return found.pop()


# ---- values -------------------------------------------------------------------------------------------------
def _checked(layer: Mapping[str, Any], where: str, index: int) -> Topology:
    place = f"{where}, layer {index}"
    values: dict[str, Any] = {"model": layer["model"]}
    # A model without iterations or without an eps has 0 there, and no other may.
    unused = {
        key for key in ("iters", "rms_eps", "hc_eps", "norm_eps") if getattr(find_model(layer["model"]), key) == 0
    }
    for key in ("streams", "hidden", "layers", "iters"):
        values[key] = 0 if key in unused and layer.get(key) == 0 else _integer(key, layer.get(key), place)
    for key in ("rms_eps", "hc_eps", "norm_eps"):
        values[key] = 0.0 if key in unused and layer.get(key) == 0 else _eps(key, layer.get(key), place)
    if "rank" in layer:
        values["rank"] = _integer("rank", layer["rank"], place)
    values["exit"] = layer["exit"]
    if values["exit"] not in EXITS:
        raise _wrong(place, f"exit must be {' or '.join(EXITS)}, got {values['exit']!r}")
    return Topology(**values)


def _named(key: str) -> str:
    theirs = {**_LOW_RANK, **_HUGGING_FACE, "hidden": "hidden_size", "layers": "num_hidden_layers"}.get(key)
    return f"{key} ({theirs} in a config.json)" if theirs else key


def _integer(key: str, value: Any, where: str, name: str | None = None) -> int:
    most = _LARGEST[key]
    if value is None:
        raise _wrong(where, f"key {name or _named(key)} is missing", f"give an integer from 1 to {most}")
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
        raise _wrong(where, f"{name or _named(key)} must be an integer from 1 to {most}, got {value!r}")
    return value


def _eps(key: str, value: Any, where: str) -> float:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not 0.0 < number <= 1.0:
        raise _wrong(where, f"{_named(key)} must be a positive number up to 1, got {value!r}")
    return number


def _text(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        raise _wrong(where, f"{key} must be text, got {value!r}")
    return value
