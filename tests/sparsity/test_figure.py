"""Accuracy against size, drawn."""

from __future__ import annotations

import pandas as pd
import pytest

from proxsps.figures.sparsity import accuracy_against_size


def test_a_line_for_each_method_and_a_mean_over_seeds():
    rows = [
        {
            "method": method,
            "point": point,
            "seed": seed,
            "accuracy": 0.9 - 0.1 * point + 0.02 * seed,
            "size": 0.5**point,
        }
        for method in ("unit lasso", "l1")
        for point in (0, 1, 2)
        for seed in (0, 1)
    ]
    (axes,) = accuracy_against_size(pd.DataFrame(rows)).axes
    lines = [container.lines[0] for container in axes.containers]
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["unit lasso", "l1"]
    for line in lines:
        assert line.get_xdata().tolist() == [0.25, 0.5, 1.0]
        assert line.get_ydata().tolist() == pytest.approx([0.71, 0.81, 0.91])


def test_missing_columns_are_named():
    with pytest.raises(ValueError, match="accuracy missing"):
        accuracy_against_size(pd.DataFrame({"method": ["l1"], "size": [1.0]}))
