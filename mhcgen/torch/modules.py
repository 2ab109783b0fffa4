"""Modules: hyper-connections around any sub-layer, and a whole trunk of them.

```
HyperConnection        one site around one branch      hc_attn_fn hc_attn_base hc_attn_scale
HyperLayer             an attention and an FFN site    ... and hc_ffn_fn hc_ffn_base hc_ffn_scale
HyperConnectionStack   expand, layers, exit            layers.{i}.hc_attn_fn ... hc_head_fn hc_head_base hc_head_scale
```
A model whose gates are of elements has hc_attn_fn, hc_attn_stream_weight and hc_attn_up instead.
Names are those of DeepSeek's own checkpoints; other public spellings are read by `load_public_state_dict`.

Streams are [..., n, H] and every other dimension is a token's. Parameters of hyper-connections are fp32 and stay so
under `.to(torch.bfloat16)` and `.half()`: rounding them is a mistake that nothing downstream can see.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mhcgen.errors import InputError, UsageError
from mhcgen.ir import Program
from mhcgen.models import model as find_model
from mhcgen.topology import Topology, hyper_topology
from mhcgen.torch import functions as F
from mhcgen.torch.eager import project_streams
from mhcgen.torch.initial import FAR, INITIAL_FN, INITIAL_SCALE, initial_gates, initial_values
from mhcgen.torch.operations import OPERATIONS, build_operation
from mhcgen.torch.setup import Setup
from mhcgen.trunk import SITES

LOGGER = logging.getLogger("mhcgen")
#: dtype names of a Setup.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WIDE = (torch.float32, torch.float64)

Made = F.Site | F.NormSite | F.GatedSite | F.GatedNormSite
Branch = Callable[..., Tensor]


class NormWeight(nn.Module):
    """Weight [H] of a sub-layer's RMSNorm, which runs in the site's kernel; its key is `{site}_norm.weight`."""

    def __init__(self, hidden: int, device: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden, dtype=torch.float32, device=device))


class _Sites(nn.Module):
    """What modules with sites share: parameters by the models' names, and the operations on them."""

    def __init__(self, setup: Setup, *, norm: bool, gemm: bool, device: Any) -> None:
        super().__init__()
        self.setup = setup
        self.norm = norm
        self.gemm = gemm
        self._device = device
        self._last = find_model(setup.config.model).stream_last
        self._each = find_model(setup.config.model).norm_each
        self._gated = find_model(setup.config.model).rank > 0
        if self._gated and gemm:
            raise UsageError(
                "U-MODEL",
                f"model {setup.config.model} projects streams that it norms first, and gemm reads them as they come",
                where="gemm",
                hints=("leave gemm out, or call gated(..., mixes=...) with a norm of your own",),
            )

    @property
    def delayed(self) -> bool:
        """Whether the collapse uses the gates of the site before."""
        return find_model(self.setup.config.model).delayed_pre

    def _add(self, prefix: str, shapes: Mapping[str, tuple[int, ...]]) -> None:
        for part, shape in shapes.items():
            empty = torch.empty(shape, dtype=torch.float32, device=self._device)
            self.register_parameter(f"hc_{prefix}_{part}", nn.Parameter(empty))

    def _program(self) -> Program:
        return build_operation(OPERATIONS["gated" if self._gated else "pre"], self.setup.config)

    def _add_site(self, site: str) -> None:
        program = self._program()
        self._add(site, {tensor.name: program.shape(tensor.name, 1) for tensor in program.of_role("parameter")})
        if self.norm and find_model(self.setup.config.model).norm_weight:
            self.add_module(f"{site}_norm", NormWeight(self.setup.config.hidden, self._device))
        self._reset(site)

    def _reset(self, site: str) -> None:
        initial = initial_gates if self._gated else initial_values
        with torch.no_grad():
            for part, value in initial(self._program()).items():
                getattr(self, f"hc_{site}_{part}").copy_(value)
            fn, scale = self.part(site, "fn"), self.part(site, "scale")
            if fn is not None and scale is not None:
                fn.normal_(0.0, INITIAL_FN)
                scale.fill_(INITIAL_SCALE)

    def _apply(self, function: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> Any:
        """As `nn.Module`, but nothing here gets narrower than fp32: a cast that would go further ends there."""
        own = [
            (holder, name, parameter.data)
            for holder, name, parameter in self._own_parameters()
            if parameter.dtype in _WIDE
        ]
        made = super()._apply(function, *args, **kwargs)
        for holder, name, before in own:
            parameter = getattr(holder, name)
            if parameter.dtype not in _WIDE:
                # fp32 after float64 too: where a trunk was widened for a while, a cast takes that back.
                LOGGER.info("%s is kept in fp32: parameters of hyper-connections are not narrowed", name)
                grad = parameter.grad
                parameter.grad = None
                parameter.data = before.to(parameter.device, torch.float32)
                parameter.grad = None if grad is None else grad.to(torch.float32)
        return made

    def _own_parameters(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        found: list[tuple[nn.Module, str, nn.Parameter]] = [
            (self, name, parameter) for name, parameter in self._parameters.items() if parameter is not None
        ]
        return found + [(m, "weight", m.weight) for m in self._modules.values() if isinstance(m, NormWeight)]

    # ---- sites ----------------------------------------------------------------------------------
    def part(self, site: str, part: str) -> Tensor | None:
        """A parameter of a site, `fn`, `scale`, `base` or `comb_logits`; None where the model has none."""
        return self._parameters.get(f"hc_{site}_{part}")

    def of_site(self, site: str) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """fn, scale and base of a site."""
        return self.part(site, "fn"), self.part(site, "scale"), getattr(self, f"hc_{site}_base")

    def gates_of(self, site: str) -> tuple[Tensor, Tensor, Tensor]:
        """stream_weight, fn and up of a site, or of `head`, whose gates are of elements."""
        return tuple(getattr(self, f"hc_{site}_{part}") for part in ("stream_weight", "fn", "up"))

    def norm_weight(self, site: str) -> Tensor | None:
        """Weight of a site's RMSNorm; None where there is none."""
        module = getattr(self, f"{site}_norm", None)
        return module.weight if isinstance(module, NormWeight) else None

    def project(self, x: Tensor, fn: Tensor) -> Tensor:
        """mixes by torch's matrix product, in fp32 (or as `torch.set_float32_matmul_precision` allows)."""
        columns = x.transpose(1, 2) if self._last else x
        with torch.autocast(x.device.type, enabled=False):
            if self._each and fn.shape[1] == columns.shape[2]:  # a head has one projection of all streams
                return project_streams(columns.to(fn.dtype), fn)
            return nn.functional.linear(columns.flatten(1).to(fn.dtype), fn)

    def enter(self, site: str, x: Tensor, pre_prev: Tensor | None = None) -> Made:
        """The pre chain of a site for streams [T, n, H]."""
        if self._gated:
            weights = self.gates_of(site)
            if self.norm:
                return F.gated_norm(x, *weights, self.norm_weight(site), setup=self.setup)
            return F.gated(x, *weights, setup=self.setup)
        fn, scale, base = self.of_site(site)
        mixes = self.project(x, fn) if self.gemm and fn is not None else None
        given = None if self.gemm else fn
        options: dict[str, Any] = {
            "setup": self.setup,
            "mixes": mixes,
            "comb_logits": self.part(site, "comb_logits"),
            "pre_prev": pre_prev,
        }
        if self.norm:
            return F.pre_norm(x, given, scale, base, self.norm_weight(site), **options)
        return F.pre(x, given, scale, base, **options)

    def leave(self, x: Tensor, f: Tensor, made: Made) -> Tensor:
        """The post of a site: x is what `enter` read, f the branch's result [T, H]."""
        return F.post(x, f, made.post, made.comb, setup=self.setup)

    def run_branch(
        self, branch: Branch, made: Made, lead: tuple[int, ...], args: Any, kwargs: Any, like: Tensor
    ) -> Any:
        """The branch on z, or y without a norm, as [..., H]; its result as [T, H] in the streams' dtype."""
        columns = made.z if isinstance(made, F.NormSite | F.GatedNormSite) else made.y
        f = branch(columns.reshape(*lead, columns.shape[-1]), *args, **kwargs)
        if not isinstance(f, Tensor) or f.shape != (*lead, columns.shape[-1]):
            raise InputError(
                "I-SHAPE",
                f"the branch returned {list(f.shape) if isinstance(f, Tensor) else type(f).__name__}, "
                f"and [{', '.join(map(str, (*lead, columns.shape[-1])))}] is wanted",
                where=type(branch).__name__,
                hints=("a branch that returns more is wrapped in a function that returns its tensor",),
            )
        return f.reshape(-1, columns.shape[-1]).to(like.dtype).contiguous()

    def site(
        self, site: str, branch: Branch, x: Tensor, pre_prev: Tensor | None, args: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """A whole site on streams [..., n, H]: the new streams, and its pre gates [T, n], if it has such."""
        lead, flat = x.shape[:-2], x.reshape(-1, *x.shape[-2:]).contiguous()
        made = self.enter(site, flat, pre_prev)
        f = self.run_branch(branch, made, lead, args, kwargs, flat)
        return self.leave(flat, f, made).reshape(x.shape), getattr(made, "pre", None)

    def extra_repr(self) -> str:
        """Model, streams and width."""
        c = self.setup.config
        return f"model={c.model}, streams={c.streams}, hidden={c.hidden}, dtype={c.dtype}, norm={self.norm}"


class HyperConnection(_Sites):
    """One site: mixes n streams into a branch's input, and its result back into n streams.

    Parameters `hc_{site}_fn` [(2+n)n, n*H], `hc_{site}_base` [(2+n)n], `hc_{site}_scale` [3], and
    `{site}_norm.weight` [H] with a norm; all fp32.

    Args:
        branch: the sub-layer, [..., H] to [..., H].
        setup: arithmetic, schedule, streams, width and dtype of the streams.
        site: `attn` or `ffn`, for the names.
        norm: run the sub-layer's RMSNorm in the same kernel, so that the branch gets its result.
        gemm: project by torch's matrix product rather than in the kernel; better for many tokens.
        device: of the parameters.

    Initial values: fn normal with deviation 0.02, scale 0.01, base by `initial_values`: the site starts as a plain
    residual around the branch, reading the mean of the streams.
    """

    def __init__(
        self,
        branch: nn.Module,
        setup: Setup,
        *,
        site: str = "attn",
        norm: bool = False,
        gemm: bool = False,
        device: Any = None,
    ) -> None:
        if site not in SITES:
            raise UsageError("U-SITE", f"site must be {' or '.join(SITES)}, got {site!r}", where="site")
        super().__init__(setup, norm=norm, gemm=gemm, device=device)
        self.site_name = site
        self.branch = branch
        self._add_site(site)

    def reset_parameters(self) -> None:
        """Initial values again; the branch and the norm keep theirs."""
        self._reset(self.site_name)

    def forward(self, x: Tensor, *args: Any, pre_prev: Tensor | None = None, **kwargs: Any) -> Any:
        """New streams [..., n, H]; in a model with delayed pre also the gates [T, n] for the next site.

        Args:
            x: streams [..., n, H].
            args, kwargs: handed to the branch after its input.
            pre_prev: gates of the site before, in a model with delayed pre; None at the first site.
        """
        made, gates = self.site(self.site_name, self.branch, x, pre_prev, args, kwargs)
        return (made, gates) if self.delayed else made


class HyperLayer(_Sites):
    """A layer of a trunk: an attention and an FFN site, with both sites' parameters under the layer's own name.

    Args:
        attn, ffn: the branches, [..., H] to [..., H].
        setup, norm, gemm, device: as `HyperConnection`.
    """

    def __init__(
        self,
        attn: nn.Module,
        ffn: nn.Module,
        setup: Setup,
        *,
        norm: bool = False,
        gemm: bool = False,
        device: Any = None,
    ) -> None:
        super().__init__(setup, norm=norm, gemm=gemm, device=device)
        self.attn = attn
        self.ffn = ffn
        for site in SITES:
            self._add_site(site)

    def reset_parameters(self) -> None:
        """Initial values of both sites again."""
        for site in SITES:
            self._reset(site)

    def forward(self, x: Tensor, *args: Any, pre_prev: Tensor | None = None, **kwargs: Any) -> Any:
        """As `HyperConnection.forward`, through both sites; args and kwargs go to the attention."""
        x, gates = self.site("attn", self.attn, x, pre_prev, args, kwargs)
        x, gates = self.site("ffn", self.ffn, x, gates if self.delayed else None, (), {})
        return (x, gates) if self.delayed else x


def _pairs(branches: Sequence[tuple[nn.Module, nn.Module]], layers: int) -> list[tuple[nn.Module, nn.Module]]:
    """The branches of every layer.

    Raises:
        UsageError: `U-LAYERS`, not a pair a layer.
    """
    given = [
        list(pair) if isinstance(pair, Iterable) else [pair]
        for pair in (branches if isinstance(branches, Iterable) else ())
    ]
    if len(given) != layers:
        raise UsageError(
            "U-LAYERS",
            f"the topology has {layers} layers, and branches for {len(given)} were given",
            where="branches",
            hints=("give an (attention, FFN) pair a layer",),
        )
    for index, both in enumerate(given):
        if len(both) != len(SITES) or not all(callable(branch) for branch in both):
            raise UsageError(
                "U-LAYERS",
                f"layer {index} has {', '.join(type(branch).__name__ for branch in both) or 'no branch'}, "
                "and an attention and an FFN that can be called are wanted",
                where=f"branches[{index}]",
                hints=("give an (attention, FFN) pair a layer",),
            )
    return [(attn, ffn) for attn, ffn in given]


class HyperConnectionStack(_Sites):
    """A trunk: expand, the sites of every layer, and the exit that its topology names.

    Args:
        branches: an (attention, FFN) pair a layer.
        topology: of the trunk (`mhcgen.topology.read_topology` reads one from a configuration).
        dtype: of the streams: fp32, bf16 or fp16.
        norm: run the sub-layers' RMSNorm here.
        gemm: as `HyperConnection`.
        boundary: post of each site and pre of the next in one launch.
        device: of the parameters.
        setup_options: further fields of `Setup`: fuse, schedule, functions, sumsq, early_stop.

    Raises:
        UsageError: `U-LAYERS`, not a pair of branches a layer; `U-FUSE`; of the Setup.

    Attributes:
        layers: a `HyperLayer` each; keys `layers.{i}.hc_attn_fn` and so on.
        hc_head_fn, hc_head_base, hc_head_scale: of the gated head, where the exit is one.
    """

    def __init__(
        self,
        branches: Sequence[tuple[nn.Module, nn.Module]],
        topology: Topology,
        *,
        dtype: str = "fp32",
        norm: bool = False,
        gemm: bool = False,
        boundary: bool = False,
        device: Any = None,
        **setup_options: Any,
    ) -> None:
        pairs = _pairs(branches, topology.layers)
        if boundary and gemm:
            raise UsageError(
                "U-FUSE",
                "a boundary projects streams it has just made, so the projection cannot be torch's",
                where="gemm",
                hints=("leave gemm or boundary out",),
            )
        config = topology.config()
        keys = ("streams", "hidden", "iters", "rank", "rms_eps", "hc_eps", "norm_eps")
        setup = Setup(config.model, **{key: getattr(config, key) for key in keys}, dtype=dtype, **setup_options)
        super().__init__(setup, norm=norm, gemm=gemm, device=device)
        self.topology = topology
        self.boundary = boundary
        self.layers = nn.ModuleList(
            HyperLayer(attn, ffn, setup, norm=norm, gemm=gemm, device=device) for attn, ffn in pairs
        )
        if topology.exit == "head":
            n, rank, columns = topology.streams, setup.config.rank, topology.streams * topology.hidden
            gated = {"stream_weight": (columns,), "fn": (rank, columns), "up": (rank, columns)}
            self._add("head", gated if self._gated else {"fn": (n, columns), "base": (n,), "scale": (1,)})
            self._reset_head()

    @classmethod
    def from_config(
        cls,
        path: str | Path,
        branches: Sequence[tuple[nn.Module, nn.Module]],
        *,
        model: str | None = None,
        exit: str | None = None,
        **options: Any,
    ) -> HyperConnectionStack:
        """From a model configuration; model and exit as in `mhcgen.topology.read_topology`, options as above.

        Raises:
            InputError: `I-CONFIG`, `I-TRUNK`; `I-SERIAL` where the trunk has plain residuals.
        """
        return cls(branches, hyper_topology(path, model=model, exit=exit), **options)

    def _reset_head(self) -> None:
        with torch.no_grad():
            self.hc_head_fn.normal_(0.0, INITIAL_FN)
            if self._gated:
                self.hc_head_stream_weight.zero_()
                self.hc_head_up.zero_()
                return
            self.hc_head_base.fill_(-math.log(n - 1) if (n := self.topology.streams) > 1 else -FAR)
            self.hc_head_scale.fill_(INITIAL_SCALE)

    def reset_parameters(self) -> None:
        """Initial values of the head and of every site again."""
        if self.topology.exit == "head":
            self._reset_head()
        for layer in self.layers:
            layer.reset_parameters()

    def stream_dtype(self) -> torch.dtype:
        """The streams' dtype; float64 where the parameters are."""
        first = next(self.layers[0].parameters(recurse=False)).dtype
        return torch.float64 if first == torch.float64 else DTYPES[self.setup.config.dtype]

    def forward(self, embeddings: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """y [..., H] of embeddings [..., H].

        Args:
            embeddings: converted to the streams' dtype.
            args, kwargs: handed to every attention after its input.
        """
        lead = embeddings.shape[:-1]
        e = embeddings.reshape(-1, embeddings.shape[-1]).to(self.stream_dtype()).contiguous()
        x = F.expand(e, setup=self.setup)
        places = [(layer, site) for layer in self.layers for site in SITES]
        made = places[0][0].enter(places[0][1], x)
        for index, (layer, site) in enumerate(places):
            extra = (args, kwargs) if site == "attn" else ((), {})
            f = layer.run_branch(getattr(layer, site), made, lead, *extra, like=x)
            if index + 1 == len(places):
                return self.exit(layer.leave(x, f, made), getattr(made, "pre", None)).reshape(embeddings.shape)
            following, next_site = places[index + 1]
            pre_prev = getattr(made, "pre", None) if self.delayed else None
            if self.boundary:
                x, made = self._cross(following, next_site, x, f, made, pre_prev)
            else:
                x = layer.leave(x, f, made)
                made = following.enter(next_site, x, pre_prev)
        raise AssertionError("a trunk has layers")

    def _cross(
        self, following: HyperLayer, site: str, x: Tensor, f: Tensor, made: Made, pre_prev: Tensor | None
    ) -> tuple[Tensor, Made]:
        old = (x, f, made.post, made.comb)
        if self._gated:
            weights = following.gates_of(site)
            if self.norm:
                g = F.gated_boundary_norm(*old, *weights, following.norm_weight(site), setup=self.setup)
                return g.x_next, F.GatedNormSite(g.z, g.y, g.post_next, g.comb_next)
            h = F.gated_boundary(*old, *weights, setup=self.setup)
            return h.x_next, F.GatedSite(h.y, h.post_next, h.comb_next)
        fn, scale, base = following.of_site(site)
        options: dict[str, Any] = {
            "setup": self.setup,
            "comb_logits": following.part(site, "comb_logits"),
            "pre_prev": pre_prev,
        }
        if self.norm:
            b = F.boundary_norm(*old, fn, scale, base, following.norm_weight(site), **options)
            return b.x_next, F.NormSite(b.z, b.y, b.pre_next, b.post_next, b.comb_next)
        c = F.boundary(*old, fn, scale, base, **options)
        return c.x_next, F.Site(c.y, c.pre_next, c.post_next, c.comb_next)

    def exit(self, x: Tensor, pre: Tensor | None) -> Tensor:
        """y [T, H] of the last streams [T, n, H]: gated head, mean, sum, or a collapse by the last site's gates."""
        how = self.topology.exit
        if how == "mean":
            return F.mean(x, setup=self.setup)
        if how == "sum":
            return F.sum(x, setup=self.setup)
        if how == "pre" and pre is not None:
            return F.collapse(x, pre, setup=self.setup)
        if self._gated:
            return F.gated_head(x, *self.gates_of("head"), setup=self.setup)
        mixes = self.project(x, self.hc_head_fn) if self.gemm else None
        fn = None if self.gemm else self.hc_head_fn
        return F.head(x, fn, self.hc_head_scale, self.hc_head_base, setup=self.setup, mixes=mixes).y
