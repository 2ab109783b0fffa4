"""A driver library and a CuPy that record what is asked of them, for tests on machines without a GPU.

The driver is compiled from C against the real `cuda.h`, so that a structure laid out wrongly in Python is
seen by the compiler's own idea of it.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import types
from pathlib import Path
from typing import Any

import numpy as np

from mhcgen.backends.driver import Driver
from mhcgen.backends.nvrtc_library import header_dirs

STUB = r"""
#include <cuda.h>
#include <stdlib.h>
#include <string.h>
#define DEVICES 2
struct Ctx { int device; } contexts[DEVICES] = {{0}, {1}};
struct Fun { int device; char name[64]; };
static CUcontext current;
static int relaxed;
static int capability = 90;
extern "C" {
unsigned long long launch[128];
int launches, modules_loaded, shared_set, any_cluster_set, pushes;
void stub_setup(int cc) {
  capability = cc; launches = modules_loaded = shared_set = any_cluster_set = pushes = 0;
  current = (CUcontext)&contexts[0];
}
CUresult cuInit(unsigned) {
  const char* code = getenv("STUB_INIT");
  return code ? (CUresult)atoi(code) : CUDA_SUCCESS;
}
CUresult cuDriverGetVersion(int* version) {
  const char* text = getenv("STUB_VERSION");
  *version = text ? atoi(text) : 13000;
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetCount(int* count) { *count = DEVICES; return CUDA_SUCCESS; }
CUresult cuDeviceGetName(char* name, int, CUdevice device) {
  strcpy(name, device ? "Stub B" : "Stub A");
  return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
  *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? capability / 10
         : attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR ? capability % 10
         : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? 232448 : -1;
  return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult, const char** name) { *name = "CUDA_ERROR_STUB"; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult, const char** text) { *text = "of the stub"; return CUDA_SUCCESS; }
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  *context = (CUcontext)&contexts[device];
  return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) { *context = current; return CUDA_SUCCESS; }
CUresult cuCtxPushCurrent_v2(CUcontext context) { current = context; ++pushes; return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  *context = current; current = (CUcontext)&contexts[0]; --pushes;
  return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  int before = relaxed;
  relaxed = *mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  *mode = before ? CU_STREAM_CAPTURE_MODE_RELAXED : CU_STREAM_CAPTURE_MODE_GLOBAL;
  return CUDA_SUCCESS;
}
CUresult cuModuleLoadDataEx(CUmodule* module, const void* image, unsigned n, CUjit_option* options,
                            void** values) {
  if (!relaxed) return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
  ++modules_loaded;
  if (!strncmp((const char*)image, "BAD", 3)) {
    if (n == 2 && options[0] == CU_JIT_ERROR_LOG_BUFFER && options[1] == CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES
        && (size_t)values[1] >= 64)
      strcpy((char*)values[0], "ptxas of the stub says no");
    return CUDA_ERROR_INVALID_IMAGE;
  }
  *module = (CUmodule)current;
  return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule module, const char* name) {
  if (!strcmp(name, "missing")) return CUDA_ERROR_NOT_FOUND;
  Fun* made = (Fun*)malloc(sizeof(Fun));
  made->device = ((Ctx*)module)->device;
  strncpy(made->name, name, 63);
  *function = (CUfunction)made;
  return CUDA_SUCCESS;
}
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute attribute, CUfunction) {
  *value = attribute == CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES ? 1024 : -1;
  return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction, CUfunction_attribute attribute, int value) {
  if (attribute == CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED) {
    any_cluster_set = value;
    return CUDA_SUCCESS;
  }
  if (attribute != CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || value > 232448 - 1024)
    return CUDA_ERROR_INVALID_VALUE;
  shared_set = value;
  return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) { return relaxed ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED; }
