"""Building: compilers found and missing, flags that matter, errors with places, the cache of modules."""

from __future__ import annotations

import ctypes
import importlib.util
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from host_cases import KERNELS, launch, module, signature, source

from mhcgen import cache
from mhcgen.backends.host import HostModule, abi, find_compiler
from mhcgen.backends.host import build as building
from mhcgen.backends.host.unit import dynamic_shared_names, launch_bound
from mhcgen.errors import CompileError, EnvironmentFault, UsageError

HOST = Path(building.__file__).parent
TEXT = 'extern "C" __global__ void k(float* o) { o[threadIdx.x] = 3.0f; }\n'
SIGNATURE = (signature("k", o="float*"),)


def works(host: HostModule) -> bool:
    out = np.zeros(4, np.float32)
    return host.launch("k", 1, 4, [out]).ok and bool((out == 3).all())


@pytest.fixture
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    root = tmp_path / "cache with a space"
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(root))
    return root


# ---- compilers ----------------------------------------------------------------------------------------------------


def test_without_any_compiler_the_error_names_both_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHCGEN_CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentFault) as caught:
        HostModule(TEXT, SIGNATURE)
    assert caught.value.code == "E-NO-CXX"
    assert {"apt-get install g++", "pip install 'mhcgen[zig]'"} <= set(caught.value.hints)


def test_a_compiler_asked_for_by_name_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EnvironmentFault, match="E-CXX"):
        HostModule(TEXT, SIGNATURE, compiler="no-such-compiler")
    monkeypatch.setenv("MHCGEN_CXX", "no-such-compiler-either")
    with pytest.raises(EnvironmentFault, match="MHCGEN_CXX"):
        HostModule(TEXT, SIGNATURE)
    with pytest.raises(EnvironmentFault, match="E-CXX"):
        find_compiler(f"{sys.executable} -c pass")


def test_too_old_a_compiler_is_passed_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    old = tmp_path / "g++"
    old.write_text("#!/bin/sh\necho 'g++ (Old 9.4.0-1) 9.4.0'\n")
    old.chmod(0o755)
    with pytest.raises(EnvironmentFault) as caught:
        find_compiler(str(old))
    assert "at least 11" in caught.value.notes[0]


def test_the_environment_may_name_a_compiler_with_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_CXX", "g++ -DEXTRA=3")
    host = HostModule(TEXT.replace("3.0f", "EXTRA"), SIGNATURE)
    assert works(host)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="needs the ziglang package")
@pytest.mark.parametrize("kernel", ["tree_sum", "mix_streams", "split_roles"])
def test_zig_builds_the_same_bits_and_finds_the_same_race(kernel: str) -> None:
    zig = f"{sys.executable} -m ziglang c++"
    file, ctypes_ = KERNELS[kernel]
    expected, _ = launch(module(file, race=False), kernel, 128)
    for race in (False, True):
        host = HostModule(source(file), [signature(kernel, **ctypes_)], name=file, race=race, compiler=zig)
        made, report = launch(host, kernel, 128)
        assert report.ok, report.text
        assert made.bits() == expected.bits()
    broken = source(file).replace("__syncthreads();", ";")
    host = HostModule(broken, [signature(kernel, **ctypes_)], name=file, race=True, compiler=zig)
    _, report = launch(host, kernel, 128)
    assert any(f.kind == "race" and f.scope == "across-warps" and min(f.lines) > 0 for f in report.findings)


# ---- errors -------------------------------------------------------------------------------------------------------


def test_a_compile_error_carries_log_line_and_text() -> None:
    with pytest.raises(CompileError) as caught:
        HostModule("\n\n" + TEXT.replace("3.0f", "three"), SIGNATURE, name="wrong")
    assert "wrong.cu:3:" in caught.value.notes[0] and "three" in caught.value.notes[0]
    assert "= three;" in Path(caught.value.where).read_text()


@pytest.mark.parametrize("declared", [{"o": "const float*"}, {"o": "double*"}, {"o": "float*", "n": "int"}, {}])
def test_a_signature_that_differs_from_the_source_does_not_compile(declared: dict[str, str]) -> None:
    with pytest.raises(CompileError, match="rejects the emission") as caught:
        HostModule(TEXT, [signature("k", **declared)])
    assert "declared signature of kernel k differs" in caught.value.notes[0]


