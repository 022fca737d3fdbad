"""What a model costs: parameters, multiply-adds of one call, and its time."""

from __future__ import annotations

import statistics
import time
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from proxsps.sparsity.inputs import call, outputs


class Cost(NamedTuple):
    """Cost of a model for the example inputs."""

    parameters: int
    multiply_adds: int
    milliseconds: float  # lower quartile of many calls; NaN if it was not measured


def costs(models: list[nn.Module], inputs: Any, seconds: float = 1.0) -> list[Cost]:
    """Costs of several models, timed in turns for about this many seconds in total; 0 for no timing."""
    times = _timed(models, inputs, seconds)
    return [
        Cost(sum(p.numel() for p in model.parameters()), multiply_adds(model, inputs), milliseconds)
        for model, milliseconds in zip(models, times, strict=True)
    ]


def multiply_adds(model: nn.Module, inputs: Any) -> int:
    """Multiply-adds of matrix products and convolutions, as torch counts them."""
    # Encoder layers have a fused path, which torch does not count.
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with FlopCounterMode(display=False) as counter:
            outputs(model, inputs)
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
    found: int = counter.get_total_flops() // 2
    return found


@torch.no_grad()
def _timed(models: list[nn.Module], inputs: Any, seconds: float) -> list[float]:
    if not seconds > 0:
        return [float("nan")] * len(models)
    modes = [[(module, module.training) for module in model.modules()] for model in models]
    times: list[list[float]] = [[] for _ in models]
    try:
        for model in models:
            model.eval()
            call(model, inputs)  # the first call sets things up
        end = time.perf_counter() + seconds
        # In turns, so that other work of the machine slows down all of them equally.
        while time.perf_counter() < end or len(times[0]) < 5:
            for model, taken in zip(models, times, strict=True):
                start = time.perf_counter()
                call(model, inputs)
                _wait(model)
                taken.append(1e3 * (time.perf_counter() - start))
    finally:
        for mode in modes:
            for module, training in mode:
                module.training = training
    # The lower quartile: other work of the machine can only make a call slower.
    return [statistics.quantiles(taken, n=4)[0] for taken in times]


def _wait(model: nn.Module) -> None:
    param = next(model.parameters(), None)
    if param is not None and param.is_cuda:
        torch.cuda.synchronize(param.device)


__all__ = ["Cost", "costs", "multiply_adds"]
