"""From a loss and its gradient to the linear model of a step: its value m and its slope d.

The plain estimate is the loss and its gradient. Methods that put the regulariser into the loss (SPS, DecSPS) add its
value to the one and its gradient to the other. With momentum, the model is the average of all linearisations so far,

    m = fbar - gamma + <d, x>,    d, fbar, gamma = averages of g_i, f_i(x_i), <g_i, x_i>,

evaluated at the current point x. Second moments of the gradient give Adam's metric D = sqrt(v) + eps.

A tensor p without a gradient in a step rests: x_p, d_p and v_p stay as they are. In the model this is a step whose
missing gradient is its average, g_p = d_p, because then

    w_old d_p + w_new d_p = d_p,    and    gamma, <d, x> both include <d_p, x_p> of the tensors at rest.

So m is still an average of linearisations at the current point, with the weights of the losses in fbar. What earlier
ones add for p, <g_{i,p}, x_p - x_{i,p}>, decays with their losses; later ones add nothing, because x_p does not change.
(An average gamma_p that rests too would keep this difference in m for ever, although new losses already contain it.)

All averages have the same update, new average = old w_old + new w_new, with weights that depend on the number k of
steps before. The weights of the first step are 0 and 1, so that it does not matter what an average was before. Those of
Adam contain its bias correction: an average from zeros that is divided by 1 - beta^(k+1) is the same as one with
weights

    w_new = (1 - beta) / (1 - beta^(k+1)),    w_old = 1 - w_new.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace, reciprocal

TINY = 1e-37  # in the range of f32


def coupled_value(m: Array, x_sq: Array, lam: Array) -> Array:
    """m + sum_j lam_j/2 ||x_j||^2: the loss with the squared l2 norm of its blocks, which are on the last axis."""
    return m + array_namespace(x_sq).sum(lam * x_sq, axis=-1) / 2


def coupled_slope(g: Array, x: Array, lam: Array | float) -> Array:
    """g + lam x: the gradient of the loss with the squared l2 norm."""
    return g + lam * x


class Weights(NamedTuple):
    """How much of an average is old and how much is new; the two add up to 1."""

    old: Array
    new: Array


def momentum_weights(k: Array, beta: Array | float) -> Weights:
    """beta and 1 - beta, but 0 and 1 at the first step: the average starts from its first value.

    Args:
        k: steps before this one, a float array of any shape.
        beta: in [0, 1), a number or an array of no dims.
    """
    old = beta * k.clip(0.0, 1.0)
    return Weights(old, 1 - old)


def corrected_weights(k: Array, beta: Array | float) -> Weights:
    """The weights of an average from zeros with Adam's bias correction; arguments as in `momentum_weights`.

    A tensor that gets its first gradient late should have its own k for its second moments, as in Adam. For first
    moments k counts the steps of the model, which all tensors share: before, it did not depend on that tensor.
    """
    new = corrected_weight(k, beta)
    return Weights(1 - new, new)


def corrected_weight(k: Array, beta: Array | float) -> Array:
    """w_new of `corrected_weights`."""
    # 1 / w_new = 1 + beta + ... + beta^k. By expm1, because in single precision 1 - beta^k would lose four digits, and
    # because it is exactly 0 for k = 0.
    return reciprocal(1 + array_namespace(k).expm1(k * _log(beta)) * (beta / (beta - 1)))


def averaged(old: Array, new: Array, weights: Weights) -> Array:
    """The average with a new value; bitwise the new value at the first step and for beta = 0."""
    return weights.old * old + weights.new * new


class Averages(NamedTuple):
    """The numbers of an averaged model, each of the shape of the runs."""

    value: Array  # fbar, of the losses
    offset: Array  # gamma, of <g, x>
    taken: Array  # k, steps so far, without those that were skipped


def start_averages(like: Array) -> Averages:
    """Before the first step; `like` is a float array of the shape of the runs."""
    zero = array_namespace(like).zeros_like(like)
    return Averages(zero, zero, zero)


def update_averages(averages: Averages, f: Array, g_dot_x: Array, weights: Weights) -> Averages:
    """Update with the loss f and <g, x> over all tensors; a tensor without a gradient adds <d, x>."""
    xp = array_namespace(f)
    new = averaged(xp.stack([averages.value, averages.offset]), xp.stack([f, g_dot_x]), weights)
    return Averages(new[0], new[1], averages.taken + 1)


def averaged_value(f: Array, averages: Averages, d_dot_x: Array) -> Array:
    """m = fbar - gamma + <d, x>, from averages already updated with f.

    Written as f plus a correction, which is exactly 0 where d is g: with beta = 0 the model is bitwise the plain one,
    provided that <d, x> and <g, x> were summed in the same order.
    """
    return f + ((averages.value - f) - (averages.offset - d_dot_x))


def metric(v: Array, eps: float) -> Array:
    """Adam's metric D = sqrt(v) + eps, where v is the average of g^2 with `corrected_weights`."""
    return array_namespace(v).sqrt(v) + eps


def _log(beta: Array | float) -> Array | float:
    """log(beta), finite for beta = 0 too: its powers are then 0 to the last digit."""
    if isinstance(beta, (int, float)):
        return math.log(max(beta, TINY))
    xp = array_namespace(beta)
    return xp.log(xp.clip(beta, TINY))
