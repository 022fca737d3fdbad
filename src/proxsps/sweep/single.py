"""One run through the optimizers that users call, step by step: any model, and the yardstick of the batched engine."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.optim.base import PolyakOptimizer
from proxsps.problems.base import Problem
from proxsps.sweep.result import METRICS, RunResult, alpha_of_epoch, batches, median_zeta
from proxsps.sweep.spec import RunSpec


def run_single(spec: RunSpec, advance: Callable[[int], None] = lambda runs: None) -> RunResult:
    """Run one spec; `advance` hears of every finished epoch."""
    problem, model = spec.problem, spec.problem.module()
    optimizer = make_optimizer(spec, model)
    metrics = np.full((spec.epochs, len(METRICS)), np.nan)
    zetas = np.full((spec.epochs, problem.steps_per_epoch), np.nan, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a run that diverges is a result, not a warning
        for epoch in range(spec.epochs):
            _run_epoch(spec, epoch, model, optimizer, zetas)
            metrics[epoch] = measure(problem, model, spec, zetas[epoch])
            advance(1)
            if not math.isfinite(metrics[epoch, 0]):
                metrics[epoch:] = np.nan
                advance(spec.epochs - epoch - 1)
                break
    return RunResult(spec, metrics, zetas)


def make_optimizer(spec: RunSpec, model: nn.Module) -> Optimizer:
    """The optimizer of a run. AdamW's decay is not multiplied by the learning rate, as in the paper's comparison."""
    params, lr, decay, bound = model.parameters(), spec.lr, spec.weight_decay, spec.problem.lower_bound
    match spec.method:
        case "prox-sps":
            return ProxSPS(params, lr, decay, lower_bound=bound)
        case "prox-sps-momentum":
            return ProxSPS(params, None, decay, lower_bound=bound, momentum=0.9)
        case "prox-sps-adam":
            return ProxSPSAdam(params, None, weight_decay=decay, lower_bound=bound)
        case "sps":
            return SPS(params, lr, decay, lower_bound=bound)
        case "dec-sps":
            return DecSPS(params, lr, decay, lower_bound=bound)
        case "prox-sgd":
            return ProxSGD(params, lr, decay)
        case "sgd":
            return torch.optim.SGD(params, lr, weight_decay=decay)
        case _:
            return torch.optim.AdamW(params, lr, weight_decay=decay / lr)


def _run_epoch(spec: RunSpec, epoch: int, model: nn.Module, optimizer: Optimizer, zetas: np.ndarray) -> None:
    for group in optimizer.param_groups:
        group["lr"] = alpha_of_epoch(spec, epoch, zetas)
    data = spec.problem.train_data()
    for step, index in enumerate(batches(spec.problem, spec.seed, epoch)):
        optimizer.zero_grad()
        loss = model(*(array[torch.from_numpy(index)] for array in data))
        loss.backward()
        if isinstance(optimizer, PolyakOptimizer):
            optimizer.step(loss=loss)
            last = optimizer.last_step
            if last is not None and not isinstance(optimizer, ProxSGD):
                zetas[epoch, step] = last.zeta[0]
        else:
            optimizer.step()


@torch.no_grad()
def measure(problem: Problem, model: nn.Module, spec: RunSpec, zetas: np.ndarray) -> list[float]:
    """The metrics of a run after an epoch."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    train = problem.loss(params, *problem.train_data())
    error = problem.validation_error(params, *problem.validation_data(spec.seed))
    square: Tensor = sum(param.square().sum() for param in params.values())
    objective = train + spec.weight_decay / 2 * square
    return [float(objective), float(train), float(error), float(square.sqrt()), float(median_zeta(zetas))]
