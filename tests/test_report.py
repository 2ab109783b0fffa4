"""The report: complete, the same each time, self-contained, escaped, and a browser opens it without a complaint."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from mhcgen.build import build
from mhcgen.errors import InputError
from mhcgen.log import Refusal, Witness
from mhcgen.passes import run_pipeline
from mhcgen.plan import Options
from mhcgen.report import Contents, Resources, page, resources_of
from mhcgen.report.contents import timings_of
from mhcgen.report.resources import HEAD

ROOT = Path(__file__).parent.parent
CHROMIUM = Path("/usr/bin/chromium")
HOSTILE = "<script>alert(1)</script>\"'&--><img src=x onerror=alert(2)>"
Cli = Callable[..., tuple[int, str, str]]


class Page(HTMLParser):
    """Headings, ids, links and tags of a document, whose tags must match."""

    VOID = ("meta", "link", "br", "img", "input", "hr")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.references: list[str] = []
        self.words: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            if name == "id":
                self.ids.append(value or "")
            elif name in ("href", "src"):
                (self.links if tag == "a" else self.references).append(value or "")

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open:
            self.words.setdefault(self.open[-1], []).append(data)


def contents() -> Contents:
    program = build(hidden=64)
    resources = Resources("13.0", (("sm_90", "mhc", *("0",) * (len(HEAD) - 2)),), ("a note",))
    return Contents(program, run_pipeline(program, Options(fuse="pre")), resources=resources)


def test_every_section_is_there_and_reachable() -> None:
    text = page(contents())
    found = Page(text)
    assert found.words["h2"] == [
        "Graph", "Kernels", "Decisions", "Refusals", "Resources", "Gate", "Timings", "Source",
    ]
    assert len(set(found.ids)) == len(found.ids)
    for link in found.links:
        assert link.startswith("#") and link[1:] in found.ids
    assert found.tags.count("h1") == 1
    plan = contents().plan
    assert plan is not None
    shown = re.sub(r"<[^>]+>", "", text)
    for entry in plan.log:
        assert str(getattr(entry, "because", "")) in shown.replace("&#39;", "'").replace("&gt;", ">")
    assert plan.emitted_sha256 in text and plan.kernels[0].name in text


def test_it_asks_nobody_for_anything() -> None:
    text = page(contents())
    found = Page(text)
    assert found.references == ["data:,"]
    assert "script" not in found.tags
    assert "default-src 'none'" in text
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)


def test_tables_scroll_by_keyboard_and_have_names() -> None:
    text = page(contents())
    regions = re.findall(r'<div class="scroll[^>]*>', text)
    assert regions
    assert all('tabindex="0"' in region and "aria-label" in region for region in regions)
    assert text.count("<table>") == text.count("<caption>")
    assert "prefers-color-scheme: dark" in text


def test_a_page_is_a_function_of_its_contents() -> None:
    assert page(contents()) == page(contents())


def test_nothing_of_a_name_becomes_markup() -> None:
    program = replace(build(hidden=64), model=HOSTILE, origin=HOSTILE)
    plan = run_pipeline(program, Options(fuse="pre")).decide(HOSTILE, HOSTILE, HOSTILE, HOSTILE)
    refusal = Refusal("fuse", HOSTILE, HOSTILE, HOSTILE, Witness((HOSTILE,)), HOSTILE)
    resources = Resources(HOSTILE, ((HOSTILE,) * len(HEAD),), (HOSTILE,))
    row = {"what": HOSTILE, "T": 1, "us": 2.0, "floor_us": 1.0}
    bench = {"gpu": HOSTILE, "command": HOSTILE, "notes": [HOSTILE], "rows": [row]}
    text = page(Contents(program, plan, (refusal,), (HOSTILE,), resources, bench=bench))
    found = Page(text)
    assert {"script", "img"}.isdisjoint(found.tags)
    assert "".join(found.words["h1"]).startswith(HOSTILE)


def test_figures_that_are_none_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        timings_of({"rows": [{"what": "x", "us": 1.0}]})
    assert caught.value.code == "I-BENCH"


def test_the_verb_writes_it_and_says_where(tmp_path: Path, mhcgen: Cli) -> None:
    out = tmp_path / "r.html"
    words = ("report", "--streams", 4, "--hidden", 64, "--fuse", "pre", "--out", out)
    code, said, err = mhcgen(*words)
    assert (code, said, err) == (0, f"{out}\n", "")
    first = out.read_bytes()
    assert mhcgen(*words)[0] == 0
    assert out.read_bytes() == first
    assert [path.name for path in tmp_path.iterdir()] == ["r.html"]
    out.write_text("mine")
    code, _, err = mhcgen(*words)
    assert code == 2 and "error[U-OUTPUT]" in err
    assert out.read_text() == "mine"
    assert mhcgen(*words, "--force")[0] == 0


def test_the_verb_runs_the_gate(tmp_path: Path, mhcgen: Cli) -> None:
    out = tmp_path / "r.html"
    assert mhcgen("report", "--hidden", 64, "--fuse", "pre", "--check", "--tokens", 1, "--out", out)[0] == 0
    text = out.read_text()
    assert "2 arms, all equal and clean, on host" in text and 'class="good">ok' in text


def test_the_table_of_resources_can_be_chosen(tmp_path: Path, mhcgen: Cli) -> None:
    out = tmp_path / "r.html"
    words = ("report", "--hidden", 64, "--fuse", "pre", "--out", out)
    assert mhcgen(*words, "--archs", "none")[0] == 0
    assert "Not asked for." in out.read_text()
    for archs in ("sm_90,sixty", "", "sm_90,,"):
        code, _, err = mhcgen(*words, "--force", "--archs", archs)
        assert code == 2 and "error[U-ARCH]" in err and "where: --archs" in err


@pytest.mark.nvrtc
def test_resources_are_those_of_the_compiler() -> None:
    found = resources_of(build(hidden=64), Options(fuse="pre"), ("sm_90", "sm_100"))
    assert [row[0] for row in found.rows] == ["sm_90", "sm_100"] and found.compiler and not found.notes
    assert all(len(row) == len(HEAD) and row[1].startswith("mhc_") and int(row[3]) > 8 for row in found.rows)


def test_without_nvrtc_a_note_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MHCGEN_NVRTC", "/nowhere/libnvrtc.so")
    found = resources_of(build(hidden=64), Options(fuse="pre"))
    assert not found.rows and "MHCGEN_NVRTC" in found.notes[0]


def test_a_refusal_gets_a_page_and_its_exit_code(tmp_path: Path, mhcgen: Cli) -> None:
    out = tmp_path / "r.html"
    code, said, err = mhcgen("report", "--hidden", 64, "--fuse", "site", "--out", out)
    assert (code, said) == (3, f"{out}: the refusal\n")
    assert "error[F-ESCAPE]" in err
    found = Page(out.read_text())
    assert found.words["h2"] == ["Graph", "Decisions", "Refusals"]
    assert 'stroke="#cc0000"' in out.read_text()


def test_what_another_fusion_is_refused_for_is_drawn(tmp_path: Path, mhcgen: Cli) -> None:
    out = tmp_path / "r.html"
    words = ("report", "--hidden", 64, "--scope", "site", "--fuse", "pre", "--out", out)
    assert mhcgen(*words, "--why-not", "site")[0] == 0
    assert "F-ESCAPE" in out.read_text() and 'stroke="#cc0000"' in out.read_text()
    assert mhcgen(*words, "--why-not", "none")[0] == 0
    assert "--fuse none is legal here." in out.read_text()


def test_without_pygments_the_extra_is_named(
    tmp_path: Path, mhcgen: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pygments", None)
    code, _, err = mhcgen("report", "--hidden", 64, "--out", tmp_path / "r.html")
    assert code == 4
    assert "error[E-NO-PYGMENTS]" in err and "pip install 'mhcgen[report]'" in err
    assert not list(tmp_path.iterdir())


# ---- in a browser -------------------------------------------------------------------------------------------
def browse(url: str, folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    fresh = folder / "profile"
    shutil.rmtree(fresh, ignore_errors=True)
    words = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
        "--enable-logging=stderr", f"--user-data-dir={fresh}", "--window-size=1280,1500", *more, url,
    ]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True)


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.is_file(), reason="no Chromium")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_browser_shows_it_without_a_complaint(tmp_path: Path, mhcgen: Cli, scheme: str) -> None:
    """With MHCGEN_KEEP_SCREENSHOT set, the picture of the light page replaces docs/img/report.png."""
    out = tmp_path / "r.html"
    words = ("report", "--hidden", 1024, "--scope", "site", "--fuse", "pre", "--why-not", "site", "--check")
    assert mhcgen(*words, "--tokens", "1,4", "--out", out)[0] == 0
    dark = ["--force-dark-mode"] if scheme == "dark" else []
    seen = browse(out.as_uri(), tmp_path, "--dump-dom", *dark)
    assert "CONSOLE" not in seen.stderr
    assert Page(out.read_text()).words["h2"] == re.findall(r"<h2[^>]*>([^<]+)</h2>", seen.stdout)
    picture = tmp_path / "r.png"
    shot = browse(out.as_uri(), tmp_path, f"--screenshot={picture}", *dark)
    assert "CONSOLE" not in shot.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    if scheme == "light" and os.environ.get("MHCGEN_KEEP_SCREENSHOT"):
        (ROOT / "docs" / "img").mkdir(exist_ok=True)
        shutil.copyfile(picture, ROOT / "docs" / "img" / "report.png")


@pytest.mark.browser
@pytest.mark.skipif(not CHROMIUM.is_file(), reason="no Chromium")
def test_a_browser_would_have_complained(tmp_path: Path) -> None:
    """The check above can fail: a page with an error in it gives a line of the console."""
    bad = tmp_path / "bad.html"
    bad.write_text("<script>console.error('x')</script>")
    assert "CONSOLE" in browse(bad.as_uri(), tmp_path, "--dump-dom").stderr


def test_the_screenshot_of_the_docs_is_small() -> None:
    assert 0 < (ROOT / "docs" / "img" / "report.png").stat().st_size < 300_000
