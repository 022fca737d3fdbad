"""Panels per lambda and lambda paths: lines, medians, bands, divergence."""

import numpy as np
import pytest

from proxsps.figures import lambda_path, per_lambda


def diverging(runs, after=20):
    """The same runs, where some of SPS with alpha_0 = 10 at the largest lambda diverge."""
    runs = runs.copy()
    gone = (runs["method"] == "sps") & (runs["lr"] == 10) & (runs["weight_decay"] > 0.05)
    gone &= (runs["seed"] < 3) & (runs["epoch"] > after)
    runs.loc[gone, ["objective", "train_loss", "val_error", "model_norm"]] = np.nan
    runs.loc[gone, "status"] = "diverged"
    return runs


def panels(figure):
    return [axes for axes in figure.axes if axes.axison]


def test_one_panel_for_each_lambda(path_data):
    figure = per_lambda(path_data, "objective")
    drawn = panels(figure)
    assert [axes.get_title() for axes in drawn] == ["λ = 10⁻⁵", "λ = 10⁻⁴", "λ = 10⁻³", "λ = 10⁻²", "λ = 10⁻¹"]
    assert all(len(axes.lines) == 6 for axes in drawn)
    assert all(axes.get_yscale() == "log" for axes in drawn)
    assert [axes.get_ylabel() != "" for axes in drawn] == [True, False, False, True, False]
    assert [axes.get_xlabel() for axes in drawn] == ["", "", "Epoch", "Epoch", "Epoch"]


def test_objective_is_the_mean_over_runs(path_data):
    axes = panels(per_lambda(path_data, "objective"))[2]
    chosen = path_data[
        (path_data["method"] == "sps") & (path_data["lr"] == 5) & np.isclose(path_data["weight_decay"], 1e-3)
    ]
    expected = chosen.groupby("epoch")["objective"].mean()
    assert any(np.allclose(line.get_ydata(), expected) for line in axes.lines)


def test_validation_error_is_a_rolling_median_over_five_epochs(path_data):
    axes = panels(per_lambda(path_data, "val_error"))[0]
    chosen = path_data[(path_data["method"] == "prox-sps") & (path_data["lr"] == 10)]
    chosen = chosen[np.isclose(chosen["weight_decay"], 1e-5)]
    mean = chosen.groupby("epoch")["val_error"].mean().to_numpy()
    expected = [np.median(mean[j - 4 : j + 1]) for j in range(4, len(mean))]
    assert any(np.allclose(line.get_ydata()[4:], expected) for line in axes.lines)
    assert all(np.isnan(line.get_ydata()[:4]).all() for line in axes.lines)


def test_band_is_two_standard_deviations(sensor_data):
    figure = per_lambda(sensor_data, "model_norm", deviations=2)
    axes = panels(figure)[0]
    assert len(axes.collections) == len(axes.lines) == 7
    assert axes.get_yscale() == "linear"
    chosen = sensor_data.query("method == 'adamw' and weight_decay == 5e-5").groupby("epoch")["model_norm"]
    upper, lower = chosen.mean() + 2 * chosen.std(), chosen.mean() - 2 * chosen.std()
    extents = [band.get_paths()[0].vertices[:, 1] for band in axes.collections]
    assert any(np.isclose(y.max(), upper.max()) and np.isclose(y.min(), lower.min()) for y in extents)


def test_no_band_unless_asked_for_and_none_for_one_run(path_data, sensor_data):
    assert not panels(per_lambda(path_data, "objective"))[0].collections
    assert not panels(per_lambda(sensor_data.query("seed == 0"), "val_error", deviations=2))[0].collections


def test_band_that_reaches_zero_stays_positive_on_a_log_axis(path_data):
    wide = path_data.copy()
    wide["val_error"] *= np.exp(wide["seed"])
    axes = panels(per_lambda(wide, "val_error", deviations=2))[0]
    assert axes.get_yscale() == "log"
    for band in axes.collections:
        assert np.nanmin(band.get_paths()[0].vertices[:, 1]) > 0
    lowest = min(np.nanmin(line.get_ydata()) for line in axes.lines)
    assert 0.3 * lowest < axes.get_ylim()[0] < lowest


def test_linear_axis_is_not_flattened_by_the_first_epochs(sensor_data):
    axes = panels(per_lambda(sensor_data, "val_error", deviations=2))[0]
    assert axes.get_ylim()[1] < 0.9 < max(np.nanmax(line.get_ydata()) for line in axes.lines)


def test_diverged_runs_end_with_a_cross(path_data):
    figure = per_lambda(diverging(path_data), "objective")
    crosses = [[line for line in axes.lines if line.get_marker() == "X"] for axes in panels(figure)]
    assert [len(marks) for marks in crosses] == [0, 0, 0, 0, 1]
    assert crosses[-1][0].get_xdata()[0] == 20


def test_lambda_path_is_the_median_of_the_last_ten_epochs(path_data):
    figure = lambda_path(path_data, "val_error")
    (axes,) = figure.axes
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.lines) == len(axes.collections) == 6
    chosen = path_data.query("method == 'sps' and lr == 5.0 and epoch > 40")
    per_run = chosen.groupby(["weight_decay", "seed"])["val_error"].median().unstack()
    line = next(line for line in axes.lines if np.allclose(line.get_ydata(), per_run.mean(axis=1)))
    assert np.allclose(line.get_xdata(), per_run.index)
    upper = (per_run.mean(axis=1) + per_run.std(axis=1)).max()
    assert any(np.isclose(band.get_paths()[0].vertices[:, 1].max(), upper) for band in axes.collections)
    assert [text.get_text() for text in axes.get_xticklabels()] == ["10⁻⁵", "10⁻⁴", "10⁻³", "10⁻²", "10⁻¹"]


def test_lambda_path_of_the_norm_is_linear(path_data):
    (axes,) = lambda_path(path_data, "model_norm", last=1).axes
    assert axes.get_yscale() == "linear"
    assert "norm" in axes.get_ylabel()
    expected = path_data.query("method == 'prox-sps' and lr == 1.0 and epoch == 50")
    expected = expected.groupby("weight_decay")["model_norm"].mean()
    assert any(np.allclose(line.get_ydata(), expected) for line in axes.lines)


def test_lambda_path_leaves_out_and_marks_what_diverged(path_data):
    (axes,) = lambda_path(diverging(path_data), "val_error").axes
    (cross,) = [line for line in axes.lines if line.get_marker() == "X"]
    assert np.isclose(cross.get_xdata()[0], 0.1)
    assert sum(np.isnan(line.get_ydata()).sum() for line in axes.lines) == 1


def test_lambda_path_refuses_zero(path_data):
    with pytest.raises(ValueError, match="leave out the runs with weight_decay = 0"):
        lambda_path(path_data.assign(weight_decay=0.0), "val_error")
    unregularised = path_data.query("weight_decay < 5e-5").assign(weight_decay=0.0)
    assert panels(per_lambda(unregularised, "val_error"))[0].get_title() == "λ = 0"


def test_bad_frames(path_data, stability_data):
    for draw in (per_lambda, lambda_path):
        with pytest.raises(ValueError, match="one schedule at a time"):
            draw(stability_data, "val_error")
        with pytest.raises(ValueError, match="weight_decay"):
            draw(path_data.drop(columns="weight_decay"), "val_error")
        with pytest.raises(ValueError, match="empty"):
            draw(path_data.iloc[:0], "val_error")
        with pytest.raises(ValueError, match="unknown metric"):
            draw(path_data, "zeta")
