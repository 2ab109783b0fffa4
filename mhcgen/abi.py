"""A C interface for an emission: header, launcher, loader, and snippets for CMake and Cargo.

```
NAME.h                plain C: arguments, statuses, workspace query, launch
NAME_launcher.cu      the launch by CUDA's runtime, compiled together with kernel.cu
NAME.sm_XX.cubin      machine code, where asked for
NAME_loader.c         the same launch by CUDA's driver, from the cubins
NAME.rs, build.rs     declarations and a build script for Cargo
CMakeLists.txt        a library target
```
`lower_abi` decides everything; templates under templates/abi/ print it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from mhcgen._version import __version__
from mhcgen.backends.archs import Arch, parse_arch
from mhcgen.emit import render
from mhcgen.errors import EnvironmentFault, UsageError
from mhcgen.functions import ITEMSIZES
from mhcgen.ir import Tensor
from mhcgen.lower import command_of, tensors_of
from mhcgen.passes.fuse import OPAQUE_KINDS, PRESETS
from mhcgen.plan import RESIDENT_BLOCKS, RESIDENT_CLUSTERS, Kernel, Plan
from mhcgen.runtime import VECTOR_ALIGNMENT, geometry, launch_order
from mhcgen.steps.context import identifier

#: What `--abi` takes.
ABIS = ("c",)
#: Alignment of a workspace and of each value in it: that of cudaMalloc.
ROUNDING = 256
#: (name, number, meaning); numbers are never reused, and whoever calls from another language copies them.
STATUSES = (
    ("MHC_OK", 0, "done, or nothing to do"),
    ("MHC_NULL_POINTER", 1, "a pointer is null"),
    ("MHC_NEGATIVE_TOKENS", 2, "the token count is negative"),
    ("MHC_TOO_MANY_TOKENS", 3, "the token count is over the limit of this emission"),
    ("MHC_MISALIGNED", 4, "a pointer is not a multiple of its alignment"),
    ("MHC_WORKSPACE_TOO_SMALL", 5, "the workspace has fewer bytes than the launch needs"),
    ("MHC_OVERLAP", 6, "memory that is written overlaps other memory of the call"),
    ("MHC_NOT_LOADED", 7, "the loader has loaded nothing for this device"),
    ("MHC_NO_CUBIN", 8, "no cubin fits this device"),
    ("MHC_NO_FILE", 9, "a cubin cannot be read"),
    ("MHC_CUDA_ERROR", 1000, "CUDA refused: from here on, 1000 and its own error number"),
)
#: dtype -> C type and Rust type of an element; what C has no type for travels as its bits.
_TYPES = {
    "fp32": ("float", "f32"),
    "bf16": ("uint16_t", "u16"),
    "fp16": ("uint16_t", "u16"),
    "int8": ("int8_t", "i8"),
    "fp8_e4m3": ("uint8_t", "u8"),
    "int32": ("int32_t", "i32"),
}
#: Tensor names that Rust takes for its own words.
_RUST_WORDS = frozenset({"fn", "in", "mod", "mut", "ref", "type", "use", "where", "loop", "match", "move"})
_NAME = re.compile(r"[a-z][a-z0-9_]{0,47}")
#: `build.rs` is the script beside the bindings, and headers that ours include are found by name; the others cannot
#: name a module of Rust, or are its roots.
_TAKEN = frozenset({
    "abstract", "as", "async", "await", "become", "box", "break", "build", "const", "continue", "crate", "cuda",
    "cuda_runtime", "do", "dyn", "else", "enum", "extern", "false", "final", "fn", "for", "gen", "if", "impl",
    "in", "let", "lib", "loop", "macro", "main", "match", "mod", "move", "mut", "override", "priv", "pub",
    "ref", "return", "self", "static", "stddef", "stdint", "stdio", "stdlib", "struct", "super", "trait",
    "true", "try", "type", "typeof", "unsafe", "unsized", "use", "virtual", "where", "while", "yield",
})


@dataclass(frozen=True)
class AbiRequest:
    """What `--abi` asks for.

    Args:
        name: of the files and, between `mhc_` and `_launch`, of the functions; empty for `default_name`.
        cubins: architectures to make machine code for.
    """

    name: str = ""
    cubins: tuple[str, ...] = ()


@dataclass(frozen=True)
class EmitAbi:
    """Everything the templates print.

    Args:
        name: of files and functions.
        fields: what all templates share.
        launcher_kernels: the kernels as the launcher names them.
        loader_kernels: as the loader names them.
        cubins: architectures in the order in which the loader tries them.
    """

    name: str
    fields: dict[str, Any]
    launcher_kernels: tuple[dict[str, Any], ...]
    loader_kernels: tuple[dict[str, Any], ...]
    cubins: tuple[Arch, ...]


def default_name(plan: Plan) -> str:
    """The preset's name as an identifier; groups and `none` are named after the scope."""
    fuse = plan.options.fuse
    if fuse != "none" and fuse in PRESETS:
        return fuse.replace("-", "_")
    return f"{plan.program.scope.replace('-', '_')}_{'unfused' if fuse == 'none' else 'fused'}"


