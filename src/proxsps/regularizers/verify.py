"""Compare a regulariser with its definition at random points: a wrong prox trains without an error, and wrongly.

At y = prox(z) the objective F(c) = phi(c) + sum_i (c_i - z_i)^2 / (2 alpha_i) of a convex phi satisfies

    F(c) >= F(y) + sum_i (c_i - y_i)^2 / (2 alpha_i) + mu/2 ||c - y||^2    for every c,

with mu its strong convexity. So each candidate c tests the prox, the value and the convexity at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from proxsps.core.array import Array
from proxsps.regularizers._support import check_like, described
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Structure

Numbers = npt.NDArray[np.float64]

SIZES = (0.3, 1.0, 3.0)  # of the points, times `scale`
MOVES = (1.0, 0.1, 1e-3)  # how far candidates are from y
SINGLE = 12  # entries that are moved one by one


def check_regularizer(
    phi: Regularizer,
    shape: Sequence[int],
    *,
    alphas: Sequence[float] = (0.1, 1.0, 10.0),
    scale: float = 1.0,
    library: str = "torch",
    seed: int = 0,
) -> None:
    """Check a regulariser of your own at random points; raise an error that says what is wrong.

    `prox` is compared with `value`, and `structure`, `prox_jvp`, `prox_diagonal` and `subgradient` with both, where
    they are defined. A few hundred points cannot prove that a prox is right, but usual mistakes do not pass: a
    wrong sign, threshold or step size, another shape or dtype, a function that is not convex.

    Args:
        phi: the regulariser.
        shape: of the tensor; small ones are enough. If phi is `joint`, of the vector of all entries.
        alphas: step sizes of the prox.
        scale: size of the entries of the points. Choose it such that phi has an effect on some entries, not on all.
        library: the module of the arrays: "torch", "numpy" or "jax.numpy". Derivatives are checked in double
            precision only, which JAX has if jax_enable_x64 is set.
        seed: of the points.

    Raises:
        ValueError: a result does not fit the definition, or phi does not fit the shape.

    Examples:
        >>> from proxsps import L1, check_regularizer
        >>> class Half(L1):
        ...     def prox(self, z, alpha):
        ...         return L1(self.lam / 2).prox(z, alpha)
        >>> check_regularizer(L1(0.5), (3, 4))
        >>> check_regularizer(Half(0.5), (3, 4))  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: Half.prox(z, 0.1) does not minimise value(y) + ||y - z||^2 / (2 alpha): ...
    """
    phi.check(tuple(shape))
    rng = np.random.default_rng(seed)
    check = _Check(phi, tuple(shape), import_module(library), rng)
    points = [scale * size * rng.standard_normal(shape) for size in SIZES]
    for alpha in alphas:
        check.prox(points, float(alpha))
        check.derivative(points, float(alpha))
        check.structure(points, float(alpha))
        if phi.has_diagonal_prox:
            check.diagonal(points, float(alpha))
    if type(phi).subgradient is not Regularizer.subgradient:
        check.subgradient(points)


class _Check:
    """The checks of one regulariser. Numbers are NumPy arrays in double precision; `_array` makes those of phi."""

    def __init__(self, phi: Regularizer, shape: tuple[int, ...], library: Any, rng: np.random.Generator) -> None:
        self.phi, self.shape, self.library, self.rng = phi, shape, library, rng
        self.name = type(phi).__name__
        self.eps = float(self.library.finfo(self._array(np.zeros(1)).dtype).eps)
        self.slack = self.eps**0.6  # relative: 4e-10 in double precision, 7e-5 in single

    def prox(self, points: Sequence[Numbers], alpha: float) -> None:
        """Shape and dtype, the inequality above, and firm non-expansiveness."""
        single = self._array(points[0].astype(np.float32))
        self._read("prox", self.phi.prox(single, alpha), single)
        ys = [self._prox(z, alpha) for z in points]
        for z, y in zip(points, ys, strict=True):
            self._minimises(f"prox(z, {alpha:g})", z, y, np.full(self.shape, alpha), ys)
        for i, (z, y) in enumerate(zip(points, ys, strict=True)):
            for other, p in zip(points[:i], ys, strict=False):
                product, square = float(np.sum((y - p) * (z - other))), float(np.sum((y - p) ** 2))
                if square - product > self.slack * (1 + square):
                    self._fail(
                        f"prox(z, {alpha:g}) is not firmly non-expansive: ||p - q||^2 = {square:.6g} is larger than "
                        f"<p - q, z - w> = {product:.6g}, so that it is no prox of a convex function"
                    )

    def _minimises(self, what: str, z: Numbers, y: Numbers, alpha: Numbers, others: Sequence[Numbers]) -> None:
        mu, least = float(self.phi.strong_convexity), self._objective(y, z, alpha)
        if not math.isfinite(least):
            self._fail(
                f"value({what}) is {least:g}: the prox must lie in the domain of phi. If that is a matter of rounding, "
                "let value allow for it"
            )
        candidates = list(self._candidates(z, y, others))
        found = np.array([self._objective(c, z, alpha) for c in candidates])
        rounding = self.slack * (1 + abs(least) + abs(found))
        if (found < least - rounding).any():
            best = int(np.argmin(found))
            away, gap = np.linalg.norm(candidates[best] - y), least - found[best]
            self._fail(
                f"{what} does not minimise value(y) + ||y - z||^2 / (2 alpha): a point at a distance of {away:.1g} is "
                f"lower by {gap:.1g}. Check prox and value"
            )
        curved = np.array([float(np.sum((c - y) ** 2 * (1 / alpha + mu))) / 2 for c in candidates])
        if (found < least + curved - rounding).any():
            of = f" whose strong_convexity is {mu:g}" if mu else ""
            self._fail(
                f"{what} and value do not belong to one convex function{of}: one of them is wrong, or it is not convex"
            )

    def _candidates(self, z: Numbers, y: Numbers, others: Sequence[Numbers]) -> Iterator[Numbers]:
        yield z
        yield np.zeros_like(y)
        yield from others
        ways = [y - z, *(other - y for other in others), *(self.rng.standard_normal(self.shape) for _ in range(3))]
        for entry in self.rng.permutation(y.size)[:SINGLE]:
            ways.append(np.zeros(y.shape))
            ways[-1].flat[entry] = 1.0
        for way in ways:
            for move in MOVES:
                yield y + move * way
                yield y - move * way

    def derivative(self, points: Sequence[Numbers], alpha: float) -> None:
        """`prox_jvp` against differences; those in single precision would be too coarse."""
        h = self.eps ** (1 / 3)
        for z in points if self.eps < 1e-10 else ():
            v = self.rng.standard_normal(self.shape)
            y = self.phi.prox(self._array(z), alpha)
            found = self.phi.prox_jvp(self._array(z), y, self._array(v), alpha)
            if found is None:
                return
            wanted = (self._prox(z + h * v, alpha) - self._prox(z - h * v, alpha)) / (2 * h)
            self._same("prox_jvp", self._read("prox_jvp", found, y), wanted, "differences of prox", 1e-5)

    def structure(self, points: Sequence[Numbers], alpha: float) -> None:
        """`structure` against `prox`."""
        own = None if self.phi.joint else self.phi.structure(self.shape)
        for z in points if own is not None else ():
            found = self._structured(own, z, alpha)
            self._same("structure", found, self._prox(z, alpha), f"prox(z, {alpha:g})", self.slack)

    def _structured(self, own: Structure | None, z: Numbers, alpha: float) -> Numbers:
        """The prox that a step computes from the structure."""
        if isinstance(own, Quadratic):
            center = 0.0 if own.center is None else np.asarray(own.center, dtype=float)
            return np.asarray((z + alpha * float(own.lam) * center) / (1 + alpha * float(own.lam)))
        if isinstance(own, Rows):
            norms = np.sqrt(np.sum(z * z, axis=own.dims, keepdims=True))
            shrunk = np.asarray(own.psi.prox(self._array(norms), alpha), dtype=float)
            return np.asarray(z * shrunk / np.where(norms > 0, norms, 1.0))
        if not isinstance(own, Entries):
            self._fail(f"structure{self.shape} returned {own!r}; return Entries, Rows, Quadratic or None")
        # A step may cut and join the entries as it likes.
        parts = [self._array(part) for part in np.array_split(z.reshape(-1), 2) if part.size]
        proxes = [np.asarray(own.psi.prox(part, alpha), dtype=float) for part in parts]
        return np.concatenate(proxes).reshape(self.shape)

    def diagonal(self, points: Sequence[Numbers], alpha: float) -> None:
        """`prox_diagonal` against `prox` for equal step sizes, and against the definition for others."""
        for z in points:
            equal = self._diagonal(z, np.full(self.shape, alpha))
            self._same("prox_diagonal", equal, self._prox(z, alpha), f"prox(z, {alpha:g})", self.slack)
            steps = alpha * np.exp(self.rng.standard_normal(self.shape))
            self._minimises("prox_diagonal(z, alpha)", z, self._diagonal(z, steps), steps, [equal])

    def subgradient(self, points: Sequence[Numbers]) -> None:
        """phi(c) >= phi(x) + <s, c - x>."""
        for x in points:
            s = self._read("subgradient", self.phi.subgradient(self._array(x)), self._array(x))
            for c in self._candidates(np.zeros_like(x), x, points):
                bound, found = self._value(x) + float(np.sum(s * (c - x))), self._value(c)
                if found < bound - self.slack * (1 + abs(bound)):
                    self._fail(f"subgradient(x) is none: value(y) is {found:.6g}, below the tangent {bound:.6g}")

    def _objective(self, y: Numbers, z: Numbers, alpha: Numbers) -> float:
        return self._value(y) + float(np.sum((y - z) ** 2 / alpha)) / 2

    def _value(self, x: Numbers) -> float:
        found: Any = self.phi.value(self._array(x))
        if getattr(found, "shape", None) != ():
            self._fail(f"value(x) must return a 0-d array, got {described(found)}")
        if math.isnan(number := float(found)):
            self._fail("value(x) is NaN at a finite x")
        return number

    def _prox(self, z: Numbers, alpha: float) -> Numbers:
        return self._read("prox", self.phi.prox(self._array(z), alpha), self._array(z))

    def _diagonal(self, z: Numbers, alpha: Numbers) -> Numbers:
        found = self.phi.prox_diagonal(self._array(z), self._array(alpha))
        return self._read("prox_diagonal", found, self._array(z))

    def _read(self, method: str, found: Any, z: Array) -> Numbers:
        """A result as numbers, if it is an array like z without NaN or infinity."""
        check_like(self.phi, method, found, z)
        numbers = np.asarray(found, dtype=np.float64)
        if not np.isfinite(numbers).all():
            self._fail(f"{method} returns NaN or infinity at a finite point")
        return numbers

    def _same(self, method: str, found: Numbers, wanted: Numbers, other: str, tolerance: float) -> None:
        if found.shape != wanted.shape or not np.allclose(found, wanted, rtol=tolerance, atol=tolerance):
            apart = f"by {np.abs(found - wanted).max():.2g}" if found.shape == wanted.shape else "in shape"
            self._fail(f"{method} does not agree with {other}: they differ {apart}")

    def _array(self, numbers: npt.NDArray[Any]) -> Array:
        return self.library.asarray(numbers)

    def _fail(self, what: str) -> NoReturn:
        raise ValueError(f"{self.name}.{what}.")


__all__ = ["check_regularizer"]
