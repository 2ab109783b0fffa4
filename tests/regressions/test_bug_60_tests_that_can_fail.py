"""ScalingIntelligence/KernelBench #165, AI-Hypercomputer/accelerator-agents #50, tenstorrent/tt-metal #49039: tests
that an all-zero kernel passes, with constant answers, or laxer than what they claim.

The test that comes with every emission, against planted faults in its texts, in each dtype: in the fused text alone,
where the unfused one shows it, and in that one, where the reference does.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from mhcgen import differential as generated
from mhcgen.files import write_folder
from mhcgen.folder import folder_texts
from mhcgen.request import request

#: name -> (what is replaced, by what)
FAULTS: dict[str, tuple[str, str]] = {
    "y is zero throughout": (r"value\[v\] = mhc_round_\w+\(value\[v\]\);", "value[v] = 0.0f;"),
    "comb transposed": (r"comb_t\[row_j \* 4 \+ col_k\] =", "comb_t[col_k * 4 + row_j] ="),
    "eps swapped": (r"0\.01f|1e-06f", "SWAP"),
    "the last row unwritten": (r"if \(token >= tokens\) return;", "if (token + 1 >= tokens) return;"),
    "a stream skipped": (r"for \(int c = 1; c < 4; \+\+c\) value", "for (int c = 1; c < 3; ++c) value"),
    "a row scaled a little": (r"mhc_inverse_rms\((?=mhc_mean)", "1.00001f * mhc_inverse_rms("),
}
SWAPPED = {"0.01f": "1e-06f", "1e-06f": "0.01f"}


def folder(path: Path, dtype: str) -> Path:
    asked: dict[str, Any] = {"streams": 4, "hidden": 64, "dtype": dtype, "hc_eps": 1e-2, "iters": 3}
    write_folder(path, folder_texts(*request(fuse="pre", placement="element", **asked)))
    return path


def plant(path: Path, fault: str) -> None:
    old, new = FAULTS[fault]
    text, count = re.subn(old, lambda found: SWAPPED[found[0]] if new == "SWAP" else new, path.read_text())
    assert count, f"{path.name} has no place for {fault}"
    path.write_text(text)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_fused_text_is_seen(tmp_path: Path, fault: str, dtype: str) -> None:
    made = folder(tmp_path / "out", dtype)
    assert generated.compare_folder(made, 3, "uniform") == []
    plant(made / "kernel.cu", fault)
    assert any(generated.compare_folder(made, 3, inputs) for inputs in generated.INPUTS)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_unfused_text_is_seen_by_the_reference(tmp_path: Path, fault: str, dtype: str) -> None:
    made = folder(tmp_path / "out", dtype)
    assert generated.compare_reference(made, 3, "uniform") == []
    plant(made / "unfused.cu", fault)
    assert any(generated.compare_reference(made, 3, inputs) for inputs in generated.INPUTS)
