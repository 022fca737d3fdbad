"""Small problems psi = f + phi for which every constant of the theorems is known.

f is the mean of f_i(x) = loss(<a_i, x>; b_i) over N samples, phi a regulariser that acts on each entry separately.
Points are rows: x may carry leading axes for many runs.

The gradient noise of the squared loss grows with x; the theorems need a bound only where iterates can be. That is the
domain of phi where it is a box, and a ball where phi is strongly convex: the paper's basic inequality at the origin
gives (1 + 2 alpha lam) ||x+||^2 <= ||x||^2 + 2 alpha (f_i(0) - C_i), so that ProxSPS with convex losses never leaves
the ball ||x||^2 <= max{||x^0||^2, max_i (f_i(0) - C_i) / lam}, for all steps and samples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from proxsps.problems.losses import Absolute, Cauchy, Floats, Logistic, Loss, Phase, Squared
from proxsps.regularizers import L1, L2, Box, Regularizer


@dataclass(frozen=True)
class Constants:
    """The constants of the theorems; infinity where there is no bound."""

    L: float  # smoothness of f
    L_max: float  # of the samples
    mu: float  # strong convexity of f
    lam: float  # strong convexity of phi
    rho: float  # weak convexity, mean over the samples
    beta: float  # gradient noise where iterates can be
    G: float  # root mean square of the samples' slopes there
    radius: float  # iterates and domain lie in this ball around the origin


@dataclass(frozen=True, eq=False)
class Composite:
    """A composite problem.

    Args:
        name: its name in tables.
        A: rows a_i, (N, n).
        b: targets, (N,).
        loss: the loss of <a_i, x>.
        phi: the regulariser; it acts per entry, and is 0 at the origin.
        start: x^0, (n,), in the domain of phi.
        planted: the solution if it is known beforehand.
        lower_bound: C, not above inf f_i = 0.
    """

    name: str
    A: Floats = field(repr=False)
    b: Floats = field(repr=False)
    loss: Loss
    phi: Regularizer
    start: Floats
    planted: Floats | None = field(default=None, repr=False)
    lower_bound: float = 0.0

    def __post_init__(self) -> None:
        at_origin = float(self.phi.value(np.zeros(self.A.shape[1])))
        if at_origin != 0:
            raise ValueError(f"{self.name}: needs a regulariser that is 0 at the origin, got phi(0) = {at_origin:g}.")
        if self.lower_bound > 0:
            raise ValueError(
                f"{self.name}: the losses reach 0; lower_bound must not be above, got {self.lower_bound:g}."
            )

    @property
    def size(self) -> int:
        """N, the number of samples."""
        return len(self.b)

    def losses(self, x: Floats) -> Floats:
        """All f_i(x): (..., n) to (..., N)."""
        return self.loss.value(x @ self.A.T, self.b)

    def gradients(self, x: Floats) -> Floats:
        """All (sub)gradients of f_i at x: (..., n) to (..., N, n)."""
        return self.loss.slope(x @ self.A.T, self.b)[..., None] * self.A

    def sample(self, x: Floats, i: np.ndarray) -> tuple[Floats, Floats]:
        """f_i(x) and its gradient, one sample per row: x (rows, n), i (rows,)."""
        a, b = self.A[i], self.b[i]
        t = (a * x).sum(-1)
        return self.loss.value(t, b), self.loss.slope(t, b)[:, None] * a

    def value(self, x: Floats) -> Floats:
        """f(x): (..., n) to (...)."""
        found: Floats = self.losses(x).mean(-1)
        return found

    def gradient(self, x: Floats) -> Floats:
        """A (sub)gradient of f: (..., n) to (..., n)."""
        return self.loss.slope(x @ self.A.T, self.b) @ self.A / self.size

    def penalty(self, x: Floats) -> Floats:
        """phi(x): (..., n) to (...)."""
        if isinstance(self.phi, L2):  # not row by row: runs need it at every point
            found: Floats = self.phi.lam / 2 * (x * x).sum(-1)
            return found
        rows = x.reshape(-1, x.shape[-1])
        return np.array([float(self.phi.value(row)) for row in rows]).reshape(x.shape[:-1])

    def objective(self, x: Floats) -> Floats:
        """psi(x): (..., n) to (...)."""
        return self.value(x) + self.penalty(x)

    @cached_property
    def constants(self) -> Constants:
        """The constants, computed."""
        squares = (self.A**2).sum(1)
        spectrum = np.linalg.eigvalsh(self.A.T @ self.A / self.size)
        radius, _ = self._region()
        bounded = float((self.slopes**2).mean())
        return Constants(
            L=self.loss.smooth * float(spectrum[-1]),
            L_max=self.loss.smooth * float(squares.max()),
            mu=self.loss.strong * max(float(spectrum[0]), 0.0),
            lam=self.phi.strong_convexity,
            rho=self.loss.weak * float(squares.mean()),
            beta=min(bounded, self._quadratic_noise(radius)) if math.isfinite(self.loss.smooth) else math.inf,
            G=math.sqrt(bounded),
            radius=radius,
        )

    @property
    def slopes(self) -> Floats:
        """G_i: the largest norm of a (sub)gradient of f_i where iterates can be, (N,)."""
        found: Floats = self.loss.steepest(self._region()[1], self.b) * np.sqrt((self.A**2).sum(1))
        return found

    def _region(self) -> tuple[float, Floats]:
        """A ball that iterates do not leave, and the largest |<a_i, x>| where they can be."""
        if isinstance(self.phi, Box) and math.isfinite(self.phi.upper - self.phi.lower):
            corners = np.stack([self.A * self.phi.lower, self.A * self.phi.upper])
            reach = np.maximum(np.abs(corners.max(0).sum(1)), np.abs(corners.min(0).sum(1)))
            return max(abs(self.phi.lower), abs(self.phi.upper)) * math.sqrt(self.A.shape[1]), reach
        radius = math.inf
        if self.phi.strong_convexity > 0 and self.loss.weak == 0:
            origin = self.losses(np.zeros(self.A.shape[1])).max() - self.lower_bound
            radius = math.sqrt(max(float(self.start @ self.start), float(origin) / self.phi.strong_convexity))
        return radius, radius * np.sqrt((self.A**2).sum(1))

    def _quadratic_noise(self, radius: float) -> float:
        """Noise of the squared loss in a ball: the i-th gradient is H_i x - c_i; by the triangle inequality."""
        if not isinstance(self.loss, Squared):
            return math.inf
        outer = self.A[:, :, None] * self.A[:, None, :]
        spread = outer - outer.mean(0)
        growth = float(np.linalg.eigvalsh(np.einsum("kij,kjl->il", spread, spread) / self.size)[-1])
        linear = self.A * self.b[:, None]
        origin = float(((linear - linear.mean(0)) ** 2).sum(1).mean())
        if growth <= 1e-14 * float((outer**2).sum() / self.size):  # equal rows: the noise is the same everywhere
            return origin
        return (math.sqrt(growth) * radius + math.sqrt(origin)) ** 2

    def noise(self, x: Floats) -> Floats:
        """E ||grad f_i(x) - grad f(x)||^2: (..., n) to (...)."""
        g = self.gradients(x)
        found: Floats = ((g - g.mean(-2, keepdims=True)) ** 2).sum(-1).mean(-1)
        return found

    @cached_property
    def solution(self) -> Floats:
        """A minimiser of psi: the only one in convex problems, else the best of many local ones."""
        if self.planted is not None:
            return self.planted
        if isinstance(self.loss, Absolute):
            return self._robust_solution()
        if self.loss.weak == 0:
            return accelerated(self.gradient, self.phi.prox, self.constants.L, self.start)
        span = np.linspace(-3, 3, 13)
        starts = np.stack(np.meshgrid(*[span] * self.A.shape[1]), -1).reshape(-1, self.A.shape[1])
        ends = accelerated(self.gradient, self.phi.prox, self.constants.L, starts)
        found: Floats = ends[np.argmin(self.objective(ends))]
        return found

    @property
    def optimum(self) -> float:
        """psi at the solution."""
        return float(self.objective(self.solution))

    def _robust_solution(self) -> Floats:
        """Absolute loss with the squared l2 norm, by its dual: x = A'y / lam for the y in the box that minimises it."""
        lam = self.phi.strong_convexity
        if not isinstance(self.phi, L2) or not lam > 0:
            raise ValueError(f"{self.name}: the absolute loss is solved with the regulariser L2(lam), lam > 0, only.")
        box = Box(-1 / self.size, 1 / self.size)
        hessian = self.A @ self.A.T / lam
        largest = float(np.linalg.eigvalsh(hessian)[-1])
        y = accelerated(lambda y: y @ hessian - self.b, box.prox, largest, np.zeros(self.size))
        return self.A.T @ y / lam


