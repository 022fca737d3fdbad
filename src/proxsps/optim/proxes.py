"""Proxes by torch, on hosts and devices: which tensors take one together, and known functions of each entry."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.lists import join, widened
from proxsps.regularizers import Regularizer
from proxsps.regularizers.base import flatten, unflatten
from proxsps.regularizers.structure import Scalar

# Functions of each entry. They take tensors that nobody else uses, because proxes of known functions are computed in
# their memory.


def entry_prox(psi: Any, z: Tensor, step: Tensor | float) -> Tensor:
    """The prox, in the memory of z if psi is known; z itself where a step on a device is 0."""
    if not isinstance(psi, Scalar):
        y: Tensor = psi.prox(z, stepping(step))
        return torch.where(step == 0, z, y) if isinstance(step, Tensor) else y
    if psi.l1:
        z = _shrink(z, step * psi.l1)
    if psi.l2:
        z.div_(1 + step * psi.l2)
    return z.clamp_(psi.lower, psi.upper) if psi.bounded else z


def _shrink(z: Tensor, threshold: Tensor | float) -> Tensor:
    """Soft thresholding in the memory of z; with a threshold as a tensor in twice as much."""
    if isinstance(threshold, Tensor):
        return z.sub_(z.clamp(-threshold, threshold))
    threshold = min(threshold, torch.finfo(z.dtype).max)  # torch raises beyond it
    if torch.compiler.is_compiling():
        return torch.nn.functional.softshrink(z, threshold)
    torch.ops.aten.softshrink.out(z, threshold, out=z)
    return z


def entry_tangent(psi: Any, z: Tensor, y: Tensor, p: Tensor, step: Tensor | float) -> Tensor | None:
    """The derivative of the prox along p, or None if it is not cheap; for known functions it follows from y alone."""
    if not isinstance(psi, Scalar):
        found: Tensor | None = psi.prox_jvp(z, y, p, step)
        return found
    # The derivatives of torch's own functions are 0 where they do not move, else p.
    p = torch.ops.aten.softshrink_backward(p, y, 0.0) if psi.l1 else p
    p = p / (1 + step * psi.l2) if psi.l2 else p
    return torch.ops.aten.hardtanh_backward(p, y, psi.lower, psi.upper) if psi.bounded else p


def entry_move(psi: Any, x: Tensor, y: Tensor) -> Tensor:
    """y - x for what `entry_prox` returned; a function of a user may return memory of its own."""
    return y.sub_(x) if isinstance(psi, Scalar) else y - x


def stepping(alpha: Any) -> Any:
    """A cap to divide by, 1 if it is 0: a block with cap 0 does not move."""
    if isinstance(alpha, Tensor):
        return torch.where(alpha == 0, torch.ones_like(alpha), alpha)
    return alpha or 1.0


def resting(psi: Any, alpha: Tensor | float) -> Any:
    """The function without its bounds where the cap is 0, so that entries outside of them stay where they are."""
    if not (isinstance(alpha, Tensor) and isinstance(psi, Scalar) and psi.bounded):
        return psi  # blocks whose cap is known to be 0 are affine
    moves, inf = alpha > 0, torch.full_like(alpha, math.inf)
    return psi._replace(lower=torch.where(moves, psi.lower, -inf), upper=torch.where(moves, psi.upper, inf))


class RowStack(NamedTuple):
    """Tensors of one block whose rows have one length, as matrices with one row for each group of entries."""

    block: int
    columns: list[list[Tensor]]  # parameters, slopes and averages
    order: tuple[int, ...] | None  # dims of tensors of one shape: tensor, counted dims, normed dims; None: in order
    length: int
    psi: Scalar

    @property
    def rows(self) -> int:
        """The number of rows of a column."""
        return sum(x.numel() for x in self.columns[0]) // self.length

    def matrix(self, *columns: int) -> Tensor:
        """Columns of one dtype one below the other, in at least f32; a view of a single tensor with rows in order."""
        tensors = [x for column in columns for x in self.columns[column]]
        if self.order is None:
            return widened(join(tensors).view(-1, self.length))
        stacked = tensors[0][None] if len(tensors) == 1 else torch.stack(tensors)
        return widened(stacked.permute(self.order).reshape(-1, self.length))

    def vector(self, matrix: Tensor) -> Tensor:
        """The entries of a matrix in the order of the tensors of a column."""
        if self.order is None:
            return matrix.reshape(-1)
        shape = (len(self.columns[0]), *self.columns[0][0].shape)
        moved = matrix.view([shape[d] for d in self.order])
        return moved.permute(sorted(range(len(self.order)), key=self.order.__getitem__)).reshape(-1)


def row_stacks(block: Any, place: int, columns: Sequence[Sequence[Tensor]], alone: float = math.inf) -> list[RowStack]:
    """The tensors of a block by the length of their rows, and by shape if these are not in order.

    Args:
        block: the block.
        place: its position.
        columns: lists of its tensors: parameters, slopes and averages.
        alone: entries beyond which a tensor is not stacked with others.
    """
    found: dict[tuple[object, ...], RowStack] = {}
    for i, (x, rows) in enumerate(zip(block.params, block.rows, strict=True)):
        if x.numel() == 0:
            continue
        ndim = x.dim()
        normed = range(ndim) if rows.dims is None else sorted(dim % ndim for dim in rows.dims)
        counted = [dim for dim in range(ndim) if dim not in normed]
        length = math.prod([x.shape[dim] for dim in normed])  # a list, which compilers can trace
        ordered = [*counted, *normed] == list(range(ndim))
        order = None if ordered else (0, *(dim + 1 for dim in counted), *(dim + 1 for dim in normed))
        dtypes = tuple([tensors[i].dtype for tensors in columns])
        key = (length, dtypes, rows.psi, None if ordered else (order, x.shape), i if x.numel() > alone else -1)
        if key not in found:
            found[key] = RowStack(place, [[] for _ in columns], order, length, resting(rows.psi, block.alpha))
        for own, tensors in zip(found[key].columns, columns, strict=True):
            own.append(tensors[i])
    return list(found.values())


class Pile(NamedTuple):
    """Tensors of a block to which any prox is applied in one call."""

    block: int
    phi: Regularizer
    members: list[int]  # their positions in the block
    in_metric: bool
    stacked: bool  # tensors of one shape on a first axis
    joined: bool  # the entries of all tensors as one vector

    def gather(self, tensors: Sequence[Tensor]) -> Tensor:
        """The tensors as one."""
        if self.joined:
            vector: Tensor = flatten(list(tensors))
            return vector
        return torch.stack(list(tensors)) if self.stacked else tensors[0]

    def split(self, y: Tensor, like: list[Tensor]) -> list[Tensor]:
        """The inverse of `gather`."""
        if self.joined:
            return unflatten(y, like)
        return list(y.unbind()) if self.stacked else [y]

    def prox(self, z: Tensor, step: Tensor | float) -> Tensor:
        """The prox of each tensor, with one step size, or in a metric with one for each entry."""
        y: Tensor = self.phi.prox_diagonal(z, step) if self.in_metric else self._each(self.phi.prox, z, step)
        return y

    def tangent(self, z: Tensor, y: Tensor, p: Tensor, step: Tensor | float) -> Tensor | None:
        """The derivative of the prox along p, or None if it is not cheap."""
        if self.in_metric:
            return self.phi.prox_jvp(z, y, p, step) if self.phi.separable else None
        if self.stacked and type(self.phi).prox_jvp is Regularizer.prox_jvp:
            return None
        found: Tensor | None = self._each(self.phi.prox_jvp, z, y, p, step)
        return found

    def _each(self, formula: Callable[..., Array], *args: Tensor | float) -> Array:
        """A formula of one tensor and a last number, for one tensor or for each of a stack."""
        if not self.stacked:
            return formula(*args)
        return torch.func.vmap(formula, in_dims=(*[0] * (len(args) - 1), None))(*args)


def piles(block: Any, place: int) -> Iterator[Pile]:
    """The piles of a block: a joint prox takes all tensors, others take what is alike."""
    phi, params, slopes = block.phi, block.params, block.slopes
    everything = list(range(len(params)))
    if phi.joint:
        yield Pile(place, phi, everything, block.in_metric, False, True)
        return
    found: dict[object, list[int]] = defaultdict(list)
    for i, x in enumerate(params):
        own = phi.at(block.indices[i]) is phi
        together: object = i
        if block.in_metric and phi.separable and own:
            together = x.dtype
        elif not block.in_metric and getattr(phi, "batches", False) and own:
            together = (x.shape, x.dtype, slopes[i].dtype)
        found[together].append(i)
    for members in found.values():
        several, in_metric, own = len(members) > 1, block.in_metric, phi.at(block.indices[members[0]])
        yield Pile(place, own, members, in_metric, several and not in_metric, several and in_metric)
