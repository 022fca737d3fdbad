"""Turn the formulas that pymdownx.arithmatex marks into MathML.

Browsers show MathML by themselves, without a script. Brackets grow only in a font with
a table for mathematics. Not every system has one, so the site gets its own: STIX Two
Math from the package ziamath, reduced to the characters that formulas use.
"""

import html
import logging
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fontTools import subset
from latex2mathml.converter import convert

MARKED = re.compile(
    r'<(span|div) class="arithmatex">\s*\\[(\[](.*?)\\[)\]]\s*</\1>', re.DOTALL
)
SIZED = re.compile(r"\\[bB]igg?(?![a-zA-Z])\s*(\\[{}]|[()\[\]|])")
# latex2mathml writes a bar as a limit, small and far above, not as an accent.
BAR = re.compile(r'<mover>(<mi>[^<]*</mi>)<mo stretchy="true">&#x000AF;</mo>')
# The package is not imported: it warns of what it uses.
FONT = Path(find_spec("ziamath").origin).parent / "fonts" / "STIXTwoMath-Regular.ttf"
# Latin, Greek, arrows, operators, brackets and mathematical letters.
RANGES = (
    (0x20, 0x17F),
    (0x2B0, 0x3FF),
    (0x2010, 0x214F),
    (0x2190, 0x23FF),
    (0x27C0, 0x2AFF),
    (0x1D400, 0x1D7FF),
)
LONG = (
    60  # characters of LaTeX; a longer formula in a sentence may be wider than a phone
)
log = logging.getLogger("mkdocs.hooks.mathml")


def on_page_content(content: str, **_: Any) -> str:
    """Replace every marked formula of a page."""
    return MARKED.sub(_mathml, content)


def on_post_build(config: Any, **_: Any) -> None:
    """Write the font that docs/css/site.css names."""
    options = subset.Options(flavor="woff", layout_features=["*"], notdef_outline=True)
    with FONT.open("rb") as file:
        font = subset.load_font(file, options)
        subsetter = subset.Subsetter(options)
        subsetter.populate(
            unicodes=[code for first, last in RANGES for code in range(first, last + 1)]
        )
        subsetter.subset(font)
        subset.save_font(
            font, str(Path(config["site_dir"]) / "css" / "math.woff"), options
        )


def _mathml(match: re.Match[str]) -> str:
    display = match[1] == "div"
    latex = html.unescape(match[2]).strip()
    math = convert(_prepared(latex), display="block" if display else "inline")
    # Browsers put wide spaces around a slash, as around a relation.
    math = math.replace(
        "<mo>&#x0002F;</mo>", '<mo lspace="0" rspace="0">&#x0002F;</mo>'
    )
    math = BAR.sub(
        r'<mover accent="true">\1<mo class="bar" stretchy="false">&#x000AF;</mo>', math
    )
    math = math.replace("<mo>&#x0005E;</mo>", '<mo stretchy="false">&#x002C6;</mo>')
    if "\\" in math:
        log.warning(
            "A formula uses a command that latex2mathml does not know: %s", latex
        )
    if display:
        return f'<div class="formula">{math}</div>'
    return f'<span class="formula">{math}</span>' if len(latex) > LONG else math


def _prepared(latex: str) -> str:
    """The formula in commands that latex2mathml knows."""
    latex = re.sub(
        r"\\arg\s*\\min_(\w|\{.*?\})", r"\\underset{\1}{\\mathrm{arg\\,min}}", latex
    )
    return SIZED.sub(
        lambda found: (r"\left" if found[1][-1] in "({[" else r"\right") + found[1],
        latex,
    )