def accelerated(
    gradient: Callable[[Floats], Floats],
    prox: Callable[[Floats, float], Floats],
    L: float,
    start: Floats,
    limit: int = 200_000,
) -> Floats:
    """Accelerated proximal gradient steps until rounding stops them; a row's momentum restarts where it hinders."""
    x = y = prox(start, 1 / L)
    momentum = np.ones(x.shape[:-1])
    for _ in range(limit):
        z = prox(y - gradient(y) / L, 1 / L)
        if np.abs(z - y).max() <= 1e-15 * (1 + np.abs(z).max()):
            return z
        back = ((y - z) * (z - x)).sum(-1) > 0
        larger = np.where(back, 1.0, (1 + np.sqrt(1 + 4 * momentum**2)) / 2)
        weight = np.where(back, 0.0, (momentum - 1) / larger)
        y, x, momentum = z + weight[..., None] * (z - x), z, larger
    return x


# The problems of the checks


def ridge(lam: float = 0.2, noise: float = 0.5) -> Composite:
    """Least squares with the squared l2 norm; 20 samples, 4 variables. Without noise the loss is 0 somewhere."""
    A, b = _regression(20, 4, noise=noise, seed=1)
    return Composite("ridge", A, b, Squared(), L2(lam), np.zeros(4))


