"""docs/bug-log.md cannot rot: its entries are all there and in order, and every test it names exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from mhcgen import inputs

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "bug-log.md").read_text(encoding="utf-8")
#: The log's entries. Numbers that are missing were never used.
ENTRIES = (
    *(1, 3, 4, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 20, 22, 23, 24, 26, 28, 29, 30, 33, 34, 36, 38, 39, 41, 42, 44),
    *(45, 47, 48, 49, 50, 53, 55, 56, 57, 58, 60),
)
INPUTS = (1, 3, 4, 5, 8, 9, 10, 12, 13, 14, 15, 16)
#: What a row without a test says.
NOT_HERE = "does not apply: "


def rows(first: str) -> list[list[str]]:
    """Cells of the table rows whose first cell matches."""
    cells = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.splitlines() if line[:1] == "|"]
    return [row for row in cells if re.fullmatch(first, row[0])]


@cache
def functions(file: str) -> frozenset[str]:
    """Names of functions of a test file, methods too."""
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def named(text: str) -> list[tuple[str, str]]:
    return re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)


def exists(file: str, name: str) -> bool:
    return (ROOT / file).is_file() and name in functions(file)


def test_entries_are_complete_and_in_order() -> None:
    assert [int(row[0]) for row in rows(r"\d+")] == list(ENTRIES)
    assert [row[0] for row in rows(r"D\d+")] == [f"D{number}" for number in INPUTS]


def test_every_entry_has_a_test_or_says_why_not() -> None:
    for row in (*rows(r"\d+"), *rows(r"D\d+")):
        assert len(row) in (3, 4) and all(row), row
        assert named(row[-1]) or row[-1].startswith(NOT_HERE), row[0]


@pytest.mark.parametrize(("file", "name"), sorted(set(named(PAGE))))
def test_every_test_exists(file: str, name: str) -> None:
    assert exists(file, name), f"docs/bug-log.md names {file}::{name}"


def test_a_test_that_does_not_exist_is_found() -> None:
    assert not exists("tests/test_bug_log.py", "test_that_nobody_wrote")
    assert not exists("tests/test_that_nobody_wrote.py", "test")
    assert exists("tests/test_bug_log.py", "test_a_test_that_does_not_exist_is_found")
    # Nothing that looks like a test's name is in another form, which would go unchecked.
    assert len(named(PAGE)) == len(re.findall(r"tests/[\w/]+\.py::", PAGE))


def test_files_named_after_an_entry_are_on_the_page() -> None:
    for path in sorted((ROOT / "tests" / "regressions").glob("test_bug_*.py")):
        numbers = re.findall(r"(?<=_)\d+(?=_)", path.name.partition("test_bug")[2])
        assert numbers and {int(n) for n in numbers} <= set(ENTRIES), path.name
        for number in numbers:
            (row,) = rows(str(int(number)))
            assert f"regressions/{path.name}" in row[-1], f"{path.name} is not in row {number}"


def test_inputs_are_those_of_the_library() -> None:
    for row in rows(r"D\d+"):
        made = re.findall(r"`mhcgen\.inputs\.(\w+)`", row[-1])
        assert made == ([row[0].lower()] if row[0] in inputs.DISCRIMINATING else []), row[0]
        assert all(getattr(inputs, name) is inputs.DISCRIMINATING[row[0]] for name in made)


def test_threads_are_cited_by_their_number() -> None:
    for row in rows(r"\d+"):
        links = re.findall(r"\[([^\]]+)\]\(([^)]+)\)", row[1])
        assert links, row[0]
        for text, target in links:
            match = re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull)/(\d+)", target)
            assert match and match[1] in text.split(), (row[0], text, target)
