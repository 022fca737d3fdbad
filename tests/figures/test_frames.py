"""Averages over runs, on frames small enough to know the answer."""

import numpy as np
import pandas as pd
import pytest

from proxsps.figures import frames


def runs_of(values_by_run, status="ok"):
    rows = [
        {"run": run, "epoch": j, "val_error": value, "status": status if np.isfinite(value) else "diverged"}
        for run, values in values_by_run.items()
        for j, value in enumerate(values, 1)
    ]
    return pd.DataFrame(rows)


def test_curve_is_the_mean_over_runs():
    curve = frames.curve(runs_of({"a": [1, 2, 3], "b": [3, 4, 9]}), "val_error")
    assert curve.mean.tolist() == [2, 3, 6]
    assert np.allclose(curve.std, [np.sqrt(2), np.sqrt(2), np.sqrt(18)])
    assert list(curve.mean.index) == [1, 2, 3]
    assert not curve.diverged


def test_rolling_median_is_taken_of_the_mean():
    values = np.array([9.0, 1, 8, 2, 7, 3, 6])
    curve = frames.curve(runs_of({"a": values, "b": values + 2}), "val_error", window=5)
    assert curve.mean.isna().tolist() == [True] * 4 + [False] * 3
    assert curve.mean.iloc[4:].tolist() == [8, 4, 7]  # medians of five means, values + 1


def test_rolling_window_shrinks_to_a_short_run():
    curve = frames.curve(runs_of({"a": [3.0, 1.0, 2.0]}), "val_error", window=5)
    assert curve.mean.iloc[-1] == 2


@pytest.mark.parametrize("gone", [np.nan, np.inf])
def test_mean_ends_where_the_first_run_diverges(gone):
    curve = frames.curve(runs_of({"a": [1, 2, 3], "b": [1, 2, gone]}), "val_error")
    assert curve.mean.notna().tolist() == [True, True, False]
    assert curve.diverged


def test_rows_that_stop_count_as_divergence_of_the_mean():
    curve = frames.curve(runs_of({"a": [1, 2, 3], "b": [1, 2]}), "val_error")
    assert curve.mean.notna().tolist() == [True, True, False]


def test_one_run_has_no_deviation():
    assert frames.curve(runs_of({"a": [1, 2]}), "val_error").std.isna().all()


def test_final_median_per_run():
    runs = runs_of({"a": [100, 1, 5, 3], "b": [100, 2, 2, 8], "c": [1, 1, 1, np.nan]})
    final = frames.final_median(runs, "val_error", last=3, epochs=4)
    assert final["a"] == 3
    assert final["b"] == 2
    assert np.isnan(final["c"])


def test_final_median_of_runs_that_never_got_there():
    assert frames.final_median(runs_of({"a": [1, 2]}), "val_error", last=3, epochs=50).isna().all()


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match=r"steps lacks the columns \['zeta'\]"):
        frames.require(pd.DataFrame({"run": ["a"]}), ("run", "zeta"), "steps")


def test_empty_frame_is_named():
    with pytest.raises(ValueError, match="steps is empty"):
        frames.require(pd.DataFrame({"run": []}), ("run",), "steps")
