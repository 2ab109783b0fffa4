"""Source lines and shared variables of a built module, read from the ELF file without binutils.

Only what our own builds contain: ELF64 little-endian and DWARF 4 line tables (the build asks for `-gdwarf-4`).
A module without them yields empty answers; findings then lack their lines, nothing else.
"""

from __future__ import annotations

import re
import struct
import zlib
from bisect import bisect_right
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

_SHF_COMPRESSED = 0x800
_STT_TLS = 6
_PT_TLS = 7


@dataclass(frozen=True)
class SharedVariable:
    """A `__shared__` variable: its offset in the module's thread-local segment and its size in bytes."""

    name: str
    function: str
    offset: int
    size: int


@dataclass(frozen=True)
class DebugInfo:
    """What `read` found."""

    shared: tuple[SharedVariable, ...]
    _addresses: list[int] = field(default_factory=list, repr=False)
    _places: list[tuple[str, int]] = field(default_factory=list, repr=False)

    def place(self, address: int) -> tuple[str, int] | None:
        """File name and line of the instruction at `address` (an offset from the module's load address)."""
        row = bisect_right(self._addresses, address) - 1
        if row < 0 or self._places[row][1] == 0:
            return None
        return self._places[row]


@lru_cache(maxsize=64)
def read(path: Path) -> DebugInfo:
    """Read a module; the answer is kept per path, whose name states its content."""
    elf = _Elf(path.read_bytes())
    rows = sorted(_line_rows(elf.section(".debug_line")))
    return DebugInfo(tuple(_shared_variables(elf)), [row[0] for row in rows], [row[1:] for row in rows])


class _Elf:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian ELF64 file")
        self.data = data
        self.sections: dict[str, tuple[int, int, int, int]] = {}
        offset, entry, count, names = (
            *struct.unpack_from("<Q", data, 40),
            *struct.unpack_from("<HHH", data, 58),
        )
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
        strings = headers[names][4] if headers else 0
        for header in headers:
            self.sections[self.string(strings + header[0])] = (header[4], header[5], header[2], header[6])
        self.links = {name: headers[s[3]][4] if s[3] < count else 0 for name, s in self.sections.items()}

    def string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode(errors="replace")

    def section(self, name: str) -> bytes:
        if name not in self.sections:
            return b""
        offset, size, flags, _ = self.sections[name]
        content = self.data[offset : offset + size]
        return zlib.decompress(content[24:]) if flags & _SHF_COMPRESSED else content


def _shared_variables(elf: _Elf) -> list[SharedVariable]:
    found = []
    strings = elf.links.get(".symtab", 0)
    for name, info, _other, _section, value, size in struct.iter_unpack("<IBBHQQ", elf.section(".symtab")):
        if info & 0xF != _STT_TLS or size == 0:
            continue
        function, variable = _demangle(elf.string(strings + name))
        found.append(SharedVariable(variable, function, value, size))
    return sorted(found, key=lambda v: (v.offset, v.name))


def _demangle(symbol: str) -> tuple[str, str]:
    """Function and variable of a local name such as `_ZZ5fusedE3red`; ('', symbol) for any other."""
    for match in re.finditer(r"E(\d+)", symbol):
        length = int(match.group(1))
        name = symbol[match.end() : match.end() + length]
        rest = symbol[match.end() + length :]
        if symbol.startswith("_ZZ") and len(name) == length and re.fullmatch(r"(_\d+|__\d+_)?(\.\d+)?", rest):
            scope = re.match(r"_ZZ(?:N\d+\w*?)?(\d+)(\w+)", symbol)
            function = scope.group(2)[: int(scope.group(1))] if scope else ""
            return function, name
    return "", symbol


def _line_rows(data: bytes) -> list[tuple[int, str, int]]:
    rows: list[tuple[int, str, int]] = []
    offset = 0
    while offset + 4 <= len(data):
        (length,) = struct.unpack_from("<I", data, offset)
        if length >= 0xFFFFFFF0:  # 64-bit DWARF: our compilers do not write it
            break
        unit = _Reader(data, offset + 4, offset + 4 + length)
        if unit.fixed("<H") == 4:
            _run_line_program(unit, rows)
        offset += 4 + length
    return rows


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


def _run_line_program(unit: _Reader, rows: list[tuple[int, str, int]]) -> None:
    """Run one line-number program (DWARF 4, section 6.2) and append its rows; line 0 ends a sequence."""
    header_length = unit.fixed("<I")
    program = unit.position + header_length
    instruction_size = unit.fixed("<B")
    unit.fixed("<B")  # operations per instruction: only VLIW machines use it
    unit.fixed("<B")  # the initial is_stmt
    line_base = unit.fixed("<b")
    line_range = unit.fixed("<B")
    opcode_base = unit.fixed("<B")
    operand_counts = [unit.fixed("<B") for _ in range(opcode_base - 1)]
    while unit.text():
        pass  # include directories
    files = [""]
    while name := unit.text():
        for _ in range(3):
            unit.unsigned()
        files.append(name)
    unit.position = program

    address, file, line = 0, 1, 1

    def emit(number: int) -> None:
        rows.append((address, files[file] if file < len(files) else "", number))

    while unit.position < unit.end:
        opcode = unit.fixed("<B")
        if opcode >= opcode_base:
            step = opcode - opcode_base
            address += step // line_range * instruction_size
            line += line_base + step % line_range
            emit(line)
        elif opcode == 0:
            size = unit.unsigned()
            following = unit.position + size
            extended = unit.fixed("<B")
            if extended == 1:  # end of sequence
                emit(0)
                address, file, line = 0, 1, 1
            elif extended == 2:  # set address
                address = unit.fixed("<Q")
            unit.position = following
        elif opcode == 1:
            emit(line)
        elif opcode == 2:
            address += unit.unsigned() * instruction_size
        elif opcode == 3:
            line += unit.signed()
        elif opcode == 4:
            file = unit.unsigned()
        elif opcode == 8:
            address += (255 - opcode_base) // line_range * instruction_size
        elif opcode == 9:
            address += unit.fixed("<H")
        else:
            for _ in range(operand_counts[opcode - 1]):
                unit.unsigned()
