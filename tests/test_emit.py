"""Templates hold no decisions, plans give exactly what templates name, and the text is a function of the plan."""

from __future__ import annotations

import itertools
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import factories
import numpy as np
import pytest
import sweep
from hypothesis import given
from hypothesis import strategies as st
from jinja2 import meta, nodes

import mhcgen
from mhcgen import emit
from mhcgen.errors import InternalError, TemplateError
from mhcgen.lower import EmitItem, float_literal, lower
from mhcgen.plan import Sync, edit_sync
from mhcgen.verify import INNER_NAMES, TEXT_NAMES

ROOT = Path(emit.__file__).parent / "templates"
ALL_TEMPLATES = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.rglob("*.j2"))
#: Faults that the gate plants by name; no plan asks for them.
FAULTS = ("steps/comb_direct_transposed.cu.j2",)
#: Those of kernels; the ones of the C interface are used by test_abi.py.
TEMPLATES = [name for name in ALL_TEMPLATES if not name.startswith("abi/") and name not in FAULTS]


def parsed(template: str) -> nodes.Template:
    return emit.environment().parse((ROOT / template).read_text(), template)


def names(template: str) -> set[str]:
    """Names a template needs from outside."""
    return set(meta.find_undeclared_variables(parsed(template)))


# ---- no decisions -----------------------------------------------------------------------------------
ALLOWED = (nodes.Template, nodes.Output, nodes.TemplateData, nodes.For, nodes.Name, nodes.Getattr)


def decisions(tree: nodes.Template) -> list[str]:
    """What a template does besides printing names and repeating text."""
    found = [type(node).__name__ for node in tree.find_all(nodes.Node) if not isinstance(node, ALLOWED)]
    for loop in tree.find_all(nodes.For):
        found += ["loop filter"] * (loop.test is not None) + ["loop else"] * bool(loop.else_)
        found += ["recursive loop"] * loop.recursive + ["unpacking"] * (not isinstance(loop.target, nodes.Name))
    return found


@pytest.mark.parametrize("template", ALL_TEMPLATES)
def test_no_template_decides(template: str) -> None:
    assert decisions(parsed(template)) == []


@pytest.mark.parametrize(
    "text",
    [
        "{% if n > 4 %}x{% endif %}",
        "{{ 'a' if n else 'b' }}",
        "{{ n > 4 }}",
        "{{ n + 1 }}",
        "{{ n * n }}",
        "{{ -n }}",
        "{{ not n }}",
        "{% set m = n %}",
        "{% macro f(n) %}{% endmacro %}",
        "{{ n | join }}",
        "{{ f(n) }}",
        "{{ n[0] }}",
        "{{ 4 }}",
        "{% include 'module.cu.j2' %}",
        "{% for a in b if a %}{% endfor %}",
        "{% for a in b %}{% else %}x{% endfor %}",
        "{% for a, c in b %}{% endfor %}",
    ],
)
def test_the_lint_sees(text: str) -> None:
    assert decisions(emit.environment().parse(text))


def test_every_template_ends_with_a_newline_and_has_no_tabs() -> None:
    for template in ALL_TEMPLATES:
        text = (ROOT / template).read_text()
        assert text.endswith("\n") and "\t" not in text, template


# ---- fields -----------------------------------------------------------------------------------------
Fields = dict[str, Any]


@cache
def rendered() -> dict[str, list[tuple[Fields, set[str]]]]:
    """Template -> the distinct (fields given, names that its parts need) of a sweep of plans.

    A part (`columns/...`) is rendered with the fields of the step that names it, so what a step is given is what
    it and its parts need.
    """
    found: dict[str, dict[str, tuple[Fields, set[str]]]] = {}
    parts: list[str] = []
    original = emit.render

    def record(template: str, fields: Fields, where: str = "") -> str:
        if template.startswith("columns/"):
            parts.append(template)
            given = fields
        else:
            given = dict(fields)
            found.setdefault(template, {})
            needs = set().union(*(names(part) for part in parts)) if parts else set()
            found[template].setdefault(str(sorted((k, str(v)[:80]) for k, v in given.items())), (given, needs))
            parts.clear()
        found.setdefault(template, {})
        if template.startswith("columns/"):
            found[template].setdefault(str(sorted(given)), (given, set()))
        return original(template, fields, where)

    emit.render = record
    try:
        for plan in sweep.plans().values():
            emit.emit(lower(plan))
    finally:
        emit.render = original
    return {template: list(uses.values()) for template, uses in found.items()}


def test_every_template_is_used_by_some_plan() -> None:
    assert sorted(set(TEMPLATES) - set(rendered())) == []
    assert not set(FAULTS) & set(rendered())


