"""EmitPlan + templates -> text. Owns the only template environment; decides nothing.

After rendering, the text is counted against the plan: barriers, shared arrays and parameters.
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any

import jinja2

from mhcgen.errors import TemplateError
from mhcgen.functions import Function
from mhcgen.lower import EmitItem, EmitKernel, EmitPlan

#: Templates that are no files of this package, by name: those of comb kinds registered from outside.
EXTRA_TEMPLATES: dict[str, str] = {}


@cache
def environment() -> jinja2.Environment:
    """The strict environment: a missing name is an error, and nothing is escaped."""
    return jinja2.Environment(
        loader=jinja2.ChoiceLoader(
            [jinja2.PackageLoader("mhcgen", "templates"), jinja2.DictLoader(EXTRA_TEMPLATES)]
        ),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=False,
    )


def render(template: str, fields: dict[str, Any], where: str = "") -> str:
    """One template with its fields, without the last newline.

    Raises:
        TemplateError: `T-RENDER`, naming the template, the line and the stage.
    """
    try:
        return environment().get_template(template).render(fields).rstrip("\n")
    except jinja2.TemplateError as error:
        line = getattr(error, "lineno", None)
        raise TemplateError(
            "T-RENDER",
            f"template {template} does not render: {error}",
            where=where or template,
            notes=() if line is None else (f"line {line}",),
            hints=("the plan's fields and the template's names must agree",),
        ) from error


def _indent(text: str, by: int) -> str:
    pad = " " * by
    return "\n".join(pad + line if line else line for line in text.split("\n"))


#: Starts every line but the first of a part, until it takes the indentation of the line it stands in.
_CONTINUED = "\x01"


def _step(template: str, fields: dict[str, Any], where: str) -> str:
    """A step whose fields may name parts (`columns/...j2`): a part is rendered with the step's own fields."""

    def part(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(part(item) for item in value)
        if isinstance(value, str) and value.startswith("columns/"):
            return render(value, fields, where).replace("\n", "\n" + _CONTINUED)
        return value

    text = render(template, {key: part(value) for key, value in fields.items()}, where)
    lines: list[str] = []
    pad = ""
    for line in text.split("\n"):
        if line.startswith(_CONTINUED):
            line = pad + line[len(_CONTINUED) :]
        else:
            pad = line[: len(line) - len(line.lstrip())]
        lines.append(line)
    return "\n".join(lines)


def _item(item: EmitItem, where: str) -> str:
    if item.body is None:
        return _step(item.template, dict(item.fields), where)
    inner = [_item(child, where) for child in item.body]
    if item.template == "guards/step.cu.j2":
        return render(item.template, {**item.fields, "text": "\n".join(inner)}, where)
    return render(item.template, {**item.fields, "body": [_indent(text, 2) for text in inner]}, where)


def _kernel(kernel: EmitKernel) -> str:
    fields = {
        "name": kernel.name,
        "threads": kernel.threads,
        "comments": kernel.comments,
        "parameters": kernel.parameters,
        "guards": kernel.guards,
        "scalars": kernel.scalars,
        "indexes": kernel.indexes,
        "rows": kernel.rows,
        "buffers": kernel.buffers,
        "declarations": [_indent(_item(item, kernel.name), 2).lstrip() for item in kernel.declarations],
        "body": [_indent(_item(item, kernel.name), 2) for item in kernel.body],
    }
    text = render("kernel.cu.j2", fields, kernel.name)
    _count(kernel, text)
    return text + "\n"


def _count(kernel: EmitKernel, text: str) -> None:
    """Count what came out against the plan."""
    have = {
        "warp": text.count("__syncwarp("),
        "data": text.count("mhc_sync_data("),
        "block": text.count("__syncthreads("),
        "arrival": text.count("mhc_arrivals_wait("),
    }
    shared = len(re.findall(r"__shared__ ", text))
    if have != dict(kernel.expected) or shared != len(kernel.buffers):
        raise TemplateError(
            "T-COUNT",
            f"the text of {kernel.name} has barriers {have} and {shared} shared arrays",
            where=kernel.name,
            notes=(f"the plan has barriers {dict(kernel.expected)} and {len(kernel.buffers)} shared arrays",),
            hints=("a template holds a barrier or an array that no pass decided",),
        )


_NAME = re.compile(r"\bmhc_\w+")


def _link(texts: list[str], available: tuple[Function, ...], kernels: set[str]) -> list[str]:
    """Texts of the functions that the kernels use, and those they use, each once, in catalogue order."""
    by_name = {function.name: function for function in available}
    rendered: dict[str, str] = {}
    wanted = {name for text in texts for name in _NAME.findall(text)} - kernels
    todo = sorted(wanted)
    while todo:
        name = todo.pop()
        if name in rendered or name.startswith("mhc_host_"):
            continue
        if name not in by_name:
            raise TemplateError(
                "T-LINK",
                f"the text calls {name}, which no function template defines",
                where=name,
                hints=("add it to mhcgen.functions",),
            )
        function = by_name[name]
        rendered[name] = render(function.template, dict(function.fields))
        todo += sorted(set(_NAME.findall(rendered[name])) - set(rendered))
    ordered = [rendered[function.name] + "\n" for function in available if function.name in rendered]
    return list(dict.fromkeys(ordered))


def emit(plan: EmitPlan) -> str:
    """The CUDA text of an EmitPlan; a function of the plan alone.

    Raises:
        TemplateError: a template and the plan disagree (a bug of ours).
    """
    kernels = [_kernel(kernel) for kernel in plan.kernels]
    names = {kernel.name for kernel in plan.kernels}
    fields = {
        "header": plan.header,
        "includes": plan.includes,
        "functions": _link(kernels, plan.functions, names),
        "kernels": kernels,
    }
    return render("module.cu.j2", fields).rstrip("\n") + "\n"
