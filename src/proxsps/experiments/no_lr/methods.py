"""The optimizers that are compared, and the learning rates of each.

Baselines get a finer grid where their best lr is: "the best tuned baseline" has to be a strong one.
"""

from __future__ import annotations

import io
from contextlib import redirect_stdout

import torch
from torch.optim import Optimizer

from proxsps._install import extra
from proxsps.optim import ProxSPS, ProxSPSAdam
from proxsps.problems.errors import DataError
from proxsps.regularizers import L2
from proxsps.training.trials import Method, Params, Task

SGD_LRS = (1e-4, 1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0)
MOMENTUM_LRS = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0, 10.0, 100.0)
ADAM_LRS = (1e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)
FREE_LRS = (1e-5, 1e-4, 1e-3, 2.5e-3, 1e-2, 3e-2, 0.1, 1.0, 10.0)
PRODIGY_LRS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3)
CAPS = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3)
OUR_LRS = (None, 1e-2, 0.1, 1.0, 10.0, 1e4, 1e6)
OUR_ADAM_LRS = (None, 1e-4, 1e-3, 1e-2, 0.1, 10.0, 1e6)

DEFAULTS = {"sgd": 1e-3, "sgd-momentum": 1e-3, "adamw": 1e-3, "schedule-free": 2.5e-3, "prodigy": 1.0, "prox-sps": 1.0}
IDENTITY, ADAM = "prox-sps-momentum", "prox-sps-adam"
ADAM_L2 = "prox-sps-adam-l2"  # on tasks with weight decay: lam/2 ||x||^2 itself instead of decoupled decay
RIVALS = {IDENTITY: "sgd-momentum", ADAM: "adamw"}  # the baseline of the same family


def _sgd(params: Params, lr: float | None, task: Task) -> Optimizer:
    return torch.optim.SGD(params, lr, weight_decay=task.weight_decay)


def _momentum(params: Params, lr: float | None, task: Task) -> Optimizer:
    return torch.optim.SGD(params, lr, momentum=0.9, weight_decay=task.weight_decay)


def _adamw(params: Params, lr: float | None, task: Task) -> Optimizer:
    return torch.optim.AdamW(params, lr, weight_decay=task.weight_decay)


def _schedule_free(params: Params, lr: float | None, task: Task) -> Optimizer:
    try:
        from schedulefree import AdamWScheduleFree
    except ImportError:
        raise _lacking("schedulefree") from None
    warmup = task.steps // 20  # as its authors advise
    return AdamWScheduleFree(params, lr=lr, weight_decay=task.weight_decay, warmup_steps=warmup)


def _prodigy(params: Params, lr: float | None, task: Task) -> Optimizer:
    try:
        from prodigyopt import Prodigy
    except ImportError:
        raise _lacking("prodigyopt") from None
    with redirect_stdout(io.StringIO()):  # it prints which weight decay it uses
        return Prodigy(params, lr=lr, weight_decay=task.weight_decay)


def _prox_sps(params: Params, lr: float | None, task: Task) -> Optimizer:
    return ProxSPS(params, lr, task.weight_decay, task.regularizer(), task.lower_bound)


def _ours(params: Params, lr: float | None, task: Task) -> Optimizer:
    return ProxSPS(
        params,
        lr,
        task.weight_decay,
        task.regularizer(),
        task.lower_bound,
        momentum=0.9,
        cap="matched",
        distance_cap=True,
    )


def _ours_adam(params: Params, lr: float | None, task: Task) -> Optimizer:
    return ProxSPSAdam(
        params,
        lr,
        weight_decay=task.weight_decay,
        regularizer=task.regularizer(),
        lower_bound=task.lower_bound,
        distance_cap=True,
    )


def _ours_adam_l2(params: Params, lr: float | None, task: Task) -> Optimizer:
    return ProxSPSAdam(params, lr, regularizer=L2(task.weight_decay), lower_bound=task.lower_bound, distance_cap=True)


def _lacking(package: str) -> DataError:
    return DataError(f"The experiment compares with {package}, which is not installed: {extra('baselines')}.")


METHODS = {
    method.name: method
    for method in (
        Method("sgd", _sgd, SGD_LRS),
        Method("sgd-momentum", _momentum, MOMENTUM_LRS),
        Method("adamw", _adamw, ADAM_LRS),
        Method("schedule-free", _schedule_free, FREE_LRS, needs=("schedulefree",)),
        Method("prodigy", _prodigy, PRODIGY_LRS, needs=("prodigyopt",)),
        Method("prox-sps", _prox_sps, CAPS, has_prox=True),
        Method(IDENTITY, _ours, OUR_LRS, has_prox=True),
        Method(ADAM, _ours_adam, OUR_ADAM_LRS, has_prox=True),
        Method(ADAM_L2, _ours_adam_l2, (None,), has_prox=True),
    )
}