@pytest.mark.parametrize("template", TEMPLATES)
def test_plans_give_what_a_template_names_and_no_more(template: str) -> None:
    for fields, of_parts in rendered()[template]:
        if template.startswith("columns/"):
            assert names(template) <= set(fields)
        else:
            assert names(template) | of_parts == set(fields)


def without_one(value: Any) -> Iterator[tuple[str, Any]]:
    """(key, value with that key gone from the first mapping of a list)."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Mapping):
        for key in value[0]:
            first = {k: v for k, v in value[0].items() if k != key}
            yield key, type(value)((first, *value[1:]))


@pytest.mark.parametrize("template", TEMPLATES)
def test_each_key_removed_is_an_error_that_names_it(template: str) -> None:
    uses = rendered()[template]
    best = max((fields for fields, _ in uses), key=lambda fields: sum(map(bool, fields.values())))
    for key in names(template):
        with pytest.raises(TemplateError, match=f"'{key}' is undefined") as caught:
            emit.render(template, {k: v for k, v in best.items() if k != key}, "somewhere")
        assert caught.value.where == "somewhere" and template in caught.value.message
        for inner, value in without_one(best[key]):
            with pytest.raises(TemplateError, match=f"no attribute '{inner}'"):
                emit.render(template, {**best, key: value})


def test_a_misspelled_key_is_an_error() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=8), "pre", placement="shared")
    lowered = lower(plan)
    items = list(walk(lowered.kernels[0].body))
    step = next(item for item in items if item.template == "steps/reduce_shared.cu.j2")
    fields = {("ep" if key == "eps" else key): value for key, value in step.fields.items()}
    with pytest.raises(TemplateError, match="'eps' is undefined"):
        emit.render(step.template, fields)


def walk(items: tuple[EmitItem, ...]) -> Iterator[EmitItem]:
    for item in items:
        yield item
        yield from walk(item.body or ())


# ---- the text ---------------------------------------------------------------------------------------
STRAY = re.compile(
    r"\b(?:None|True|False|undefined|Undefined|nan|inf)\b|&lt;|&gt;|&amp;|\{\{|\}\}|\{%|\[\]|<mhcgen|object at"
)


@pytest.mark.parametrize("name", sweep.plans())
def test_nothing_of_python_or_jinja_is_in_the_text(name: str) -> None:
    lines = sweep.plans()[name].source.splitlines()
    assert [line for line in lines if STRAY.search(line.split("//")[0])] == []
    # A comment may hold a word of Python's (`pow2=True` in the header), never a hole.
    assert [line for line in lines if re.search(r"\bNone\b|[Uu]ndefined|&lt;|\{\{|\{%|object at", line)] == []


def test_only_the_headers_of_narrow_floats_are_included() -> None:
    for name, plan in sweep.plans().items():
        included = set(re.findall(r"#include <(.*)>", plan.source))
        dtypes = {tensor.dtype for tensor in plan.program.tensors}
        wanted = {f"cuda_{dtype}.h" for dtype in ("bf16", "fp16") if dtype in dtypes}
        assert included == wanted, name
        assert '#include "' not in plan.source


def test_braces_and_parentheses_balance() -> None:
    for name, plan in sweep.plans().items():
        code = re.sub(r'//[^\n]*|"[^"\n]*"', "", plan.source)
        for opening, closing in ("{}", "()", "[]"):
            assert code.count(opening) == code.count(closing), name


def test_indentation_is_a_multiple_of_two_and_never_trails() -> None:
    for name, plan in sweep.plans().items():
        for line in plan.source.splitlines():
            assert line == line.rstrip(), name
            assert (len(line) - len(line.lstrip())) % 2 == 0, f"{name}: {line}"


@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_literals_read_back_as_the_same_float(value: float) -> None:
    text = float_literal(value)
    assert re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?f", text) and ("." in text or "e" in text)
    assert np.float32(text[:-1]).tobytes() == np.float32(value).tobytes()


@given(st.floats(min_value=-1e30, max_value=1e30))
def test_literals_round_doubles_to_the_nearest_float(value: float) -> None:
    assert np.float32(float_literal(value)[:-1]) == np.float32(value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e39])
def test_what_no_literal_can_say_is_an_error(value: float) -> None:
    with pytest.raises(InternalError, match="X-LITERAL"):
        float_literal(value)


@pytest.mark.parametrize(("rms_eps", "hc_eps"), [(1e-6, 1e-6), (1e-6, 1e-2), (1e-2, 1e-6), (3e-5, 7e-4)])
def test_both_eps_reach_the_text(rms_eps: float, hc_eps: float) -> None:
    text = mhcgen.compile(mhcgen.build(hidden=8, rms_eps=rms_eps, hc_eps=hc_eps), "pre").source
    code = re.sub(r"//[^\n]*", "", text)
    literals = {np.float32(number) for number in re.findall(r"(?<![\w.])(\d+\.?\d*(?:e[+-]\d+)?)f\b", code)}
    assert {np.float32(rms_eps), np.float32(hc_eps)} <= literals


# ---- names ------------------------------------------------------------------------------------------
_TYPE = r"(?:float|double|int|bool|unsigned|char|long long|short|\{\{ ?\w+ ?\}\})"
_DECLARED = re.compile(
    rf"\b(?:const\s+)?{_TYPE}(?:\s*const)?[\s*&(]+([a-z]\w*)(?:\[[^\]]*\])*\)?(?:\[[^\]]*\])*\s*(?=[=;,:])([^;]*)"
)


def declared(*folders: str) -> set[str]:
    """Variables that templates declare: the first of a declaration, and those after commas outside brackets."""
    found = set()
    for template in TEMPLATES:
        if template.startswith(folders):
            text = re.sub(r"//[^\n]*", "", (ROOT / template).read_text())
            for match in _DECLARED.finditer(text):
                found.add(match[1])
                for piece in re.split(r",(?![^(\[{]*[)\]}])", match[2])[1:]:
                    found |= set(re.findall(r"^\s*([a-z]\w*)", piece))
    return found


def test_no_tensor_may_take_the_name_of_a_variable() -> None:
    """A weight called `cs` would be read as the chunk of a column; the verifier refuses such names."""
    usual = {"scale"}  # of the gates; quant's own is in another scope
    assert declared("registers/", "kernel.cu.j2") - TEXT_NAMES == set()
    assert declared("steps/", "columns/", "guards/") - TEXT_NAMES - INNER_NAMES - usual == {"mhc_"}


# ---- counted after rendering ------------------------------------------------------------------------
def test_a_barrier_that_no_pass_decided_is_an_error() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=8), "pre", placement="shared")
    lowered = lower(plan)
    kernel = lowered.kernels[0]
    for scope in kernel.expected:
        wrong = replace(kernel, expected={**kernel.expected, scope: kernel.expected[scope] + 1})
        with pytest.raises(TemplateError) as caught:
            emit.emit(replace(lowered, kernels=(wrong,)))
        assert caught.value.code == "T-COUNT"


def test_a_call_to_nothing_is_an_error() -> None:
    lowered = lower(mhcgen.compile(factories.program()))
    with pytest.raises(TemplateError) as caught:
        emit.emit(replace(lowered, functions=()))
    assert caught.value.code == "T-LINK"


def test_an_edited_plan_prints_what_it_now_says() -> None:
    plan = mhcgen.compile(mhcgen.build(hidden=8), "pre", placement="shared")
    kernel = plan.kernels[0]
    for number, sync in enumerate(kernel.syncs()):
        without = factories.with_body(plan, 0, edit_sync(kernel.body, number, lambda _: None)).source
        assert (
            plan.source.count("; ".join(map(str, sync.because)))
            == without.count("; ".join(map(str, sync.because))) + 1
        )
    assert any(isinstance(node, Sync) for node in kernel.body)


# ---- determinism ------------------------------------------------------------------------------------
_DIGEST = """
import hashlib, sys
sys.path.insert(0, {tests!r})
import sweep
for name, plan in sweep.plans(17).items():
    print(name, hashlib.sha256(plan.source.encode()).hexdigest(), plan.numeric_class, sep="|")
