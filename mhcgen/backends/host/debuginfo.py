"""Source lines and shared variables of a built module, read from the ELF file without binutils.

A module that lacks them yields empty answers; findings then lack their lines, nothing else.
"""

from __future__ import annotations

import re
import struct
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from mhcgen.backends.host.dwarf import Frame, InlinedCall, LineTable, read_inlined, read_lines

_SHF_COMPRESSED = 0x800
_STT_TLS = 6


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
    lines: LineTable = field(repr=False)
    inlined: tuple[InlinedCall, ...] = field(repr=False)

    def frames(self, address: int) -> tuple[Frame, ...]:
        """The places of an instruction (an offset from the module's load address), innermost first."""
        innermost = self.lines.frame(address)
        if innermost is None:
            return ()
        calls = sorted((c for c in self.inlined if c.covers(address)), key=lambda c: -c.depth)
        return (innermost, *(call.caller for call in calls))


@lru_cache(maxsize=64)
def read(path: Path) -> DebugInfo:
    """Read a module; the answer is kept per path, whose name states its content."""
    elf = _Elf(path.read_bytes())
    wanted = (".debug_info", ".debug_abbrev", ".debug_line", ".debug_ranges")
    sections = {name: elf.section(name) for name in wanted}
    return DebugInfo(
        tuple(_shared_variables(elf)), read_lines(sections[".debug_line"]), tuple(read_inlined(sections))
    )


@lru_cache(maxsize=64)
def shared_variables(path: Path) -> tuple[SharedVariable, ...]:
    """Only the shared variables, which every launch of a race build needs."""
    return tuple(_shared_variables(_Elf(path.read_bytes())))


class _Elf:
    def __init__(self, data: bytes) -> None:
        if data[:6] != b"\x7fELF\x02\x01":
            raise ValueError("not a little-endian ELF64 file")
        self.data = data
        (offset,) = struct.unpack_from("<Q", data, 40)
        entry, count, names = struct.unpack_from("<HHH", data, 58)
        headers = [struct.unpack_from("<IIQQQQIIQQ", data, offset + i * entry) for i in range(count)]
        strings = headers[names][4] if headers else 0
        self._sections = {self.string(strings + header[0]): header for header in headers}
        symbols = self._sections.get(".symtab")
        self.symbol_names = headers[symbols[6]][4] if symbols else 0

    def string(self, offset: int) -> str:
        return self.data[offset : self.data.index(b"\0", offset)].decode(errors="replace")

    def section(self, name: str) -> bytes:
        header = self._sections.get(name)
        if header is None:
            return b""
        content = self.data[header[4] : header[4] + header[5]]
        return zlib.decompress(content[24:]) if header[2] & _SHF_COMPRESSED else content


def _shared_variables(elf: _Elf) -> list[SharedVariable]:
    found = []
    for name, info, _other, _section, value, size in struct.iter_unpack("<IBBHQQ", elf.section(".symtab")):
        if info & 0xF == _STT_TLS and size > 0:
            function, variable = _demangle(elf.string(elf.symbol_names + name))
            found.append(SharedVariable(variable, function, value, size))
    # Dynamic shared memory (the reserve and its names in the emission) and the runtime's guard are not variables.
    reserve = next((v.offset for v in found if v.name == "mhc_unit_dynamic"), None)
    found = [v for v in found if v.offset != reserve and v.name != "static_guard"]
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
    plain = re.fullmatch(r"_ZL\d+(\w+)", symbol)  # at namespace scope, internal
    return "", plain.group(1) if plain else symbol
