"""Compiling without a GPU: targets, flags, figures, the cache, and what is said when something is missing."""

from __future__ import annotations

import re
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mhcgen.backends import nvrtc, nvrtc_library
from mhcgen.backends.archs import KNOWN, Arch
from mhcgen.backends.nvrtc_library import HeaderDir, Nvrtc, find_nvrtc, header_dirs
from mhcgen.errors import CompileError, EnvironmentFault, UsageError

try:
    LIBRARY: Nvrtc | None = find_nvrtc()
except EnvironmentFault:
    LIBRARY = None

needs_nvrtc = [
    pytest.mark.nvrtc,
    pytest.mark.skipif(LIBRARY is None, reason="NVRTC is not installed: pip install 'mhcgen[nvrtc]'"),
]
pytestmark = needs_nvrtc

GUARD_PAGE = Path(__file__).parents[2] / "docs" / "decisions" / "0002-fast-math-guard.md"

SMALL = (
    'extern "C" __global__ void k(float* a, float b, float c) { a[0] = a[1] * b + c / a[2] + sqrtf(c); }\n'
)

# Two block barriers, three warp barriers, five shuffles (unrolled), 128 bytes of shared memory.
COUNTED = """
#include <cuda_bf16.h>
extern "C" __global__ void __launch_bounds__(128)
counted(const float* __restrict__ x, __nv_bfloat16* out, int n) {
  __shared__ float cell[32];
  float v = x[threadIdx.x];
#pragma unroll
  for (int o = 16; o; o >>= 1) v = __fadd_rn(v, __shfl_xor_sync(0xffffffffu, v, o));
  if (threadIdx.x < 32) cell[threadIdx.x] = v;
  __syncthreads();
  if (threadIdx.x < 32) {
#pragma unroll 1
    for (int i = 0; i < n; ++i) {
      cell[threadIdx.x ^ 1] = __fadd_rn(cell[threadIdx.x], 1.0f);
      __syncwarp();
    }
    __syncwarp();
    cell[threadIdx.x] = v;
    __syncwarp();
  }
  __syncthreads();
  out[threadIdx.x] = __float2bfloat16_rn(cell[threadIdx.x & 31]);
}
"""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def library() -> Nvrtc:
    assert LIBRARY is not None
    return LIBRARY


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_90a", "sm_100", "sm_120"])
def test_targets_give_ptx_and_machine_code(arch: str) -> None:
    made = nvrtc.compile(COUNTED, arch)
    assert f".target {arch}" in made.ptx
    assert made.cubin is not None and made.cubin.startswith(b"\x7fELF")
    assert made.image is made.cubin
    assert made.arch == made.target == arch and made.notes == ()
    kernel = made.resources["counted"]
    assert kernel.registers is not None and 0 < kernel.registers < 64
    assert (kernel.stack, kernel.spill_stores, kernel.spill_loads) == (0, 0, 0)
    assert (kernel.static_shared, kernel.barrier_ids) == (128, 1)


def test_counts_and_loops() -> None:
    made = nvrtc.compile(COUNTED, "sm_90")
    counts = made.resources["counted"].counts
    assert (counts.bar_sync, counts.bar_warp_sync, counts.shfl_sync) == (2, 3, 5)
    assert made.counts == counts
    (loop,) = nvrtc.ptx_loops(made.ptx, "counted")
    assert (loop.counts.bar_sync, loop.counts.bar_warp_sync) == (0, 1)
    assert not nvrtc.block_barrier_in_loop(made.ptx, "counted")
    strong = nvrtc.compile(COUNTED.replace("__syncwarp", "__syncthreads"), "sm_90")
    assert nvrtc.block_barrier_in_loop(strong.ptx, "counted")


