"""Configuration -> unfused Program."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from mhcgen.arithmetic import Arithmetic
from mhcgen.chain import Builder, between, branch, head_chain, post, pre_chain, tail_results
from mhcgen.errors import UsageError
from mhcgen.ir import Program
from mhcgen.models import EXITS, Model
from mhcgen.models import model as find_model
from mhcgen.values import member, plain, switch, wrong
from mhcgen.verify import fp32_holds, verify

#: What a Program holds: one site's half or whole, two sites' border, a trunk, or one part of the module around them.
SCOPES = ("pre", "site", "boundary", "trunk", "expand", "post", "mean", "sum", "head")
STREAM_DTYPES = ("fp32", "bf16", "fp16")
QUANTS = ("none", "q8", "fp8")
#: Opaque readers between post and the next pre, in the order a Program has them.
EXTRAS = ("engram", "tap")
MAX_STREAMS = 16
MAX_HIDDEN = 1 << 20
MAX_ITERS = 1000
MAX_LAYERS = 1024
MAX_RANK = 4096


@dataclass(frozen=True)
class Config:
    """A complete configuration; `configure` fills the defaults of a model.

    Args:
        model: a key of `mhcgen.models.MODELS`.
        streams: n, 1 to 16; some models exist for some counts only.
        hidden: H, 1 to 2^20.
        iters: Sinkhorn iterations, 1 to 1000; 0 in a model that has none.
        rms_eps: eps of the RMS over the streams; > 0, or 0 where the model allows it.
        hc_eps: eps of pre and Sinkhorn; likewise.
        norm_eps: eps of the RMSNorm of y; likewise.
        dtype: of streams, branch output and y: fp32, bf16 or fp16. Coefficients are fp32.
        functions: function set, `ieee` or `fast`.
        sumsq: accumulator of the sum of squares, `fp64` or `fp32`; the default is fp64 for ieee, fp32 for fast.
        projection: `external` (mixes given) or `fma`.
        scope: one of `SCOPES`; `pre` with the projection `external` is the pre chain with its mixes given.
        norm: whether RMSNorm of y is part of the Program.
        quant: `none`, `q8` (int8, groups of 32) or `fp8` (e4m3, groups of 128).
        quant_pow2: round the scale of a group up to a power of two.
        early_stop: stop the Sinkhorn once an iteration changes no bit; never changes a bit.
        iterations_out: also return the number of iterations run, `iterations [T]`.
        extra: opaque readers between post and the next pre: `engram`, `tap`.
        layers: layers of a trunk, two sites each, 1 to 1024; no other scope reads it.
        exit: how a trunk ends, one of `mhcgen.models.EXITS`; no other scope reads it.
        rank: D, of gates that every element has of its own, 1 to 4096; 0 in a model without such. By default the
            model's, and at most H/8.
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
    layers: int = 1
    exit: str = "head"
    rank: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Fields by name for JSON; without those of gates that the model does not have."""
        table = {**asdict(self), "extra": list(self.extra)}
        return {name: value for name, value in table.items() if name != "rank" or value}


def configure(model: str = "deepseek-v4", **given: object) -> Config:
    """A checked Config: the model's constants, overridden by what is given (None means default).

    A trunk projects its own mixes, so there the default projection is `fma`. The fast function set sums squares in
    fp32 unless told otherwise.

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
        "exit": spec.exit,
    }
    chosen = {key: plain(key, value) for key, value in given.items() if value is not None}
    if chosen.get("scope") == "trunk":
        defaults["projection"] = "fma"
    if chosen.get("functions") == "fast":
        defaults["sumsq"] = "fp32"
    unknown = sorted(set(chosen) - set(Config.__dataclass_fields__))
    if unknown:
        raise UsageError(
            "U-OPTION",
            f"unknown configuration key {unknown[0]!r}",
            where=unknown[0],
            notes=(f"known keys: {', '.join(sorted(Config.__dataclass_fields__))}",),
            hints=("remove it or correct its spelling",),
        )
    hidden = chosen.get("hidden", spec.hidden)
    defaults["rank"] = spec.rank_at(hidden) if isinstance(hidden, int) else 0
    config = Config(model=model, **{**defaults, **chosen})  # type: ignore[arg-type]
    return check_config(config, spec)


