"""Which layers produce the same channels: torch-pruning's dependency graph, read as sets of units."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from proxsps import _install
from proxsps.sparsity.guard import EndlessError, Guard
from proxsps.sparsity.inputs import TraceError, call, first_line, tensors_of

SHOWN = 3  # names of layers in a line
RECURRENT = (nn.RNNBase, nn.modules.rnn.RNNCellBase)
READING = (nn.Linear, nn.modules.conv._ConvNd)
VECTOR_LAYERS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
# Operations that mix channels, so that a zero channel cannot be removed, and the text for reports.
MIXING = {
    "LayerNorm": "a layer normalisation takes its mean over the channels, zeros included",
    "GroupNorm": "a group normalisation takes its mean over the channels, zeros included",
    "RMSNorm": "a normalisation takes its mean over the channels, zeros included",
    "MultiheadAttention": "attention divides the channels among its heads",
    "LSTM": "a recurrent layer has no separate channels",
    "Pad": "a shortcut pads or shifts the channels",
    "Softmax": "a softmax is taken over the channels",
}
NOT_CALLED = "it is not called as a module; its weight is used as a tensor, or not at all"
RESHAPED = "the channels cannot be followed through a reshape (view, split, glu, einsum or the like)"


@dataclass(frozen=True, eq=False)
class Member:
    """A parameter whose slices along `dim` belong to units of a set; `ids` as in `UnitTensor`."""

    name: str
    dim: int
    ids: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class UnitSet:
    """Units that the same layers produce together, for instance the channels of a residual stage."""

    name: str  # the layer that torch-pruning starts from
    roots: tuple[tuple[int, ...], ...]  # for each unit, the channels of this layer
    members: tuple[Member, ...]
    layers: tuple[str, ...]  # all layers that produce the units
    consumers: tuple[str, ...]  # layers that read them
    readers: tuple[Member, ...] = ()  # their weights, by the units that they multiply
    kinds: frozenset[str] = field(default_factory=frozenset)  # names of the operations in between

    def __len__(self) -> int:
        return len(self.roots)


@dataclass(frozen=True)
class Left:
    """Layers whose units are not removed, and why."""

    layers: tuple[str, ...]
    reason: str
    part: str = ""  # which units of the layers, if not all

    def __str__(self) -> str:
        layers = f"{'layer' if len(self.layers) == 1 else 'layers'} {shortened(self.layers)}"
        return f"Kept: {f'{self.part} of ' if self.part else ''}{layers}, because {self.reason}."


def shortened(names: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def load_torch_pruning() -> ModuleType:
    """torch-pruning, or an error that says how to get it."""
    try:
        import torch_pruning
    except ImportError:
        raise ImportError(
            f"Finding the channels that belong together needs torch-pruning: {_install.extra('sparsity')}."
        ) from None
    found: ModuleType = torch_pruning
    return found


class Graph:
    """The dependency graph of a model, which it puts into evaluation mode; `remove` changes the model."""

    def __init__(self, model: nn.Module, inputs: Any) -> None:
        self.tp = load_torch_pruning()
        self.model = model
        self.names = {module: name for name, module in model.named_modules()}
        self.owners: dict[int, list[str]] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            self.owners.setdefault(id(param), []).append(name)
            if param.is_floating_point():
                param.requires_grad_(True)  # frozen parameters would not be traced
        self._ends: set[Any] = set()
        try:
            with torch.enable_grad():
                self.graph = self.tp.DependencyGraph().build_dependency(
                    model, inputs, forward_fn=call, output_transform=self._note, verbose=False
                )
        except TraceError:
            raise
        except Exception as error:  # of many kinds: tracing follows arbitrary code
            raise TraceError(
                f"torch-pruning cannot trace the model: {first_line(error)}. Units need a model in plain torch whose "
                "output depends on its parameters by autograd."
            ) from error

        self._guard = Guard(self.graph)

    def _note(self, output: Any) -> list[Any]:
        """Record where the model ends; output that no gradient flows through is not traced."""
        found = [tensor for tensor in tensors_of(output) if tensor.grad_fn is not None]
        if not found:
            raise TraceError(
                "No gradient flows from the model's output to its parameters, so torch-pruning cannot trace it: look "
                "for torch.no_grad, detach or argmax in its forward method."
            )
        self._ends = {tensor.grad_fn for tensor in found}
        return found

    def sets(self) -> tuple[list[UnitSet], list[Left]]:
        """All sets of units, and the layers that have none, with a reason."""
        found, left = [], []
        kinds = (self.tp.ops.TORCH_CONV, self.tp.ops.TORCH_LINEAR, self.tp.ops.TORCH_EMBED)
        seen: set[Any] = set()
        for module in list(self.graph.module2node):
            if module in seen or not isinstance(module, kinds):
                continue
            try:
                group = self._group(module)
                one = self._reason_against(group) or self._unit_set(group)
            except EndlessError as error:
                seen.update(error.reached, {module})
                names = [self._name(reached) for reached in (module, *error.reached)]
                layers = tuple(dict.fromkeys(name for name in names if name is not None))
                left.append(Left(layers, "channels are cut and joined again, which torch-pruning cannot follow"))
                continue
            except Exception as error:  # of many kinds: torch-pruning does not expect the indices of a reshaped tensor
                why = f"torch-pruning cannot follow the channels: {first_line(error)}"
                left.append(Left((self.names[module],), why))
                continue
            seen.update(node.module for _, node, _ in self._producers(group))
            layers = tuple(dict.fromkeys(name for name, *_ in self._producers(group)))
            if isinstance(one, UnitSet):
                found.append(one)
            else:
                left.append(Left(layers, one))
        recurrent = tuple(name for module, name in self.names.items() if isinstance(module, RECURRENT))
        return found, left + [Left(recurrent, MIXING["LSTM"])] * bool(recurrent) + self._not_called()

    def _not_called(self) -> list[Left]:
        """Layers with weights that are not called as modules, and are not part of a module that is known."""
        known = {self.names[module] for module in self.graph.module2node if module in self.names}
        left = []
        for name, module in self.model.named_modules():
            inside = any(name == one or name.startswith(f"{one}.") for one in known)
            weights = [param for param in module.parameters(recurse=False) if param.ndim > 1]
            if isinstance(module, (*READING, nn.Embedding)) and weights and not inside:
                left.append(Left((name,), NOT_CALLED))
        return left

    def _group(self, module: nn.Module, channels: list[int] | None = None) -> Any:
        """torch-pruning's group of some output channels of a layer, by default all."""
        pruner = self.graph.get_pruner_of_module(module)
        wanted = range(pruner.get_out_channels(module)) if channels is None else channels
        with self._guard:
            return self.graph.get_pruning_group(module, pruner.prune_out_channels, list(wanted))

    def remove(self, name: str, channels: list[int]) -> None:
        """Take channels of a layer out of the model, with everything that depends on them."""
        self._group(self.model.get_submodule(name), channels).prune()

    def _producers(self, group: Any) -> list[tuple[str, Any, list[int]]]:
        """Layers and parameters that give the group's channels: name, module, and which of its channels."""
        out = []
        for item in group:
            module = item.dep.target.module
            name = self._name(module)
            if self.graph.is_out_channel_pruning_fn(item.dep.handler) and name is not None:
                out.append((name, item.dep.target, item.idxs))
        return out

    def _name(self, module: Any) -> str | None:
        if isinstance(module, nn.Parameter):
            return self.owners[id(module)][0]
        return self.names.get(module)

    def _consumers(self, group: Any) -> list[str]:
        """Layers that read the channels and do not pass them on."""
        names = []
        for item in group:
            module, handler = item.dep.target.module, item.dep.handler
            reads = self.graph.is_in_channel_pruning_fn(handler) and not self.graph.is_out_channel_pruning_fn(handler)
            if reads and module in self.names:
                names.append(self.names[module])
        return names

    def _reason_against(self, group: Any) -> str | None:
        """Why the channels of a group can never be removed; None if a trial has to find out."""
        targets = [item.dep.target for item in group]
        passing = [item.dep.target for item in group if self.graph.is_out_channel_pruning_fn(item.dep.handler)]
        if any(target.grad_fn in self._ends or isinstance(target.module, self.tp.ops._OutputOp) for target in passing):
            return "the channels are the model's output"
        if not self._consumers(group):
            return "no layer reads the channels one by one"
        modules = [target.module for target in targets]
        for module in modules:
            if isinstance(module, nn.modules.conv._ConvNd) and 1 < module.groups < module.out_channels:
                return "a grouped convolution needs groups of equal size"
            for param in [module] if isinstance(module, nn.Parameter) else module.parameters(recurse=False):
                names = self.owners[id(param)]
                if len(names) > 1:
                    return f"one tensor is used as {' and as '.join(names)}, so that groups would overlap"
        for name, node, channels in self._producers(group):
            if any(max(channels) >= count for _, _, count in _produced(name, node)):
                return MIXING["Pad"]
        reshaped = any(max(item.idxs) >= module.weight.shape[dim] for item, module, dim in self._reading(group))
        kinds = {type(module).__name__ for module in modules}
        return next((why for kind, why in MIXING.items() if kind in kinds), RESHAPED if reshaped else None)

    def _unit_set(self, group: Any) -> UnitSet:
        layers = tuple(dict.fromkeys(name for name, *_ in self._producers(group)))
        roots, owners = self._partition(group)
        members = []
        for name, node, channels in self._producers(group):
            owner = owners[name]
            for param_name, dim, count in _produced(name, node):
                ids = np.full(count, -1, dtype=np.int64)
                ids[channels] = [owner[channel] for channel in channels]
                members.append(Member(param_name, dim, ids))
        kinds = frozenset(
            str(getattr(item.dep.target.module, "_grad_fn", type(item.dep.target.module).__name__)) for item in group
        )
        consumers = tuple(dict.fromkeys(self._consumers(group)))
        name = self.names[group[0].dep.target.module]
        return UnitSet(name, roots, tuple(members), layers, consumers, tuple(self._readers(group, roots)), kinds)

    def _readers(self, group: Any, roots: tuple[tuple[int, ...], ...]) -> Iterator[Member]:
        """Weights of the layers that read the units; -1 for inputs whose unit is not known."""
        unit_of = {channel: unit for unit, channels in enumerate(roots) for channel in channels}
        for item, module, dim in self._reading(group):
            ids = np.full(module.weight.shape[dim], -1, dtype=np.int64)
            ids[item.idxs] = [unit_of[root] for root in item.root_idxs]
            yield Member(f"{self.names[module]}.weight", dim, ids)

    def _reading(self, group: Any) -> Iterator[tuple[Any, Any, int]]:
        """Layers that read the group's channels and do not pass them on: item, layer, and the dim that reads."""
        for item in group:
            module = item.dep.target.module
            if isinstance(module, READING) and not self.graph.is_out_channel_pruning_fn(item.dep.handler):
                yield item, module, 0 if getattr(module, "transposed", False) else 1

    def _partition(self, group: Any) -> tuple[tuple[tuple[int, ...], ...], dict[str, dict[int, int]]]:
        """The units: channels of the root layer that belong together, and the unit of each channel of each layer."""
        count = len(group[0].idxs)
        producers = self._producers(group)
        ops = self.tp.ops
        splits = (ops._ConcatOp, ops._SplitOp, ops._UnbindOp, ops._SliceOp)
        straight = not any(isinstance(item.dep.target.module, splits) for item in group)
        if straight and all(list(channels) == list(range(count)) for _, _, channels in producers):
            plain = {channel: channel for channel in range(count)}
            return tuple((channel,) for channel in range(count)), {name: plain for name, *_ in producers}
        # Channels are split, joined or shifted: follow each of them separately.
        root = group[0].dep.target.module
        reached = [
            {(name, channel) for name, _, channels in self._producers(one) for channel in channels}
            for one in (self._group(root, [channel]) for channel in range(count))
        ]
        parents = list(range(count))
        seen: dict[tuple[str, int], int] = {}
        for channel, places in enumerate(reached):
            for place in places:
                first = _leader(parents, seen.setdefault(place, channel))
                parents[max(first, _leader(parents, channel))] = min(first, _leader(parents, channel))
        leaders = sorted({_leader(parents, channel) for channel in range(count)})
        unit_of = {leader: unit for unit, leader in enumerate(leaders)}
        roots: list[list[int]] = [[] for _ in leaders]
        owners: dict[str, dict[int, int]] = {name: {} for name, *_ in producers}
        for channel, places in enumerate(reached):
            unit = unit_of[_leader(parents, channel)]
            roots[unit].append(channel)
            for name, own in places:
                owners[name][own] = unit
        return tuple(map(tuple, roots)), owners


def _leader(parents: list[int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index


def _produced(name: str, node: Any) -> Iterator[tuple[str, int, int]]:
    """Name, dim and length of the parameters of a layer that make up its output channels."""
    module = node.module
    if isinstance(module, nn.Parameter):
        yield name, node.pruning_dim % module.ndim, module.shape[node.pruning_dim]
        return
    if isinstance(module, nn.Embedding):
        dims = {"weight": 1}
    elif isinstance(module, nn.modules.conv._ConvNd):
        dims = {"weight": 1 if module.transposed else 0, "bias": 0}
    elif isinstance(module, (nn.Linear, *VECTOR_LAYERS)):
        dims = {"weight": 0, "bias": 0}
    else:  # such as the slopes of a PReLU, which do not make a channel by themselves
        dims = {}
    for key, dim in dims.items():
        param = getattr(module, key, None)
        if param is not None:
            yield f"{name}.{key}", dim, param.shape[dim]


__all__ = ["MIXING", "Graph", "Left", "Member", "UnitSet", "load_torch_pruning", "shortened"]
