"""The model of a step: a few numbers per block, and how high the linear model stands above C along its ray.

    h(u) = m - C + sum_j <d_j, y_j(u) - x_j>,    y_j(u) = prox_{alpha_j phi_j}(x_j - u alpha_j d_j)

A block answers h and h' at several u by its kind. Where its prox is affine it is a line. Where phi depends on each row
only through its norm, three sums per row tell everything. Where phi acts on each entry, a pass over the entries does.
Points u are on a last axis, behind those of runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

from proxsps.core.array import Array, array_namespace
from proxsps.core.step import Line


class Psi(Protocol):
    """A convex function of one number, by its prox and the derivative of that."""

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """The prox with step alpha."""

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array | None:
        """The derivative of the prox at z, times v; y is the prox there. None where it is not cheap."""


class RowSums(NamedTuple):
    """What a step needs of rows x_g, d_g: shape (..., rows)."""

    x_sq: Array  # ||x_g||^2
    d_dot_x: Array  # <d_g, x_g>
    d_sq: Array  # ||d_g||^2


def line_heights(line: Line, u: Array) -> tuple[Array, Array]:
    """h(u) and h'(u) of a line."""
    fall = line.fall[..., None]
    return line.start[..., None] - fall * u, -fall + 0 * u


def row_heights(rows: RowSums, psi: Psi, alpha: Array | float, u: Array) -> tuple[Array, Array]:
    """sum_g <d_g, y_g(u) - x_g> and its derivative, for phi = sum_g psi_g(||x_g||).

    With s = u alpha and z = x - s d, y_g = c z_g with c = r/||z_g|| and r = prox_{alpha psi}(||z_g||), so that
    <d_g, y_g - x_g> = c (<d,x> - s ||d||^2) - <d,x>.

    Args:
        rows: the sums, shape (..., rows).
        psi: function of a norm; its constants are numbers or have the shape (rows,).
        alpha: caps, shape (..., rows) or (rows,), or one number.
        u: shape (..., points).
    """
    x_sq, d_dot_x, d_sq = (part[..., None, :] for part in rows)
    alpha = _indexed(alpha, ..., None, slice(None))
    s = u[..., None] * alpha
    along = d_dot_x - s * d_sq  # <d, z>
    norm = _norm(x_sq, d_dot_x, d_sq, s)
    c, slope = _factor(psi, norm, alpha)
    xp = array_namespace(norm)
    h = xp.sum(c * along - d_dot_x, axis=-1)
    # d(c <d,z>)/ds, where d||z||/ds = -<d,z>/||z|| and dc/d||z|| = (r' - c)/||z||.
    turn = along / _or_one(norm)
    return h, -xp.sum(alpha * ((slope - c) * turn * turn + c * d_sq), axis=-1)


def row_values(rows: RowSums, psi: Psi, alpha: Array | float, u: Array) -> Array:
    """The first of `row_heights` alone, for one run, in few operations."""
    xp = array_namespace(u)
    x_sq, d_dot_x, d_sq = rows
    s = u[:, None] * alpha
    along = d_dot_x - s * d_sq
    # ||x - s d||^2; rows that vanish, or whose square cancels, get a norm that can be divided by.
    norm = (x_sq - s * (along + d_dot_x)).clip(float(xp.finfo(u.dtype).smallest_normal)) ** 0.5
    c = psi.prox(norm, alpha) / norm
    return xp.sum(c * along - d_dot_x, axis=-1)


def row_moves_sq(rows: RowSums, psi: Psi, alpha: Array, u: Array) -> Array:
    """||y_g(u) - x_g||^2 over all rows, for one u of the shape of the runs."""
    x_sq, d_dot_x, d_sq = rows
    s = u[..., None] * alpha
    norm = _norm(x_sq, d_dot_x, d_sq, s)
    c, _ = _factor(psi, norm, alpha)
    # y - x = (c - 1) x - c s d
    return array_namespace(c).sum((c - 1) ** 2 * x_sq - 2 * (c - 1) * c * s * d_dot_x + (c * s) ** 2 * d_sq, axis=-1)


def row_factors(psi: Psi, norm: Array, alpha: Array) -> Array:
    """c with y_g = c z_g, from the norms ||z_g||; 0 for rows that are 0."""
    return _factor(psi, norm, alpha)[0]


def entry_heights(x: Array, d: Array, psi: Psi, alpha: Array | float, u: Array) -> tuple[Array, Array]:
    """<d, y(u) - x> and its derivative, where psi acts on each entry.

    Args:
        x: points, shape (..., n).
        d: slopes, shape (..., n).
        psi: function of one entry.
        alpha: caps, shape (...) or a number.
        u: shape (..., points).
    """
    xp = array_namespace(x)
    caps, column = _indexed(alpha, ..., None), _indexed(alpha, ..., None, None)
    x, d = x[..., None, :], d[..., None, :]
    z = x - (u[..., None] * column) * d
    y = psi.prox(z, column)
    h, tangent = xp.sum(d * (y - x), axis=-1), psi.prox_jvp(z, y, d, column)
    if tangent is None:
        return h, xp.full_like(h, xp.nan)
    return h, -caps * xp.sum(d * tangent, axis=-1)


def _norm(x_sq: Array, d_dot_x: Array, d_sq: Array, s: Array) -> Array:
    """||x_g - s d_g||; where it cancels, rounding may leave a negative square."""
    xp = array_namespace(x_sq)
    square = x_sq - s * (2 * d_dot_x - s * d_sq)
    return xp.sqrt(xp.maximum(square, xp.zeros_like(square)))


def _factor(psi: Psi, norm: Array, alpha: Array) -> tuple[Array, Array]:
    """r/||z|| and r' for r = prox_{alpha psi}(||z||)."""
    xp = array_namespace(norm)
    r = psi.prox(norm, alpha)
    return r / _or_one(norm), psi.prox_jvp(norm, r, xp.ones_like(norm), alpha)


def _indexed(alpha: Array | float, *index: Any) -> Array | float:
    """Caps with new axes; one number stays as it is."""
    return alpha[index] if getattr(alpha, "ndim", 0) else alpha  # type: ignore[index]


def _or_one(norm: Array) -> Array:
    xp = array_namespace(norm)
    return xp.where(norm > 0, norm, xp.ones_like(norm))