def cubin_archs(names: tuple[str, ...]) -> tuple[Arch, ...]:
    """Architectures to make machine code for, the most particular first.

    Raises:
        UsageError: `U-ARCH`, one is unknown or has no machine code.
    """
    archs = tuple(dict.fromkeys(parse_arch(name, "--cubin") for name in names))
    for arch in archs:
        if arch.virtual:
            raise UsageError(
                "U-ARCH", f"{arch.name} has no machine code", where="--cubin", hints=(f"ask for sm_{arch.number}",)
            )
    return tuple(sorted(archs, key=lambda arch: (-arch.number, "af".find(arch.suffix or "f"), arch.name)))


def lower_abi(plan: Plan, request: AbiRequest) -> EmitAbi:
    """The EmitAbi of a finished Plan.

    Raises:
        UsageError: `U-ABI`, the Plan is not one launch sequence; `U-NAME`; `U-ARCH`.
    """
    name = request.name or default_name(plan)
    if not _NAME.fullmatch(name):
        raise UsageError(
            "U-NAME", f"{name!r} is no name for C functions", where="--name",
            hints=("small letters, digits and _, 48 at most, a letter first",),
        )
    if name in _TAKEN:
        raise UsageError(
            "U-NAME", f"files of the name {name} would stand in the way of others in C or Rust", where="--name",
            hints=(f"choose another name, e.g. mhc_{name}",),
        )
    cubins = cubin_archs(request.cubins)
    _check(plan, cubins)
    program = plan.program
    named = {tensor for kernel in plan.kernels for tensor in tensors_of(plan, kernel)}
    tensors = [tensor for tensor in program.tensors if tensor.name in named]
    given = [t for t in tensors if t.role in ("input", "parameter")] + [t for t in tensors if t.role == "result"]
    values = [t for t in tensors if t.role == "value"]
    archs = sorted({parse_arch(plan.options.arch), *cubins}, key=lambda arch: (arch.number, arch.suffix))
    fields: dict[str, Any] = {
        "header": _header(plan, name, request, cubins),
        "name": name,
        "upper": name.upper(),
        "streams": program.dim("n"),
        "hidden": program.dim("H"),
        "max_tokens": 2**31 // program.dim("n") - 1,  # as the Module of mhcgen.runtime
        "rounding": ROUNDING,
        "statuses": tuple({"name": n, "number": v, "meaning": meaning} for n, v, meaning in STATUSES),
        "members": tuple(_member(plan, tensor) for tensor in given),
        "spans": tuple(
            {**_size(plan, t), "alignment": _alignment(plan, t), "written": int(t.role == "result")} for t in given
        ),
        "values": tuple(_size(plan, t) for t in values),
        "carving": _carving(plan, values),
        "workspace": f"intermediate values, {len(values)} of them" if values else "none, so it may be null",
        "twin": (
            "This emission takes arrays that are aligned to their elements."
            if plan.options.scalar
            else "An emission with --scalar takes arrays that are aligned to their elements."
        ),
        "loading": _loading(name) if cubins else (),
        "nvcc_flags": tuple(f"-gencode=arch={arch.compute},code={arch.name}" for arch in archs),
        "cmake_archs": ";".join(f"{arch.number}{arch.suffix}-real" for arch in archs),
        "images": tuple(
            {
                "file": cubin_file(name, arch),
                "major": arch.number // 10,
                "minor": arch.number % 10,
                "exact": int(arch.suffix == "a"),
            }
            for arch in cubins
        ),
        "count": len(plan.kernels),
    }
    kernels = [_kernel(plan, kernel) for kernel in launch_order(plan) if isinstance(kernel, Kernel)]
    own = {kernel["symbol"]: f"mhc_{name}_{kernel['symbol'].removeprefix('mhc_')}" for kernel in kernels}
    return EmitAbi(
        name=name,
        fields=fields,
        launcher_kernels=tuple(
            {**k, "alias": own[k["symbol"]], "function": f"MHC_KERNEL({own[k['symbol']]})"} for k in kernels
        ),
        loader_kernels=tuple(
            {**k, "function": f"mhc_{name}_loaded[device].kernels[{i}]"} for i, k in enumerate(kernels)
        ),
        cubins=cubins,
    )


