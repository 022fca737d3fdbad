"""The one loop: a step per batch, with any torch optimizer. Runs of a sweep, of images and trials all go through it.

`take_steps` takes the steps, and `Run` adds what a run is: epochs, the schedule, and measurements after each epoch. It
is the reference for the batched engine.
"""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsps.methods import Method, load
from proxsps.optim import ProxSGD
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.problems.base import BASE_SEED, seeded
from proxsps.regularizers import Regularizer
from proxsps.regularizers.base import subgradient_all, value_all
from proxsps.sweep.spec import METRICS, RunResult, RunSpec, alpha_of_epoch, batches, median_zeta

if TYPE_CHECKING:
    from proxsps.sweep.trials import Trial

RENEWED = 20  # batches for new running statistics

Batch = TypeVar("Batch")


class Watch:
    """Called during a run; the default does nothing. Tensors are on the run's device: reading them waits for it."""

    def start(self, epochs: int, steps: int) -> None:
        """Called when a run begins, or continues, after `epochs` epochs of `steps` steps each."""

    def step(self, epoch: int, loss: Tensor, optimizer: Optimizer) -> None:
        """A step of an epoch, which counts from 0, was taken at this loss."""

    def epoch(self, row: dict[str, float]) -> None:
        """An epoch was finished and measured."""


def make_optimizer(
    method: Method, settings: RunSpec | Trial, model: nn.Module, layers: nn.Module | None = None
) -> Optimizer:
    """The optimizer of a run or trial; those of this package take the regulariser.

    `layers` is a network with parameters of the same names, if the model itself is not made of layers.
    """
    lr, weight_decay, regularizer, lower_bound = settings.constants
    params: list[Any] = list(model.parameters())
    if method.groups:
        params = load(method.groups)(layers or model)
        params = params if layers is None else _with_parameters_of(model, layers, params)
    if method.make is not None:
        optimizer = method.make(params, settings)
    else:
        kind, options = load(method.optimizer), dict(method.options)
        if issubclass(kind, PolyakOptimizer):
            options |= {"lower_bound": lower_bound} if method.bounded else {}
            options |= {} if regularizer is None else {"regularizer": regularizer}
        optimizer = kind(params, lr, weight_decay=weight_decay, **options)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"make of the method {method.name!r} must return a torch optimizer, got {optimizer!r}.")
    return optimizer