def test_options_that_mean_nothing_are_refused() -> None:
    for options, code in (({"opt": "-Ofast"}, "X-OPT"), ({"fibers": "threads"}, "X-FIBERS")):
        with pytest.raises(UsageError, match=code):
            HostModule(TEXT, SIGNATURE, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="X-KERNEL-NAME"):
        HostModule(TEXT, [signature("a::b", o="float*")])


@pytest.mark.parametrize("opt", ["-O0", "-O1", "-O3"])
def test_every_optimisation_level_works(opt: str) -> None:
    file, ctypes_ = KERNELS["mix_streams"]
    host = HostModule(source(file), [signature("mix_streams", **ctypes_)], name=file, race=True, opt=opt)
    made, report = launch(host, "mix_streams", 64)
    assert report.ok, report.text
    assert made.bits() == launch(module(file, race=False), "mix_streams", 64)[0].bits()


# ---- the text around the emission ---------------------------------------------------------------------------------


def test_dynamic_arrays_are_found_in_every_spelling() -> None:
    text = """
      extern __shared__ float a[];  extern __shared__ __align__(16) unsigned char b [];
      __shared__ extern double c[];  // extern __shared__ float not_this[];
      /* extern __shared__ float nor_this[]; */  __shared__ float fixed[4];
    """
    assert dynamic_shared_names(text) == ("a", "b", "c")


def test_two_names_are_one_dynamic_memory() -> None:
    text = (
        'extern "C" __global__ void k(float* o) {\n  extern __shared__ float a[];\n'
        "  extern __shared__ unsigned char b[];\n  if (threadIdx.x == 0) a[1] = 3.0f;\n  __syncthreads();\n"
        "  o[threadIdx.x] = *reinterpret_cast<float*>(b + 4);\n}\n"
    )
    out = np.zeros(4, np.float32)
    HostModule(text, SIGNATURE).launch("k", 1, 4, [out], dynamic_shared=16).raise_if_found()
    assert (out == 3).all()


def test_launch_bounds_are_read_from_the_source() -> None:
    text = 'extern "C" __global__ void __launch_bounds__(192, 2)\nf(int n) {}\n__global__ void g(int n) { f(n); }'
    assert launch_bound(text, "f") == 192
    assert launch_bound(text, "g") is None


def test_the_python_mirrors_have_the_layout_of_the_header(tmp_path: Path) -> None:
    pairs = {
        "MhcDim3": abi.Dim3,
        "MhcRegion": abi.Region,
        "MhcFinding": abi.FindingRecord,
        "MhcWait": abi.WaitRecord,
        "MhcLaunch": abi.LaunchRecord,
    }
    checks = ["#include <stddef.h>", '#include "launch_abi.h"']
    for name, mirror in pairs.items():
        checks.append(f'static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "{name}");')
        for member in (entry[0] for entry in mirror._fields_):
            offset = getattr(mirror, member).offset
            checks.append(f'static_assert(offsetof({name}, {member}) == {offset}, "{name}.{member}");')
    checks.append(f"static_assert(MHC_DEADLOCK_SPINNING == {abi.RULES.index('deadlock-spinning')});")
    checks.append(f"static_assert(MHC_ARRIVALS_NOT_AWAITED == {abi.RULES.index('arrivals-not-awaited')});")
    checks.append(f"static_assert(MHC_OOB_INDEX == {abi.RULES.index('oob-index')});")
    checks.append(f"static_assert(MHC_ARRIVALS == {max(abi.KINDS)} && MHC_WARP_GREEDY == {len(abi.ORDERS) - 1});")
    text = tmp_path / "layout.cpp"
    text.write_text("\n".join(checks))
    command = [*find_compiler().command, "-std=c++20", "-fsyntax-only", f"-I{HOST}", str(text)]
    answer = subprocess.run(command, capture_output=True, text=True, check=False)
    assert answer.returncode == 0, answer.stderr


def _has_fma() -> bool:
    try:
        return " fma " in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


