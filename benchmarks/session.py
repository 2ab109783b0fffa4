"""One measuring session: every table of docs/measurements, as JSON files under a folder, in three minutes or so.

    PYTHONPATH=. python3 benchmarks/session.py OUT [--only decode,prefill] [--seconds 360] [--dry]

A figure that cannot be taken is a row with its error, and the session goes on; after `--seconds` the rest is left
out and said so. `--dry` runs the same code on the CPU executor at tiny sizes, with a clock that measures nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from gpu import need_gpu

from mhcgen.bench.bandwidth import measure_bandwidth
from mhcgen.bench.cases import CASES, case
from mhcgen.bench.device import Device, Dry, Gpu
from mhcgen.bench.facts import facts
from mhcgen.bench.floor import measure_floor
from mhcgen.bench.measure import Bench, Case, Row
from mhcgen.bench.peers import PEERS, measure_peer
from mhcgen.bench.precompile import precompile
from mhcgen.bench.seed_tables import SeedTables, phase_tables
from mhcgen.ir import Program
from mhcgen.plan import Options

FAST: dict[str, Any] = {"functions": "fast", "sumsq": "fp32"}
IEEE: dict[str, Any] = {"functions": "ieee", "sumsq": "fp32"}
SEED: dict[str, Any] = {"functions": "ieee", "sumsq": "fp64"}
PREFILL: dict[str, Any] = {"regime": "prefill"}
#: Seconds without a new figure after which a section is stopped: the compiler of a rival may take most of them.
PATIENCE = 75.0
#: Rivals that compile anew for each token count, for up to minutes.
SLOW = ("liger", "torch-compile")


@dataclass(frozen=True)
class Sizes:
    """How large a session is.

    Args:
        hidden, wide: H of the tables, and the other H of the decode table.
        decode, prefill: token counts.
        narrow: hidden sizes at which prefill is measured with and without a slab in registers.
        others: stream counts beside 4.
        mebibytes: sizes of the bandwidth probe.
        seed: the seed gate's tables.
    """

    hidden: int
    wide: int
    decode: tuple[int, ...]
    prefill: tuple[int, ...]
    narrow: tuple[int, ...]
    others: tuple[int, ...]
    mebibytes: tuple[int, ...]
    seed: SeedTables


FULL = Sizes(
    4096, 7168, (1, 8, 64), (512, 4096, 16384), (1024, 2048), (2, 8), (64, 256, 1024, 4096),
    SeedTables({"streams": 4, "hidden": 4096}),
)
TINY = Sizes(
    512, 768, (1, 3), (70,), (256,), (2,), (1,),
    SeedTables(
        {"streams": 4, "hidden": 256}, (1, 2), 2, ("unfused", "v1", "v4.auto"), ("v4.auto",), ("v4.auto",), (None,)
    ),
)


@dataclass
class Session:
    """What one section works with.

    Args:
        name: of the section.
        head: facts of the device, the start of its file.
        deadline: of `time.monotonic`; later figures are left out.
        found: what the file holds so far; it is written after every row, so that a hang loses one figure.
    """

    name: str
    device: Device
    bench: Bench
    sizes: Sizes
    out: Path
    head: dict[str, Any]
    deadline: float
    found: dict[str, Any] = field(default_factory=dict)

    def rows(self, wanted: Iterable[tuple[Case, int, dict[str, Any]]], key: str = "rows") -> None:
        """A row for each wanted figure, appended under a key of the file."""
        rows = self.found.setdefault(key, [])
        for one, tokens, how in wanted:
            if time.monotonic() > self.deadline:
                rows.append({"what": one.what, "note": one.note, "T": tokens, "error": "out of time"})
                continue
            rows.append(self.bench.attempt(one, tokens, **how))
            self.save()
            print(short(rows[-1]), flush=True)

    def save(self) -> None:
        """Write the file as it stands."""
        text = json.dumps({**self.head, "section": self.name, **self.found}, indent=1, allow_nan=False)
        (self.out / f"{self.name}.json").write_text(text + "\n")


def subject(row: Row) -> str:
    """What a row is about, but for its token count."""
    name = f"{row['what']} {row.get('note', '')}".strip()
    n, hidden, functions, sumsq = (row.get(key, "-") for key in ("n", "H", "class", "sumsq"))
    return f"{name:38.38s} n={n} H={hidden} {functions}/{sumsq}"


def short(row: Row) -> str:
    """One line for a row."""
    if "error" in row:
        return f"{subject(row)} T={row['T']}: {row['error']}"
    return f"{subject(row)} T={row['T']}: {row['us']:.3f} us (floor {row['floor_us']:.3f}, {row['GB_s']} GB/s)"


def pivot(rows: list[Row]) -> list[str]:
    """Rows with one column a token count: time / floor, microseconds; errors below."""
    lines: dict[str, list[str]] = {}
    errors: list[str] = []
    for row in rows:
        if "error" in row:
            errors.append(f"! {short(row)}"[:160])
        elif "us" in row:
            cell = f"{row['T']}: {row['us']:.2f}/{row['floor_us']:.2f}"
            graph = f" ({row['graph']['us']:.2f})" if "graph" in row else ""
            lines.setdefault(subject(row), []).append(cell + graph)
        elif "us_per_iteration" in row:
            cost = f"{row['us_per_iteration']} us each, {row['us_at_none']} at none"
            lines[f"{row['what']} {row['note']}"] = [cost]
        for table in row.get("phases", ()):
            cells = [f"{p['team'][0]}.{p['stage']} {p['cycles']:.0f}" for p in table["phases"]]
            name = f"{row['what']} {row['class']} T={row['T']}: {table['cycles']:.0f} cycles"
            lines.setdefault(name, []).append(", ".join(cells))
    return [f"{name:48s} {'  '.join(cells)}" for name, cells in lines.items()] + errors[:12]


def decode_cases(sizes: Sizes) -> list[tuple[Case, int, dict[str, Any]]]:
    """Issue 5's table: every case, both classes, both hidden sizes; other stream counts for finish and pre."""
    found: list[tuple[Case, int, dict[str, Any]]] = []
    for hidden, classes in ((sizes.hidden, (FAST, IEEE, SEED)), (sizes.wide, (FAST, IEEE))):
        for arithmetic in classes:
            for what in CASES:
                if what == "post" and arithmetic is not FAST:
                    continue  # post computes the same in every class
                one = case(what, dtype="bf16", hidden=hidden, **arithmetic)
                found += [(one, tokens, {}) for tokens in sizes.decode]
    for what in ("finish", "pre", "boundary", "post"):
        one = case(what, {"dependent": True}, "dependent", dtype="bf16", hidden=sizes.hidden, **FAST)
        found += [(one, tokens, {}) for tokens in sizes.decode]
    for n in sizes.others:
        for what in ("finish", "pre", "post"):
            one = case(what, dtype="bf16", hidden=sizes.hidden, streams=n, **FAST)
            found += [(one, tokens, {}) for tokens in sizes.decode]
    return found


