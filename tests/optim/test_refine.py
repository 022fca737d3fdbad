"""The search with a fixed number of rounds, as devices make it: accuracy by round, ends, roots of any size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq

from proxsps.optim.device.refine import POINTS, refine_dual
from proxsps.regularizers import L1, Box, ElasticNet, GroupLasso, L2Ball

ONE = torch.ones((), dtype=torch.float64)
DOUBLE = 7  # rounds in double precision

SHAPES = {
    "line": lambda u: 0.3 - u,
    "convex": lambda u: torch.exp(-5 * u) - 0.2,
    "concave": lambda u: 0.5 - u**4,
    "kink": lambda u: torch.where(u < 0.4, 1 - u, 0.6 - 20 * (u - 0.4)),
    "plateau": lambda u: torch.where(u > 0.1, -torch.ones_like(u), 0.05 - 10.5 * u),
    "steep at zero": lambda u: 1e-3 - torch.sqrt(u),
    # All of its fall lies within one interval of the first round, at whose ends it is flat.
    "cliff": lambda u: 1 - 2 * ((u - 0.3) / 0.1).clamp(0, 1),
    "wave": lambda u: 0.3 - u - 0.1 * torch.sin(9 * u),
}


@pytest.mark.parametrize("name", SHAPES)
def test_finds_the_root(name):
    h = SHAPES[name]
    root = brentq(lambda u: float(h(u * ONE)), 0, 1, xtol=1e-16)
    errors = [abs(float(refine_dual(h, ONE, rounds).u) - root) for rounds in range(1, DOUBLE + 1)]
    assert errors[0] < 0.4  # in a bracket, from the first round on
    assert errors[3] < (0.05 if name == "cliff" else 1e-5)
    assert errors[-1] < 1e-12


@pytest.mark.parametrize("size", [1e-3, 1e-6, 1e-9, 1e-12, 1e-15, 1e-20, 1e-30])
def test_tiny_roots(size):
    """A slope of 1/size, with which h passes through zero at once and is huge at all points of the first round."""
    line = refine_dual(lambda u: 1 - u / size, ONE, 4)
    assert float(line.u) == pytest.approx(size, rel=1e-6)
    # Flat until `size`, then steeper and steeper: what L1 does with parameters that are 0.
    late = refine_dual(lambda u: 1e-3 - (u / size - 1).clamp(min=0) - (u / size - 2).clamp(min=0) * 5, ONE, 5)
    assert float(late.u) == pytest.approx(1.001 * size, rel=1e-2 if size > 1e-16 else 1)


def test_more_points_of_the_first_round_spare_rounds():
    for name in ("convex", "concave", "wave"):
        h = SHAPES[name]
        root = brentq(lambda u, h=h: float(h(u * ONE)), 0, 1, xtol=1e-16)
        found = refine_dual(h, ONE, 2, 256)
        assert abs(float(found.u) - root) < 1e-7
        assert found.evaluations == 256 + POINTS + 2


@pytest.mark.parametrize("rounds", [1, 3, 7])
def test_ends_are_answers_without_a_root(rounds):
    capped = refine_dual(lambda u: 3.0 - u, ONE, rounds)
    assert (float(capped.u), float(capped.h)) == (1.0, 2.0)
    assert float(capped.root) == pytest.approx(3.0, rel=1e-12)  # beyond the cap
    truncated = refine_dual(lambda u: -0.5 - u, ONE, rounds)
    assert (float(truncated.u), float(truncated.h)) == (0.0, -0.5)
    for level, end in ((0.5, 1.0), (-0.5, 0.0)):
        flat = refine_dual(lambda u, level=level: level + 0 * u, ONE, rounds)
        assert (float(flat.u), float(flat.h)) == (end, level)


def test_roots_at_the_ends():
    assert float(refine_dual(lambda u: 1 - u, ONE, DOUBLE).u) == 1.0
    assert float(refine_dual(lambda u: -u, ONE, DOUBLE).u) == 0.0


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
    """h at the answer is rounding after seven rounds, and small after three, for roots all over [0, 1]."""
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

        def heights(u, gap=gap, along=along):
            return gap + torch.tensor([along(v) for v in u.tolist()], dtype=torch.float64)

        for rounds, limit in ((DOUBLE, 1e-10), (4, 1e-4), (3, 1e-2)):
            found = refine_dual(heights, ONE, rounds)
            assert 0 < float(found.u) < 1
            assert abs(heights(found.u[None])) <= limit * scale, (rounds, float(found.u))
        roots.append(float(found.u))
    assert min(roots) < 0.2
    assert max(roots) > 0.8


def test_nothing_is_read_back():
    with torch.device("meta"):  # tensors without numbers
        found = refine_dual(lambda u: 0.3 - u, torch.ones(()), 3)
    assert found.u.shape == ()
