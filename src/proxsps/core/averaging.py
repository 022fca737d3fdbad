"""Averages of iterates, in the forms the rates are proved for, kept in one running value."""

from __future__ import annotations

from typing import NamedTuple

from proxsps.core.array import Array, array_namespace


class Average(NamedTuple):
    """A running weighted mean: the mean so far and the sum of its weights."""

    mean: Array
    weight: Array | float


def start_average(x: Array) -> Average:
    """Nothing averaged yet."""
    return Average(array_namespace(x).zeros_like(x), 0.0)


def update_average(average: Average, x: Array, weight: Array | float = 1.0) -> Average:
    """Update with x and a positive weight: 1 for the uniform mean, alpha_k or k + 1 for the means of the theorems."""
    total = average.weight + weight
    return Average(average.mean + (weight / total) * (x - average.mean), total)


def polynomial_weight(count: Array | int, power: float = 8.0) -> Array | float:
    """The weight of the newest point beside an average of `count` points: (power + 1) / (count + power + 1).

    The average then gives the k-th of its points a weight of about k^power (Shamir and Zhang, 2013): it forgets the
    start of training without a horizon. With power = 8 and k = count - 1 the weight is 9 / (k + 10); with power = 0 the
    average is the uniform one.
    """
    return (power + 1) / (count + power + 1)


def polynomial_average(mean: Array, x: Array, count: Array | int, power: float = 8.0) -> Array:
    """The average of `count` + 1 points, from that of the first `count` of them and the newest, x."""
    return mean + polynomial_weight(count, power) * (x - mean)


def draw_iterate(drawn: Array, x: Array, k: int, uniform: Array | float) -> Array:
    """Uniform draw from x^0 ... x^k, given one from x^0 ... x^{k-1} and a fresh number `uniform` in [0, 1)."""
    xp = array_namespace(x)
    return xp.where(xp.asarray(uniform * (k + 1) < 1), x, drawn)
