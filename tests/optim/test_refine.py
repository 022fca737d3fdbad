"""The search with a fixed number of rounds, as devices make it: accuracy by round, and ends."""

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from proxsps.optim.refine import refine_dual
from proxsps.regularizers import L1, Box, ElasticNet, GroupLasso, L2Ball

ONE = torch.ones((), dtype=torch.float64)
DOUBLE = 6  # rounds in double precision


def refine(h, rounds=DOUBLE):
    """The search for functions of torch tensors."""
    return refine_dual(h, ONE, rounds)


def ones(u):
    return torch.ones_like(u)


SHAPES = {
    "line": lambda u: 0.3 - u,
    "convex": lambda u: torch.exp(-5 * u) - 0.2,
    "concave": lambda u: 0.5 - u**4,
    "kink": lambda u: torch.where(u < 0.4, 1 - u, 0.6 - 20 * (u - 0.4)),
    "plateau": lambda u: torch.where(u > 0.1, -ones(u), 0.05 - 10.5 * u),
    "steep at zero": lambda u: 1e-3 - torch.sqrt(u),
    # All of its fall lies within one interval of the first round, at whose ends it is flat.
    "cliff": lambda u: 1 - 2 * ((u - 0.3) / 0.1).clamp(0, 1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_finds_the_root(name):
    h = SHAPES[name]
    root = brentq(lambda u: float(h(u * ONE)), 0, 1, xtol=1e-16)
    errors = [abs(float(refine(h, rounds).u) - root) for rounds in range(1, DOUBLE + 1)]
    assert errors[0] < 0.4  # in a bracket, from the first round on
    assert errors[2] < 0.05
    assert errors[-1] < 1e-12


@pytest.mark.parametrize("rounds", [1, 3, 6])
def test_ends_are_answers_without_a_root(rounds):
    capped = refine(lambda u: 3.0 - u, rounds)
    assert (float(capped.u), float(capped.h)) == (1.0, 2.0)
    truncated = refine(lambda u: -0.5 - u, rounds)
    assert (float(truncated.u), float(truncated.h)) == (0.0, -0.5)
    for level, end in ((0.5, 1.0), (-0.5, 0.0)):
        flat = refine(lambda u, level=level: level + 0 * u, rounds)
        assert (float(flat.u), float(flat.h)) == (end, level)


def test_roots_at_the_ends():
    assert float(refine(lambda u: 1 - u).u) == 1.0
    assert float(refine(lambda u: -u).u) == 0.0


REGULARISERS = {
    "l1": L1(0.3),
    "elastic net": ElasticNet(0.2, 0.5),
    "box": Box(-0.4, 0.6),
    "group": GroupLasso(0.8),
    "rows": GroupLasso.rows(0.5),
    "ball": L2Ball(1.5),
}


@pytest.mark.parametrize("name", REGULARISERS)
def test_model_reaches_its_bound_on_random_problems(name):
    """h at the answer is rounding after six rounds, and small after three, for roots all over [0, 1]."""
    phi, rng = REGULARISERS[name], np.random.default_rng(0)
    roots = []
    for _ in range(40):
        x, d = (torch.as_tensor(rng.standard_normal((6, 8))) for _ in range(2))
        alpha = 10 ** rng.uniform(-2, 0.5)

        def along(u, x=x, d=d, alpha=alpha):
            z = x - u * alpha * d
            y = phi.prox(z, alpha)
            return float((d * (y - x)).sum())

        falls = [along(u) for u in (0.0, 1.0)]
        gap = -(falls[0] + rng.uniform(0.02, 0.98) * (falls[1] - falls[0]))  # so that there is a root inside
        scale = falls[0] - falls[1]

        def height(u, gap=gap, along=along):
            return gap + torch.tensor([along(v) for v in u.tolist()], dtype=torch.float64)

        for rounds, limit in ((DOUBLE, 1e-10), (3, 1e-2)):
            found = refine_dual(height, ONE, rounds)
            assert 0 < float(found.u) < 1
            assert abs(gap + along(float(found.u))) <= limit * scale, (rounds, float(found.u))
        roots.append(float(found.u))
    assert min(roots) < 0.2
    assert max(roots) > 0.8


def test_nothing_is_read_back():
    with torch.device("meta"):  # tensors without numbers
        found = refine_dual(lambda u: 0.3 - u, torch.ones(()), 3)
    assert found.u.shape == ()
