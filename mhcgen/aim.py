"""Inputs under construction: how inner values of a Program are given a wanted value from outside.

Used by the makers of `mhcgen.inputs`. Streams are [T, n, H] throughout; what a Program stores stream-last is turned
when the inputs are finished.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mhcgen.combs import comb_kind
from mhcgen.inputs import Float64, Inputs, make_inputs, numpy_dtype, uniform
from mhcgen.ir import Dim, Program, Stage
from mhcgen.stages import COMB_STAGES, LOW_RANK, STREAM_LAST, STREAMS


@dataclass(frozen=True)
class Norm:
    """A stage that divides by a root mean square of streams.

    Args:
        rowsq: the stage.
        mixes: given mixes that it divides; None where a projection of the Program makes them, or it divides streams.
    """

    rowsq: Stage
    mixes: str | None

    @property
    def eps(self) -> float:
        """eps of the RMS."""
        return float(self.rowsq.attr("eps"))

    @property
    def eps_place(self) -> str:
        """Where eps stands: `in`, `out` or `clamp`."""
        return str(self.rowsq.option("eps_place", "in"))


@dataclass(frozen=True)
class Site(Norm):
    """One site's gates, what feeds them and the matrix they lead to.

    Args:
        gates: the gates.
        matrix: the stage that makes the matrix; None where none reads the site's logits.
    """

    gates: Stage
    matrix: Stage | None

    @property
    def limit(self) -> float:
        """Largest magnitude of logits that fp32 can take."""
        return float("inf") if self.matrix is None else limit_of(self.matrix)


class Aim:
    """Inputs in float64, and the wiring needed to give inner values a wanted value."""

    def __init__(self, program: Program, tokens: int) -> None:
        self.program, self.tokens = program, tokens
        self.n = program.dim("n")
        self.values: dict[str, Float64] = {
            name: self._turned(name, array.astype(np.float64))
            for name, array in make_inputs(program, tokens, seed=1).items()
        }
        self.sites: list[Site] = []
        for gates in program.stages_of_kind("gates"):
            rowsq = program.stage(program.writers[gates.operand("mixes_scaled")])
            mixes = rowsq.operand("mixes")
            readers = program.readers.get(dict(gates.results).get("logits", ""), ())
            matrix = next((s for s in map(program.stage, readers) if s.kind in COMB_STAGES), None)
            self.sites.append(Site(rowsq, mixes if mixes in self.values else None, gates, matrix))
        #: what norms each stream alone, and the gates that its projection leads to
        self.norms = [Norm(stage, None) for stage in program.stages_of_kind("norm_streams")]
        self.low_rank = program.stages_of_kind(*LOW_RANK)
        #: matrices of given logits, and where these are: (stage, parameter, index of the first)
        self.given: list[tuple[Stage, str, int]] = []
        for stage in program.stages_of_kind(*COMB_STAGES):
            logits = dict(stage.operands).get("logits", "")
            if logits in self.values:
                self.given.append((stage, logits, 0))
            elif logits and program.stage(program.writers[logits]).kind == "static_gates":
                base = program.stage(program.writers[logits]).operand("base")
                self.given.append((stage, base, 2 * self.n))

    def shape_of(self, name: str) -> tuple[Dim, ...]:
        """Shape of a tensor by symbols, streams as [T, n, H]."""
        shape = self.program.tensor(name).shape
        return STREAMS if shape == STREAM_LAST else shape

    def _turned(self, name: str, array: Float64) -> Float64:
        return np.swapaxes(array, 1, 2) if self.program.tensor(name).shape == STREAM_LAST else array

    def random(self, name: str, *shape: int) -> Float64:
        """Uniform [-1, 1) float64 numbers of a stream of their own."""
        return uniform(f"discriminating {name}", 1, shape).astype(np.float64)

    def signs(self, name: str, *shape: int) -> Float64:
        """+1 or -1."""
        return np.where(self.random(name, *shape) < 0, -1.0, 1.0)

    def set_streams(self, name: str, wanted: Float64) -> bool:
        """Make stream tensor `name` equal `wanted` [T, n, H]; False where inputs alone cannot.

        Through a norm of each stream its weight is 0, and the streams come out divided by their root mean square.
        Through a post stage the streams are sent round by a cyclic permutation with post gates 0, so a comb
        read the other way round puts them elsewhere. Through an expand only stream 0 of `wanted` counts.
        """
        if name in self.values:
            self.values[name] = wanted
            return True
        writer = self.program.stage(self.program.writers[name])
        if writer.kind == "expand" and writer.operand("e") in self.values:
            self.values[writer.operand("e")] = wanted[:, 0]
            return True
        if writer.kind == "norm_streams" and writer.operand("weight") in self.values:
            self.values[writer.operand("weight")] = np.zeros_like(self.values[writer.operand("weight")])
            return self.set_streams(writer.operand("x"), wanted)
        if writer.kind == "post" and all(operand in self.values for operand in writer.reads):
            comb, post = writer.operand("comb"), writer.operand("post")
            self.values[writer.operand("x")] = np.roll(wanted, -1, axis=1)
            self.values[comb] = np.broadcast_to(cycle(self.n, 1), self.values[comb].shape)
            self.values[post] = np.zeros_like(self.values[post])
            return True
        return False

    def streams(self, site: Norm) -> tuple[str, tuple[int, ...]]:
        """Name and shape [T, n, H] of the streams a site reads."""
        return site.rowsq.operand("x"), (self.tokens, self.n, self.program.dim("H"))

    def root(self, site: Norm, mean_square: float) -> float:
        """What the mixes of a site are divided by at a mean square of its streams."""
        root = float(np.sqrt(mean_square))
        if site.eps_place == "in":
            return float(np.sqrt(mean_square + site.eps))
        return root + site.eps if site.eps_place == "out" else max(root, self.small(site))

    def small(self, site: Norm) -> float:
        """Size of stream elements at which the eps of a site weighs as much as they do; 0 without eps."""
        if site.eps_place == "in":
            return float(np.sqrt(site.eps))
        # A clamp is of the norm of all n*H elements.
        return site.eps if site.eps_place == "out" else site.eps / float(np.sqrt(self.program.dim("K")))

    def set_logits(self, wanted: Callable[[Site], Float64]) -> None:
        """Make the logits of every site `wanted(site)` [T, 2n + L], pre | post | comb.

        Where mixes and streams are given: streams of +1 and -1, so the RMS is 1 but for eps, which the mixes
        undo, and each token has its own logits. Elsewhere, and where an activation comes before base, base
        carries the logits of token 0; such gates have no bound, and many sites in a row get smaller ones.
        """
        for site in self.sites:
            name, shape = self.streams(site)
            logits = self._in_range(site, wanted(site))
            scale, base = site.gates.operand("scale"), site.gates.operand("base")
            affine = site.gates.option("form", "affine") == "affine"
            if affine and site.mixes is not None and self.set_streams(name, self.signs(name, *shape)):
                self.values[site.mixes] = logits * self.root(site, 1.0)
                self.values[scale], self.values[base] = np.ones(3), np.zeros(logits.shape[1])
            elif self.tokens:
                self.values[scale], self.values[base] = np.full(3, 2.0**-10), logits[0]

    def _in_range(self, site: Site, logits: Float64) -> Float64:
        """Logits at which the streams of the last of all sites still have a mean square that fp32 holds.

        Of gates that are the logits themselves, a site makes streams n pre post times as large.
        """
        if site.gates.option("form", "affine") == "affine":
            return logits
        most = float(np.sqrt(10.0 ** (17 / len(self.sites)) / self.n))
        return np.where(np.isfinite(logits), np.clip(logits, -most, most), logits)

    def set_mixes(self, name: str, wanted: Float64) -> None:
        """Make mixes of normed streams `wanted` [T, rows]; those that a projection makes are the first token's."""
        if name in self.values:
            self.values[name] = wanted
            return
        project = self.program.stage(self.program.writers[name])
        fn, ones = project.operand("fn"), np.ones((self.tokens, self.n, self.program.dim("H")))
        if self.tokens and fn in self.values and self.set_streams(project.operand("x"), ones):
            columns = self.values[fn].shape[1]
            self.values[fn] = np.repeat(wanted[0, :, None] / columns, columns, axis=1)

    def columns(self, site: Site) -> int:
        """Mixes of a site: pre n | post n | comb L."""
        return self.program.shape(site.gates.operand("base"), self.tokens)[0]

    def matrices(self) -> list[Stage]:
        """Stages whose logits can be given a value: those of the sites, and those of parameters."""
        return [s.matrix for s in self.sites if s.matrix is not None] + [stage for stage, _, _ in self.given]

    def with_comb(self, comb: Callable[[Stage], Float64]) -> Inputs:
        """Inputs whose comb logits are `comb(stage of the matrix)` [T, L] and whose gate logits are of order 1.

        Logits that are the same for all tokens are those of the first.
        """

        def wanted(site: Site) -> Float64:
            gates = self.random(f"gates {site.gates.name}", self.tokens, 2 * self.n)
            if site.matrix is None:
                return gates
            logits = comb(site.matrix).reshape(self.tokens, self.columns(site) - 2 * self.n)
            return np.concatenate([gates, logits], axis=1)

        self.set_logits(wanted)
        for stage, name, first in self.given if self.tokens else ():
            logits = comb(stage)[0].reshape(-1)
            self.values[name][first : first + len(logits)] = logits
        return self.finish()

    def around(self, value: float) -> Inputs | None:
        """Inputs whose comb logits are within 1 of `value`; None where there are none, or fp32 cannot take them."""
        stages = self.matrices()
        counts = {stage.name: comb_kind(stage).logits(self.n) for stage in stages}
        if not stages or min(counts.values()) < 1 or any(limit_of(stage) < abs(value) + 1 for stage in stages):
            return None
        return self.with_comb(lambda stage: value + self.random("comb", self.tokens, counts[stage.name]))

    def set_magnitude(self, site: Norm, magnitude: float, spread: float) -> bool:
        """Streams of a site within (1 +- spread) of `magnitude`, signs mixed if spread > 0; mixes to match.

        False where inputs alone cannot do it or the streams' dtype rounds the magnitude to 0.
        """
        name, shape = self.streams(site)
        if not float(np.float64(magnitude).astype(numpy_dtype(self.program.tensor(name).dtype))):
            return False
        wanted = np.full(shape, magnitude)
        if spread:
            wanted = wanted * self.signs(name, *shape) * (1.0 + spread * self.random(f"size {name}", *shape))
        if not self.set_streams(name, wanted):
            return False
        if site.mixes is not None:
            self.values[site.mixes] = self.values[site.mixes] * magnitude
        return True

    def finish(self) -> Inputs:
        """The inputs in their dtypes, C-contiguous."""
        found: Inputs = {}
        for tensor in self.program.of_role("input", "parameter"):
            with np.errstate(over="ignore"):
                array = self._turned(tensor.name, self.values[tensor.name]).astype(numpy_dtype(tensor.dtype))
            found[tensor.name] = np.ascontiguousarray(array)
        return found


def limit_of(matrix: Stage) -> float:
    """Largest magnitude of logits that fp32 can take."""
    return comb_kind(matrix).limit(matrix)


def cycle(n: int, shift: int) -> Float64:
    """Permutation matrix [from, to] that sends stream j to (j + shift) mod n."""
    return np.roll(np.eye(n), shift, axis=1)