def check_config(config: Config, spec: Model) -> Config:
    """The same Config, normalised (eps as float), or a UsageError for the first bad field."""
    _integer("streams", config.streams, 1, MAX_STREAMS)
    _streams(config.streams, spec)
    _integer("hidden", config.hidden, 1, MAX_HIDDEN)
    _iterations(config, spec)
    _rank(config, spec)
    _integer("layers", config.layers, 1, MAX_LAYERS)
    for field in ("rms_eps", "hc_eps", "norm_eps"):
        _eps(field, getattr(config, field), spec)
    member("dtype", config.dtype, STREAM_DTYPES, "U-DTYPE")
    member("scope", config.scope, SCOPES, "U-SCOPE")
    member("exit", config.exit, EXITS, "U-EXIT")
    if config.exit == "pre" and not spec.delayed_pre:
        raise UsageError(
            "U-EXIT",
            f"exit pre collapses by the gates of the last site, and model {spec.name} has used those before",
            where="--exit",
            hints=(f"choose one of {', '.join(e for e in EXITS if e != 'pre')}",),
        )
    member("quant", config.quant, QUANTS, "U-QUANT")
    for field in ("norm", "quant_pow2", "early_stop", "iterations_out"):
        switch(field, getattr(config, field))
    if not isinstance(config.extra, list | tuple):
        raise wrong("extra", "a tuple of texts", repr(config.extra))
    for item in config.extra:
        member("extra", item, EXTRAS, "U-EXTRA")
    if config.quant != "none" and not config.norm:
        raise UsageError(
            "U-QUANT",
            "quantisation reads the normalised y, and this Program has no norm",
            where="quant",
            hints=("build with norm=True, or use --fuse pre-norm-quant",),
        )
    Arithmetic(config.functions, config.sumsq, config.projection)
    if config.scope == "trunk" and config.projection == "external":
        raise UsageError(
            "U-PROJECTION",
            "the sites of a trunk project streams that the trunk itself makes, so their mixes cannot be given",
            where="--projection",
            hints=("use --projection fma",),
        )
    return replace(
        config,
        extra=tuple(name for name in EXTRAS if name in config.extra),
        rms_eps=float(config.rms_eps),
        hc_eps=float(config.hc_eps),
        norm_eps=float(config.norm_eps),
    )


#: Options that name a field of a Config, in the order the header of an emission prints them.
_FLAGS = {
    "iters": "--iters",
    "rank": "--rank",
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
    "early_stop": "--early-stop",
    "iterations_out": "--iterations-out",
    "extra": "--with",
    "layers": "--layers",
    "exit": "--exit",
}


def origin(config: Config) -> str:
    """The command-line options that name a Config: model, streams and hidden, then what is no default.

    Example:
        >>> from mhcgen.build import configure, origin
        >>> origin(configure("deepseek-v4", hidden=64, norm=True))
        '--model deepseek-v4 --streams 4 --hidden 64 --norm'
    """
    default = configure(config.model)
    words = [f"--model {config.model} --streams {config.streams} --hidden {config.hidden}"]
    for field, flag in _FLAGS.items():
        value = getattr(config, field)
        # A boundary implies its projection on the command line, so there it is always spelled out.
        # So it is for the accumulator of the fast function set, whose default is another.
        spelled_out = (field == "projection" and config.scope == "boundary") or (
            field == "sumsq" and config.functions == "fast"
        )
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


def _streams(n: int, spec: Model) -> None:
    why = spec.refuses_streams(n)
    if why:
        legal = ", ".join(map(str, spec.legal_streams(MAX_STREAMS)))
        raise UsageError(
            "U-STREAMS",
            f"model {spec.name} has no form for {n} streams: {why}",
            where="--streams",
            hints=(f"use one of {legal}",),
        )