def _with_parameters_of(model: nn.Module, layers: nn.Module, groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups of a network's parameters as groups of those of a model, by name."""
    names, own = {id(param): name for name, param in layers.named_parameters()}, dict(model.named_parameters())

    def mine(param: Tensor | tuple[str, Tensor]) -> Tensor | tuple[str, Tensor]:
        return own[names[id(param)]] if isinstance(param, Tensor) else (param[0], own[names[id(param[1])]])

    return [group | {"params": [mine(param) for param in group["params"]]} for group in groups]


def set_mode(model: nn.Module, optimizer: Optimizer, training: bool) -> None:
    """Set the mode of the model, and of optimizers that have different weights for training and evaluation."""
    model.train(training)
    if is_schedule_free(optimizer):
        switch: Callable[[], Any] = getattr(optimizer, "train" if training else "eval")
        switch()


def is_schedule_free(optimizer: Optimizer) -> bool:
    """Whether an optimizer has different weights for training and evaluation."""
    return all(callable(getattr(optimizer, name, None)) for name in ("train", "eval"))


def take_steps(
    optimizer: Optimizer,
    batches: Iterable[Batch],
    loss: Callable[[Batch], Tensor],
    after: Callable[[Tensor], Tensor] = lambda loss: loss,
) -> Iterator[Tensor]:
    """One step per batch with any torch optimizer; yields the mean `loss` of the batch before the step, detached.

    `step(loss=loss)` is called if the optimizer takes a loss, else `step(closure)`. `after` is called with the loss
    after the backward pass: it may change gradients, and returns the loss for the step.
    """
    step: Callable[..., Any] = optimizer.step
    known = inspect.signature(step).parameters
    for batch in batches:
        seen: list[Tensor] = []

        def closure(batch: Batch = batch, seen: list[Tensor] = seen) -> Tensor:
            optimizer.zero_grad()
            value = loss(batch)
            value.backward()
            seen.append(value.detach())
            return after(value)

        if "loss" in known:
            step(loss=closure())
        elif "closure" in known:
            _call(optimizer, closure)
        else:
            closure()
            step()
        yield seen[0]


def coupling(phi: Regularizer | None, params: Sequence[Tensor]) -> Callable[[Tensor], Tensor]:
    """For `take_steps`: add the subgradient of a regulariser to the gradients, and its value to the loss."""

    def couple(loss: Tensor) -> Tensor:
        if phi is None:
            return loss
        with torch.no_grad():
            for param, extra in zip(params, subgradient_all(phi, params), strict=True):
                param.grad = extra if param.grad is None else param.grad + extra
            whole: Tensor = loss.detach() + value_all(phi, params)
        return whole

    return couple


def _call(optimizer: Optimizer, closure: Callable[[], Any]) -> None:
    """A step that has to call its closure, which computes the gradients."""
    called = False

    def counted() -> Any:
        nonlocal called
        called = True
        return closure()

    cause = None
    try:
        optimizer.step(counted)
    except Exception as error:
        if called:
            raise
        cause = error
    if not called:
        end = f" (It raised {type(cause).__name__}: {cause}.)" if cause else ""
        raise ValueError(
            f"{type(optimizer).__name__}.step(closure) did not call its closure, which computes the loss and the "
            "gradients. Call it at the start of step, as `with torch.enable_grad(): loss = closure()`, or define "
            f"step(self) without a closure: the gradients are then there before.{end}"
        ) from cause


class Run:
    """A model in training: its optimizer, and what was measured so far."""

    extra: ClassVar[tuple[str, ...]] = ()  # columns besides METRICS
    device = torch.device("cpu")

    def __init__(self, spec: RunSpec, model: nn.Module | None = None) -> None:
        self.spec, self.problem = spec, spec.problem
        self.model = self.problem.module() if model is None else model
        self.params = list(self.model.parameters())
        layers = self.problem.layers() if model is None else None
        self.optimizer = make_optimizer(spec.definition, spec, self.model, layers)
        self.columns = (*METRICS, *self.extra, *(() if spec.regularizer is None else ("nonzeros",)))
        self.rows = np.full((spec.epochs, len(self.columns)), np.nan)
        self.zetas = np.full((spec.epochs, self.problem.steps_per_epoch), np.nan, dtype=np.float32)
        self.done = 0

    @property
    def diverged(self) -> bool:
        """Whether the last objective was not finite."""
        return self.done > 0 and not math.isfinite(self.rows[self.done - 1, 0])

    def finish(self, watch: Watch | None = None, advance: Callable[[int], None] = lambda epochs: None) -> RunResult:
        """Train to the end. `advance` is called with numbers of epochs; those after a divergence count as finished."""
        watch = watch or Watch()
        watch.start(self.done, self.zetas.shape[1])
        if self.done:
            advance(self.done)
        with warnings.catch_warnings(action="ignore", category=RuntimeWarning):  # a run that diverges is a result
            while self.done < self.spec.epochs and not self.diverged:
                self.epoch(watch)
                watch.epoch(self.row())
                self.save()
                advance(self.spec.epochs - self.done + 1 if self.diverged else 1)
        return self.result()

    def save(self) -> None:
        """Called after every epoch; runs with a checkpoint write it."""

    def epoch(self, watch: Watch) -> None:
        """Train for one epoch, and measure."""
        alpha = alpha_of_epoch(self.spec, self.done, self.zetas)
        for group in self.optimizer.param_groups:
            group["lr"] = alpha
        set_mode(self.model, self.optimizer, training=True)
        # On the device: a step must not wait for a number that is only read later.
        zetas = torch.full(self.zetas.shape[1:], math.nan, device=self.device)
        optimizer: Any = self.optimizer
        adaptive = isinstance(optimizer, PolyakOptimizer) and not isinstance(optimizer, ProxSGD)
        for step, loss in enumerate(self.steps(self.batches())):
            if adaptive and (last := optimizer.last_step) is not None:
                zetas[step] = last.zeta[0]
            watch.step(self.done, loss, self.optimizer)
        self.zetas[self.done] = zetas.cpu().numpy()
        set_mode(self.model, self.optimizer, training=False)
        with torch.no_grad():
            found = self.measure(self.zetas[self.done])
            if self.spec.regularizer is not None:
                nonzeros = sum(int(torch.count_nonzero(param)) for param in self.params)
                found.append(nonzeros / sum(param.numel() for param in self.params))
        self.rows[self.done] = found
        self.done += 1

    def steps(self, batches: Iterable[Any]) -> Iterator[Tensor]:
        """Steps on these batches; yields their losses."""
        return take_steps(self.optimizer, batches, self.loss, coupling(self.spec.outside, self.params))

    def batches(self) -> Iterator[Any]:
        """The batches of the next epoch."""
        data = self.problem.train_data()
        for index in batches(self.problem, self.spec.seed, self.done):
            yield [array[torch.from_numpy(index)] for array in data]

    def loss(self, batch: Any) -> Tensor:
        """The loss of a batch, without regulariser."""
        loss: Tensor = self.model(*batch)
        return loss

    def measure(self, zetas: np.ndarray) -> list[float]:
        """Metrics and extra columns after an epoch with these adaptive steps."""
        params = {name: param.detach() for name, param in self.model.named_parameters()}
        train = self.problem.loss(params, *self.problem.train_data())
        error = self.problem.validation_error(params, *self.problem.validation_data(self.spec.seed))
        square = functools.reduce(torch.add, [param.square().sum() for param in params.values()])
        objective = train + self.penalty(square)
        return [float(objective), float(train), float(error), float(square.sqrt()), float(median_zeta(zetas))]

    def penalty(self, square: Any) -> Any:
        """The value of the regulariser, where `square` is ||x||^2."""
        if self.spec.regularizer is None:
            return self.spec.weight_decay / 2 * square
        return value_all(self.spec.phi, [param.detach() for param in self.params])

    def row(self) -> dict[str, float]:
        """What was measured after the last epoch, by name."""
        return dict(zip(self.columns, map(float, self.rows[self.done - 1]), strict=True))

    def result(self) -> RunResult:
        """What goes into the store; from a divergence on, all numbers are NaN."""
        if self.diverged:
            self.rows[self.done - 1 :] = np.nan
        metrics, extra = np.split(self.rows, [len(METRICS)], axis=1)
        return RunResult(self.spec, metrics, self.zetas, dict(zip(self.columns[len(METRICS) :], extra.T, strict=True)))


def run_single(spec: RunSpec, advance: Callable[[int], None] = lambda epochs: None) -> RunResult:
    """Run one spec; `advance` is called with the number of epochs that were finished."""
    with seeded(BASE_SEED + spec.seed):  # for optimizers that draw random numbers
        return Run(spec).finish(advance=advance)
