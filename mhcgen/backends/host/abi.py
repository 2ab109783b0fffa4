"""ctypes mirrors of launch_abi.h. Change both together; `tests/backends/test_host_abi.py` compares them."""

from __future__ import annotations

import ctypes as c

NONE = 0xFFFFFFFF

READONLY, NEEDS_INIT, SHARED_STATIC, SHARED_DYNAMIC = 1, 2, 4, 8
ACCESS_WRITE, ACCESS_ATOMIC, ACCESS_COPY, ACCESS_SEND = 1, 2, 4, 8
WAIT_BLOCK, WAIT_WARP, WAIT_NAMED, WAIT_CLUSTER, WAIT_ARRIVALS = 0, 1, 2, 3, 4

ORDERS = {"ascending": 0, "descending": 1, "random": 2, "warp-greedy": 3}

KINDS = {
    1: "race",
    2: "uninit",
    3: "oob",
    4: "write-to-const",
    5: "barrier",
    6: "mask",
    7: "shuffle",
    8: "deadlock",
    9: "stack",
    10: "trap",
    11: "misaligned",
    12: "copy",
    13: "arrivals",
}

RULES = (
    "",
    "remote-before-start",
    "remote-after-exit",
    "barrier-lines",
    "barrier-kinds",
    "barrier-exited",
    "barrier-diverged",
    "barrier-named-arguments",
    "barrier-named-counts",
    "barrier-named-partial",
    "barrier-cluster-arrived-twice",
    "barrier-cluster-not-arrived",
    "barrier-cluster-lines",
    "mask-without-self",
    "mask-lines",
    "mask-lanes-absent",
    "mask-width",
    "shuffle-inactive",
    "oob-guard",
    "oob-wild",
    "oob-shared",
    "oob-shared-guard",
    "oob-index",
    "oob-dynamic-guard",
    "oob-rank",
    "oob-map",
    "deadlock-waiting",
    "deadlock-spinning",
    "copy-in-flight",
    "copy-memory",
    "copy-not-awaited",
    "arrivals-in-flight",
    "arrivals-bytes",
    "arrivals-twice",
    "arrivals-too-many",
    "arrivals-no-start",
    "arrivals-unordered",
    "arrivals-excess",
    "arrivals-after-exit",
    "arrivals-not-awaited",
)

SCOPES = ("", "same-warp", "across-warps", "across-blocks")

WARP_OPS = (
    "__syncwarp",
    "__shfl_sync",
    "__shfl_xor_sync",
    "__shfl_up_sync",
    "__shfl_down_sync",
    "__ballot_sync",
    "__any_sync",
    "__all_sync",
)
BLOCK_OPS = ("__syncthreads", "__syncthreads_count", "__syncthreads_and", "__syncthreads_or")


class Dim3(c.Structure):
    _fields_ = (("x", c.c_uint), ("y", c.c_uint), ("z", c.c_uint))


class Region(c.Structure):
    _fields_ = (
        ("base", c.c_uint64),
        ("size", c.c_uint64),
        ("guard", c.c_uint64),
        ("loads", c.c_void_p),
        ("stores", c.c_void_p),
        ("unwritten", c.c_uint64),
        ("flags", c.c_uint32),
        ("element", c.c_uint32),
    )


class FindingRecord(c.Structure):
    _fields_ = (
        ("block", c.c_uint64 * 2),
        ("offset", c.c_int64),
        ("value", c.c_uint64),
        ("thread", c.c_uint32 * 2),
        ("line", c.c_uint32 * 2),
        ("pc", c.c_uint32 * 2),
        ("access", c.c_uint32 * 2),
        ("kind", c.c_uint32),
        ("detail", c.c_uint32),
        ("scope", c.c_uint32),
        ("region", c.c_uint32),
        ("size", c.c_uint32),
        ("mask", c.c_uint32),
        ("count", c.c_uint32),
        ("owner", c.c_uint32),
    )


class WaitRecord(c.Structure):
    _fields_ = (
        ("block", c.c_uint32),
        ("warp", c.c_uint32),
        ("lanes", c.c_uint32),
        ("kind", c.c_uint32),
        ("op", c.c_uint32),
        ("mask", c.c_uint32),
        ("line", c.c_uint32),
        ("pc", c.c_uint32),
    )


class LaunchRecord(c.Structure):
    _fields_ = (
        ("entry", c.c_void_p),
        ("arguments", c.c_void_p),
        ("blocks", c.c_void_p),
        ("regions", c.POINTER(Region)),
        ("findings", c.POINTER(FindingRecord)),
        ("waits", c.POINTER(WaitRecord)),
        ("stacks", c.c_void_p),
        ("stack_bytes", c.c_uint64),
        ("block_count", c.c_uint64),
        ("dynamic_shared", c.c_uint64),
        ("seed", c.c_uint64),
        ("switches", c.c_uint64),
        ("blocks_run", c.c_uint64),
        ("grid", Dim3),
        ("block", Dim3),
        ("order", c.c_uint32),
        ("race", c.c_uint32),
        ("region_count", c.c_uint32),
        ("finding_capacity", c.c_uint32),
        ("finding_count", c.c_uint32),
        ("suppressed", c.c_uint32),
        ("wait_capacity", c.c_uint32),
        ("wait_count", c.c_uint32),
        ("completed", c.c_uint32),
        ("cluster", c.c_uint32),
    )