def cubin_file(name: str, arch: Arch) -> str:
    """File name of the machine code for an architecture."""
    return f"{name}.{arch.name}.cubin"


def abi_words(request: AbiRequest, cubins: tuple[Arch, ...]) -> str:
    """The options behind `request`, as a command line ends with them."""
    words = ["--abi c"]
    if request.name:
        words.append(f"--name {request.name}")
    if cubins:
        ascending = sorted(cubins, key=lambda arch: (arch.number, arch.suffix))
        words.append(f"--cubin {','.join(arch.name for arch in ascending)}")
    return " ".join(words)


def _check(plan: Plan, cubins: tuple[Arch, ...]) -> None:
    opaque = plan.program.stages_of_kind(*OPAQUE_KINDS)
    if opaque:
        raise UsageError(
            "U-ABI", f"the stage {opaque[0].name} is the engine's own, so that no single launch runs this Program",
            where="--abi",
            hints=("emit what lies between such stages, each apart: --scope pre, --scope boundary",),
        )
    if plan.options.stamps:
        raise UsageError("U-ABI", "a launcher passes no time stamps", where="--stamps", hints=("leave out --stamps",))
    clusters = any(kernel.cluster > 1 for kernel in plan.kernels)
    instead = ["--cluster 1"] * clusters + ["without --dependent"] * plan.options.dependent
    for arch in cubins:
        if instead and arch.number < 90:
            words = " and ".join(["clusters"] * clusters + ["dependent launches"] * plan.options.dependent)
            hint = f"emit for it apart: --arch {arch.name}, {', '.join(instead)}, and another --name"
            raise UsageError(
                "U-ARCH", f"this schedule has {words}, and {arch.name} has none", where="--cubin", hints=(hint,)
            )


def _header(plan: Plan, name: str, request: AbiRequest, cubins: tuple[Arch, ...]) -> tuple[str, ...]:
    program = plan.program
    return (
        f"Generated by mhcgen {__version__}; do not edit, run the command again.",
        f"command:  {command_of(plan)} {abi_words(request, cubins)}",
        f"model:    {program.model}, scope {program.scope}, n = {program.dim('n')} streams, H = {program.dim('H')}",
        f"class:    {program.numeric_class}",
        "licence:  this text is yours to use, change and ship without conditions.",
    )


def _loading(name: str) -> tuple[str, ...]:
    return (
        "",
        f"// Only with {name}_loader.c: loads the cubin that fits the device of the current context (its primary",
        "// one) from a folder, or an image that the caller has in memory. Once per device, before its first launch;",
        "// no launch may run in another thread meanwhile. Unload when nothing is in flight.",
        f"int mhc_{name}_load(const char *folder);",
        f"int mhc_{name}_load_image(const void *image);",
        f"int mhc_{name}_unload(void);",
    )


def _size(plan: Plan, tensor: Tensor) -> dict[str, Any]:
    """Bytes of a tensor: fixed, or per token."""
    count = ITEMSIZES[tensor.dtype]
    for size in plan.program.shape(tensor.name, 1):
        count *= size
    per_token = "T" in tensor.shape
    return {
        "name": identifier(tensor.name), "fixed": 0 if per_token else count, "per_token": count if per_token else 0
    }


def _carving(plan: Plan, values: list[Tensor]) -> tuple[str, ...]:
    """Statements that give each intermediate value its part of the workspace."""
    if not values:
        return ()
    lines = ["char *space = (char *)workspace;"]
    for tensor in values:
        size = _size(plan, tensor)
        lines += [
            f"void *const value_{size['name']} = space;  // {_comment(plan, tensor)}",
            f"space += MHC_ROUNDED(MHC_BYTES({size['fixed']}, {size['per_token']}, tokens));",
        ]
    return tuple(lines[:-1])  # nothing follows the last


