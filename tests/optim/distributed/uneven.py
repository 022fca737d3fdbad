"""Scenarios of data parallel training in which a rank runs out of batches before the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
from common import METHODS
from torch import Tensor
from torch.distributed.algorithms.join import Join
from torch.nn.functional import mse_loss

from proxsps.optim import DecSPS, PolyakOptimizer, ProxSPS

Result = dict[str, Any]
BATCHES = (2, 5)  # of the first and of the second rank
NAMES = ("ProxSPS, L1", "ProxSPS, capturable", "SPS, L1", "DecSPS", "ProxSPS, no lr", "Adam", "free, Adam, L1, limited")


def rows(rank: int, world: int) -> Iterator[tuple[Tensor, ...]]:
    for k in range(BATCHES[rank]):
        yield common.part(common.batch(k, world), rank)


def alone(cls: type[PolyakOptimizer], world: int, divide: bool, options: dict[str, Any]) -> tuple[Tensor, Any]:
    """One process that takes the mean over the ranks that are left, or over all with zero for those that are not."""
    model = common.network()
    opt = cls(model.parameters(), process_group=False, **options)
    for k in range(max(BATCHES)):
        left = [r for r in range(world) if k < BATCHES[r]]
        parts = [common.part(common.batch(k, world), r) for r in left]
        opt.zero_grad()
        loss = sum(mse_loss(model(x), y) for x, y in parts) / (world if divide else len(left))
        loss.backward()
        opt.step(loss=loss)
    return common.vector(model), opt.param_groups[0].get("memory")


def joined(rank: int, world: int, folder: Path) -> Result:
    """Join([model, opt]), with both ways in which DDP divides gradients."""
    out = {}
    for divide in (True, False):
        for name in NAMES:
            cls, options = METHODS[name]
            model = common.parallel(common.network())
            opt = cls(model.parameters(), check_replicas=True, **options)
            with Join([model, opt], divide_by_initial_world_size=divide):
                for x, y in rows(rank, world):
                    opt.zero_grad()
                    loss = mse_loss(model(x), y)
                    loss.backward()
                    opt.step(loss=loss)
            got = common.vector(model), opt.param_groups[0].get("memory")
            out[name, divide] = got, alone(cls, world, divide, options)
    return out


def skipped(rank: int, world: int, folder: Path) -> Result:
    """A limited step that is skipped: ranks that are done wait for its second message too."""
    out = []
    for path in ({}, {"capturable": True}):
        model = common.parallel(common.network())
        opt = ProxSPS(model.parameters(), lr=8.0, max_move=0.1, **path)
        with Join([model, opt]):
            for k, (x, y) in enumerate(rows(rank, world)):
                opt.zero_grad()
                loss = mse_loss(model(x), y)
                loss.backward()
                opt.step(loss=loss * (float("nan") if k == 3 else 1.0))
                out.append(opt.last_step.branch_name)
    return {"branches": out}


def afterwards(rank: int, world: int, folder: Path) -> Result:
    """Training goes on without a context: torch leaves the settings of the last one in the model."""
    model = common.parallel(common.network())
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.join():
        for x, y in rows(rank, world):
            other.zero_grad()
            mse_loss(model(x), y).backward()
            other.step()
    opt = DecSPS(model.parameters(), check_replicas=True)
    common.train(model, opt, lambda k: common.part(common.batch(k, world), rank), 3)
    return {"points": common.everywhere(common.vector(model), world), "steps": opt.param_groups[0]["k"]}


def refusals(rank: int, world: int, folder: Path) -> Result:
    """What would end in messages without a partner; every rank raises before it sends any."""
    out: Result = {}

    def attempt(name: str, context: Any, losses: int = 1) -> None:
        model = common.parallel(common.network())
        opt = ProxSPS(model.parameters())
        x, y = common.part(common.batch(0, world), rank)
        with common.refused(RuntimeError, ValueError) as out[name], context(model, opt):
            for _ in range(losses):
                opt.watch(mse_loss(model(x), y)).backward()
            opt.step()

    attempt("model alone", lambda model, opt: model.join())
    attempt("optimizer first", lambda model, opt: Join([opt, model]))
    attempt("accumulation", lambda model, opt: Join([model, opt]), losses=2)
    attempt("switched off", lambda model, opt: model.join(enable=False))
    attempt("all stop", lambda model, opt: model.join(throw_on_early_termination=True))

    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (world,))
    sharded = common.network()
    torch.distributed.fsdp.fully_shard(sharded, mesh=mesh)
    with common.refused(ValueError) as out["shards"]:
        Join([ProxSPS(sharded.parameters())])
    dist.barrier()
    return out


SCENARIOS = (joined, skipped, afterwards, refusals)
