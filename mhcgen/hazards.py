"""What stands between two accesses of a kernel, and the weakest barrier that orders them.

One walk serves two readers: the sync pass inserts a barrier where it finds an unordered pair, the Plan's
verifier reports one. A barrier orders what came before it against what comes after it for the threads that
join it; loops are walked until their back edge brings nothing new.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from mhcgen.log import Hazard
from mhcgen.plan import Access, Kernel, Loop, Node, Step, Sync, edit_sync, walk

#: Scopes of hazards, weakest first; nothing is emitted that orders the last one.
STRENGTH = {"warp": 0, "data": 1, "block": 2, "arrival": 3, "cluster": 4}


def in_words(scope: str) -> str:
    """What orders hazards of a scope, in a word or two."""
    return "wait for what is sent" if scope == "arrival" else f"{scope} barrier"


@dataclass(frozen=True)
class Pending:
    """An access that later accesses may conflict with, and the barriers passed since."""

    step: str
    team: str
    access: Access
    passed: frozenset[tuple[str, str]] = frozenset()
    carried: bool = False


@dataclass(frozen=True)
class Walk:
    """Result of a walk: the body with barriers added, the accesses still pending, the hazards found bare."""

    body: tuple[Node, ...]
    pending: tuple[Pending, ...]
    bare: tuple[Hazard, ...]


def scope_between(kernel: Kernel, first: str, second: str) -> tuple[str, str]:
    """Weakest (scope, joining team) that holds every pair of threads of two teams."""
    a, b = kernel.team(first), kernel.team(second)
    warps = set(range(a.first_warp, a.last_warp + 1)) | set(range(b.first_warp, b.last_warp + 1))
    if len(warps) == 1:
        return "warp", "all" if kernel.warps == 1 else second
    if first == second == "data" and kernel.own_mix_warp:
        return "data", "data"
    return "block", "all"


def classify(first: Access, second: Access) -> str | None:
    """RAW, WAR or WAW; None where no order is needed."""
    if first.buffer != second.buffer or not (first.write or second.write):
        return None
    if first.own and second.own:
        return None
    if first.write:
        return "WAW" if second.write else "RAW"
    return "WAR"


def walk_hazards(kernel: Kernel, body: tuple[Node, ...], *, insert: bool, at_least: str = "warp") -> Walk:
    """Walk a body in program order.

    Args:
        kernel: whose teams run the steps.
        body: steps, loops and barriers.
        insert: add barriers where hazards are bare; else report them.
        at_least: weakest scope to insert (`block` where the user asked for block barriers).
    """
    return _walk(kernel, body, (), insert, at_least, carried=False)


def with_reasons(kernel: Kernel, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """The body with each barrier's hazards in full: those that are bare without it.

    A barrier put in for one hazard often covers more, the back edge of its loop among them. One without which
    nothing is bare is dropped.
    """
    index = 0
    while index < sum(isinstance(node, Sync) for node in walk(body)):
        without = edit_sync(body, index, lambda _: None)
        bare = tuple(dict.fromkeys(walk_hazards(kernel, without, insert=False).bare))
        if not bare:
            body = without
            continue
        body = edit_sync(body, index, partial(replace, because=bare))
        index += 1
    return body


def _walk(
    kernel: Kernel,
    body: tuple[Node, ...],
    pending: tuple[Pending, ...],
    insert: bool,
    at_least: str,
    carried: bool,
) -> Walk:
    out: list[Node] = []
    bare: list[Hazard] = []
    for node in body:
        if isinstance(node, Sync):
            pending = tuple(_pass(p, node) for p in pending)
            out.append(node)
        elif isinstance(node, Loop):
            inner, pending, found = _walk_loop(kernel, node, pending, insert, at_least)
            bare.extend(found)
            out.append(inner)
        else:
            needed = _needed(kernel, node, pending)
            bare.extend(hazard for hazard, _ in needed if not insert or hazard.scope == "cluster")
            if insert:
                for barrier in _barriers(needed, at_least):
                    if out and isinstance(out[-1], Sync) and "arrival" not in (out[-1].scope, barrier.scope):
                        barrier = _merge(out.pop(), barrier)  # type: ignore[arg-type]
                    out.append(barrier)
                    pending = tuple(_pass(p, barrier) for p in pending)
            pending = (*_forget(pending, node), *(Pending(node.name, node.team, a) for a in node.accesses))
            out.append(node)
    return Walk(tuple(out), pending, tuple(bare))


def _walk_loop(
    kernel: Kernel, loop: Loop, pending: tuple[Pending, ...], insert: bool, at_least: str
) -> tuple[Loop, tuple[Pending, ...], list[Hazard]]:
    """Walk a loop as if run several times, until the body and what is pending no longer change."""
    bare: list[Hazard] = []
    body, before = loop.body, pending
    for _ in range(8):
        step = _walk(kernel, body, before, insert, at_least, carried=False)
        bare.extend(h for h in step.bare if h not in bare)
        after = tuple(dict.fromkeys(replace(p, carried=_inside(loop, p)) for p in step.pending))
        if step.body == body and set(after) <= set(before):
            break
        body, before = step.body, tuple(dict.fromkeys((*before, *after)))
    final = _walk(kernel, body, before, insert=False, at_least=at_least, carried=False)
    bare.extend(h for h in final.bare if h not in bare)
    return replace(loop, body=body), tuple(replace(p, carried=False) for p in final.pending), bare


def _inside(loop: Loop, pending: Pending) -> bool:
    return any(isinstance(node, Step) and node.name == pending.step for node in loop.body)


def _needed(kernel: Kernel, step: Step, pending: tuple[Pending, ...]) -> list[tuple[Hazard, str]]:
    """Bare hazards of a step against what is pending, each with the team that joins its barrier."""
    found: dict[Hazard, str] = {}
    for access in step.accesses:
        for earlier in pending:
            kind = classify(earlier.access, access)
            if kind is None:
                continue
            scope, team = scope_between(kernel, earlier.team, step.team)
            if earlier.access.remote and kind == "RAW" and not access.remote:
                scope, team = "arrival", step.team  # what is sent is counted: its readers wait for it, nobody else
            elif earlier.access.remote or access.remote:
                scope, team = "cluster", "all"
            if any(_covers(passed, scope, team) for passed in earlier.passed):
                continue
            hazard = Hazard(kind, access.buffer, earlier.step, step.name, scope, earlier.carried)
            found.setdefault(hazard, team)
    return list(found.items())


def _covers(passed: tuple[str, str], scope: str, team: str) -> bool:
    have, joined = passed
    if have == "arrival" or scope == "arrival":
        return have == scope and joined in (team, "data" if team == "gate" else team)
    if have == "block":
        return STRENGTH[scope] <= STRENGTH["block"]
    if have == "data":
        return scope == "data" or (scope == "warp" and team == "data")
    return scope == "warp" and joined == team


def _pass(pending: Pending, sync: Sync) -> Pending:
    if sync.scope == "arrival" and not (pending.access.remote and pending.access.buffer == sync.buffer):
        return pending  # it orders what was sent into its buffer, and nothing else
    return replace(pending, passed=pending.passed | {(sync.scope, sync.team)})


def _barriers(needed: list[tuple[Hazard, str]], at_least: str) -> list[Sync]:
    """One barrier for what needs one, then a wait for each buffer that others send into.

    Hazards between blocks that counting cannot order stay bare: a buffer is sent into once.
    """
    sent = [(hazard, team) for hazard, team in needed if hazard.scope == "arrival"]
    others = [(hazard, team) for hazard, team in needed if STRENGTH[hazard.scope] < STRENGTH["arrival"]]
    found = [_barrier(others, at_least)] if others else []
    for buffer, team in dict.fromkeys((hazard.buffer, team) for hazard, team in sent):
        because = tuple(hazard for hazard, t in sent if (hazard.buffer, t) == (buffer, team))
        found.append(Sync("arrival", team, because, buffer))
    return found


def _barrier(needed: list[tuple[Hazard, str]], at_least: str) -> Sync:
    scope, team = max(((hazard.scope, team) for hazard, team in needed), key=lambda pair: STRENGTH[pair[0]])
    teams = {t for _, t in needed}
    if STRENGTH[at_least] > STRENGTH[scope] or len(teams) > 1:
        scope, team = "block", "all"
    return Sync(scope, team, tuple(hazard for hazard, _ in needed))


def _merge(a: Sync, b: Sync) -> Sync:
    stronger = max(a, b, key=lambda sync: STRENGTH[sync.scope])
    because = tuple(dict.fromkeys((*a.because, *b.because)))
    if a.team != b.team and stronger.scope in ("warp", "data"):
        return Sync("block", "all", because)
    return replace(stronger, because=because)


def _forget(pending: tuple[Pending, ...], step: Step) -> tuple[Pending, ...]:
    """Drop accesses that this step's own write supersedes: conflicts with them show through the write."""
    written = {a.buffer for a in step.accesses if a.write and not a.own}
    return tuple(p for p in pending if p.access.buffer not in written or not p.passed or p.team != step.team)
