"""cupy/cupy #9475, #1048 and deepseek-ai/DeepGEMM #317: architectures older than the compiler takes, newer than it
knows, or without a kernel of their own. Names and their spellings: `tests/backends/test_archs.py`.
"""

from __future__ import annotations

import pytest

import mhcgen
from mhcgen.backends import nvrtc
from mhcgen.errors import UsageError

ARCHS = ("sm_75", "sm_80", "sm_90", "sm_90a", "sm_100", "sm_103", "sm_120", "sm_121", "compute_90", "sm_999")


@pytest.mark.nvrtc
@pytest.mark.parametrize("arch", ARCHS)
def test_narrow_streams_clusters_and_fp8_compile_everywhere(arch: str) -> None:
    """Also where there is no arithmetic in bf16 (sm_75), no cluster (below sm_90), no such card yet (sm_999)."""
    program = mhcgen.build(hidden=512, dtype="bf16", projection="fma", norm=True, quant="fp8", iters=2)
    plan = mhcgen.compile(program, "pre-norm-quant", arch=arch)
    assert f"--arch {arch}" in plan.source
    assert (plan.kernels[0].cluster > 1) == (arch not in ("sm_75", "sm_80"))
    made = nvrtc.compile(plan.source, arch)
    if arch == "sm_999":
        assert made.target.startswith("compute_") and made.cubin is None and made.notes
    else:
        assert made.target == arch and not made.notes


@pytest.mark.parametrize("arch", ["sm_61", "sm_52", "6.0"])
def test_what_no_compiler_takes_any_more_is_refused_with_the_oldest_it_does(arch: str) -> None:
    with pytest.raises(UsageError, match="too old") as caught:
        mhcgen.compile(mhcgen.build(hidden=8), arch=arch)
    assert caught.value.code == "U-ARCH" and "sm_75" in caught.value.message


@pytest.mark.parametrize("arch", ["90", "9.0", "sm90", "SM_90"])
def test_every_spelling_gives_one_text(arch: str) -> None:
    program = mhcgen.build(hidden=8)
    assert mhcgen.compile(program, arch=arch).source == mhcgen.compile(program, arch="sm_90").source