def prefill_cases(sizes: Sizes) -> list[tuple[Case, int, dict[str, Any]]]:
    """Many tokens: finish both ways, post, and the forms of pre."""
    found: list[tuple[Case, int, dict[str, Any]]] = []
    for arithmetic in (FAST, IEEE):
        common: dict[str, Any] = {"dtype": "bf16", "hidden": sizes.hidden, **arithmetic}
        forms = [
            case("finish", PREFILL, "prefill", **common),
            case("finish", {}, "decode", **common),
            case("finish+norm+quant", PREFILL, "prefill", **common),
            case("pre", PREFILL, "prefill", **common),
            case("pre", {**PREFILL, "cluster": 1}, "no cluster", **common),
            case("pre", {"fuse": "project,rowsq+gates+sinkhorn+collapse", **PREFILL}, "2 launches", **common),
        ]
        if arithmetic is FAST:
            forms.append(case("post", PREFILL, "prefill", **common))
        found += [(one, tokens, {}) for tokens in sizes.prefill for one in forms]
    # How many blocks with a slab fit an SM decides whether the slab is worth it: see docs/cost-model.md.
    for hidden in sizes.narrow:
        for slab in ("registers", "global"):
            one = case("finish", {"slab": slab}, f"slab {slab}", dtype="bf16", hidden=hidden, **FAST)
            found.append((one, sizes.prefill[-1], {}))
    return found


