"""Every regulariser as a case: the object, a shape, its conjugate, and the same function written for cvxpy.

A test that takes `case` runs over all of them; the names in SELECTIONS take a part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import pytest

from proxsps.regularizers import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    NuclearNorm,
    Regularizer,
    Simplex,
    SparseGroupLasso,
    TotalVariation1D,
    Zero,
)

CENTER = np.linspace(-1, 2, 12).reshape(4, 3)
MATRIX = (4, 3)


@dataclass(frozen=True)
class Case:
    name: str
    phi: Regularizer
    # phi*(s) without the constraint on s, and by how much s breaks that constraint.
    conjugate: Callable[[np.ndarray], tuple[float, float]]
    # phi(y) and constraints, for a cvxpy variable y: shape[0] rows, the other dims in the columns.
    model: Callable[[Any], tuple[Any, list[Any]]]
    shape: tuple[int, ...] = MATRIX
    finite: bool = True

    def draw(self, seed: int, scale: float = 1.0) -> np.ndarray:
        return scale * np.random.default_rng(seed).standard_normal(self.shape)

    def objective(self, y: np.ndarray, z: np.ndarray, alpha: float) -> float:
        return float(self.phi.value(y) + np.sum((y - z) ** 2) / (2 * alpha))


def excess(x: Any, bound: float) -> float:
    return float(np.max(np.maximum(x - bound, 0.0)))


def norms(s: np.ndarray, axis: Any) -> np.ndarray:
    return np.sqrt(np.sum(s**2, axis=axis))


def thresholded(s: np.ndarray, t: float) -> np.ndarray:
    return np.maximum(np.abs(s) - t, 0.0)


def flows(s: np.ndarray) -> np.ndarray:
    """The dual variable of total variation: s = D^T w has w = -cumsum(s), whose last entry is 0."""
    return -np.cumsum(s, axis=-1)


def tv_violation(s: np.ndarray, lam: float) -> float:
    return max(excess(np.abs(flows(s)), lam), float(np.max(np.abs(np.sum(s, axis=-1)))))


CASES = [
    Case("Zero", Zero(), lambda s: (0.0, excess(np.abs(s), 0)), lambda y: (0, [])),
    Case("L2", L2(0.7), lambda s: (np.sum(s**2) / 1.4, 0.0), lambda y: (0.35 * cp.sum_squares(y), [])),
    Case(
        "L2-center",
        L2(0.7, CENTER),
        lambda s: (np.sum(s**2) / 1.4 + np.sum(s * CENTER), 0.0),
        lambda y: (0.35 * cp.sum_squares(y - CENTER), []),
    ),
    Case("L1", L1(0.6), lambda s: (0.0, excess(np.abs(s), 0.6)), lambda y: (0.6 * cp.sum(cp.abs(y)), [])),
    Case(
        "ElasticNet",
        ElasticNet(0.5, 0.3),
        lambda s: (np.sum(thresholded(s, 0.5) ** 2) / 0.6, 0.0),
        lambda y: (0.5 * cp.sum(cp.abs(y)) + 0.15 * cp.sum_squares(y), []),
    ),
    Case(
        "GroupLasso-rows",
        GroupLasso.rows(1.1),
        lambda s: (0.0, excess(norms(s, 1), 1.1)),
        lambda y: (1.1 * cp.sum(cp.norm(y, 2, axis=1)), []),
    ),
    Case(
        "GroupLasso-columns",
        GroupLasso.columns(0.6, scale_by_size=True),
        lambda s: (0.0, excess(norms(s, 0), 1.2)),
        lambda y: (1.2 * cp.sum(cp.norm(y, 2, axis=0)), []),
    ),
    Case(
        "GroupLasso-tensor",
        GroupLasso(1.3),
        lambda s: (0.0, excess(norms(s, None), 1.3)),
        lambda y: (1.3 * cp.norm(cp.vec(y, order="C"), 2), []),
    ),
    Case(
        "GroupLasso-filters",
        GroupLasso.filters(1.5),
        lambda s: (0.0, excess(norms(s, (1, 2, 3)), 1.5)),
        lambda y: (1.5 * cp.sum(cp.norm(y, 2, axis=1)), []),
        shape=(3, 2, 2, 2),
    ),
    Case(
        "SparseGroupLasso",
        SparseGroupLasso(0.3, 0.8, dims=(1,)),
        lambda s: (0.0, excess(norms(thresholded(s, 0.3), 1), 0.8)),
        lambda y: (0.3 * cp.sum(cp.abs(y)) + 0.8 * cp.sum(cp.norm(y, 2, axis=1)), []),
    ),
    Case("NonNegative", NonNegative(), lambda s: (0.0, excess(s, 0)), lambda y: (0, [y >= 0]), finite=False),
    Case(
        "Box",
        Box(-0.3, 0.8),
        lambda s: (np.sum(np.maximum(-0.3 * s, 0.8 * s)), 0.0),
        lambda y: (0, [y >= -0.3, y <= 0.8]),
        finite=False,
    ),
    Case(
        "Box-upper",
        Box(-np.inf, 0.4),
        lambda s: (0.4 * np.sum(s), excess(-s, 0)),
        lambda y: (0, [y <= 0.4]),
        finite=False,
    ),
    Case(
        "LInfBall",
        LInfBall(0.5),
        lambda s: (0.5 * np.sum(np.abs(s)), 0.0),
        lambda y: (0, [cp.abs(y) <= 0.5]),
        finite=False,
    ),
    Case(
        "L1Ball",
        L1Ball(2.0),
        lambda s: (2.0 * np.max(np.abs(s)), 0.0),
        lambda y: (0, [cp.sum(cp.abs(y)) <= 2.0]),
        finite=False,
    ),
    Case(
        "L2Ball",
        L2Ball(1.5),
        lambda s: (1.5 * norms(s, None), 0.0),
        lambda y: (0, [cp.norm(cp.vec(y, order="C"), 2) <= 1.5]),
        finite=False,
    ),
    Case(
        "Simplex",
        Simplex(1.5),
        lambda s: (1.5 * np.max(s), 0.0),
        lambda y: (0, [y >= 0, cp.sum(y) == 1.5]),
        finite=False,
    ),
    Case(
        "NuclearNorm",
        NuclearNorm(1.2),
        lambda s: (0.0, excess(np.linalg.norm(s, 2), 1.2)),
        lambda y: (1.2 * cp.normNuc(y), []),
    ),
    Case(
        "TotalVariation1D",
        TotalVariation1D(0.4),
        lambda s: (0.0, tv_violation(s, 0.4)),
        lambda y: (0.4 * cp.sum(cp.abs(y[:, 1:] - y[:, :-1])), []),
        shape=(2, 9),
    ),
]

SELECTIONS = {
    "case": CASES,
    "finite_case": [c for c in CASES if c.finite],
    "set_case": [c for c in CASES if not c.finite],
    "jvp_case": [c for c in CASES if c.name != "NuclearNorm"],
    "kinked_case": [c for c in CASES if c.name not in {"Zero", "L2", "L2-center", "NuclearNorm"}],
    "diagonal_case": [c for c in CASES if c.phi.has_diagonal_prox],
    "traceable_case": [c for c in CASES if c.phi.traceable],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in SELECTIONS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[c.name for c in cases])
