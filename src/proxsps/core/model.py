"""The model of a step: a few numbers per block, and the height of the linear model above C along its ray.

    h(u) = m - C + sum_j <d_j, y_j(u) - x_j>,    y_j(u) = prox_{alpha_j phi_j}(x_j - u alpha_j d_j)

How a block computes h and h' at several u depends on its kind. If its prox is affine, h is a line. If phi depends on
each row only through its norm, three sums per row are enough. If phi acts on each entry, it takes one pass over them.
Points u are on a last axis, behind those of runs.

In a diagonal metric D, y_j(u) = prox^D_{alpha phi}(x - u alpha D^-1 d). Entries then have step sizes alpha/D_i of their
own. The squared l2 norm in that same metric, lam/2 ||y||_D^2, keeps its line, with <d, D^-1 d> in place of ||d||^2:
its decay is decoupled. In the Euclidean norm it is a line too, with each entry as a block.

Functions with `ray` in their names are about another curve, that of the matched cap (`proxsps.core.caps`): there step
and prox have the same step size, x_j+(s) = prox^D_{tau phi}(x - tau D^-1 d) with tau = s w. Its derivative is

    dx+/ds = J (x+ - x) / s,    J = derivative of the prox,

for every prox and metric: x+ solves x+ + tau D^-1 phi'(x+) = x - tau D^-1 d; differentiate, and insert it once more.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from proxsps.core.array import Array, array_namespace
from proxsps.core.step import Line


class Psi(Protocol):
    """A convex function of one number, given by its prox and the derivative of the prox."""

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """The prox with step alpha."""

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array | None:
        """The derivative of the prox at z, times v; y is the prox there. None where it is not cheap."""


class RowSums(NamedTuple):
    """The sums over rows x_g, d_g that a step needs, shape (..., rows)."""

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
    # ||x - s d||^2; rows that vanish, or whose square cancels, get a norm above 0, to divide by.
    norm = (x_sq - s * (along + d_dot_x)).clip(float(xp.finfo(u.dtype).smallest_normal)) ** 0.5
    c = psi.prox(norm, alpha) / norm
    return xp.sum(c * along - d_dot_x, axis=-1)


def row_factors(psi: Psi, norm: Array, alpha: Array) -> Array:
    """c with y_g = c z_g, from the norms ||z_g||; 0 for rows that are 0."""
    return _factor(psi, norm, alpha)[0]


def entry_heights(
    x: Array, d: Array, psi: Psi, alpha: Array | float, u: Array, metric: Array | None = None
) -> tuple[Array, Array]:
    """<d, y(u) - x> and its derivative, where psi acts on each entry.

    Args:
        x: points, shape (..., n).
        d: slopes, shape (..., n).
        psi: function of one entry.
        alpha: caps, shape (...) or a number.
        u: shape (..., points).
        metric: D > 0, shape (..., n); None for the identity.
    """
    xp = array_namespace(x)
    caps, column = _indexed(alpha, ..., None), _indexed(alpha, ..., None, None)
    x, d = x[..., None, :], d[..., None, :]
    steps, e = (column, d) if metric is None else (column / metric[..., None, :], d / metric[..., None, :])
    z = x - (u[..., None] * column) * e
    y = psi.prox(z, steps)
    h, tangent = xp.sum(d * (y - x), axis=-1), psi.prox_jvp(z, y, e, steps)
    if tangent is None:
        return h, xp.full_like(h, xp.nan)
    return h, -caps * xp.sum(d * tangent, axis=-1)


def entry_ray_heights(
    x: Array, d: Array, psi: Psi, share: Array | float, s: Array, metric: Array | None = None
) -> tuple[Array, Array]:
    """<d, x+(s) - x> and its derivative on the ray of the matched cap, where psi acts on each entry.

    Args:
        x: points, shape (..., n).
        d: slopes, shape (..., n).
        psi: function of one entry.
        share: w, shape (...) or a number.
        s: shape (..., points); at 0 the derivative is NaN.
        metric: D > 0, shape (..., n); None for the identity.
    """
    xp = array_namespace(x)
    x, d = x[..., None, :], d[..., None, :]
    tau = s[..., None] * _indexed(share, ..., None, None)
    tau = tau if metric is None else tau / metric[..., None, :]
    z = x - tau * d
    y = psi.prox(z, tau)
    move = y - x
    h, tangent = xp.sum(d * move, axis=-1), psi.prox_jvp(z, y, move, tau)
    if tangent is None:
        return h, xp.full_like(h, xp.nan)
    return h, xp.sum(d * tangent, axis=-1) / _or_nan(s)


def row_ray_heights(rows: RowSums, psi: Psi, share: Array | float, s: Array) -> tuple[Array, Array]:
    """sum_g <d_g, x_g+(s) - x_g> and its derivative on the ray of the matched cap, for phi = sum_g psi_g(||x_g||).

    With z = x - tau d, e = z_g / ||z_g||, x_g+ = r e and c = r / ||z_g||, the derivative of the prox takes v to
    c v + (r' - c) <e, v> e, here with v = x_g+ - x_g.

    Args:
        rows: the sums, shape (..., rows).
        psi: function of a norm; its constants are numbers or have the shape (rows,).
        share: w, shape (..., rows), (rows,) or a number.
        s: shape (..., points); at 0 the derivative is NaN.
    """
    x_sq, d_dot_x, d_sq = (part[..., None, :] for part in rows)
    tau = s[..., None] * _indexed(share, ..., None, slice(None))
    norm = _norm(x_sq, d_dot_x, d_sq, tau)
    c, slope = _factor(psi, norm, tau)
    xp = array_namespace(norm)
    along = d_dot_x - tau * d_sq  # <d, z>
    fall = c * along - d_dot_x  # <d, v>
    radial = (c * norm * norm - (x_sq - tau * d_dot_x)) / _or_one(norm)  # <e, v>
    bend = c * fall + (slope - c) * radial * along / _or_one(norm)
    return xp.sum(fall, axis=-1), xp.sum(bend, axis=-1) / _or_nan(s)


def prox_ray_heights(
    x: Array,
    d: Array,
    prox: Callable[[Array, Array], Array],
    jvp: Callable[[Array, Array, Array, Array], Array | None] | None,
    share: Array | float,
    s: Array,
    metric: Array | None = None,
) -> tuple[Array, Array]:
    """<d, x+(s) - x> and its derivative on the ray of the matched cap, for one tensor and any prox.

    Args:
        x: the point, of any shape.
        d: the slope, of the same shape.
        prox: (z, step size) -> y. With a metric it gets one step size per entry, as `Regularizer.prox_diagonal` does.
        jvp: (z, y, v, step size) -> the derivative of the prox along v, or None. Without it, the slope is NaN.
        share: w, a number.
        s: shape (points,), above 0.
        metric: D > 0, of the shape of x; None for the identity.
    """
    xp = array_namespace(x)
    heights, slopes = [], []
    for i in range(s.shape[0]):
        tau = s[i] * share if metric is None else s[i] * share / metric
        z = x - tau * d
        y = prox(z, tau)
        tangent = jvp(z, y, y - x, tau) if jvp else None
        heights.append(xp.sum(d * (y - x)))
        slopes.append(heights[-1] * xp.nan if tangent is None else xp.sum(d * tangent))
    return xp.stack(heights), xp.stack(slopes) / s


def _norm(x_sq: Array, d_dot_x: Array, d_sq: Array, s: Array) -> Array:
    """||x_g - s d_g||; where it cancels, rounding may leave a negative square.

    Divided by r = max(s, 1), so that the square of a long step stays in the range of f32.
    """
    xp = array_namespace(x_sq)
    r = xp.maximum(s, xp.ones_like(s))
    t = s / r
    square = x_sq / r / r - t * (2 * d_dot_x / r - t * d_sq)
    return r * xp.sqrt(xp.maximum(square, xp.zeros_like(square)))


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


def _or_nan(s: Array) -> Array:
    xp = array_namespace(s)
    return xp.where(s > 0, s, xp.full_like(s, xp.nan))
