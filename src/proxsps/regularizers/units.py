"""One group for each unit of a network: the slices of several tensors that make one channel are zero together."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._diagonal import threshold_norms, threshold_segments
from proxsps.regularizers._layout import Layout, UnitTensor, unit_sizes
from proxsps.regularizers._support import check_weight, guarded, numbers_are_read, where_or_zero, wide, widened
from proxsps.regularizers.base import Regularizer
from proxsps.regularizers.structure import Scalar, Units


@dataclass(frozen=True, eq=False, repr=False)
class UnitLasso(Regularizer):
    """phi(x) = lam sum_g w_g ||x_g|| over units g, each with slices of several tensors; acts on all tensors jointly.

    prox(z)_g = max(1 - alpha lam w_g / ||z_g||, 0) z_g, as in `GroupLasso`. `proxsps.sparsity.unit_groups` makes it
    from a network.

    Args:
        lam: weight.
        tensors: one for each tensor of the parameter group, in its order.
        weights: w_g, one for each unit; None for the square root of the number of entries of the unit.
    """

    lam: float
    tensors: tuple[UnitTensor, ...]
    weights: NDArray[np.float64] = None  # type: ignore[assignment]  # filled in by __post_init__
    joint: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        check_weight(self, lam=self.lam)
        tensors = tuple(self.tensors)
        if not tensors or not all(isinstance(tensor, UnitTensor) for tensor in tensors):
            raise ValueError(f"UnitLasso: tensors must be UnitTensor objects, at least one, got {self.tensors!r}.")
        sizes = unit_sizes(tensors)
        weights = np.sqrt(sizes) if self.weights is None else np.array(self.weights, dtype=np.float64)
        if weights.shape != sizes.shape or not np.isfinite(weights).all() or (weights < 0).any():
            raise ValueError(
                f"UnitLasso: weights must be {len(sizes)} finite numbers >= 0, one for each unit; "
                f"got {np.shape(self.weights)}. Leave them out for the square root of the units' sizes."
            )
        weights.setflags(write=False)
        object.__setattr__(self, "tensors", tensors)
        object.__setattr__(self, "weights", weights)

    @classmethod
    def from_units(
        cls,
        lam: float,
        shapes: Sequence[Sequence[int]],
        units: Sequence[Sequence[tuple[int, int, int]]],
        weights: ArrayLike | None = None,
    ) -> UnitLasso:
        """The same from a list of units, each a list of slices (tensor, dim, index).

        Raises ValueError if groups overlap: a slice in two units, or a tensor that is cut along two dims.
        """
        dims: dict[int, int] = {}
        ids = [np.zeros(0, dtype=np.int64)] * len(shapes)
        for unit, slices in enumerate(units):
            for tensor, dim, index in slices:
                if tensor not in dims:
                    dims[tensor], ids[tensor] = dim, np.full(shapes[tensor][dim], -1, dtype=np.int64)
                if dims[tensor] != dim or ids[tensor][index] not in (-1, unit):
                    other = "a unit along another dim" if dims[tensor] != dim else f"unit {ids[tensor][index]}"
                    raise ValueError(
                        f"UnitLasso: groups overlap: slice {index} along dim {dim} of tensor {tensor} is in unit "
                        f"{unit} and shares entries with {other}. Put each entry into one unit only."
                    )
                ids[tensor][index] = unit
        missing = [i for i in range(len(shapes)) if i not in dims]
        if missing:
            raise ValueError(f"UnitLasso: tensors {missing} have no unit; put them into another parameter group.")
        tensors = tuple(UnitTensor(shape, dims[i], ids[i]) for i, shape in enumerate(shapes))
        return cls(lam, tensors, None if weights is None else np.asarray(weights))  # type: ignore[arg-type]

    @property
    def units(self) -> int:
        """Number of units."""
        return len(self.weights)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Number of entries of each unit."""
        return unit_sizes(self.tensors)

    def norms(self, x: Array) -> Array:
        """Euclidean norm of each unit of the joint vector."""
        return self._layout.norms(self._layout.split(wide(x)))

    def value(self, x: Array) -> Array:
        """Weighted sum of the units' norms."""
        norms = self.norms(x)
        return self.lam * array_namespace(x).sum(self._layout.weights(norms) * norms)

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Block soft thresholding of each unit at alpha lam w_g; entries without a unit stay."""
        return unit_soft_threshold(z, alpha * self.lam, layout=self._layout)

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """A unit is 0 or z_i r / (r + alpha_i lam w_g), where r is its own norm, found by Newton's method."""
        return unit_soft_threshold_diagonal(z, alpha * self.lam, layout=self._layout)

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array:
        """Derivative of block soft thresholding."""
        return unit_soft_threshold_jvp(z, v, alpha * self.lam, layout=self._layout)

    def joint_structure(self, shapes: Sequence[tuple[int, ...]]) -> Units | None:
        """lam w_g times the norm of each unit; None if tensors of the units are missing."""
        if [tuple(shape) for shape in shapes] != [tensor.shape for tensor in self.tensors]:
            return None
        dims = [tuple(d for d in range(len(t.shape)) if d != t.dim) for t in self.tensors]
        return Units(Scalar(l1=self.lam * self.weights), dims, np.concatenate([t.ids for t in self.tensors]))

    def subgradient(self, x: Array) -> Array:
        """Entries lam w_g x_g / ||x_g||, and 0 for units that are 0."""
        return _unit_directions(x, self.lam, layout=self._layout)

    def at(self, index: int) -> Regularizer:
        """A stand-in for one tensor of the group, which checks the shape of this tensor."""
        return _OneTensor(self, index)

    @cached_property
    def _layout(self) -> Layout:
        return Layout(self.tensors, self.weights)

    @cached_property
    def _digest(self) -> str:
        content = hashlib.sha256(self.weights.tobytes())
        for tensor in self.tensors:
            content.update(repr((tensor.shape, tensor.dim)).encode() + tensor.ids.tobytes())
        return content.hexdigest()[:16]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, UnitLasso):
            return NotImplemented
        return (self.lam, self._digest) == (other.lam, other._digest)

    def __hash__(self) -> int:
        return hash((self.lam, self._digest))

    def __repr__(self) -> str:
        # Checkpoints hold this text to compare regularisers: it is short, but different for different contents.
        return f"UnitLasso(lam={self.lam!r}, {self.units} units of {len(self.tensors)} tensors, digest {self._digest})"

    def __reduce__(self) -> tuple[Any, ...]:
        return UnitLasso, (self.lam, self.tensors, self.weights)  # without what is cached


