"""Every figure as SVG: bounded size, no fonts needed, the same bytes each time, no global state."""

import subprocess
import sys
import xml.etree.ElementTree as ET

import matplotlib
import pytest
from matplotlib import _pylab_helpers
from matplotlib.figure import Figure

from proxsps import figures


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


@pytest.mark.parametrize("suffix", ["svg", "png", "pdf"])
def test_save(tmp_path, suffix):
    path = figures.save(simple(), tmp_path / "new" / f"figure.{suffix}")
    assert path.stat().st_size > 500
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_save_refuses_other_suffixes(tmp_path):
    with pytest.raises(ValueError, match=r"\.svg, \.png, \.pdf"):
        figures.save(simple(), tmp_path / "figure.bmp")


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    path = figures.save(simple(), tmp_path / "figure.svg")
    old = path.read_bytes()

    def fail(self, target, **_):
        target.write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(Figure, "savefig", fail)
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
