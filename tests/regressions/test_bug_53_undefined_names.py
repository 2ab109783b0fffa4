"""pallets/jinja #1849: a name missing from the context rendered as nothing, and the code was valid but wrong.

`test_emit.py` removes each key of each template; here is the environment that makes it an error.
"""

from __future__ import annotations

import jinja2
import pytest

from mhcgen import emit
from mhcgen.emit import environment
from mhcgen.errors import TemplateError


@pytest.mark.parametrize(
    "text", ["{{ eps }}", "for (; i < {{ count }};)", "{% for t in targets %}{% endfor %}", "{{ row.name }}"]
)
def test_a_missing_name_is_an_error(text: str) -> None:
    with pytest.raises(jinja2.UndefinedError):
        environment().from_string(text).render(row={})


def test_the_error_names_template_place_and_name() -> None:
    with pytest.raises(TemplateError) as caught:
        emit.render("guards/sync_block.cu.j2", {}, "mhc_pre")
    assert caught.value.code == "T-RENDER"
    assert caught.value.where == "mhc_pre"
    assert "guards/sync_block.cu.j2" in caught.value.message and "'because'" in caught.value.message


def test_nothing_is_escaped() -> None:
    given = "a < b && c > d ? \"e\" : 'f'"
    assert environment().from_string("{{ text }}").render(text=given) == given


def test_braces_and_comments_of_c_are_text() -> None:
    text = "int a[] = {1, 2}; /* # */ // %\n#pragma unroll\nif (a) { { b(); } }\n"
    assert environment().from_string(text).render() == text
