"""What an Options may hold at all, before any pass reads it: types, and the words of each enumeration.

Deliberately not done here: block and cluster sizes. No such block is a refusal, and place makes it.
"""

from __future__ import annotations

from mhcgen.plan import MIX_WARPS, PLACEMENTS, REGIMES, SLABS, SYNCS, Options
from mhcgen.values import member, switch, text

WORDS = {"placement": PLACEMENTS, "sync": SYNCS, "slab": SLABS, "mix_warp": MIX_WARPS, "regime": REGIMES}
SWITCHES = ("scalar", "dependent", "stamps")


def check_options(options: Options) -> None:
    """Look at every field whose legal values are known.

    Raises:
        UsageError: `U-OPTION`, naming the option, the value and what is legal.
    """
    text("fuse", options.fuse)
    for field, allowed in WORDS.items():
        member(field, getattr(options, field), allowed)
    for field in SWITCHES:
        switch(field, getattr(options, field))
