"""Closed forms: the line along which a step with the squared l2 norm moves, its root, and the update.

Each step minimises the truncated linear model of the loss plus regulariser plus proximity,

    max{m + <d, y - x>, C} + sum_j [ lam_j/2 ||y_j - c_j||^2 + ||y_j - x_j||^2 / (2 alpha_j) ],

over all blocks j jointly. Its solution moves along one ray, y_j(u) = a_j x_j - b_j u d_j + ..., and u in [0, 1] is the
multiplier of the two pieces of the max. Reductions of the blocks enter as arrays with the blocks on the last axis.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace, over_blocks, reciprocal


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
    a = alpha / (1 + alpha * lam)
    return Line(gap - over_blocks(a * lam * d_dot_x), over_blocks(a * d_sq))


def line_dual(line: Line) -> Dual:
    """The root of an affine h, clipped to [0, 1]; 0 where h is flat, as then y does not depend on u."""
    xp = array_namespace(line.fall)
    flat = line.fall <= 0
    root = line.start / (line.fall + flat)
    root = xp.where(flat, xp.zeros_like(root), root)
    return Dual(root, root.clip(0.0, 1.0))


def admissible(gap: Array, d_sq: Array, d_dot_x: Array, bounded: bool, *further: Array) -> Array:
    """Whether a step may be taken: loss, gradients and parameters are finite, and the loss is not below its bound.

    Shapes are those of `l2_line`; the result, and `further` numbers that have to be finite, have the shape of `gap`.
    """
    xp = array_namespace(d_sq)
    numbers = [*(number[..., None] for number in (gap, *further)), d_sq, d_dot_x]
    ok = xp.all(xp.abs(xp.concat(numbers, axis=-1)) < math.inf, axis=-1)
    return ok & (gap >= 0) if bounded else ok


class Affine(NamedTuple):
    """Coefficients of an update x+ = keep x + move d + pull center; one number of each kind per block."""

    keep: Array
    move: Array
    pull: Array


def prox_coefficients(u: Array, alpha: Array, lam: Array | float) -> Affine:
    """x+ = (x - alpha u d + alpha lam c) / (1 + alpha lam): a step of length alpha u, then the prox of the l2 term."""
    if isinstance(lam, float) and lam == 0:
        return Affine(1.0, alpha * -u, 0.0)
    decay = alpha * lam
    shrink = reciprocal(1 + decay)
    return Affine(shrink, (alpha * shrink) * -u, decay * shrink)


def coupled_coefficients(u: Array, alpha: Array, lam: Array) -> Affine:
    """x+ = x - alpha u (g + lam (x - c)): a step along the gradient of loss and regulariser together."""
    tau = alpha * u
    return Affine(1 - tau * lam, -tau, tau * lam)


def relaxation(move_sq: Array, max_move: float) -> Array:
    """The factor s = min{1, max_move / ||y - x||}, with which x + s (y - x) is y projected onto a ball around x."""
    xp = array_namespace(move_sq)
    longer = move_sq > max_move * max_move  # a power of a Python number raises an error where it overflows
    return xp.where(longer, max_move / xp.where(longer, move_sq, xp.ones_like(move_sq)) ** 0.5, xp.ones_like(move_sq))
