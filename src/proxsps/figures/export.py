"""A figure as SVG text or as a file.

Letters become paths: a reader without our fonts, or a page that blocks them, sees the same picture.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from proxsps._files import replace_file, replacing

DPI = 110  # of the parts that are drawn as pixels
SUFFIXES = (".svg", ".png", ".pdf")
_UNDATED: dict[str, dict[str, None]] = {".png": {}, ".pdf": {"CreationDate": None}}
_SVG_RC: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "proxsps",
}  # a fixed salt: the same data gives the same bytes


_LONG = re.compile(r"scale\([^)]*\)|(\.\d\d)\d+")  # numbers of many digits, unless they are factors


@dataclass(frozen=True)
class Picture:
    """A figure that was drawn: its ``<svg>`` element, and its width and height in pixels of a page."""

    svg: str
    width: float
    height: float

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write an SVG file."""
        target = Path(path)
        replace_file(target, f'<?xml version="1.0" encoding="utf-8"?>\n{self.svg}'.encode())
        return target


def picture(figure: Figure) -> Picture:
    """Draw a figure, once for a page and for a file."""
    width, height = figure.get_size_inches() * 100
    return Picture(to_svg(figure), float(width), float(height))


def to_svg(figure: Figure) -> str:
    """The ``<svg>`` element alone, without XML header and date, for use inside an HTML page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_SVG_RC), _laid_out(figure) as canvas:
        canvas.print_svg(buffer, metadata={"Date": None, "Creator": None})  # type: ignore[no-untyped-call]
    text = buffer.getvalue()
    return _short(text[text.index("<svg") :])


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write the figure as SVG, PNG or PDF, by the suffix; the file is complete or not there at all."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(f"cannot write {target.name!r}: the suffix must be one of {', '.join(SUFFIXES)}")
    if target.suffix == ".svg":
        return picture(figure).save(target)
    with replacing(target) as partial:
        figure.savefig(partial, format=target.suffix[1:], dpi=DPI, metadata=_UNDATED[target.suffix])
    return target


@contextmanager
def _laid_out(figure: Figure) -> Iterator[FigureCanvasSVG]:
    """A canvas for a figure whose layout is found; `savefig` would draw the whole figure twice for that."""
    canvas, dpi, engine = figure.canvas, figure.dpi, figure.get_layout_engine()
    drawing = FigureCanvasSVG(figure)  # becomes the figure's canvas: texts are measured by the renderer that draws them
    try:
        figure.dpi = 72  # in which SVG counts
        if engine is not None:
            engine.execute(figure)
            figure.set_layout_engine("none")
        figure.dpi = DPI
        yield drawing
    finally:
        figure.set_layout_engine(engine)
        figure.dpi = dpi
        figure.set_canvas(canvas)


def _short(svg: str) -> str:
    """The same picture in fewer bytes: no comments, and positions to a hundredth of a point."""
    svg = re.sub(r"\n *<!--.*?-->", "", svg, flags=re.DOTALL)
    return _LONG.sub(lambda found: found[1] or found[0], svg)
