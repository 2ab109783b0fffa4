"""Renders `Contents` as one HTML file. Everything but the drawing and the highlighted source is escaped here."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

from mhcgen._version import __version__
from mhcgen.graph import draw
from mhcgen.lower import command_of
from mhcgen.report.contents import (
    Contents,
    barriers_of,
    decisions_of,
    gate_of,
    kernels_of,
    resources_table,
    timings_of,
)
from mhcgen.report.highlight import highlighted, style
from mhcgen.text import print_program

_SECTIONS = {
    "graph": "Graph", "kernels": "Kernels", "decisions": "Decisions", "refusals": "Refusals",
    "resources": "Resources", "gate": "Gate", "timings": "Timings", "source": "Source",
}
_ONLY_OF_A_PLAN = ("kernels", "resources", "gate", "timings", "source")


def page(contents: Contents) -> str:
    """The document: a function of the contents, the version of mhcgen and that of Pygments alone.

    Raises:
        EnvironmentFault: `E-NO-PYGMENTS`.
        InputError: `I-BENCH`, figures that mhcgen did not write.
    """
    from jinja2 import Environment, StrictUndefined
    from markupsafe import Markup

    # Not the emitter's environment: this one escapes, and that one must not.
    environment = Environment(autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True)
    return environment.from_string(_file("page.html")).render(_values(contents, Markup))


def _file(name: str) -> str:
    return files("mhcgen.report").joinpath(name).read_text(encoding="utf-8")


def _values(contents: Contents, safe: Any) -> dict[str, Any]:
    program, plan = contents.program, contents.plan
    refusal = contents.refusals[0] if contents.refusals else None
    kernels = () if plan is None else plan.kernels
    resources = contents.resources
    return {
        "version": __version__,
        "title": f"{program.model}, {program.scope}: {_headline(contents)}",
        "subtitle": "What mhcgen made of one request, why, and what proves it.",
        "style": safe(f"{_file('style.css')}{style()}"),
        "sections": [(k, v) for k, v in _SECTIONS.items() if plan is not None or k not in _ONLY_OF_A_PLAN],
        "facts": _facts(contents),
        "graph": safe(draw(program, "svg", kernels=kernels, refusal=refusal)),
        "barriers": barriers_of(kernels) if any(True for k in kernels for _ in k.syncs()) else None,
        "program": print_program(program),
        "kernels": None if plan is None else kernels_of(plan),
        "decisions": decisions_of(plan),
        "refusals": contents.refusals,
        "answers": contents.answers,
        "resources": resources_table(resources) if resources is not None and resources.rows else None,
        "resource_notes": ("Not asked for.",) if resources is None else resources.notes,
        "gate": None if contents.gate is None else gate_of(contents.gate),
        "timings": None if contents.bench is None else timings_of(contents.bench),
        "source": "" if plan is None else safe(highlighted(plan.source)),
        "lines": 0 if plan is None else plan.source.count("\n"),
        "sha256": "" if plan is None else plan.emitted_sha256,
    }


def _headline(contents: Contents) -> str:
    if contents.plan is None:
        return "refused"
    count = len(contents.plan.kernels)
    return f"{count} kernel{'s' if count != 1 else ''}"


def _facts(contents: Contents) -> list[tuple[str, str]]:
    program, plan = contents.program, contents.plan
    sizes = ", ".join(f"{key} = {value}" for key, value in program.dims if key in ("n", "H"))
    facts = [("sizes", sizes), ("numeric class", str(program.numeric_class))]
    facts.append(("arithmetic", program.arithmetic.describe()))
    if plan is not None:
        facts = [("command", command_of(plan)), *facts, ("target", plan.options.arch)]
    return facts
