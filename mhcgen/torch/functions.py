"""The operations as functions of tensors, with results by name.

Streams are [T, n, H] (token-major) and contiguous; batch dimensions are flattened into T by the caller, or by the
modules of `mhcgen.torch.modules`. Coefficients and parameters are fp32; streams, y, z and f have the Setup's dtype.
Where every tensor is float64, an operation runs in plain torch, for `torch.autograd.gradcheck`.

All raise

    InputError      I-SHAPE, I-LAYOUT, I-DEVICE, I-TOKENS, I-OVERLAP (out), I-MISSING, I-UNKNOWN (optional inputs)
    InputTypeError  I-DTYPE, I-ARRAY
    EnvironmentFault, CompileError, LaunchError   of the backend

and every one is differentiable, except for its `out` form and for q and q_scale.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from mhcgen.errors import InputError, InputTypeError
from mhcgen.torch import straight
from mhcgen.torch.operations import OPERATIONS
from mhcgen.torch.ops import operator
from mhcgen.torch.setup import Setup


class Site(NamedTuple):
    """What the pre chain of a site makes: y [T, H]; pre, post [T, n]; comb [T, n (from), n (to)]."""

    y: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


class NormSite(NamedTuple):
    """`Site` with z [T, H], the RMSNorm of y."""

    z: Tensor
    y: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


class QuantSite(NamedTuple):
    """`NormSite` with q [T, H] (int8 or float8_e4m3fn) and q_scale [T, groups]."""

    z: Tensor
    y: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor
    q: Tensor
    q_scale: Tensor


class Boundary(NamedTuple):
    """New streams x_next [T, n, H], and what the pre chain of the next site makes of them."""

    x_next: Tensor
    y: Tensor
    pre_next: Tensor
    post_next: Tensor
    comb_next: Tensor


class NormBoundary(NamedTuple):
    """`Boundary` with z [T, H], the RMSNorm of y."""

    x_next: Tensor
    z: Tensor
    y: Tensor
    pre_next: Tensor
    post_next: Tensor
    comb_next: Tensor


class Head(NamedTuple):
    """End of a trunk by the gated head: y [T, H], pre [T, n]."""

    y: Tensor
    pre: Tensor


class GatedSite(NamedTuple):
    """`Site` of a model whose gates are of elements: y [T, H]; post [T, n]; comb [T, n, n]."""

    y: Tensor
    post: Tensor
    comb: Tensor


class GatedNormSite(NamedTuple):
    """`GatedSite` with z [T, H], the RMSNorm of y."""

    z: Tensor
    y: Tensor
    post: Tensor
    comb: Tensor


class GatedBoundary(NamedTuple):
    """New streams x_next [T, n, H], and a `GatedSite` of them."""

    x_next: Tensor
    y: Tensor
    post_next: Tensor
    comb_next: Tensor


class GatedNormBoundary(NamedTuple):
    """`GatedBoundary` with z [T, H], the RMSNorm of y."""

    x_next: Tensor
    z: Tensor
    y: Tensor
    post_next: Tensor
    comb_next: Tensor


Results = TypeVar(
    "Results", Site, NormSite, QuantSite, Boundary, NormBoundary, Head, GatedSite, GatedNormSite, GatedBoundary,
    GatedNormBoundary,
)  # fmt: skip

_OPERATORS = {name: operator(name) for name in OPERATIONS}
_OUT_OPERATORS = {name: operator(name, out=True) for name in OPERATIONS}


def _call(name: str, tensors: tuple[Tensor | None, ...], setup: Setup) -> tuple[Tensor, ...]:
    if not isinstance(setup, Setup):
        raise _not_a_setup(name, setup)
    operation, text = _OPERATORS[name], setup.text
    if torch.compiler.is_compiling():
        return _tuple(operation(*tensors, text))
    made = straight.attempt(name, tensors, text)
    if made is not None:
        return made
    try:
        made = _tuple(operation(*tensors, text))
    except (RuntimeError, TypeError) as error:
        if all(tensor is None or isinstance(tensor, Tensor) for tensor in tensors):
            raise
        raise _not_a_tensor(name, tensors) from error
    if torch.is_inference_mode_enabled():  # where autograd, which learns otherwise, has no part in a call
        straight.learn(name, tensors, text)
    return made


def _tuple(made: Any) -> tuple[Tensor, ...]:
    return (made,) if isinstance(made, Tensor) else tuple(made)


def _call_out(name: str, tensors: tuple[Tensor | None, ...], setup: Setup, out: tuple[Tensor, ...]) -> None:
    if not torch.compiler.is_compiling():
        if not all(tensor is None or isinstance(tensor, Tensor) for tensor in (*tensors, *out)):
            raise _not_a_tensor(name, (*tensors, *out))
        if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*tensors, *out)):
            raise InputError(
                "I-GRAD",
                f"{name} with out records no gradient, and an input requires one",
                where="out",
                hints=("leave out= away, or call it under torch.no_grad()",),
            )
    if not isinstance(setup, Setup):
        raise _not_a_setup(name, setup)
    names = OPERATIONS[name].outputs
    if len(out) != len(names):
        raise InputError(
            "I-MISSING", f"out has {len(out)} tensors, and {name} writes {', '.join(names)}", where="out"
        )
    _OUT_OPERATORS[name](*tensors, setup.text, **{f"out_{n}": t for n, t in zip(names, out, strict=True)})


def _not_a_setup(name: str, setup: Any) -> InputTypeError:
    return InputTypeError(
        "I-ARRAY",
        f"{name} takes a Setup, got {type(setup).__name__}",
        where="setup",
        hints=("mhc.Setup(model, ...)",),
    )


def _not_a_tensor(name: str, tensors: tuple[Any, ...]) -> InputTypeError:
    names = (*OPERATIONS[name].names, *(f"out {output}" for output in OPERATIONS[name].outputs))
    pairs = zip(tensors, names, strict=False)
    tensor, where = next(p for p in pairs if p[0] is not None and not isinstance(p[0], Tensor))
    return InputTypeError(
        "I-ARRAY",
        f"{where} is a {type(tensor).__module__}.{type(tensor).__qualname__}, and a torch tensor is wanted",
        where=where,
        hints=("torch.from_numpy and torch.from_dlpack share the memory of an array",),
    )


def _many(
    kind: type[Results], name: str, tensors: tuple[Tensor | None, ...], setup: Setup, out: Results | None
) -> Results:
    if out is None:
        return kind(*_call(name, tensors, setup))
    _call_out(name, tensors, setup, tuple(out))
    return out


def _one(name: str, tensors: tuple[Tensor | None, ...], setup: Setup, out: Tensor | None) -> Tensor:
    if out is None:
        (made,) = _call(name, tensors, setup)
        return made
    _call_out(name, tensors, setup, (out,))
    return out


def expand(e: Tensor, *, setup: Setup, out: Tensor | None = None) -> Tensor:
    """x [T, n, H]: n copies of the embeddings e [T, H]."""
    return _one("expand", (e,), setup, out)


def pre(
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: Site | None = None,
) -> Site:
    """The pre chain of a site: projection, gates, mixing matrix, collapse.

    Args:
        x: streams [T, n, H].
        fn: projection [(2+n)n, n*H], or None with `mixes`.
        scale: [3]; None, as fn, in a model whose coefficients are the same for every token.
        base: [(2+n)n].
        setup: arithmetic and schedule.
        mixes: [T, (2+n)n] as projected and not yet rescaled, where the projection is the caller's.
        comb_logits: [L], in a model whose mixing matrix is the same for every token.
        pre_prev: gates [T, n] of the site before, in a model with delayed pre; without them y is stream 0.
        out: tensors to write to.
    """
    return _many(Site, "pre", (x, fn, mixes, scale, base, comb_logits, pre_prev), setup, out)


def finish(
    x: Tensor,
    mixes: Tensor,
    scale: Tensor,
    base: Tensor,
    *,
    setup: Setup,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: Site | None = None,
) -> Site:
    """`pre` with its mixes given."""
    return _many(Site, "finish", (x, mixes, scale, base, comb_logits, pre_prev), setup, out)


def pre_norm(
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor,
    norm_weight: Tensor | None,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: NormSite | None = None,
) -> NormSite:
    """`pre` and the sub-layer's RMSNorm of y, with norm_weight [H] where the model has one."""
    tensors = (x, fn, mixes, scale, base, comb_logits, norm_weight, pre_prev)
    return _many(NormSite, "pre_norm", tensors, setup, out)


