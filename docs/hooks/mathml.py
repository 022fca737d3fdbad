"""Turn the formulas that pymdownx.arithmatex marks into MathML, which browsers show by themselves."""

import html
import logging
import re
from typing import Any

from latex2mathml.converter import convert

MARKED = re.compile(r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL)
log = logging.getLogger("mkdocs.hooks.mathml")


def on_page_content(content: str, **_: Any) -> str:
    """Replace every marked formula of a page."""
    return MARKED.sub(_mathml, content)


def _mathml(match: re.Match[str]) -> str:
    display = match[1] == "div"
    latex = html.unescape(match[2]).strip().replace(r"\arg", r"\mathrm{arg}\,")
    math = convert(latex, display="block" if display else "inline")
    math = math.replace(r">\{<", ">{<").replace(r">\}<", ">}<")  # what \Big\{ leaves behind
    if "\\" in math:
        log.warning("A formula uses a command that latex2mathml does not know: %s", latex)
    return f'<div style="overflow-x: auto">{math}</div>' if display else math