class _OneTensor(Regularizer):
    """The index-th tensor of a `UnitLasso`: it can be checked, but has no value."""

    def __init__(self, owner: UnitLasso, index: int) -> None:
        self._owner, self._index = owner, index

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise an error for a tensor that is not the one the units were made for."""
        tensors = self._owner.tensors
        wanted = tensors[self._index].shape if self._index < len(tensors) else None
        if wanted != tuple(shape):
            raise ValueError(
                f"UnitLasso: tensor {self._index} of the group must have shape {wanted}, got {tuple(shape)}; pass the "
                "parameters in the order in which the units were made, as unit_groups does."
            )

    def value(self, x: Array) -> Array:
        """Not defined."""
        raise TypeError("UnitLasso acts on all tensors of its group together, not on one of them.")

    def prox(self, z: Array, alpha: Array | float) -> Array:
        """Not defined."""
        return self.value(z)


def _join(parts: list[Array]) -> Array:
    xp = array_namespace(*parts)
    return xp.concat([xp.reshape(part, (-1,)) for part in parts])


@widened
def unit_soft_threshold(z: Array, threshold: Array | float, *, layout: Layout) -> Array:
    """Prox of threshold * (weighted sum of the units' norms): max(1 - threshold w_g / ||z_g||, 0) z_g."""
    zs = layout.split(z)
    norms = layout.norms(zs)
    limits = threshold * layout.weights(norms)
    alive = norms > limits
    factors = layout.spread(where_or_zero(alive, 1 - limits / guarded(alive, norms)), 1.0)
    return _join([factor * part for factor, part in zip(factors, zs, strict=True)])


@widened
def unit_soft_threshold_diagonal(z: Array, thresholds: Array | float, *, layout: Layout) -> Array:
    """The same in a diagonal metric: argmin_y sum_g w_g ||y_g|| + sum_i (y_i - z_i)^2 / (2 t_i)."""
    units = _Units(layout)
    # Entries without a unit have the threshold 0, and stay.
    limits = thresholds * units.spread(layout.weights(z), 0.0)
    if numbers_are_read() and (y := threshold_segments(z, limits, layout.segments)) is not None:
        return y
    return threshold_norms(z, limits, units)


class _Units(NamedTuple):
    """The units of a joint vector as groups of its entries."""

    layout: Layout

    def total(self, x: Array) -> Array:
        return self.layout.totals(self.layout.split(x))

    def largest(self, x: Array) -> Array:
        return self.layout.largest(self.layout.split(x))

    def spread(self, numbers: Array, otherwise: float = 1.0) -> Array:
        xp = array_namespace(numbers)
        parts = zip(self.layout.spread(numbers, otherwise), self.layout.tensors, strict=True)
        return _join([xp.broadcast_to(part, tensor.shape) for part, tensor in parts])


@widened
def unit_soft_threshold_jvp(z: Array, v: Array, threshold: Array | float, *, layout: Layout) -> Array:
    """Derivative of `unit_soft_threshold` at z along v.

    With r = threshold w_g / ||z_g||: (1 - r) v_g + r <z_g, v_g> z_g / ||z_g||^2 where r < 1, 0 elsewhere.
    """
    zs, vs = layout.split(z), layout.split(v)
    norms = layout.norms(zs)
    limits = threshold * layout.weights(norms)
    alive = norms > limits
    norms = guarded(alive, norms)
    ratio = limits / norms
    along = layout.spread(where_or_zero(alive, ratio * (layout.sums(zs, vs) / norms) / norms), 0.0)
    straight = layout.spread(where_or_zero(alive, 1 - ratio), 1.0)
    return _join([a * part + b * base for a, part, b, base in zip(straight, vs, along, zs, strict=True)])


@widened
def _unit_directions(x: Array, lam: float, *, layout: Layout) -> Array:
    xs = layout.split(x)
    norms = layout.norms(xs)
    factors = where_or_zero(norms > 0, lam * layout.weights(norms) / guarded(norms > 0, norms))
    return _join([factor * part for factor, part in zip(layout.spread(factors, 0.0), xs, strict=True)])


__all__ = ["UnitLasso", "UnitTensor", "unit_soft_threshold", "unit_soft_threshold_diagonal", "unit_soft_threshold_jvp"]
