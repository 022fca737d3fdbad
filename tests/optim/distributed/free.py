"""Scenarios of the schedule-free form: two points on replicas and on shards, modes, checkpoints, shared matrices."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import F32, F64
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import mse_loss

from proxsps.optim import ScheduleFreeSPS, spreading
from proxsps.regularizers import L1, Box, GroupLasso

Result = dict[str, Any]
STEPS = 100

# On shards, on gathered tensors, and with a constraint.
REGULARIZERS = {
    "L1": L1(0.001),
    "tensors": GroupLasso(0.005),
    "rows": GroupLasso(0.005, dims=(-1,)),
    "Box": Box(-0.3, 0.3),
}
SAVED = {"adam": functools.partial(ScheduleFreeSPS, regularizer=L1(0.001)), "spectral": common.spectral}
MODES = [(saved, held) for saved in (True, False) for held in (True, False)]


def deep(width: int = spreading.SIDE) -> nn.Sequential:
    """With two matrices that are large enough to be shared out, and one that is not."""
    torch.manual_seed(0)
    sizes = (6, width, width + 2, width, 3)
    layers = [layer for pair in itertools.pairwise(sizes) for layer in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(F64)


def rows(rank: int, world: int) -> Any:
    return lambda k: common.part(common.batch(k, world), rank)


def points(model: nn.Module, opt: Any) -> tuple[Tensor, Tensor, Tensor]:
    """y, x, and y again."""
    before = common.vector(model)
    opt.eval()
    shown = common.vector(model)
    opt.train()
    return before, shown, common.vector(model)


def alone(make: Any, model: nn.Module, world: int, steps: int, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    opt = make(model.parameters(), process_group=False, **options)
    common.train(model, opt, lambda k: common.batch(k, world), steps)
    return points(model, opt)


def sent(opt: Any) -> dict[str, int]:
    with CommDebugMode() as seen:
        opt.step(loss=1.0)
    return {str(kind): count for kind, count in seen.get_comm_counts().items()}


CASES = {
    "adam": (ScheduleFreeSPS, {"weight_decay": 0.005}),
    "adam, capturable": (ScheduleFreeSPS, {"weight_decay": 0.005, "capturable": True}),
    "spectral": (common.spectral, {"weight_decay": 0.005}),
    "spectral, capturable": (common.spectral, {"weight_decay": 0.005, "capturable": True}),
}


def replicas(rank: int, world: int, folder: Path) -> Result:
    """100 steps on ranks and in one process, of which the matrices are shared out as if they were large."""
    out = {}
    with mock.patch.object(spreading, "SIDE", 16):
        for name, (make, options) in CASES.items():
            model = common.parallel(deep(16))
            opt = make(model.parameters(), check_replicas=True, **options)
            common.train(model, opt, rows(rank, world), STEPS)
            found = points(model, opt)
            opt._ranks.check = False
            single = alone(make, deep(16), world, STEPS, **options) if rank == 0 else None
            out[name] = [common.everywhere(point, world) for point in found], single, sent(opt)
    return out


def single_precision(rank: int, world: int, folder: Path) -> Result:
    """Large matrices of f32, whose iteration runs in bf16 on some CPUs."""
    model = common.parallel(deep().float())
    opt = common.spectral(model.parameters(), check_replicas=True)
    common.train(model, opt, lambda k: common.part(common.batch(k, world, F32), rank), 5)
    return {"points": [common.everywhere(point, world) for point in points(model, opt)]}


def shards(rank: int, world: int, folder: Path) -> Result:
    """The same on shards, which are uneven, and of which one rank has none of some tensors."""
    out = {}
    for name, (make, options) in CASES.items():
        model = fully_shard(common.network())
        opt = make(model.parameters(), **options)
        common.train(model, opt, rows(rank, world), STEPS)
        found, single = points(model, opt), alone(make, common.network(), world, STEPS, **options)
        state = [t for own in opt.state.values() for key, t in own.items() if key != "steps"]
        local = all(isinstance(t, DTensor) and t.placements == (Shard(0),) for t in state)
        out[name] = found, single, sent(opt), local
    return out


def packed(rank: int, world: int, folder: Path) -> Result:
    """Filters, and several matrices in one tensor that shards cut elsewhere than between them."""
    found = []
    for sharded in (True, False):
        torch.manual_seed(1)
        model = nn.ParameterList([torch.randn(9, 5), torch.randn(4, 3, 2, 2), torch.randn(9, 5), torch.randn(1, 8)])
        if sharded:
            fully_shard(model)
        first, *others = model.parameters()
        groups = [{"params": [first], "packed": 3}, {"params": others}]
        opt = ScheduleFreeSPS(groups, metric="spectral", process_group=None if sharded else False)
        for k in range(5):
            for i, p in enumerate(model.parameters()):
                p.grad = torch.cos(3 * p.detach() + i + k)
            opt.step(loss=1.0)
        found.append(common.vector(model))
    return {"points": tuple(found)}


def cleaned(rank: int, world: int, folder: Path) -> Result:
    """The averages that regularisers leave to evaluation."""
    out = {}
    for name, phi in REGULARIZERS.items():
        model = fully_shard(common.network())
        options = {"regularizer": phi, "lower_bound": 0.0}
        opt = ScheduleFreeSPS(model.parameters(), **options)
        common.train(model, opt, rows(rank, world), 30)
        out[name] = points(model, opt), alone(ScheduleFreeSPS, common.network(), world, 30, **options)
    return out


def missing(rank: int, world: int, folder: Path) -> Result:
    """The last rank has no gradient for a matrix that is shared out, or for none at all; on replicas and on shards."""
    out = {}
    for sharded, lacking, capturable in itertools.product((False, True), ("one", "all"), (False, True)):
        model = fully_shard(deep()) if sharded else deep()
        opt = common.spectral(model.parameters(), capturable=capturable)
        before = common.vector(model)
        for i, p in enumerate(model.parameters()):
            if rank < world - 1 or (lacking == "one" and i != 2):
                p.grad = torch.ones_like(p)
        with common.refused(RuntimeError) as text:
            opt.step(loss=0.5)
        out[sharded, lacking, capturable] = text, torch.equal(common.vector(model), before)
    return out


def joined(rank: int, world: int, folder: Path) -> Result:
    """A rank that runs out of batches orthogonalises nothing."""
    batches = (2, 4)
    model = common.parallel(deep())
    opt = common.spectral(model.parameters(), check_replicas=True)
    with Join([model, opt], divide_by_initial_world_size=False):
        for k in range(batches[rank]):
            x, y = rows(rank, world)(k)
            opt.zero_grad()
            loss = mse_loss(model(x), y)
            loss.backward()
            opt.step(loss=loss)
    single = deep()
    other = common.spectral(single.parameters(), process_group=False)
    left = [common.batch(k, world) if k < batches[0] else rows(1, world)(k) for k in range(batches[1])]
    common.train(single, other, lambda k: left[k], batches[1])
    return {"points": (points(model, opt), points(single, other))}


def content(model: nn.Module, opt: Any) -> dict[str, Any]:
    return {"model": get_model_state_dict(model), "optim": get_optimizer_state_dict(model, opt)}


def load(model: nn.Module, opt: Any, where: Path) -> None:
    """Into an optimizer that has taken a step, whatever its mode."""
    holder = content(model, opt)
    dcp.load(holder, checkpoint_id=where)
    set_model_state_dict(model, holder["model"])
    set_optimizer_state_dict(model, opt, holder["optim"])


def taken(make: Any, wrap: Any, data: Any, evaluating: bool, group: Any = None) -> tuple[nn.Module, Any]:
    """A model and an optimizer after a step, in the mode in which a checkpoint is loaded."""
    model = wrap(common.network(seed=1))
    opt = make(model.parameters(), process_group=group)
    common.train(model, opt, data, 1)
    opt.train(not evaluating)
    return model, opt


def went_on(model: nn.Module, opt: Any, data: Any) -> list[Tensor]:
    """What is evaluated, and where two more steps lead."""
    opt.eval()
    shown = common.vector(model)
    opt.train()
    common.train(model, opt, lambda k: data(k + 50), 2)
    return [shown, common.vector(model)]


def save(rank: int, world: int, folder: Path) -> Result:
    """Checkpoints of shards in both modes, read on two ranks in both modes; the test reads them on one."""
    out = {}
    data = rows(rank, world)
    for name, make in SAVED.items():
        for saved in (True, False):
            model = fully_shard(common.network())
            opt = make(model.parameters())
            common.train(model, opt, data, 3)
            opt.train(not saved)
            dcp.save(content(model, opt), checkpoint_id=folder / f"free-{name}-{saved}")
            want = went_on(model, opt, data)
            for held in (True, False):
                other, resumed = taken(make, fully_shard, data, held)
                load(other, resumed, folder / f"free-{name}-{saved}")
                out[name, saved, held] = went_on(other, resumed, data), want
    return out


def spread_out(rank: int, world: int, folder: Path) -> Result:
    """A checkpoint that one process wrote, read on two ranks."""
    out = {}
    for name, make in SAVED.items():
        for saved, held in MODES:
            model = common.network()
            opt = make(model.parameters(), process_group=False)
            common.train(model, opt, lambda k: common.batch(k, world), 3)
            opt.train(not saved)
            where = folder / f"free-{name}-{saved}-{held}-alone"
            if rank == 0:
                dcp.save(content(model, opt), checkpoint_id=where, no_dist=True)
            dist.barrier()
            other, resumed = taken(make, fully_shard, rows(rank, world), held)
            load(other, resumed, where)
            found = went_on(other, resumed, rows(rank, world))
            out[name, saved, held] = found, went_on(model, opt, lambda k: common.batch(k, world))
    return out


def compiled(rank: int, world: int, folder: Path) -> Result:
    """torch.compile of a step, with its all-gather."""
    found = []
    for traced in (True, False):
        model = deep()
        opt = common.spectral(model.parameters())

        def step(loss: Tensor, opt: Any = opt) -> None:
            opt.step(loss=loss)

        step = torch.compile(step, backend="eager", fullgraph=True) if traced else step
        for p in model.parameters():
            p.grad = torch.cos(3 * p.detach())
        step(torch.tensor(0.5, dtype=F64))
        found.append(common.vector(model))
    return {"points": tuple(found), "sent": sent(opt)}


SCENARIOS = (replicas, single_precision, shards, packed, cleaned, missing, joined, save, spread_out, compiled)
