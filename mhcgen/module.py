"""The module around the kernels: a trunk's hyper-connections with their parameters, arm by arm or as a whole.

    hyper = HyperConnections.from_config("config.json", backend="cuda", fuse="pre").load("model.safetensors")
    x = hyper.expand(embeddings)
    made = hyper.pre("0.attn", x)
    x = hyper.post(attention(made.branch_input), x, made)
    ...
    y = hyper.exit(x)

Streams are token-major [T, n, H]. Every site runs the same emitted text and differs in its parameters, so a trunk of
any depth compiles one emission an arm. `mhcgen.trunk` has the other view: the whole trunk as one Program.

An *arm* is one emission in use: expand, pre, finish, post, boundary, mean, sum, head. `counts` says how often each
ran, and its first run writes one line to the logger `mhcgen`: what ran is never inferred from what was asked for.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mhcgen.api import compile
from mhcgen.build import build_config
from mhcgen.chain import at
from mhcgen.errors import InputError, LaunchError, UsageError
from mhcgen.models import model as find_model
from mhcgen.plan import Plan
from mhcgen.runtime import Module, check_branches
from mhcgen.topology import Topology, hyper_topology
from mhcgen.trunk import site_names
from mhcgen.warm_up import WarmUp, warm
from mhcgen.weights import WeightFile, trunk_parameters
from mhcgen.workspace import Workspace

LOGGER = logging.getLogger("mhcgen")
FUSES = ("none", "seed", "pre", "pre-norm", "boundary")

#: A sub-layer: its input [T, H] (z where there is a norm, y elsewhere) to its output [T, H].
SubLayer = Callable[[Any], Any]
#: Sub-layers by site name, or one function of site name and input.
SubLayers = Mapping[str, SubLayer] | Callable[[str, Any], Any]
#: A projection of the caller's: x [T, n*H] and fn [rows, n*H] to mixes [T, rows] in fp32.
Gemm = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class SiteInput:
    """What the pre chain of a site made: the sub-layer's input, and the gates its post needs.

    In a workspace these are its buffers, and hold until the next pre.

    Args:
        y: collapsed streams [T, H].
        z: RMSNorm of y [T, H]; None without a norm.
        pre: [T, n]; None in a model whose gates are of elements.
        post: [T, n].
        comb: [T, n (from_stream), n (to_stream)].
    """

    y: Any
    z: Any
    pre: Any
    post: Any
    comb: Any

    @property
    def branch_input(self) -> Any:
        """What the sub-layer reads: z where there is a norm, y elsewhere."""
        return self.y if self.z is None else self.z


class HyperConnections:
    """A trunk's hyper-connections, ready to call.

    Args:
        topology: of the trunk.
        backend: `host` (numpy arrays), `cuda` (CuPy arrays) or `auto`.
        fuse: `seed` (three launches after the projection), `none` (one a stage), `pre` (one launch a site),
            `pre-norm` (with the sub-layer's norm), or `boundary` (post with the next site's pre, in `run`).
        norm: run the sub-layers' RMSNorm here, so that branches get z; needs norm weights.
        gemm: the caller's projection, e.g. a vendor GEMM; None uses the emitted fma kernel, whose rows have the
            same bits in any batch.
        schedule: further options of `mhcgen.compile`: arch, placement, sync, threads, slab, mix_warp.
        backend_options: further options of the runner, e.g. `race` on the host.
        arithmetic: fields of `mhcgen.Config`: dtype, functions, sumsq, early_stop.

    Attributes:
        counts: calls by arm that launched something; warm-up does not count.
        parameters: loaded parameters on the backend, by name (`0.attn.fn`, `head.base`).
        report: the last WarmUp.

    Raises:
        UsageError: an option out of its range, `U-FUSE`; `U-MODEL`, a model that sites alone do not make.
        RefusedError: the schedule is not legal.
        EnvironmentFault: the backend is not usable.
    """

    def __init__(
        self,
        topology: Topology,
        *,
        backend: str = "auto",
        fuse: str = "seed",
        norm: bool = False,
        gemm: Gemm | None = None,
        schedule: Mapping[str, Any] | None = None,
        backend_options: Mapping[str, Any] | None = None,
        **arithmetic: Any,
    ) -> None:
        if fuse not in FUSES:
            raise UsageError(
                "U-FUSE",
                f"fuse must be one of {', '.join(FUSES)}, got {fuse!r}",
                where="fuse",
                hints=("other groups are for Programs: mhcgen.build(..., scope='trunk')",),
            )
        if fuse == "boundary" and gemm is not None:
            raise UsageError(
                "U-FUSE",
                "a boundary projects streams it has just made, so the projection cannot be the caller's",
                where="gemm",
                hints=("leave gemm out, or use fuse='pre'",),
            )
        spec = find_model(topology.model)
        if spec.delayed_pre:
            raise _unfit(spec.name, "collapses by the gates of the site before, and sites here run by their own")
        if spec.stream_last and gemm is not None:
            raise _unfit(spec.name, "stores the streams of a column side by side, and a GEMM reads them one by one")
        if spec.rank and gemm is not None:
            raise _unfit(spec.name, "projects streams that it has normed, and a GEMM here reads them as they come")
        self.topology = topology
        self.fuse = fuse
        self.norm = norm
        self._weighted = norm and spec.norm_weight
        self.sites = site_names(topology.layers)
        self.counts: Counter[str] = Counter()
        self.parameters: dict[str, Any] = {}
        self.report: WarmUp | None = None
        self._gemm = gemm
        self._options = {"norm": norm, **arithmetic}
        self._schedule = dict(schedule or {})
        self._backend = (backend, dict(backend_options or {}))
        self.modules: dict[str, Module] = {name: self._load(plan) for name, plan in self._plans().items()}

    @classmethod
    def from_config(
        cls, path: str | Path, *, model: str | None = None, exit: str | None = None, **options: Any
    ) -> HyperConnections:
        """From a model configuration; arguments as in `mhcgen.topology.read_topology` and the constructor.

        Raises:
            InputError: `I-CONFIG`, `I-TRUNK`; `I-SERIAL` where the trunk has plain residuals.
        """
        return cls(hyper_topology(path, model=model, exit=exit), **options)

    def _plans(self) -> dict[str, Plan]:
        """arm -> its Plan."""
        fused = self.fuse not in ("none", "seed")
        chain = {"boundary": "pre-norm" if self.norm else "pre"}.get(self.fuse, self.fuse)
        head = {"projection": "external" if self._gemm else "fma", "norm": False}
        wanted: dict[str, tuple[str, dict[str, Any]]] = {
            "expand": ("none", {"scope": "expand", "norm": False}),
            "finish": (chain, {"scope": "pre", "projection": "external"}),
            "post": ("none", {"scope": "post", "norm": False}),
            "mean": ("none", {"scope": "mean", "norm": False}),
        }
        if self._gemm is None:
            wanted["pre"] = (chain, {"scope": "pre", "projection": "fma"})
        if self.fuse == "boundary":
            wanted["boundary"] = ("boundary", {"scope": "boundary", "projection": "fma"})
        if self.topology.exit == "sum":
            wanted["sum"] = ("none", {"scope": "sum", "norm": False})
        if self.topology.exit == "head":
            wanted["head"] = ("pre" if fused else "none", {"scope": "head", **head})
        return {
            arm: compile(
                build_config(self.topology.config(**{**self._options, **options})), fuse=fuse, **self._schedule
            )
            for arm, (fuse, options) in wanted.items()
        }

    def _load(self, plan: Plan) -> Module:
        name, options = self._backend
        return plan.load(name, **options)

    # ---- parameters and warm-up -----------------------------------------------------------------
    def load(
        self,
        weights: str | Path | WeightFile | Mapping[str, Any],
        *,
        norms: Mapping[str, str] | bool = True,
        warm_up: bool = True,
    ) -> HyperConnections:
        """Take the parameters of every site, and of the head where there is one; then warm up.

        Args:
            weights: a checkpoint (see `mhcgen.weights`), or numpy arrays by name in a trunk Program.
            norms: names of norm weights, as in `trunk_parameters`; read only with a norm.
            warm_up: compile and run every arm once, so that no later call compiles.

        Raises:
            InputError: as `trunk_parameters`; of a mapping `I-MISSING`, `I-UNKNOWN`, `I-SHAPE`.
            InputTypeError: `I-DTYPE`.
        """
        t = self.topology
        if isinstance(weights, Mapping):
            found = self._checked(weights)
        elif find_model(t.model).rank:
            raise _unfit(t.model, "has parameters that no checkpoint is read for: give load a mapping of arrays")
        else:
            found = trunk_parameters(
                weights,
                t.layers,
                t.streams,
                t.hidden,
                exit=t.exit,
                rows=t.rows,
                norm=norms if self._weighted else False,
            )
        self.parameters = {name: self._place(array) for name, array in found.items()}
        if warm_up:
            self.warm_up()
        return self

    def _checked(self, weights: Mapping[str, Any]) -> dict[str, Any]:
        program = build_config(self.topology.config(**{**self._options, "scope": "trunk"}))
        wanted = {tensor.name: program.shape(tensor.name, 0) for tensor in program.of_role("parameter")}
        for name in (*wanted, *weights):
            if name not in wanted or name not in weights:
                missing = name in wanted
                raise InputError(
                    "I-MISSING" if missing else "I-UNKNOWN",
                    f"parameter {name} is missing" if missing else f"the trunk has no parameter {name!r}",
                    where=name,
                    hints=("names are those of a trunk Program: mhcgen.build(..., scope='trunk')",),
                )
            array = weights[name]
            if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.shape != wanted[name]:
                raise InputError(
                    "I-SHAPE",
                    f"{name} is {type(array).__name__} {getattr(array, 'dtype', '')} {getattr(array, 'shape', '')}, "
                    f"and a numpy fp32 array {list(wanted[name])} is wanted",
                    where=name,
                )
        return {name: np.ascontiguousarray(weights[name]) for name in wanted}

    def _place(self, array: np.ndarray[Any, Any]) -> Any:
        """A numpy array where the backend wants it."""
        if self.modules["post"].runner.name == "host":
            return array
        from mhcgen.backends.cuda import to_device

        return to_device(array)

    def warm_up(self, arms: tuple[str, ...] | None = None, *, twins: bool = True) -> WarmUp:
        """Compile and run arms once on zeros; afterwards a call that would have to compile is an error.

        Args:
            arms: names of arms; all by default.
            twins: also the twins for arrays that are not 16-byte aligned.

        Returns:
            What was built.

        Raises:
            UsageError: `U-ARM`, no such arm, or none at all.
            InternalError: `X-WARM-UP`, an arm launched other kernels than its plan has.
            CompileError, EnvironmentFault: of the backend.
        """
        chosen = tuple(self.modules) if arms is None else arms
        unknown = [arm for arm in chosen if arm not in self.modules]
        if unknown or not chosen:
            raise UsageError(
                "U-ARM",
                f"there is no arm {unknown[0]!r}" if unknown else "there is nothing to warm up",
                where="arms",
                hints=(f"arms: {', '.join(self.modules)}",),
            )
        start = time.perf_counter()
        pairs = [(arm, twin) for arm in chosen for twin in ((False, True) if twins else (False,))]
        built = [warm(arm, self.modules[arm], twin, self._place) for arm, twin in pairs]
        self.report = WarmUp(tuple(built), time.perf_counter() - start)
        LOGGER.info("%s", self.report)
        return self.report

    def workspace(self, tokens: int) -> Workspace:
        """Buffers for calls of up to that many tokens, which then allocate nothing."""
        return Workspace(self.modules, tokens)

    # ---- running an arm -------------------------------------------------------------------------
    def _run(
        self, arm: str, workspace: Workspace | None, tensors: dict[str, Any], counted: str = ""
    ) -> dict[str, Any]:
        module = self.modules[arm]
        if self.report is not None and module.needs_compiling(**tensors):
            raise LaunchError(
                "E-COLD",
                f"arm {arm} would have to compile for these arrays, and warm-up is over",
                where=arm,
                hints=("warm up with twins=True, or pass arrays that are 16-byte aligned",),
            )
        if workspace is not None and workspace.modules is not self.modules:
            raise UsageError("U-WORKSPACE", "the workspace belongs to another HyperConnections", where="workspace")
        first = next(iter(tensors.values()))
        tokens = int(first.shape[0]) if getattr(first, "shape", ()) else 0
        out = None if workspace is None else workspace.outputs(arm, tokens)
        results = module(out=out, **tensors)
        for launch in module.launches:
            if launch.report is not None:
                launch.report.raise_if_found()
        if workspace is not None:
            workspace.turn(arm)
        if module.launches:
            self._engage(counted or arm, arm, tokens)
        return results

    def _engage(self, counted: str, arm: str, tokens: int) -> None:
        self.counts[counted] += 1
        if self.counts[counted] == 1:
            module, t = self.modules[arm], self.topology
            LOGGER.info(
                "arm %s engaged: fuse %s, n %d, H %d, T %d, launches %d (%s), backend %s, class %s, text %s",
                counted,
                module.plan.options.fuse,
                t.streams,
                t.hidden,
                tokens,
                len(module.launches),
                " ".join(launch.kernel for launch in module.launches),
                module.runner.name,
                module.plan.numeric_class,
                module.plan.emitted_sha256[:12],
            )

    def _of(self, site: str, arm: str) -> dict[str, Any]:
        """What an arm takes of the parameters of a site, or of `head`, by bare name."""
        names = [tensor.name for tensor in self.modules[arm].program.of_role("parameter")]
        return self._named(site, *names)

    def _named(self, site: str, *names: str) -> dict[str, Any]:
        found = {name: self.parameters.get(at(site, name)) for name in names}
        if any(array is None for array in found.values()):
            known = sorted({name.rpartition(".")[0] for name in self.parameters})
            raise UsageError(
                "U-SITE",
                f"no parameters of site {site!r} are loaded",
                where=str(site),
                hints=(f"sites: {', '.join(known)}" if known else "load(weights) first",),
            )
        return found

    def _project(self, x: Any, fn: Any) -> Any:
        """mixes by the caller's GEMM over all rows."""
        assert self._gemm is not None
        return self._gemm(x.reshape(x.shape[0], fn.shape[1]), fn)

    # ---- arms -----------------------------------------------------------------------------------
    def expand(self, embeddings: Any, workspace: Workspace | None = None) -> Any:
        """x [T, n, H]: n copies of the embeddings [T, H]. The start of a trunk: a workspace is rewound."""
        if workspace is not None:
            workspace.rewind()
        return self._run("expand", workspace, {"e": embeddings})["x"]

    def pre(self, site: str, x: Any, workspace: Workspace | None = None) -> SiteInput:
        """Projection and finish of a site, for streams x [T, n, H].

        A row's bits do not depend on the batch, unless the projection is the caller's GEMM and varies with T.
        """
        if self._gemm is None:
            return self._chain("pre", workspace, {"x": x, **self._of(site, "pre")})
        self._no_gemm_here(workspace)
        return self.finish(site, x, self._project(x, self._named(site, "fn")["fn"]))

    def pre_exact(self, site: str, x: Any, workspace: Workspace | None = None) -> SiteInput:
        """`pre` with every row's bits those of a call with that row alone, whatever the projection.

        The emitted projection has that property by its reduction order. A caller's GEMM is called once a row.
        """
        if self._gemm is None:
            return self._chain("pre", workspace, {"x": x, **self._of(site, "pre")}, "pre_exact")
        self._no_gemm_here(workspace)
        fn = self._named(site, "fn")["fn"]
        mixes = self.modules["finish"].runner.empty((x.shape[0], self.topology.rows), "fp32")
        for row in range(x.shape[0]):
            mixes[row : row + 1] = self._project(x[row : row + 1], fn)
        tensors = {"x": x, "mixes": mixes, **self._of(site, "finish")}
        return self._chain("finish", None, tensors, "pre_exact")

    def _no_gemm_here(self, workspace: Workspace | None) -> None:
        if workspace is not None:
            raise UsageError(
                "U-WORKSPACE",
                "the caller's GEMM allocates its result, and a workspace promises that nothing is allocated",
                where="workspace",
                hints=("project into a buffer of your own and call finish with it", "or leave gemm out"),
            )

    def finish(self, site: str, x: Any, mixes: Any, workspace: Workspace | None = None) -> SiteInput:
        """The pre chain with its mixes given, as projected and not yet rescaled; of normed streams if it has them."""
        return self._chain("finish", workspace, {"x": x, "mixes": mixes, **self._of(site, "finish")})

    def _chain(self, arm: str, workspace: Workspace | None, tensors: dict[str, Any], counted: str = "") -> SiteInput:
        made = self._run(arm, workspace, tensors, counted)
        return SiteInput(made["y"], made.get("z"), made.get("pre"), made["post"], made["comb"])

    def post(self, f: Any, x: Any, made: SiteInput, workspace: Workspace | None = None) -> Any:
        """New streams: post f + comb^T x. x is the streams that the site's pre read, not the layer's."""
        return self._run("post", workspace, {"x": x, "f": f, "post": made.post, "comb": made.comb})["x_next"]

    def boundary(
        self, site: str, f: Any, x: Any, made: SiteInput, workspace: Workspace | None = None
    ) -> tuple[Any, SiteInput]:
        """post of a site and pre of the next, `site`, in one launch: the new streams, and what pre made.

        Raises:
            UsageError: `U-ARM`, built without fuse="boundary".
        """
        if "boundary" not in self.modules:
            raise UsageError("U-ARM", "there is no boundary arm", where="fuse", hints=("build with fuse='boundary'",))
        tensors = {"x": x, "f": f, "post": made.post, "comb": made.comb, **self._of(site, "boundary")}
        got = self._run("boundary", workspace, tensors)
        following = SiteInput(got["y"], got.get("z"), got.get("pre_next"), got["post_next"], got["comb_next"])
        return got["x_next"], following

    def mean(self, x: Any, workspace: Workspace | None = None) -> Any:
        """y [T, H]: unweighted mean of the streams, whatever the trunk's exit; what auxiliary readers take."""
        return self._run("mean", workspace, {"x": x})["y"]

    def exit(self, x: Any, workspace: Workspace | None = None) -> Any:
        """y [T, H]: the streams' end, by mean, sum or the gated head as the topology says."""
        if self.topology.exit != "head":
            return self._run(self.topology.exit, workspace, {"x": x})["y"]
        parameters = self._of("head", "head")
        if self._gemm is not None:
            self._no_gemm_here(workspace)
            parameters["mixes"] = self._project(x, self._named("head", "fn")["fn"])
        return self._run("head", workspace, {"x": x, **parameters})["y"]

    # ---- a whole trunk --------------------------------------------------------------------------
    def run(self, embeddings: Any, branches: SubLayers, workspace: Workspace | None = None) -> Any:
        """Embeddings [T, H] through every site to the exit's y [T, H].

        Args:
            embeddings: in the streams' dtype.
            branches: sub-layers by site name (`0.attn`, `0.ffn`, ...), or one function of name and input. In a
                workspace a branch may leave its result in `workspace.f()`; its input is a buffer that the next
                pre overwrites, so with fuse="boundary" it must not be returned as it is (`I-OVERLAP`).
            workspace: allocate nothing; the result is one of its buffers.

        Raises:
            InputError: `I-BRANCH`, a site has no branch, or one that cannot be called, or there is no such site;
                `I-*` of its result.
        """
        if isinstance(branches, Mapping):
            check_branches(self.sites, branches, "site")
        elif not callable(branches):
            raise InputError(
                "I-BRANCH", f"branches is a {type(branches).__name__}, neither a mapping nor a function",
                where="branches", hints=("map site names to sub-layers",),
            )
        x = self.expand(embeddings, workspace)
        made = self.pre(self.sites[0], x, workspace)
        for site, following in zip(self.sites, (*self.sites[1:], ""), strict=True):
            z = made.branch_input
            f = branches[site](z) if isinstance(branches, Mapping) else branches(site, z)
            if following and self.fuse == "boundary":
                x, made = self.boundary(following, f, x, made, workspace)
                continue
            x = self.post(f, x, made, workspace)
            if following:
                made = self.pre(following, x, workspace)
        return self.exit(x, workspace)


def _unfit(model: str, why: str) -> UsageError:
    return UsageError(
        "U-MODEL",
        f"{model} {why}",
        where="topology",
        hints=("use the Program of the whole trunk: mhcgen.build(..., scope='trunk')",),
    )
