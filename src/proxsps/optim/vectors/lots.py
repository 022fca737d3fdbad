"""Tensors of a block that are processed at once, with their prox: the same on hosts and on devices.

Entries are joined. Of a regulariser of which only the prox is known, whole tensors are taken, and tensors of one shape
together if that is allowed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proxsps.core.array import Array
from proxsps.optim.blocks import Block
from proxsps.optim.lists import join, spread, widened
from proxsps.regularizers import Regularizer
from proxsps.regularizers.base import flatten, unflatten
from proxsps.regularizers.structure import Scalar

Step = Tensor | float  # a step size of a prox, or one for each entry; on a device it may be 0


@dataclass
class Lot(ABC):
    """Tensors of a block as one."""

    block: int
    columns: list[list[Tensor]]  # parameters and slopes; then averages, or in a metric on a device D^-1 d and D
    counts: list[Tensor] = field(default_factory=list, kw_only=True)  # of squares in averages so far, on the host
    fresh = False  # whether the prox returns memory that nobody else uses
    sampled = False  # whether the first entries are a sample of all

    @property
    def size(self) -> int:
        """The number of entries."""
        return sum([x.numel() for x in self.columns[0]])

    @abstractmethod
    def gather(self, tensors: Sequence[Tensor], exact: bool = False) -> Tensor:
        """The tensors of a column as one, in at least f32; `exact` in doubles."""

    @abstractmethod
    def scatter(self, y: Tensor, tensors: list[Tensor]) -> None:
        """The inverse of `gather`."""

    @abstractmethod
    def prox(self, z: Tensor, step: Step) -> Tensor:
        """The prox; z itself where a step on a device is 0. It may be computed in the memory of z."""

    def tangent(self, z: Tensor, y: Tensor, p: Tensor, step: Step) -> Tensor | None:
        """The derivative of the prox along p, or None if it is not cheap."""
        return None


def wide(x: Tensor, exact: bool) -> Tensor:
    """Entries in at least f32, or in doubles."""
    return x.double() if exact else widened(x)


def stepping(step: Any) -> Any:
    """A step size to divide by, 1 if it is 0: a block with cap 0 does not move."""
    if isinstance(step, Tensor):
        return torch.where(step == 0, torch.ones_like(step), step)
    return step or 1.0


def where_moved(step: Step, y: Tensor, z: Tensor) -> Tensor:
    """y, but z where a step on a device is 0."""
    return torch.where(step == 0, z, y) if isinstance(step, Tensor) else y


def resting(psi: Any, alpha: Tensor | float) -> Any:
    """The function without its bounds where the cap is 0, so that entries outside of them stay where they are."""
    if not (isinstance(alpha, Tensor) and isinstance(psi, Scalar) and psi.bounded):
        return psi  # blocks whose cap is known to be 0 are affine
    moves, inf = alpha > 0, torch.full_like(alpha, math.inf)
    return psi._replace(lower=torch.where(moves, psi.lower, -inf), upper=torch.where(moves, psi.upper, inf))


@dataclass
class Bundle(Lot):
    """Entries of tensors, joined; of an affine block, or of one whose regulariser acts on each entry."""

    psi: Any = None  # None if affine
    centers: list[Tensor] = field(default_factory=list)
    sampled = True

    @property
    def fresh(self) -> bool:  # type: ignore[override]
        """Proxes of known functions are computed in the memory of z."""
        return isinstance(self.psi, Scalar)

    def gather(self, tensors: Sequence[Tensor], exact: bool = False) -> Tensor:
        """One vector."""
        return wide(join(tensors), exact)

    def scatter(self, y: Tensor, tensors: list[Tensor]) -> None:
        """From one vector."""
        spread(y.to(tensors[0].dtype), tensors)

    def prox(self, z: Tensor, step: Step) -> Tensor:
        """Entry by entry."""
        psi = self.psi
        if not isinstance(psi, Scalar):
            return where_moved(step, psi.prox(z, stepping(step)), z)
        if psi.l1:
            z = _shrink(z, step * psi.l1)
        if psi.l2:
            z.div_(1 + step * psi.l2)
        return z.clamp_(psi.lower, psi.upper) if psi.bounded else z

    def tangent(self, z: Tensor, y: Tensor, p: Tensor, step: Step) -> Tensor | None:
        """For known functions it follows from y alone."""
        psi = self.psi
        if not isinstance(psi, Scalar):
            found: Tensor | None = psi.prox_jvp(z, y, p, step)
            return found
        # The derivatives of torch's own functions are 0 where they do not move, else p.
        p = torch.ops.aten.softshrink_backward(p, y, 0.0) if psi.l1 else p
        p = p / (1 + step * psi.l2) if psi.l2 else p
        return torch.ops.aten.hardtanh_backward(p, y, psi.lower, psi.upper) if psi.bounded else p


def _shrink(z: Tensor, threshold: Step) -> Tensor:
    """Soft thresholding in the memory of z; with a threshold as a tensor in twice as much."""
    if isinstance(threshold, Tensor):
        return z.sub_(z.clamp(-threshold, threshold))
    threshold = min(threshold, torch.finfo(z.dtype).max)  # torch raises beyond it
    if torch.compiler.is_compiling():
        return torch.nn.functional.softshrink(z, threshold)
    torch.ops.aten.softshrink.out(z, threshold, out=z)
    return z


@dataclass
class Pile(Lot):
    """Tensors to which any prox is applied in one call."""

    phi: Regularizer
    in_metric: bool
    stacked: bool  # tensors of one shape on a first axis
    joined: bool  # the entries of all tensors as one vector

    def gather(self, tensors: Sequence[Tensor], exact: bool = False) -> Tensor:
        """A vector, a stack, or a tensor as it is."""
        tensors = [wide(t, exact) for t in tensors]
        if self.joined:
            vector: Tensor = flatten(tensors)
            return vector
        return torch.stack(tensors) if self.stacked else tensors[0]

    def scatter(self, y: Tensor, tensors: list[Tensor]) -> None:
        """Copies of the parts."""
        parts = unflatten(y, tensors) if self.joined else y.unbind() if self.stacked else [y]
        torch._foreach_copy_(tensors, list(parts))

    def prox(self, z: Tensor, step: Step) -> Tensor:
        """The prox of each tensor, with one step size, or in a metric with one for each entry."""
        own = stepping(step)
        y = self.phi.prox_diagonal(z, own) if self.in_metric else self._each(self.phi.prox, z, own)
        return where_moved(step, y, z)

    def tangent(self, z: Tensor, y: Tensor, p: Tensor, step: Step) -> Tensor | None:
        """The derivative for each tensor."""
        if self.in_metric:
            return self.phi.prox_jvp(z, y, p, step) if self.phi.separable else None
        if self.stacked and type(self.phi).prox_jvp is Regularizer.prox_jvp:
            return None
        found: Tensor | None = self._each(self.phi.prox_jvp, z, y, p, step)
        return found

    def _each(self, formula: Callable[..., Array], *args: Step) -> Array:
        """A formula of one tensor and a last number, for one tensor or for each of a stack."""
        if not self.stacked:
            return formula(*args)
        return torch.func.vmap(formula, in_dims=(*[0] * (len(args) - 1), None))(*args)


def piles(block: Block, place: int, columns: Sequence[Sequence[Tensor]], counts: Sequence[Tensor]) -> Iterator[Pile]:
    """The piles of a block: a joint prox takes all tensors, others take what is alike."""
    phi, params, slopes = block.phi, block.params, block.slopes
    found: dict[object, list[int]] = defaultdict(list)
    for i, x in enumerate(params):
        own = not phi.joint and phi.at(block.indices[i]) is phi
        together: object = i
        if phi.joint:
            together = None
        elif block.in_metric and phi.separable and own:
            together = x.dtype
        elif not block.in_metric and getattr(phi, "batches", False) and own:
            together = (x.shape, x.dtype, slopes[i].dtype)
        found[together].append(i)
    for members in found.values():
        several, in_metric = len(members) > 1, block.in_metric
        own_phi = phi if phi.joint else phi.at(block.indices[members[0]])
        stacked, joined = several and not (in_metric or phi.joint), phi.joint or (several and in_metric)
        own_columns = [[tensors[i] for i in members] for tensors in columns]
        own_counts = [counts[i] for i in members] if counts else []
        yield Pile(place, own_columns, own_phi, in_metric, stacked, joined, counts=own_counts)
