"""Ranks with different numbers of batches, under torch's `Join`: finished ranks keep the all-reduces complete."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.join import Join, Joinable, JoinHook, _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from proxsps.optim.blocks import gather
from proxsps.optim.device.numbers import Numbers, step_device
from proxsps.optim.distance import by_set
from proxsps.optim.lists import is_sharded
from proxsps.optim.memory import entries
from proxsps.optim.reduce import Ranks, Sums, further_rows, join
from proxsps.optim.rule import KEPT, Table


class Shadow(JoinHook):
    """What a rank without batches does while others still step."""

    def __init__(self, opt: Any) -> None:
        self._opt = opt

    def main_hook(self) -> None:
        """Take part in the all-reduce of a step, with nothing to add."""
        groups, ranks = self._opt.param_groups, self._opt._ranks
        blocks = gather(groups, ranks)
        for block in blocks:
            block.params, block.slopes, block.indices = [], [], []
        device = step_device([p for group in groups for p in group["params"]], groups[0]["capturable"])
        vector: Any = np.array if device is None else Numbers(device).vector
        nothing, rule = vector([0.0] * len(blocks)), self._opt._rule()
        squared = vector([0.0] * (2 * len(by_set(blocks).members)))
        rows = len(Table._fields) + 1 if device is None else len(Sums._fields) + further_rows(rule)
        join(ranks, vector, blocks, 0.0, 0.0, 0.0, [nothing] * rows, [squared] * rule.distance, active=False)
        if rule.max_move is not None:
            ranks.sum(vector([0.0])[0])

    def post_hook(self, is_last_joiner: bool) -> None:
        """Copy the memory of a rank that stepped to the end, as DistributedDataParallel copies the parameters."""
        opt, group = self._opt, self._opt._ranks.group
        opt._leave_join()
        last = torch.tensor(dist.get_rank(group) if is_last_joiner else -1, device=opt.join_device)
        dist.all_reduce(last, op=dist.ReduceOp.MAX, group=group)
        _take_over(opt, dist.get_global_rank(group, int(last)), group)


def _take_over(opt: Any, source: int, group: Any) -> None:
    """Get the numbers of all groups, and the state of all parameters, from the rank `source`."""
    params = [p for options in opt.param_groups for p in options["params"]]
    numbers = [{key: float(options[key]) for key in KEPT if key in options} for options in opt.param_groups]
    shapes = {
        i: {key: (value.shape, value.dtype) for key, value in opt.state[p].items()}
        for i, p in enumerate(params)
        if p in opt.state
    }
    box = [(numbers, shapes)]
    dist.broadcast_object_list(box, src=source, group=group)
    numbers, shapes = box[0]
    for options, own in zip(opt.param_groups, numbers, strict=True):
        for key, number in own.items():
            if isinstance(options[key], Tensor):
                options[key].fill_(number)
            else:
                options[key] = number
    for i, held_there in shapes.items():
        state = opt.state[params[i]]
        for key, (shape, dtype) in held_there.items():
            held = state.get(key)
            if held is None or held.shape != shape:
                state[key] = held = torch.empty(shape, dtype=dtype, device=opt.join_device)
            real = entries(held, False)
            wire = real.contiguous()
            dist.broadcast(wire, src=source, group=group)
            real.copy_(wire)


class TakesUnevenInputs(Joinable):
    """The part of an optimizer that `Join` calls."""

    param_groups: list[dict[str, Any]]
    _ranks: Ranks
    _watched: list[tuple[Tensor | float, float]]

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """What `Join([model, opt])` calls on ranks that have run out of batches."""
        if any(is_sharded(p) for group in self.param_groups for p in group["params"]):
            raise ValueError(
                "Join does not work with sharded parameters (DTensor), because every rank holds parts that the others "
                "need: give all ranks the same number of batches."
            )
        self._ranks.joined_divide = kwargs.get("divide_by_initial_world_size", True)  # DDP's default
        return Shadow(self)

    @property
    def join_device(self) -> torch.device:
        """Where the parameters are."""
        device: torch.device = self.param_groups[0]["params"][0].device
        return device

    @property
    def join_process_group(self) -> Any:
        """The ranks that step together."""
        return self._ranks.group

    def _leave_join(self) -> None:
        """Outside of any join context; torch itself leaves the settings of the last one behind."""
        self._join_config = _JoinConfig.construct_disabled_join_config()
        self._models: weakref.WeakKeyDictionary[DistributedDataParallel, object] | None = None

    def _wrappers(self) -> list[DistributedDataParallel]:
        """The models whose gradients DistributedDataParallel averages; a parameter has no reference to its model."""
        params = {p for group in self.param_groups for p in group["params"] if p.requires_grad}
        living = () if all(map(is_sharded, params)) else _living(DistributedDataParallel)
        return [model for model in living if not params.isdisjoint(model.parameters())]

    def _check_uneven(self) -> None:
        """Raise an error if the all-reduce of this step would wait forever once a rank runs out of batches."""
        if torch.compiler.is_compiling():
            return
        if self._models is None:
            self._models = weakref.WeakKeyDictionary(dict.fromkeys(self._wrappers()))
        mine = self._join_config
        for model, past in list(self._models.items()):
            if model._join_config is past or mine.enable or not _shadows(model._join_config):
                continue
            if any(model in context._joinables for context in _living(Join)):
                raise RuntimeError(
                    "The model is in a join context for uneven inputs, but the optimizer is not. A rank that runs out "
                    "of batches would leave the others waiting in the optimizer's all-reduce: use "
                    "`with Join([model, opt]):` instead of `with model.join():`."
                )
            self._models[model] = model._join_config  # left behind by a context that is over
        if _shadows(mine) and mine.is_first_joinable:
            raise RuntimeError("Join calls its list in order, and the model must come first: use Join([model, opt]).")
        if _shadows(mine) and len(self._watched) > 1:
            raise RuntimeError(
                f"Join pairs every forward pass with one step, but {len(self._watched)} losses were watched since the "
                "last step: accumulate gradients without Join, on ranks with the same number of batches."
            )


def _shadows(config: _JoinConfig) -> bool:
    """Whether finished ranks continue to join the others' messages, rather than stopping all ranks."""
    return config.enable and not config.throw_on_early_termination


def _living(kind: type) -> Iterator[Any]:
    """All objects of a kind in this process: about a tenth of a second, so not for every step.

    isinstance of a class with abstract methods would take ten times as long.
    """
    return (thing for thing in gc.get_objects() if kind in type(thing).__mro__)
