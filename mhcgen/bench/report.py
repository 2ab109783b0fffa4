"""Tables of a JSON file of figures: for a terminal, and short ones in Markdown for docs/measurements.

    python -m mhcgen.bench.report decode.json > docs/measurements/decode.md
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mhcgen.errors import InputError, exit_code

Row = Mapping[str, Any]

#: Keys of a file that are no sections.
_HEAD = ("notes", "traceback")
_METHODS = {"graph": "graph replay", "back_to_back": "back to back", "wall": "Python calls"}


def _text(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 62


def _number(value: object) -> bool:
    """Whatever a table can format: neither NaN, nor an integer beyond what a float holds."""
    return isinstance(value, float | int) and not isinstance(value, bool) and abs(value) < 1e30


def _positive(value: object) -> bool:
    """What something is divided by, or drawn on a logarithmic axis."""
    return _number(value) and isinstance(value, float | int) and value > 0


def _method(value: object) -> bool:
    return value in [*_METHODS]


def _a(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


@dataclass(frozen=True)
class _Table:
    """What is taken for granted of a table in a file.

    Args:
        holds: what a key must hold where it is there: a test of its value, or the name of a table in `_TABLES`, of
            which a list in brackets has any number.
        needs: keys that must be there wherever a key is; always, under the empty one.
    """

    holds: Mapping[str, Callable[[object], bool] | str]
    needs: Mapping[str, tuple[str, ...]]


_PROBED = ("MiB", "us", "read_GB_s", "read_write_GB_s", "copy_GB_s")
_PHASE = ("begin", "cycles", "ns", "share")
_SPREAD = {"low": ("low", "high"), "high": ("low", "high")}
_TABLES = {
    "file": _Table({"missing": _a(dict), "notes": _a(list), "copy_TB_s": _positive, "null_us": _positive}, {}),
    "row": _Table(
        {
            "what": _text, "T": _count, "bytes": _count, "method": _method, "us": _positive, "floor_us": _number,
            **dict.fromkeys(("low", "high", "us_per_iteration", "us_at_none"), _number),
            **dict.fromkeys(_METHODS, "timing"), "phases": "[kernel]",
        },
        {
            "": ("what",), "us": ("T", "floor_us"), "us_per_iteration": ("us_at_none",), "phases": ("T",),
            **_SPREAD,
        },
    ),
    # It is read in its row, over what that has, and that is looked at too.
    "timing": _Table({"us": _positive, "low": _number, "high": _number}, {"": ("us",), **_SPREAD}),
    "bandwidth": _Table(
        {"what": _text, "T": _count, **dict.fromkeys(_PROBED, _positive), "phases": "[kernel]"},
        {"us": ("T", *_PROBED), "phases": ("T",)},
    ),
    "kernel": _Table(
        {"phases": "[phase]", "cycles": _number, "ns": _number}, {"": ("phases", "cycles", "ns")},
    ),
    "phase": _Table(
        {"team": _text, "stage": _text, **dict.fromkeys(_PHASE, _number)}, {"": ("team", "stage", *_PHASE)},
    ),
}


def sections(found: Mapping[str, Any]) -> dict[str, list[Row]]:
    """The sections of a file: its lists of rows, by name."""
    return {
        key: value
        for key, value in found.items()
        if isinstance(value, list) and key not in _HEAD and all(isinstance(row, dict) for row in value)
    }


def read(path: Path) -> dict[str, Any]:
    """A file of figures.

    Raises:
        InputError: `I-BENCH`, no such file, rows that cannot be read, or figures of a dry run.
    """
    from mhcgen.bench.facts import FORMAT

    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(
            "I-BENCH", f"the file cannot be read: {error}", where=str(path),
            hints=("`mhcgen bench --json FILE` writes one",),
        ) from error
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise InputError(
            "I-BENCH", f"this is no file of figures in the form {FORMAT}", where=str(path),
            hints=("`mhcgen bench --json FILE` writes one",),
        )
    if found.get("dry"):
        raise InputError(
            "I-BENCH", "these are the numbers of a dry run, which measures nothing", where=str(path),
            hints=("measure on a GPU",),
        )
    _check(found, path)
    return found


def _check(found: Mapping[str, Any], path: Path) -> None:
    """What tables and pictures take for granted: a file may have been edited, or cut.

    Raises:
        InputError: `I-BENCH`.
    """
    parts = sections(found)
    bad = list(_bad("file", found, "its head"))
    if any("us" in row for name in ("rows", "peers") for row in parts.get(name, ())):
        bad += [("its head", key, None) for key in ("copy_TB_s", "null_us") if key not in found]
    for name, rows in parts.items():
        for at, row in enumerate(rows):
            bad += _bad("bandwidth" if row.get("what") == "bandwidth" else "row", row, f"row {at} of {name}")
    for where, key, there in bad[:1]:
        raise InputError(
            "I-BENCH", f"{where} has no {key} that can be read: {there or 'it is missing'}", where=str(path),
            hints=("`mhcgen bench --json FILE` writes such files; take this one again",),
        )


def _bad(kind: str, table: Row, where: str) -> Iterator[tuple[str, str, str | None]]:
    """(where, key, what is there) of everything in a table that is not as `_TABLES` has its kind."""
    wanted = _TABLES[kind]
    for key, needed in wanted.needs.items():
        if not key or key in table:
            yield from ((where, other, None) for other in needed if other not in table)
    for key, holds in wanted.holds.items():
        if key not in table:
            continue
        value, at = table[key], f"{key} of {where}"
        if not isinstance(holds, str):
            fits = holds(value)
        elif holds.startswith("["):
            fits = isinstance(value, list) and all(isinstance(part, dict) for part in value)
            for index, part in enumerate(value if fits else ()):
                yield from _bad(holds.strip("[]"), part, f"{index} of {at}")
        else:
            fits = isinstance(value, dict)
            if fits:
                yield from _bad(holds, value, at)
            if fits and holds == "timing":  # a row of its own, timed by another method
                yield from _bad(kind, {**{k: v for k, v in table.items() if k not in _METHODS}, **value}, at)
        if not fits:
            yield where, key, textwrap.shorten(repr(value), 80)


# ---- rows to cells ----------------------------------------------------------------------------------
def subject(row: Row) -> str:
    """What a row is about, but for its token count."""
    return " ".join(str(part) for part in (row["what"], row.get("note", "")) if part)


def shape(row: Row) -> str:
    """n, H, dtype and class, where a row has them."""
    parts = [f"{key} = {row[key]}" for key in ("n", "H") if key in row]
    words = [str(row[key]) for key in ("dtype", "class", "sumsq") if key in row]
    return ", ".join([*parts, *([" ".join(words)] if words else [])])


def cell(row: Row) -> str:
    """The time of a row: the median, low to high."""
    if "us" not in row:
        return "-"
    spread = f" ({row['low']:.2f} to {row['high']:.2f})" if "low" in row else ""
    return f"{row['us']:.2f}{spread}"


def _head(found: Mapping[str, Any]) -> str:
    gpu, driver = found.get("gpu", "unknown GPU"), found.get("driver", "unknown")
    limits = f"copy {found.get('copy_TB_s')} TB/s, null kernel {found.get('null_us')} us"
    made = f"commit {found.get('commit')}, {found.get('date')}"
    return f"{gpu}, driver {driver}; {limits}; {made}"


def tables(found: Mapping[str, Any]) -> Iterable[tuple[str, list[list[str]]]]:
    """(title, rows with their heading first) of every section of a file."""
    for name, rows in sections(found).items():
        for group in dict.fromkeys(shape(row) for row in rows):
            mine = [row for row in rows if shape(row) == group]
            title = f"{name}: {group}" if group else name
            timed = [row for row in mine if "us" in row and row["what"] != "bandwidth"]
            for method in dict.fromkeys(row.get("method", "graph") for row in timed):
                yield f"{title}, {_METHODS[method]}", _timed([r for r in timed if r.get("method", "graph") == method])
            for method in _METHODS:
                if other := [{**row, **row[method]} for row in timed if method in row]:
                    yield f"{title}, {_METHODS[method]}", _timed(other)
            if slopes := [row for row in mine if "us_per_iteration" in row]:
                yield title, _slopes(slopes)
            if probes := [row for row in mine if row["what"] == "bandwidth" and "us" in row]:
                yield title, _probes(probes)
            for row in mine:
                for table in row.get("phases", ()):
                    yield f"{title}: {subject(row)}, T = {row['T']}", _phases(table)


def _timed(rows: Sequence[Row]) -> list[list[str]]:
    counts = list(dict.fromkeys(row["T"] for row in rows))
    by_name: dict[str, dict[int, Row]] = {}
    for row in rows:
        by_name.setdefault(subject(row), {})[row["T"]] = row
    floors = {count: [r["floor_us"] for r in rows if r["T"] == count and "floor_us" in r] for count in counts}
    body = [[name, *(cell(taken[c]) if c in taken else "-" for c in counts)] for name, taken in by_name.items()]
    heading = ["us", *(f"T = {count}" for count in counts)]
    return [heading, *body, ["floor", *(_range(floors[count]) for count in counts)]]


def _range(figures: Sequence[float]) -> str:
    """The least and the largest; what is launched has a floor of its own."""
    low, high = f"{min(figures):.2f}", f"{max(figures):.2f}"
    return low if low == high else f"{low} to {high}"


def _slopes(rows: list[Row]) -> list[list[str]]:
    body = [[subject(row), f"{row['us_per_iteration']:.3f}", f"{row['us_at_none']:.2f}"] for row in rows]
    return [["arm", "us an iteration", "us at none"], *body]


def _probes(rows: list[Row]) -> list[list[str]]:
    body = [[str(row[key]) for key in _PROBED] for row in rows]
    return [["MiB", "us", "read GB/s", "read and write GB/s", "copy GB/s"], *body]


def _phases(table: Mapping[str, Any]) -> list[list[str]]:
    keys = ("begin", "cycles", "ns")
    body = [
        [p["team"], p["stage"], *(f"{p[key]:.0f}" for key in keys), f"{100 * p['share']:.0f} %"]
        for p in table["phases"]
    ]
    whole = ["all", "", "0", f"{table['cycles']:.0f}", f"{table['ns']:.0f}", ""]
    return [["team", "phase", "begin", "cycles", "ns", "share"], *body, whole]


def failures(found: Mapping[str, Any]) -> list[str]:
    """One line for every figure that could not be taken."""
    lines = [
        f"{name}: {subject(row)}, {shape(row)}, T = {row.get('T')}: {what}{row[key]}"
        for name, rows in sections(found).items()
        for row in rows
        for key, what in (("error", ""), ("graph_error", "graph replay: "))
        if key in row
    ]
    lines += [f"{peer}: {why}" for peer, why in found.get("missing", {}).items()]
    return [*lines, *found.get("notes", ()), *([str(found["error"])] if "error" in found else [])]


# ---- forms ------------------------------------------------------------------------------------------
def text(found: Mapping[str, Any]) -> str:
    """Tables for a terminal."""
    lines = [_head(found)]
    if found.get("dry"):
        lines.append("A dry run: nothing here was measured.")
    for title, rows in tables(found):
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["", title]
        for first, *others in rows:
            cells = [first.ljust(widths[0]), *(c.rjust(w) for c, w in zip(others, widths[1:], strict=True))]
            lines.append("  " + "  ".join(cells).rstrip())
    left = failures(found)
    return "\n".join([*lines, *(["", "not measured"] if left else []), *(f"  {line}" for line in left)]) + "\n"


def markdown(found: Mapping[str, Any]) -> str:
    """Tables in Markdown, under a line that says where they come from."""
    lines = [_head(found) + ".", "", f"`{found.get('command', '')}`"]
    for title, rows in tables(found):
        heading, *body = rows
        lines += ["", f"### {title}", "", _line(heading), _line(["---"] * len(heading))]
        lines += [_line(row) for row in body]
    left = failures(found)
    if left:
        lines += ["", "Not measured:", "", *(f"- {line}" for line in left)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |"


def main(paths: Iterable[str]) -> None:
    """Print the tables of files in Markdown."""
    for path in paths:
        sys.stdout.write(markdown(read(Path(path))) + "\n")


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