def test_source_lines_of_barriers_with_lineinfo() -> None:
    made = nvrtc.compile(COUNTED, "sm_90", extra=("-lineinfo",))
    lines = COUNTED.splitlines()
    seen = [lines[site.source_lines[0] - 1] for site in nvrtc.sync_sites(made.ptx, "counted")]
    assert [line for line in seen if "__syncthreads" in line] == ["  __syncthreads();"] * 2
    assert sum("__syncwarp" in line for line in seen) == 3
    assert sum("__shfl_xor_sync" in line for line in seen) == 5


def test_device_functions_that_stay_are_counted_with_their_kernel() -> None:
    source = """
__device__ __noinline__ float settle(float v) { __syncthreads(); return v * 2.0f; }
extern "C" __global__ void k(float* a, int n) {
  float v = a[threadIdx.x];
#pragma unroll 1
  for (int i = 0; i < n; ++i) v = settle(v);
  a[threadIdx.x] = v;
}
"""
    made = nvrtc.compile(source, "sm_90")
    kernel = made.resources["k"]
    assert (kernel.counts.bar_sync, kernel.total.bar_sync, made.counts.bar_sync) == (0, 1, 1)
    assert len(kernel.calls) == 1 and "settle" in kernel.calls[0]
    assert list(made.resources) == ["k"]
    assert nvrtc.block_barrier_in_loop(made.ptx, "k")


def test_stack_and_local_traffic_show() -> None:
    source = (
        'extern "C" __global__ void k(float* a, int n) { float v[64];'
        " for (int i = 0; i < 64; ++i) v[i] = a[i];"
        " for (int i = 0; i < n; ++i) v[(i * 7) & 63] += v[i & 63]; a[n] = v[n & 63]; }"
    )
    kernel = nvrtc.compile(source, "sm_90").resources["k"]
    assert kernel.stack == 256
    assert kernel.counts.local_loads > 0 and kernel.counts.local_stores > 0


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "compute_90"])
def test_arithmetic_is_never_contracted_flushed_or_approximated(arch: str) -> None:
    ptx = nvrtc.compile(SMALL, arch).ptx
    assert "div.rn.f32" in ptx and "sqrt.rn.f32" in ptx and "mul.rn.f32" in ptx
    assert "fma" not in ptx and "ftz" not in ptx and "approx" not in ptx


def test_text_needs_no_default_device_option() -> None:
    # nvcc has no such option: what NVRTC accepts must be what nvcc accepts.
    with pytest.raises(CompileError):
        nvrtc.compile("float helper(float v) { return v; }\n" + SMALL, "sm_90", extra=("-DX",))


@pytest.mark.parametrize(
    "option",
    ["--use_fast_math", "-use_fast_math", "-ftz=true", "--ftz=false", "-prec-div=false", "--prec-sqrt=false",
     "--fmad=true", "-arch=sm_80", "--gpu-architecture=sm_80", "--extra-device-vectorization"],
)  # fmt: skip
def test_arithmetic_and_target_options_are_refused(option: str) -> None:
    with pytest.raises(UsageError) as caught:
        nvrtc.compile(SMALL, "sm_90", extra=(option,))
    assert caught.value.code == "U-OPTION"


def test_ptx_only_target() -> None:
    made = nvrtc.compile(COUNTED, "compute_90")
    assert made.cubin is None
    assert made.image == made.ptx.encode() + b"\0"
    kernel = made.resources["counted"]
    assert kernel.registers is None and kernel.counts.bar_sync == 2


def test_newer_than_nvrtc_falls_back_to_ptx_of_the_highest(library: Nvrtc) -> None:
    made = nvrtc.compile(SMALL, "sm_999")
    assert made.arch == "sm_999"
    assert made.target == f"compute_{library.archs[-1]}"
    assert made.cubin is None
    assert "sm_999" in made.notes[0] and made.target in made.notes[0]


def test_older_than_nvrtc_names_the_minimum() -> None:
    with pytest.raises(UsageError, match=r"minimum is sm_75") as caught:
        nvrtc.target_for(Arch(70), (75, 80, 90))
    assert caught.value.code == "U-ARCH"
    assert nvrtc.target_for(Arch(70), (50, 60, 70)) == (Arch(70), "")
    assert nvrtc.target_for(Arch(88), (75, 80, 86, 87, 89))[0] == Arch(87, virtual=True)


