"""Lays a drawing out and writes it as SVG.

```
given tensors │ units, one below the other in launch order │ lanes │ results
              │ a unit's stages go left to right by depth  │       │
              │ ──────── its channel: a track a tensor ─── │       │
```
An edge between neighbours is a curve. Any other runs in the gaps between columns, along a track of its tensor in
the channels below units and in the lanes beside them, so that none passes behind a box it does not belong to.
"""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mhcgen.graph import BARRIER, REFUSED

if TYPE_CHECKING:
    from mhcgen.graph import Drawing, Edge, Node, Unit

_CHAR, _LINE, _PAD = 7.4, 16.0, 10.0
_GAP_X, _GAP_Y, _TITLE, _TRACK, _MARGIN = 128.0, 44.0, 22.0, 12.0, 16.0
#: Width of the gap between lanes and results, where edges turn.
_TURN = 60.0

Point = tuple[float, float]


@dataclass(frozen=True)
class Box:
    """A rectangle: left, top, width, height."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        """x of its right side."""
        return self.x + self.w

    @property
    def bottom(self) -> float:
        """y of its lower side."""
        return self.y + self.h

    @property
    def cx(self) -> float:
        """x of its centre."""
        return self.x + self.w / 2

    @property
    def cy(self) -> float:
        """y of its centre."""
        return self.y + self.h / 2


def svg(drawing: Drawing) -> str:
    """The drawing as an SVG document."""
    return _Layout(drawing).text()


def _size(lines: tuple[str, ...]) -> Point:
    return max(len(line) for line in lines) * _CHAR + 2 * _PAD, len(lines) * _LINE + _PAD


class _Layout:
    def __init__(self, drawing: Drawing) -> None:
        self.drawing = drawing
        self.units = drawing.units
        self.nodes = {node.name: node for node in drawing.nodes}
        self.row = {name: index for index, unit in enumerate(self.units) for name in unit.stages}
        self.depth: dict[str, int] = {}
        for unit in self.units:
            self.depth |= self._depths(unit)
        self.last = [max(self.depth[name] for name in unit.stages) for unit in self.units]
        self.given = [node for node in drawing.nodes if node.style == "given"]
        self.tracks = [self._tracks(index) for index in range(len(self.units))]
        self.boxes: dict[str, Box] = {}
        self.frames: list[Box] = []
        self._place_units()
        self.lanes = self._lanes()
        self._place_results()

    def _depths(self, unit: Unit) -> dict[str, int]:
        """Length of the longest path to each stage inside the unit."""
        depths: dict[str, int] = {}
        for name in unit.stages:
            before = [depths[e.source] for e in self.drawing.edges if e.target == name and e.source in depths]
            depths[name] = 1 + max(before) if before else 0
        return depths

    # ---- which way an edge goes -------------------------------------------------------------------------
    def _direct(self, edge: Edge) -> bool:
        """Between neighbours: given or the last column before, the next column, the next row's start."""
        source, target = self.row.get(edge.source), self.row.get(edge.target)
        if target is None:
            return source is not None and self.depth[edge.source] == self.last[source]
        if source is None:
            return self.depth[edge.target] == 0
        if source == target:
            return self.depth[edge.target] == self.depth[edge.source] + 1
        alone = len(self.units[source].stages) == 1 and len(self.units[target].stages) == 1
        return target == source + 1 and alone

    def _in_channel(self, edge: Edge, row: int) -> bool:
        """Whether an edge that is not direct uses the channel below a row of several columns."""
        if self._direct(edge) or self.last[row] == 0:
            return False
        leaves = self.row.get(edge.source) == row and self.depth[edge.source] < self.last[row]
        inside = self.row.get(edge.source) == row == self.row.get(edge.target)
        return leaves or inside or self.row.get(edge.target) == row

    def _tracks(self, row: int) -> dict[str, int]:
        """Tensors in the channel of a row, numbered."""
        found = dict.fromkeys(e.tensor for e in self.drawing.edges if self._in_channel(e, row))
        return {tensor: index for index, tensor in enumerate(found)}

    def _lanes(self) -> dict[str, float]:
        """x of the lane of each tensor that goes from unit to unit by the side."""
        right = max((frame.right for frame in self.frames), default=0.0)
        lanes: dict[str, float] = {}
        for edge in self.drawing.edges:
            a, b = self.row.get(edge.source), self.row.get(edge.target)
            if a is not None and b is not None and a != b and not self._direct(edge):
                lanes.setdefault(edge.tensor, right + 2 * _TRACK * (len(lanes) + 1))
        self.lanes_right = max(lanes.values(), default=right)
        return lanes

    # ---- placing ----------------------------------------------------------------------------------------
    def _place_units(self) -> None:
        self.given_width = max((_size(node.label)[0] for node in self.given), default=0.0)
        left = _MARGIN + (self.given_width + _GAP_X if self.given else 0.0)
        y = _MARGIN
        for row, unit in enumerate(self.units):
            frame = self._place_unit(unit, row, left, y)
            column = y
            for node in (node for node in self.given if self._first_reader(node) == row):
                w, h = _size(node.label)
                self.boxes[node.name] = Box(_MARGIN, column, w, h)
                column += h + _PAD
            self.frames.append(frame)
            y = max(frame.bottom, column - _PAD) + _GAP_Y
        self.height = y - _GAP_Y + _MARGIN

    def _first_reader(self, node: Node) -> int:
        return min((self.row[edge.target] for edge in self.drawing.edges if edge.source == node.name), default=0)

    def _place_unit(self, unit: Unit, row: int, left: float, top: float) -> Box:
        inset = _PAD if unit.title else 0.0
        x, bottom = left + inset, top
        for depth in range(self.last[row] + 1):
            column = [name for name in unit.stages if self.depth[name] == depth]
            width = max(_size(self.nodes[name].label)[0] for name in column)
            y = top + inset + (_TITLE if unit.title else 0.0)
            for name in column:
                height = _size(self.nodes[name].label)[1]
                self.boxes[name] = Box(x, y, width, height)
                y += height + _PAD + _LINE
            bottom = max(bottom, y - _PAD - _LINE)
            x += width + _GAP_X
        right = max(x - _GAP_X + inset, left + 2 * inset + len(unit.title) * _CHAR)
        channel = _TRACK * len(self.tracks[row]) + (_PAD if self.tracks[row] else 0.0)
        return Box(left, top, right - left, bottom - top + inset + channel)

    def _place_results(self) -> None:
        x = self.lanes_right + _TURN
        tops = [frame.y for frame in self.frames]
        self.width = self.lanes_right + _MARGIN
        for node in (node for node in self.drawing.nodes if node.style == "result"):
            row = next(self.row[edge.source] for edge in self.drawing.edges if edge.target == node.name)
            w, h = _size(node.label)
            self.boxes[node.name] = Box(x, tops[row], w, h)
            for later in range(row, len(tops)):
                tops[later] = max(tops[later], tops[row] + h + _PAD)
            self.width = max(self.width, x + w + _MARGIN)
            self.height = max(self.height, tops[row] + _MARGIN)

    # ---- edges ------------------------------------------------------------------------------------------
    def _path(self, edge: Edge) -> tuple[str, list[Point], Point]:
        """Path data, its last two points (the tip's direction), and where a label stands."""
        a, b = self.boxes[edge.source], self.boxes[edge.target]
        if not self._direct(edge):
            points = self._route(edge, a, b)
            data = "M" + " L".join(f"{x:.1f},{y:.1f}" for x, y in points)
            # Of the stretches, a lane is the tensor's own; others it may share with those that end beside it.
            lane = self.lanes.get(edge.tensor)
            longest = max(
                range(len(points) - 1),
                key=lambda i: (points[i][0] == points[i + 1][0] == lane, _length(points[i], points[i + 1])),
            )
            (x1, y1), (x2, y2) = points[longest], points[longest + 1]
            return data, points[-2:], ((x1 + x2) / 2, (y1 + y2) / 2)
        if edge.source in self.row and edge.target in self.row and self.row[edge.source] != self.row[edge.target]:
            middle = (a.bottom + b.y) / 2
            data = f"M{a.cx:.1f},{a.bottom:.1f} C{a.cx:.1f},{middle:.1f} {b.cx:.1f},{middle:.1f} {b.cx:.1f},{b.y:.1f}"
            return data, [(b.cx, b.y - 1), (b.cx, b.y)], ((a.cx + b.cx) / 2, middle)
        bend = max((b.x - a.right) / 2, 20.0)
        bends = f"{a.right + bend:.1f},{a.cy:.1f} {b.x - bend:.1f},{b.cy:.1f}"
        data = f"M{a.right:.1f},{a.cy:.1f} C{bends} {b.x:.1f},{b.cy:.1f}"
        return data, [(b.x - 1, b.cy), (b.x, b.cy)], ((a.right + b.x) / 2, (a.cy + b.cy) / 2)

    def _route(self, edge: Edge, a: Box, b: Box) -> list[Point]:
        """Corners of an edge that keeps to gaps, tracks and lanes."""
        source, target = self.row.get(edge.source), self.row.get(edge.target)
        points: list[Point] = [(a.right, a.cy)]
        if source is None:
            assert target is not None
            points.append((_MARGIN + self.given_width + _PAD + 4 * self.tracks[target][edge.tensor], a.cy))
        elif edge.tensor in self.tracks[source]:
            turn = a.right + _PAD + 4 * self.tracks[source][edge.tensor]
            points += [(turn, a.cy), (turn, self._track(source, edge.tensor))]
        if target is None:
            turn = b.x - _PAD - 4 * self.tracks[source or 0].get(edge.tensor, 0)
            return [*points, (turn, points[-1][1]), (turn, b.cy), (b.x, b.cy)]
        if source is not None and source != target:
            lane = self.lanes[edge.tensor]
            points.append((lane, points[-1][1]))
            if edge.tensor not in self.tracks[target]:
                return [*points, (lane, b.cy - b.h / 4), (b.right, b.cy - b.h / 4)]
        track = self._track(target, edge.tensor)
        turn = b.x - _PAD - 4 * self.tracks[target][edge.tensor]
        return [*points, (points[-1][0], track), (turn, track), (turn, b.cy), (b.x, b.cy)]

    def _track(self, row: int, tensor: str) -> float:
        frame = self.frames[row]
        return frame.bottom - _PAD - _TRACK * (len(self.tracks[row]) - 1 - self.tracks[row][tensor])

    # ---- writing ----------------------------------------------------------------------------------------
    def text(self) -> str:
        """Frames, then edges, then boxes, then the edges' labels on top."""
        size = f'width="{self.width:.0f}" height="{self.height:.0f}"'
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} viewBox="0 0 {self.width:.0f} {self.height:.0f}" '
            'font-family="monospace" font-size="12">',
            f'<rect {size} fill="#fff"/>',
        ]
        for unit, frame in zip(self.units, self.frames, strict=True):
            if unit.title:
                parts.append(_rect(frame, 'rx="8" fill="#f4f7fb" stroke="#4a6fa5"'))
                parts.append(_words(frame.x + _PAD, frame.y + _TITLE - 4, unit.title, 'font-weight="bold"'))
        labels: dict[str, list[str]] = {}
        # What matters goes on top of what shares its track.
        for edge in sorted(self.drawing.edges, key=lambda edge: (edge.witness, bool(edge.barrier))):
            data, tip, at = self._path(edge)
            colour, width = _EDGE[(edge.witness, bool(edge.barrier))]
            parts.append(f'<path d="{data}" fill="none" stroke="{colour}" stroke-width="{width}"/>')
            parts.append(_tip(tip, colour))
            if edge.words:
                labels.setdefault(f"{edge.source} {edge.words}", _label(at, edge.words, self._direct(edge)))
        for node in self.drawing.nodes:
            parts += _node(node, self.boxes[node.name])
        return "\n".join([*parts, *(line for lines in labels.values() for line in lines), "</svg>"]) + "\n"


