"""Trees to blocks: parameters gathered by label, each label with its own cap and regulariser."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from numbers import Real
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from proxsps.core.array import Array
from proxsps.core.checks import check_keys
from proxsps.jax.checks import check_constants, check_dtype, check_gradient, check_regularizer, is_zero
from proxsps.regularizers import L2, Regularizer, Zero
from proxsps.regularizers._support import wide
from proxsps.regularizers.checks import check_fit
from proxsps.regularizers.structure import Quadratic, Structure

ALL = "all"  # the label of every parameter if no labels are passed


@dataclass(frozen=True)
class Options:
    """The options of one label."""

    learning_rate: Any  # None for none
    weight_decay: Any = None
    regularizer: Regularizer | None = None
    scale: Any = None  # factor on the step if there is no learning rate; None for 1
    metric: str = "adam"  # of the schedule-free form, like the next one
    set: Hashable = None  # labels of one set share a distance cap; None: by the role of each parameter

    def __post_init__(self) -> None:
        for name in ("learning_rate", "scale"):
            number = getattr(self, name)
            if number is not None and not callable(number):
                check_constants(**{name: number})
        if self.weight_decay is not None:
            check_constants(weight_decay=self.weight_decay)
        if self.regularizer is not None:
            check_regularizer(self.regularizer, self.weight_decay)

    @property
    def phi(self) -> Regularizer:
        """The regulariser; `weight_decay` is the squared l2 norm by another name."""
        if self.regularizer is not None:
            return self.regularizer
        return Zero() if is_zero(self.weight_decay) else L2(self.weight_decay)

    def alpha(self, count: Array, dtype: Any) -> Array:
        """The learning rate at a count of steps, or the factor on the step if there is none."""
        given = [rate for rate in (self.learning_rate, self.scale, 1.0) if rate is not None]
        rate = given[0]
        return jnp.asarray(rate(count) if callable(rate) else rate, dtype)


class TreeBlock(NamedTuple):
    """The parameters of one label that have a gradient, in at least f32."""

    phi: Regularizer
    alpha: Array
    xs: list[Array]
    ds: list[Array]
    indices: list[int]  # their positions among the parameters of the label
    places: list[int]  # and among all parameters
    decoupled: bool = True  # whether the squared l2 norm is taken in the metric of the step
    metric: list[Array] | None = None  # D > 0; None for the identity
    along: list[Array] | None = None  # directions that are not D^-1 d
    matrices: Any = ()  # how each tensor is read as matrices, if its directions are orthogonalised

    @property
    def tensors(self) -> Iterator[tuple[Array, Array, Array | None]]:
        """x, d and D of each tensor."""
        return zip(self.xs, self.ds, self.metric or [None] * len(self.xs), strict=True)

    def directions(self, ds: Sequence[Array]) -> Sequence[Array]:
        """D^-1 d, or the directions of their own that the block has."""
        if self.along is not None:
            return self.along
        return ds if self.metric is None else [d / metric for d, metric in zip(ds, self.metric, strict=True)]

    def step_sizes(self, alpha: Array) -> list[Array]:
        """alpha over each entry of the metric."""
        return [alpha.astype(metric.dtype) / metric for metric in self.metric or []]

    @property
    def structures(self) -> list[Structure | None]:
        """The structure of the regulariser, tensor by tensor."""
        return [self.phi.at(i).structure(x.shape) for i, x in zip(self.indices, self.xs, strict=True)]

    @property
    def quadratic(self) -> bool:
        """Whether the prox is affine (no regulariser counts as affine), so that the block enters the closed form."""
        squares = [own for own in self.structures if isinstance(own, Quadratic)]
        if len(squares) < len(self.xs) or any(own.lam is not squares[0].lam for own in squares):
            return False
        return self.metric is None or self.decoupled or not squares or is_nothing(squares[0].lam)

    @property
    def lam(self) -> Array | float:
        """Strength of the squared l2 norm, 0 for any other regulariser."""
        first = self.structures[0] if self.xs and self.quadratic else None
        return first.lam if isinstance(first, Quadratic) else 0.0

    @property
    def offsets(self) -> list[Array]:
        """x, or x - center if the squared l2 norm has a centre."""
        centers = [own.center if isinstance(own, Quadratic) else None for own in self.structures]
        pairs = zip(self.xs, centers, strict=True)
        return [x if center is None else x - jnp.asarray(center, x.dtype) for x, center in pairs]


class Gathered(NamedTuple):
    """The parameters of a step."""

    blocks: list[TreeBlock]
    rest: list[tuple[int, Array]]  # parameters without a gradient, each with its position among all parameters
    scatter: Callable[[Sequence[Sequence[Array]]], Any]  # a list of arrays for each block -> a tree like the gradients
    owners: list[int]  # the block of every parameter


@dataclass(frozen=True)
class Groups:
    """Options by label, and the labels of a tree of parameters."""

    options: Mapping[Hashable, Options]
    labels: Any = ALL  # a tree of labels that is a prefix of the parameters', or a function from parameters to one

    @classmethod
    def make(
        cls,
        owner: str,
        default: Options,
        labels: Any,
        groups: Mapping[Hashable, Mapping[str, Any]] | None,
        keys: Sequence[str] = ("learning_rate", "weight_decay", "regularizer"),
    ) -> Groups:
        """Options of each label: the given ones, which may have these keys, else the defaults."""
        if (labels is None) != (groups is None):
            raise ValueError(f"{owner} needs labels and groups together: a tree of labels, and options for each label.")
        if groups is None:
            return cls({ALL: default})
        defaults = {field.name: getattr(default, field.name) for field in fields(default)}
        options = {}
        for label, own in groups.items():
            check_keys(owner, own, keys)
            options[label] = Options(**{**defaults, **own})
        return cls(options, labels)

    def dtype(self, params: Any) -> Any:
        """The dtype of the numbers of a step: that of the widest parameter, at least f32."""
        return jnp.result_type(jnp.float32, *map(jnp.result_type, parameters(params)))

    def check(self, params: Any) -> None:
        """Raise an error for parameters that are not real, or that do not fit the regulariser of their label."""
        seen: Counter[Hashable] = Counter()
        labels = jax.tree.leaves(self.label_tree(params))
        for label, x in zip(labels, parameters(params), strict=True):
            check_dtype(x)
            check_fit(self.options[label].phi, seen[label], jnp.shape(x))
            seen[label] += 1

    def gather(self, grads: Any, params: Any, count: Array) -> Gathered:
        """A block for each label.

        Gradients that are None, or masked by optax, are left out and come back as they are.
        """
        dtype = self.dtype(params)
        structure: Any  # which JAX gives no methods for type checkers
        leaves, structure = jax.tree.flatten(grads, is_leaf=is_absent)
        slots: dict[Hashable, list[int]] = {label: [] for label in self.options}
        blocks = {
            label: TreeBlock(own.phi, own.alpha(count, dtype), [], [], [], [], own.regularizer is None, matrices=[])
            for label, own in self.options.items()
        }
        rest: list[tuple[int, Array]] = []
        seen: Counter[Hashable] = Counter()
        tree = self.label_tree(params)
        points, labels = structure.flatten_up_to(params), structure.flatten_up_to(tree)
        for slot, (d, x, label) in enumerate(zip(leaves, points, labels, strict=True)):
            place = seen.total()
            if is_absent(d):
                rest += enumerate(parameters(x), place)
            else:
                check_dtype(x)
                check_gradient(d, x)
                x = wide(jnp.asarray(x))
                blocks[label].xs.append(x)
                blocks[label].ds.append(jnp.asarray(d, x.dtype))
                blocks[label].indices.append(seen[label])
                blocks[label].places.append(place)
                blocks[label].matrices.append(getattr(label, "matrix", None))
                slots[label].append(slot)
            seen.update(jax.tree.leaves(label))  # a subtree of them where a gradient is absent

        def scatter(moved: Sequence[Sequence[Array]]) -> Any:
            out = list(leaves)
            for own, arrays in zip(slots.values(), moved, strict=True):
                for slot, array in zip(own, arrays, strict=True):
                    out[slot] = array.astype(jnp.result_type(points[slot]))
            return structure.unflatten(out)

        return Gathered(list(blocks.values()), rest, scatter, self.owners(tree))

    def owners(self, labels: Any) -> list[int]:
        """The block of every parameter, from a tree of labels."""
        places = {label: i for i, label in enumerate(self.options)}
        return [places[label] for label in jax.tree.leaves(labels)]

    def label_tree(self, params: Any) -> Any:
        """A label for every parameter."""
        # A model of callable modules, with labels for leaves, is a tree of labels and no function.
        is_function = callable(self.labels) and jax.tree_util.all_leaves([self.labels])
        labels = self.labels(params) if is_function else self.labels

        def name(label: Hashable, x: Any) -> Hashable:
            if not is_parameter(x):
                return None
            if label not in self.options:
                raise ValueError(f"Label {label!r} has no options: groups has {', '.join(map(repr, self.options))}.")
            return label

        def spread(label: Hashable, part: Any) -> Any:
            return jax.tree.map(lambda x: name(label, x), part)

        return jax.tree.map(spread, labels, params, is_leaf=lambda label: label is None)


def is_absent(grad: Any) -> bool:
    """Whether a gradient is missing: None, or masked by optax."""
    return grad is None or isinstance(grad, optax.MaskedNode)


def is_nothing(constant: Any) -> bool:
    """Whether a strength is known to be 0."""
    return isinstance(constant, Real) and constant == 0


def parameters(tree: Any) -> list[Any]:
    """The parameters in a tree, in order."""
    return list(filter(is_parameter, jax.tree.leaves(tree)))


def is_parameter(x: Any) -> bool:
    """Whether a leaf is an array or number, not a function or another object in a model."""
    return isinstance(x, (int, float)) or hasattr(x, "dtype")