def pre_norm_quant(
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor,
    norm_weight: Tensor | None,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: QuantSite | None = None,
) -> QuantSite:
    """`pre_norm` and the quantisation of z by the Setup's `quant` (q8 if it says none); gradients flow by z alone."""
    tensors = (x, fn, mixes, scale, base, comb_logits, norm_weight, pre_prev)
    return _many(QuantSite, "pre_norm_quant", tensors, setup, out)


def post(x: Tensor, f: Tensor, post: Tensor, comb: Tensor, *, setup: Setup, out: Tensor | None = None) -> Tensor:
    """x_next [T, n, H]: post[t, k] f[t] + sum over j of comb[t, j, k] x[t, j].

    x is what the site's pre chain read and f [T, H] the sub-layer's result.
    """
    return _one("post", (x, f, post, comb), setup, out)


def boundary(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor,
    *,
    setup: Setup,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: Boundary | None = None,
) -> Boundary:
    """`post` of a site and `pre` of the next (fn, scale and base are the next one's) in one launch."""
    tensors = (x, f, post, comb, fn, scale, base, comb_logits, pre_prev)
    return _many(Boundary, "boundary", tensors, setup, out)


def boundary_norm(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor,
    fn: Tensor | None,
    scale: Tensor | None,
    base: Tensor,
    norm_weight: Tensor | None,
    *,
    setup: Setup,
    comb_logits: Tensor | None = None,
    pre_prev: Tensor | None = None,
    out: NormBoundary | None = None,
) -> NormBoundary:
    """`post` of a site and `pre_norm` of the next in one launch."""
    tensors = (x, f, post, comb, fn, scale, base, comb_logits, norm_weight, pre_prev)
    return _many(NormBoundary, "boundary_norm", tensors, setup, out)


