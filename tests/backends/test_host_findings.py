"""Each rule of the executor, with the smallest kernel that breaks it and what the finding must say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from host_cases import signature

from mhcgen.backends.host import Finding, HostModule, LaunchReport
from mhcgen.backends.host.abi import KINDS, RULES
from mhcgen.errors import LaunchError

HEAD = 'extern "C" __global__ void k(float* o) {\n  const int t = threadIdx.x, lane = t & 31;\n'


def run(body: str, *, race: bool = True, blocks: int = 1, threads: int = 64, **options: Any) -> LaunchReport:
    """Launch a kernel on one output array of 64 floats; its body starts at line 3."""
    host = HostModule(HEAD + body + "\n}", [signature("k", o="float*")], name="k", race=race)
    return host.launch("k", blocks, threads, [np.zeros(64, np.float32)], **options)


@dataclass(frozen=True)
class Broken:
    """A kernel body and its finding."""

    rule: str
    body: str
    kind: str
    lines: tuple[int, ...]
    scope: str = ""
    buffer: str = ""
    offset: int | None = None
    threads: tuple[int | None, ...] | None = None
    stops: bool = False
    blocks: int = 1
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.rule}-{self.scope}" if self.scope else self.rule


OF_MEMORY = (
    Broken(
        "race",
        "__shared__ float s[64];\n s[t] = t;\n __syncwarp();\n o[t] = s[63 - t];",
        "race",
        (4, 6),
        "across-warps",
        "shared s",
        252,
        (63, 0),
    ),
    Broken(
        "race",
        "__shared__ float s[64];\n s[t] = t;\n o[t] = s[t ^ 1];",
        "race",
        (5, 4),
        "same-warp",
        "shared s",
        4,
        (0, 1),
    ),
    Broken("race", "if (t == 0) o[5] = t;", "race", (3, 3), "across-blocks", "o", 20, (0, 0), blocks=2),
    Broken(
        "race",
        "extern __shared__ float d[];\n d[t] = t;\n o[t] = d[(t + 32) & 63];",
        "race",
        (5, 4),
        "across-warps",
        "dynamic shared",
        128,
        (0, 32),
        options={"dynamic_shared": 256},
    ),
    Broken(
        "race",
        "if (t < 2) atomicAdd(o, 1.0f);\n if (t == 40)\n o[1] = o[0];",
        "race",
        (3, 5),
        "across-warps",
        "o",
        0,
        (1, 40),
    ),
    Broken(
        "uninit",
        "__shared__ float s[64];\n if (t < 60) s[t] = t;\n __syncthreads();\n o[t] = s[t];",
        "uninit",
        (6,),
        "",
        "shared s",
        240,
        (60,),
    ),
    Broken(
        "uninit",
        "const float v = o[t];\n o[t] = v + 1.0f;",
        "uninit",
        (3,),
        buffer="o",
        offset=0,
        threads=(0,),
        options={"uninitialised": {"o"}},
    ),
    Broken("oob-guard", "o[t + 60] = 1.0f;", "oob", (3,), buffer="o", offset=256, threads=(4,)),
    Broken("oob-guard", "const float v = o[t - 2];\n o[t] = v;", "oob", (3,), buffer="o", offset=-8, threads=(0,)),
    Broken("oob-wild", "o[t + 5000000] = 1.0f;", "oob", (3,), buffer="o", offset=20_000_000, stops=True),
    Broken(
        "oob-wild",
        "float* p = t > 70 ? o : nullptr;\n p[2] = 1.0f;",
        "oob",
        (4,),
        buffer="null pointer",
        offset=0,
        stops=True,
    ),
    Broken("oob-index", "float four[4] = {1, 2, 3, 4};\n o[t] = four[t + 1];", "oob", (4,), threads=(3,), stops=True),
    Broken(
        "oob-shared",
        "__shared__ float s[32];\n float* p = s + t;\n *p = 1.0f;\n __syncthreads();\n o[t] = *p;",
        "oob",
        (5,),
        buffer="shared s",
        offset=128,
        threads=(32,),
    ),
    Broken(
        "oob-shared",
        "extern __shared__ float d[];\n d[t] = 1.0f;\n __syncthreads();\n o[t] = d[t];",
        "oob",
        (4,),
        buffer="dynamic shared",
        offset=240,
        threads=(60,),
        options={"dynamic_shared": 240},
    ),
)

OF_SYNCHRONISATION = (
    Broken(
        "barrier-lines",
        "if (t < 32) {\n __syncthreads();\n } else\n __syncthreads();",
        "barrier",
        (4, 6),
        threads=(0, 32),
    ),
    Broken(
        "barrier-kinds",
        "if (t < 32) __syncthreads(); else o[t] = __syncthreads_or(1);",
        "barrier",
        (3, 3),
        threads=(0, 32),
    ),
    Broken("barrier-exited", "if (t == 5) return;\n __syncthreads();", "barrier", (4, 0), threads=(0, 5)),
    Broken(
        "barrier-diverged",
        "if (lane < 16)\n __syncthreads();\n __syncwarp();",
        "barrier",
        (4, 5),
        threads=(0, 16),
        stops=True,
    ),
    Broken("barrier-named-arguments", "mhc_host_bar_sync(1, 40);", "barrier", (3,), threads=(0,)),
    Broken("barrier-named-arguments", "mhc_host_bar_sync(0, 64);", "barrier", (3,), threads=(0,)),
    Broken("barrier-named-counts", "mhc_host_bar_sync(2, t == 9 ? 32 : 64);", "barrier", (3,), threads=(9,)),
    Broken("barrier-named-partial", "if (lane < 16) mhc_host_bar_sync(3, 32);", "barrier", (3, 0), threads=(0, 16)),
    Broken("mask-without-self", "__syncwarp(0xffff);", "mask", (3,), threads=(16,)),
    Broken(
        "mask-lines",
        "float v = t;\n if (lane < 16) v = __shfl_xor_sync(~0u, v, 1);\n o[t] = __shfl_xor_sync(~0u, v, 2);",
        "mask",
        (4, 5),
        threads=(0, 16),
    ),
    Broken(
        "mask-lanes-absent",
        "if (lane < 16)\n __syncwarp();\n else\n o[t] = __any_sync(~0u, 1);",
        "mask",
        (4, 6),
        threads=(0, 16),
        stops=True,
    ),
    Broken("mask-width", "o[t] = __shfl_xor_sync(~0u, 1.0f, 1, 7);", "mask", (3,), threads=(0,)),
    Broken(
        "shuffle-inactive",
        "if (lane < 16) o[t] = __shfl_down_sync(0xffff, 1.0f, 8);",
        "shuffle",
        (3, 0),
        threads=(8, 16),
    ),
    Broken(
        "deadlock-waiting",
        "if (t < 32) mhc_host_bar_sync(1, 64); else\n __syncthreads();",
        "deadlock",
        (3,),
        threads=(0,),
        stops=True,
    ),
    Broken(
        "deadlock-spinning",
        "volatile float* flag = o;\n if (t == 3) while (flag[9] != 5.0f)\n __nanosleep(10);",
        "deadlock",
        (5,),
        threads=(3,),
        stops=True,
    ),
    Broken(
        "misaligned",
        "reinterpret_cast<float4*>(o)[1] = reinterpret_cast<float4*>(o + 6)[0];",
        "misaligned",
        (3,),
        buffer="o",
        offset=24,
        threads=(0,),
        stops=True,
    ),
    Broken("trap", "if (t == 7)\n __trap();", "trap", (4,), threads=(7,), stops=True),
)


def pick(report: LaunchReport, broken: Broken) -> Finding:
    found = [f for f in report.findings if f.rule == broken.rule and f.scope == broken.scope]
    assert found, f"no {broken.rule}: {report.text}"
    return found[0]


@pytest.mark.parametrize("broken", OF_MEMORY + OF_SYNCHRONISATION, ids=str)
def test_race_mode_names_rule_place_and_buffer(broken: Broken) -> None:
    report = run(broken.body, blocks=broken.blocks, **broken.options)
    finding = pick(report, broken)
    assert finding.kind == broken.kind
    assert finding.lines == broken.lines, finding.text
    assert broken.buffer == finding.buffer
    if broken.offset is not None and broken.buffer != "null pointer":
        assert finding.offset == broken.offset
    if broken.threads is not None:
        assert finding.threads == broken.threads
    assert report.completed is not broken.stops
    assert not report.ok
    assert finding.text.startswith(broken.kind)


@pytest.mark.parametrize("broken", OF_SYNCHRONISATION, ids=str)
def test_plain_mode_checks_synchronisation_too(broken: Broken) -> None:
    report = run(broken.body, race=False, blocks=broken.blocks, **broken.options)
    assert pick(report, broken).lines == broken.lines


def test_every_rule_has_a_kernel_that_breaks_it() -> None:
    tested = {broken.rule for broken in OF_MEMORY + OF_SYNCHRONISATION}
    elsewhere = {"oob-dynamic-guard", "oob-shared-guard", "write-to-const", "stack"}
    elsewhere |= {rule for rule in RULES if "cluster" in rule or rule.startswith("remote-")}  # test_host_clusters.py
    elsewhere |= {"oob-rank", "oob-map"}
    elsewhere |= {rule for rule in RULES if rule.startswith(("copy-", "arrivals-"))}  # test_host_arrivals.py
    assert tested | elsewhere == set(filter(None, RULES)) | set(KINDS.values()) - {
        "oob",
        "barrier",
        "mask",
        "shuffle",
        "deadlock",
        "copy",
        "arrivals",
    }


CLEAN = {
    "broadcast reads": "__shared__ float s[4];\n if (t < 4) s[t] = t;\n __syncthreads();\n o[t] = s[t & 3];",
    "own element twice": "o[t] = 1.0f;\n o[t] = o[t] + 1.0f;",
    "partial masks": "if (lane < 16) __syncwarp(0xffff); else __syncwarp(0xffff0000);",
    "exited lanes may be named": "if (lane >= 8) return;\n __syncwarp();",
    "atomics of many blocks": "atomicAdd(o, 1.0f);",
    "neighbouring bytes": "reinterpret_cast<unsigned char*>(o)[t] = 1;",
    "neighbouring halves": "reinterpret_cast<unsigned short*>(o)[t] = 1;",
    "bytes after words": (
        "if (t < 16) o[t] = 1.0f;\n __syncthreads();\n reinterpret_cast<unsigned char*>(o)[t] = 1;"
    ),
    "barriers of one half": (
        "__shared__ float s[64];\n s[t] = t;\n"
        " if (lane < 16) {\n __syncwarp(0xffff);\n o[t] = s[t ^ 1];\n } else o[t] = s[t];"
    ),
    "order through two warp barriers": (
        "__shared__ float s[32];\n if (t >= 32) return;\n if (t == 0) s[0] = 1.0f;\n"
        " if (t < 2) __syncwarp(3);\n if (t == 1 || t == 2) __syncwarp(6);\n if (t == 2) o[0] = s[0];"
    ),
}


@pytest.mark.parametrize("name", CLEAN)
@pytest.mark.parametrize("order", ["ascending", "descending", "random"])
def test_correct_synchronisation_is_not_reported(name: str, order: str) -> None:
    blocks = 3 if "blocks" in name else 1
    report = run(CLEAN[name], blocks=blocks, order=order)
    assert report.ok, report.text


def test_a_chain_of_warp_barriers_without_its_last_link_is_a_race() -> None:
    report = run(CLEAN["order through two warp barriers"].replace("if (t == 1 || t == 2) __syncwarp(6);", ""))
    assert [(f.kind, f.scope) for f in report.findings] == [("race", "same-warp")]


def test_a_vector_access_that_crosses_the_end_of_an_array() -> None:
    text = HEAD + "reinterpret_cast<float4*>(o)[0] = reinterpret_cast<float4*>(o)[t];\n}"
    host = HostModule(text, [signature("k", o="float*")], race=True)
    report = host.launch("k", 1, 2, [np.zeros(7, np.float32)])
    assert [(f.offset, f.size) for f in report.findings if f.kind == "oob"] == [(16, 16)]


def test_lines_lead_through_inlined_helpers() -> None:
    text = (
        "__device__ __forceinline__ float get(const float* p, int i) {\n  return p[i];\n}\n"
        "__device__ __forceinline__ float pair(const float* p) {\n  return get(p, 0) +\n    get(p, 64);\n}\n"
        'extern "C" __global__ void k(float* o) {\n  o[1] =\n    pair(o);\n}\n'
    )
    host = HostModule(text, [signature("k", o="float*")], name="k.cu", race=True)
    report = host.launch("k", 1, 1, [np.zeros(64, np.float32)])
    (finding,) = report.findings
    (place,) = finding.places
    assert (place.file, place.line, place.callers) == ("k.cu", 2, (6, 10))
    assert "read by thread 0 of block 0 at k.cu:2 from line 6, 10" in finding.text
    assert "| return p[i];" in finding.text


def test_repetitions_are_counted_and_not_listed() -> None:
    report = run("#pragma unroll\n for (int i = 0; i < 4; ++i)\n o[t + 64 + 16 * i] = 1.0f;")
    (finding,) = report.findings
    assert finding.count == 256
    assert "(256 times)" in finding.text.split("\n")[0]


def test_a_report_with_findings_can_raise() -> None:
    assert run("o[t] = 1.0f;").raise_if_found().text == ""
    with pytest.raises(LaunchError, match="X-FINDING") as caught:
        run("o[t + 1] = 1.0f;").raise_if_found()
    assert "oob: o+256" in str(caught.value)


def test_plain_mode_sees_writes_past_an_array_in_its_guard_band() -> None:
    report = run("o[t + 3] = 1.0f;\n if (t == 0) o[-1] = 2.0f;", race=False)
    assert [(f.kind, f.buffer, f.offset) for f in report.findings] == [("oob", "o", 256)]
    report = run("if (t == 0) o[-1] = 2.0f;", race=False)
    assert [(f.kind, f.buffer, f.offset) for f in report.findings] == [("oob", "o", -1)]


@pytest.mark.parametrize("race", [False, True])
def test_writes_past_shared_memory_change_its_guards(race: bool) -> None:
    body = "extern __shared__ float d[];\n d[t] = 1.0f;\n __syncthreads();\n o[t] = d[t];"
    report = run(body, race=race, dynamic_shared=250)
    assert ("oob-dynamic-guard", "dynamic shared", 250) in [(f.rule, f.buffer, f.offset) for f in report.findings]
    body = "__shared__ float s[32];\n float* p = s + t;\n *p = 1.0f;\n __syncthreads();\n o[t] = *p;"
    report = run(body, race=race)
    assert "oob-shared-guard" in [f.rule for f in report.findings]


@pytest.mark.parametrize("race", [False, True])
def test_writes_to_inputs_are_reported(race: bool) -> None:
    text = 'extern "C" __global__ void k(const float* x) {\n const_cast<float*>(x)[threadIdx.x + 3] = 1.0f;\n}'
    host = HostModule(text, [signature("k", x="const float*")], race=race)
    mine = np.zeros(8, np.float32)
    (finding,) = host.launch("k", 1, 2, [mine]).findings
    assert (finding.kind, finding.buffer) == ("write-to-const", "x")
    assert finding.offset == (12 if race else 14)  # plain mode knows the first byte that differs
    assert not mine.any()


def test_a_stack_that_is_too_small_is_reported() -> None:
    body = "volatile int big[40000];\n for (int i = 39999; i >= 0; --i) big[i] = i;\n o[t] = big[t];"
    host = HostModule(HEAD + body + "\n}", [signature("k", o="float*")])
    report = host.launch("k", 1, 2, [np.zeros(2, np.float32)])
    assert {f.kind for f in report.findings} == {"stack"}
    assert not report.completed


def test_counting_says_how_often_each_element_is_read() -> None:
    text = (
        'extern "C" __global__ void k(const float* x, float* o) {\n  const int t = threadIdx.x;\n'
        "  const float4 v = reinterpret_cast<const float4*>(x)[t & 3];\n"
        "  if (t == 0) o[1] = x[2];\n  o[t] = v.x + v.y + v.z + v.w;\n}\n"
    )
    host = HostModule(text, [signature("k", x="const float*", o="float*")], race=True)
    x, o = np.ones((4, 4), np.float32), np.zeros(8, np.float32)
    counts = host.launch("k", 1, 8, [x, o], count_accesses=True).accesses
    assert counts["x"].loads.shape == (4, 4)
    assert (counts["x"].max_loads, counts["x"].total_loads) == (3, 33)
    assert counts["x"].loads[0].tolist() == [2, 2, 3, 2]
    assert (counts["x"].max_stores, counts["x"].total_stores) == (0, 0)
    assert counts["o"].stores.tolist() == [1, 2, 1, 1, 1, 1, 1, 1]


def test_bytes_that_nobody_wrote_are_counted() -> None:
    report = run("if (t < 50) o[t] = 1.0f;", uninitialised={"o"})
    assert report.ok and report.unwritten == {"o": 56}
