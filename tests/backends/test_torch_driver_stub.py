"""mhcgen.torch's launcher against the recording driver: arguments, stream, device and cluster."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'mhcgen[torch]'")

from cuda_fakes import StubDriver, build_driver

from mhcgen.backends.signature import KernelSignature, Param
from mhcgen.errors import LaunchError
from mhcgen.torch.launch import Launcher

#: The stub keeps seven arguments of a kernel of this name.
SIGNATURE = KernelSignature(
    "mix",
    (
        *(Param(name, "const float*", False) for name in "abcd"),
        Param("out", "float*", True),
        Param("per_cluster", "int", False),
        Param("tokens", "long long", False),
    ),
)
SHAPE = ((3, 16, 1), (512, 1, 1), 0, (1, 16, 1), False)
VALUES = [0x7F00_0000_0010 + i for i in range(5)] + [-7, 2**40 + 1]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    built = build_driver(tmp_path_factory.mktemp("stub"))
    if built is None:
        pytest.skip("needs g++ and cuda.h: pip install nvidia-cuda-runtime")
    return built


@pytest.fixture
def stub(library: Path) -> StubDriver:
    made = StubDriver(str(library))
    made.setup()
    return made


def launcher(stub: StubDriver, device: int) -> Launcher:
    module = stub.load_module(device, b"image\0")
    return Launcher(stub, stub.function(device, module, "mix"), SIGNATURE, (1, 16, 1))


@pytest.mark.parametrize("device", [0, 1])
def test_the_driver_sees_the_launch(stub: StubDriver, device: int) -> None:
    kernel = launcher(stub, device)
    assert stub.number("any_cluster_set") == 1, "16 blocks are more than every device has"
    kernel.launch(VALUES, SHAPE, 0x1234)
    assert stub.words[:7] == [3, 16, 1, 512, 1, 1, 0]
    assert stub.words[7:10] == [0x1234, device, 1]
    assert stub.words[10:13] == [1, 16, 1]
    assert [stub.argument(i, np.uint64) for i in range(5)] == VALUES[:5]
    assert stub.argument(5, np.int32) == -7 and stub.argument(6, np.int64) == 2**40 + 1
    assert stub.number("pushes") == 0, "the caller's device is current again"
    assert kernel.launches == 1
    kernel.launch(VALUES, ((9, 1, 1), (64, 1, 1), 0, None, True), 0x10)
    assert stub.words[:10] == [9, 1, 1, 64, 1, 1, 0, 0x10, device, 1] and stub.words[13] == 1


def test_a_refused_launch_is_an_error_and_its_buffer_is_used_again(stub: StubDriver) -> None:
    kernel = launcher(stub, 0)
    with pytest.raises(LaunchError) as error:
        kernel.launch(VALUES, SHAPE, 666)
    assert error.value.code == "E-LAUNCH" and "cluster (1, 16, 1)" in str(error.value)
    kernel.launch(VALUES, SHAPE, 0)
    assert kernel.launches == 1 and len(kernel._free) == 1
