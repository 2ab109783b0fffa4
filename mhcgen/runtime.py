"""A Plan made callable: arrays in by name, arrays out by name.

`Module` checks what it is given, allocates what it was not given, and launches the Plan's kernels in order on a
runner: the CPU executor, or CuPy on the caller's current stream and device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mhcgen.errors import InputError, InputTypeError, UsageError
from mhcgen.ir import Stage, Tensor
from mhcgen.lower import signature, tensors_of
from mhcgen.passes.fuse import OPAQUE_KINDS
from mhcgen.passes.stamp import stamp_count
from mhcgen.plan import Kernel, Plan
from mhcgen.runners import NUMPY_DTYPES as NUMPY_DTYPES
from mhcgen.runners import CudaRunner as CudaRunner
from mhcgen.runners import HostRunner as HostRunner
from mhcgen.runners import Runner as Runner
from mhcgen.runners import cuda_usable as cuda_usable
from mhcgen.values import member, plain

if TYPE_CHECKING:
    from mhcgen.classes import ClassModule
    from mhcgen.ir import Program

VECTOR_ALIGNMENT = 16

#: A branch: the stage's operands by slot, to its result.
Branch = Callable[..., Any]


@dataclass(frozen=True)
class Launch:
    """What one launch was: the kernel that ran, its grid, and the runner's report (None on a GPU)."""

    kernel: str
    grid: tuple[int, int]
    scalar: bool
    report: Any


