"""A small regression problem that ranks share, and the runs that are compared on it."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from proxsps.optim import SPS, DecSPS, PolyakOptimizer, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import L1, GroupLasso

ROWS = 8  # of a batch on one rank
F32, F64 = torch.float32, torch.float64

Make = Callable[..., PolyakOptimizer]


def spectral(params: Iterable[Tensor], **options: Any) -> ScheduleFreeSPS:
    """Spectral directions for all matrices."""
    tensors = list(params)
    matrices = {"params": [p for p in tensors if p.dim() > 1], "metric": "spectral"}
    return ScheduleFreeSPS([matrices, {"params": [p for p in tensors if p.dim() < 2]}], **options)


# Every method, each on its own way through the code: closed form, search, subgradient.
METHODS: dict[str, tuple[Make, dict[str, Any]]] = {
    "ProxSPS": (ProxSPS, {"lr": 8.0, "weight_decay": 0.005}),
    "ProxSPS, L1": (ProxSPS, {"lr": 8.0, "regularizer": L1(0.002)}),
    "ProxSPS, tensors": (ProxSPS, {"lr": 8.0, "regularizer": GroupLasso(0.01)}),
    "ProxSPS, limited": (ProxSPS, {"lr": 8.0, "weight_decay": 0.005, "max_move": 0.5}),
    "ProxSPS, L1, limited": (ProxSPS, {"lr": 8.0, "regularizer": L1(0.002), "max_move": 0.5}),
    "ProxSPS, capturable": (ProxSPS, {"lr": 8.0, "weight_decay": 0.005, "capturable": True}),
    "ProxSPS, L1, capturable": (ProxSPS, {"lr": 8.0, "regularizer": L1(0.002), "capturable": True}),
    "ProxSPS, momentum": (ProxSPS, {"lr": 8.0, "weight_decay": 0.005, "momentum": 0.9}),
    "ProxSPS, matched": (ProxSPS, {"lr": 8.0, "regularizer": L1(0.002), "momentum": 0.5, "cap": "matched"}),
    "ProxSPS, no lr": (ProxSPS, {"lr": None, "weight_decay": 0.005, "momentum": 0.9}),
    "Adam": (ProxSPSAdam, {"weight_decay": 0.005}),
    "Adam, L1": (ProxSPSAdam, {"lr": 0.1, "cap": "proximal", "regularizer": L1(0.002)}),
    "Adam, tensors, limited": (ProxSPSAdam, {"lr": 0.1, "regularizer": GroupLasso(0.01), "max_move": 0.05}),
    "Adam, capturable": (ProxSPSAdam, {"weight_decay": 0.005, "capturable": True}),
    "free, Adam, L1, limited": (ScheduleFreeSPS, {"regularizer": L1(0.002), "max_move": 0.01}),
    "free, Adam, tensors, capturable": (ScheduleFreeSPS, {"regularizer": GroupLasso(0.01), "capturable": True}),
    "spectral, no lr, limited": (spectral, {"weight_decay": 0.005, "max_move": 0.01}),
    "SPS": (SPS, {"lr": 8.0, "weight_decay": 0.005}),
    "SPS, L1": (SPS, {"lr": 8.0, "regularizer": L1(0.002)}),
    "SPS, tensors, limited": (SPS, {"lr": 8.0, "regularizer": GroupLasso(0.01), "max_move": 0.5}),
    "DecSPS": (DecSPS, {"lr": 8.0, "weight_decay": 0.005}),
    "ProxSGD": (ProxSGD, {"lr": 0.05, "weight_decay": 0.05}),
    "ProxSGD, L1, limited": (ProxSGD, {"lr": 0.05, "regularizer": L1(0.01), "max_move": 0.03}),
}


# Methods whose checkpoints are read again, with options that they cannot do without.
SAVED: dict[str, tuple[Make, dict[str, Any]]] = {
    "ProxSPS": (ProxSPS, {}),
    "DecSPS": (DecSPS, {}),
    "ProxSGD": (ProxSGD, {}),
    "momentum": (ProxSPS, {"momentum": 0.9}),
    "no lr": (ProxSPS, {"lr": None, "momentum": 0.9}),
    "Adam": (ProxSPSAdam, {"lr": None}),
    "free": (ScheduleFreeSPS, {"lr": None}),
    "spectral": (spectral, {"lr": None}),
}


def network(dtype: torch.dtype = F64, seed: int = 0, hidden: int = 7) -> nn.Sequential:
    """Of 7, 1 and 3 outputs: over two ranks shards are uneven, or empty on the second."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, hidden), nn.Tanh(), nn.Linear(hidden, 1), nn.Tanh(), nn.Linear(1, 3)).to(dtype)


