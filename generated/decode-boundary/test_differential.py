"""Does kernel.cu compute, bit for bit, what unfused.cu computes? And is that right?

Made by mhcgen 0.1.0; do not edit, run the command again:

    mhcgen emit --model deepseek-v4 --streams 4 --hidden 4096 --dtype bf16 --projection fma --scope boundary --norm --fuse boundary --arch sm_90

Run it with `pytest` where mhcgen is installed; several such folders at once with
`pytest --import-mode=importlib`. The two texts of this folder are compiled as they are and run on the CPU
executor, and on the GPU where there is one. Outputs start poisoned. The inputs tell known mistakes apart
(comb transposed, the two eps exchanged, a missing maximum in the softmax, ...): mhcgen.inputs says how.
"""

from pathlib import Path

import pytest

from mhcgen import differential

FOLDER = Path(__file__).parent
BACKENDS = ("host", "cuda")
TOKENS = (1, 3)


@pytest.fixture(params=BACKENDS)
def backend(request):
    reason = differential.unusable(request.param)
    if reason:
        pytest.skip(reason)
    return request.param


def test_the_files_are_those_of_the_manifest():
    assert differential.changed_files(FOLDER) == []


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inputs", differential.INPUTS)
def test_kernel_equals_unfused_bit_for_bit(backend, inputs, tokens):
    assert differential.compare_folder(FOLDER, tokens, inputs, backend) == []


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("inputs", differential.INPUTS)
def test_unfused_is_within_its_bound_of_the_reference(backend, inputs, tokens):
    assert differential.compare_reference(FOLDER, tokens, inputs, backend) == []


def test_no_token_is_fine(backend):
    assert differential.compare_folder(FOLDER, 0, "uniform", backend) == []