class Module:
    """A loaded Plan.

    Args:
        plan: a finished Plan.
        runner: where it runs.

    Attributes:
        counts: launches per kernel name since loading.
        launches: the launches of the last call, in order.
        stamps: of the last call, by kernel name: int64 [T, stamps, 2], wall nanoseconds and SM cycles.
    """

    def __init__(self, plan: Plan, runner: Runner) -> None:
        self.plan = plan
        self.program = plan.program
        self.runner = runner
        self.counts: dict[str, int] = {kernel.name: 0 for kernel in plan.kernels}
        self.launches: list[Launch] = []
        self.stamps: dict[str, Any] = {}
        self._order = launch_order(plan)
        #: tensor -> index in the order of what writes it
        self._written_by = {name: i for i, unit in enumerate(self._order) for name in _writes(plan, unit)}
        #: kernel name -> tensors behind its pointers, and names of parameters that it is the first to write
        self._pointers = {kernel.name: _pointers(plan, kernel) for kernel in plan.kernels}
        #: what a call writes to global memory, and allocates unless `out` gives it
        self.outputs = tuple(t for t in self.program.of_role("value", "result") if self._is_global(t.name))

    # ---- calling --------------------------------------------------------------------------------
    def __call__(
        self,
        *,
        out: Mapping[str, Any] | None = None,
        branches: Mapping[str, Branch] | None = None,
        launch_options: Mapping[str, Any] | None = None,
        **tensors: Any,
    ) -> dict[str, Any]:
        """Run the Program.

        Args:
            out: arrays to write results and intermediate values into, by tensor name; the rest is allocated.
            branches: opaque stage name to a callable of its operands by slot; needed where the Program has one.
            launch_options: `per_cluster`, the most tokens that a cluster of blocks takes (as few as keep all clusters
                resident, unless given); the rest is for the runner (host: order, seed, blocks, count_accesses; cuda:
                stream).
            tensors: every input and parameter by name; shapes and dtypes as in the Program.

        Returns:
            Every result by name; of fp8 the codes, uint8: `.view(ml_dtypes.float8_e4m3fn)` gives values.

        Raises:
            InputError: `I-MISSING`, `I-UNKNOWN`, `I-SHAPE`, `I-LAYOUT`, `I-TOKENS`, `I-BRANCH`, `I-OVERLAP`.
            InputTypeError: `I-DTYPE`, `I-ARRAY`.
            UsageError: `U-OPTION`, out, branches or launch_options that map no names, or options that there are not.
        """
        for what, given in (("out", out), ("branches", branches), ("launch_options", launch_options)):
            if given is not None and not isinstance(given, Mapping):
                raise UsageError(
                    "U-OPTION",
                    f"{what} must be a mapping by name, got {type(given).__name__}",
                    where=what,
                    hints=("give a dict, or leave it out",),
                )
        how = self._launch_options(launch_options or {})
        check_branches([s.name for s in self.program.stages_of_kind(*OPAQUE_KINDS)], branches or {}, "opaque stage")
        tokens = self._check_inputs(tensors)
        arrays: dict[str, Any] = dict(tensors)
        if out:
            for name, array in out.items():
                self._check_out(name, array, tokens)
            self._check_overlaps(out, tensors)
            arrays |= out
        for tensor in self.outputs:
            if tensor.name not in arrays:
                arrays[tensor.name] = self.runner.empty(self.program.shape(tensor.name, tokens), tensor.dtype)
        self.launches = []
        for place, unit in enumerate(self._order):
            if isinstance(unit, Stage):
                self._branch(unit, arrays, branches or {}, tokens)
                later = {t: array for t, array in (out or {}).items() if self._written_by[t] > place}
                self._check_later(unit, arrays, later)
            elif tokens > 0 or unit.grid == "once":
                self._launch(unit, arrays, tokens, dict(how))
        return {t.name: arrays[t.name] for t in self.program.of_role("result")}

    def needs_compiling(self, **arrays: Any) -> bool:
        """Whether a call with these arrays among its own may have to compile first; see `prepare`."""
        checked = [self.runner.check_array(name, array) for name, array in arrays.items()]
        return not all(self.runner.is_compiled(twin) for twin in {False, self._misaligned(checked)})

    def prepare(self, misaligned: bool = False) -> None:
        """Compile now, so that no call has to: the emission, or its twin for arrays that are not 16-byte aligned.

        Raises:
            CompileError, EnvironmentFault: as the first call would.
        """
        self.runner.module(misaligned)

    def _misaligned(self, arrays: Iterable[Any]) -> bool:
        return any(self.runner.address(array) % VECTOR_ALIGNMENT for array in arrays)

    def _is_global(self, tensor: str) -> bool:
        """Whether any kernel has a pointer to it (opaque stages always do)."""
        opaque = any(tensor in (*s.reads, *s.writes) for s in self.program.stages_of_kind(*OPAQUE_KINDS))
        return opaque or any(tensor in names for names, _ in self._pointers.values())

    def _launch_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What is given, checked, before anything is launched; a number may be any kind of integer."""
        known = ("per_cluster", *self.runner.options)
        for option in given:
            if option not in known:
                raise UsageError(
                    "U-OPTION",
                    f"there is no launch option {option!r} on {self.runner.name}",
                    where="launch_options",
                    hints=(f"options: {', '.join(known)}",),
                )
        return {option: _launch_option(option, value) for option, value in given.items()}

    def _launch(self, kernel: Kernel, arrays: dict[str, Any], tokens: int, options: dict[str, Any]) -> None:
        # The gate launches kernels of its own with these arrays: variants of the plan's.
        names, fresh = self._pointers.get(kernel.name) or _pointers(self.plan, kernel)
        most = options.pop("per_cluster", 0)
        args = [arrays[name] for name in names]
        scalar = self._misaligned(args)
        grid, scalars = geometry(kernel, tokens, most)
        tail: list[Any] = [*scalars]
        if kernel.cluster > 1:
            options["cluster"] = (1, kernel.cluster, 1)
        if kernel.phases:
            # One more stamp than phases for each team: where it starts.
            shape = (tokens, stamp_count(kernel), 2)
            self.stamps[kernel.name] = self.runner.empty(shape, "int64")
            tail = [self.stamps[kernel.name], *tail]
        report = self.runner.launch(kernel, scalar, grid, [*args, *tail], fresh, **options)
        self.counts[kernel.name] += 1
        self.launches.append(Launch(kernel.name, grid, scalar, report))

    def _branch(self, stage: Stage, arrays: dict[str, Any], branches: Mapping[str, Branch], tokens: int) -> None:
        operands = {slot: arrays[name] for slot, name in stage.operands}
        made = branches[stage.name](**operands)
        ((_, name),) = stage.results
        self._check_array(self.program.tensor(name), made, tokens)
        arrays[name] = made

    # ---- checks ---------------------------------------------------------------------------------
    def _check_inputs(self, tensors: Mapping[str, Any]) -> int:
        wanted = self.program.of_role("input", "parameter")
        known = {tensor.name for tensor in wanted}
        for name in tensors:
            if name not in known:
                raise InputError(
                    "I-UNKNOWN",
                    f"the Program has no input {name!r}",
                    where=name,
                    notes=(f"inputs: {', '.join(sorted(known))}",),
                    hints=("remove it or correct its name",),
                )
        tokens: int | None = None
        first = ""
        for tensor in wanted:
            if tensor.name not in tensors:
                raise InputError(
                    "I-MISSING",
                    f"input {tensor.name} is missing",
                    where=tensor.name,
                    notes=(f"it is {tensor.dtype} of shape {_shape_text(self.plan, tensor)}",),
                    hints=(f"pass {tensor.name}=...",),
                )
            array = self.runner.check_array(tensor.name, tensors[tensor.name])
            if "T" in tensor.shape:
                if array.ndim != len(tensor.shape):
                    raise _shape_error(self.plan, tensor, array.shape)
                have = int(array.shape[tensor.shape.index("T")])
                if tokens is None:
                    tokens, first = have, tensor.name
                elif have != tokens:
                    raise InputError(
                        "I-SHAPE",
                        f"{tensor.name} has {have} tokens and {first} has {tokens}",
                        where=tensor.name,
                        hints=("every per-token input has the same T",),
                    )
        assert tokens is not None
        limit = 2**31 // self.program.dim("n") - 1
        if tokens > limit:
            raise InputError("I-TOKENS", f"T = {tokens} exceeds {limit}", where=first, hints=("split the batch",))
        for tensor in wanted:
            self._check_array(tensor, tensors[tensor.name], tokens)
        return tokens

    def _check_array(self, tensor: Tensor, array: Any, tokens: int) -> None:
        array = self.runner.check_array(tensor.name, array)
        have = self.runner.dtype_name(array)
        want = NUMPY_DTYPES[tensor.dtype]
        if have != want.name:
            raise InputTypeError(
                "I-DTYPE",
                f"{tensor.name} has dtype {have}, and {want.name} ({tensor.dtype}) is wanted",
                where=tensor.name,
                hints=(_dtype_hint(tensor.dtype, have),),
            )
        if tuple(array.shape) != self.program.shape(tensor.name, tokens):
            raise _shape_error(self.plan, tensor, array.shape)
        if not array.flags.c_contiguous:
            raise InputError(
                "I-LAYOUT",
                f"{tensor.name} is not C-contiguous (strides {array.strides})",
                where=tensor.name,
                hints=("pass a contiguous copy, e.g. np.ascontiguousarray or cupy.ascontiguousarray",),
            )

    def _check_out(self, name: str, array: Any, tokens: int) -> None:
        made = {t.name: t for t in self.program.of_role("value", "result")}
        if name not in made:
            raise InputError(
                "I-UNKNOWN",
                f"the Program writes no {name!r}",
                where=f"out[{name!r}]",
                hints=(f"it writes {', '.join(made)}",),
            )
        self._check_array(made[name], array, tokens)
        if not getattr(array.flags, "writeable", True):  # CuPy's arrays cannot be read-only
            raise InputError(
                "I-LAYOUT",
                f"out {name} is read-only",
                where=f"out[{name!r}]",
                hints=("give an array that may be written",),
            )

    def _check_overlaps(self, out: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
        """What is written shares memory with nothing that is read, and with nothing else that is written."""
        taken = [(f"input {name}", *self._span(array)) for name, array in tensors.items()]
        for name, array in out.items():
            start, end = self._span(array)
            for other, begin, stop in taken:
                if start < stop and begin < end:
                    raise InputError(
                        "I-OVERLAP",
                        f"out {name} overlaps {other}",
                        where=f"out[{name!r}]",
                        hints=("give each result memory of its own; inputs are never mutated",),
                    )
            taken.append((f"out {name}", start, end))

    def _check_later(self, stage: Stage, arrays: Mapping[str, Any], later: Mapping[str, Any]) -> None:
        """What a branch made is not in memory of the caller's that a later kernel writes."""
        ((_, name),) = stage.results
        start, end = self._span(arrays[name])
        for other, array in later.items():
            begin, stop = self._span(array)
            if start < stop and begin < end:
                raise InputError(
                    "I-OVERLAP",
                    f"{name}, which {stage.name} returned, overlaps out {other}, which is written later",
                    where=f"branches[{stage.name!r}]",
                    hints=("return an array of its own, or one of the operands",),
                )

    def _span(self, array: Any) -> tuple[int, int]:
        start = self.runner.address(array)
        return start, start + int(array.nbytes)


