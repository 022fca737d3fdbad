"""Steps with a closed form: ProxSPS with the squared l2 norm, SPS, SPS_max, DecSPS, and the update they share.

Each step minimises the truncated linear model of the loss plus regulariser plus proximity,

    max{m + <d, y - x>, C} + sum_j [ lam_j/2 ||y_j - c_j||^2 + ||y_j - x_j||^2 / (2 alpha_j) ],

over all blocks j jointly. Its solution moves along one ray, y_j(u) = a_j x_j - b_j u d_j + ..., and u in [0, 1] is the
multiplier of the two pieces of the max. Reductions of the blocks enter as arrays with the blocks on the last axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace


class Dual(NamedTuple):
    """The dual variable of a step, before and after it is clipped to [0, 1]."""

    root: Array  # where the linear model reaches C: below 0 the model is truncated at once, above 1 never
    u: Array


class Line(NamedTuple):
    """h(u) = start - fall u: height of the linear model above C along the ray, where every prox is affine."""

    start: Array
    fall: Array


def l2_line(gap: Array, d_sq: Array, d_dot_x: Array, alpha: Array, lam: Array) -> Line:
    """Height of the linear model above C at y(u), for phi_j = lam_j/2 ||. - c_j||^2.

    h(u) = gap - sum_j a_j (lam_j <d_j, x_j - c_j> + u ||d_j||^2) with a_j = alpha_j / (1 + alpha_j lam_j).

    Args:
        gap: m - C, shape (...).
        d_sq: ||d_j||^2, shape (..., blocks).
        d_dot_x: <d_j, x_j - c_j>, shape (..., blocks).
        alpha: caps alpha_j >= 0, shape (..., blocks).
        lam: strengths lam_j >= 0, shape (..., blocks).
    """
    xp = array_namespace(d_sq)
    a = alpha / (1 + alpha * lam)
    return Line(gap - xp.sum(a * lam * d_dot_x, axis=-1), xp.sum(a * d_sq, axis=-1))


def line_dual(line: Line) -> Dual:
    """The root of an affine h, clipped to [0, 1]; 0 where h is flat, as then y does not depend on u."""
    xp = array_namespace(line.fall)
    flat = line.fall <= 0
    root = line.start / xp.where(flat, xp.ones_like(line.fall), line.fall)
    root = xp.where(flat, xp.zeros_like(root), root)
    return Dual(root, root.clip(0.0, 1.0))


def l2_dual(gap: Array, d_sq: Array, d_dot_x: Array, alpha: Array, lam: Array) -> Dual:
    """Dual variable of the ProxSPS step for the squared l2 norm (Lemma on the l2 update, over blocks); see `l2_line`.

    With one block, tau+ = alpha u = min{alpha, zeta} with zeta = alpha max(root, 0).
    """
    return line_dual(l2_line(gap, d_sq, d_dot_x, alpha, lam))


def sps_dual(gap: Array, d_sq: Array, alpha: Array, c: Array | float = 1.0) -> Dual:
    """Dual variable of SPS (Algorithm 1, c = 1) and SPS_max; with one block alpha u = min{alpha, gap / (c ||d||^2)}."""
    xp = array_namespace(d_sq)
    return line_dual(Line(gap, c * xp.sum(alpha * d_sq, axis=-1)))


def dec_sps_dual(gap: Array, d_sq: Array, alpha: Array, c: Array | float, previous: Array) -> Dual:
    """Dual variable of DecSPS, whose step c_k gamma_k never grows (Orvieto, Lacoste-Julien and Loizou, 2022).

    With one block alpha u = min{gap / (c_k ||d||^2), c_{k-1} gamma_{k-1} / c_k, alpha}: the published rule, where alpha
    is the bound gamma_b of its first step and, if it is lowered later, of all others.

    Args:
        gap: m - C, shape (...).
        d_sq: ||d_j||^2, shape (..., blocks).
        alpha: bounds on the step, shape (..., blocks).
        c: c_k of an increasing sequence, a number or shape (...).
        previous: c_{k-1} tau_j of the step before, shape (..., blocks); infinity at the first.
    """
    xp = array_namespace(d_sq)
    dual = sps_dual(gap, d_sq, alpha, c)
    moving = xp.sum(alpha * d_sq, axis=-1) > 0  # else nothing limits the step, and nothing is to be remembered of it
    resting = alpha <= 0  # such a block does not move, whatever u is
    memory = xp.where(resting, xp.full_like(alpha, math.inf), previous / xp.where(resting, 1.0, alpha))
    u = xp.where(moving, dual.u, xp.ones_like(dual.u))
    return Dual(dual.root, xp.minimum(u, xp.min(memory, axis=-1) / c))


def admissible(gap: Array, d_sq: Array, d_dot_x: Array, bounded: bool) -> Array:
    """Whether a step may be taken: loss, gradients and parameters finite, and the loss not below a bound it has.

    Shapes as in `l2_line`; the result has that of `gap`.
    """
    xp = array_namespace(d_sq)
    ok = xp.all(xp.isfinite(xp.concat([gap[..., None], d_sq, d_dot_x], axis=-1)), axis=-1)
    return ok & (gap >= 0) if bounded else ok


class Affine(NamedTuple):
    """Coefficients of an update x+ = keep x + move d + pull center, a number each a block."""

    keep: Array
    move: Array
    pull: Array


def prox_coefficients(u: Array, alpha: Array, lam: Array) -> Affine:
    """x+ = (x - alpha u d + alpha lam c) / (1 + alpha lam): a step of length alpha u, then the prox of the l2 term."""
    shrink = 1 / (1 + alpha * lam)
    return Affine(shrink, -(alpha * shrink) * u, (alpha * lam) * shrink)


def coupled_coefficients(u: Array, alpha: Array, lam: Array) -> Affine:
    """x+ = x - alpha u (g + lam (x - c)): a step along the gradient of loss and regulariser together."""
    tau = alpha * u
    return Affine(1 - tau * lam, -tau, tau * lam)


def prox_move_sq(update: Affine, d_sq: Array, d_dot_x: Array, x_sq: Array) -> Array:
    """||x+ - x||^2 over all blocks for `prox_coefficients`: there x+ - x = move d - (1 - keep) (x - c)."""
    xp = array_namespace(d_sq)
    lost = 1 - update.keep
    return xp.sum(update.move**2 * d_sq - 2 * update.move * lost * d_dot_x + lost**2 * x_sq, axis=-1)


def coupled_move_sq(update: Affine, d_sq: Array) -> Array:
    """||x+ - x||^2 over all blocks for `coupled_coefficients`: there x+ - x = move d."""
    return array_namespace(d_sq).sum(update.move**2 * d_sq, axis=-1)


def relaxation(move_sq: Array, max_move: float) -> Array:
    """The factor s = min{1, max_move / ||y - x||}, with which x + s (y - x) is y projected onto a ball around x."""
    xp = array_namespace(move_sq)
    longer = move_sq > max_move**2
    return xp.where(longer, max_move / xp.where(longer, move_sq, xp.ones_like(move_sq)) ** 0.5, xp.ones_like(move_sq))


def relax(update: Affine, s: Array) -> Affine:
    """The update x + s (x+ - x); bitwise the one given where s = 1."""
    return Affine(update.keep + (1 - s) * (1 - update.keep), s * update.move, s * update.pull)
