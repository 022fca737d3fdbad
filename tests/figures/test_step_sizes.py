"""Step-size panels: dots, medians, caps."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D

from proxsps.figures import step_sizes


@pytest.fixture(scope="module")
def small(path_data, step_data):
    lambdas = sorted(path_data["weight_decay"].unique())[1:3]
    keep = [frame[frame["weight_decay"].isin(lambdas) & (frame["lr"] > 1)] for frame in (step_data, path_data)]
    return (*keep, step_sizes(*keep))


def test_rows_are_alphas_and_columns_are_lambdas(small):
    _, _, figure = small
    assert len(figure.axes) == 4
    assert [axes.get_title() for axes in figure.axes] == ["λ = 10⁻⁴", "λ = 10⁻³", "", ""]
    assert [axes.get_ylabel() for axes in figure.axes] == ["α₀ = 5", "", "α₀ = 10", ""]
    assert all(axes.get_yscale() == "log" for axes in figure.axes)
    assert "zeta_k" in figure.get_supylabel()
    assert figure.get_supxlabel() == "Epoch"


def test_dots_are_rasterised_and_all_there(small):
    steps, _, figure = small
    (dots,) = figure.axes[0].collections
    own = steps[(steps["lr"] == 5) & (steps["weight_decay"] < 5e-4)]
    low, high = figure.axes[0].get_ylim()
    assert dots.get_rasterized()
    offsets = np.asarray(dots.get_offsets())
    assert np.allclose(np.sort(offsets[:, 1]), np.sort(own["zeta"].clip(low, high)))
    assert 0 < offsets[:, 0].min() < 0.02
    assert 49.98 < offsets[:, 0].max() < 50


def test_zero_lies_on_the_lower_edge(small):
    steps, _, figure = small
    assert (steps["zeta"] == 0).any()
    (dots,) = figure.axes[0].collections
    assert np.asarray(dots.get_offsets())[:, 1].min() == figure.axes[0].get_ylim()[0] > 0


def lines(axes, style):
    return [line for line in axes.lines if isinstance(line, Line2D) and line.get_drawstyle() == style]


def test_medians_of_the_epochs(small):
    _, runs, figure = small
    drawn = lines(figure.axes[0], "default")
    assert len(drawn) == 2
    for method in ("prox-sps", "sps"):
        own = runs.query(f"method == '{method}' and lr == 5.0 and seed == 0 and weight_decay < 5e-4")
        line = next(line for line in drawn if np.allclose(line.get_ydata(), own["zeta_median"]))
        assert np.allclose(line.get_xdata(), own["epoch"] - 0.5)


def test_cap_is_a_step_line(small):
    _, _, figure = small
    (cap,) = lines(figure.axes[2], "steps-post")
    assert np.allclose(cap.get_ydata()[:-1], 10 / np.sqrt(np.arange(1, 51)))
    assert (cap.get_xdata()[0], cap.get_xdata()[-1]) == (0, 50)


def test_legend_names_dots_medians_and_cap(small):
    _, _, figure = small
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == [
        r"ProxSPS $\zeta_k$",
        "ProxSPS median of the epoch",
        r"SPS $\zeta_k$",
        "SPS median of the epoch",
        r"cap $\alpha_k$",
    ]


def test_other_methods_and_other_runs_are_left_out(small):
    steps, runs, figure = small
    others = [frame.assign(method="sgd", lr=0.3, run=frame["run"] + "-sgd") for frame in (steps, runs)]
    again = step_sizes(pd.concat([steps, others[0]]), pd.concat([runs, others[1]]))
    assert [axes.get_ylabel() for axes in again.axes] == [axes.get_ylabel() for axes in figure.axes]
    assert again.axes[0].get_ylim() == figure.axes[0].get_ylim()


def test_diverged_runs_are_drawn_as_far_as_they_go(small):
    steps, runs, _ = small
    steps, runs = steps.copy(), runs.copy()
    runs.loc[(runs["method"] == "sps") & (runs["epoch"] > 10), ["zeta_median", "alpha"]] = np.nan
    steps.loc[(steps["method"] == "sps") & (steps["epoch"] > 10), "zeta"] = np.nan
    figure = step_sizes(steps, runs)
    figure.draw_without_rendering()
    finite = sorted(int(np.isfinite(line.get_ydata()).sum()) for line in lines(figure.axes[0], "default"))
    assert finite == [10, 50]
    (cap,) = lines(figure.axes[0], "steps-post")
    assert len(cap.get_xdata()) == 51  # the other method still has it


def test_bad_frames(small):
    steps, runs, _ = small
    with pytest.raises(ValueError, match=r"steps lacks the columns \['zeta'\]"):
        step_sizes(steps.drop(columns="zeta"), runs)
    with pytest.raises(ValueError, match=r"runs lacks.*zeta_median.*alpha"):
        step_sizes(steps, runs.drop(columns=["zeta_median", "alpha"]))
    with pytest.raises(ValueError, match="steps is empty"):
        step_sizes(steps.iloc[:0], runs)
    with pytest.raises(ValueError, match=r"steps \(of methods with an adaptive step, .*\) is empty"):
        step_sizes(steps.assign(method="sgd"), runs)
    with pytest.raises(ValueError, match=r"runs \(of the runs that steps holds\) is empty"):
        step_sizes(steps.assign(run="other"), runs)
