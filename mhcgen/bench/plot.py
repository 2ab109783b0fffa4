"""A picture of a report: time against T with floor and rivals, and the rate against the bytes of a launch.

The second is a roofline of the two limits that were measured: a launch of few bytes is bound by the time of an empty
kernel, one of many by the rate of a copy.

    python -m mhcgen.bench.plot decode.json decode.png
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mhcgen.bench.report import read, sections, shape, subject
from mhcgen.errors import EnvironmentFault, InputError, UsageError, exit_code

#: Beyond so many lines a picture is not read any more; the fastest are drawn.
MOST_LINES = 20
#: How arms or rivals of one thing are told apart; its colour is its own.
FORMS = ("-o", "--s", ":^", "-.v", "--D", ":P", "-.X", "--*", ":h")


def curves(found: Mapping[str, Any]) -> dict[str, list[tuple[int, float, int]]]:
    """name -> (T, us, bytes) of every arm and rival in the sections `rows` and `peers`, by T; of `drawn` alone."""
    made: dict[str, list[tuple[int, float, int]]] = {}
    for row in _rows(found):
        if shape(row) == drawn(found):
            made.setdefault(subject(row), []).append((row["T"], row["us"], row["bytes"]))
    kept = sorted(made, key=lambda curve: min(us / t for t, us, _ in made[curve]))[:MOST_LINES]
    return {curve: sorted(points) for curve, points in made.items() if curve in kept}


def drawn(found: Mapping[str, Any]) -> str:
    """The sizes and the class that are drawn: those of the first figure, where a report has several."""
    return next((shape(row) for row in _rows(found)), "")


def _rows(found: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    parts = sections(found)
    return [row for name in ("rows", "peers") for row in parts.get(name, ()) if "us" in row and "bytes" in row]


def looks(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """How each curve is drawn: one colour for what is launched (the first word), a line and a mark for by whom."""
    things: dict[str, list[str]] = {}
    for name in names:
        things.setdefault(name.split()[0], []).append(name)
    others = list(dict.fromkeys(name.partition(" ")[2] for curves in things.values() for name in curves))
    found = {}
    for at, curves in enumerate(things.values()):
        for name in curves:
            form = FORMS[others.index(name.partition(" ")[2]) % len(FORMS)]
            found[name] = {"color": f"C{at % 10}", "linestyle": form[:-1], "marker": form[-1], "markersize": 4}
    return found


def plot(found: Mapping[str, Any], path: Path) -> None:
    """Write the picture.

    Args:
        found: a report, as JSON has it.
        path: where; its suffix picks the format (.png, .svg, .pdf).

    Raises:
        EnvironmentFault: `E-NO-PLOT`, matplotlib is not installed.
        InputError: `I-BENCH`, no row has a time and bytes.
    """
    pyplot = require_plot()
    lines = curves(found)
    if not lines:
        raise InputError(
            "I-BENCH", "there is nothing to draw: no row has a time and the bytes it moves", where="--plot",
            hints=("the table says what could not be taken",),
        )
    look = looks(lines)
    figure, (times, rates) = pyplot.subplots(1, 2, figsize=(12, 6.5))
    rate, null = float(found["copy_TB_s"]) * 1e6, float(found["null_us"])
    moved: dict[int, int] = {}
    for name, points in lines.items():
        counts, us, nbytes = (list(column) for column in zip(*points, strict=True))
        times.plot(counts, us, label=name, **look[name])
        rates.plot(nbytes, [b / t * 1e-3 for b, t in zip(nbytes, us, strict=True)], label=name, **look[name])
        moved |= {t: min(b, moved.get(t, b)) for t, b in zip(counts, nbytes, strict=True)}
    counts = sorted(moved)
    times.plot(counts, [max(moved[t] / rate, null) for t in counts], "k--", label="floor")
    times.set(xscale="log", yscale="log", xlabel="tokens T", ylabel="us a launch")
    times.set_title(f"{found.get('gpu')}: {drawn(found)}", fontsize=10)
    sizes = sorted({b for points in lines.values() for _, _, b in points})
    rates.plot(sizes, [min(rate, b / null) * 1e-3 for b in sizes], "k--", label="copy rate, empty kernel")
    rates.set(xscale="log", yscale="log", xlabel="bytes moved once", ylabel="GB/s")
    rates.set_title("rate against bytes", fontsize=10)
    figure.legend(*times.get_legend_handles_labels(), loc="lower center", ncols=5, fontsize=8)
    figure.tight_layout(rect=(0, 0.02 + 0.026 * (1 + len(lines) // 5), 1, 1))
    # By this word a later run knows that the file is mhcgen's to overwrite.
    figure.savefig(path, dpi=120, **({"metadata": {"Software": "mhcgen"}} if path.suffix == ".png" else {}))
    pyplot.close(figure)


def require_plot() -> Any:
    """`matplotlib.pyplot` on a backend that needs no display.

    Raises:
        EnvironmentFault: `E-NO-PLOT`.
    """
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        raise EnvironmentFault(
            "E-NO-PLOT", "matplotlib is not installed, so there is nothing to plot with", where="--plot",
            hints=("pip install 'mhcgen[plot]'", "leave --plot out; --json keeps the figures"),
        ) from error
    return pyplot


def main(words: Sequence[str]) -> None:
    """Draw the figures of a JSON file.

    Raises:
        UsageError: `U-OPTION`, not two words.
        InputError, EnvironmentFault: as `read` and `plot`.
    """
    if len(words) != 2:
        raise UsageError(
            "U-OPTION", f"two names of files are needed, got {len(words)}", where="mhcgen.bench.plot",
            hints=("python -m mhcgen.bench.plot decode.json decode.png",),
        )
    plot(read(Path(words[0])), Path(words[1]))


if __name__ == "__main__":
    sys.exit(exit_code(lambda: main(sys.argv[1:])))
