"""Scenarios on four ranks: replicas of shards (HSDP), and shards in two directions (FSDP2 with tensor parallel)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import common
import torch
from common import F64, METHODS
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from proxsps.optim import ProxSPS

Result = dict[str, Any]
NAMES = ("ProxSPS", "ProxSPS, L1", "ProxSPS, tensors", "SPS, tensors, limited", "DecSPS", "ProxSGD, L1, limited")
AVERAGED = ("ProxSPS, momentum", "ProxSPS, matched", "Adam, tensors, limited")
RATELESS = ("ProxSPS, no lr", "Adam", "free, Adam, L1, limited", "spectral, no lr, limited")


def replicas_of_shards(rank: int, world: int, folder: Path) -> Result:
    """A mesh of 2 x 2: every shard on two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    out = {}
    for name in (*NAMES, *AVERAGED, *RATELESS):
        cls, options = METHODS[name]
        model = fully_shard(common.network(), mesh=mesh)
        opt = cls(model.parameters(), check_replicas=True, **options)
        common.train(model, opt, lambda k: common.part(common.batch(k, world), rank), 3)
        out[name] = common.vector(model), common.alone(cls, world, 3, F64, **options)
    with CommDebugMode() as seen:
        ProxSPS(model.parameters()).step(loss=1.0)
    out["sent"] = {str(kind): count for kind, count in seen.get_comm_counts().items()}
    with torch.no_grad():
        next(model.parameters()).to_local().add_(rank // 2)  # the second replica of every shard goes astray
    with common.refused(RuntimeError) as out["astray"]:
        ProxSPS(model.parameters(), check_replicas=True).step(loss=1.0)
    return out


def two_directions(rank: int, world: int, folder: Path) -> Result:
    """Tensor parallel inside, FSDP2 outside: ranks of one tensor-parallel pair see the same rows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    out = {}
    for name in (*NAMES, *AVERAGED):
        cls, options = METHODS[name]
        model = common.network(hidden=8)
        parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
        opt = cls(model.parameters(), **options)
        common.train(model, opt, lambda k: common.part(common.batch(k, 2), rank // 2), 3)
        out[name] = common.vector(model), common.alone(cls, 2, 3, F64, 8, **options)
    return out


SCENARIOS = (
    replicas_of_shards,
    two_directions,
)
