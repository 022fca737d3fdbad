"""Illustrations: curves, marked points and vector fields."""

import numpy as np
import pandas as pd
import pytest

from proxsps.figures import flow, interpolation, model_compare


def test_interpolation(interpolation_data):
    (axes,) = interpolation(interpolation_data.sample(frac=1, random_state=0)).axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert np.array_equal(axes.lines[0].get_xdata(), interpolation_data["lam"])
    assert np.array_equal(axes.lines[0].get_ydata(), interpolation_data["sigma_sq"])
    assert "sigma^2" in axes.get_ylabel()


def test_model_compare_draws_five_curves_and_four_points_for_each_start(model_data):
    models, points = model_data
    figure = model_compare(models, points)
    assert [axes.get_title() for axes in figure.axes] == ["$x^0 = -4$", "$x^0 = -1$", "$x^0 = 0$"]
    for axes, (_, row) in zip(figure.axes, points.iterrows(), strict=True):
        marks = {line.get_marker(): line for line in axes.lines if len(line.get_xdata()) == 1}
        assert len(axes.lines) == 9
        assert {marker: mark.get_xdata()[0] for marker, mark in marks.items()} == {
            "o": row["x0"],
            "D": row["x_prox_sps"],
            "s": row["x_sps"],
            "*": row["x_star"],
        }
        own = models[models["x0"] == row["x0"]]
        assert np.isclose(marks["D"].get_ydata()[0], own["prox_sps_proximal"].min())
        assert np.isclose(marks["s"].get_ydata()[0], own["sps_proximal"].min())
        assert np.isclose(marks["*"].get_ydata()[0], own["objective"].min())


def test_model_compare_refuses_points_it_cannot_place(model_data):
    models, points = model_data
    with pytest.raises(ValueError, match="outside the drawn range"):
        model_compare(models, points.assign(x_sps=99.0))
    with pytest.raises(ValueError, match="no row for x0 = -1"):
        model_compare(models, points[points["x0"] != -1])


def test_flow_has_a_panel_for_each_method_and_a_circle_at_the_minimum(flow_data):
    field, minimum = flow_data
    figure = flow(field.sample(frac=1, random_state=0), minimum)
    assert [axes.get_title() for axes in figure.axes] == ["ProxSPS", "SPS"]
    for axes in figure.axes:
        assert axes.get_xlim() == axes.get_ylim() == (-3, 3)
        assert len(axes.collections) >= 1
        circle = axes.lines[-1]
        assert circle.get_marker() == "o"
        assert np.allclose((circle.get_xdata()[0], circle.get_ydata()[0]), minimum.iloc[0])


def test_flow_refuses_a_grid_with_holes(flow_data):
    field, minimum = flow_data
    with pytest.raises(ValueError, match="'prox-sps' is not a full grid"):
        flow(field.iloc[1:], minimum)


@pytest.mark.parametrize("draw", [interpolation, lambda frame: model_compare(frame, frame), lambda f: flow(f, f)])
def test_missing_columns_and_empty_frames(draw):
    with pytest.raises(ValueError, match="lacks the columns"):
        draw(pd.DataFrame({"x": [1.0]}))


def test_empty_interpolation(interpolation_data):
    with pytest.raises(ValueError, match="interpolation is empty"):
        interpolation(interpolation_data.iloc[:0])
