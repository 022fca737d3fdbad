"""One run with the optimizers that users call: for any model, and as the reference for the batched engine."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsps.methods import load
from proxsps.optim import ProxSGD
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.problems.base import BASE_SEED, Problem, seeded
from proxsps.regularizers.base import subgradient_all, value_all
from proxsps.sweep.result import METRICS, RunResult, alpha_of_epoch, batches, median_zeta
from proxsps.sweep.spec import RunSpec

Result = TypeVar("Result")
StepBy = Callable[[Callable[[], Tensor]], Any]  # takes a function that computes loss and gradients


def run_single(spec: RunSpec, advance: Callable[[int], None] = lambda runs: None) -> RunResult:
    """Run one spec; `advance` is called with the number of epochs that were finished."""
    return finished(single_epochs(spec), advance)


def finished(epochs: Generator[int, None, Result], advance: Callable[[int], None]) -> Result:
    """The return value of a generator of epochs; `advance` is called with what it yields."""

    def outcome() -> Generator[int, None, None]:
        found.append((yield from epochs))

    found: list[Result] = []
    with closing(outcome()) as counts:
        for count in counts:
            advance(count)
    return found[0]


def single_epochs(spec: RunSpec) -> Generator[int, None, RunResult]:
    """The same, epoch by epoch: yields the number of epochs that were finished, and returns the result."""
    problem, model = spec.problem, spec.problem.module()
    metrics = np.full((spec.epochs, len(METRICS)), np.nan)
    nonzeros = np.full(spec.epochs, np.nan)
    zetas = np.full((spec.epochs, problem.steps_per_epoch), np.nan, dtype=np.float32)
    with seeded(BASE_SEED + spec.seed), warnings.catch_warnings():  # for optimizers that draw random numbers
        warnings.simplefilter("ignore", RuntimeWarning)  # a run that diverges is a result, not a warning
        optimizer = make_optimizer(spec, model)
        for epoch in range(spec.epochs):
            _run_epoch(spec, epoch, model, optimizer, zetas)
            metrics[epoch], nonzeros[epoch] = measure(problem, model, spec, zetas[epoch])
            if not math.isfinite(metrics[epoch, 0]):
                metrics[epoch:] = nonzeros[epoch:] = np.nan
                yield spec.epochs - epoch
                break
            yield 1
    return RunResult(spec, metrics, zetas, extra_columns(spec, nonzeros))


def extra_columns(spec: RunSpec, nonzeros: np.ndarray) -> dict[str, np.ndarray]:
    """The share of entries that are not zero, which is of interest for regularisers other than the squared l2 norm."""
    return {} if spec.regularizer is None else {"nonzeros": nonzeros}


def make_optimizer(spec: RunSpec, model: nn.Module) -> Optimizer:
    """The optimizer of a run. AdamW's decay is not multiplied by the learning rate, as in the paper's comparison."""
    method, params = spec.definition, list(model.parameters())
    optimizer: Optimizer
    if method.make is not None:
        optimizer = method.make(params, spec)
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"make of the method {method.name!r} must return a torch optimizer, got {optimizer!r}.")
        return optimizer
    kind = load(method.optimizer)
    if not issubclass(kind, PolyakOptimizer):
        decay = spec.weight_decay / spec.lr if spec.method == "adamw" else spec.weight_decay
        optimizer = kind(params, spec.lr, weight_decay=decay if spec.regularizer is None else 0.0)
        return optimizer
    options: dict[str, Any] = {"lower_bound": spec.problem.lower_bound} if method.bounded else {}
    options |= {"weight_decay": spec.weight_decay} if spec.regularizer is None else {"regularizer": spec.phi}
    options |= dict(method.options)
    optimizer = kind(params, None if method.rateless else spec.lr, **options)
    return optimizer


def couples(spec: RunSpec) -> bool:
    """Whether the sweep has to add the regulariser to the loss, because the optimizer does not."""
    method = spec.definition
    outside = spec.own is not None or (spec.regularizer is not None and not method.optimizer.startswith("proxsps."))
    return method.coupled and outside


def couple(spec: RunSpec, params: Sequence[Tensor], loss: Tensor) -> Tensor:
    """Add the subgradient of the regulariser to the gradients; returns the loss plus its value."""
    with torch.no_grad():
        for param, extra in zip(params, subgradient_all(spec.phi, params), strict=True):
            param.grad = extra if param.grad is None else param.grad + extra
        whole: Tensor = loss.detach() + value_all(spec.phi, params)
    return whole


def stepping(optimizer: Optimizer) -> StepBy:
    """How an optimizer is stepped, given a function that computes loss and gradients: by the parameters of `step`."""
    step: Callable[..., Any] = optimizer.step
    known = inspect.signature(step).parameters
    if "loss" in known:
        return lambda closure: step(loss=closure())
    if "closure" in known:
        return _calling(type(optimizer).__name__, step)

    def plain(closure: Callable[[], Tensor]) -> None:
        closure()
        step()

    return plain


def _calling(name: str, step: Callable[..., Any]) -> StepBy:
    """A step that has to call its closure, which computes the gradients."""

    def checked(closure: Callable[[], Tensor]) -> None:
        called = False

        def counted() -> Tensor:
            nonlocal called
            called = True
            return closure()

        cause = None
        try:
            step(counted)
        except Exception as error:
            if called:
                raise
            cause = error
        if not called:
            end = f" (It raised {type(cause).__name__}: {cause}.)" if cause else ""
            raise ValueError(
                f"{name}.step(closure) did not call its closure, which computes the loss and the gradients. Call it at "
                "the start of step, as `with torch.enable_grad(): loss = closure()`, or define step(self) without a "
                f"closure: the gradients are then there before.{end}"
            ) from cause

    return checked


def _run_epoch(spec: RunSpec, epoch: int, model: nn.Module, optimizer: Optimizer, zetas: np.ndarray) -> None:
    for group in optimizer.param_groups:
        group["lr"] = alpha_of_epoch(spec, epoch, zetas)
    data, params = spec.problem.train_data(), list(model.parameters())
    joins, step_by = couples(spec), stepping(optimizer)
    for step, index in enumerate(batches(spec.problem, spec.seed, epoch)):
        batch = [array[torch.from_numpy(index)] for array in data]

        def closure(batch: Sequence[Tensor] = batch) -> Tensor:
            optimizer.zero_grad()
            loss = model(*batch)
            loss.backward()
            return couple(spec, params, loss) if joins else loss

        step_by(closure)
        if isinstance(optimizer, PolyakOptimizer) and not isinstance(optimizer, ProxSGD):
            last = optimizer.last_step
            if last is not None:
                zetas[epoch, step] = last.zeta[0]


@torch.no_grad()
def measure(problem: Problem, model: nn.Module, spec: RunSpec, zetas: np.ndarray) -> tuple[list[float], float]:
    """The metrics of a run after an epoch, and the share of entries that are not zero."""
    params = {name: param.detach() for name, param in model.named_parameters()}
    train = problem.loss(params, *problem.train_data())
    error = problem.validation_error(params, *problem.validation_data(spec.seed))
    square = functools.reduce(torch.add, [param.square().sum() for param in params.values()])
    objective = train + penalty(spec, list(params.values()), square)
    metrics = [float(objective), float(train), float(error), float(square.sqrt()), float(median_zeta(zetas))]
    return metrics, nonzero_share(list(params.values()))


def nonzero_share(params: Sequence[Tensor]) -> float:
    """The share of entries that are not zero."""
    return sum(int(torch.count_nonzero(param)) for param in params) / sum(param.numel() for param in params)


def penalty(spec: RunSpec, params: Sequence[Tensor], square: Any) -> Any:
    """The value of the regulariser, where `square` is ||x||^2."""
    return spec.weight_decay / 2 * square if spec.regularizer is None else value_all(spec.phi, params)
