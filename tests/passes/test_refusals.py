"""The catalogue of refusals: each code can fire, says why, and proves it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from catalogue import EXAMPLES

import mhcgen
from mhcgen.errors import RefusedError
from mhcgen.log import CATALOGUE, Refusal, Witness
from mhcgen.passes.refuse import refuse

PACKAGE = Path(mhcgen.__file__).parent
CASES = [(code, example) for code, examples in EXAMPLES.items() for example in examples]


def test_every_code_has_an_example_and_every_example_a_code() -> None:
    assert set(EXAMPLES) == set(CATALOGUE)
    assert all(EXAMPLES.values())


def test_the_catalogue_holds_the_codes_that_the_sources_raise() -> None:
    quoted = re.compile(r'"([FPSL]-[A-Z]+(?:-[A-Z]+)*)"')
    log = PACKAGE / "log.py"
    raised = {code for path in PACKAGE.rglob("*.py") if path != log for code in quoted.findall(path.read_text())}
    assert raised == set(CATALOGUE)


@pytest.mark.parametrize(("code", "example"), CASES, ids=[f"{code} {example.name}" for code, example in CASES])
def test_it_fires(code: str, example: object) -> None:
    assert isinstance(example, type(CASES[0][1]))
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(example.program(), **example.options)
    refusal = caught.value.refusal
    assert isinstance(refusal, Refusal)
    assert (refusal.code, caught.value.code) == (code, code)
    assert refusal.step == example.step
    assert refusal.because == example.because
    assert (refusal.witness.path if refusal.witness else ()) == example.path
    assert refusal.hint


@pytest.mark.parametrize("code", CATALOGUE)
def test_entries_say_what_and_what_to_do(code: str) -> None:
    entry = CATALOGUE[code]
    assert entry.code == code
    assert entry.meaning.endswith(".") and entry.advice.endswith(".")


def test_every_witness_path_is_a_path_of_the_program() -> None:
    for _, example in CASES:
        graph = example.program().graph
        edges = set(zip(example.path, example.path[1:], strict=False))
        if example.name == "two groups that wait for each other":
            edges = {("a", "d"), ("c", "b")}  # the circle goes a -> d, then within d's group to c, then c -> b
        assert edges <= set(graph.edges)


def test_the_hint_of_a_site_can_be_followed() -> None:
    program = mhcgen.build(scope="site", hidden=8)
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(program, "site")
    groups = caught.value.hints[0].split("--fuse ")[1]
    assert groups == "rowsq+gates+collapse,sinkhorn+post"
    plan = mhcgen.compile(program, groups)
    assert [kernel.stages for kernel in plan.kernels] == [("rowsq", "gates", "collapse"), ("sinkhorn", "post")]


def test_the_whole_text_of_a_site() -> None:
    with pytest.raises(RefusedError) as caught:
        mhcgen.compile(mhcgen.build(scope="site", hidden=8), "site")
    assert str(caught.value.refusal) == (
        "refused F-ESCAPE: group rowsq+gates+sinkhorn+collapse+post: a path between collapse and post leaves the "
        "group through the opaque branch\n"
        "  path: collapse -> branch -> post\n"
        "  hint: fuse the two sides of branch apart: --fuse rowsq+gates+collapse,sinkhorn+post"
    )


def test_a_code_outside_the_catalogue_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="Z-NEW"):
        refuse("fuse", "Z-NEW", "group", "because", "hint")


def test_a_refusal_carries_its_witness_to_the_user() -> None:
    error = refuse("fuse", "F-ESCAPE", "group a+c", "a path leaves", "do this", Witness(("a", "b", "c")))
    assert (error.exit_code, error.where, error.notes) == (3, "pass fuse", ("path: a -> b -> c",))
