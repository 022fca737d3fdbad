"""One HTML file that shows what was run and what came out: claims, figures, numbers, speed, environment, citation.

The file needs nothing else: styles and pictures are inside it, it has no scripts and loads nothing from the network.
"""

from __future__ import annotations

import datetime
import math
import os
import platform
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from importlib import metadata, resources
from numbers import Integral, Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from proxsps._files import replace_file
from proxsps._install import require

require("proxsps.report", "experiments", "matplotlib", "pandas")

import pandas as pd  # noqa: E402

from proxsps import figures  # noqa: E402
from proxsps.experiments.symbols import counted, symbols  # noqa: E402

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from proxsps.figures.export import Picture

LONG_TABLE = 12  # rows; a longer table is folded
PHONE_WIDTH = 640  # pixels below which a wide figure scrolls instead of shrinking

VERDICTS = {"does not hold": "fails", "holds in part": "partly", "holds": "holds"}  # and their looks; worst first

PAPER = "https://openreview.net/forum?id=jWr41htaB3"
BIBTEX = """\
@article{schaipp2023stochastic,
  title   = {A Stochastic Proximal Polyak Step Size},
  author  = {Schaipp, Fabian and Gower, Robert M. and Ulbrich, Michael},
  journal = {Transactions on Machine Learning Research},
  year    = {2023},
  url     = {https://openreview.net/forum?id=jWr41htaB3}
}"""


class ReportedClaim(Protocol):
    """A sentence that a number supports or contradicts; any object with these attributes can be used."""

    @property
    def name(self) -> str:
        """Short name, unique in its experiment."""

    @property
    def gist(self) -> str:
        """The sentence in short."""

    @property
    def quantity(self) -> str:
        """What is measured."""

    @property
    def rule(self) -> str:
        """When the claim holds."""

    @property
    def measured(self) -> object:
        """The measured value: a number or a text."""

    @property
    def verdict(self) -> str:
        """A key of `VERDICTS`."""

    @property
    def part(self) -> str:
        """Which part holds, if not all of it."""

    @property
    def strict(self) -> str:
        """What a stricter rule gives, or nothing."""

    @property
    def published(self) -> tuple[str, str] | None:
        """Verdict and measured value on the paper's own curves, if these have the numbers."""


@dataclass(frozen=True)
class Section:
    """One experiment: what it is, its claims, its figures with captions, and a table of numbers.

    A figure is a matplotlib figure, or a picture made from one (`figures.picture`).
    """

    title: str
    description: str
    claims: Sequence[ReportedClaim] = ()
    figures: Sequence[tuple[str, Figure | Picture]] = ()
    table: pd.DataFrame | None = field(default=None, compare=False)


def describe_environment() -> dict[str, str]:
    """Versions, machine and date, in the order in which the report shows them; imports none of the libraries."""
    rows = {"Python": platform.python_version()}
    for package in ("proxsps", "torch", "numpy", "pandas"):
        try:
            rows[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            rows[package] = "not installed"
    rows["CPUs"] = str(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count())
    rows["Platform"] = platform.platform()
    rows["Date"] = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return rows


def write_report(
    path: str | os.PathLike[str],
    sections: Sequence[Section],
    *,
    title: str,
    environment: Mapping[str, object],
    speed: Mapping[str, object],
    first: tuple[str, Figure | Picture] | None = None,
) -> Path:
    """Write the report and return its path; the old file stays until the new one is complete.

    Args:
        path: the HTML file; missing folders are created.
        sections: one for each experiment, in the order of the page.
        title: heading of the page.
        environment: rows of the environment table, for instance ``describe_environment()``.
        speed: rows of the speed table.
        first: a figure for the top of the page, with its caption.
    """
    target = Path(path)
    text = render(sections, title=title, environment=environment, speed=speed, first=first)
    replace_file(target, text.encode())
    return target


def render(
    sections: Sequence[Section],
    *,
    title: str,
    environment: Mapping[str, object],
    speed: Mapping[str, object],
    first: tuple[str, Figure | Picture] | None = None,
) -> str:
    """The whole page as text."""
    claims = [(place, claim) for place, section in enumerate(sections, 1) for claim in section.claims]
    style = resources.files("proxsps").joinpath("report.css").read_text(encoding="utf-8")
    links = [(f"experiment-{place}", section.title) for place, section in enumerate(sections, 1)]
    links += [("speed", "Speed"), ("environment", "Environment"), ("cite", "How to cite")]
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en-GB">',
        '<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>\n{style}</style></head>",
        f"<body><header><h1>{escape(title)}</h1>",
        f'<p class="summary">{escape(counted([claim for _, claim in claims]))}</p>',
        "<nav><ul>",
        *(f'<li><a href="#{anchor}">{escape(text)}</a></li>' for anchor, text in links),
        "</ul></nav></header><main>",
        _figure("first", *first) if first else "",
        _all_claims(claims, sections),
        *(_section(place, section) for place, section in enumerate(sections, 1)),
        f'<section id="speed"><h2>Speed</h2>{_pairs(speed)}</section>',
        f'<section id="environment"><h2>Environment</h2>{_pairs(environment)}</section>',
        '<section id="cite"><h2>How to cite</h2><p>F. Schaipp, R. M. Gower and M. Ulbrich. A Stochastic Proximal '
        f'Polyak Step Size. <i>Transactions on Machine Learning Research</i>, 2023. <a href="{PAPER}">{PAPER}</a></p>',
        f"<pre>{escape(BIBTEX)}</pre></section>",
        "</main></body></html>",
    ]
    return "\n".join(parts) + "\n"