def easy_regression() -> Composite:
    """Least squares with little noise and a weak squared l2 norm; 40 samples, 8 variables."""
    A, b = _regression(40, 8, noise=0.02, seed=7)
    return Composite("squared loss", A, b, Squared(), L2(1e-4), np.zeros(8))


def easy_classification() -> Composite:
    """Logistic loss, labels that a plane separates, and a weak squared l2 norm; 40 samples, 8 variables."""
    A, b = _regression(40, 8, noise=0.0, seed=7)
    return Composite("logistic loss", 4 * A, np.where(b >= 0, 1.0, -1.0), Logistic(), L2(1e-3), np.zeros(8))


def box_least_squares() -> Composite:
    """Least squares in the box [-0.5, 0.5]^3, at whose border the solution lies; 16 samples."""
    A, b = _regression(16, 3, noise=0.3, seed=2)
    return Composite("box least squares", A, b, Squared(), Box(-0.5, 0.5), np.zeros(3))


def sparse_logistic(lam: float = 0.05) -> Composite:
    """Logistic regression with the l1 norm; 24 samples, 5 variables, of which two matter."""
    rng = np.random.default_rng(3)
    A = _unit_rows(rng.standard_normal((24, 5)))
    b = np.where(A @ np.array([3.0, -2.0, 0, 0, 0]) + 0.5 * rng.standard_normal(24) >= 0, 1.0, -1.0)
    return Composite("l1 logistic", A, b, Logistic(), L1(lam), np.zeros(5))


def robust_regression(lam: float = 0.2) -> Composite:
    """Absolute loss with a quarter of wild targets and the squared l2 norm; 20 samples, 3 variables."""
    A, b = _regression(20, 3, noise=0.1, seed=4)
    b[::4] += 3.0
    return Composite("robust regression", A, b, Absolute(), L2(lam), np.zeros(3))


def phase_retrieval() -> Composite:
    """|<a_i, x>^2 - b_i| in the box [-1.5, 1.5]^2, without noise: weakly convex, not smooth; 12 samples."""
    rng = np.random.default_rng(5)
    A, truth = _unit_rows(rng.standard_normal((12, 2))), np.array([1.0, -0.6])
    return Composite("phase retrieval", A, (A @ truth) ** 2, Phase(), Box(-1.5, 1.5), np.array([0.3, 1.2]), truth)


def cauchy_regression(lam: float = 0.02) -> Composite:
    """ln(1 + residual^2) / 2 with two groups of targets and the squared l2 norm: smooth, weakly convex; 14 samples."""
    rng = np.random.default_rng(6)
    A = _unit_rows(rng.standard_normal((14, 2)))
    b = A @ np.array([2.0, 1.0]) + 0.2 * rng.standard_normal(14)
    b[::3] = A[::3] @ np.array([-2.0, 2.0])
    return Composite("Cauchy regression", A, b, Cauchy(), L2(lam), np.array([-1.0, -2.0]))


def scalar_quadratic(
    phi: Regularizer, *, name: str, curvature: float, slope: float, noise: Sequence[float], start: float
) -> Composite:
    """f_i(x) = curvature/2 (x - c_i)^2 on the line, with f_i'(0) = slope + noise_i, where the noise sums to 0.

    The gradient noise is the same everywhere. With a small curvature f is almost linear, the worst case of several
    bounds.
    """
    root = math.sqrt(curvature)
    b = -(slope + np.asarray(noise)) / root
    return Composite(name, np.full((len(b), 1), root), b, Squared(), phi, np.array([start]))


def _regression(N: int, n: int, noise: float, seed: int) -> tuple[Floats, Floats]:
    rng = np.random.default_rng(seed)
    A = _unit_rows(rng.standard_normal((N, n)))
    return A, A @ np.linspace(1, -1, n) + noise * rng.standard_normal(N)


def _unit_rows(A: Floats) -> Floats:
    found: Floats = A / np.linalg.norm(A, axis=1, keepdims=True)
    return found


PROBLEMS: dict[str, Callable[[], Composite]] = {
    "ridge": ridge,
    "box-least-squares": box_least_squares,
    "sparse-logistic": sparse_logistic,
    "robust-regression": robust_regression,
    "phase-retrieval": phase_retrieval,
    "cauchy-regression": cauchy_regression,
}

__all__ = [
    "PROBLEMS",
    "Composite",
    "Constants",
    "accelerated",
    "box_least_squares",
    "cauchy_regression",
    "easy_classification",
    "easy_regression",
    "phase_retrieval",
    "ridge",
    "robust_regression",
    "scalar_quadratic",
    "sparse_logistic",
]