def _pointers(plan: Plan, kernel: Kernel) -> tuple[tuple[str, ...], tuple[str, ...]]:
    names = tensors_of(plan, kernel)
    pairs = zip(signature(plan, kernel).params, names, strict=False)
    return names, tuple(p.name for p, name in pairs if p.writable and plan.made_in(kernel, name))


def _shape_text(plan: Plan, tensor: Tensor) -> str:
    sizes = [str(d) if d == "T" else str(plan.program.dim(d)) for d in tensor.shape]
    return f"[{', '.join(sizes)}]"


def check_branches(names: Sequence[str], branches: Mapping[str, Any], what: str) -> None:
    """Every name has a branch that can be called, and nothing else has one.

    Args:
        names: of all that need one.
        branches: what was given, by name.
        what: the names are of: `opaque stage`, `site`.

    Raises:
        InputError: `I-BRANCH`.
    """
    hint = f"{what}s: {', '.join(names)}" if names else "leave branches out: there is none"
    for name in (*names, *branches):
        if name not in names:
            wrong = f"there is no {what} {name!r} for a branch"
        elif not callable(branches.get(name)):
            got = f"a {type(branches[name]).__name__}" if name in branches else "no callable"
            wrong = f"there is the {what} {name}, and {got} was given for it"
        else:
            continue
        raise InputError("I-BRANCH", wrong, where=f"branches[{name!r}]", hints=(hint,))


