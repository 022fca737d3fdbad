"""Many runs as rows of arrays, of any array library: one step updates all of them, with the parts of `proxsps.core`.

Points x and slopes d have the shape (runs, n), all other numbers the shape (runs,). Each run is one block with its own
cap. Runs share nothing and do not depend on each other.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from proxsps.core.array import Array, array_namespace
from proxsps.core.dual import Found, geometric, search_dual, shared_loop, stopping
from proxsps.core.estimate import coupled_slope, coupled_value
from proxsps.core.model import RowSums, entry_heights, line_heights, row_factors, row_heights
from proxsps.core.rules import Decision, Model, truncated
from proxsps.core.step import Line, l2_line, prox_coefficients
from proxsps.regularizers import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Scalar

POINTS = 3  # per round of the search: few rows cost less than the calls for them
LIMIT = 200  # evaluated points

Rule = Callable[[Model], Decision]


class Step(NamedTuple):
    """One step of all runs."""

    points: Array  # x+, shape (runs, n)
    decision: Decision


def inner(a: Array, b: Array) -> Array:
    """Inner products of rows."""
    return array_namespace(a).sum(a * b, axis=-1)


def coupled(value: Array, g: Array, x: Array, lam: Array | float) -> tuple[Array, Array]:
    """The loss with lam/2 ||x||^2 added to it, and the gradient of both, for SPS and DecSPS.

    Args:
        value: losses, shape (runs,).
        g: gradients, shape (runs, n).
        x: points, shape (runs, n).
        lam: strength, one number for all runs.
    """
    return coupled_value(value, inner(x, x)[..., None], lam), coupled_slope(g, x, lam)


def line_model(gap: Array, d_sq: Array, d_dot_x: Array, alpha: Array, lam: Array | float) -> Model:
    """The model of runs with the squared l2 norm, from sums over their rows: all of shape (runs,).

    Args:
        gap: m - C.
        d_sq: ||d||^2.
        d_dot_x: <d, x>, or <d, x - center>.
        alpha: caps.
        lam: strengths; 0 where the squared l2 norm is part of the loss.
    """
    strengths: Any = lam
    column = strengths[..., None] if getattr(lam, "ndim", 0) else lam
    d_sq, d_dot_x, alpha = d_sq[..., None], d_dot_x[..., None], alpha[..., None]
    return Model(gap, d_sq, alpha, l2_line(gap, d_sq, d_dot_x, alpha, column))


def select(masks: Sequence[Array], decisions: Sequence[Decision], otherwise: Decision) -> Decision:
    """For each run the decision whose mask holds for it, else `otherwise`."""
    chosen = otherwise
    for mask, decision in zip(masks, decisions, strict=True):
        xp = array_namespace(mask)
        fields = zip(decision[:3], chosen[:3], strict=True)
        chosen = Decision(*(xp.where(mask, own, other) for own, other in fields))
    return chosen


def step(x: Array, gap: Array, d: Array, alpha: Array, phi: Regularizer, rule: Rule = truncated) -> Step:
    """One step of every run.

    Args:
        x: points, shape (runs, n).
        gap: m - C, the value of the linear model above its bound, shape (runs,).
        d: slopes, shape (runs, n).
        alpha: caps > 0, shape (runs,).
        phi: the regulariser of all runs, on vectors of n entries.
        rule: chooses the step: one of `proxsps.core.rules`.
    """
    phi.check(tuple(x.shape[1:]))
    structure = phi.structure(tuple(x.shape[1:]))
    if isinstance(structure, Quadratic):
        return _affine_step(x, gap, d, alpha, structure, rule)
    curve = _make_curve(x, d, alpha, phi)
    line = Line(gap, array_namespace(gap).zeros_like(gap))  # the rest of h is in the curve
    decision = rule(Model(gap, inner(d, d)[:, None], alpha[:, None], line, curve.find, curve.top))
    return Step(curve.points(decision.u), decision)


def _affine_step(x: Array, gap: Array, d: Array, alpha: Array, phi: Quadratic, rule: Rule) -> Step:
    offset = x if phi.center is None else x - phi.center
    decision = rule(line_model(gap, inner(d, d), inner(d, offset), alpha, phi.lam))
    update = prox_coefficients(decision.u[:, None], alpha[:, None], phi.lam)
    points = update.keep * x + update.move * d
    return Step(points if phi.center is None else points + update.pull * phi.center, decision)


def _make_curve(x: Array, d: Array, alpha: Array, phi: Regularizer) -> _Curve:
    structure = phi.structure(tuple(x.shape[1:]))
    if isinstance(structure, Entries) and not isinstance(structure.psi, Regularizer):
        return _EntriesCurve(x, d, alpha, structure.psi)
    if isinstance(structure, Entries) and phi.has_diagonal_prox:
        return _EntriesCurve(x, d, alpha, _Diagonal(phi))
    if isinstance(structure, Rows):
        return _RowsCurve(x, d, alpha, structure.psi)
    return _ProxCurve(x, d, alpha, phi)


class _Curve(ABC):
    """The height of the linear model of each run along its ray, if the prox is not affine."""

    slopes = True  # whether h' is known

    def __init__(self, x: Array, d: Array, alpha: Array, psi: Any) -> None:
        self.x, self.d, self.alpha, self.psi = x, d, alpha, psi

    @abstractmethod
    def heights(self, u: Array) -> tuple[Array, Array]:
        """<d, y(u) - x> and its derivative, for u of shape (runs, points)."""

    @abstractmethod
    def points(self, u: Array) -> Array:
        """y(u), for u of shape (runs,)."""

    def find(self, line: Line) -> Found:
        """The dual variables."""

        def evaluate(u: Array) -> tuple[Array, Array]:
            start, fall = line_heights(line, u)
            h, slope = self.heights(u)
            return start + h, fall + slope

        xp = array_namespace(self.x)
        eps = float(xp.finfo(self.x.dtype).eps)
        products = self.d * self.x
        tolerance, noise = stopping(line.start, xp.sqrt(inner(products, products)), eps)
        points, start = (POINTS, geometric(POINTS)) if self.slopes else (1, (1.0,))
        return search_dual(evaluate, line.start, tolerance, eps, LIMIT, shared_loop, noise, start, points, self.slopes)

    def top(self, line: Line) -> Array:
        """h(1)."""
        one = array_namespace(self.x).ones_like(self.alpha)[:, None]
        return (line_heights(line, one)[0] + self.heights(one)[0])[:, 0]

    def along(self, u: Array) -> Array:
        """x - u alpha d."""
        return self.x - (u * self.alpha)[:, None] * self.d


class _EntriesCurve(_Curve):
    """Each entry by itself."""

    def heights(self, u: Array) -> tuple[Array, Array]:
        """One pass over all entries for each point."""
        return entry_heights(self.x, self.d, self.psi, self.alpha, u)

    def points(self, u: Array) -> Array:
        """The prox, entry by entry."""
        return self.psi.prox(self.along(u), self.alpha[:, None])


class _RowsCurve(_Curve):
    """All n entries of a run by their norm."""

    def __init__(self, x: Array, d: Array, alpha: Array, psi: Scalar) -> None:
        super().__init__(x, d, alpha, psi)
        self.rows = RowSums(*(inner(a, b)[:, None] for a, b in ((x, x), (d, x), (d, d))))

    def heights(self, u: Array) -> tuple[Array, Array]:
        """By the sums alone."""
        return row_heights(self.rows, self.psi, self.alpha[:, None], u)

    def points(self, u: Array) -> Array:
        """Each row times its factor, whose norm is taken from the row itself: differences of sums may cancel."""
        z = self.along(u)
        norm = array_namespace(z).sqrt(inner(z, z))[:, None]
        return row_factors(self.psi, norm, self.alpha[:, None]) * z


class _ProxCurve(_Curve):
    """A regulariser with only a prox: run by run."""

    slopes = False

    def heights(self, u: Array) -> tuple[Array, Array]:
        """One prox for each run and point."""
        xp = array_namespace(u)
        columns = [inner(self.d, self.points(u[:, i]) - self.x) for i in range(u.shape[-1])]
        return xp.stack(columns, axis=-1), xp.full_like(u, xp.nan)

    def points(self, u: Array) -> Array:
        """The prox of each row."""
        z = self.along(u)
        return array_namespace(z).stack([self.psi.prox(z[i], self.alpha[i]) for i in range(len(z))])


class _Diagonal:
    """A separable regulariser as a function of entries with one cap for each run."""

    def __init__(self, phi: Regularizer) -> None:
        self.prox, self.prox_jvp = phi.prox_diagonal, phi.prox_jvp


__all__ = ["Rule", "Step", "coupled", "inner", "line_model", "select", "step"]
