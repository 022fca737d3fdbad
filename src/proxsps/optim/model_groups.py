"""Groups of parameters from a model: its hidden matrices, and all other tensors.

Hidden matrices map features to features: weights of linear and convolutional layers, of recurrent layers and of
attention. Embeddings, tables of positions, the last layer, norms and biases are the rest: their rows or entries stand
for tokens, classes or scales. The two travel at different speeds, so they have a distance cap each, and spectral
directions are for the matrices only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

MATRICES, REST = "matrices", "rest"
ADAM, SPECTRAL = "adam", "spectral"
LAYERS = (nn.Linear, nn.Bilinear, nn.modules.conv._ConvNd, nn.RNNBase, nn.RNNCellBase, nn.MultiheadAttention)
TRANSPOSED = ("Conv1D",)  # linear layers of other packages, by the name of their class
PACKED = re.compile(r"(^|[._])(qkv|in_proj|c_attn|query_key_value)([._]|$)", re.IGNORECASE)


class Role(NamedTuple):
    """A parameter of a model, the set that it belongs to, and why."""

    name: str
    param: Tensor
    set: str
    why: str
    packed: int = 1  # matrices that are stacked along the first dim

    def __str__(self) -> str:
        shape = " x ".join(map(str, self.param.shape)) or "number"
        several = f", {self.packed} matrices" if self.packed > 1 else ""
        return f"{self.set:8}  {self.name}  ({shape}): {self.why}{several}"


def roles(model: nn.Module, include: Iterable[str] = (), exclude: Iterable[str] = ()) -> list[Role]:
    r"""Which parameters of a model are hidden matrices, and why; `print(*roles(model), sep="\n")` shows a table.

    Args:
        model: the model. Parameters that need no gradient are left out.
        include: regular expressions; parameters with two dims or more whose names match one of them are matrices.
        exclude: regular expressions; parameters whose names match one of them are not.
    """
    chosen, others = ([re.compile(pattern) for pattern in patterns] for patterns in (include, exclude))
    homes = [  # tied parameters are there once for each layer
        (name, param, layer)
        for prefix, layer in model.named_modules()
        for name, param in layer.named_parameters(prefix, recurse=False, remove_duplicate=False)
    ]
    weights = [layer for _, param, layer in homes if param.dim() > 1 and _maps_features(layer)]
    last = weights[-1] if weights else None  # as the model defines them
    found: dict[int, Role] = {}
    for name, param, layer in homes:
        own = _role(name, param, layer, last)
        if any(pattern.search(name) for pattern in others):
            own = own._replace(set=REST, why="excluded")
        elif param.dim() > 1 and any(pattern.search(name) for pattern in chosen):
            own = own._replace(set=MATRICES, why="included")
        known = found.setdefault(id(param), own)
        if known.set == MATRICES and own.set == REST:  # tied weights are matrices only if they are so everywhere
            found[id(param)] = known._replace(set=REST, why=f"also {own.name}, {own.why}")
    return [role for role in found.values() if role.param.requires_grad]


def model_groups(
    model: nn.Module,
    metric: Literal["adam", "spectral"] = "spectral",
    include: Iterable[str] = (),
    exclude: Iterable[str] = (),
) -> list[dict[str, Any]]:
    """Parameter groups for `ScheduleFreeSPS`: the hidden matrices of a model, and its other tensors.

    Args:
        model: the model.
        metric: of the matrices; other tensors have Adam's metric.
        include: as in `roles`.
        exclude: as in `roles`.
    """
    check_metric(metric)
    found: dict[tuple[str, int], list[tuple[str, Tensor]]] = {}
    for role in roles(model, include, exclude):
        packed = role.packed if role.set == MATRICES and metric == SPECTRAL else 1
        found.setdefault((role.set, packed), []).append((role.name, role.param))
    return [
        {"params": params, "set": kind, "metric": metric if kind == MATRICES else ADAM, "packed": packed}
        for (kind, packed), params in sorted(found.items())
    ]


def check_metric(metric: Any) -> None:
    """Raise an error for a metric that a group cannot have."""
    if metric not in (ADAM, SPECTRAL):
        raise ValueError(f'metric must be "adam" or "spectral", got {metric!r}.')


def _maps_features(layer: nn.Module) -> bool:
    return isinstance(layer, LAYERS) or type(layer).__name__ in TRANSPOSED


def _role(name: str, param: Tensor, layer: nn.Module, last: nn.Module | None) -> Role:
    """The set of a parameter, by the layer that owns it."""
    kind = type(layer).__name__
    if param.dim() < 2 or name.rpartition(".")[2].startswith("bias"):  # attention has biases with three dims
        return Role(name, param, REST, f"vector of {kind}")
    if not _maps_features(layer):
        return Role(name, param, REST, f"table of {kind}")
    if layer is last:
        return Role(name, param, REST, f"last layer, {kind}")
    if isinstance(layer, nn.modules.conv._ConvNd) and layer.groups == layer.in_channels > 1:
        return Role(name, param, REST, f"one filter per channel, {kind}")
    thrice = param.shape[0] == 3 * param.shape[1] and param.dim() == 2
    packed = 3 if thrice and PACKED.search(name) else 1
    return Role(name, param, MATRICES, f"weights of {kind}", packed)