def _all_claims(claims: Sequence[tuple[int, ReportedClaim]], sections: Sequence[Section]) -> str:
    """One line per claim, those that do not hold first; what was measured, and by which rule, unfolds."""
    if not claims:
        return ""
    order = list(VERDICTS)
    worst_first = sorted(claims, key=lambda pair: order.index(pair[1].verdict))
    head = "".join(f"<span>{text}</span>" for text in ("Sentence of the paper", "Number", "Here", "Paper's own curves"))
    lines = [_claim(place, claim, sections[place - 1].title) for place, claim in worst_first]
    return (
        '<section id="claims"><h2>Claims</h2><p>Click on a line for what was measured, and for the rule. The last '
        "column has the same rule on the curves that the paper's authors published, where these have the numbers.</p>"
        f'<div class="claims"><div class="claim head">{head}</div>\n' + "\n".join(lines) + "</div></section>"
    )


def _claim(place: int, claim: ReportedClaim, title: str) -> str:
    number = claim.measured if not isinstance(claim.measured, str) else claim.measured.split("; ")[0]
    verdict, told = claim.published or ("", "")
    rows = {
        "Measured": claim.measured,
        "Holds in part": claim.part,
        "Quantity": claim.quantity,
        "Rule": claim.rule,
        "A stricter rule": claim.strict,
        "Paper's own curves": told,
    }
    more = "".join(f"<dt>{name}</dt><dd>{_value(text)}</dd>" for name, text in rows.items() if text != "")
    return (
        f'<details><summary class="claim"><span class="gist">{_text(claim.gist)}</span>'
        f'<span class="value">{_value(number)}</span><span data-label="Here: ">{_verdict(claim.verdict)}</span>'
        f'<span data-label="Paper: ">{_verdict(verdict) if verdict else "&ndash;"}</span></summary><dl>{more}'
        f'<dt>Experiment</dt><dd><a href="#experiment-{place}">{escape(title)}</a></dd></dl></details>'
    )


def _verdict(verdict: str) -> str:
    return f'<span class="verdict {VERDICTS[verdict]}">{verdict}</span>'


def _section(place: int, section: Section) -> str:
    parts = [f'<section id="experiment-{place}"><h2>{escape(section.title)}</h2>']
    parts += [f"<p>{_text(text)}</p>" for text in section.description.split("\n\n") if text.strip()]
    if section.claims:
        parts.append(f"<p>{escape(counted(section.claims))}</p>")
    parts += [
        _figure(f"e{place}f{number}", caption, figure) for number, (caption, figure) in enumerate(section.figures, 1)
    ]
    if section.table is not None and len(section.table):
        parts.append(_frame(section.table))
    return "\n".join([*parts, "</section>"])


def _figure(prefix: str, caption: str, figure: Figure | Picture) -> str:
    """A figure as inline SVG; its ids get a prefix, because all pictures of the page share one name space."""
    picture: Any = figure if hasattr(figure, "svg") else figures.picture(figure)
    width, height = picture.width, picture.height
    svg = re.sub(r'\bid="', f'id="{prefix}-', picture.svg)
    svg = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", svg)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    box = re.search(r'viewBox="[^"]*"', svg)
    shown = f"max-width:{width:.0f}px;min-width:{min(width, PHONE_WIDTH):.0f}px;aspect-ratio:{width:.0f}/{height:.0f}"
    head = f'<svg {box.group(0) if box else ""} role="img" aria-label="{escape(symbols(caption))}" style="{shown}">'
    svg = head + svg[svg.index(">") + 1 :]
    return f'<figure><div class="picture">{svg}</div><figcaption>{_text(caption)}</figcaption></figure>'


def _frame(frame: pd.DataFrame) -> str:
    """A DataFrame as a table, without its index; folded if it is long."""
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in frame.dtypes]
    classes = [' class="number"' if number else "" for number in numeric]
    rows = [
        [f"<td{kind}>{_value(value)}</td>" for kind, value in zip(classes, row, strict=True)]
        for row in frame.itertuples(index=False, name=None)
    ]
    table = _table("numbers", [str(column) for column in frame.columns], rows, classes)
    if len(frame) <= LONG_TABLE:
        return table
    return f"<details><summary>Numbers ({len(frame)} rows)</summary>{table}</details>"


def _pairs(rows: Mapping[str, object]) -> str:
    if not rows:
        return "<p>Not recorded.</p>"
    cells = [[f'<th scope="row">{escape(str(name))}</th><td>{_value(value)}</td>'] for name, value in rows.items()]
    return _table("pairs", (), cells)


def _table(kind: str, head: Sequence[str], rows: Iterable[Iterable[str]], classes: Sequence[str] = ()) -> str:
    """A table in a box that scrolls by itself, so that the page does not."""
    looks = classes or [""] * len(head)
    cells = "".join(f'<th scope="col"{look}>{escape(text)}</th>' for look, text in zip(looks, head, strict=True))
    top = f"<thead><tr>{cells}</tr></thead>" if head else ""
    body = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    return f'<div class="scroll" tabindex="0"><table class="{kind}">{top}<tbody>\n{body}\n</tbody></table></div>'


def _value(value: object) -> str:
    """A number in four digits, anything else as text; a missing value is a dash."""
    if isinstance(value, Integral):
        return escape(str(value))
    if isinstance(value, Real):
        return "&ndash;" if math.isnan(value) else f"{float(value):.4g}"
    return "&ndash;" if value is None or value is pd.NA else _text(str(value))


def _text(text: str) -> str:
    """Text with its markup escaped, letters for their names, and numbers such as 1e-4 kept in one piece."""
    return re.sub(r"\b\d[\d.]*e-\d+", r'<span class="whole">\g<0></span>', escape(symbols(text)))