def _rank(config: Config, spec: Model) -> None:
    if spec.rank:
        _integer("rank", config.rank, 1, MAX_RANK)
    elif config.rank != 0 or isinstance(config.rank, bool):
        raise UsageError(
            "U-RANK",
            f"model {spec.name} has no gates of low rank",
            where="--rank",
            hints=("leave it out",),
        )


def _iterations(config: Config, spec: Model) -> None:
    if config.iterations_out and spec.static:
        raise UsageError(
            "U-ITERATIONS-OUT",
            f"model {spec.name} makes one mixing matrix for all tokens, and counts no iterations a token",
            where="--iterations-out",
            hints=("leave it out",),
        )
    if spec.iterated:
        _integer("iters", config.iters, 1, MAX_ITERS)
        if config.early_stop and ("domain", "log") in spec.comb_options:
            raise UsageError(
                "U-EARLY-STOP",
                f"model {spec.name} works in the log domain, which keeps no matrix whose bits could stop changing",
                where="--early-stop",
                hints=("leave it out",),
            )
        return
    for field, value in (("iters", config.iters), ("early_stop", config.early_stop)):
        if value != 0:
            raise UsageError(
                f"U-{field.upper().replace('_', '-')}",
                f"model {spec.name} makes its mixing matrix without iterations",
                where=f"--{field.replace('_', '-')}",
                hints=("leave it out",),
            )
    if config.iterations_out:
        raise UsageError(
            "U-ITERATIONS-OUT",
            f"model {spec.name} makes its mixing matrix without iterations",
            where="--iterations-out",
            hints=("leave it out",),
        )


def _eps(field: str, value: object, spec: Model) -> None:
    if field == "hc_eps" and not spec.uses_hc_eps:
        if value != spec.hc_eps:
            raise UsageError(
                "U-EPS",
                f"model {spec.name} has no hc_eps, got {value!r}",
                where="--hc-eps",
                hints=("leave it out",),
            )
        return
    numeric = isinstance(value, int | float) and not isinstance(value, bool)
    # Not every integer fits a float, so the range comes first.
    number = float(value) if numeric and 0 <= value <= 1 else math.nan  # type: ignore[arg-type, operator]
    lost = math.isfinite(number) and not fp32_holds(number)  # 1e-50 would be 0 in the text
    if lost or not (math.isfinite(number) and (number > 0 or (number == 0 and spec.zero_eps)) and number <= 1.0):
        zero = "0 or " if spec.zero_eps else ""
        raise UsageError(
            "U-EPS",
            f"{field} must be {zero}a positive finite number up to 1, got {value!r}",
            where=f"--{field.replace('_', '-')}",
            notes=("fp32 has no number between 0 and 1.4e-45",) * (lost and number > 0),
            hints=(f"model {spec.name} uses {getattr(spec, field)!r}",),
        )


def build_config(config: Config) -> Program:
    """The unfused Program of a checked Config."""
    if config.scope == "trunk":
        from mhcgen.trunk import build_trunk

        program = build_trunk(config)
    else:
        b = Builder(config)
        program = b.finish(_add_scope(b, config), origin(config))
    verify(program)
    return program


def _add_scope(b: Builder, config: Config) -> tuple[str, ...]:
    """Add the stages of a scope other than trunk; returns the names of its results."""
    if config.scope == "expand":
        b.add("expand", "expand", {"e": "e"}, {"x": "x"})
        return ("x",)
    if config.scope in ("mean", "sum"):
        b.add(config.scope, config.scope, {"x": "x"}, {"y": "y"})
        return ("y",)
    spec = find_model(config.model)
    pre = () if spec.rank else ("pre",)
    if config.scope == "head":
        head_chain(b)
        return (*pre, "y")
    if config.scope == "post":
        return (post(b),)
    tail = tail_results(config)
    if config.scope == "boundary":
        x_next = post(b)
        x, results = between(b, x_next)
        pre_chain(b, x, suffix="_next")
        return (x, *results, *(f"{name}_next" for name in (*pre, "post", "comb")), "y", *tail)
    pre_chain(b)
    if config.scope == "pre":
        return (*pre, "post", "comb", "y", *tail)
    branch(b)
    return (*pre, "post", "comb", "y", *tail, post(b))


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
