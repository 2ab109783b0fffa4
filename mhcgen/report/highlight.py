"""Source with colours, by Pygments, which is an extra."""

from __future__ import annotations

from typing import Any

from mhcgen.errors import EnvironmentFault

_LIGHT, _DARK = "xcode", "github-dark"


def require_highlighter() -> Any:
    """The module `pygments`.

    Raises:
        EnvironmentFault: `E-NO-PYGMENTS`.
    """
    try:
        import pygments
    except ImportError as error:
        raise EnvironmentFault(
            "E-NO-PYGMENTS", "a report highlights its source with Pygments, which is not installed",
            where="report", hints=("pip install 'mhcgen[report]'",),
        ) from error
    return pygments


def highlighted(source: str) -> str:
    """The text as HTML, escaped, one `pre`.

    Raises:
        EnvironmentFault: `E-NO-PYGMENTS`.
    """
    pygments = require_highlighter()
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import get_lexer_by_name

    formatter = HtmlFormatter(linenos="inline", cssclass="highlight", wrapcode=True)
    text = str(pygments.highlight(source, get_lexer_by_name("cuda"), formatter))
    return text.replace("<pre>", '<pre tabindex="0" aria-label="Source">', 1)


def style() -> str:
    """The style sheet of `highlighted`, for light and dark."""
    require_highlighter()
    from pygments.formatters import HtmlFormatter

    light = HtmlFormatter(style=_LIGHT).get_style_defs(".highlight")
    dark = HtmlFormatter(style=_DARK).get_style_defs(".highlight")
    # The page has grounds of its own; those of the styles are left to it.
    both = f"{light}\n@media (prefers-color-scheme: dark) {{\n{dark}\n}}"
    return f"{both}\n.highlight, .highlight pre {{ background: none; }}\n"
