"""Scenarios of sharded training (FSDP2) over two ranks; the second dim of a tensor is never cut, the first always."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import common
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import F32, F64, METHODS
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import mse_loss

from proxsps.optim import SPS, ProxSPS, ProxSPSAdam
from proxsps.regularizers import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L2Ball,
    NuclearNorm,
    Regularizer,
    SparseGroupLasso,
    TotalVariation1D,
)
from proxsps.regularizers.units import UnitLasso, UnitTensor

Result = dict[str, Any]

# Sums over rows stay on the shards, the others gather; each on the two-dim tensors of the network.
REGULARIZERS = {
    "Box": Box(-0.5, 0.5),
    "ElasticNet": ElasticNet(0.002, 0.01),
    "rows": GroupLasso.rows(0.01),
    "columns": GroupLasso.columns(0.01),
    "sparse rows": SparseGroupLasso(0.002, 0.01, (-1,)),
    "TotalVariation1D": TotalVariation1D(0.01),
    "NuclearNorm": NuclearNorm(0.01),
    "ball": L2Ball(2.5, joint=True),
}


class Weighted(L1):
    """An l1 norm with a weight for every entry, which has to be cut along with the tensor."""

    def __init__(self, weights: list[Any]) -> None:
        super().__init__(1.0)
        object.__setattr__(self, "weights", weights)

    def at(self, index: int) -> Weighted:
        return Weighted(self.weights[index])

    def piece(self, ndim, dims, cut) -> Weighted:
        return Weighted(cut(self.weights))

    def prox(self, z, alpha):
        return z.sign() * (z.abs() - alpha * self.weights).clamp(min=0)

    def prox_jvp(self, z, y, v, alpha):
        return v * (y != 0)


def shard(model: nn.Module) -> nn.Module:
    return fully_shard(model)


def both(rank: int, world: int):
    """How to prepare a model, its rows and its process group: on shards, and alone."""
    return (shard, data(rank, world), None), (lambda model: model, lambda k: common.batch(k, world), False)


def data(rank: int, world: int, dtype: torch.dtype = F64):
    return lambda k: common.part(common.batch(k, world, dtype), rank)


def matrices(model: nn.Module, phi: Regularizer | None) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim == 2], "regularizer": phi},
        {"params": [p for p in params if p.ndim == 1], "lr": 4.0},
    ]


def joint(rank: int, world: int, folder: Path) -> Result:
    """Every method on shards and in one process."""
    out = {}
    for dtype, steps in ((F32, 3), (F64, 5)):
        for name, (cls, options) in METHODS.items():
            model = shard(common.network(dtype))
            opt = cls(model.parameters(), **options)
            seen = common.train(model, opt, data(rank, world, dtype), steps)
            out[name, dtype] = common.vector(model), common.alone(cls, world, steps, dtype, **options), seen
    return out


def regularizers(rank: int, world: int, folder: Path) -> Result:
    """Regularisers on the matrices, with the group of vectors beside them."""
    out = {}
    cases = {name: (ProxSPS, phi) for name, phi in REGULARIZERS.items()}
    cases |= {f"SPS, {name}": (SPS, REGULARIZERS[name]) for name in ("rows", "columns", "TotalVariation1D")}
    for name, (cls, phi) in cases.items():
        points = []
        for wrap, rows, group in both(rank, world):
            model = wrap(common.network())
            opt = cls(matrices(model, phi), lr=8.0, max_move=1.0, process_group=group)
            seen = common.train(model, opt, rows, 4)
            points.append(common.vector(model))
        out[name] = *points, seen
    return out


# A regularised group of one row, which the second rank has nothing of.
ONE_ROW = {
    "L1": (ProxSPS, L1(0.002), {}),
    "L1, torch": (ProxSPS, L1(0.002), {"fused": False}),
    "rows": (ProxSPS, GroupLasso(0.01, dims=(1,)), {}),
    "rows, limited": (ProxSPS, GroupLasso(0.01, dims=(1,)), {"max_move": 0.5}),
    "L1, limited": (ProxSPS, L1(0.002), {"max_move": 0.5}),
    "L1, momentum": (ProxSPS, L1(0.002), {"momentum": 0.5}),
    "rows, matched": (ProxSPS, GroupLasso(0.01, dims=(1,)), {"cap": "matched"}),
    "L1, no lr": (ProxSPS, L1(0.002), {"lr": None, "momentum": 0.9}),
    "L1, Adam": (ProxSPSAdam, L1(0.002), {"lr": 0.1, "cap": "proximal", "max_move": 0.05}),
    "rows, Adam": (ProxSPSAdam, GroupLasso(0.01, dims=(1,)), {"lr": None}),
    "L1, device": (ProxSPS, L1(0.002), {"capturable": True}),
    "rows, device": (ProxSPS, GroupLasso(0.01, dims=(1,)), {"capturable": True, "max_move": 0.5}),
    "L1, device, matched": (ProxSPS, L1(0.002), {"capturable": True, "cap": "matched"}),
    "L1, device, Adam": (ProxSPSAdam, L1(0.002), {"capturable": True, "lr": 0.1, "cap": "proximal"}),
}


def one_row(rank: int, world: int, folder: Path) -> Result:
    """A tensor of one row alone in its group; and the same beside another regularised group."""
    out = {}
    for name, (cls, phi, options) in ONE_ROW.items():
        for beside in (None, L1(0.001)) if name in ("L1", "rows", "L1, device") else (None,):
            points = []
            for wrap, rows, group in both(rank, world):
                model = wrap(common.network())
                first, *others = [p for p in model.parameters() if p.shape != (1, 7)]
                (own,) = (p for p in model.parameters() if p.shape == (1, 7))
                groups = [{"params": [first], "regularizer": beside}, {"params": [own], "regularizer": phi}]
                opt = cls([*groups, {"params": others}], **{"lr": 8.0, "process_group": group, **options})
                seen = common.train(model, opt, rows, 3)
                points.append(common.vector(model))
            out[name, beside is not None] = *points, seen
    return out


def units(rank: int, world: int, folder: Path) -> Result:
    """Units of a network, which need whole tensors, in Adam's metric and without."""
    out: Result = {}
    cases = {
        "ProxSPS": (ProxSPS, {"lr": 8.0}),
        "proximal": (ProxSPSAdam, {"lr": 0.1, "cap": "proximal"}),
        "no lr": (ProxSPSAdam, {"lr": None}),
        "device": (ProxSPS, {"lr": 8.0, "capturable": True}),
    }
    for name, (cls, options) in cases.items():
        points = []
        for wrap, rows, group in reversed(both(rank, world)):
            model = common.network()
            params = list(model.parameters())[:3]
            dims = zip(params, (0, 0, 1), strict=True)
            phi = UnitLasso(0.02, tuple(UnitTensor(tuple(p.shape), dim, range(7)) for p, dim in dims))
            params = list(wrap(model).parameters())
            groups = [{"params": params[:3], "regularizer": phi}, {"params": params[3:]}]
            opt = cls(groups, process_group=group, **options)
            common.train(model, opt, rows, 3)
            points.append(common.vector(model))
        out[name] = tuple(points)
    params[0].grad = None
    with common.refused(ValueError) as out["missing"]:
        opt.step(loss=1.0)
    return out