@pytest.mark.skipif(not _has_fma(), reason="needs a CPU with FMA")
def test_intrinsics_are_not_contracted_even_by_a_compiler_told_to(tmp_path: Path) -> None:
    """The flag is off in every build; the asm barrier holds without it."""
    text = tmp_path / "contract.cpp"
    text.write_text(
        '#include "prelude.h"\n'
        'extern "C" float safe(float a, float b, float c) { return __fadd_rn(__fmul_rn(a, b), c); }\n'
        'extern "C" double wide(double a, double b, double c) { return __dsub_rn(__dmul_rn(a, b), c); }\n'
        'extern "C" float open(float a, float b, float c) { return a * b + c; }\n'
    )
    made = tmp_path / "contract.so"
    flags = ["-std=c++20", "-O3", "-march=x86-64-v3", "-ffp-contract=fast", "-fPIC", "-shared", f"-I{HOST}"]
    subprocess.run([*find_compiler().command, *flags, str(text), "-o", str(made)], check=True)
    library = ctypes.CDLL(str(made))
    a, b = np.float32(1 + 2**-12), np.float32(1 + 2**-12)
    for name, kind, got_zero in (("safe", ctypes.c_float, True), ("open", ctypes.c_float, False)):
        function = getattr(library, name)
        function.argtypes, function.restype = [kind] * 3, kind
        assert (function(a, b, -(a * b)) == 0) is got_zero, name
    library.wide.argtypes, library.wide.restype = [ctypes.c_double] * 3, ctypes.c_double
    x = 1 + 2**-30
    assert library.wide(x, x, x * x) == 0


# ---- the cache of modules -----------------------------------------------------------------------------------------


def test_a_second_build_comes_from_the_cache(empty_cache: Path) -> None:
    assert HostModule(TEXT, SIGNATURE).compiled
    assert not HostModule(TEXT, SIGNATURE).compiled
    assert HostModule(TEXT + "\n", SIGNATURE).compiled
    assert HostModule(TEXT, SIGNATURE, race=True).compiled
    assert HostModule(TEXT, SIGNATURE, opt="-O1").compiled
    assert sorted(entry.suffix for entry in cache.entries()) == [".o"] + [".so"] * 4


@pytest.mark.parametrize("damage", ["truncated", "changed", "emptied"])
def test_a_damaged_module_is_built_again(empty_cache: Path, damage: str) -> None:
    text = TEXT + f"// {damage}\n"
    path = HostModule(text, SIGNATURE).path
    data = path.read_bytes()
    middle = len(data) // 2
    changed = data[:middle] + bytes([data[middle] ^ 0xFF]) + data[middle + 1 :]
    damaged = {"truncated": data[:-100], "changed": changed, "emptied": b""}[damage]
    replacement = path.with_name("replacement")
    replacement.write_bytes(damaged)
    replacement.replace(path)  # not in place: this process still has the old file mapped
    again = HostModule(text, SIGNATURE)
    assert again.compiled
    assert again.path.read_bytes() == data  # builds are reproducible, so the same file is whole again
    assert works(again)


def _build_in_child(text: str, queue: multiprocessing.Queue[str]) -> None:
    try:
        queue.put("ok" if works(HostModule(text, SIGNATURE)) else "wrong result")
    except BaseException as fault:  # noqa: BLE001
        queue.put(repr(fault))


def test_sixteen_processes_build_the_same_module(empty_cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_build_in_child, args=(TEXT + "// sixteen\n", queue)) for _ in range(16)]
    for child in children:
        child.start()
    answers = [queue.get(timeout=120) for _ in children]
    for child in children:
        child.join()
    assert answers == ["ok"] * 16
    assert [entry.suffix for entry in cache.entries()].count(".so") == 1
    assert not list(empty_cache.rglob(".part-*"))


def test_a_cleared_cache_does_not_disturb_a_loaded_module(empty_cache: Path) -> None:
    host = HostModule(TEXT, SIGNATURE)
    assert cache.clear() == 2
    assert works(host)
    assert HostModule(TEXT, SIGNATURE).compiled


def test_a_long_launch_can_be_interrupted() -> None:
    script = (
        "import numpy as np\nfrom mhcgen.backends.host import *\n"
        f"host = HostModule({TEXT!r}, [KernelSignature('k', (Param('o', 'float*', True),))])\n"
        "host.launch('k', 1, 4, [np.zeros(4, np.float32)])\nprint('ready', flush=True)\n"
        "host.launch('k', 2**31 - 1, 4, [np.zeros(4, np.float32)])\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        # A test run in the background of a shell ignores interrupts, and its children would too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
        time.sleep(0.2)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=30)
    finally:
        child.kill()
    assert "KeyboardInterrupt" in errors and child.returncode != 0
