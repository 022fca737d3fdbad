"""The roles of parameters: hidden matrices, and all others, by their names and shapes in a tree.

Hidden matrices map features to features. Embeddings, tables of positions, the last layer, norms and biases are the
rest: their rows or entries stand for tokens, classes or scales. The two travel at different speeds, so they have a
distance cap each, and spectral directions are for the matrices only.

A tree has no layers, so names say what an array is: those of Flax, Haiku and Equinox are known, and patterns correct
what they do not say.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from proxsps.jax.groups import is_parameter
from proxsps.jax.second_point import Matrix

MATRICES, REST = "matrices", "rest"
TABLES = re.compile(r"embed|(^|[._])(pos|position|token|table|wte|wpe|cls)", re.IGNORECASE)
SCALES = re.compile(r"norm|(^|[._])(bn|ln|bias|scale)(_?\d+)?([._]|$)", re.IGNORECASE)
HEADS = re.compile(r"(^|[._])(lm_head|head|logits|classifier|readout|output|unembed)(_?\d+)?([._]|$)", re.IGNORECASE)
PACKED = re.compile(r"(^|[._])(qkv|in_proj|c_attn|query_key_value)([._]|$)", re.IGNORECASE)
OUTPUT_LAST = re.compile(r"(^|\.)(kernel|w)$")  # arrays of Flax and Haiku, whose last axis is that of the outputs
MANY_OUTPUTS = re.compile(r"(^|\.)(query|key|value)\.kernel$")  # of Flax's attention: inputs, heads, features


class Role(str):
    """The word "matrices" or "rest", with name and shape of a parameter, why it is one, and how it is read."""

    name: str
    shape: tuple[int, ...]
    why: str
    matrix: Matrix | None

    def __new__(cls, kind: str, name: str, shape: tuple[int, ...], why: str, matrix: Matrix | None = None) -> Role:
        """The role of one parameter."""
        self = super().__new__(cls, kind)
        self.name, self.shape, self.why, self.matrix = name, shape, why, matrix
        return self

    @property
    def stacked(self) -> int:
        """How many matrices it holds."""
        return 1 if self.matrix is None else self.matrix.shape[self.matrix.axis]

    def __repr__(self) -> str:
        shape = " x ".join(map(str, self.shape)) or "number"
        several = f", {self.stacked} matrices" if self.stacked > 1 else ""
        return f"{self!s:8}  {self.name}  ({shape}): {self.why}{several}"


def roles(params: Any, include: Iterable[str] = (), exclude: Iterable[str] = (), stacked: Iterable[str] = ()) -> Any:
    r"""The role of each parameter: a tree of labels "matrices" and "rest" for `schedule_free_sps`.

    `print(*map(repr, jax.tree.leaves(roles(params))), sep="\n")` shows a table. If no name is that of a last layer, the
    matrix whose name is last in the alphabet is taken for it, where numbers in names count as numbers.

    Args:
        params: the parameters. Names are paths in the tree, for instance `params.Dense_0.kernel` or `layers.0.weight`.
        include: regular expressions; arrays with two axes or more whose names match one of them are matrices.
        exclude: regular expressions; parameters whose names match one of them are not.
        stacked: regular expressions; arrays whose names match one of them are several layers along their first axis.

    Examples:
        >>> import jax, jax.numpy as jnp
        >>> from proxsps.jax import roles
        >>> weights = {"kernel": jnp.zeros((8, 8)), "bias": jnp.zeros(8)}
        >>> print(*map(repr, jax.tree.leaves(roles({"Dense_0": weights, "head": weights}))), sep="\n")
        rest      Dense_0.bias  (8): vector
        matrices  Dense_0.kernel  (8 x 8): weights
        rest      head.bias  (8): vector
        rest      head.kernel  (8 x 8): last layer
    """
    chosen, others, layers = ([re.compile(p) for p in patterns] for patterns in (include, exclude, stacked))
    leaves, structure = jax.tree_util.tree_flatten_with_path(params)
    named = {place: _name(path) for place, (path, x) in enumerate(leaves) if is_parameter(x)}
    out: list[Role | None] = [None] * len(leaves)
    for place, name in named.items():
        shape = tuple(jnp.shape(leaves[place][1]))
        count = shape[0] if len(shape) > 2 and _matches(layers, name) else 1
        role = _role(name, shape, count)
        if _matches(others, name):
            role = Role(REST, name, shape, "excluded")
        elif len(shape) > 1 and _matches(chosen, name):
            role = Role(MATRICES, name, shape, "included", as_matrix(name, shape, count))
        out[place] = role
    _mark_last(out)
    return jax.tree.unflatten(structure, out)


def _matches(patterns: Sequence[re.Pattern[str]], name: str) -> bool:
    return any(pattern.search(name) for pattern in patterns)


def _name(path: Any) -> str:
    """The name of a parameter, with dots between the names of its parents."""
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", key))) for key in path]
    return ".".join(str(key).replace("/", ".").strip(".") for key in keys)


def _role(name: str, shape: tuple[int, ...], count: int) -> Role:
    if len(shape) - (count > 1) < 2:
        return Role(REST, name, shape, "vector")
    for pattern, why in ((TABLES, "embedding or table"), (SCALES, "norm or bias"), (HEADS, "last layer")):
        if pattern.search(name):
            return Role(REST, name, shape, why)
    return Role(MATRICES, name, shape, "weights", as_matrix(name, shape, count))


def as_matrix(name: str, shape: tuple[int, ...], count: int = 1) -> Matrix:
    """Rows and columns: filters have one row or one column per output channel, and three packed matrices are split."""
    inner = shape[1:] if count > 1 else shape
    last = OUTPUT_LAST.search(name) is not None
    cut = 1 if not last or MANY_OUTPUTS.search(name) else len(inner) - 1
    rows, columns = math.prod(inner[:cut]), math.prod(inner[cut:])
    if count == 1 and PACKED.search(name):
        if last and columns == 3 * rows:
            return Matrix((rows, 3, rows), 1)
        if not last and rows == 3 * columns:
            return Matrix((3, columns, columns))
    return Matrix((count, rows, columns))


def _mark_last(found: list[Role | None]) -> None:
    """Take the last matrix for the last layer, unless the name of an array says that it is."""
    known = [role for role in found if role is not None]
    if any(len(role.shape) > 1 and HEADS.search(role.name) for role in known):
        return
    single = [role for role in known if role.why == "weights" and role.stacked == 1]
    if single:
        last = max(enumerate(single), key=lambda pair: (_natural(pair[1].name), pair[0]))[1]
        found[next(i for i, role in enumerate(found) if role is last)] = Role(REST, last.name, last.shape, "last layer")


def _natural(name: str) -> list[tuple[int, int, str]]:
    """A key that sorts numbers in names as numbers."""
    return [(1, int(part), "") if part.isdigit() else (0, 0, part) for part in re.split(r"(\d+)", name.casefold())]