def resting(rank: int, world: int, folder: Path) -> Result:
    """Some parameters have no gradient in some steps; their averages are in the model, as shards and as whole tensors.

    `fully_shard` may still hold the gradients of parameters that were not used; here they are dropped after backward.
    """
    out = {}
    cases = {
        "momentum": (ProxSPS, {"lr": 8.0, "momentum": 0.9}, L1(0.002)),
        "whole": (ProxSPS, {"lr": 8.0, "momentum": 0.9}, NuclearNorm(0.01)),
        "no lr": (ProxSPS, {"lr": None, "momentum": 0.9, "capturable": True}, None),
        "Adam": (ProxSPSAdam, {}, None),
    }
    for name, (cls, options, phi) in cases.items():
        points = []
        for wrap, rows, group in both(rank, world):
            model = wrap(common.network())
            params = list(model.parameters())
            groups = [{"params": params[::2], "regularizer": phi}, {"params": params[1::2]}]
            opt = cls(groups, process_group=group, **options)
            common.train(model, opt, rows, 6, lambda k: [(k + i) % 6 for i in range(k % 4)])
            points.append(common.vector(model))
        out[name] = tuple(points)
    return out


def arrays(rank: int, world: int, folder: Path) -> Result:
    """Regularisers that hold an array a tensor: whole, sharded as the parameters, and not a centre at all."""
    out = {}
    for kind in ("whole", "sharded", "weights"):
        points = []
        for wrap, rows, group in both(rank, world):
            model = common.network()
            start = [p.detach() + 0.1 for p in model.parameters()]
            model = wrap(model)
            if kind == "sharded":
                start = [p.detach() + 0.1 for p in model.parameters()]
            phi = Weighted([0.02 * t.abs() for t in start]) if kind == "weights" else L2(0.05, start)
            opt = ProxSPS(model.parameters(), lr=8.0, regularizer=phi, process_group=group)
            common.train(model, opt, rows, 4)
            points.append(common.vector(model))
        out[kind] = tuple(points)
    return out