CUresult cuLaunchKernelEx(const CUlaunchConfig* c, CUfunction function, void** parameters, void** extra) {
  Fun* f = (Fun*)function;
  if (extra || current != (CUcontext)&contexts[f->device]) return CUDA_ERROR_INVALID_CONTEXT;
  if ((size_t)c->hStream == 666) return CUDA_ERROR_INVALID_HANDLE;
  memset(launch, 0, sizeof launch);
  unsigned head[] = {c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                     c->sharedMemBytes};
  for (int i = 0; i < 7; ++i) launch[i] = head[i];
  launch[7] = (unsigned long long)c->hStream;
  launch[8] = f->device;
  launch[9] = c->numAttrs;
  for (unsigned i = 0; i < c->numAttrs; ++i) {
    const CUlaunchAttribute& a = c->attrs[i];
    if (a.id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION) {
      launch[10] = a.value.clusterDim.x; launch[11] = a.value.clusterDim.y; launch[12] = a.value.clusterDim.z;
    } else if (a.id == CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION) {
      launch[13] = a.value.programmaticStreamSerializationAllowed;
    } else return CUDA_ERROR_INVALID_VALUE;
  }
  for (int i = 0; i < (strcmp(f->name, "mix") ? 1 : 7); ++i)  // parameters of the tests' two kernels
    memcpy(&launch[32 + i], parameters[i], 8);
  ++launches;
  return CUDA_SUCCESS;
}
}
"""


def build_driver(folder: Path) -> Path | None:
    """The stub library, or None where there is no g++ or no cuda.h."""
    include = next((found.path for found in header_dirs() if (found.path / "cuda.h").is_file()), None)
    if include is None or shutil.which("g++") is None:
        return None
    (folder / "stub.cpp").write_text(STUB)
    library = folder / "libcuda_stub.so"
    command = ["g++", "-shared", "-fPIC", "-O1", "-w", f"-I{include}", "stub.cpp", "-o", str(library)]
    subprocess.run(command, cwd=folder, check=True, timeout=120)
    return library


class StubDriver(Driver):
    """The stub, with a view of the last launch."""

    def setup(self, capability: int = 90) -> None:
        self._library.stub_setup(capability)
        self.capability.cache_clear()

    def number(self, name: str) -> int:
        return ctypes.c_int.in_dll(self._library, name).value

    @property
    def words(self) -> list[int]:
        return list((ctypes.c_ulonglong * 128).in_dll(self._library, "launch"))

    def argument(self, index: int, dtype: type) -> Any:
        raw = np.array([self.words[32 + index]], np.uint64)
        return raw.view(dtype)[0]


class FakeArray:
    """As much of cupy.ndarray as a launch looks at."""

    def __init__(
        self,
        dtype: Any,
        pointer: int = 0x7000,
        device: int = 0,
        contiguous: bool = True,
        shape: tuple[int, ...] = (4,),
    ) -> None:
        self.dtype = np.dtype(dtype)
        self.shape = shape
        self.strides = (self.dtype.itemsize,)
        self.flags = types.SimpleNamespace(c_contiguous=contiguous)
        self.data = types.SimpleNamespace(ptr=pointer, device_id=device)


class FakeStream:
    def __init__(self, pointer: int, device: int = -1) -> None:
        self.ptr = pointer
        self.device_id = device


class CompileException(Exception):
    pass


def fake_cupy(runtime: int = 13000, streams: tuple[int, int] = (0x10, 0x20)) -> Any:
    """A module in the place of CuPy; `raw` lists the modules that CuPy was asked to compile."""
    cupy = types.ModuleType("cupy")
    raw: list[tuple[str, tuple[str, ...]]] = []

    class Device:
        def __init__(self, device: int | None = None) -> None:
            self.id = device

        def __enter__(self) -> Device:
            return self

        def __exit__(self, *_: object) -> None:
            return None

    class RawModule:
        def __init__(self, code: str, options: tuple[str, ...] = ()) -> None:
            if "rejected" in code:
                raise CompileException("kern.cu(1): error: rejected")
            raw.append((code, options))

        def get_function(self, name: str) -> Any:
            self.text = ctypes.create_string_buffer(128)  # stands for the CUfunction: device 0, no name
            return types.SimpleNamespace(kernel=types.SimpleNamespace(ptr=ctypes.addressof(self.text)))

    cupy.__dict__.update(
        ndarray=FakeArray,
        RawModule=RawModule,
        raw=raw,
        cuda=types.SimpleNamespace(
            Device=Device,
            runtime=types.SimpleNamespace(runtimeGetVersion=lambda: runtime, getDevice=lambda: 0),
            nvrtc=types.SimpleNamespace(getVersion=lambda: (runtime // 1000, 0)),
            compiler=types.SimpleNamespace(CompileException=CompileException),
            get_current_stream=lambda device=-1: FakeStream(streams[max(device, 0)]),
        ),
    )
    return cupy