def _alignment(plan: Plan, tensor: Tensor) -> int:
    return ITEMSIZES[tensor.dtype] if plan.options.scalar else VECTOR_ALIGNMENT


def _comment(plan: Plan, tensor: Tensor) -> str:
    sizes = ", ".join("T" if d == "T" else str(plan.program.dim(d)) for d in tensor.shape)
    return f"{tensor.dtype} [{sizes}]"


def _member(plan: Plan, tensor: Tensor) -> dict[str, str]:
    c_type, rust_type = _TYPES[tensor.dtype]
    written = tensor.role == "result"
    name = identifier(tensor.name)
    return {
        "ctype": f"{c_type} *" if written else f"const {c_type} *",
        "name": name,
        "comment": f"{_comment(plan, tensor)}, {tensor.role}, aligned to {_alignment(plan, tensor)}",
        "rust_name": f"r#{name}" if name in _RUST_WORDS else name,
        "rust_type": f"*{'mut' if written else 'const'} {rust_type}",
    }


def _kernel(plan: Plan, kernel: Kernel) -> dict[str, Any]:
    values = {t.name for t in plan.program.of_role("value")}
    arguments = [
        f"value_{identifier(name)}" if name in values else f"args->{identifier(name)}"
        for name in tensors_of(plan, kernel)
    ]
    clustered = kernel.cluster > 1
    return {
        "symbol": kernel.name,
        "arguments": (*arguments, *(("per_cluster",) if clustered else ()), "tokens"),
        # As Kernel.tokens_per_cluster; without a cluster every block has one token.
        "most": kernel.tokens if clustered else 1,
        "resident": RESIDENT_CLUSTERS if kernel.cluster > 8 else RESIDENT_BLOCKS // kernel.cluster,
        "blocks": geometry(kernel, 1)[0][1],
        "threads": kernel.threads,
        "cluster": kernel.cluster,
        "dependent": int(kernel.dependent),
    }


def abi_files(plan: Plan, request: AbiRequest) -> dict[str, str | bytes]:
    """File name to contents of everything `--abi` adds to the folder of an emission, a function of both arguments.

    Raises:
        UsageError: see `lower_abi`.
        EnvironmentFault, CompileError: machine code was asked for and cannot be made.
    """
    abi = lower_abi(plan, request)
    fields, name = abi.fields, abi.name
    fields = {**fields, "checks": render("abi/checks.c.j2", fields)}

    def text(template: str, kernels: tuple[dict[str, Any], ...] = (), before: tuple[str, ...] = ()) -> str:
        inner = {**fields, "kernels": kernels, "before": before}
        launch = render("abi/launch.c.j2", inner)
        return render(f"abi/{template}.j2", {**inner, "launch": launch}) + "\n"

    files: dict[str, str | bytes] = {
        f"{name}.h": text("header.h"),
        f"{name}_launcher.cu": text("launcher.cu", abi.launcher_kernels),
        f"{name}.rs": text("bindings.rs"),
        "build.rs": text("build.rs"),
        "CMakeLists.txt": text("CMakeLists.txt"),
    }
    if abi.cubins:
        before = (
            "CUdevice device;",
            f"status = mhc_{name}_device(&device);",
            "if (status != MHC_OK) return status;",
            f"if (mhc_{name}_loaded[device].module == NULL) return MHC_NOT_LOADED;",
        )
        files[f"{name}_loader.c"] = text("loader.c", abi.loader_kernels, before)
    for arch in abi.cubins:
        files[cubin_file(name, arch)] = _cubin(plan, arch)
    return files


def _cubin(plan: Plan, arch: Arch) -> bytes:
    from mhcgen.backends import nvrtc

    compiled = nvrtc.compile(plan.source, arch, name="kernel.cu")
    if compiled.cubin is None:
        raise EnvironmentFault(
            "E-NO-NVRTC", f"the installed NVRTC makes no machine code for {arch.name}", where="--cubin",
            notes=compiled.notes, hints=("a newer one may: pip install --upgrade nvidia-cuda-nvrtc",),
        )
    return compiled.cubin