def collapse(x: Tensor, pre: Tensor, *, setup: Setup, out: Tensor | None = None) -> Tensor:
    """y [T, H]: streams summed by given gates [T, n]; the end of a trunk with delayed pre."""
    return _one("collapse", (x, pre), setup, out)


def mean(x: Tensor, *, setup: Setup, out: Tensor | None = None) -> Tensor:
    """y [T, H]: unweighted mean of the streams."""
    return _one("mean", (x,), setup, out)


def sum(x: Tensor, *, setup: Setup, out: Tensor | None = None) -> Tensor:
    """y [T, H]: sum of the streams."""
    return _one("sum", (x,), setup, out)


def head(
    x: Tensor,
    fn: Tensor | None,
    scale: Tensor,
    base: Tensor,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    out: Head | None = None,
) -> Head:
    """The gated head: fn [n, n*H] (or mixes [T, n]), scale [1], base [n]."""
    return _many(Head, "head", (x, fn, mixes, scale, base), setup, out)


def gated(
    x: Tensor,
    stream_weight: Tensor,
    fn: Tensor | None,
    up: Tensor,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    out: GatedSite | None = None,
) -> GatedSite:
    """The pre chain of a model whose gates are of elements: norm of each stream, bottleneck, gated mean.

    Args:
        x: streams [T, n, H].
        stream_weight: [n*H], to which 1 is added.
        fn: [D + n, n*H], rows of the bottleneck and of post, or None with `mixes`.
        up: [D, n*H], from the bottleneck to a gate for every element.
        setup: arithmetic and schedule.
        mixes: [T, D + n] of the normed streams, where the projection is the caller's.
        out: tensors to write to.
    """
    return _many(GatedSite, "gated", (x, stream_weight, fn, mixes, up), setup, out)


def gated_norm(
    x: Tensor,
    stream_weight: Tensor,
    fn: Tensor | None,
    up: Tensor,
    norm_weight: Tensor | None,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    out: GatedNormSite | None = None,
) -> GatedNormSite:
    """`gated` and an RMSNorm of y, with norm_weight [H]."""
    return _many(GatedNormSite, "gated_norm", (x, stream_weight, fn, mixes, up, norm_weight), setup, out)


def gated_boundary(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor,
    stream_weight: Tensor,
    fn: Tensor,
    up: Tensor,
    *,
    setup: Setup,
    out: GatedBoundary | None = None,
) -> GatedBoundary:
    """`post` of a site and `gated` of the next in one launch."""
    return _many(GatedBoundary, "gated_boundary", (x, f, post, comb, stream_weight, fn, up), setup, out)


def gated_boundary_norm(
    x: Tensor,
    f: Tensor,
    post: Tensor,
    comb: Tensor,
    stream_weight: Tensor,
    fn: Tensor,
    up: Tensor,
    norm_weight: Tensor | None,
    *,
    setup: Setup,
    out: GatedNormBoundary | None = None,
) -> GatedNormBoundary:
    """`post` of a site and `gated_norm` of the next in one launch."""
    tensors = (x, f, post, comb, stream_weight, fn, up, norm_weight)
    return _many(GatedNormBoundary, "gated_boundary_norm", tensors, setup, out)


def gated_head(
    x: Tensor,
    stream_weight: Tensor,
    fn: Tensor | None,
    up: Tensor,
    *,
    setup: Setup,
    mixes: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y [T, H]: the end of a trunk by the same mixer without post; fn is [D, n*H] (or mixes [T, D])."""
    return _one("gated_head", (x, stream_weight, fn, mixes, up), setup, out)