def collectives(rank: int, world: int, folder: Path) -> Result:
    """What the optimizer sends in one step: closed form, search on shards, whole tensors."""
    out = {}
    for name, phi in {"decay": L2(0.05), "L1": L1(0.002), "whole": NuclearNorm(0.01)}.items():
        model = shard(common.network())
        opt = ProxSPS(matrices(model, phi), lr=8.0)
        common.train(model, opt, data(rank, world), 1)
        with CommDebugMode() as seen:
            opt.step(loss=1.0)
        counts = {str(kind): count for kind, count in seen.get_comm_counts().items()}
        out[name] = counts, int(opt.last_step.evaluations)
    return out


# One method for each way through the code over shards and whole tensors; `joint` has all of them over shards.
MIXED = (
    "ProxSPS",
    "ProxSPS, L1, limited",
    "ProxSPS, matched",
    "ProxSPS, no lr",
    "Adam",
    "Adam, tensors, limited",
    "SPS, L1",
    "SPS, tensors, limited",
    "DecSPS",
    "ProxSGD, L1, limited",
)
RATELESS = ("ProxSPS, no lr", "Adam")  # the sample of their start needs shards of rows


def mixed(rank: int, world: int, folder: Path) -> Result:
    """Sharded and replicated parameters, DTensor or not, in one group: as tensor parallel training leaves them."""
    mesh = init_device_mesh("cpu", (world,))
    out = {}
    for name in MIXED:
        cls, options = METHODS[name]
        points = []
        for spread in (True, False):
            params = [p.detach().clone() for p in common.network().parameters()]
            grads = [torch.cos(3 * p + i) for i, p in enumerate(params)]
            if spread:
                params[0] = distribute_tensor(params[0], mesh, [Shard(0)])
                params[2] = distribute_tensor(params[2], mesh, [Shard(0 if name in RATELESS else 1)])
                params[1] = DTensor.from_local(params[1], mesh)
            params = [nn.Parameter(p) for p in params]
            for i, p in enumerate(params):
                p.grad = distribute_tensor(grads[i], mesh, p.placements) if isinstance(p, DTensor) else grads[i]
            if spread:  # a gradient that is still to be summed over the ranks
                params[0].grad = DTensor.from_local(grads[0] / world, mesh, [Partial()])
            opt = cls(params, process_group=None if spread else False, **options)
            opt.step(loss=1.5)
            whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in params]
            points.append(torch.cat([p.detach().reshape(-1) for p in whole]))
            entries = tuple(opt.last_step.tau.shape)
        out[name] = *points, entries
    return out


def not_finite(rank: int, world: int, folder: Path) -> Result:
    """An infinite entry in the shard of the last rank: no rank moves."""
    out = {}
    for name, phi in {"closed": None, "L1": L1(0.01), "whole": GroupLasso(0.1)}.items():
        model = shard(common.network())
        opt = ProxSPS(model.parameters(), regularizer=phi)
        before = common.vector(model)
        x, y = data(rank, world)(0)
        mse_loss(model(x), y).backward()
        if rank == world - 1:
            next(model.parameters()).grad.to_local()[0] = math.inf
        opt.step(loss=0.5)
        out[name] = torch.equal(common.vector(model), before), opt.last_step.branch_name
    return out


def scaled(rank: int, world: int, folder: Path) -> Result:
    """A gradient scaler on shards: an overflow on one rank skips the step on all."""
    model = shard(common.network(F32))
    opt = ProxSPS(model.parameters(), lr=8.0, weight_decay=0.005)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for k in range(3):
        x, y = data(rank, world, F32)(k)
        opt.zero_grad()
        loss = mse_loss(model(x), y)
        scaler.scale(loss).backward()
        if k == 1 and rank == world - 1:
            next(model.parameters()).grad.to_local()[0] = math.inf
        scaler.step(opt, loss=loss)
        scaler.update()
        scales.append(scaler.get_scale())
    single = common.network(F32)
    other = ProxSPS(single.parameters(), lr=8.0, weight_decay=0.005, process_group=False)
    common.train(single, other, lambda k: common.batch(2 * k, world, F32), 2)
    return {"scales": scales, "points": (common.vector(model), common.vector(single))}


