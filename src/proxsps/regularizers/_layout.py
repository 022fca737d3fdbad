"""Units of several tensors: which slices belong to which unit, and sums over units in any array library."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import array_api_compat
import numpy as np
from numpy.typing import ArrayLike, NDArray

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._diagonal import Segments


@dataclass(frozen=True, eq=False)
class UnitTensor:
    """Which slices of one tensor belong to which unit.

    Args:
        shape: shape of the tensor.
        dim: the dim that counts the slices.
        ids: one unit for each slice along `dim`, counted from 0; -1 for a slice without penalty.
    """

    shape: tuple[int, ...]
    dim: int
    ids: NDArray[np.int64]

    def __init__(self, shape: Iterable[int], dim: int, ids: ArrayLike) -> None:
        shape, given = tuple(int(n) for n in shape), np.array(ids)
        if not -len(shape) <= dim < len(shape):
            raise ValueError(f"UnitTensor: dim={dim} is not a dim of a tensor of shape {shape}.")
        dim %= len(shape)
        if given.shape != (shape[dim],) or given.dtype.kind not in "iu" or (given < -1).any():
            raise ValueError(
                f"UnitTensor: ids must be {shape[dim]} integers >= -1, one for each slice along dim {dim} of a tensor "
                f"of shape {shape}; got shape {given.shape} and dtype {given.dtype}."
            )
        given = given.astype(np.int64)
        given.setflags(write=False)
        for name, value in (("shape", shape), ("dim", dim), ("ids", given)):
            object.__setattr__(self, name, value)

    @property
    def slice_size(self) -> int:
        """Entries of one slice."""
        return math.prod(self.shape) // max(self.shape[self.dim], 1)

    def _identity(self) -> tuple[Any, ...]:
        return self.shape, self.dim, self.ids.tobytes()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, UnitTensor) and self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())


class Layout:
    """NumPy index arrays that turn sums over slices into sums over units, and back; copied to a device once."""

    def __init__(self, tensors: tuple[UnitTensor, ...], weights: NDArray[np.float64]) -> None:
        self.tensors = tensors
        self.size = sum(math.prod(tensor.shape) for tensor in tensors)
        owners = np.concatenate([tensor.ids for tensor in tensors])
        units = len(weights)
        # One more place for slices without a unit.
        self._arrays: dict[str, NDArray[Any]] = {"weights": weights, "owners": np.where(owners < 0, units, owners)}
        self._buckets = self._gather_indices(owners, units)
        self._copies: dict[tuple[str, str, str], Array] = {}

    def _gather_indices(self, owners: NDArray[np.int64], units: int) -> list[str]:
        """Slices of each unit, in matrices with one row per unit; units with similar numbers of slices share a matrix.

        The array API has no sum over segments. Rows are padded with the index of a 0.
        """
        order = np.argsort(owners, kind="stable")
        order = order[np.searchsorted(owners[order], 0) :]
        counts = np.bincount(owners[order], minlength=units)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        widths = 2 ** np.ceil(np.log2(counts)).astype(np.int64)
        names, rows = [], []
        for width in np.unique(widths):
            chosen = np.flatnonzero(widths == width)
            place = np.arange(width)
            index = np.full((len(chosen), width), len(owners), dtype=np.int64)
            filled = place < counts[chosen, None]
            index[filled] = order[(starts[chosen, None] + place)[filled]]
            self._arrays[f"bucket {width}"] = index
            names.append(f"bucket {width}")
            rows.append(chosen)
        self._arrays["places"] = np.argsort(np.concatenate(rows), kind="stable")
        return names

    def array(self, name: str, like: Array) -> Array:
        """An index array, or the weights, in the library and on the device of another array."""
        xp = array_namespace(like)
        dtype = like.dtype if name == "weights" else xp.int64
        if array_api_compat.is_jax_array(like):
            return xp.asarray(self._arrays[name], dtype=like.dtype if name == "weights" else None)
        device = array_api_compat.device(like)
        key = (name, str(dtype), f"{xp.__name__} {device}")
        if key not in self._copies:
            self._copies[key] = xp.asarray(self._arrays[name].copy(), dtype=dtype, device=device)
        return self._copies[key]

    def weights(self, like: Array) -> Array:
        """w_g as an array."""
        return self.array("weights", like)

    def split(self, x: Array) -> list[Array]:
        """The tensors that make up the joint vector."""
        xp = array_namespace(x)
        if tuple(x.shape) != (self.size,):
            raise ValueError(
                f"UnitLasso: its {len(self.tensors)} tensors have {self.size} entries, got an array of shape "
                f"{tuple(x.shape)}. It acts on all tensors of its group at once: each must have a gradient."
            )
        parts, start = [], 0
        for tensor in self.tensors:
            stop = start + math.prod(tensor.shape)
            parts.append(xp.reshape(x[start:stop], tensor.shape))
            start = stop
        return parts

    def sums(self, xs: list[Array], ys: list[Array]) -> Array:
        """<x_g, y_g> of each unit."""
        return self.totals([x * y for x, y in zip(xs, ys, strict=True)])

    def totals(self, xs: list[Array]) -> Array:
        """The sum of each unit's entries."""
        return self._reduced(xs, array_namespace(*xs).sum, 0.0)

    def largest(self, xs: list[Array]) -> Array:
        """The largest entry of each unit."""
        return self._reduced(xs, array_namespace(*xs).max, -math.inf)

    def _reduced(self, xs: list[Array], reduce: Callable[..., Array], neutral: float) -> Array:
        """Sums or largest entries of the units: over slices first, then over the slices of each unit."""
        xp = array_namespace(*xs)
        slices = []
        for x, tensor in zip(xs, self.tensors, strict=True):
            others = tuple(d for d in range(x.ndim) if d != tensor.dim)
            if 0 in x.shape:  # the largest of no entries raises
                slices.append(xp.full_like(xp.sum(x, axis=others), neutral))
            else:
                slices.append(reduce(x, axis=others) if others else x)
        padded = xp.concat([*slices, xp.full_like(slices[0][:1], neutral)])
        found = []
        for name in self._buckets:
            index = self.array(name, padded)
            rows = xp.reshape(xp.take(padded, xp.reshape(index, (-1,)), axis=0), index.shape)
            found.append(reduce(rows, axis=1))
        return xp.take(xp.concat(found), self.array("places", padded), axis=0)

    def norms(self, xs: list[Array]) -> Array:
        """||x_g|| of each unit."""
        return array_namespace(*xs).sqrt(self.sums(xs, xs))

    def spread(self, factors: Array, otherwise: float) -> list[Array]:
        """One factor for each slice, shaped to multiply its tensor; `otherwise` for slices without a unit."""
        xp = array_namespace(factors)
        padded = xp.concat([factors, xp.full_like(factors[:1], otherwise)])
        slices = xp.take(padded, self.array("owners", factors), axis=0)
        out, start = [], 0
        for tensor in self.tensors:
            stop = start + tensor.shape[tensor.dim]
            shape = tuple(n if d == tensor.dim else 1 for d, n in enumerate(tensor.shape))
            out.append(xp.reshape(slices[start:stop], shape))
            start = stop
        return out

    @cached_property
    def segments(self) -> Segments:
        """The entries of the joint vector unit by unit; those without a unit are left out."""
        owners = []
        for tensor in self.tensors:
            shape = [n if d == tensor.dim else 1 for d, n in enumerate(tensor.shape)]
            owners.append(np.broadcast_to(tensor.ids.reshape(shape), tensor.shape).reshape(-1))
        owner = np.concatenate(owners)
        order = np.argsort(owner, kind="stable")
        order = order[np.searchsorted(owner[order], 0) :]
        counts = np.bincount(owner[order], minlength=len(self._arrays["weights"]))
        return Segments(np.concatenate([[0], np.cumsum(counts)]), order)


def unit_sizes(tensors: tuple[UnitTensor, ...]) -> NDArray[np.int64]:
    """Entries of each unit; every unit from 0 to the largest must have some."""
    units = max((int(tensor.ids.max(initial=-1)) for tensor in tensors), default=-1) + 1
    sizes = np.zeros(units, dtype=np.int64)
    for tensor in tensors:
        counts = np.bincount(tensor.ids[tensor.ids >= 0], minlength=units)
        sizes += counts * tensor.slice_size
    if not units or (sizes == 0).any():
        empty = np.flatnonzero(sizes == 0).tolist()
        raise ValueError(f"UnitLasso: units must be numbered from 0 without gaps, but {empty or 'all'} have no entry.")
    return sizes
