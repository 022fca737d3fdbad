"""The paper's formulas for the model's value after a step, and what is assumed of the gradient noise."""

import numpy as np
import pytest

from proxsps.core.models import linear_model, truncated_model
from proxsps.core.step import l2_line, line_dual, prox_coefficients
from proxsps.experiments.theory.runs import prox_sps
from proxsps.experiments.theory.steps import visited
from proxsps.problems.composite import PROBLEMS, ridge

BRANCHES = {"truncated at once": 0.0, "inside": 0.5, "capped": 50.0}  # value of the loss at x, above its bound


@pytest.mark.parametrize("gap", BRANCHES.values(), ids=BRANCHES)
@pytest.mark.parametrize("lam", [0.0, 0.8])
def test_value_of_the_model_after_an_l2_step(gap, lam):
    """psi_k(x+) = f - (alpha lam <g, x> + tau ||g||^2) / (1 + alpha lam) + phi(x+), with tau not cut off at 0."""
    rng = np.random.default_rng(0)
    x, g, alpha, C = rng.normal(size=4), rng.normal(size=4), 0.7, -0.3
    x = x * np.sign(g @ x)  # <g, x> > 0, so that shrinkage alone can reach the bound
    f = C + gap
    root, u = line_dual(l2_line(np.array(gap), *(np.array([v]) for v in (g @ g, g @ x, alpha, lam))))
    keep, move, _ = prox_coefficients(u, alpha, lam)
    new = keep * x + move * g
    tau = alpha * min(float(root), 1.0)
    expected = f - (alpha * lam * (g @ x) + tau * (g @ g)) / (1 + alpha * lam)
    assert float(truncated_model(f, g, C, x, new)) == pytest.approx(expected, abs=1e-12)
    branch = "capped" if u == 1 else "inside" if u > 0 else "truncated at once"
    assert branch == next(name for name, value in BRANCHES.items() if value == gap)
    if lam == 0:  # the unregularised lemma
        assert expected == pytest.approx(max(C, f - alpha * (g @ g)), abs=1e-12)


@pytest.mark.parametrize("name", PROBLEMS)
def test_model_is_never_below_its_linear_part(name):
    problem = PROBLEMS[name]()
    x = visited(problem, 0.5)[1:12]
    i = np.arange(len(x)) % problem.size
    value, g = problem.sample(x, i)
    seen = set()
    for alpha in (0.1, 10.0):
        new, _ = prox_sps(problem)(x, i, np.full(len(x), alpha))
        for row in zip(value, g, x, new, strict=True):
            f, slope, point, target = row
            model, linear = truncated_model(f, slope, 0.0, point, target), linear_model(f, slope, point, target)
            assert model >= linear - 1e-15
            seen.add(bool(model > linear + 1e-9))
    assert False in seen  # equality, up to where the model is truncated


def test_bounded_noise_bounds_the_second_moment():
    problem = ridge()
    x = visited(problem, 0.5)
    second = (problem.gradients(x) ** 2).sum(-1).mean(-1)
    mean = (problem.gradient(x) ** 2).sum(-1)
    np.testing.assert_allclose(second, mean + problem.noise(x), rtol=1e-12)
    assert (second <= mean + problem.constants.beta).all()