def half(rank: int, world: int, folder: Path) -> Result:
    """bf16 in forward and backward, parameters and reductions in f32: progress on one batch."""
    model = common.network(F32)
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=F32))
    opt = ProxSPS(model.parameters(), weight_decay=1e-4)
    losses = []
    for _ in range(30):
        x, y = data(rank, world, F32)(0)
        opt.zero_grad()
        loss = opt.watch(mse_loss(model(x).float(), y))
        loss.backward()
        opt.step()
        losses.append(float(opt.last_step.gap))
    return {"losses": losses}


def refusals(rank: int, world: int, folder: Path) -> Result:
    """What cannot be right: shards of ranks that do not step together, and flattened parameters."""
    out = {}
    own = [dist.new_group([r]) for r in range(world)][rank]
    for name, group in {"off": False, "own": own}.items():
        model = shard(common.network())
        x, y = data(rank, world)(0)
        mse_loss(model(x), y).backward()
        with common.refused(ValueError) as out[name]:
            ProxSPS(model.parameters(), process_group=group).step(loss=1.0)
    mesh = init_device_mesh("cpu", (world,))
    for name in RATELESS:
        cls, options = METHODS[name]
        x = nn.Parameter(distribute_tensor(torch.ones(4, 6, dtype=F64), mesh, [Shard(1)]))
        x.grad = torch.ones_like(x)
        with common.refused(ValueError) as text:
            cls([x], **options).step(loss=1.0)
        out[name] = text, bool((x.to_local() == 1).all())
    flat = FullyShardedDataParallel(common.network(), use_orig_params=True, device_id=torch.device("cpu"))
    with common.refused(ValueError) as out["FSDP1"]:
        ProxSPS(flat.parameters())
    return out


def save(rank: int, world: int, folder: Path) -> Result:
    """Checkpoints of fresh and stepped optimizers, read again on two ranks; the test reads them on one."""
    out = {}
    for name, (cls, own) in common.SAVED.items():
        for steps in (0, 3):
            model = shard(common.network())
            opt = cls(model.parameters(), **{"lr": 0.8, "weight_decay": 0.005, **own})
            common.train(model, opt, data(rank, world), steps)
            weights, state = get_state_dict(model, opt)
            where = folder / f"{name}-{steps}"
            dcp.save({"model": weights, "optim": state}, checkpoint_id=where)
            saved = common.vector(model)
            other = shard(common.network(seed=1))
            resumed = cls(other.parameters(), **{"lr": 0.1, **own})
            weights, state = get_state_dict(other, resumed)
            holder = {"model": weights, "optim": state}
            dcp.load(holder, checkpoint_id=where)
            set_state_dict(other, resumed, model_state_dict=holder["model"], optim_state_dict=holder["optim"])
            loaded = common.vector(other)
            for m, o in ((model, opt), (other, resumed)):
                common.train(m, o, lambda k: data(rank, world)(k + 50), 2)
            out[name, steps] = saved, loaded, common.vector(model), common.vector(other)
    return out


def spread_out(rank: int, world: int, folder: Path) -> Result:
    """A checkpoint that one process wrote, read on two ranks: the state itself, and the steps that follow."""
    out = {}
    for name, (cls, own) in common.SAVED.items():
        model = common.network()
        opt = cls(model.parameters(), process_group=False, **{"lr": 0.8, "weight_decay": 0.005, **own})
        common.train(model, opt, lambda k: common.batch(k, world), 3)
        weights, state = get_state_dict(model, opt)
        where = folder / f"{name}-alone"
        if rank == 0:
            dcp.save({"model": weights, "optim": state}, checkpoint_id=where, no_dist=True)
        dist.barrier()
        other = shard(common.network(seed=1))
        resumed = cls(other.parameters(), **{"lr": 0.1, **own})
        weights, state = get_state_dict(other, resumed)
        holder = {"model": weights, "optim": state}
        dcp.load(holder, checkpoint_id=where)
        set_state_dict(other, resumed, model_state_dict=holder["model"], optim_state_dict=holder["optim"])
        states = [_whole(o.state_dict()["state"]) for o in (opt, resumed)]
        common.train(model, opt, lambda k: common.batch(k + 50, world), 2)
        common.train(other, resumed, lambda k: data(rank, world)(k + 50), 2)
        out[name] = states, (common.vector(other), common.vector(model))
    return out


def _whole(state: dict[int, dict[str, torch.Tensor]]) -> dict[int, dict[str, torch.Tensor]]:
    return {
        i: {key: t.full_tensor() if isinstance(t, DTensor) else t for key, t in own.items()} for i, own in state.items()
    }


SCENARIOS = (
    joint,
    regularizers,
    one_row,
    units,
    arrays,
    resting,
    collectives,
    mixed,
    not_finite,
    scaled,
    half,
    refusals,
    save,
    spread_out,
)
