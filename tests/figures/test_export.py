"""Every figure as SVG: bounded size, no fonts needed, the same bytes each time, no global state."""

import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import matplotlib
import pandas as pd
import pytest
from matplotlib import _pylab_helpers, mathtext
from matplotlib.figure import Figure

from proxsps import figures
from proxsps.figures import export


def simple():
    figure = Figure(figsize=(2, 1))
    figure.subplots().plot([1, 2], [3, 1], "o-", label="line")
    return figure


def settings():
    return {name: matplotlib.rcParams[name] for name in matplotlib.rcParams if name != "backend"}  # reading it sets it


def test_step_sizes_of_the_whole_grid_stay_small(step_data, path_data):
    svg = figures.to_svg(figures.step_sizes(step_data, path_data))
    assert len(svg) < 1_500_000
    assert svg.count("<image") == 15
    ET.fromstring(svg)


@pytest.mark.parametrize(
    ("draw", "data", "bound"),
    [
        (lambda data: figures.stability(data, "objective"), "stability_data", 400_000),
        (lambda data: figures.per_lambda(data, "val_error", deviations=2), "sensor_data", 600_000),
        (lambda data: figures.model_compare(*data), "model_data", 400_000),
        (lambda data: figures.flow(*data), "flow_data", 1_500_000),
    ],
)
def test_figures_leave_no_trace(draw, data, bound, request):
    before = settings()
    svg = figures.to_svg(draw(request.getfixturevalue(data)))
    assert len(svg) < bound
    assert "<text" not in svg
    assert settings() == before
    assert not _pylab_helpers.Gcf.figs


def test_svg_is_one_element_without_a_date_and_the_same_each_time():
    svg = figures.to_svg(simple())
    assert svg.startswith("<svg")
    assert svg.rstrip().endswith("</svg>")
    assert "<dc:date>" not in svg
    assert svg == figures.to_svg(simple())


def test_a_picture_is_the_same_in_a_page_and_in_a_file(tmp_path, interpolation_data):
    """Drawn once: the element for the page is the content of the file, which a viewer can open."""
    figure = figures.interpolation(interpolation_data)
    picture = figures.picture(figure)
    path = picture.save(tmp_path / "new" / "figure.svg")
    text = path.read_text(encoding="utf-8")
    assert text == '<?xml version="1.0" encoding="utf-8"?>\n' + picture.svg
    assert figures.save(figure, tmp_path / "again.svg").read_text(encoding="utf-8") == text
    assert ET.parse(path).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    assert (picture.width, picture.height) == tuple(figure.get_size_inches() * 100)


def test_drawing_leaves_the_figure_as_it_was():
    figure = figures.interpolation(pd.DataFrame({"lam": [0.1, 1.0], "sigma_sq": [1.0, 2.0]}))
    before = figure.dpi, figure.canvas, figure.get_layout_engine()
    figures.to_svg(figure)
    assert (figure.dpi, figure.canvas, figure.get_layout_engine()) == before


@pytest.fixture(scope="module")
def panels(path_data):
    """Panels for each lambda, their SVG, and what was typeset for it."""
    seen, parse = [], mathtext.MathTextParser.parse
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            mathtext.MathTextParser, "parse", lambda self, s, *a, **k: seen.append(s) or parse(self, s, *a, **k)
        )
        figure = figures.per_lambda(path_data, "objective")
        return figure, figures.to_svg(figure), seen


def test_short_numbers_change_no_place_by_more_than_a_hundredth(panels, monkeypatch):
    """And no factor at all: glyphs are scaled by 0.015625."""
    figure, short, _ = panels
    monkeypatch.setattr(export, "_short", lambda svg: svg)
    long = figures.to_svg(figure)
    assert len(short) < 0.92 * len(long)
    number = re.compile(r"-?\d+\.\d+")
    ours, theirs = (number.findall(re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)) for svg in (short, long))
    assert len(ours) == len(theirs)
    assert max(abs(float(a) - float(b)) for a, b in zip(ours, theirs, strict=True)) < 0.01
    assert set(re.findall(r"scale\([^)]*\)", short)) == set(re.findall(r"scale\([^)]*\)", long))


def test_ticks_titles_and_legends_need_no_typesetting(panels):
    """Mathtext takes a hundredth of a second each: it is left to the labels of axes."""
    _, _, seen = panels
    assert len(set(seen)) <= 1, sorted(set(seen))


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_save(tmp_path, suffix):
    path = figures.save(simple(), tmp_path / "new" / f"figure.{suffix}")
    assert path.stat().st_size > 500
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_save_refuses_other_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf"):
        figures.save(simple(), tmp_path / "figure.bmp")


@pytest.mark.parametrize(("suffix", "owner", "name"), [("svg", Path, "write_bytes"), ("pdf", Figure, "savefig")])
def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch, suffix, owner, name):
    path = figures.save(simple(), tmp_path / f"figure.{suffix}")
    old = path.read_bytes()

    def fail(self, target, **_):
        with open(self if isinstance(self, Path) else target, "wb") as file:
            file.write(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(owner, name, fail)
    with pytest.raises(OSError, match="disk full"):
        figures.save(simple(), path)
    assert path.read_bytes() == old
    assert list(tmp_path.iterdir()) == [path]


def test_drawing_loads_neither_pyplot_nor_torch():
    code = """
import sys, pandas
from proxsps import figures
figures.to_svg(figures.interpolation(pandas.DataFrame({"lam": [0.1, 1.0], "sigma_sq": [1.0, 2.0]})))
sys.exit("matplotlib.pyplot" in sys.modules or "torch" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
