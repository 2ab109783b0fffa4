"""How many clusters of each size are resident at once, by threads and registers: decides tokens per cluster."""

import ctypes

from gpu import need_gpu

src = r"""extern "C" __global__ void __launch_bounds__(THREADS, 1) k(float* o) {
  extern __shared__ float s[];
  o[threadIdx.x] = s[threadIdx.x];
}"""
cupy = need_gpu()
cuda = ctypes.CDLL("libcuda.so.1")


class Attr(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint * 16)]


class Config(ctypes.Structure):
    _fields_ = [(n, ctypes.c_uint) for n in ("gx", "gy", "gz", "bx", "by", "bz", "shared")] + [
        ("stream", ctypes.c_void_p),
        ("attrs", ctypes.POINTER(Attr)),
        ("count", ctypes.c_uint),
    ]


for threads in (256, 448, 544, 832):
    fn = cupy.RawModule(code=src, options=(f"-DTHREADS={threads}",)).get_function("k")
    handle = ctypes.c_void_p(fn.kernel.ptr)
    cuda.cuFuncSetAttribute(handle, 14, 1)  # non-portable cluster size allowed
    for shared in (4096, 120 * 1024):
        cuda.cuFuncSetAttribute(handle, 8, 130 * 1024)  # max dynamic shared
        for size in (2, 4, 8, 10, 14, 16):
            attr = Attr(4, b"", (ctypes.c_uint * 16)(1, size, 1))
            config = Config(1024, size, 1, threads, 1, 1, shared, None, ctypes.pointer(attr), 1)
            n = ctypes.c_int(-1)
            rc = cuda.cuOccupancyMaxActiveClusters(ctypes.byref(n), handle, ctypes.byref(config))
            print(threads, shared, size, "->", n.value, "clusters", n.value * size, "blocks", "rc", rc)
