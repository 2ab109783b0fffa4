"""What a model's name stands for: constants, legal stream counts, options of its stages, and where it comes from."""

from __future__ import annotations

from dataclasses import dataclass

from mhcgen.combs import COMB_KINDS

#: How the streams begin and end: `head` is a gated head, `pre` a collapse by the last site's pre gates.
EXITS = ("head", "mean", "sum", "pre")

Options = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Model:
    """What a name stands for.

    Args:
        name: as given on the command line.
        source: public source of the formula.
        hidden: default hidden size H.
        streams: default stream count n.
        iters: Sinkhorn iterations; 0 where the mixing matrix takes none.
        rms_eps: eps of the RMS over the streams.
        hc_eps: eps added to pre and inside the Sinkhorn; 0 where the model has no use for it.
        norm_eps: eps of the sub-layer's RMSNorm.
        norm_weight: whether that RMSNorm has a weight.
        post_mult: factor of the post gates.
        zero_eps: whether eps 0 has a meaning in this model.
        exit: how the streams end, one of `EXITS`.
        delayed_pre: the collapse uses the pre gates of the previous boundary.
        comb: kind of the mixing matrix, a key of `mhcgen.combs.COMB_KINDS`.
        comb_options: options of that kind which are not its defaults.
        pre_eps: eps of the pre gates; None is `hc_eps`.
        gates: options of the gates (`form`, `pre_act`, `post_act`).
        rms: options of the RMS (`eps_place`, `form`).
        stream_last: streams are stored [T, H, n], the streams of a column side by side.
        norm_each: projection and RMS are of each stream alone.
        rank: most rank of gates that every element of the normed streams has of its own; 0 where each stream has one
            gate.
        static: what does not depend on the token: nothing, the mixing matrix (`comb`), or all coefficients (`all`).
        notes: what the source does that is not modelled, and what is inferred.
    """

    name: str
    source: str
    hidden: int = 4096
    streams: int = 4
    iters: int = 20
    rms_eps: float = 1e-6
    hc_eps: float = 1e-6
    norm_eps: float = 1e-6
    norm_weight: bool = True
    post_mult: float = 2.0
    zero_eps: bool = False
    exit: str = "head"
    delayed_pre: bool = False
    comb: str = "sinkhorn"
    comb_options: Options = ()
    pre_eps: float | None = None
    gates: Options = ()
    rms: Options = ()
    stream_last: bool = False
    norm_each: bool = False
    rank: int = 0
    static: str = ""
    notes: tuple[str, ...] = ()

    @property
    def iterated(self) -> bool:
        """Whether its mixing matrix is made by iterations."""
        return COMB_KINDS[self.comb].stage == "sinkhorn"

    @property
    def uses_hc_eps(self) -> bool:
        """Whether any stage reads `hc_eps`."""
        options = dict(self.comb_options)
        if self.rank:
            return False
        in_comb = self.iterated and options.get("domain") != "log" and options.get("eps_mode") != "none"
        return in_comb or self.pre_eps is None

    @property
    def shared_slots(self) -> tuple[str, ...]:
        """Slots whose tensors are the same for all tokens."""
        return {"": (), "comb": ("logits", "comb"), "all": ("logits", "comb", "pre", "post")}[self.static]

    def refuses_streams(self, n: int) -> str:
        """Why the model does not exist for n streams; empty if it does."""
        return COMB_KINDS[self.comb].streams(n)

    def legal_streams(self, most: int) -> tuple[int, ...]:
        """Stream counts up to `most` for which it exists."""
        return tuple(n for n in range(1, most + 1) if not self.refuses_streams(n))

    def logits(self, n: int) -> int:
        """Logits of the mixing matrix for n streams."""
        return COMB_KINDS[self.comb].logits(n)

    def rank_at(self, hidden: int) -> int:
        """Default rank of the gates at a hidden size: an eighth of it, as published, up to the model's own."""
        return min(self.rank, max(1, hidden // 8))

    def mixes(self, n: int, rank: int = 0) -> int:
        """Rows of fn and base for n streams: pre n | post n, and the logits where they depend on what those do.

        Gates of low rank have no base, and their rows of fn are rank | post n.
        """
        if self.rank:
            return rank + n
        return 2 * n + (0 if self.static == "comb" else self.logits(n))

    def pre_eps_of(self, hc_eps: float) -> float:
        """eps of the pre gates at an hc_eps."""
        return hc_eps if self.pre_eps is None else self.pre_eps
