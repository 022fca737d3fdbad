"""Stability panels: lines, gap, divergence, labels."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from proxsps.figures import frames, lambda_path, per_lambda, stability, style
from proxsps.methods import METHODS, OWN_TABLE, SPARE_COLOURS


def crosses(axes):
    return [line for line in axes.lines if line.get_marker() == "X"]


def curves(axes):
    return [line for line in axes.lines if line.get_marker() != "X"]


def test_two_panels_with_a_line_for_each_method_and_alpha(stability_data):
    figure = stability(stability_data, "objective")
    left, right = figure.axes
    assert len(curves(left)) == len(curves(right)) == 15
    assert left.get_title().startswith("constant")
    assert right.get_title().startswith("sqrt")
    assert left.get_yscale() == right.get_yscale() == "log"
    assert left.get_ylabel().startswith("Objective gap")
    assert left.get_xlabel() == right.get_xlabel() == "Epoch"


def test_gap_to_the_best_value_of_all(stability_data):
    figure = stability(stability_data, "objective")
    best = stability_data["objective"].min()
    chosen = stability_data.query("method == 'prox-sps' and schedule == 'sqrt' and lr == 2.0")
    expected = chosen.groupby("epoch")["objective"].mean() - best
    assert any(np.allclose(line.get_ydata(), expected, rtol=1e-12) for line in curves(figure.axes[1]))


def test_validation_error_is_drawn_as_it_is(stability_data):
    figure = stability(stability_data, "val_error")
    chosen = stability_data.query("method == 'sps' and schedule == 'constant' and lr == 0.5")
    expected = chosen.groupby("epoch")["val_error"].mean()
    assert any(np.allclose(line.get_ydata(), expected) for line in curves(figure.axes[0]))
    assert figure.axes[0].get_ylabel() == "Validation error"


def test_divergence_is_marked_and_does_not_set_the_limits(stability_data):
    figure = stability(stability_data, "objective")
    left, right = figure.axes
    (at_once,), (later,) = crosses(left), crosses(right)
    top = left.get_ylim()[1]
    assert (at_once.get_xdata()[0], at_once.get_ydata()[0]) == (1, top)
    assert later.get_ydata()[0] == top  # the values left the panel before the run ended
    assert top < 10
    assert "diverged" in [text.get_text() for text in figure.legends[0].get_texts()]


def test_a_cross_inside_the_panel_sits_on_the_last_value(stability_data):
    runs = stability_data.query("method == 'sps'").copy()
    gone = (runs["lr"] == 2.0) & (runs["schedule"] == "constant") & (runs["seed"] == 3) & (runs["epoch"] >= 30)
    runs.loc[gone, ["objective", "val_error"]] = np.nan
    runs.loc[gone, "status"] = "diverged"
    (cross,) = crosses(stability(runs, "val_error").axes[0])
    last = runs.query("lr == 2.0 and schedule == 'constant' and epoch == 29")["val_error"].mean()
    assert cross.get_xdata()[0] == 29
    assert np.isclose(cross.get_ydata()[0], last)


def test_no_cross_without_divergence(stability_data):
    figure = stability(stability_data.query("method != 'sgd'"), "objective")
    assert not crosses(figure.axes[0])
    assert "diverged" not in [text.get_text() for text in figure.legends[0].get_texts()]


def test_every_run_diverged(stability_data):
    figure = stability(stability_data.query("method == 'sgd' and lr == 0.7 and schedule == 'constant'"), "val_error")
    assert len(figure.axes) == 1
    assert len(crosses(figure.axes[0])) == 1
    figure.draw_without_rendering()


def test_best_point_of_a_single_run_has_no_logarithm(stability_data):
    figure = stability(stability_data.query("seed == 0 and method == 'prox-sps'"), "objective")
    values = np.concatenate([line.get_ydata() for axes in figure.axes for line in curves(axes)])
    assert np.isnan(values).sum() == 1
    assert np.nanmin(values) > 0


def test_shades_run_from_light_to_dark():
    shades = style.shades("prox-sps", [2.0, 0.5, 1.0])
    brightness = [sum(shades[lr]) for lr in (0.5, 1.0, 2.0)]
    assert brightness == sorted(brightness, reverse=True)
    assert style.shades("sgd", [0.1]) == {0.1: to_rgb(style.METHODS["sgd"].colour)}


@pytest.mark.parametrize("missing", ["objective", "lr", "status"])
def test_missing_column(stability_data, missing):
    with pytest.raises(ValueError, match=missing):
        stability(stability_data.drop(columns=missing), "objective")


def test_empty_frame(stability_data):
    with pytest.raises(ValueError, match="runs is empty"):
        stability(stability_data.iloc[:0], "objective")


def test_bad_arguments(stability_data, path_data):
    with pytest.raises(ValueError, match=r"unknown metric 'accuracy'.*val_error"):
        stability(stability_data, "accuracy")
    with pytest.raises(ValueError, match="one weight_decay at a time"):
        stability(path_data, "objective")
    with pytest.raises(ValueError, match="schedules"):
        stability(stability_data.assign(schedule="linear"), "objective")


def test_metrics_have_labels():
    assert set(frames.METRICS) == set(style.METRIC_LABELS)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ((0.98, 2.3), ["1.2", "1.5", "1.8", "2.1"]),
        ((0.09, 0.24), ["0.1", "0.15", "0.2"]),
        ((0.09, 0.6), ["0.1", "0.2", "0.3", "0.5"]),
        ((0.009, 0.4), ["0.01", "0.03", "0.1", "0.3"]),
        ((9e-5, 4e-3), ["10⁻⁴", "3\u00d710⁻⁴", "10⁻³", "3\u00d710⁻³"]),
        ((9e-5, 2.0), ["10⁻⁴", "10⁻³", "10⁻²", "10⁻¹", "10⁰"]),
    ],
)
def test_every_tick_of_a_log_axis_is_labelled(limits, words):
    axes = Figure().subplots()
    axes.set(yscale="log", ylim=limits)
    style.log_ticks(axes)
    labels = [
        label.get_text()
        for label in axes.get_yticklabels(which="both")
        if limits[0] <= label.get_position()[1] <= limits[1]
    ]
    assert labels == words


@pytest.mark.parametrize(
    ("value", "power", "text"),
    [
        (0.5, False, "0.5"),
        (1.625, False, "1.625"),
        (10.0, False, "10"),
        (1e-3, True, "10^{-3}"),
        (0.1, True, "10^{-1}"),
        (5e-5, True, r"5 \times 10^{-5}"),
        (0, True, "0"),
    ],
)
def test_numbers(value, power, text):
    assert style.number(value, power) == text


@pytest.mark.parametrize("draw", [stability, per_lambda, lambda_path])
def test_curves_that_coincide_are_both_seen(stability_data, draw):
    """ProxSPS and SPS with the same values: pixels of both colours, many of them, where there is one curve."""
    own = stability_data[(stability_data["method"] == "prox-sps") & (stability_data["schedule"] == "sqrt")]
    own = own[own["lr"] == own["lr"].max()]
    if draw is lambda_path:  # over two strengths
        own = pd.concat([own, own.assign(weight_decay=0.01, run=own["run"] + "-strong")])
    runs = pd.concat([own, own.assign(method="sps", run=own["run"] + "-sps")], ignore_index=True)
    figure = draw(runs, "val_error")
    for legend in figure.legends:
        legend.remove()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].reshape(-1, 3).astype(float)
    for name in ("prox-sps", "sps"):
        colour = 255 * np.array(to_rgb(style.method(name).colour))
        assert (np.abs(pixels - colour).max(axis=1) < 12).sum() > 250, name


def test_no_two_methods_of_the_table_look_the_same():
    """Dashes do not count: legends and single points do not show them."""
    looks = [(entry.colour, entry.marker) for entry in METHODS.values() if entry.name in OWN_TABLE]
    assert len(set(looks)) == len(looks) == len(OWN_TABLE)


def test_a_method_without_an_entry_has_looks_of_its_own(stability_data, table):
    frame = pd.concat([stability_data, *(stability_data.assign(method=name) for name in ("momo", "alig"))])
    figure = stability(frame, "objective")
    labels = [text.get_text() for text in figure.legends[0].get_texts()]
    assert {"momo", "alig"} <= set(labels)
    for name in ("momo", "alig"):
        others = [look for look in table.values() if look.name != name]
        assert style.method(name).colour not in {look.colour for look in others}


def test_colours_run_out_with_an_error_that_says_what_to_do(table):
    for i in range(len(SPARE_COLOURS)):
        style.method(f"own-{i}")
    with pytest.raises(ValueError, match=r"no spare colour for the method 'own-8'.*colour='#1133AA'"):
        style.method("own-8")


@pytest.mark.parametrize("epochs", [1, 2, 3, 7])
def test_epochs_are_whole(stability_data, epochs):
    short = stability_data[stability_data["epoch"] <= epochs]
    sqrt = short[short["schedule"] == "sqrt"]
    for figure in (stability(short, "objective"), per_lambda(sqrt, "objective")):
        for axes in figure.axes:
            if axes.lines:
                ticks = axes.get_xticks()
                assert np.allclose(ticks, np.round(ticks))


def test_labels_have_all_digits_of_a_step_size():
    assert style.alpha_label(0.26875) == "α₀ = 0.26875"
    assert style.alpha_label(0.4125) == "α₀ = 0.4125"
    assert style.alpha_label(10.0) == "α₀ = 10"
