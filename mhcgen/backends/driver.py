"""CUDA's driver API through ctypes: load machine code, launch it on a stream of any device.

CuPy's own launch call knows neither clusters nor dependent launches, and its ways to load machine code
changed between versions; the driver's did not. Nothing here runs at import, and only a load or a launch
makes a context, so a process may import everything and fork.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

from mhcgen.errors import EnvironmentFault, LaunchError

LIBRARY_NAMES = ("libcuda.so.1", "libcuda.so")

_ATTRIBUTE_CLUSTER = 4
_ATTRIBUTE_DEPENDENT = 6
_DEVICE_MAJOR, _DEVICE_MINOR, _DEVICE_SHARED_OPTIN = 75, 76, 97
_FUNCTION_STATIC_SHARED, _FUNCTION_DYNAMIC_SHARED, _FUNCTION_ANY_CLUSTER = 1, 8, 14
_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE = 5, 6
_CAPTURE_RELAXED = 2
_NO_DEVICE = 100
_DEFAULT_SHARED = 48 * 1024
_PORTABLE_CLUSTER = 8

Dim3 = tuple[int, int, int]


class ClusterValue(ctypes.Structure):
    """Member `clusterDim` of CUlaunchAttributeValue."""

    _fields_ = [("x", ctypes.c_uint), ("y", ctypes.c_uint), ("z", ctypes.c_uint)]


class AttributeValue(ctypes.Union):
    """CUlaunchAttributeValue, the two members used here; 64 bytes."""

    _fields_ = [
        ("pad", ctypes.c_char * 64),
        ("cluster", ClusterValue),
        ("dependent", ctypes.c_int),
    ]


class Attribute(ctypes.Structure):
    """CUlaunchAttribute."""

    _fields_ = [
        ("id", ctypes.c_int),
        ("pad", ctypes.c_char * 4),
        ("value", AttributeValue),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid_x", ctypes.c_uint),
        ("grid_y", ctypes.c_uint),
        ("grid_z", ctypes.c_uint),
        ("block_x", ctypes.c_uint),
        ("block_y", ctypes.c_uint),
        ("block_z", ctypes.c_uint),
        ("shared_bytes", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(Attribute)),
        ("attribute_count", ctypes.c_uint),
    ]


class Driver:
    """The driver library of this process.

    Args:
        path: file name of the library.

    Raises:
        OSError: the library cannot be loaded.
        EnvironmentFault: `E-NO-GPU`, the driver finds no device or does not start.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.process = os.getpid()
        self._library = ctypes.CDLL(path)
        self._contexts: dict[int, ctypes.c_void_p] = {}
        self._lock = threading.Lock()
        pointer, integer = ctypes.c_void_p, ctypes.c_int
        for name, types in {
            "cuInit": (ctypes.c_uint,),
            "cuGetErrorName": (integer, ctypes.POINTER(ctypes.c_char_p)),
            "cuGetErrorString": (integer, ctypes.POINTER(ctypes.c_char_p)),
            "cuDevicePrimaryCtxRetain": (ctypes.POINTER(pointer), integer),
            "cuCtxGetCurrent": (ctypes.POINTER(pointer),),
            "cuCtxPushCurrent_v2": (pointer,),
            "cuCtxPopCurrent_v2": (ctypes.POINTER(pointer),),
            "cuModuleLoadDataEx": (ctypes.POINTER(pointer), pointer, ctypes.c_uint, pointer, pointer),
            "cuModuleGetFunction": (ctypes.POINTER(pointer), pointer, ctypes.c_char_p),
            "cuFuncGetAttribute": (ctypes.POINTER(integer), integer, pointer),
            "cuFuncSetAttribute": (pointer, integer, integer),
            "cuThreadExchangeStreamCaptureMode": (ctypes.POINTER(integer),),
        }.items():
            getattr(self._library, name).argtypes = types
        code = self._library.cuInit(0)
        if code:
            raise EnvironmentFault(
                "E-NO-GPU",
                "no CUDA device is visible." if code == _NO_DEVICE else "the CUDA driver does not start.",
                notes=(f"cuInit: {self.describe(code)}", *_visibility()),
                hints=("the host backend needs no GPU: --backend host",),
            )
        # A driver before CUDA 12 lacks it; nothing else in this package supports one.
        launch = getattr(self._library, "cuLaunchKernelEx", None)
        if launch is None:
            raise EnvironmentFault(
                "E-CUDA-MAJOR",
                f"the driver supports CUDA {self.version // 1000}; CUDA 12 or later is needed.",
                hints=("update the NVIDIA driver",),
            )
        launch.argtypes = (pointer, pointer, pointer, pointer)
        self.launch_kernel = launch
        # Called before every launch and done at once: not worth handing Python's lock to another thread.
        self.get_current: Any = ctypes.PyDLL(path, handle=self._library._handle).cuCtxGetCurrent
        self.get_current.argtypes = (pointer,)

    def describe(self, code: int) -> str:
        """E.g. `CUDA_ERROR_INVALID_VALUE (1): invalid argument`."""
        name, text = ctypes.c_char_p(), ctypes.c_char_p()
        self._library.cuGetErrorName(code, ctypes.byref(name))
        self._library.cuGetErrorString(code, ctypes.byref(text))
        return f"{(name.value or b'CUDA error').decode()} ({code}): {(text.value or b'').decode()}"

    def _number(self, function: str, *arguments: Any) -> int:
        value = ctypes.c_int()
        code = getattr(self._library, function)(ctypes.byref(value), *arguments)
        if code:
            raise LaunchError("E-DRIVER", f"{function} failed.", notes=(self.describe(code),))
        return value.value

    @property
    def version(self) -> int:
        """Highest CUDA version the driver supports, 1000 * major + 10 * minor."""
        return self._number("cuDriverGetVersion")

    @property
    def device_count(self) -> int:
        """How many devices are visible."""
        return self._number("cuDeviceGetCount")

    def device_name(self, device: int) -> str:
        """The product name."""
        text = ctypes.create_string_buffer(256)
        self._library.cuDeviceGetName(text, 256, device)
        return text.value.decode()

    @lru_cache(maxsize=64)  # noqa: B019  (one Driver lives as long as the process)
    def capability(self, device: int) -> int:
        """10 * major + minor, e.g. 90."""
        major = self._number("cuDeviceGetAttribute", _DEVICE_MAJOR, device)
        return 10 * major + self._number("cuDeviceGetAttribute", _DEVICE_MINOR, device)

    def shared_limit(self, device: int) -> int:
        """Most shared memory of one block after opting in, bytes."""
        return self._number("cuDeviceGetAttribute", _DEVICE_SHARED_OPTIN, device)

    @contextlib.contextmanager
    def on_device(self, device: int) -> Iterator[None]:
        """Make the primary context of `device` current, the one CuPy and torch use, and restore after."""
        context = self._contexts.get(device) or self._retain(device)
        before = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(before))
        if before.value == context.value:
            yield
            return
        self._check(self._library.cuCtxPushCurrent_v2(context), f"device {device} cannot be made current.")
        try:
            yield
        finally:
            self._library.cuCtxPopCurrent_v2(ctypes.byref(before))

    def context(self, device: int) -> int:
        """The primary context of `device`."""
        return (self._contexts.get(device) or self._retain(device)).value or 0

    def is_current(self, device: int, buffer: LaunchBuffer) -> bool:
        """Whether the primary context of `device` is this thread's current one; the buffer's probe is overwritten."""
        context = self._contexts.get(device)
        if context is None:
            return False
        self.get_current(buffer.probe_address)
        return buffer.probe.value == context.value

    def _retain(self, device: int) -> ctypes.c_void_p:
        with self._lock:
            if device not in self._contexts:
                context = ctypes.c_void_p()
                code = self._library.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
                self._check(code, f"device {device} has no usable context.")
                self._contexts[device] = context
            return self._contexts[device]

    def _check(self, code: int, message: str, *notes: str) -> None:
        if code:
            raise LaunchError("E-DRIVER", message, notes=(self.describe(code), *notes))

    @contextlib.contextmanager
    def capture_relaxed(self) -> Iterator[None]:
        """Allow loading while a stream is being captured, which is forbidden unless one says so."""
        mode = ctypes.c_int(_CAPTURE_RELAXED)
        self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))
        try:
            yield
        finally:
            self._library.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))

    def load_module(self, device: int, image: bytes) -> int:
        """Load a cubin, or PTX ending in a zero byte, on `device`; the handle stays valid for the process.

        Raises:
            LaunchError: `E-LOAD`, the driver refuses the image; the notes carry its log.
        """
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(16384)
        options = (ctypes.c_int * 2)(_JIT_ERROR_LOG, _JIT_ERROR_LOG_SIZE)
        values = (ctypes.c_void_p * 2)(ctypes.addressof(log), len(log))
        with self.on_device(device), self.capture_relaxed():
            code = self._library.cuModuleLoadDataEx(ctypes.byref(module), image, 2, options, values)
        if code:
            raise LaunchError(
                "E-LOAD",
                f"the driver cannot load the module on device {device} ({self.device_name(device)}).",
                notes=(
                    self.describe(code),
                    f"driver: CUDA {self.version // 1000}.{self.version % 1000 // 10}",
                    *log.value.decode(errors="replace").splitlines(),
                ),
            )
        return module.value or 0

    def function(self, device: int, module: int, name: str) -> Function:
        """The kernel `name` of a loaded module, loaded in full so that a capture never has to.

        Raises:
            LaunchError: `E-LOAD`, the module has no such kernel.
        """
        handle = ctypes.c_void_p()
        with self.on_device(device), self.capture_relaxed():
            code = self._library.cuModuleGetFunction(ctypes.byref(handle), module, name.encode())
            if code:
                raise LaunchError(
                    "E-LOAD", f"the module has no kernel {name}.", where=name, notes=(self.describe(code),)
                )
            return self.adopt(device, handle.value or 0, name)

    def adopt(self, device: int, handle: int, name: str) -> Function:
        """A kernel whose CUfunction someone else made, e.g. CuPy."""
        load = getattr(self._library, "cuFuncLoad", None)
        with self.on_device(device), self.capture_relaxed():
            if load is not None:  # since CUDA 12.4; without it a lazy driver loads at the first launch
                load(ctypes.c_void_p(handle))
            static = self._number("cuFuncGetAttribute", _FUNCTION_STATIC_SHARED, ctypes.c_void_p(handle))
        return Function(self, device, handle, name, static)