def _shape_error(plan: Plan, tensor: Tensor, have: tuple[int, ...]) -> InputError:
    return InputError(
        "I-SHAPE",
        f"{tensor.name} has shape {list(have)}, and {_shape_text(plan, tensor)} is wanted",
        where=tensor.name,
        notes=(f"this emission is for n = {plan.program.dim('n')}, H = {plan.program.dim('H')}",),
        hints=("emit for the shape you have, or pass the array of this shape",),
    )


def _dtype_hint(want: str, have: str) -> str:
    if have == "void16" and want == "bf16":
        return "numpy's archives carry bf16 as raw bytes: use array.view(ml_dtypes.bfloat16) if that is what it holds"
    if have == "void16":
        return (
            "these are raw bytes, as which numpy's archives carry bf16: build the Program with dtype bf16, or give "
            f"array.view(ml_dtypes.bfloat16).astype({NUMPY_DTYPES[want].name})"
        )
    if want == "bf16" and have == "uint16":
        return "plain uint16 is never taken for bf16; use array.view(ml_dtypes.bfloat16) if that is what it holds"
    if want.startswith("fp8") and have.startswith("float8"):
        return "codes of fp8 are kept as bytes: use array.view(numpy.uint8)"
    return f"convert it explicitly to {NUMPY_DTYPES[want].name}"


