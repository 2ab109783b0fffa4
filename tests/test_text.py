"""The printed form of Programs and logs, pinned: snapshots, errors and the command line rest on it."""

from __future__ import annotations

import factories

from mhcgen.build import build
from mhcgen.log import Decision, Hazard, Refusal, Witness
from mhcgen.text import print_log, print_program, print_tensor

MEAN = """\
program hand scope=custom G=1 H=8 K=16 L=4 R=8 n=2
class ieee-1-{digest}
arithmetic flush_subnormals=False functions=ieee projection=external sumsq=fp64 version=1
  x: bf16[T, n, H] input
  y: bf16[T, H] result
  y=y <- mean: mean(x=x)
"""

PRE = """\
program deepseek-v4 scope=pre G=1 H=64 K=256 L=16 R=24 n=4
class ieee-1-{digest}
arithmetic flush_subnormals=False functions=ieee projection=external sumsq=fp64 version=1
  x: fp32[T, n, H] input
  mixes: fp32[T, R] input
  mixes_scaled: fp32[T, R] value
  scale: fp32[3] parameter
  base: fp32[R] parameter
  pre: fp32[T, n] result
  post: fp32[T, n] result
  logits: fp32[T, L] value
  comb: fp32[T, n, n] result
  y: fp32[T, H] result
  mixes_scaled=mixes_scaled <- rowsq: rowsq(x=x, mixes=mixes) acc=fp64 eps=1e-06
  pre=pre, post=post, logits=logits <- gates: gates(mixes_scaled=mixes_scaled, scale=scale, base=base) \
post_mult=2.0 pre_eps=1e-06
  comb=comb <- sinkhorn: sinkhorn(logits=logits) comb=sinkhorn early_stop=False eps=1e-06 iters=20
  y=y <- collapse: collapse(x=x, pre=pre)
"""


def test_the_smallest_program() -> None:
    made = factories.program(dtype="bf16")
    assert print_program(made) == MEAN.format(digest=made.numeric_class.digest[:12])
    assert str(made) == print_program(made)


def test_the_pre_chain() -> None:
    made = build(hidden=64)
    assert print_program(made) == PRE.format(digest=made.numeric_class.digest[:12])


def test_a_tensor() -> None:
    assert print_tensor(factories.program().tensors[0]) == "x: fp32[T, n, H] input"


def test_log_entries() -> None:
    entries = (
        Decision("place", "comb", "element", "16 lanes hold one element each"),
        Refusal("fuse", "F-ESCAPE", "group a+c", "a path leaves it", Witness(("a", "b", "c"), "note"), "leave c out"),
        Refusal("place", "P-SLAB", "k", "it does not fit", None, "use more threads"),
    )
    assert print_log(entries) == (
        "place: comb: element; because 16 lanes hold one element each\n"
        "refused F-ESCAPE: group a+c: a path leaves it\n"
        "  path: a -> b -> c (note)\n"
        "  hint: leave c out\n"
        "refused P-SLAB: k: it does not fit\n"
        "  hint: use more threads\n"
    )
    assert print_log(()) == ""


def test_hazards() -> None:
    assert str(Hazard("RAW", "s_pre", "gates", "collapse", "block")) == "RAW s_pre: gates -> collapse"
    carried = Hazard("WAR", "s_m", "map", "reduce", "warp", carried=True)
    assert str(carried) == "WAR s_m: map -> reduce (next iteration)"