def phase_cases(sizes: Sizes) -> list[Case]:
    """What is looked at from the inside."""
    return [
        case(what, dtype="bf16", hidden=sizes.hidden, **arithmetic)
        for arithmetic in (FAST, IEEE)
        for what in ("finish", "finish+norm+quant", "pre", "boundary")
    ]


def peer_cases(sizes: Sizes) -> list[tuple[Case, int]]:
    """What rivals are measured on, ours beside them."""
    common: dict[str, Any] = {"dtype": "bf16", "hidden": sizes.hidden, **FAST}
    few = [case(what, **common) for what in ("finish", "pre", "post")]
    many = [case(one.what, PREFILL, **common) for one in few]
    return [
        *((one, tokens) for tokens in sizes.decode for one in few),
        *((one, tokens) for tokens in sizes.prefill for one in many),
    ]


Section = Callable[[Session], None]


def decode(session: Session) -> None:
    """The decode table, and some cases again with nothing in the L2."""
    session.rows(decode_cases(session.sizes))
    common: dict[str, Any] = {"dtype": "bf16", "hidden": session.sizes.hidden, **FAST}
    session.bench = Bench(session.device, session.bench.floor, fresh_results=True)
    for what in ("finish", "pre", "boundary", "post"):
        one = case(what, note="fresh results", **common)
        session.rows([(one, session.sizes.decode[-1], {})])
    session.bench = Bench(session.device, session.bench.floor, cold=True)
    for what in ("finish", "pre", "boundary"):
        one = case(what, note="cold", **common)
        session.rows([(one, session.sizes.decode[0], {})])


def prefill(session: Session) -> None:
    """The prefill table."""
    session.rows(prefill_cases(session.sizes))


def phases(session: Session) -> None:
    """Phases of the decode kernels, and the bandwidth probe."""
    rows = session.found.setdefault("phases", [])
    for tokens in session.sizes.decode[:2]:
        for one in phase_cases(session.sizes):
            rows += phase_tables(session.bench, [one], tokens)
            session.save()
    probes = session.found.setdefault("bandwidth", [])
    for mebibytes in session.sizes.mebibytes:
        probes.append(measure_bandwidth(session.bench, mebibytes, hidden=session.sizes.hidden))
        session.save()


def seed(session: Session) -> None:
    """The seed gate's tables."""
    for name, rows in session.sizes.seed.run(session.bench):
        session.found.setdefault(name, []).extend(rows)
        session.save()
        print(f"{name}: {len(rows)} rows", flush=True)
        if time.monotonic() > session.deadline:
            raise TimeoutError("out of time")


def peers(session: Session) -> None:
    """Rivals beside our own figures; last those whose compilers take minutes."""
    rows = session.found.setdefault("rows", [])
    cases = peer_cases(session.sizes)
    session.rows((one, tokens, {}) for one, tokens in cases)
    for peer in sorted(PEERS.values(), key=lambda peer: peer.name in SLOW):
        missing = peer.missing()
        if missing:
            session.found.setdefault("missing", {})[peer.name] = missing
            continue
        for one, tokens in cases:
            if time.monotonic() > session.deadline:
                raise TimeoutError("out of time")
            row = measure_peer(session.bench, peer, one, tokens)
            if row is not None:
                rows.append(row)
                session.save()
                print(short(row), flush=True)


SECTIONS: dict[str, Section] = {
    "decode": decode, "phases": phases, "seed": seed, "prefill": prefill, "peers": peers,
}


def to_compile(sizes: Sizes, names: list[str]) -> list[tuple[Program, Options]]:
    """Plans that the sections load, baselines included."""
    cases: dict[str, Callable[[], list[Case]]] = {
        "decode": lambda: [one for one, _, _ in decode_cases(sizes)],
        "prefill": lambda: [one for one, _, _ in prefill_cases(sizes)],
        "phases": lambda: [replace(c, options=replace(c.options, stamps=True)) for c in phase_cases(sizes)],
        "seed": sizes.seed.cases,
        "peers": lambda: [one for one, _ in peer_cases(sizes)],
    }
    wanted = [one for name in names for one in cases[name]()]
    return [pair for one in wanted for pair in ((one.program, one.options), (one.program, Options()))]