def test_resident_threads_of_the_table_agree_with_ptxas(library: Nvrtc) -> None:
    source = 'extern "C" __global__ void __launch_bounds__(512, {}) k(float* a) {{ a[threadIdx.x] = 1.0f; }}'
    for number in sorted(set(library.archs) & set(KNOWN)):
        blocks = Arch(number).facts.threads_per_sm // 512
        fits = nvrtc.compile(source.format(blocks), f"sm_{number}").warnings
        assert not any("out of range" in line for line in fits), number
        over = nvrtc.compile(source.format(blocks + 1), f"sm_{number}").warnings
        assert any("out of range" in line for line in over), number


def test_compiler_warnings_are_surfaced() -> None:
    source = 'extern "C" __global__ void k(float* a) { int unused; a[0] = 1.0f; }'
    assert any("unused" in line for line in nvrtc.compile(source, "sm_90").warnings)


def test_rejected_text_carries_log_kernel_and_path() -> None:
    source = 'extern "C" __global__ void first(float* a) {}\n' + SMALL.replace("a[1]", "nowhere[1]")
    with pytest.raises(CompileError) as caught:
        nvrtc.compile(source, "sm_90", name="pre.cu")
    error = caught.value
    assert error.code == "E-COMPILE"
    assert "pre.cu in kernel k." in error.message
    assert Path(error.where).read_text() == source
    assert any("pre.cu(2): error" in note and "nowhere" in note for note in error.notes)
    assert any(note.startswith("include paths: ") for note in error.notes)


def test_rejection_by_the_assembler_is_a_compile_error_too() -> None:
    with pytest.raises(CompileError, match="no_such_instruction"):
        nvrtc.compile('extern "C" __global__ void k() { asm volatile("no_such_instruction;"); }', "sm_90")


