"""Figures of the theory: what is drawn where."""

import numpy as np
import pandas as pd
import pytest

from proxsps.figures import floor, rates, robustness, tightness


def check_rows(name: str, problem: str, exact: bool = False, holds: bool = True) -> pd.DataFrame:
    K = np.array([1, 10, 100])
    columns = {"check": name, "place": f"Theorem {name}", "symbol": "$E$", "problem": problem, "exact": exact}
    numbers = {"K": K, "measured": 1 / K, "half": 0.1 / K, "bound": 3 / K, "ratio": 1 / 3, "holds": holds}
    return pd.DataFrame(columns | numbers)


@pytest.fixture
def checks() -> pd.DataFrame:
    return pd.concat(
        [check_rows("a", "ridge"), check_rows("a", "wall"), check_rows("b", "ridge"), check_rows("c", "x", True)]
    )


def test_rates_has_a_panel_for_each_rate_with_bound_and_band(checks):
    figure = rates(checks.sample(frac=1, random_state=0).sort_values("check", kind="stable"))
    shown = [axes for axes in figure.axes if axes.axison]
    assert [axes.get_title() for axes in shown] == ["Theorem a", "Theorem b"]
    axes = shown[0]
    assert (axes.get_xscale(), axes.get_yscale()) == ("log", "log")
    assert len(axes.lines) == 4  # two problems, measured and bound
    assert len(axes.collections) == 2
    bound, measured = axes.lines[:2]
    assert np.allclose(bound.get_ydata(), 3 / np.array([1, 10, 100]))
    assert np.allclose(measured.get_ydata(), 1 / np.array([1, 10, 100]))
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {"ridge", "wall"}


def test_tightness_has_a_row_for_each_check(checks):
    summary = checks[checks["K"] == 1]
    figure = tightness(summary)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "b", "c"]
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert sorted(len(line.get_xdata()) for line in dots) == [1, 3]
    assert not any(line.get_marker() == "X" for line in axes.lines)
    broken = tightness(pd.concat([summary, check_rows("d", "x", holds=False)[:1]])).axes[0]
    (cross,) = [line for line in broken.lines if line.get_marker() == "X"]
    assert cross.get_ydata()[0] == 1  # the last row is the lowest


def test_floor_tells_constant_from_decreasing_steps():
    K, sigma_sq = np.array([1, 10, 100]), np.array([0.01, 0.1])
    kinds = [("sps", "constant"), ("prox-sps", "constant"), ("prox-sps", "decreasing")]
    curves = pd.concat([pd.DataFrame({"method": m, "steps": s, "K": K, "gap": 1 / K, "std": 0.1}) for m, s in kinds])
    floors = pd.concat(
        [
            pd.DataFrame({"method": m, "steps": s, "sigma_sq": sigma_sq, "limit": 4 * sigma_sq, "gap": sigma_sq**2})
            for m, s in kinds[::2]
        ]
    )
    left, right = floor(curves, floors).axes
    dashed = [line.get_linestyle() == "--" for line in left.lines]
    assert dashed == [True, True, False]
    assert np.allclose(right.lines[-1].get_ydata(), 4 * sigma_sq)
    assert "sigma^2" in right.get_xlabel()


def test_robustness_ends_a_line_that_leaves_the_panel_with_a_cross():
    alpha = np.array([0.1, 1.0, 10.0, 100.0])
    rows = {"alpha": alpha, "steps": 40}
    good = {"gap": [0.9, 0.1, 0.2, 0.3], "low": [0.8, 0.05, 0.1, 0.2], "high": [1.0, 0.2, 0.3, 0.4]}
    bad = {"gap": [0.9, 0.1, 9e9, np.inf], "low": [0.8, 0.05, 1.0, np.inf], "high": [1.0, 0.2, np.inf, np.inf]}
    methods = (("prox-sps", good), ("prox-sgd", bad))
    frame = pd.concat([pd.DataFrame({"loss": "squared loss", "method": m} | rows | v) for m, v in methods])
    (axes,) = robustness(frame).axes
    crosses = [line for line in axes.lines if line.get_marker() == "X"]
    assert [line.get_xdata()[0] for line in crosses] == [10.0]
    assert axes.get_title() == "Squared loss"
    assert "x^{40}" in axes.get_ylabel()


@pytest.mark.parametrize("draw", [rates, tightness, robustness, lambda frame: floor(frame, frame)])
def test_missing_columns_are_named(draw):
    with pytest.raises(ValueError, match="lacks the columns"):
        draw(pd.DataFrame({"x": [1.0]}))


def test_rates_without_rates_is_refused(checks):
    with pytest.raises(ValueError, match="checks of rates is empty"):
        rates(checks[checks["exact"]])
