"""What documents say is true: links lead somewhere, commands parse, the tutorial's print what stands there.

In a `console` block a line after `$ ` is a command and what follows is its output; `...` there stands for anything.
The tutorial's `console` and `python` blocks are run in order in one empty folder, and so is the README's first block.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer

from mhcgen import cli

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")))
#: Pages with commands; a measurement quotes what was run at its commit.
CURRENT = tuple(page for page in PAGES if "measurements" not in page.parts and "decisions" not in page.parts)
EXAMPLES = tuple(sorted((ROOT / "examples").glob("*.py")))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(text: str) -> Iterator[tuple[str, str]]:
    """(language, contents) of every fenced block."""
    for match in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        yield match[1], match[2]


def prose(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(text: str) -> set[str]:
    """Ids of headings, as GitHub and mkdocs make them."""
    heads = re.findall(r"^#+ (.+)$", prose(text), re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", head.lower()).strip()) for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)}: {target}"
        # Links out of docs/ break on the built site.
        assert page.parent == ROOT or there.is_relative_to(DOCS), f"{name_of(page)}: {target} leaves docs/"
        if anchor:
            assert anchor in anchors(there.read_text(encoding="utf-8")), f"{name_of(page)}: {target}"


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text()
    listed = re.findall(r"([\w./-]+\.md)", text.partition("\nnav:")[2])
    assert len(set(listed)) == len(listed)
    for page in listed:
        assert (DOCS / page).is_file(), f"mkdocs.yml names {page}"
    for page in DOCS.glob("*.md"):
        assert page.name in listed, f"docs/{page.name} is not in the nav of mkdocs.yml: add it there"


# ---- commands -----------------------------------------------------------------------------------------------
def commands(text: str) -> Iterator[str]:
    """The mhcgen commands of shell and console blocks, and of blocks without a language."""
    for language, block in blocks(text):
        if language not in ("", "sh", "bash", "console", "shell"):
            continue
        for line in re.sub(r"\\\n\s*", " ", block).splitlines():
            line = line.removeprefix("$ ").strip()
            if line.startswith("mhcgen "):
                yield line


def argument_lists(line: str) -> Iterator[list[str]]:
    """The arguments of each mhcgen command of a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|;&<>")
    lexer.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in lexer:
        if set(word) <= set("|;&"):
            found.append([])
        elif set(word) <= set("<>"):
            found.append(["into"])  # the file that follows is no argument
        else:
            found[-1].append(word)
    yield from (words[1:] for words in found if words and words[0] == "mhcgen")


def parse(arguments: list[str]) -> None:
    """Parse as the command line does, without running the verb."""
    group = typer.main.get_command(cli.app)
    with group.make_context("mhcgen", list(arguments)) as context:
        name, verb, rest = group.resolve_command(context, [*context._protected_args, *context.args])  # type: ignore[attr-defined]
        assert verb is not None, name
        verb.make_context(name, rest, parent=context)


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_commands_parse(page: Path) -> None:
    for line in commands(page.read_text(encoding="utf-8")):
        for arguments in argument_lists(line):
            try:
                parse(arguments)
            except cli._ParseError as error:
                pytest.fail(f"{name_of(page)}: {line}: {error.format_message()}")


def test_a_command_that_does_not_parse_is_found() -> None:
    with pytest.raises(cli._ParseError):
        parse(["emit", "--no-such-option"])
    with pytest.raises(cli._ParseError):
        parse(["emboss"])
    assert list(argument_lists("mhcgen emit --fuse 'a+b,c' | head -n 3 # x")) == [["emit", "--fuse", "a+b,c"]]


@pytest.mark.parametrize("page", CURRENT, ids=name_of)
def test_verbs_and_make_targets_in_the_text_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    verbs = {command.name for command in cli.app.registered_commands}
    for verb in re.findall(r"`mhcgen ([a-z]+)", prose(text)):
        assert verb in verbs, f"{name_of(page)}: mhcgen {verb}"
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for target in re.findall(r"(?:^|`)make ([a-z][\w-]*)", text, re.MULTILINE):
        assert target in targets, f"{name_of(page)}: make {target}"


def test_extras_in_the_text_exist() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for page in CURRENT:
        for extras in re.findall(r"(?:mhcgen|\.)\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), name_of(page)


# ---- the same, run ------------------------------------------------------------------------------------------
def matches(wanted: str, got: str) -> bool:
    """`...` in the wanted text stands for anything, over lines too where it has a line to itself."""
    parts = [re.escape(part) for part in re.split(r"^\.\.\.$\n?|\.\.\.", wanted.strip(), flags=re.MULTILINE)]
    return re.fullmatch(".*?".join(parts), got.strip(), re.DOTALL) is not None


def run_block(language: str, block: str, folder: Path) -> None:
    paths = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    env = {**os.environ, "PATH": paths, "COLUMNS": "80", "MHCGEN_CACHE_DIR": str(folder / ".cache")}
    if language == "python":
        done = subprocess.run([sys.executable, "-c", block], cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return
    for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, wanted = piece.partition("\n")
        done = subprocess.run(command, shell=True, cwd=folder, env=env, capture_output=True, text=True)
        got = done.stdout + done.stderr
        expected = {"error[F": 3}.get(wanted[:7], 1 if " --red " in command else 0)
        assert done.returncode == expected, (command, got)
        assert matches(wanted, got), f"{command}\n--- wanted\n{wanted}\n--- got\n{got}"


def test_the_tutorial_prints_what_it_says(tmp_path: Path) -> None:
    for language, block in blocks((DOCS / "tutorial.md").read_text(encoding="utf-8")):
        if language in ("console", "python"):
            run_block(language, block, tmp_path)


def test_the_readme_prints_what_it_says(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    found = [block for language, block in blocks(text) if language == "console"]
    assert found
    for block in found:
        run_block("console", block, tmp_path)


def test_the_comparison_of_outputs_can_fail() -> None:
    assert matches("a ... c\n...\ne", "a b c\nd\nd\ne\n")
    assert not matches("a ... c\ne", "a b c\nd\ne\n")


@pytest.mark.parametrize("example", EXAMPLES, ids=name_of)
def test_examples_run_on_a_cpu(example: Path, tmp_path: Path) -> None:
    text = example.read_text(encoding="utf-8")
    if "import torch" in text:
        pytest.importorskip("torch")
    done = subprocess.run([sys.executable, str(example)], cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


def test_no_measurement_names_a_folder_of_a_machine() -> None:
    folder = re.compile(r'(?<![\w.<>])/(?:home|root|tmp|work|usr|opt|mnt|var)/[^"\s]*')
    for path in sorted((DOCS / "measurements").glob("*.json")):
        found = folder.search(path.read_text(encoding="utf-8"))
        assert found is None, f"{path.name}: {found}"


# ---- the site -----------------------------------------------------------------------------------------------
def test_the_site_builds(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    for page in DOCS.glob("*.md"):
        built = (tmp_path / "site" / page.with_suffix(".html").name).read_text(encoding="utf-8")
        loaded = re.findall(r"<(?:script|img|link)[^>]+(?:src|href)=\"(https?:[^\"]+)", built)
        assert not loaded, f"{page.name} asks for {loaded}"