#: (refused, has a barrier) to colour and width.
_EDGE = {
    (False, False): ("#444444", "1"),
    (False, True): (BARRIER, "2"),
    (True, False): (REFUSED, "2.5"),
    (True, True): (REFUSED, "2.5"),
}


def _length(a: Point, b: Point) -> float:
    return abs(a[0] - b[0]) + abs(a[1] - b[1])


def _tip(last: list[Point], colour: str) -> str:
    (x0, y0), (x, y) = last
    dx, dy = (float((v > 0) - (v < 0)) for v in (x - x0, y - y0))
    corners = [(x, y), (x - 7 * dx - 3 * dy, y - 7 * dy - 3 * dx), (x - 7 * dx + 3 * dy, y - 7 * dy + 3 * dx)]
    return f'<polygon points="{" ".join(f"{px:.1f},{py:.1f}" for px, py in corners)}" fill="{colour}"/>'


def _label(at: Point, lines: tuple[str, ...], stacked: bool) -> list[str]:
    """Words on a white ground, so that lines below do not run through them; in one line where tracks are close."""
    parts: list[str] = []
    for index, line in enumerate(lines if stacked else (", ".join(lines),)):
        width, y = len(line) * _CHAR, at[1] + 14 * index
        colour = BARRIER if line == lines[-1] and len(lines) > 1 else "#666666"
        parts.append(_rect(Box(at[0] - width / 2, y - 6, width, 12), 'fill="#fff" fill-opacity="0.85"'))
        parts.append(_words(at[0], y + 3, line, f'text-anchor="middle" font-size="11" fill="{colour}"'))
    return parts


def _rect(box: Box, style: str) -> str:
    return f'<rect x="{box.x:.1f}" y="{box.y:.1f}" width="{box.w:.1f}" height="{box.h:.1f}" {style}/>'


def _words(x: float, y: float, text: str, style: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}"{" " + style if style else ""}>{html.escape(text)}</text>'


_STYLE = {
    "stage": 'rx="3" fill="#fff" stroke="#222"',
    "opaque": 'rx="3" fill="#ddd" stroke="#222" stroke-dasharray="5 3"',
    "given": 'rx="14" fill="#fffbe8" stroke="#a58a2a"',
    "result": 'rx="14" fill="#eaf7ea" stroke="#3a7a3a"',
}


def _node(node: Node, box: Box) -> list[str]:
    first = box.cy - (len(node.label) - 1) * _LINE / 2 + 4
    centred = 'text-anchor="middle"'
    lines = [_words(box.cx, first + index * _LINE, line, centred) for index, line in enumerate(node.label)]
    style = _STYLE[node.style]
    if node.witness:
        style = style.replace('stroke="#222"', f'stroke="{REFUSED}" stroke-width="2"')
    return [_rect(box, style), *lines]