# --- the cache -------------------------------------------------------------------------------------------


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The targets that really went through NVRTC."""
    seen: list[str] = []
    original = Nvrtc.compile

    def counted(self: Nvrtc, source: str, options: tuple[str, ...], name: str) -> nvrtc_library.NvrtcResult:
        seen.append(options[0])
        return original(self, source, options, name)

    monkeypatch.setattr(Nvrtc, "compile", counted)
    return seen


def test_second_compilation_comes_from_the_cache(runs: list[str]) -> None:
    first = nvrtc.compile(COUNTED, "sm_90")
    assert nvrtc.compile(COUNTED, "sm_90") == first
    assert len(runs) == 1


def test_what_nvrtc_kept_itself_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """From its own cache, which it has on machines with a GPU, comes no ptxas log: no registers, no spills."""
    given: list[tuple[str, ...]] = []
    original = Nvrtc.compile

    def watched(self: Nvrtc, source: str, options: tuple[str, ...], name: str) -> nvrtc_library.NvrtcResult:
        given.append(options)
        return original(self, source, options, name)

    monkeypatch.setattr(Nvrtc, "compile", watched)
    nvrtc.compile(COUNTED, "sm_90")
    (options,) = given
    assert ("--no-cache" in options) == (find_nvrtc().version >= (12, 9))


def test_everything_that_changes_the_result_changes_the_key(runs: list[str]) -> None:
    nvrtc.compile(COUNTED, "sm_90")
    nvrtc.compile(COUNTED + " ", "sm_90")
    nvrtc.compile(COUNTED, "sm_90a")
    nvrtc.compile(COUNTED, "compute_90")
    nvrtc.compile(COUNTED, "sm_90", extra=("-DX=1",))
    nvrtc.compile(COUNTED, "sm_90", extra=("-DX=2",))
    nvrtc.compile(COUNTED, "sm_90", name="other.cu")
    assert len(runs) == 7


def test_same_kernel_name_with_another_body_is_another_module() -> None:
    one = nvrtc.compile(SMALL, "sm_90")
    two = nvrtc.compile(SMALL.replace("+ c", "- c"), "sm_90")
    assert one.cubin != two.cubin
    assert nvrtc.compile(SMALL, "sm_90").cubin == one.cubin


def test_an_edited_header_is_noticed(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Nvrtc
) -> None:
    (tmp_path / "cuda_bf16.h").write_text("#define SCALE 2.0f\n")
    (tmp_path / "cuda.h").write_text(f"#define CUDA_VERSION {library.version[0]}000\n")
    folder = HeaderDir(tmp_path, library.version[0] * 1000)
    monkeypatch.setattr(Nvrtc, "include_dirs", lambda self: (folder,))
    source = '#include <cuda_bf16.h>\nextern "C" __global__ void k(float* a) { a[0] = SCALE; }'
    first = nvrtc.compile(source, "sm_90")
    (tmp_path / "cuda_bf16.h").write_text("#define SCALE 3.25f\n")
    assert nvrtc.compile(source, "sm_90").ptx != first.ptx
    assert len(runs) == 2


def test_text_with_project_headers_is_never_cached(
    runs: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.h").write_text("#define V 1.0f\n")
    monkeypatch.chdir(tmp_path)
    source = '#include "mine.h"\nextern "C" __global__ void k(float* a) { a[0] = V; }'
    for _ in range(2):
        nvrtc.compile(source, "sm_90", extra=(f"-I{tmp_path}",))
    assert len(runs) == 2


@pytest.mark.parametrize("damage", [b"", b"\x00" * 40, b"{}", None])
def test_a_corrupt_entry_is_a_miss(runs: list[str], tmp_path: Path, damage: bytes | None) -> None:
    first = nvrtc.compile(SMALL, "sm_90")
    (entry,) = (tmp_path / "cache").rglob("*.nvrtc")
    content = entry.read_bytes()
    entry.write_bytes(content[:-7] if damage is None else damage)
    assert nvrtc.compile(SMALL, "sm_90") == first
    assert len(runs) == 2


def test_a_well_named_entry_of_another_format_is_a_miss(runs: list[str], tmp_path: Path) -> None:
    from mhcgen import cache

    first = nvrtc.compile(SMALL, "sm_90")
    (entry,) = (tmp_path / "cache").rglob("*.nvrtc")
    key = entry.parent.name
    entry.unlink()
    cache.store(key, ".nvrtc", b"something else entirely")
    assert nvrtc.compile(SMALL, "sm_90") == first
    assert len(runs) == 2


def test_many_threads_compile_the_same_text() -> None:
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: nvrtc.compile(SMALL, "sm_90"), range(16)))
    assert all(one == made[0] for one in made)


def test_a_full_disk_does_not_lose_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> Path:
        raise EnvironmentFault("E-CACHE", "no space")

    monkeypatch.setattr("mhcgen.cache.store", full)
    assert nvrtc.compile(SMALL, "sm_90").cubin


# --- what is missing -------------------------------------------------------------------------------------


def test_no_nvrtc_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MHCGEN_NVRTC", raising=False)
    monkeypatch.setattr(nvrtc_library, "_library_files", lambda: iter(["/nowhere/libnvrtc.so.13"]))
    with pytest.raises(EnvironmentFault) as caught:
        nvrtc.compile(SMALL, "sm_90")
    assert caught.value.code == "E-NO-NVRTC"
    assert "pip install 'mhcgen[nvrtc]'" in str(caught.value)
    assert "/nowhere/libnvrtc.so.13" in str(caught.value)


def test_an_explicit_library_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_NVRTC", "/nowhere/libnvrtc.so")
    with pytest.raises(EnvironmentFault, match="unset MHCGEN_NVRTC"):
        nvrtc.compile(SMALL, "sm_90")


def test_a_library_newer_than_the_driver_is_not_used() -> None:
    with pytest.raises(EnvironmentFault, match="newer than CUDA 4") as caught:
        nvrtc.compile(SMALL, "sm_90", max_major=4)
    assert caught.value.code == "E-NO-NVRTC"


def test_a_library_that_is_no_nvrtc_is_passed_over(tmp_path: Path) -> None:
    fake = tmp_path / "libnvrtc.so.13"
    fake.write_bytes(b"not a library")
    with pytest.raises(OSError):
        Nvrtc(str(fake))
    with pytest.raises(OSError, match="not an NVRTC library"):
        Nvrtc("libc.so.6")


def test_missing_headers_name_the_package(monkeypatch: pytest.MonkeyPatch, library: Nvrtc) -> None:
    monkeypatch.setattr(Nvrtc, "include_dirs", lambda self: ())
    with pytest.raises(EnvironmentFault) as caught:
        nvrtc.compile(COUNTED, "sm_90")
    assert caught.value.code == "E-NO-CUDA-HEADERS"
    assert f"pip install {library.runtime_package}" in str(caught.value)
    assert "include paths: none" in str(caught.value)
    assert nvrtc.compile(SMALL, "sm_90").cubin  # text without includes needs no headers


def test_headers_of_another_major_version_are_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, library: Nvrtc
) -> None:
    include = tmp_path / "include"
    include.mkdir()
    (include / "cuda_bf16.h").write_text("#error wrong version\n")
    (include / "cuda.h").write_text(f"#define CUDA_VERSION {library.version[0] - 1}080\n")
    monkeypatch.setenv("CUDA_PATH", str(tmp_path))
    assert include in {folder.path for folder in header_dirs(library.path)}
    assert all(folder.path != include for folder in library.include_dirs())
    assert nvrtc.compile(COUNTED, "sm_90").cubin


# --- the guard of decision 0002 --------------------------------------------------------------------------


def guarded(body: str = "a[0] = a[1] / a[2];") -> str:
    (guard,) = re.findall(r"```cuda\n(.*?)```", GUARD_PAGE.read_text(), re.DOTALL)
    return f'{guard}\nextern "C" __global__ void k(float* a) {{ refuse_fast_math(); {body} }}\n'


def raw(library: Nvrtc, *options: str) -> nvrtc_library.NvrtcResult:
    return library.compile(guarded(), ("--gpu-architecture=sm_90", *options), "guarded.cu")


def test_guard_leaves_no_trace_in_a_correct_build() -> None:
    plain = 'extern "C" __global__ void k(float* a) { a[0] = a[1] / a[2]; }\n'
    assert nvrtc.compile(guarded(), "sm_90").ptx == nvrtc.compile(plain, "sm_90").ptx


@pytest.mark.parametrize("option", ["--use_fast_math", "-ftz=true", "-prec-div=false", "-prec-sqrt=false"])
def test_guard_stops_fast_math_under_nvrtc(library: Nvrtc, option: str) -> None:
    result = raw(library, option)
    assert result.code and "must not be built with" in result.log


def test_guard_lets_flushing_pass_only_when_asked(library: Nvrtc) -> None:
    assert raw(library, "-ftz=true", "-DMHCGEN_ALLOW_FTZ").code == 0
    assert raw(library, "--use_fast_math", "-DMHCGEN_ALLOW_FTZ").code


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on PATH")
@pytest.mark.parametrize(
    ("options", "accepted"),
    [
        ("", True),
        ("-fmad=false", True),
        ("-G", True),
        ("--use_fast_math", False),
        ("-ftz=true", False),
        ("-ftz=true -DMHCGEN_ALLOW_FTZ", True),
        ("-prec-div=false", False),
        ("-prec-sqrt=false", False),
    ],
)
def test_guard_under_nvcc(tmp_path: Path, options: str, accepted: bool) -> None:
    (tmp_path / "k.cu").write_text(guarded())
    command = ["nvcc", "-arch=sm_90", "-cubin", "k.cu", "-o", "k.cubin", *options.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode == 0) is accepted, done.stderr
    if not accepted:
        assert "this_text_must_not_be_built_with" in done.stderr
