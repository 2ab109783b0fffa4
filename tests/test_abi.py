"""The C interface of an emission: its text, every status, and the same bits as a Module on the CPU executor."""

from __future__ import annotations

import ctypes as c
import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from abi_cases import (
    CC,
    CXX,
    HOST,
    PLANS,
    Emitted,
    aligned,
    boundary,
    call_for,
    emitted,
    host_library,
    plan_of,
    run,
    same_as_module,
    shared_folder,
    write,
)

from mhcgen import abi
from mhcgen.abi import AbiRequest, abi_files, lower_abi
from mhcgen.errors import UsageError
from mhcgen.plan import Plan

ROOT = Path(__file__).parent.parent
STUB = Path(__file__).parent / "abi_stub"
STATUS = {name: number for name, number, _ in abi.STATUSES}
ERROR_INVALID_RESOURCE_HANDLE = 400

needs_gcc = pytest.mark.skipif(CC is None or CXX is None, reason="no gcc and g++")
nvcc = shutil.which("nvcc")


@pytest.fixture(scope="module", autouse=True)
def _folder() -> Any:
    yield
    shutil.rmtree(shared_folder())
    shared_folder.cache_clear()
    emitted.cache_clear()


# ---- results ----------------------------------------------------------------------------------------
@needs_gcc
@pytest.mark.parametrize("tokens", (0, 1, 3))
@pytest.mark.parametrize("name", PLANS)
def test_a_launch_gives_the_bits_of_a_module(name: str, tokens: int) -> None:
    same_as_module(emitted(name), tokens)


@needs_gcc
def test_clusters_take_several_tokens() -> None:
    it = emitted("cluster")
    (kernel,) = it.plan.kernels
    tokens = 120 // kernel.cluster + 1
    assert kernel.cluster > 1 and kernel.tokens_per_cluster(tokens) > 1
    same_as_module(it, tokens)


