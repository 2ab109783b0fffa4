"""Configuration -> unfused Program."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from mhcgen.arithmetic import Arithmetic
from mhcgen.errors import UsageError
from mhcgen.ir import AttrValue, Program, Stage, Tensor, make_stage
from mhcgen.models import Model
from mhcgen.models import model as find_model
from mhcgen.stages import KINDS

SCOPES = ("pre", "site", "boundary", "trunk")
STREAM_DTYPES = ("fp32", "bf16", "fp16")
QUANTS = ("none", "q8", "fp8")
MAX_STREAMS = 16
MAX_HIDDEN = 1 << 20
MAX_ITERS = 1000


@dataclass(frozen=True)
class Config:
    """A complete configuration; `configure` fills the defaults of a model.

    Args:
        model: a key of `mhcgen.models.MODELS`.
        streams: n, 1 to 16.
        hidden: H, 1 to 2^20.
        iters: Sinkhorn iterations, 1 to 1000.
        rms_eps: eps of the RMS over the streams; > 0, or 0 where the model allows it.
        hc_eps: eps of pre and Sinkhorn; likewise.
        norm_eps: eps of the RMSNorm of y; likewise.
        dtype: of streams, branch output and y: fp32, bf16 or fp16. Coefficients are fp32.
        functions: function set, `ieee` or `fast`.
        sumsq: accumulator of the sum of squares, `fp64` or `fp32`.
        projection: `external` (mixes given) or `fma`.
        scope: `pre`, `site`, `boundary` or `trunk`.
        norm: whether RMSNorm of y is part of the Program.
        quant: `none`, `q8` (int8, groups of 32) or `fp8` (e4m3, groups of 128).
        quant_pow2: round the scale of a group up to a power of two.
        early_stop: stop the Sinkhorn once an iteration changes no bit; never changes a bit.
        iterations_out: also return the number of iterations run, `iterations [T]`.
        extra: opaque readers between post and the next pre: `engram`, `tap`.
    """

    model: str = "deepseek-v4"
    streams: int = 4
    hidden: int = 4096
    iters: int = 20
    rms_eps: float = 1e-6
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    dtype: str = "fp32"
    functions: str = "ieee"
    sumsq: str = "fp64"
    projection: str = "external"
    scope: str = "pre"
    norm: bool = False
    quant: str = "none"
    quant_pow2: bool = False
    early_stop: bool = False
    iterations_out: bool = False
    extra: tuple[str, ...] = ()


def configure(model: str = "deepseek-v4", **given: object) -> Config:
    """A checked Config: the model's constants, overridden by what is given (None means default).

    Raises:
        UsageError: `U-*`, naming the field, the value and the legal range.
    """
    spec = find_model(model)
    defaults: dict[str, object] = {
        "streams": spec.streams,
        "hidden": spec.hidden,
        "iters": spec.iters,
        "rms_eps": spec.rms_eps,
        "hc_eps": spec.hc_eps,
        "norm_eps": spec.norm_eps,
    }
    chosen = {key: value for key, value in given.items() if value is not None}
    unknown = sorted(set(chosen) - set(Config.__dataclass_fields__))
    if unknown:
        raise UsageError(
            "U-OPTION",
            f"unknown configuration key {unknown[0]!r}",
            where=unknown[0],
            notes=(f"known keys: {', '.join(sorted(Config.__dataclass_fields__))}",),
            hints=("remove it or correct its spelling",),
        )
    config = Config(model=model, **{**defaults, **chosen})  # type: ignore[arg-type]
    return check_config(config, spec)


def check_config(config: Config, spec: Model) -> Config:
    """The same Config, normalised (eps as float), or a UsageError for the first bad field."""
    _integer("streams", config.streams, 1, MAX_STREAMS)
    _integer("hidden", config.hidden, 1, MAX_HIDDEN)
    _integer("iters", config.iters, 1, MAX_ITERS)
    for field in ("rms_eps", "hc_eps", "norm_eps"):
        _eps(field, getattr(config, field), spec)
    _member("dtype", config.dtype, STREAM_DTYPES)
    _member("scope", config.scope, SCOPES)
    _member("quant", config.quant, QUANTS)
    for item in config.extra:
        _member("extra", item, ("engram", "tap"))
    if config.quant != "none" and not config.norm:
        raise UsageError(
            "U-QUANT",
            "quantisation reads the normalised y, and this Program has no norm",
            where="quant",
            hints=("build with norm=True, or use --fuse pre-norm-quant",),
        )
    Arithmetic(config.functions, config.sumsq, config.projection)
    return replace(
        config,
        rms_eps=float(config.rms_eps),
        hc_eps=float(config.hc_eps),
        norm_eps=float(config.norm_eps),
    )


#: Options that name a field of a Config, in the order the header of an emission prints them.
_FLAGS = {
    "iters": "--iters",
    "rms_eps": "--rms-eps",
    "hc_eps": "--hc-eps",
    "norm_eps": "--norm-eps",
    "dtype": "--dtype",
    "functions": "--class",
    "sumsq": "--sumsq",
    "projection": "--projection",
    "scope": "--scope",
    "norm": "--norm",
    "quant": "--quant",
    "quant_pow2": "--quant-pow2",
    "extra": "--with",
}


def origin(config: Config) -> str:
    """The command-line options that name a Config: model, streams and hidden, then what is no default.

    Empty where no options can name it.

    Example:
        >>> from mhcgen.build import configure, origin
        >>> origin(configure("deepseek-v4", hidden=64, norm=True))
        '--model deepseek-v4 --streams 4 --hidden 64 --norm'
    """
    default = configure(config.model)
    words = [f"--model {config.model} --streams {config.streams} --hidden {config.hidden}"]
    named = {"model", "streams", "hidden", *_FLAGS}
    if any(getattr(config, f.name) != getattr(default, f.name) for f in fields(Config) if f.name not in named):
        return ""
    for field, flag in _FLAGS.items():
        value = getattr(config, field)
        # A boundary implies its projection on the command line, so there it is always spelled out.
        spelled_out = field == "projection" and config.scope == "boundary"
        if value == getattr(default, field) and not spelled_out:
            continue
        if value is True:
            words.append(flag)
        elif isinstance(value, tuple):
            words.append(f"{flag} {','.join(value)}")
        else:
            words.append(f"{flag} {value}")
    return " ".join(words)


def _integer(field: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise UsageError(
            f"U-{field.upper()}",
            f"{field} must be an integer from {low} to {high}, got {value!r}",
            where=f"--{field}",
            hints=(f"give an integer from {low} to {high}",),
        )


def _eps(field: str, value: object, spec: Model) -> None:
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
    if not (math.isfinite(number) and (number > 0 or (number == 0 and spec.zero_eps)) and number <= 1.0):
        zero = "0 or " if spec.zero_eps else ""
        raise UsageError(
            "U-EPS",
            f"{field} must be {zero}a positive finite number up to 1, got {value!r}",
            where=f"--{field.replace('_', '-')}",
            hints=(f"model {spec.name} uses {getattr(spec, field)!r}",),
        )


def _member(field: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise UsageError(
            f"U-{field.upper()}",
            f"{field} must be one of {', '.join(allowed)}, got {value!r}",
            where=f"--{field}",
            hints=(f"choose one of {', '.join(allowed)}",),
        )


class _Builder:
    """Collects stages and tensors; tensors take shape from the kind's signature."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.tensors: dict[str, Tensor] = {}
        self.stages: list[Stage] = []

    def add(
        self,
        name: str,
        kind: str,
        operands: dict[str, str],
        results: dict[str, str],
        attrs: dict[str, AttrValue] | None = None,
    ) -> None:
        signature = KINDS[kind]
        shapes = {slot.rstrip("?"): shape for slot, shape in (*signature.operands, *signature.results)}
        for slot, tensor in (*operands.items(), *results.items()):
            self.tensors.setdefault(tensor, Tensor(tensor, shapes[slot], self._dtype(slot), "value"))
        self.stages.append(make_stage(name, kind, operands, results, attrs))

    def _dtype(self, slot: str) -> str:
        if slot in ("x", "x_next", "x_out", "e", "f", "y", "z", "aux"):
            return self.config.dtype
        if slot == "q":
            return "int8" if self.config.quant == "q8" else "fp8_e4m3"
        return "int32" if slot == "iterations" else "fp32"

    def finish(self, parameters: set[str], results: tuple[str, ...]) -> Program:
        written = {tensor for stage in self.stages for tensor in stage.writes}
        tensors = []
        for tensor in self.tensors.values():
            if tensor.name in results:
                role = "result"
            elif tensor.name in written:
                role = "value"
            else:
                role = "parameter" if tensor.name in parameters else "input"
            tensors.append(replace(tensor, role=role))
        config = self.config
        n, h = config.streams, config.hidden
        group = 32 if config.quant == "q8" else 128
        dims = {"n": n, "H": h, "K": n * h, "R": (2 + n) * n, "L": n * n, "G": -(-h // group)}
        return Program(
            model=config.model,
            dims=tuple(sorted(dims.items())),
            arithmetic=Arithmetic(config.functions, config.sumsq, config.projection),
            tensors=tuple(tensors),
            stages=tuple(self.stages),
            scope=config.scope,
            origin=origin(config),
        )


def _pre_chain(b: _Builder, suffix: str = "", x: str = "x") -> None:
    """projection (unless external), rowsq, gates, sinkhorn, collapse, and norm and quant if asked for."""
    c = b.config
    spec = find_model(c.model)
    if c.projection != "external":
        b.add("project", "project", {"x": x, "fn": "fn"}, {"mixes": "mixes"}, {"method": c.projection})
    b.add(
        "rowsq",
        "rowsq",
        {"x": x, "mixes": "mixes"},
        {"mixes_scaled": "mixes_scaled"},
        {"acc": c.sumsq, "eps": c.rms_eps},
    )
    b.add(
        "gates",
        "gates",
        {"mixes_scaled": "mixes_scaled", "scale": "scale", "base": "base"},
        {"pre": f"pre{suffix}", "post": f"post{suffix}", "logits": "logits"},
        {"post_mult": spec.post_mult, "pre_eps": c.hc_eps},
    )
    results = {"comb": f"comb{suffix}"}
    if c.iterations_out:
        results["iterations"] = "iterations"
    b.add(
        "sinkhorn",
        "sinkhorn",
        {"logits": "logits"},
        results,
        {"comb": spec.comb, "early_stop": c.early_stop, "eps": c.hc_eps, "iters": c.iters},
    )
    b.add("collapse", "collapse", {"x": x, "pre": f"pre{suffix}"}, {"y": "y"})
    if c.norm:
        operands = {"y": "y", "weight": "norm_weight"} if spec.norm_weight else {"y": "y"}
        b.add("norm", "norm", operands, {"z": "z"}, {"acc": "fp32", "eps": c.norm_eps})
    if c.quant != "none":
        b.add(
            "quant",
            "quant",
            {"z": "z"},
            {"q": "q", "q_scale": "q_scale"},
            {"group": 32 if c.quant == "q8" else 128, "pow2": c.quant_pow2, "scheme": c.quant},
        )


_PARAMETERS = {"fn", "scale", "base", "norm_weight"}


def build_config(config: Config) -> Program:
    """The unfused Program of a checked Config.

    Raises:
        UsageError: `U-SCOPE` where the scope is not available for the model.
    """
    from mhcgen.verify import verify

    b = _Builder(config)
    tail = ("z",) * config.norm + ("q", "q_scale") * (config.quant != "none")
    tail += ("iterations",) * config.iterations_out
    if config.scope == "pre":
        _pre_chain(b)
        results: tuple[str, ...] = ("pre", "post", "comb", "y", *tail)
    elif config.scope == "site":
        _pre_chain(b)
        b.add("branch", "branch", {"z": "z" if config.norm else "y"}, {"f": "f"})
        b.add("post", "post", {"x": "x", "f": "f", "post": "post", "comb": "comb"}, {"x_next": "x_next"})
        results = ("pre", "post", "comb", "y", *tail, "x_next")
    elif config.scope == "boundary":
        b.add("post", "post", {"x": "x", "f": "f", "post": "post", "comb": "comb"}, {"x_next": "x_next"})
        source, results = "x_next", ("x_next",)
        if "engram" in config.extra:
            b.add("engram", "engram", {"x": "x_next"}, {"x_out": "x_engram"})
            source, results = "x_engram", ("x_engram",)
        if "tap" in config.extra:
            b.add("tap", "tap", {"x": source}, {"aux": "aux"})
            results = (*results, "aux")
        _pre_chain(b, suffix="_next", x=source)
        results = (*results, "pre_next", "post_next", "comb_next", "y", *tail)
    else:
        raise UsageError(
            "U-SCOPE",
            f"scope {config.scope} is built by mhcgen.trunk, not from one configuration",
            where="--scope",
            hints=("use scope pre, site or boundary here",),
        )
    program = b.finish(_PARAMETERS, results)
    verify(program)
    return program


def build(model: str = "deepseek-v4", **options: object) -> Program:
    """The unfused Program of a model; options are the fields of `Config`.

    Example:
        >>> from mhcgen.build import build
        >>> program = build("deepseek-v4", streams=4, hidden=64)
        >>> [stage.name for stage in program.stages]
        ['rowsq', 'gates', 'sinkhorn', 'collapse']

    Raises:
        UsageError: a value out of range, an unknown model or key.
    """
    return build_config(configure(model, **options))
