"""A small reader of DWARF 4: which source line an instruction comes from, and through which inlined calls.

Only what our own builds contain (the build asks for `-gdwarf-4`): 32-bit DWARF, 64-bit addresses, line programs
and `DW_TAG_inlined_subroutine` with their address ranges.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

_INLINED = 0x1D
_LOW_PC, _HIGH_PC, _RANGES, _STMT_LIST, _CALL_FILE, _CALL_LINE = 0x11, 0x12, 0x55, 0x10, 0x58, 0x59
_FORM_ADDR = 0x01


@dataclass(frozen=True)
class Frame:
    """A place in a source file."""

    file: str
    line: int


@dataclass
class LineTable:
    """Rows of all line programs, sorted by address."""

    addresses: list[int] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def frame(self, address: int) -> Frame | None:
        """The innermost place of an instruction."""
        row = bisect_right(self.addresses, address) - 1
        return self.frames[row] if row >= 0 and self.frames[row].line else None


@dataclass(frozen=True)
class InlinedCall:
    """A call that was inlined: the addresses of its body, and where it was made."""

    ranges: tuple[tuple[int, int], ...]
    depth: int
    caller: Frame

    def covers(self, address: int) -> bool:
        """Whether the instruction belongs to the inlined body."""
        return any(low <= address < high for low, high in self.ranges)


class _Reader:
    def __init__(self, data: bytes, position: int, end: int) -> None:
        self.data, self.position, self.end = data, position, end

    def fixed(self, layout: str) -> int:
        (value,) = struct.unpack_from(layout, self.data, self.position)
        self.position += struct.calcsize(layout)
        return int(value)

    def unsigned(self) -> int:
        result = shift = 0
        while True:
            byte = self.fixed("<B")
            result |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return result

    def signed(self) -> int:
        start = self.position
        value = self.unsigned()
        bits = 7 * (self.position - start)
        return value - (1 << bits) if value >> (bits - 1) else value

    def text(self) -> str:
        end = self.data.index(b"\0", self.position)
        value = self.data[self.position : end].decode(errors="replace")
        self.position = end + 1
        return value

    def skip(self, size: int) -> int:
        self.position += size
        return 0


# ---- line programs (section 6.2 of the standard) ----------------------------------------------------------------


def read_lines(section: bytes) -> LineTable:
    """All rows of `.debug_line`."""
    rows: list[tuple[int, Frame]] = []
    offset = 0
    while offset + 4 <= len(section):
        unit = _Reader(section, offset, len(section))
        unit.end = offset = offset + 4 + unit.fixed("<I")
        if unit.end <= len(section) and unit.fixed("<H") == 4:
            _run_line_program(unit, rows)
    rows.sort(key=lambda row: row[0])
    return LineTable([row[0] for row in rows], [row[1] for row in rows])


def _file_names(unit: _Reader) -> list[str]:
    while unit.text():
        pass  # include directories
    files = [""]
    while name := unit.text():
        for _ in range(3):
            unit.unsigned()  # directory, time, size
        files.append(name)
    return files


def _run_line_program(unit: _Reader, rows: list[tuple[int, Frame]]) -> None:
    header_length = unit.fixed("<I")
    program = unit.position + header_length
    step_size = unit.fixed("<B")
    unit.skip(2)  # operations per instruction (VLIW only), the initial is_stmt
    line_base, line_range, opcode_base = unit.fixed("<b"), unit.fixed("<B"), unit.fixed("<B")
    operand_counts = [unit.fixed("<B") for _ in range(opcode_base - 1)]
    files = _file_names(unit)
    unit.position = program
    address, file, line = 0, 1, 1

    def emit(number: int) -> None:
        rows.append((address, Frame(files[file] if file < len(files) else "", number)))

    while unit.position < unit.end:
        opcode = unit.fixed("<B")
        if opcode >= opcode_base:  # special: moves both registers and emits
            address += (opcode - opcode_base) // line_range * step_size
            line += line_base + (opcode - opcode_base) % line_range
            emit(line)
        elif opcode == 0:  # extended
            size = unit.unsigned()
            following = unit.position + size
            extended = unit.fixed("<B")
            if extended == 1:  # end of sequence: what follows belongs to no line
                emit(0)
                address, file, line = 0, 1, 1
            elif extended == 2:
                address = unit.fixed("<Q")
            unit.position = following
        elif opcode == 1:
            emit(line)
        elif opcode == 2:
            address += unit.unsigned() * step_size
        elif opcode == 3:
            line += unit.signed()
        elif opcode == 4:
            file = unit.unsigned()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * step_size
        elif opcode == 9:
            address += unit.fixed("<H")
        else:
            for _ in range(operand_counts[opcode - 1]):
                unit.unsigned()


# ---- inlined calls ------------------------------------------------------------------------------------------------

_FORMS: dict[int, Callable[[_Reader], int]] = {
    _FORM_ADDR: lambda r: r.fixed("<Q"),
    0x03: lambda r: r.skip(r.fixed("<H")),
    0x04: lambda r: r.skip(r.fixed("<I")),
    0x05: lambda r: r.fixed("<H"),
    0x06: lambda r: r.fixed("<I"),
    0x07: lambda r: r.fixed("<Q"),
    0x08: lambda r: 0 * len(r.text()),
    0x09: lambda r: r.skip(r.unsigned()),
    0x0A: lambda r: r.skip(r.fixed("<B")),
    0x0B: lambda r: r.fixed("<B"),
    0x0C: lambda r: r.fixed("<B"),
    0x0D: lambda r: r.signed(),
    0x0E: lambda r: r.fixed("<I"),
    0x0F: lambda r: r.unsigned(),
    0x10: lambda r: r.fixed("<I"),
    0x11: lambda r: r.fixed("<B"),
    0x12: lambda r: r.fixed("<H"),
    0x13: lambda r: r.fixed("<I"),
    0x14: lambda r: r.fixed("<Q"),
    0x15: lambda r: r.unsigned(),
    0x17: lambda r: r.fixed("<I"),
    0x18: lambda r: r.skip(r.unsigned()),
    0x19: lambda r: 1,
    0x20: lambda r: r.fixed("<Q"),
}

_Abbreviations = dict[int, tuple[int, bool, tuple[tuple[int, int], ...]]]


def read_inlined(sections: Mapping[str, bytes]) -> list[InlinedCall]:
    """Every inlined call of `.debug_info`; empty where a unit has a form that is not known here."""
    info = sections[".debug_info"]
    found: list[InlinedCall] = []
    offset = 0
    while offset + 11 <= len(info):
        unit = _Reader(info, offset, len(info))
        unit.end = offset = offset + 4 + unit.fixed("<I")
        if unit.end > len(info) or unit.fixed("<H") != 4:
            continue
        abbreviations = _abbreviations(sections[".debug_abbrev"], unit.fixed("<I"))
        unit.skip(1)  # size of an address
        try:
            _read_unit(unit, abbreviations, sections, found)
        except KeyError:
            continue
    return found


def _abbreviations(section: bytes, offset: int) -> _Abbreviations:
    reader = _Reader(section, offset, len(section))
    table: _Abbreviations = {}
    while code := reader.unsigned():
        tag, has_children = reader.unsigned(), reader.fixed("<B") == 1
        attributes = []
        while True:
            pair = reader.unsigned(), reader.unsigned()
            if pair == (0, 0):
                break
            attributes.append(pair)
        table[code] = tag, has_children, tuple(attributes)
    return table


def _read_unit(
    unit: _Reader, abbreviations: _Abbreviations, sections: Mapping[str, bytes], found: list[InlinedCall]
) -> None:
    depth = base = 0
    files: list[str] = []
    while unit.position < unit.end:
        code = unit.unsigned()
        if code == 0:
            depth -= 1
            continue
        tag, has_children, attributes = abbreviations[code]
        values = {name: (form, _FORMS[form](unit)) for name, form in attributes}
        if depth == 0:
            base = values.get(_LOW_PC, (0, 0))[1]
            if _STMT_LIST in values:
                files = _files_at(sections[".debug_line"], values[_STMT_LIST][1])
        elif tag == _INLINED and _CALL_LINE in values:
            number = values.get(_CALL_FILE, (0, 0))[1]
            caller = Frame(files[number] if number < len(files) else "", values[_CALL_LINE][1])
            found.append(InlinedCall(_ranges(values, base, sections[".debug_ranges"]), depth, caller))
        depth += has_children


def _files_at(section: bytes, offset: int) -> list[str]:
    reader = _Reader(section, offset + 15, len(section))  # behind the lengths, the version and five bytes
    reader.skip(reader.fixed("<B") - 1)
    return _file_names(reader)


def _ranges(values: Mapping[int, tuple[int, int]], base: int, section: bytes) -> tuple[tuple[int, int], ...]:
    if _RANGES in values:
        reader = _Reader(section, values[_RANGES][1], len(section))
        found: list[tuple[int, int]] = []
        while True:
            low, high = reader.fixed("<Q"), reader.fixed("<Q")
            if (low, high) == (0, 0):
                return tuple(found)
            if low == 2**64 - 1:  # selects another base
                base = high
            else:
                found.append((base + low, base + high))
    if _LOW_PC not in values or _HIGH_PC not in values:
        return ()
    low = values[_LOW_PC][1]
    form, high = values[_HIGH_PC]
    return ((low, high if form == _FORM_ADDR else low + high),)
