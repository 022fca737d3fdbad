"""What a regulariser is: a convex function phi with a value and a proximal operator.

A regulariser acts on one array of any array-API library and returns arrays of the same library, shape and dtype.
Front ends apply it tensor by tensor (`prox_all`, `value_all`), or, if `joint` is set, to all tensors of a parameter
group as one flat vector.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from proxsps.core.array import Array, array_namespace
from proxsps.regularizers._identity import Identified
from proxsps.regularizers._support import with_checked_steps
from proxsps.regularizers.structure import Entries, Structure, Units

DIAGONAL = "Zero, L2, L1, ElasticNet, GroupLasso, SparseGroupLasso, UnitLasso, NonNegative, Box and LInfBall"


class Regularizer(Identified, ABC):
    """A closed convex function phi with a known proximal operator.

    Subclasses are frozen dataclasses that implement `value` and `prox`. Four more methods are optional: `structure`
    makes steps fast, `prox_jvp` makes the search cheaper, `subgradient` lets `SPS` add phi to the loss, and
    `prox_diagonal` takes one step size per entry. A prox may return its argument itself.

    Two regularisers are equal if they have the same type and hold the same numbers and arrays, down to the last bit.
    """

    # Whether all tensors of a parameter group form one vector, instead of acting on each tensor by itself.
    joint: bool = False
    # Whether value and prox can be traced (jax.jit, CUDA graphs): no loop or shape that depends on data.
    traceable: ClassVar[bool] = True
    # Whether phi is a sum over single entries, so that it acts on any piece of a tensor by itself.
    separable: ClassVar[bool] = False
    # Whether torch.func.vmap may apply prox and prox_jvp to several tensors of one shape at once: it reads no
    # number and changes no array in place. A step then handles hundreds of small tensors in a few calls.
    batches: ClassVar[bool] = False
    # Whether `structure` is of one kind for all shapes, and depends on them only if it is `Rows`. A step then looks
    # only at the first tensor of a group. A class with its own `structure` has to set this.
    one_kind: ClassVar[bool] = True

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        with_checked_steps(cls)
        if "structure" in vars(cls) and "one_kind" not in vars(cls):
            cls.one_kind = False
        # Inherited ones belong to the prox of another class.
        for name in ("structure", "joint_structure", "batches", "one_kind") if "prox" in vars(cls) else ():
            if name not in vars(cls):
                setattr(cls, name, vars(Regularizer)[name])

    @property
    def strong_convexity(self) -> float:
        """Largest mu with phi - mu/2 ||.||^2 convex."""
        return 0.0

    @abstractmethod
    def value(self, x: Array) -> Array:
        """phi(x) as a 0-d array; infinity outside the domain. For 16-bit arrays the result has 32 bits."""

    @abstractmethod
    def prox(self, z: Array, alpha: Array | float) -> Array:
        """argmin_y phi(y) + ||y - z||^2 / (2 alpha), for one number alpha > 0."""

    def prox_jvp(self, z: Array, y: Array, v: Array, alpha: Array | float) -> Array | None:
        """Derivative of the prox at z, where y = prox(z, alpha), in the direction v; None if it is not cheap.

        If phi is separable, alpha may be an array, as in `prox_diagonal`.
        """
        return None

    def prox_diagonal(self, z: Array, alpha: Array | float) -> Array:
        """argmin_y phi(y) + sum_i (y_i - z_i)^2 / (2 alpha_i): the prox in a diagonal metric, one step size per entry.

        Args:
            z: the point.
            alpha: the step sizes > 0, in any shape that broadcasts to that of z.
        """
        raise TypeError(
            f"{type(self).__name__} has no exact prox with one step size per entry. {DIAGONAL} have one; for this "
            "regulariser use prox with one number."
        )

    @property
    def has_diagonal_prox(self) -> bool:
        """Whether there is a `prox_diagonal`."""
        return type(self).prox_diagonal is not Regularizer.prox_diagonal

    def subgradient(self, x: Array) -> Array:
        """One element of the subdifferential of phi at x."""
        raise TypeError(
            f"{type(self).__name__} has no subgradient everywhere; use ProxSPS or ProxSGD, which need only its prox."
        )

    def structure(self, shape: tuple[int, ...]) -> Structure | None:
        """The structure of phi on a tensor of this shape; None if a step has to call its prox.

        Separable regularisers act on each entry, so that a step may cut tensors into pieces and join them. A subclass
        with its own prox does not inherit the structure of another class.
        """
        return Entries(self) if self.separable else None

    def joint_structure(self, shapes: Sequence[tuple[int, ...]]) -> Units | None:
        """The structure of a joint phi on all tensors of a group, of these shapes; None if there is only its prox."""
        return None

    def check(self, shape: tuple[int, ...]) -> None:
        """Raise ValueError if phi does not fit a tensor of this shape."""
        return

    def at(self, index: int) -> Regularizer:
        """The regulariser of the index-th tensor of a group, if tensors differ (for instance by their centre)."""
        return self

    def piece(self, ndim: int, dims: tuple[int, ...], cut: Callable[[Array], Array]) -> Regularizer | None:
        """phi on a piece of a tensor that is cut along `dims`; None if phi is not a sum over these pieces.

        Args:
            ndim: number of dims of the tensor.
            dims: the dims that are cut, counted from 0.
            cut: takes the same piece out of an array of the tensor's shape, such as a centre.
        """
        return self if self.separable else None


def value_all(phi: Regularizer, xs: Sequence[Array], indices: Sequence[int] | None = None) -> Array:
    """Value over the tensors of a group, given by `indices`: a sum, or one value of the joint vector."""
    if phi.joint:
        return phi.value(flatten(xs))
    return sum(phi.at(i).value(x) for i, x in zip(indices or range(len(xs)), xs, strict=True))


def prox_all(
    phi: Regularizer, zs: Sequence[Array], alpha: Array | float, indices: Sequence[int] | None = None
) -> list[Array]:
    """Proximal operator of phi over the tensors of a group."""
    if phi.joint:
        return unflatten(phi.prox(flatten(zs), alpha), zs)
    return [phi.at(i).prox(z, alpha) for i, z in zip(indices or range(len(zs)), zs, strict=True)]


def prox_jvp_all(
    phi: Regularizer,
    zs: Sequence[Array],
    ys: Sequence[Array],
    vs: Sequence[Array],
    alpha: Array | float,
    indices: Sequence[int] | None = None,
) -> list[Array] | None:
    """Directional derivative of `prox_all`, or None if it is not cheap."""
    if phi.joint:
        flat = phi.prox_jvp(flatten(zs), flatten(ys), flatten(vs), alpha)
        return None if flat is None else unflatten(flat, zs)
    out = []
    for i, z, y, v in zip(indices or range(len(zs)), zs, ys, vs, strict=True):
        tangent = phi.at(i).prox_jvp(z, y, v, alpha)
        if tangent is None:
            return None
        out.append(tangent)
    return out


def subgradient_all(phi: Regularizer, xs: Sequence[Array], indices: Sequence[int] | None = None) -> list[Array]:
    """An element of the subdifferential over the tensors of a group."""
    if phi.joint:
        return unflatten(phi.subgradient(flatten(xs)), xs)
    return [phi.at(i).subgradient(x) for i, x in zip(indices or range(len(xs)), xs, strict=True)]


def flatten(xs: Sequence[Array]) -> Array:
    """All entries of all arrays as one vector, in order."""
    xp = array_namespace(*xs)
    return xp.concat([xp.reshape(x, (-1,)) for x in xs])


def unflatten(flat: Array, like: Sequence[Array]) -> list[Array]:
    """Inverse of `flatten`."""
    xp = array_namespace(flat)
    out, start = [], 0
    for x in like:
        stop = start + math.prod(x.shape)
        out.append(xp.reshape(flat[start:stop], x.shape))
        start = stop
    return out


__all__ = ["Regularizer", "flatten", "prox_all", "prox_jvp_all", "subgradient_all", "unflatten", "value_all"]
