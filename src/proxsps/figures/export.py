"""A figure as SVG text or as a file.

Letters become paths: a reader without our fonts, or a page that blocks them, sees the same picture.
"""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

DPI = 110  # of the parts that are drawn as pixels
SUFFIXES = (".svg", ".png", ".pdf")
_UNDATED: dict[str, dict[str, None]] = {".svg": {"Date": None}, ".png": {}, ".pdf": {"CreationDate": None}}
_SVG_RC: dict[Any, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "proxsps",
}  # a fixed salt: the same data gives the same bytes


def to_svg(figure: Figure) -> str:
    """The ``<svg>`` element alone, without XML header and date, ready to stand inside an HTML page."""
    buffer = io.StringIO()
    with matplotlib.rc_context(_SVG_RC):
        figure.savefig(buffer, format="svg", dpi=DPI, metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def save(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write the figure as SVG, PNG or PDF, by the suffix; the file is complete or not there at all."""
    target = Path(path)
    if target.suffix not in SUFFIXES:
        raise ValueError(f"cannot write {target.name!r}: the suffix must be one of {', '.join(SUFFIXES)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        with matplotlib.rc_context(_SVG_RC):
            figure.savefig(partial, format=target.suffix[1:], dpi=DPI, metadata=_UNDATED[target.suffix])
        os.replace(partial, target)
    finally:
        partial.unlink(missing_ok=True)
    return target
