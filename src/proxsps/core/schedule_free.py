r"""The schedule-free form of the step: gradients at y, proximal steps of z, and x, the average of z, to evaluate.

Schedule-free optimizers (Defazio et al., 2024) take gradients at a point between the average and the moving point,

    y = b x + (1 - b) z,    x+ = x + (w/W) (z+ - x),    w = (k+1)^r taumax^2,    W = sum of all w,

so that a run needs no schedule: x is what a schedule would end at. Here z takes the proximal Polyak step. Its linear
model is that of the loss at y, seen from z:

    gap = f(y) + <g, z - y> - C,    z+ = prox^D_{tau phi}(z - tau p),

where tau is the first step at which the model reaches C, or the distance cap.

Only y and z are kept, because x = z + (y - z)/b. Both functions below return z where x, y and z are equal, so that
entries without gradients stay as they are; and `gradient_point` does not decrease if x grows, also with rounding, so
that `average_exactly` finds an x from which y comes back bitwise.

The distance cap is that of `proxsps.core.distance`, measured at x, with another constant c. In pure noise, steps of
squared length s_i move x by ||x - x_0||^2 = V sum s_i, V(r) = 1 - 2/(r+2) + 1/(2r+3) in the limit of many steps: an
average moves less than its last point. At the edge c = V^(-1/2), steps in pure noise stay of one length, and the run is
a random walk; beyond it, steps grow. Networks have curvature, and use larger constants.

Spectral directions (Muon; Jordan et al., 2024) are for matrices. The gradients of a matrix with m rows and n columns
are averaged to d, and p = rho sqrt(max(m, n)) U V^T for d = U S V^T, approximately. Its entries are of the order of 1,
as those of D^-1 g in Adam's metric, and rho is what averaging takes away from noise, so that no number sets
matrices against other tensors.

What spectral directions add to G of the distance cap is q, the squared distance by which they move a run in pure noise,
per step and tau^2. If gradients have full rank, q = m n: averages of gradients move a run as far as the gradients do.
Gradients of low rank (small batches, the first steps of wide networks) have directions that fill fewer entries,
F = ||p||^2 / (0.8 rho^2). Then q = F if their singular vectors stay the same. If each gradient has new ones, then
q = 3.5 F, because the iteration raises remains of old gradients to full size. The cap uses m n / 4 + 3 F / 4, which is
between these two from 9 % of the full rank on. With q = m n the cap would be below the edge of growth, and fall.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from proxsps.core.array import Array, array_namespace

MIX, POWER = 0.9, 1.0  # b and r
SCALE = 2.0  # c of the distance cap
LATEST, WINDOW = 0.9, 100.0  # the largest weight of old gradients in d, and how many steps it takes to get there
ROUNDS, QUINTIC = 5, (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration
FULL = 0.8  # the mean square of the singular values after these rounds, if the rank is full
CERTAIN = 0.25  # the part of m n in q
CORRECTIONS = 6  # of an average; two are usual
CLEANING = 10.0  # times the last step: the proximal step whose zeros an evaluated model has
NEAR = 0.25  # of an average: points this close to it are no noise around 0


def gradient_point(x: Array, z: Array, b: Array | float = MIX) -> Array:
    """y."""
    return z + (x - z) * b


def average(y: Array, z: Array, b: Array | float = MIX) -> Array:
    """x."""
    return z + (y - z) / b


def average_exactly(y: Array, z: Array, b: float = MIX) -> Array:
    """An x whose `gradient_point` is bitwise y, for a y that was computed by it; it differs from `average` by rounding.

    `gradient_point` does not decrease with x, so an x that misses y is moved against the error, by the error or by the
    spacing of numbers.
    """
    xp = array_namespace(y)
    x, up = average(y, z, b), xp.full_like(y, xp.inf)
    for _ in range(CORRECTIONS):
        off = gradient_point(x, z, b) - y
        size = xp.maximum(xp.abs(x), xp.abs(z))
        move = xp.maximum(xp.abs(off) / b, (xp.nextafter(size, up) - size) / 2)
        moved = x - xp.sign(off) * move
        moved = xp.where(moved == x, xp.nextafter(x, xp.where(off > 0, -up, up)), moved)
        x = xp.where(off == 0, x, moved)
    return x


def cleaned(x: Array, zeros: Array) -> Array:
    """x with zeros. Other entries keep their value: shrinking them would bias the model."""
    xp = array_namespace(x)
    return xp.where(zeros, xp.zeros_like(x), x)


def zeros_of_average(x: Array, z: Array, after: Array, dims: tuple[int, ...] | None = ()) -> Array:
    """Where an average is 0 when it is evaluated.

    Zeros of z are not zeros of x, which is small there. So x is 0 where a long proximal step of it is, unless z is near
    x: points that jump around 0 are far from their average in relation to it. Without noise, steps may be so long that
    even entries that all points agree on are within their reach.

    Args:
        x: the average.
        z: the last point.
        after: a proximal step of x that is `CLEANING` times as long as the last one.
        dims: over which entries form a group that is 0 as a whole; none for single entries, None if it is not known,
            and z does not count.
    """
    xp = array_namespace(x)
    if dims is None:
        return after == 0
    apart, size = xp.abs(z - x), xp.abs(x)
    if dims:
        apart, size = (xp.linalg.vector_norm(t, axis=dims, keepdims=True) for t in (apart, size))
    return (after == 0) & (apart > NEAR * size)


class Averaging(NamedTuple):
    """The numbers of an average of points, each of the shape of the runs."""

    total: Array  # W
    longest: Array  # taumax


def next_share(before: Averaging, k: Array, tau: Array, r: float = POWER) -> tuple[Array, Averaging]:
    """w/W for the point after a step of size tau, and the numbers after it; 1 as long as no step was taken.

    Args:
        before: the numbers before.
        k: steps before this one.
        tau: the size of the step.
        r: how much later points count more.
    """
    xp = array_namespace(before.total)
    longest = xp.maximum(before.longest, tau)
    w = (k + 1 if r == 1 else (k + 1) ** r) * (longest * longest)
    total = before.total + w
    none = total <= 0
    return (w + none) / (total + none), Averaging(total, longest)


def noise_growth(r: float = POWER) -> float:
    """V(r), the limit of ||x - x_0||^2 over the sum of all squared steps of a run in pure noise."""
    return 1 - 2 / (r + 2) + 1 / (2 * r + 3)


def gradient_weights(k: Array, squares: Array) -> tuple[Array, Array]:
    """mu, the weight of old gradients in d, and the sum of the squared weights of all gradients in it.

    Args:
        k: steps before this one.
        squares: the sum before, 0 at the first step. Its root is rho.
    """
    xp = array_namespace(k)
    mu = xp.minimum(k / (k + WINDOW), xp.full_like(k, LATEST))
    return mu, mu**2 * squares + (1 - mu) ** 2


def counted(p_sq: Array, entries: float) -> Array:
    """q, from ||p||^2 / rho^2 and the number of entries m n."""
    return CERTAIN * entries + (1 - CERTAIN) / FULL * p_sq


def orthogonalized(d: Array, rounds: int = ROUNDS) -> Array:
    """U V^T of d = U S V^T, with singular values between about 0.7 and 1.2, for matrices on the last two axes.

    The quintic Newton-Schulz iteration of Muon, X <- a X + (b A + c A^2) X with A = X X^T, from X = d / ||d||. Norms
    whose squares are no normal numbers count as larger ones, because the iteration needs ||X|| <= 1.
    """
    xp = array_namespace(d)
    a, b, c = QUINTIC
    tall = d.shape[-2] > d.shape[-1]
    norms = xp.linalg.vector_norm(d, axis=(-2, -1), keepdims=True)
    X = d / xp.clip(norms, math.sqrt(xp.finfo(d.dtype).smallest_normal))
    X = xp.matrix_transpose(X) if tall else X
    for _ in range(rounds):
        A = X @ xp.matrix_transpose(X)
        X = a * X + (b * A + c * (A @ A)) @ X
    return xp.matrix_transpose(X) if tall else X