# Steps by the kernels that none of these methods takes.
FURTHER: list[tuple[type[PolyakOptimizer], dict[str, Any]]] = [
    (ProxSPS, {"lr": 8.0, "regularizer": L1(0.002), "momentum": 0.9, "max_move": 0.5}),
    (ProxSPS, {"lr": 8.0, "regularizer": GroupLasso(0.01), "momentum": 0.9}),
    (ProxSPSAdam, {"lr": 0.1, "regularizer": L1(0.002), "max_move": 0.05}),
    (ProxSGD, {"lr": 1.0, "regularizer": GroupLasso.columns(0.01)}),  # x - lr g cancels
]


def compile_kernels(dtypes: Sequence[torch.dtype] = (F32, F64)) -> None:
    """Steps that take every kernel. No backward pass: a process that has started its threads cannot be forked."""
    for dtype in dtypes:
        for cls, options in (*METHODS.values(), *FURTHER):
            model = network(dtype)
            for p in model.parameters():
                p.grad = p.detach().clone()
            cls(model.parameters(), process_group=False, **options).step(loss=1.0)


@functools.cache
def batch(step: int, world: int, dtype: torch.dtype = F64) -> tuple[Tensor, Tensor]:
    """The joint batch of all ranks; another network made the targets, so that the loss can reach its bound."""
    x = torch.randn(ROWS * world, 6, generator=torch.Generator().manual_seed(100 + step), dtype=F64)
    with torch.no_grad():
        return x.to(dtype), network(seed=7)(x).to(dtype)


def part(tensors: tuple[Tensor, ...], rank: int) -> tuple[Tensor, ...]:
    """The rows of one rank."""
    return tuple(t[rank * ROWS : (rank + 1) * ROWS] for t in tensors)


def train(
    model: nn.Module,
    opt: PolyakOptimizer,
    data: Callable[[int], tuple[Tensor, ...]],
    steps: int,
    resting: Callable[[int], Sequence[int]] = lambda k: (),
) -> list[tuple[str, bool]]:
    """Steps, with the branch of each and whether its length was limited; parameters at rest have no gradient."""
    seen = []
    for k in range(steps):
        x, y = data(k)
        opt.zero_grad()
        loss = mse_loss(model(x), y)
        loss.backward()
        for i in resting(k):
            list(model.parameters())[i].grad = None
        opt.step(loss=loss)
        seen.append((opt.last_step.branch_name, float(opt.last_step.relaxation) < 1))
    return seen


def alone(cls: Make, world: int, steps: int, dtype: torch.dtype, hidden: int = 7, **options: Any) -> Tensor:
    """The parameters that one process reaches on the joint batches."""
    model = network(dtype, hidden=hidden)
    opt = cls(model.parameters(), process_group=False, **options)
    train(model, opt, lambda k: batch(k, world, dtype), steps)
    return vector(model)


def vector(model: nn.Module) -> Tensor:
    """All parameters, whole, as one vector."""
    whole = [p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters()]
    return torch.cat([p.detach().reshape(-1) for p in whole])


def parallel(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(model)


@contextlib.contextmanager
def refused(*kinds: type[Exception]) -> Iterator[list[str]]:
    """Collects the text of an exception that is expected on every rank."""
    text: list[str] = []
    try:
        yield text
    except kinds as error:
        text.append(str(error))


def everywhere(tensor: Tensor, world: int) -> Tensor:
    """The tensors of all ranks, stacked."""
    out = [torch.empty_like(tensor) for _ in range(world)]
    dist.all_gather(out, tensor.contiguous())
    return torch.stack(out)