def relative(text: str) -> str:
    """A text without the folder of this checkout, which says nothing about a figure."""
    return text.replace(f"{Path(__file__).absolute().parent.parent}/", "")


def run_section(name: str, out: Path, dry: bool, seconds: float) -> None:
    """One section, in this process."""
    started = time.monotonic()
    device: Device = Dry() if dry else Gpu()
    floor = measure_floor(device)
    head = facts(device, floor)
    session = Session(name, device, Bench(device, floor), TINY if dry else FULL, out, head, started + seconds)
    try:
        SECTIONS[name](session)
    except Exception as error:
        session.found["error"] = f"{type(error).__name__}: {error}"
        session.found["traceback"] = relative(traceback.format_exc()).splitlines()[-12:]
        raise
    finally:
        session.found["seconds"] = round(time.monotonic() - started, 1)
        session.save()


def child(name: str, given: argparse.Namespace, seconds: float) -> str:
    """One section in a process of its own, so that a fault or a hang ends no other; returns what failed."""
    words = [sys.executable, __file__, str(given.out), "--section", name, "--seconds", f"{seconds:.0f}"]
    path = given.out / f"{name}.json"
    path.unlink(missing_ok=True)
    process = subprocess.Popen([*words, *(["--dry"] if given.dry else [])])
    started = time.time()
    while True:
        try:
            code = process.wait(timeout=1.0)
            return f"{name}: exit code {code}" if code else ""
        except subprocess.TimeoutExpired:
            heard = max(started, path.stat().st_mtime if path.exists() else 0.0)
            # Past its own deadline a section may finish one figure; silent for longer than any takes, it hangs.
            silent = time.time() - heard > (10 * PATIENCE if given.dry else PATIENCE)
            if silent or time.time() > started + seconds + 30:
                process.kill()
                process.wait()
                return f"{name}: hangs, stopped"


def summary(out: Path, names: list[str]) -> list[str]:
    """The tables of every file, short."""
    lines: list[str] = []
    for name in names:
        path = out / f"{name}.json"
        if not path.is_file():
            continue
        found = json.loads(path.read_text())
        lines.append(f"== {name}: {found['gpu']}, copy {found['copy_TB_s']} TB/s, null {found['null_us']} us")
        for key, rows in found.items():
            if isinstance(rows, list) and key != "traceback":
                lines += [f"-- {key}", *pivot([row for row in rows if row["what"] != "bandwidth"])]
                lines += [
                    f"{r['MiB']} MiB: {r.get('read_GB_s')} read, {r.get('read_write_GB_s')} GB/s {r.get('error', '')}"
                    for r in rows
                    if r["what"] == "bandwidth"
                ]
        lines += [f"! {name}: {why}" for name, why in found.get("missing", {}).items()]
        lines += [f"! {found['error']}"] if "error" in found else []
    return lines


def main() -> int:
    """Run the session, or one section of it; the exit code is the number of sections that ended early."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(SECTIONS), help="sections, in this order")
    parser.add_argument("--seconds", type=float, default=360.0, help="for the whole session")
    parser.add_argument("--dry", action="store_true", help="no GPU: tiny sizes, a clock that measures nothing")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if not given.dry:
        need_gpu()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.section:
        run_section(given.section, given.out, given.dry, given.seconds)
        return 0
    deadline = time.monotonic() + given.seconds
    names = [name for name in given.only.split(",") if name]
    unknown = [name for name in names if name not in SECTIONS]
    if unknown:
        parser.error(f"no section {unknown[0]}; there are {', '.join(SECTIONS)}")
    if not given.dry:
        print("compiled:", precompile(to_compile(FULL, names), "sm_90"), flush=True)
    failed = []
    for name in names:
        # Below a few seconds nothing gets measured, but the file then says so.
        failed.append(child(name, given, max(5.0, deadline - time.monotonic())))
    print("\n".join(summary(given.out, names)))
    failed = [what for what in failed if what]
    print(f"{given.seconds - (deadline - time.monotonic()):.0f} s; failed: {', '.join(failed) or 'nothing'}")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
