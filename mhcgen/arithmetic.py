"""Everything that can change a bit of a result, by name, and the digest of it.

A schedule (fusion, threads, placement, barriers, load width) never changes a bit. What does is a field here
or an attribute of a stage; together they are hashed into the *numeric class*. The order of every sum is fixed
over element indexes:

- Sum over the columns of a token (sum of squares, dot products, RMS of y): each column adds its streams in
  order; columns then join in one binary tree, adjacent pairs first, absent columns skipped. A thread, warp or
  block that holds an aligned run of 2^k columns holds a subtree, so block sizes do not show in the result.
  (docs/decisions/0003-column-tree.md)
- Sums over the n x n matrix join adjacent pairs first, absent elements skipped: n = 3 gives (c0+c1)+c2.
- Weighted sums over streams (collapse, post) are fused multiply-adds in stream order.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from mhcgen.errors import UsageError

FUNCTION_SETS = ("ieee", "fast")
ACCUMULATORS = ("fp64", "fp32")
PROJECTIONS = ("external", "fma")

#: Raised when the same Program gives other bits than before; each raise has a CHANGELOG entry.
CLASS_VERSION = 1


@dataclass(frozen=True)
class Arithmetic:
    """The choices of a Program that may change a bit.

    Args:
        functions: `ieee` (correctly rounded division and square root, portable exponential; the same bits on
            CPU and GPU) or `fast` (hardware approximations; the same bits between plans on one GPU).
        sumsq: accumulator of the sum of squares over the streams, `fp64` or `fp32`.
        projection: `external` (mixes are an input) or `fma` (fp32 fused multiply-adds in the column tree).
        flush_subnormals: set only by a backend whose compiler flushes subnormals and cannot be told not to.
        version: `CLASS_VERSION` at the time of building.
    """

    functions: str = "ieee"
    sumsq: str = "fp64"
    projection: str = "external"
    flush_subnormals: bool = False
    version: int = CLASS_VERSION

    def __post_init__(self) -> None:
        for field, allowed in (
            ("functions", FUNCTION_SETS),
            ("sumsq", ACCUMULATORS),
            ("projection", PROJECTIONS),
        ):
            value = getattr(self, field)
            if not isinstance(value, str) or value not in allowed:
                raise UsageError(
                    "U-CLASS",
                    f"{field} must be one of {', '.join(allowed)}, got {value!r}",
                    where=f"arithmetic.{field}",
                    hints=(f"choose one of {', '.join(allowed)}",),
                )

    def describe(self) -> str:
        """One canonical line, the input of the class digest."""
        return " ".join(f"{key}={value}" for key, value in sorted(asdict(self).items()))
