"""Kernels for the host executor's tests: their signatures, inputs and numpy references.

The `.cu` files mark each barrier with the scope of the race that its absence causes: `__syncwarp();  // same-warp`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mhcgen.backends.host import ORDERS, HostModule, KernelSignature, LaunchReport, Param

FOLDER = Path(__file__).parent / "kernels"
BLOCKS = 3
ROUNDS = 4
COLUMNS = 256

Array = npt.NDArray[Any]


def signature(name: str, **ctypes: str) -> KernelSignature:
    """A signature from `name="ctype"`; pointers to non-const are writable."""
    params = (Param(n, t, "*" in t and "const" not in t) for n, t in ctypes.items())
    return KernelSignature(name, tuple(params))


KERNELS = {
    "row_square_sum": ("reductions", {"x": "const float*", "out": "float*", "columns": "int"}),
    "tree_sum": ("reductions", {"x": "const float*", "out": "float*", "rounds": "int"}),
    "balance_shared": ("matrices", {"weights": "const float*", "out": "float*", "rounds": "int"}),
    "balance_shuffle": (
        "matrices",
        {"weights": "const float*", "out": "float*", "rounds": "int", "matrices": "int"},
    ),
    "mix_streams": (
        "matrices",
        {
            "x": "const __nv_bfloat16*",
            "weights": "const float*",
            "y": "__nv_bfloat16*",
            "scales": "float*",
            "columns": "int",
            "rounds": "int",
        },
    ),
    "split_roles": ("named", {"x": "const float*", "out": "float*", "data_threads": "int"}),
}


@dataclass
class Case:
    """Arguments of one launch and what must come out."""

    args: list[Any]
    outputs: dict[str, Array]
    expected: dict[str, Array]
    tolerance: float
    dynamic_shared: int = 0

    def bits(self) -> bytes:
        """All outputs as bytes."""
        return b"".join(array.tobytes() for array in self.outputs.values())

    def assert_correct(self) -> None:
        """Outputs agree with numpy in float64."""
        for name, array in self.outputs.items():
            got, want = array.astype(np.float64), self.expected[name]
            assert np.all(np.isfinite(got))
            assert np.max(np.abs(got - want)) <= self.tolerance * np.max(np.abs(want)), name


def source(file: str) -> str:
    """The text of a kernel file."""
    return (FOLDER / f"{file}.cu").read_text()


@cache
def module(file: str, *, race: bool, fibers: Any = None) -> HostModule:
    """A kernel file, built once per test process."""
    names = [name for name, (where, _) in KERNELS.items() if where == file]
    signatures = [signature(name, **KERNELS[name][1]) for name in names]
    return HostModule(source(file), signatures, name=file, race=race, fibers=fibers)


def case(kernel: str, threads: int) -> Case:
    """Inputs and expected outputs of a kernel for blocks of `threads`."""
    rng = np.random.default_rng(7)
    weights = rng.random((BLOCKS, 4, 4)).astype(np.float32) + np.float32(0.1)
    if kernel == "row_square_sum":
        x, out = _normal(rng, BLOCKS, COLUMNS), np.zeros(BLOCKS, np.float32)
        return Case([x, out, COLUMNS], {"out": out}, {"out": (x.astype(np.float64) ** 2).sum(1)}, 1e-6)
    if kernel == "tree_sum":
        x, out = _normal(rng, BLOCKS, threads), np.zeros(BLOCKS, np.float32)
        carry = np.zeros(BLOCKS)
        for _ in range(ROUNDS):
            carry = (x.astype(np.float64) + carry[:, None]).sum(1) * 0.001
        return Case([x, out, ROUNDS], {"out": out}, {"out": carry}, 1e-4, dynamic_shared=4 * threads)
    if kernel == "balance_shared":
        out = np.zeros((BLOCKS, 4, 4), np.float32)
        return Case([weights, out, ROUNDS], {"out": out}, {"out": _balanced(weights, ROUNDS)}, 1e-5)
    if kernel == "balance_shuffle":
        count = BLOCKS * threads // 16 - 1  # the last half warp has nothing to do
        many = rng.random((count, 4, 4)).astype(np.float32) + np.float32(0.1)
        out = np.zeros_like(many)
        return Case([many, out, ROUNDS, count], {"out": out}, {"out": _balanced(many, ROUNDS)}, 1e-5)
    if kernel == "mix_streams":
        return _mix_case(rng, weights)
    data = threads - 32
    x, out = _normal(rng, BLOCKS, data), np.zeros((BLOCKS, data), np.float32)
    reversed_x = x[:, ::-1].astype(np.float64)
    return Case([x, out, data], {"out": out}, {"out": np.roll(reversed_x, -32, axis=1)}, 0.0)


def launch(
    host: HostModule, kernel: str, threads: int, order: str = "ascending", seed: int = 0
) -> tuple[Case, LaunchReport]:
    """Run a kernel once on fresh inputs with poisoned outputs."""
    made = case(kernel, threads)
    report = host.launch(
        kernel,
        BLOCKS,
        threads,
        made.args,
        dynamic_shared=made.dynamic_shared,
        order=order,
        seed=seed,
        uninitialised=made.outputs.keys(),
    )
    return made, report


@dataclass(frozen=True)
class Mutant:
    """A kernel file with one barrier removed or weakened."""

    kernel: str
    line: int
    change: str
    scope: str
    text: str

    def __str__(self) -> str:
        return f"{self.kernel}-{self.line}-{self.change}"


def mutants() -> Iterator[Mutant]:
    """Each barrier of each file deleted; each block-wide one also weakened to a warp barrier."""
    for file in dict.fromkeys(where for where, _ in KERNELS.values()):
        text = source(file)
        for match in re.finditer(r"(__syncthreads|__syncwarp|sync_data)\([^)]*\);  // ([\w-]+)", text):
            line = text.count("\n", 0, match.start()) + 1
            kernel = [
                name
                for name in KERNELS
                if f"\n{name}(" in text[: match.start()] or f" {name}(" in text[: match.start()]
            ][-1]
            changes = {"deleted": ";"}
            if match[1] != "__syncwarp":
                changes["weakened"] = "__syncwarp();"
            for change, replacement in changes.items():
                mutated = text[: match.start()] + replacement + text[match.end() :]
                yield Mutant(kernel, line, change, match[2], mutated)


def _normal(rng: np.random.Generator, *shape: int) -> npt.NDArray[np.float32]:
    return rng.standard_normal(shape).astype(np.float32)


def _balanced(weights: Array, rounds: int, *, columns: bool = True) -> Array:
    m = weights.astype(np.float64)
    for _ in range(rounds):
        m = m / m.sum(-1, keepdims=True)
        if columns:
            m = m / m.sum(-2, keepdims=True)
    return m


def _mix_case(rng: np.random.Generator, weights: Array) -> Case:
    x = _normal(rng, BLOCKS, 4, COLUMNS).astype(ml_dtypes.bfloat16)
    y, scales = np.zeros_like(x), np.zeros(BLOCKS, np.float32)
    exact = x.astype(np.float64)
    scale = 1 / np.sqrt((exact**2).mean((1, 2)) + 1e-6)
    m = _balanced(weights * scale[:, None, None], ROUNDS, columns=False)
    return Case(
        [x, weights, y, scales, COLUMNS, ROUNDS],
        {"y": y, "scales": scales},
        {"y": m @ exact, "scales": scale},
        1e-2,
    )


__all__ = [
    "BLOCKS",
    "KERNELS",
    "ORDERS",
    "Case",
    "Mutant",
    "case",
    "launch",
    "module",
    "mutants",
    "signature",
    "source",
]


@dataclass(frozen=True)
class Broken:
    """A kernel body that breaks a rule of the executor.

    Args:
        rule: which; its first word is the kind of the finding, unless `kind` says otherwise.
        body: of the kernel.
        lines: of the finding's places.
        kind: of the finding, where the rule's name does not say.
        stops: the launch ends there.
        in_plain_mode: it is found without race mode too.
    """

    rule: str
    body: str
    lines: tuple[int, ...]
    kind: str = ""
    stops: bool = False
    in_plain_mode: bool = True

    def __str__(self) -> str:
        return self.rule

    def check(self, run: Callable[..., tuple[Array, LaunchReport]]) -> None:
        """What a run of the body reports: `run(body, race=...)` gives it behind the kernel's result."""
        for race in (True, False)[: 1 + self.in_plain_mode]:
            _, report = run(self.body, race=race)
            found = [finding for finding in report.findings if finding.rule == self.rule]
            assert found and found[0].lines == self.lines, report.text
            assert found[0].kind == (self.kind or self.rule.split("-")[0])
            assert report.completed is not self.stops