class Function:
    """A kernel on one device; the driver's object lives as long as the process."""

    def __init__(self, driver: Driver, device: int, handle: int, name: str, static_shared: int) -> None:
        self.driver = driver
        self.device = device
        self.handle = ctypes.c_void_p(handle)
        self.name = name
        self.static_shared = static_shared
        self._opted_in = max(0, _DEFAULT_SHARED - static_shared)
        self._any_cluster = False

    def prepare(self, dynamic_shared: int, cluster: Dim3 | None) -> None:
        """Raise the limits of the kernel where a launch needs it; the context must be current.

        Raises:
            LaunchError: `E-LAUNCH`, more shared memory than the device has.
        """
        library = self.driver._library
        if dynamic_shared > self._opted_in:
            code = library.cuFuncSetAttribute(self.handle, _FUNCTION_DYNAMIC_SHARED, dynamic_shared)
            if code:
                limit = self.driver.shared_limit(self.device)
                raise LaunchError(
                    "E-LAUNCH",
                    f"{self.name} cannot have {dynamic_shared} bytes of dynamic shared memory.",
                    where=self.name,
                    notes=(
                        self.driver.describe(code),
                        f"static: {self.static_shared} bytes; limit of the device per block: {limit}",
                    ),
                )
            self._opted_in = dynamic_shared
        if cluster is not None and cluster[0] * cluster[1] * cluster[2] > _PORTABLE_CLUSTER:
            if not self._any_cluster:
                library.cuFuncSetAttribute(self.handle, _FUNCTION_ANY_CLUSTER, 1)
            self._any_cluster = True