def _launch_option(option: str, value: Any) -> Any:
    """The value of a launch option as runners take it; what they alone know (a stream) is left to them."""
    wanted, fits = "", True
    if option == "blocks" and value is not None:
        wanted = "ids of blocks, or None for all"
        try:
            value = [plain(option, block) for block in value]  # once: every kernel takes them
        except TypeError:  # nothing to go through, an array of no dimension among them
            fits = False
        fits = fits and all(type(block) is int for block in value)
    elif option == "order":
        from mhcgen.backends.host.abi import ORDERS

        wanted, fits = f"one of {', '.join(ORDERS)}", isinstance(value, str) and value in ORDERS
    elif option == "count_accesses":
        value = plain(option, value)
        wanted, fits = "true or false", isinstance(value, bool)
    elif option in ("per_cluster", "seed"):
        value = plain(option, value)
        fits = type(value) is int and (option == "seed" or value >= 1)
        wanted = "an integer" if option == "seed" else "a number of tokens from 1 on"
    if fits:
        return value
    raise UsageError(
        "U-OPTION", f"{option} is {wanted}, got {value!r}", where=f"launch_options[{option!r}]",
        hints=("leave it out",),
    )


def geometry(kernel: Kernel, tokens: int, most: int = 0) -> tuple[tuple[int, int], tuple[int, ...]]:
    """The grid of a launch, and the scalar arguments it ends with: tokens per cluster where there are any, tokens.

    Args:
        kernel: what is launched.
        tokens: T.
        most: tokens that a cluster takes, no more than the kernel has room for; 0 for the kernel's own choice.
    """
    blocks = kernel.grid_blocks
    if kernel.grid == "once":
        return (1, 1), (tokens,)
    if kernel.cluster == 1:
        return (tokens, blocks), (tokens,)
    per_cluster = min(kernel.tokens, most) if most else kernel.tokens_per_cluster(tokens)
    return (-(-tokens // per_cluster), blocks), (per_cluster, tokens)


def launch_order(plan: Plan) -> tuple[Kernel | Stage, ...]:
    """Kernels and opaque stages in an order that respects every tensor."""
    done: set[str] = {t.name for t in plan.program.of_role("input", "parameter")}
    units: list[Kernel | Stage] = []
    waiting: list[Kernel | Stage] = [
        *plan.kernels,
        *plan.program.stages_of_kind(*OPAQUE_KINDS),
    ]
    while waiting:
        for unit in waiting:
            made = _writes(plan, unit)
            if all(t in done or t in made for stage in _stages(plan, unit) for t in stage.reads):
                units.append(unit)
                done |= made
                waiting.remove(unit)
                break
    return tuple(units)


def _stages(plan: Plan, unit: Kernel | Stage) -> tuple[Stage, ...]:
    return (unit,) if isinstance(unit, Stage) else plan.kernel_stages(unit)


def _writes(plan: Plan, unit: Kernel | Stage) -> set[str]:
    return {tensor for stage in _stages(plan, unit) for tensor in stage.writes}


def load(plan: Plan, backend: str = "auto", **options: Any) -> Module:
    """A Module for a Plan.

    Args:
        plan: a finished Plan.
        backend: `host`, `cuda`, or `auto` (cuda where it is usable).
        options: those of `HostRunner` or `CudaRunner`.

    Raises:
        UsageError: `U-BACKEND`; `U-OPTION`, the runner has no such option; `U-PLAN`, passes of the Plan have not run.
        EnvironmentFault: no compiler, no GPU.
    """
    plan.require_finished()
    member("backend", backend, ("auto", "host", "cuda"), "U-BACKEND")
    if backend == "auto":
        backend = "cuda" if cuda_usable() else "host"
    runner = HostRunner if backend == "host" else CudaRunner
    known_options(options, runner, ("plan",), f"load on {backend}")
    return Module(plan, runner(plan, **options))


def known_options(options: Iterable[str], of: Callable[..., Any], own: tuple[str, ...], what: str) -> None:
    """Options are keywords of what they are handed on to, whose own arguments are not among them.

    Raises:
        UsageError: `U-OPTION`.
    """
    known = [name for name in inspect.signature(of).parameters if name not in own]
    for option in options:
        if option not in known:
            raise UsageError(
                "U-OPTION", f"there is no option {option!r} of {what}", where=option,
                hints=(f"options: {', '.join(known)}",),
            )


def load_classes(program: Program, fuse: str = "none", backend: str = "auto", **options: Any) -> ClassModule:
    """A callable with a schedule for few tokens and one for many; see `mhcgen.classes.load_classes`."""
    from mhcgen.classes import load_classes

    return load_classes(program, fuse, backend, **options)
