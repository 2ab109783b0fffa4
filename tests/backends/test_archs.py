"""Names and limits of architectures."""

from __future__ import annotations

from typing import Any

import pytest

from mhcgen.backends.archs import HIGHEST, KIB, KNOWN, Arch, known_names, parse_arch
from mhcgen.errors import UsageError


@pytest.mark.parametrize("text", ["sm_90", "sm90", "90", "9.0", "SM_90", " sm_90 ", Arch(90)])
def test_spellings_of_one_architecture(text: str | Arch) -> None:
    assert parse_arch(text) == Arch(90)
    assert parse_arch(text).name == "sm_90"


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("sm_90a", "sm_90a"),
        ("90a", "sm_90a"),
        ("9.0a", "sm_90a"),
        ("12.0", "sm_120"),
        ("100f", "sm_100f"),
        ("compute_90", "compute_90"),
        ("compute_100a", "compute_100a"),
        ("sm_121", "sm_121"),
    ],
)
def test_canonical_names(text: str, name: str) -> None:
    arch = parse_arch(text)
    assert arch.name == str(arch) == name
    assert arch.virtual is name.startswith("compute")
    assert parse_arch(arch.name) == arch


@pytest.mark.parametrize(
    "text",
    ["", "sm_", "sm_80a", "sm_90f", "sm_91", "sm_9", "hopper", "sm_90b", "9", "sm_90,sm_100", "-1", None],
)
def test_unknown_names_are_refused_with_the_list(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_arch(text)
    assert caught.value.code == "U-ARCH"
    assert "sm_90a" in str(caught.value)


@pytest.mark.parametrize("text", ["", "sm_61", "sm_9000x", None])
def test_an_error_names_the_option(text: Any) -> None:
    for words, where in (((), "--arch"), (("--cubin",), "--cubin")):
        with pytest.raises(UsageError) as caught:
            parse_arch(text, *words)
        assert (caught.value.code, caught.value.where) == ("U-ARCH", where)


@pytest.mark.parametrize("text", ["sm_61", "60", "5.2", "compute_50", "sm_35"])
def test_too_old_names_the_minimum(text: str) -> None:
    with pytest.raises(UsageError, match=r"too old.*sm_70.*sm_75"):
        parse_arch(text)


def test_newer_than_the_table_is_accepted_with_the_limits_of_the_highest() -> None:
    arch = parse_arch("sm_999")
    assert not arch.known
    assert arch.name == "sm_999"
    assert arch.facts == Arch(HIGHEST).facts


@pytest.mark.parametrize(
    ("number", "kib"),
    [
        (75, 64),
        (80, 163),
        (86, 99),
        (87, 163),
        (89, 99),
        (90, 227),
        (100, 227),
        (103, 227),
        (120, 99),
        (121, 99),
    ],
)
def test_shared_memory_per_block(number: int, kib: int) -> None:
    assert Arch(number).facts.shared_per_block == kib * KIB


def test_features_and_rates() -> None:
    assert [number for number in KNOWN if not Arch(number).facts.has_bf16_arith] == [70, 72, 75]
    assert min(number for number in KNOWN if Arch(number).facts.cluster_blocks > 1) == 90
    assert {number for number in KNOWN if Arch(number).facts.cluster_blocks == 16} == {90, 100, 103}
    assert Arch(80).facts.fp64_divisor == Arch(90).facts.fp64_divisor == 2
    assert Arch(89).facts.fp64_divisor == Arch(120).facts.fp64_divisor == 64
    assert {Arch(number).facts.registers_per_sm for number in KNOWN} == {65536}


def test_every_known_name_parses_to_itself() -> None:
    assert [parse_arch(name).name for name in known_names()] == list(known_names())
    assert "sm_80" in known_names() and "sm_120f" in known_names()