"""


def digests(seed: str, cwd: Path) -> str:
    """Names, digests and classes of some emissions by another process."""
    tests = str(Path(__file__).parent)
    package = str(Path(mhcgen.__file__).parents[1])
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": package}
    command = [sys.executable, "-c", _DIGEST.format(tests=tests)]
    return subprocess.run(command, env=environment, cwd=cwd, check=True, capture_output=True, text=True).stdout


def test_every_process_prints_the_same_bytes(tmp_path: Path) -> None:
    said = {digests(seed, cwd) for seed, cwd in (("0", tmp_path), ("1", Path("/")), ("4242", tmp_path))}
    assert len(said) == 1
    # What this process printed, after everything else it has printed, is the same too.
    lines = next(iter(said)).splitlines()
    assert len(lines) > 9
    for line in lines:
        name, digest, numeric = line.split("|")
        plan = sweep.plans()[name]
        assert (plan.emitted_sha256, str(plan.numeric_class)) == (digest, numeric)


def test_emitting_again_gives_the_same_text() -> None:
    for plan in itertools.islice(sweep.plans().values(), 0, None, 11):
        assert emit.emit(lower(plan)) == plan.source
        again = mhcgen.passes.run_pipeline(plan.program, plan.options)
        assert again.source == plan.source


def test_the_text_holds_no_time_path_or_identity() -> None:
    for name, plan in sweep.plans().items():
        assert not re.search(
            r"0x[0-9a-f]{12}\b|/home/|/root/|/tmp/|\b20\d\d-\d\d-\d\d\b|\d\d:\d\d:\d\d", plan.source
        ), name
