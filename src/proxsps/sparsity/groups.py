"""Parameter groups of a model in one line: a regulariser on weights, none on biases and normalisation layers."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from proxsps.regularizers import GroupLasso, Regularizer, SparseGroupLasso
from proxsps.regularizers.base import value_all
from proxsps.sparsity.tables import Table

# Layers whose weights are regularised unless `include` says otherwise.
WEIGHTED = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag)
STRENGTHS = ("lam", "l1", "l2")

Pattern = str | type[nn.Module]
Choice = Regularizer | Callable[[Tensor], Regularizer]
Scale = Literal["group-size", "fan-in"] | Callable[[str, Tensor], float] | None


class ParameterGroups(list[dict[str, Any]]):
    """Groups for an optimizer, which `print` shows as a table; `units` are those of a `UnitLasso`."""

    units: Any = None

    @property
    def table(self) -> Table:
        """One row for each parameter."""
        rows = [
            [name, "x".join(map(str, param.shape)) or "1", param.numel(), _describe(group["regularizer"])]
            for group in self
            for name, param in _named(group)
        ]
        return Table(["parameter", "shape", "entries", "regularizer"], rows)

    def __str__(self) -> str:
        return str(self.table)

    def __rich__(self) -> Any:
        return self.table


def sparse_groups(
    model: nn.Module,
    regularizer: Choice,
    *,
    include: Pattern | Iterable[Pattern] | None = None,
    exclude: Pattern | Iterable[Pattern] = (),
    scale: Scale = None,
    lam: Literal["auto"] | None = None,
) -> ParameterGroups:
    """Groups for `ProxSPS`, `ProxSGD` or any optimizer whose groups take a `regularizer`.

    By default the weights of linear, convolution and embedding layers get the regulariser; biases, normalisation layers
    and all other parameters get none. Parameters without gradient are left out.

    Args:
        model: any module.
        regularizer: for instance `L1(1e-4)`, or a function of the tensor, such as `rows(1e-3)`.
        include: which parameters get it: names with shell wildcards ("encoder.*.weight", or the name of a layer for its
            weight), or types of modules for their weights. None for the layers above.
        exclude: which of them do not.
        scale: a factor on the strength of each tensor. "group-size": the square root of the number of entries of one
            group of a `GroupLasso`. "fan-in": one over the square root of the number of inputs of one output, the scale
            on which weights start. Or a function of name and tensor.
        lam: "auto" to multiply all strengths by one factor, with which the penalty of the present weights is 1, a good
            start for a search: `sparse_groups(model, L1(1.0), lam="auto")`.

    Raises:
        ValueError: a pattern matches nothing, or the strength is zero.

    Examples:
        >>> from torch import nn
        >>> from proxsps import L1, ProxSPS
        >>> from proxsps.sparsity import sparse_groups
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.BatchNorm1d(8), nn.Linear(8, 2))
        >>> groups = sparse_groups(model, L1(1e-3), exclude="3")
        >>> print(groups)
        parameter  shape  entries  regularizer
        ---------  -----  -------  -------------
        0.weight   8x4         32  L1(lam=0.001)
        0.bias     8            8  none
        2.weight   8            8  none
        2.bias     8            8  none
        3.weight   2x8         16  none
        3.bias     2            2  none
        >>> optimizer = ProxSPS(groups)
    """
    entries = list(_entries(model))
    chosen = _chosen(entries, include, exclude)
    groups: dict[Regularizer, list[tuple[str, Tensor]]] = {}
    rest = []
    for name, param, _ in entries:
        if id(param) not in chosen:
            rest.append((name, param))
            continue
        phi = _scaled(_regularizer_for(regularizer, name, param), scale, name, param)
        groups.setdefault(phi, []).append((name, param))
    out = ParameterGroups({"params": params, "regularizer": phi} for phi, params in groups.items())
    if rest:
        out.append({"params": rest, "regularizer": None})
    if lam not in (None, "auto"):
        raise ValueError(f"lam must be 'auto' or None, got {lam!r}; a strength belongs into the regularizer.")
    return out if lam is None else with_penalty_one(out)


def starting_strength(groups: ParameterGroups) -> float:
    """The factor on all strengths at which the penalty of the present weights is 1."""
    with torch.no_grad():
        total = sum(
            float(value_all(group["regularizer"], [param.detach() for _, param in _named(group)]))
            for group in groups
            if group["regularizer"] is not None
        )
    if not 0 < total < math.inf:
        raise ValueError(
            f"The penalty of the present weights is {total}, so that no strength makes it 1: weights are all zero, or "
            "not finite. Pass a number as strength."
        )
    return 1 / total


def with_penalty_one(groups: ParameterGroups) -> ParameterGroups:
    """The same groups with all strengths multiplied by `starting_strength`."""
    factor = starting_strength(groups)
    for group in groups:
        if group["regularizer"] is not None:
            group["regularizer"] = _times(group["regularizer"], factor)
    return groups


def rows(lam: float, *, scale_by_size: bool = True) -> Callable[[Tensor], Regularizer]:
    """A `GroupLasso` in which each slice along the first dim is a group: one for each output, channel or token."""
    check_strength(GroupLasso(lam))
    return lambda param: GroupLasso(lam, tuple(range(1, param.ndim)) or None, scale_by_size)


def check_strength(phi: Regularizer) -> None:
    """Raise an error for a regulariser whose strength is zero, which gives no zeros."""
    strengths = {name: getattr(phi, name) for name in STRENGTHS if hasattr(phi, name)}
    if strengths and not any(strengths.values()):
        raise ValueError(
            f"{phi!r} has strength 0 and gives no zeros; pass a strength > 0, or groups without a regularizer."
        )


def _entries(model: nn.Module) -> Iterator[tuple[str, Tensor, nn.Module]]:
    """Name, parameter and owner of every parameter that is trained, once each."""
    seen = set()
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(prefix, recurse=False):
            if param.requires_grad and id(param) not in seen:
                seen.add(id(param))
                yield name, param, module


def _chosen(entries: list[Any], include: Any, exclude: Any) -> set[int]:
    """Identities of the parameters that get the regulariser."""
    if include is None:
        wanted = {id(param) for name, param, owner in entries if _is_weight(name) and isinstance(owner, WEIGHTED)}
        if not wanted:
            raise ValueError(
                "The model has no trained weights of linear, convolution or embedding layers; name the parameters for "
                "the regularizer with include=..."
            )
    else:
        wanted = set().union(*(_matches(entries, pattern, "include") for pattern in _patterns(include)))
    return wanted.difference(*(_matches(entries, pattern, "exclude") for pattern in _patterns(exclude)))


def _patterns(given: Any) -> list[Pattern]:
    return [given] if isinstance(given, (str, type)) else list(given)


def _matches(entries: list[Any], pattern: Pattern, option: str) -> set[int]:
    found = {id(param) for name, param, owner in entries if _fits(pattern, name, owner)}
    if not found:
        layers = dict.fromkeys(f"{name.rpartition('.')[0]} ({type(owner).__name__})" for name, _, owner in entries)
        shown = ", ".join(list(layers)[:8]) + (", ..." if len(layers) > 8 else "")
        raise ValueError(f"{option}={pattern!r} matches no trained parameter of the model. Its layers are: {shown}.")
    return found


def _fits(pattern: Pattern, name: str, owner: nn.Module) -> bool:
    if isinstance(pattern, type):
        return isinstance(owner, pattern) and _is_weight(name)
    return fnmatchcase(name, pattern) or (_is_weight(name) and fnmatchcase(name.rpartition(".")[0], pattern))


def _is_weight(name: str) -> bool:
    return name.rpartition(".")[2] == "weight"


def _regularizer_for(choice: Choice, name: str, param: Tensor) -> Regularizer:
    phi = choice if isinstance(choice, Regularizer) else choice(param)
    if not isinstance(phi, Regularizer):
        raise ValueError(
            f"regularizer must be a proxsps.regularizers.Regularizer or a function that returns one for a "
            f"tensor; for {name} it gave {phi!r}."
        )
    check_strength(phi)
    return phi


def _scaled(phi: Regularizer, scale: Scale, name: str, param: Tensor) -> Regularizer:
    if scale is None:
        return phi
    if scale == "group-size":
        factor = _root_group_size(phi, param)
    elif scale == "fan-in":
        factor = 1 / math.sqrt(max(math.prod(param.shape[1:]), 1))
    elif callable(scale):
        factor = float(scale(name, param))
    else:
        raise ValueError(
            f"scale must be 'group-size', 'fan-in', a function of name and tensor, or None; got {scale!r}."
        )
    if not (math.isfinite(factor) and factor > 0):
        raise ValueError(f"scale gave the factor {factor} for {name}; it must be finite and > 0.")
    return _times(phi, factor)


def _times(phi: Regularizer, factor: float) -> Regularizer:
    """The regulariser with its strengths multiplied by a factor."""
    if dataclasses.is_dataclass(phi):
        fields = {f.name for f in dataclasses.fields(phi)} & set(STRENGTHS)
        if fields:
            return dataclasses.replace(phi, **{key: factor * getattr(phi, key) for key in fields})
    raise ValueError(f"{phi!r} has no strength that could be scaled; use scale=None, lam=None.")


def _root_group_size(phi: Regularizer, param: Tensor) -> float:
    if not isinstance(phi, (GroupLasso, SparseGroupLasso)):
        return 1.0  # each entry is its own group
    if phi.scale_by_size:
        raise ValueError(f"{phi!r} scales by the size of its groups already; use scale=None.")
    return math.sqrt(param.numel() if phi.dims is None else math.prod(param.shape[d] for d in phi.dims))


def _named(group: dict[str, Any]) -> list[tuple[str, Tensor]]:
    """Names and parameters, also of a group in which a torch optimizer has replaced the pairs."""
    names = group.get("param_names")
    return group["params"] if names is None else list(zip(names, group["params"], strict=True))


def _describe(phi: Regularizer | None) -> str:
    return "none" if phi is None else repr(phi)


__all__ = ["ParameterGroups", "check_strength", "rows", "sparse_groups", "starting_strength", "with_penalty_one"]
