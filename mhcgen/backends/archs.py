"""The names of CUDA architectures and the limits of each that a schedule must respect."""

from __future__ import annotations

import re
from dataclasses import dataclass

from mhcgen.errors import UsageError

KIB = 1024

# `__syncwarp` in divergent code, which every emission may use, needs independent thread scheduling (sm_70).
MINIMUM = 70
# NVRTC 13 dropped everything below Turing; NVRTC 12 still compiles sm_70.
MINIMUM_NVRTC_13 = 75


@dataclass(frozen=True)
class ArchFacts:
    """Limits and rates of one architecture.

    Args:
        shared_per_block: most shared memory one block may have after opting in, bytes.
        shared_per_sm: shared memory of one SM, bytes.
        threads_per_sm: most resident threads of one SM.
        blocks_per_sm: most resident blocks of one SM.
        fp64_divisor: fp32 operations per clock divided by fp64 operations per clock (2 to 64).
        registers_per_sm: 32-bit registers of one SM.
        threads_per_block: most threads of one block.
        has_bf16_arith: whether bf16 arithmetic (not only conversion) is an instruction.
        cluster_blocks: most blocks of a cluster (distributed shared memory, cluster barriers): 16 where that is
            documented (CUDA's tuning guides for Hopper and Blackwell), else the portable 8; 1 without clusters.
        has_dependent_launch: whether a kernel can start before its predecessor ended (PDL).
    """

    shared_per_block: int
    shared_per_sm: int
    threads_per_sm: int
    blocks_per_sm: int
    fp64_divisor: int
    has_bf16_arith: bool
    cluster_blocks: int
    has_dependent_launch: bool
    registers_per_sm: int = 65536
    threads_per_block: int = 1024


#: Data-centre parts, with clusters beyond the portable size.
_WIDE_CLUSTERS = (90, 100, 103)


def _facts(number: int, shared_per_sm: int, threads: int, blocks: int, fp64_divisor: int) -> ArchFacts:
    # The system keeps 1 KiB of each block's shared memory for itself since sm_80.
    reserved = 1 if number >= 80 else 0
    return ArchFacts(
        shared_per_block=(shared_per_sm - reserved) * KIB,
        shared_per_sm=shared_per_sm * KIB,
        threads_per_sm=threads,
        blocks_per_sm=blocks,
        fp64_divisor=fp64_divisor,
        has_bf16_arith=number >= 80,
        cluster_blocks=16 if number in _WIDE_CLUSTERS else 8 if number >= 90 else 1,
        has_dependent_launch=number >= 90,
    )


# number: KiB of shared memory per SM, threads per SM, blocks per SM, fp32 rate / fp64 rate
_TABLE = {
    70: (96, 2048, 32, 2),
    72: (96, 2048, 32, 2),
    75: (64, 1024, 16, 32),
    80: (164, 2048, 32, 2),
    86: (100, 1536, 16, 64),
    87: (164, 1536, 16, 64),
    88: (100, 1536, 16, 64),
    89: (100, 1536, 24, 64),
    90: (228, 2048, 32, 2),
    100: (228, 2048, 32, 2),
    101: (228, 1536, 24, 64),
    103: (228, 2048, 32, 64),
    107: (228, 1024, 16, 64),
    110: (228, 1536, 24, 64),
    120: (100, 1536, 24, 64),
    121: (100, 1536, 24, 64),
}
_FACTS = {number: _facts(number, *row) for number, row in _TABLE.items()}

KNOWN = tuple(_FACTS)
HIGHEST = max(KNOWN)

_NAME = re.compile(r"(?P<kind>sm|compute)?_?(?P<number>\d{2,4})(?P<suffix>[af]?)")
_DOTTED = re.compile(r"(?P<major>\d{1,3})\.(?P<minor>\d)(?P<suffix>[af]?)")


@dataclass(frozen=True)
class Arch:
    """One compile target.

    Args:
        number: 10 * major + minor, e.g. 90 or 120.
        suffix: `a` for the instructions of exactly this architecture, `f` for those of its family, or "".
        virtual: True for `compute_XX`: PTX only, no machine code, no resource figures from ptxas.
    """

    number: int
    suffix: str = ""
    virtual: bool = False

    @property
    def name(self) -> str:
        """The canonical spelling: `sm_90a`, or `compute_90` where it is virtual."""
        return self.compute if self.virtual else f"sm_{self.number}{self.suffix}"

    @property
    def compute(self) -> str:
        """The virtual architecture of the same features."""
        return f"compute_{self.number}{self.suffix}"

    @property
    def known(self) -> bool:
        """False for a number above every architecture of this version's table."""
        return self.number in _FACTS

    @property
    def facts(self) -> ArchFacts:
        """Limits for a scheduler; of a newer, unknown architecture those of the highest known one."""
        return _FACTS.get(self.number, _FACTS[HIGHEST])

    def __str__(self) -> str:
        return self.name


def known_names() -> tuple[str, ...]:
    """Every accepted name in canonical spelling, `sm_70` first; PTX-only names are not repeated here."""
    return tuple(f"sm_{number}{suffix}" for number in KNOWN for suffix in _suffixes(number))


def parse_arch(text: str | Arch, where: str = "--arch") -> Arch:
    """Read `sm_90`, `sm_90a`, `sm90`, `90`, `9.0` or `compute_90` (the last: PTX only).

    A number above the table is accepted: `nvrtc.compile` then falls back to PTX of the highest it knows,
    which a newer driver compiles for the device. `where` is the option that an error names.

    Raises:
        UsageError: `U-ARCH`, no such architecture, or one older than the minimum.
    """
    if isinstance(text, Arch):
        return text
    cleaned = text.strip().lower() if isinstance(text, str) else ""
    if match := _NAME.fullmatch(cleaned):
        number, suffix = int(match["number"]), match["suffix"]
    elif match := _DOTTED.fullmatch(cleaned):
        number, suffix = 10 * int(match["major"]) + int(match["minor"]), match["suffix"]
    else:
        raise _unknown(text, where)
    arch = Arch(number, suffix, virtual=cleaned.startswith("compute"))
    if number < MINIMUM:
        raise UsageError(
            "U-ARCH",
            f"{arch.name} is too old: the minimum is sm_{MINIMUM} (sm_{MINIMUM_NVRTC_13} with NVRTC 13).",
            where=where,
            hints=(_choices(),),
        )
    if number <= HIGHEST and (number not in _FACTS or suffix not in _suffixes(number)):
        raise _unknown(text, where)
    return arch


def _suffixes(number: int) -> tuple[str, ...]:
    if number < 90:
        return ("",)
    return ("", "a") if number < 100 else ("", "a", "f")


def _choices() -> str:
    return "known: " + ", ".join(known_names())


def _unknown(text: object, where: str) -> UsageError:
    return UsageError("U-ARCH", f"{text!r} names no CUDA architecture.", where=where, hints=(_choices(),))