@pytest.mark.parametrize("hidden", (512, 2048, 4096))
def test_the_share_of_a_cluster_is_the_plans(hidden: int) -> None:
    plan = boundary(hidden)
    (kernel,) = plan.kernels
    (printed,) = lower_abi(plan, AbiRequest()).launcher_kernels
    assert printed["cluster"] == kernel.cluster > 1
    for tokens in range(1, 2000):
        assert kernel.tokens_per_cluster(tokens) == min(-(-tokens // printed["resident"]), printed["most"])


@needs_gcc
def test_two_emissions_fit_one_program(tmp_path: Path) -> None:
    plans = {"small": plan_of("pre", hidden=64), "large": plan_of("pre", hidden=256)}
    for name, plan in plans.items():
        write(tmp_path / name, {"kernel.cu": plan.source, **abi_files(plan, AbiRequest(name))})
    launchers = [tmp_path / name / f"{name}_launcher.cu" for name in plans]
    library = host_library(launchers, tmp_path / "both.so")
    for name, plan in plans.items():
        same_as_module(Emitted(plan, library, name), 2)


# ---- statuses ---------------------------------------------------------------------------------------
@needs_gcc
def test_no_tokens_need_no_memory() -> None:
    for name in ("pre", "none"):
        it = emitted(name)
        assert it.workspace(0) == 0
        assert it.launch(it.args_type(tokens=0), None, 0) == STATUS["MHC_OK"]


@needs_gcc
def test_workspace_holds_the_intermediate_values() -> None:
    assert emitted("pre").workspace(5) == 0
    it = emitted("none")  # mixes_scaled [T, 24] and logits [T, 16], fp32, each rounded up to 256 bytes
    assert [it.workspace(t) for t in (1, 3, 100)] == [256 + 256, 512 + 256, 9728 + 6400]
    function = it.library.mhc_pre_unfused_workspace_bytes
    assert function(c.c_int64(1), None) == STATUS["MHC_NULL_POINTER"]
    assert function(c.c_int64(-1), c.byref(c.c_size_t())) == STATUS["MHC_NEGATIVE_TOKENS"]
    assert function(c.c_int64(2**31), c.byref(c.c_size_t())) == STATUS["MHC_TOO_MANY_TOKENS"]


@needs_gcc
@pytest.mark.parametrize("name", ("pre", "none", "cluster"))
def test_every_pointer_is_checked(name: str) -> None:
    it = emitted(name)
    call = call_for(it, 2)
    space, size = call.space.ctypes.data if call.space.size else None, call.space.size
    assert it.library[f"mhc_{it.name}_launch"](None, None, c.c_size_t(0), None) == STATUS["MHC_NULL_POINTER"]
    for member in it.members:
        args = it.args(call.arrays, 2)
        address = getattr(args, member)
        setattr(args, member, None)
        assert it.launch(args, space, size) == STATUS["MHC_NULL_POINTER"], member
        setattr(args, member, address + 4)
        assert it.launch(args, space, size) == STATUS["MHC_MISALIGNED"], member
    poison = {t.name for t in it.plan.program.of_role("result")}
    assert all(set(call.arrays[t].tobytes()) == {0xFF} for t in poison), "something was launched"


@needs_gcc
def test_token_counts_are_checked() -> None:
    it = emitted("pre")
    call = call_for(it, 1)
    limit = 2**31 // 4 - 1
    assert it.launch(it.args(call.arrays, -1), None, 0) == STATUS["MHC_NEGATIVE_TOKENS"]
    assert it.launch(it.args(call.arrays, limit + 1), None, 0) == STATUS["MHC_TOO_MANY_TOKENS"]


@needs_gcc
def test_the_workspace_is_checked() -> None:
    it = emitted("none")
    call = call_for(it, 3)
    args, space, size = it.args(call.arrays, 3), call.space.ctypes.data, call.space.size
    assert it.launch(args, None, size) == STATUS["MHC_NULL_POINTER"]
    assert it.launch(args, space + 16, size) == STATUS["MHC_MISALIGNED"]
    assert it.launch(args, space, size - 1) == STATUS["MHC_WORKSPACE_TOO_SMALL"]
    assert it.launch(args, space, 0) == STATUS["MHC_WORKSPACE_TOO_SMALL"]
    assert it.launch(args, call.arrays["x"].ctypes.data, size) == STATUS["MHC_OVERLAP"]
    assert it.launch(args, space, size) == STATUS["MHC_OK"]


@needs_gcc
def test_results_overlap_nothing() -> None:
    it = emitted("pre")
    call = call_for(it, 3)
    for member, other in (("y", "x"), ("pre", "post"), ("comb", "base")):
        args = it.args(call.arrays, 3)
        setattr(args, member, getattr(args, other))
        assert it.launch(args, None, 0) == STATUS["MHC_OVERLAP"], member
    args = it.args(call.arrays, 3)
    args.base = args.scale  # reading one array twice is nobody's business
    assert it.launch(args, None, 0) == STATUS["MHC_OK"]


@needs_gcc
def test_what_cuda_refuses_arrives_as_its_number() -> None:
    it = emitted("pre")
    status = it.launch(it.args(call_for(it, 1).arrays, 1), None, 0, stream=64)  # the executor has no streams
    assert status == STATUS["MHC_CUDA_ERROR"] + ERROR_INVALID_RESOURCE_HANDLE
    assert b"CUDA" in it.library.mhc_status_string(status)


@needs_gcc
def test_every_status_has_a_sentence_of_its_own() -> None:
    text = emitted("pre").library.mhc_status_string
    sentences = [text(number) for number in STATUS.values()]
    assert len(set(sentences)) == len(STATUS)
    assert text(-1) == text(500) == b"unknown status"


@needs_gcc
def test_a_scalar_emission_takes_elements_anywhere() -> None:
    it = emitted("scalar")
    same_as_module(it, 2, offset=4)
    args = it.args(call_for(it, 2).arrays, 2)
    args.x += 2
    assert it.launch(args, None, 0) == STATUS["MHC_MISALIGNED"]


# ---- the loader -------------------------------------------------------------------------------------
def loader(monkeypatch: pytest.MonkeyPatch, folder: Path, plan: Plan, cubins: tuple[str, ...]) -> Emitted:
    """A loader on a driver that takes notes; its images say for which architecture they are."""
    monkeypatch.setattr(abi, "_cubin", lambda _plan, arch: b"\x7fELF " + arch.name.encode() + b"\0" * 16)
    write(folder, abi_files(plan, AbiRequest("it", cubins)))
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-pedantic")
    run(CC or "", *strict, "-shared", "-fPIC", f"-I{STUB}", folder / "it_loader.c", STUB / "cuda_stub.c",
        "-o", folder / "loader.so")
    return Emitted(plan, c.CDLL(str(folder / "loader.so"), mode=c.RTLD_LOCAL), "it")


def notes(it: Emitted) -> list[str]:
    buffer = (c.c_char * 8192).in_dll(it.library, "stub_notes")
    text = buffer.value.decode()
    buffer.value = b""
    return text.split(";")[:-1]


@needs_gcc
def test_the_loader_picks_the_cubin_of_the_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    it = loader(monkeypatch, tmp_path, plan_of("pre"), ("sm_80", "sm_86", "sm_90", "sm_90a", "sm_100", "sm_120a"))
    capability, device = (c.c_int.in_dll(it.library, f"stub_{name}") for name in ("capability", "device"))
    folder = os.fsencode(tmp_path)
    expected = {80: "sm_80", 86: "sm_86", 89: "sm_86", 90: "sm_90a", 100: "sm_100", 103: "sm_100", 120: "sm_120a"}
    for number, (where, name) in enumerate(expected.items()):
        capability.value, device.value = where, number
        args = it.args(call_for_results(it, 2), 2)
        assert it.launch(args, None, 0) == STATUS["MHC_NOT_LOADED"]
        assert it.library.mhc_it_load(folder) == 0
        assert it.library.mhc_it_load(folder) == 0  # once is enough
        assert notes(it) == [f"load {name}"]
        assert it.launch(args, None, 0) == 0
        assert notes(it) == ["launch mhc_rowsq_gates_sinkhorn_collapse grid 2,1,1 block 64,1,1"]
        assert it.library.mhc_it_unload() == 0
        assert notes(it) == ["unload"]
        assert it.launch(args, None, 0) == STATUS["MHC_NOT_LOADED"]
    for where in (75, 110, 121):
        capability.value = where
        assert it.library.mhc_it_load(folder) == STATUS["MHC_NO_CUBIN"]
    capability.value = 90
    assert it.library.mhc_it_load(os.fsencode(tmp_path / "nowhere")) == STATUS["MHC_NO_FILE"]
    assert it.library.mhc_it_load(None) == STATUS["MHC_NULL_POINTER"]
    assert it.library.mhc_it_load_image(b"no machine code") == STATUS["MHC_CUDA_ERROR"] + 200
    device.value = -1
    assert it.library.mhc_it_load(folder) == STATUS["MHC_CUDA_ERROR"] + 201
    device.value = 64
    assert it.library.mhc_it_load(folder) != 0


def call_for_results(it: Emitted, tokens: int) -> dict[str, npt.NDArray[Any]]:
    program = it.plan.program
    return {name: aligned(program.shape(name, tokens), np.float32) for name in it.members}


@needs_gcc
def test_the_loader_launches_clusters_and_dependents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = boundary(4096, dependent=True)
    (kernel,) = plan.kernels
    assert kernel.cluster > 8 and kernel.dependent
    it = loader(monkeypatch, tmp_path, plan, ("sm_90",))
    assert it.library.mhc_it_load(os.fsencode(tmp_path)) == 0
    assert notes(it) == ["load sm_90", f"allow {kernel.name} 14=1"]
    for tokens, across in ((1, 1), (7, 7), (8, 4)):
        assert it.launch(it.args(call_for_results(it, tokens), tokens), None, 0) == 0
        grid, cluster = f"{across},{kernel.cluster},1", f"1,{kernel.cluster},1"
        assert notes(it) == [
            f"launch {kernel.name} grid {grid} block {kernel.threads},1,1 cluster {cluster} dependent 1"
        ]


# ---- text -------------------------------------------------------------------------------------------
@needs_gcc
@pytest.mark.parametrize("name", PLANS)
def test_the_header_is_c_and_cpp(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    header = next(text for file, text in abi_files(plan, AbiRequest("it")).items() if file == "it.h")
    write(tmp_path, {"it.h": header})
    (tmp_path / "use.c").write_text('#include "it.h"\n#include "it.h"\nint status = MHC_OK;\n')
    strict = ("-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only")
    run(CC or "", "-std=c11", *strict, tmp_path / "use.c")
    run(CXX or "", "-std=c++17", *strict, "-x", "c++", tmp_path / "use.c")


def test_the_text_is_a_function_of_the_plan_alone(tmp_path: Path) -> None:
    script = (
        "import hashlib, sys; sys.path.insert(0, sys.argv[1]); import test_abi as t\n"
        "for name in ('pre', 'none', 'cluster'):\n"
        "    for file, text in t.abi_files(t.PLANS[name](), t.AbiRequest()).items():\n"
        "        print(name, file, hashlib.sha256(text.encode()).hexdigest())\n"
    )
    outputs = {
        run(sys.executable, "-c", script, Path(__file__).parent, cwd=tmp_path, env={"PYTHONHASHSEED": seed})
        for seed in ("1", "2")
    }
    assert len(outputs) == 1 and "pre_launcher.cu" in outputs.pop()


@pytest.mark.parametrize("name", PLANS)
def test_lines_are_short_and_nothing_of_python_is_in_them(name: str) -> None:
    for file, text in abi_files(PLANS[name](), AbiRequest()).items():
        assert isinstance(text, str)
        code = [line for line in text.splitlines() if not line.startswith(("// ", "# "))]
        assert [line for line in code if len(line) > 130] == [], file
        rust = file == "build.rs"  # which has a None of its own
        for stray in (*(() if rust else ("None",)), "True", "False", "Undefined", "{{", "}}", "{%", "object at"):
            assert [line for line in code if stray in line] == [], (file, stray)


@pytest.mark.nvrtc
def test_cubins_are_machine_code_and_the_same_over_runs(tmp_path: Path) -> None:
    archs = ("sm_80", "sm_90", "sm_100")
    command = ("emit", "--streams", "4", "--hidden", "64", "--fuse", "pre", "--abi", "c", "--cubin", ",".join(archs))
    folders = [tmp_path / "one", tmp_path / "deeper" / "two"]
    for number, folder in enumerate(folders):
        cache_dir = {"MHCGEN_CACHE_DIR": str(tmp_path / f"cache{number}")}  # so that both compile
        run(sys.executable, "-m", "mhcgen", *command, "--out", folder, env=cache_dir)
    one, two = ({path.name: path.read_bytes() for path in folder.iterdir()} for folder in folders)
    assert one == two
    images = [one[f"pre.{arch}.cubin"] for arch in archs]
    assert all(image[:4] == b"\x7fELF" for image in images) and len(set(images)) == 3
    manifest = json.loads(one["manifest.json"])
    assert manifest["command"].endswith(f"--abi c --cubin {','.join(archs)}")
    listed = {name: entry["sha256"] for name, entry in manifest["files"].items()}
    assert listed == {n: hashlib.sha256(b).hexdigest() for n, b in one.items() if n != "manifest.json"}


def cuda_include() -> Path | None:
    """The folder of CUDA's own headers, None without them."""
    from mhcgen.backends.nvrtc_library import header_dirs

    found = [Path(str(folder.path)) for folder in header_dirs()]
    return next((path for path in found if (path / "cuda.h").is_file()), None)


@needs_gcc
@pytest.mark.skipif(cuda_include() is None, reason="no cuda.h")
def test_the_loader_compiles_with_cudas_own_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader(monkeypatch, tmp_path, plan_of("none"), ("sm_80", "sm_90"))
    strict = ("-std=c11", "-Wall", "-Wextra", "-Werror", "-fsyntax-only")
    run(CC or "", *strict, f"-I{cuda_include()}", tmp_path / "it_loader.c")


@pytest.mark.skipif(nvcc is None, reason="no nvcc")
@pytest.mark.parametrize("name", ("none", "cluster-dependent"))
def test_the_launcher_compiles_with_nvcc(name: str, tmp_path: Path) -> None:
    plan = PLANS[name]()
    write(tmp_path, {"kernel.cu": plan.source, **abi_files(plan, AbiRequest("it"))})
    flags = ("-std=c++17", "-arch=sm_90", "-Werror", "all-warnings", "-Xcompiler", "-Wall,-Wextra")
    run(nvcc or "", *flags, "-c", tmp_path / "it_launcher.cu", "-o", tmp_path / "it.o")


# ---- the command and the folder ---------------------------------------------------------------------
def mhcgen_cli(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mhcgen", "emit", "--hidden", "64", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_folder_may_be_emitted_again_in_another_way(tmp_path: Path) -> None:
    out = tmp_path / "out"
    plain = {"kernel.cu", "unfused.cu", "program.txt", "log.txt", "test_differential.py", "manifest.json"}
    c_files = {"{}.h", "{}_launcher.cu", "{}.rs", "build.rs", "CMakeLists.txt"}
    for words, names in (
        (("--fuse", "pre", "--abi", "c"), c_files),
        (("--fuse", "pre", "--abi", "c", "--name", "other"), c_files),
        (("--fuse", "pre"), set()),
    ):
        assert mhcgen_cli(*words, "--out", out).returncode == 0
        stem = "other" if "other" in words else "pre"
        assert {path.name for path in out.iterdir()} == plain | {name.format(stem) for name in names}
    mhcgen_cli("--fuse", "pre", "--abi", "c", "--out", out)
    (out / "pre.h").write_text("mine now")
    assert mhcgen_cli("--fuse", "pre", "--out", out).returncode == 0
    assert (out / "pre.h").read_text() == "mine now", "a changed file was removed"
    refused = mhcgen_cli("--fuse", "pre", "--out", out)
    assert refused.returncode == 2 and "I-EXISTS" in refused.stderr and "pre.h" in refused.stderr
    assert mhcgen_cli("--fuse", "pre", "--out", out, "--force").returncode == 0


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--abi", "c"), "U-USAGE"),
        (("--cubin", "sm_90", "--out", "x"), "U-USAGE"),
        (("--name", "a", "--out", "x"), "U-USAGE"),
        (("--abi", "rust", "--out", "x"), "U-OPTION"),
        (("--abi", "c", "--name", "Upper", "--out", "x"), "U-NAME"),
        (("--abi", "c", "--name", "", "--out", "x"), "U-NAME"),
        (("--abi", "c", "--name", "build", "--out", "x"), "U-NAME"),
        (("--abi", "c", "--name", "mod", "--out", "x"), "U-NAME"),
        (("--abi", "c", "--name", "stdint", "--out", "x"), "U-NAME"),
        (("--abi", "c", "--cubin", "sm_1", "--out", "x"), "U-ARCH"),
        (("--abi", "c", "--cubin", "compute_90", "--out", "x"), "U-ARCH"),
        (("--abi", "c", "--scope", "site", "--out", "x"), "U-ABI"),
        (("--abi", "c", "--stamps", "--out", "x"), "U-ABI"),
        (("--all", "--abi", "c"), "U-USAGE"),
    ],
)
def test_wrong_use_is_said(words: tuple[str, ...], code: str) -> None:
    done = mhcgen_cli(*words)
    assert done.returncode == 2 and f"error[{code}]" in done.stderr, done.stderr
    assert not Path("x").exists()


@pytest.mark.parametrize("archs", ["", "sm_90,,", "hopper"])
def test_an_architecture_that_there_is_not(archs: str) -> None:
    done = mhcgen_cli("--abi", "c", "--cubin", archs, "--out", "x")
    assert done.returncode == 2 and "error[U-ARCH]" in done.stderr and "where: --cubin" in done.stderr


def test_old_architectures_have_no_clusters() -> None:
    for plan, has, instead in (
        (boundary(), "clusters", "--cluster 1"),
        (plan_of("none", options={"dependent": True}), "dependent launches", "without --dependent"),
        (boundary(dependent=True), "clusters and dependent launches", "--cluster 1, without --dependent"),
    ):
        with pytest.raises(UsageError, match=f"has {has}, and sm_80 has none") as error:
            lower_abi(plan, AbiRequest(cubins=("sm_80",)))
        assert f"emit for it apart: --arch sm_80, {instead}, and another --name" in str(error.value)
    assert lower_abi(plan_of("pre"), AbiRequest(cubins=("sm_80",))).cubins


# ---- examples ---------------------------------------------------------------------------------------
def emit_example(folder: Path) -> None:
    words = ("emit", "--streams", "4", "--fuse", "pre", "--abi", "c", "--out")
    run(sys.executable, "-m", "mhcgen", *words, folder)


@needs_gcc
@pytest.mark.skipif(shutil.which("make") is None, reason="no make")
def test_the_c_example_runs(tmp_path: Path) -> None:
    emit_example(tmp_path / "c")
    printed = run(
        "make", "-C", ROOT / "examples" / "c", f"EMITTED={tmp_path / 'c'}", f"HOST={HOST}",
        f"BUILD={tmp_path / 'build'}", "run-host",
    )
    assert printed.count(": ok") == 4 and "status 2" in printed


@needs_gcc
@pytest.mark.skipif(shutil.which("cargo") is None, reason="no cargo")
def test_the_rust_example_runs(tmp_path: Path) -> None:
    emit_example(tmp_path / "build" / "c")
    shutil.copytree(ROOT / "examples" / "rust-ffi", tmp_path / "examples" / "rust-ffi")
    printed = run(
        "cargo", "run", "--quiet", "--offline", cwd=tmp_path / "examples" / "rust-ffi", env={"MHC_HOST": str(HOST)}
    )
    assert printed.count("within") == 2
