"""The picture of the first page: final values over alpha_0 and over lambda."""

import numpy as np
import pytest

from proxsps.figures import overview


def lines(axes):
    return {line.get_label(): line for line in axes.lines if line.get_marker() != "X"}


def test_final_gap_over_alpha_and_final_error_over_lambda(stability_data, path_data):
    left, right = overview(stability_data, path_data, last=5).axes
    assert set(lines(left)) == {"ProxSPS", "SPS", "SGD"}
    constant = stability_data.query("schedule == 'constant'")
    chosen = constant.query("method == 'sps' and lr == 2.0 and epoch > 45")
    expected = chosen.groupby("run")["objective"].median().mean() - constant["objective"].min()
    assert lines(left)["SPS"].get_ydata()[-1] == pytest.approx(expected, rel=1e-12)

    largest = path_data["lr"].max()
    last = path_data["epoch"].max() - 5
    chosen = path_data[(path_data["method"] == "prox-sps") & (path_data["lr"] == largest) & (path_data["epoch"] > last)]
    medians = chosen.groupby(["weight_decay", "run"])["val_error"].median()
    assert np.allclose(lines(right)["ProxSPS"].get_ydata(), medians.groupby("weight_decay").mean())


def test_a_point_with_a_diverged_run_is_a_cross(stability_data, path_data):
    left, _ = overview(stability_data, path_data).axes
    assert [line.get_xdata()[0] for line in left.lines if line.get_marker() == "X"] == [0.7]
    assert np.isnan(lines(left)["SGD"].get_ydata()[-1])


def test_runs_without_constant_steps_cannot_be_drawn(stability_data, path_data):
    with pytest.raises(ValueError, match="constant steps is empty"):
        overview(stability_data.query("schedule == 'sqrt'"), path_data)
