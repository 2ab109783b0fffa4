"""Launches against a recording driver: structures, arguments, streams, devices and limits, without a GPU."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_fakes import FakeArray, FakeStream, StubDriver, build_driver, fake_cupy

from mhcgen.backends import cuda, cupy_state, driver, nvrtc
from mhcgen.backends.ptx import Counts
from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.errors import (
    CompileError,
    EnvironmentFault,
    InputError,
    InputTypeError,
    InternalError,
    LaunchError,
    MhcgenError,
    UsageError,
)

SIGNATURE = KernelSignature(
    "mix",
    (
        Param("x", "const float*", False),
        Param("y", "__nv_bfloat16*", True),
        Param("T", "long long", False),
        Param("n", "int", False),
        Param("eps", "float", False),
        Param("big", "double", False),
        Param("count", "unsigned", False),
    ),
)
BARE = KernelSignature("bare", (Param("n", "int", False),))
PTX = """
.version 9.0
.visible .entry mix(
.param .u64 .ptr .align 1 mix_param_0,
.param .u64 .ptr .align 1 mix_param_1,
.param .u64 mix_param_2, .param .u32 mix_param_3, .param .f32 mix_param_4, .param .f64 mix_param_5,
.param .u32 mix_param_6
)
{
ret;
}
.visible .entry bare(.param .u32 bare_param_0)
{
ret;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_driver(tmp_path_factory.mktemp("stub"))
    if built is None:
        pytest.skip("needs g++ and cuda.h: pip install nvidia-cuda-runtime")
    return built


@pytest.fixture
def stub(library: Path, monkeypatch: pytest.MonkeyPatch) -> StubDriver:
    made = StubDriver(str(library))
    made.setup()
    monkeypatch.setattr(driver, "_loaded", made)
    monkeypatch.setitem(sys.modules, "cupy", fake_cupy())
    monkeypatch.setattr(cupy_state, "installed", lambda: (("cupy-cuda13x", "14.0"),))
    monkeypatch.setattr(cuda, "_modules", {})
    return made


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Targets that were compiled; the image is the source text."""
    targets: list[str] = []

    def compile(source: str, target: str, **_: Any) -> nvrtc.Compiled:
        targets.append(target)
        return nvrtc.Compiled(PTX, source.encode(), "", {}, Counts(), (), (), (13, 0), target, target)

    monkeypatch.setattr(nvrtc, "compile", compile)
    monkeypatch.setattr(cuda, "find_nvrtc", lambda major: None)
    return targets


@pytest.fixture
def module(stub: StubDriver, compiled: list[str]) -> cuda.CudaModule:
    return cuda.CudaModule("text", [SIGNATURE, BARE])


def arguments(device: int = 0, **changed: Any) -> list[Any]:
    values: dict[str, Any] = {
        "x": FakeArray(np.float32, 0x7F00_0000_1000, device),
        "y": FakeArray(ml_dtypes.bfloat16, 0x7F00_0000_2000, device),
        "T": 2**40 + 3,
        "n": -4,
        "eps": 1e-6,
        "big": 1e-300,
        "count": 2**32 - 1,
    }
    return list((values | changed).values())


def test_the_driver_sees_every_field_where_cuda_h_says(module: cuda.CudaModule, stub: StubDriver) -> None:
    module.launch("mix", (4, 2, 3), (64, 2, 1), arguments(), dynamic_shared=512)
    assert stub.words[:7] == [4, 2, 3, 64, 2, 1, 512]
    assert stub.words[7:10] == [0x10, 0, 0]
    assert stub.argument(0, np.uint64) == 0x7F00_0000_1000
    assert stub.argument(1, np.uint64) == 0x7F00_0000_2000
    assert stub.argument(2, np.int64) == 2**40 + 3
    assert stub.argument(3, np.int32) == -4
    assert stub.argument(4, np.float32) == np.float32(1e-6)
    assert stub.argument(5, np.float64) == 1e-300
    assert stub.argument(6, np.uint32) == 2**32 - 1
    assert module.launches == {"mix": 1}


def test_cluster_and_dependent_launch(module: cuda.CudaModule, stub: StubDriver) -> None:
    module.launch("mix", (8,), (64,), arguments(), cluster=(4,), dependent=True)
    assert stub.words[9:14] == [2, 4, 1, 1, 1]
    module.launch("mix", (8,), (64,), arguments(), dependent=True)
    assert stub.words[9:14] == [1, 0, 0, 0, 1]
    module.launch("mix", (8,), (64,), arguments(), cluster=(2, 1, 1))
    assert stub.words[9:14] == [1, 2, 1, 1, 0]
    module.launch("mix", (8,), (64,), arguments())
    assert stub.words[9:14] == [0, 0, 0, 0, 0]
    assert stub.number("any_cluster_set") == 0
    module.launch("mix", (16,), (64,), arguments(), cluster=(16,))
    assert stub.number("any_cluster_set") == 1


def test_before_sm_90_clusters_are_refused_and_dependence_is_dropped(
    stub: StubDriver, compiled: list[str]
) -> None:
    stub.setup(capability=86)
    module = cuda.CudaModule("text", [SIGNATURE])
    assert compiled == ["sm_86"]
    with pytest.raises(LaunchError, match="needs clusters"):
        module.launch("mix", (8,), (64,), arguments(), cluster=(4,))
    module.launch("mix", (8,), (64,), arguments(), dependent=True)
    assert stub.words[9] == 0


def test_every_spelling_of_a_scalar_gives_the_same_bytes(module: cuda.CudaModule, stub: StubDriver) -> None:
    for eps in (1e-6, np.float32(1e-6), np.float64(1e-6), np.array(1e-6), 1e-6):
        for tokens in (7, np.int64(7), np.int32(7), np.array(7), 7):
            module.launch("mix", (1,), (32,), arguments(eps=eps, T=tokens))
            assert stub.argument(4, np.float32) == np.float32(1e-6)
            assert stub.argument(2, np.int64) == 7


def test_signs_of_zero_and_equal_numbers_of_two_types_are_not_mixed_up(
    module: cuda.CudaModule, stub: StubDriver
) -> None:
    for value in (0.0, -0.0, 0, 1, 1.0, -0.0):
        module.launch("mix", (1,), (32,), arguments(eps=value, big=value))
        assert np.signbit(stub.argument(4, np.float32)) == np.signbit(np.float64(value))
        assert stub.argument(5, np.float64) == value


@pytest.mark.parametrize(
    ("change", "code", "kind"),
    [
        ({"eps": "1"}, "I-SCALAR", InputError),
        ({"n": 2**31}, "I-SCALAR", InputError),
        ({"n": True}, "I-SCALAR", InputError),
        ({"x": np.zeros(4, np.float32)}, "I-ARRAY", InputTypeError),
        ({"x": None}, "I-ARRAY", InputTypeError),
        ({"x": FakeArray(np.float64)}, "I-DTYPE", InputTypeError),
        ({"y": FakeArray(np.uint16)}, "I-DTYPE", InputTypeError),
        ({"y": FakeArray(np.float16)}, "I-DTYPE", InputTypeError),
        ({"y": FakeArray(np.float32)}, "I-DTYPE", InputTypeError),
        ({"x": FakeArray(ml_dtypes.bfloat16)}, "I-DTYPE", InputTypeError),
        ({"x": FakeArray(np.float32, contiguous=False)}, "I-CONTIGUOUS", InputError),
        ({"x": FakeArray(np.float32, device=1)}, "I-DEVICE", InputError),
    ],
)
def test_unfit_arguments_never_reach_the_driver(
    module: cuda.CudaModule, stub: StubDriver, change: dict[str, Any], code: str, kind: type[MhcgenError]
) -> None:
    with pytest.raises(kind) as caught:
        module.launch("mix", (1,), (32,), arguments(**change))
    assert caught.value.code == code
    assert caught.value.where or code == "I-DEVICE"
    assert stub.number("launches") == 0 and not module.launches


def test_hints_say_how_to_move_or_mark_an_array(module: cuda.CudaModule) -> None:
    with pytest.raises(InputTypeError, match="to_device"):
        module.launch("mix", (1,), (32,), arguments(x=np.zeros(4, np.float32)))
    with pytest.raises(InputTypeError, match=r"view\(ml_dtypes\.bfloat16\)"):
        module.launch("mix", (1,), (32,), arguments(y=FakeArray(np.uint16)))


def test_wrong_number_of_arguments_and_unknown_kernel(module: cuda.CudaModule) -> None:
    with pytest.raises(InputError, match="takes 7 arguments, not 6"):
        module.launch("mix", (1,), (32,), arguments()[:-1])
    with pytest.raises(UsageError, match="it has: mix, bare"):
        module.launch("nix", (1,), (32,), [])


def test_zero_grid_is_no_launch_but_arguments_are_checked(module: cuda.CudaModule, stub: StubDriver) -> None:
    module.launch("mix", (0,), (32,), arguments())
    module.launch("mix", (4, 0, 1), (32,), arguments())
    assert stub.number("launches") == 0 and not module.launches
    with pytest.raises(InputError):
        module.launch("mix", (0,), (32,), arguments(n="four"))


@pytest.mark.parametrize(
    ("grid", "block", "extra"),
    [
        ((1, 65536), (32,), {}),
        ((2**31,), (32,), {}),
        ((-1,), (32,), {}),
        ((1,), (0,), {}),
        ((1,), (2048,), {}),
        ((1,), (512, 4), {}),
        ((1,), (1, 1, 65), {}),
        ((1, 1, 1, 1), (32,), {}),
        ((6,), (32,), {"cluster": (4,)}),
        ((4,), (32,), {"dynamic_shared": -1}),
    ],
)
def test_impossible_shapes_are_refused(
    module: cuda.CudaModule, stub: StubDriver, grid: Any, block: Any, extra: dict[str, Any]
) -> None:
    with pytest.raises(LaunchError) as caught:
        module.launch("mix", grid, block, arguments(), **extra)
    assert caught.value.code == "E-LAUNCH"
    assert stub.number("launches") == 0


def test_more_than_48_kib_of_shared_memory_is_opted_into_once(
    module: cuda.CudaModule, stub: StubDriver
) -> None:
    module.launch("mix", (1,), (32,), arguments(), dynamic_shared=47 * 1024)
    assert stub.number("shared_set") == 0
    # The stub's kernels have 1 KiB of static shared memory, which counts.
    module.launch("mix", (1,), (32,), arguments(), dynamic_shared=47 * 1024 + 4)
    assert stub.number("shared_set") == 47 * 1024 + 4
    module.launch("mix", (1,), (32,), arguments(), dynamic_shared=200 * 1024)
    module.launch("mix", (1,), (32,), arguments(), dynamic_shared=100 * 1024)
    assert stub.number("shared_set") == 200 * 1024
    with pytest.raises(LaunchError, match="limit of the device per block: 232448"):
        module.launch("mix", (1,), (32,), arguments(), dynamic_shared=232448)


class TorchStream:
    cuda_stream = 0x77


class ProtocolStream:
    def __cuda_stream__(self) -> tuple[int, int]:
        return (0, 0x88)


class DraftStream:
    __cuda_stream__ = (0, 0x99)


@pytest.mark.parametrize(
    ("stream", "handle"),
    [(None, 0x10), (0, 0), (2, 2), (np.int64(5), 5), (FakeStream(0x55), 0x55), (FakeStream(0x56, 0), 0x56),
     (TorchStream(), 0x77), (ProtocolStream(), 0x88), (DraftStream(), 0x99)],
)  # fmt: skip
def test_streams(module: cuda.CudaModule, stub: StubDriver, stream: Any, handle: int) -> None:
    module.launch("mix", (1,), (32,), arguments(), stream=stream)
    assert stub.words[7] == handle


def test_what_is_no_stream_of_the_device_is_refused(module: cuda.CudaModule) -> None:
    with pytest.raises(InputTypeError, match="not a stream"):
        module.launch("mix", (1,), (32,), arguments(), stream="default")
    with pytest.raises(InputTypeError, match="not a stream"):
        module.launch("mix", (1,), (32,), arguments(), stream=True)
    with pytest.raises(InputError, match="device 1"):
        module.launch("mix", (1,), (32,), arguments(), stream=FakeStream(0x55, 1))


def test_arrays_decide_the_device(module: cuda.CudaModule, stub: StubDriver, compiled: list[str]) -> None:
    module.launch("mix", (1,), (32,), arguments(device=1))
    assert stub.words[7:9] == [0x20, 1]
    assert stub.number("pushes") == 0  # the context that was current is current again
    module.launch("mix", (1,), (32,), arguments(device=0))
    assert stub.words[7:9] == [0x10, 0]
    for _ in range(3):
        module.launch("mix", (1,), (32,), arguments(device=1))
    assert len(compiled) == 2
    assert stub.number("modules_loaded") == 2


def test_a_kernel_without_arrays_runs_on_the_current_device(
    module: cuda.CudaModule, stub: StubDriver
) -> None:
    module.launch("bare", [1], [32], [5])
    assert stub.words[8] == 0 and stub.argument(0, np.int32) == 5


def test_equal_modules_are_loaded_once(stub: StubDriver, compiled: list[str]) -> None:
    first, second = (cuda.CudaModule("text", [SIGNATURE]) for _ in range(2))
    cuda.CudaModule("other text", [SIGNATURE])
    assert first is not second
    assert stub.number("modules_loaded") == 2


def test_token_counts_never_compile(module: cuda.CudaModule, stub: StubDriver, compiled: list[str]) -> None:
    for tokens in (1, 2, 17, 4096, 65535, 10**6):
        module.launch("mix", (tokens,), (128,), arguments(T=tokens))
    assert len(compiled) == 1 and stub.number("modules_loaded") == 1


def test_threads_do_not_share_argument_memory(module: cuda.CudaModule) -> None:
    packer = module._packers["mix"]
    first, second = packer.take(), packer.take()
    assert first is not second
    packer.give(first)
    assert packer.take() is first

    def work() -> None:
        for _ in range(200):
            module.launch("mix", (1,), (32,), arguments())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(packer._free) <= 6


def test_a_refused_launch_says_what_was_asked(module: cuda.CudaModule) -> None:
    with pytest.raises(LaunchError) as caught:
        module.launch("mix", (3,), (96,), arguments(), stream=666)
    assert "grid (3, 1, 1), block (96, 1, 1)" in str(caught.value)
    assert "CUDA_ERROR_STUB" in str(caught.value)


def test_a_refused_image_carries_the_log(stub: StubDriver, compiled: list[str]) -> None:
    with pytest.raises(LaunchError) as caught:
        cuda.CudaModule("BAD", [SIGNATURE])
    assert caught.value.code == "E-LOAD"
    assert "ptxas of the stub says no" in caught.value.notes


def test_a_missing_kernel_is_named(stub: StubDriver, compiled: list[str]) -> None:
    with pytest.raises(LaunchError, match="no kernel missing"):
        cuda.CudaModule("text", [KernelSignature("missing", ())])


@pytest.mark.parametrize(
    "params",
    [
        SIGNATURE.params[:-1],
        (*SIGNATURE.params, Param("more", "int", False)),
        (*SIGNATURE.params[:2], Param("T", "int", False), *SIGNATURE.params[3:]),
        (*SIGNATURE.params[:4], Param("eps", "double", False), *SIGNATURE.params[5:]),
    ],
)
def test_a_signature_that_is_not_the_texts_is_our_bug(
    stub: StubDriver, compiled: list[str], params: tuple[Param, ...]
) -> None:
    with pytest.raises(InternalError, match="not that of its text"):
        cuda.CudaModule("text", [KernelSignature("mix", params)])
    assert stub.number("modules_loaded") == 0


@pytest.mark.parametrize(
    ("arch", "capability", "target"),
    [
        (None, 90, "sm_90"),
        ("sm_90a", 90, "sm_90a"),
        ("sm_80", 90, "sm_90"),
        ("sm_100f", 103, "sm_103f"),
        ("sm_120", 121, "sm_121"),
        ("compute_90", 90, "sm_90"),
        ("sm_90a", 100, None),
        ("sm_100", 90, None),
        ("sm_100f", 120, None),
    ],
)
def test_target_of_a_plan_on_a_device(
    stub: StubDriver, compiled: list[str], arch: str | None, capability: int, target: str | None
) -> None:
    stub.setup(capability=capability)
    if target is None:
        with pytest.raises(LaunchError) as caught:
            cuda.CudaModule("text", [SIGNATURE], arch=arch)
        assert caught.value.code == "E-ARCH"
    else:
        cuda.CudaModule("text", [SIGNATURE], arch=arch)
        assert compiled == [target]


def test_fallback_to_cupy_flushes_and_says_so(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(_: object) -> None:
        raise EnvironmentFault("E-NO-NVRTC", "no usable NVRTC.", hints=("pip install 'mhcgen[nvrtc]'",))

    monkeypatch.setattr(cuda, "find_nvrtc", nothing)
    module = cuda.CudaModule("text", [BARE])
    assert (module.mode, module.flushes_subnormals) == ("cupy", True)
    assert "mhcgen[nvrtc]" in " ".join(module.notes)
    ((code, options),) = sys.modules["cupy"].raw
    assert code == "text"
    assert {"--fmad=false", "-DMHCGEN_ALLOW_FTZ", "-std=c++17"} <= set(options)
    module.launch("bare", (1,), (32,), [3])
    assert stub.argument(0, np.int32) == 3
    assert module.compiled() is None
    with pytest.raises(EnvironmentFault):
        cuda.CudaModule("text", [BARE], compile="nvrtc")


def test_asking_for_cupy_takes_cupy_and_reports_its_errors(stub: StubDriver, compiled: list[str]) -> None:
    module = cuda.CudaModule("text", [BARE], compile="cupy")
    assert module.flushes_subnormals and compiled == []
    assert not cuda.CudaModule("text", [BARE]).flushes_subnormals
    with pytest.raises(CompileError, match=r"kern\.cu"):
        cuda.CudaModule("rejected", [BARE], compile="cupy")
    with pytest.raises(UsageError):
        cuda.CudaModule("text", [BARE], compile="gcc")


def test_a_driver_without_devices_or_too_old_says_so(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STUB_INIT", "100")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(EnvironmentFault, match="CUDA_VISIBLE_DEVICES=''") as caught:
        StubDriver(str(library))
    assert caught.value.code == "E-NO-GPU"
    monkeypatch.setenv("STUB_INIT", "804")
    with pytest.raises(EnvironmentFault, match="does not start"):
        StubDriver(str(library))


def test_cupy_for_a_newer_cuda_than_the_driver(stub: StubDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cuda.is_available() == (True, "")
    monkeypatch.setenv("STUB_VERSION", "12080")
    ready, reason = cuda.is_available()
    assert not ready
    assert "CuPy needs CUDA 13, but the driver supports CUDA 12" in reason
    assert "mhcgen[cuda12]" in reason
