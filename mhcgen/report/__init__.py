"""One HTML file about an emission: graph, decisions, source, resources, gate, timings. No script, no request.

    from mhcgen.report import Contents, page
    page(Contents(program, plan))

What is not in `Contents` is not on the page, or a line says how to get it.
"""

from mhcgen.report.contents import Contents
from mhcgen.report.highlight import require_highlighter
from mhcgen.report.page import page
from mhcgen.report.resources import Resources, resources_of

__all__ = ["Contents", "Resources", "page", "require_highlighter", "resources_of"]