class LaunchBuffer:
    """The memory of one launch in flight to the driver: configuration, attributes and arguments.

    Reused, because filling it anew is most of the cost of a launch from Python; the driver copies it before
    `cuLaunchKernelEx` returns.

    Args:
        slots: number of kernel parameters; each has 8 bytes.
    """

    def __init__(self, slots: int) -> None:
        self.arguments = ctypes.create_string_buffer(max(8, 8 * slots))
        base = ctypes.addressof(self.arguments)
        self._pointers = (ctypes.c_void_p * max(1, slots))(*(base + 8 * slot for slot in range(slots)))
        self._attributes = (Attribute * 2)()
        self._config = LaunchConfig()
        self._config.attributes = ctypes.cast(self._attributes, ctypes.POINTER(Attribute))
        self._shape: object = None
        self._stream = 0
        self.probe = ctypes.c_void_p()
        self.probe_address = ctypes.c_void_p(ctypes.addressof(self.probe))
        self.config_address = ctypes.c_void_p(ctypes.addressof(self._config))
        self.pointers_address = ctypes.c_void_p(ctypes.addressof(self._pointers))

    def configure(
        self,
        shape: tuple[Dim3, Dim3, int, Dim3 | None, bool],
        stream: int,
    ) -> None:
        """Fill the configuration: (grid, block, dynamic shared bytes, cluster, dependent) and the stream."""
        config = self._config
        if stream != self._stream:
            config.stream = self._stream = stream
        if shape is self._shape or shape == self._shape:
            return
        grid, block, config.shared_bytes, cluster, dependent = shape
        config.grid_x, config.grid_y, config.grid_z = grid
        config.block_x, config.block_y, config.block_z = block
        count = 0
        if cluster is not None:
            self._attributes[count].id = _ATTRIBUTE_CLUSTER
            value = self._attributes[count].value.cluster
            value.x, value.y, value.z = cluster
            count += 1
        if dependent:
            self._attributes[count].id = _ATTRIBUTE_DEPENDENT
            self._attributes[count].value.dependent = 1
            count += 1
        config.attribute_count = count
        self._shape = shape


def _visibility() -> tuple[str, ...]:
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    return () if value is None else (f"CUDA_VISIBLE_DEVICES={value!r}",)


_loaded: Driver | None = None
_loading = threading.Lock()


def load_driver() -> Driver:
    """The driver of this machine, started once per process (no context is made).

    Raises:
        EnvironmentFault: `E-NO-GPU`, no driver or no device; `E-CUDA-MAJOR`, a driver before CUDA 12.
    """
    global _loaded
    with _loading:
        if _loaded is not None and _loaded.process == os.getpid():
            return _loaded
        failures = []
        for name in LIBRARY_NAMES:
            try:
                _loaded = Driver(name)
            except OSError as error:
                failures.append(str(error))
            else:
                return _loaded
        raise EnvironmentFault(
            "E-NO-GPU",
            "no NVIDIA driver is installed.",
            notes=tuple(failures),
            hints=("the host backend needs no GPU: --backend host",),
        )
