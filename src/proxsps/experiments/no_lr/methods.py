"""The methods that are compared, with what is special here: their learning rates, and options of their optimizers.

Labels, colours and classes are those of `proxsps.methods`. Baselines get a finer grid where their best lr is: "the best
tuned baseline" has to be a strong one. All constants are options, so that the ids of trials depend on them.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import Any

from torch import nn
from torch.optim import Optimizer

from proxsps import methods
from proxsps._install import extra
from proxsps.methods import Method, load
from proxsps.optim import model_groups
from proxsps.problems.errors import DataError
from proxsps.regularizers import L2
from proxsps.sweep.trials import Params, Trial

IDENTITY, ADAM = "prox-sps-momentum", "prox-sps-adam"
ADAM_L2 = "prox-sps-adam-l2"  # on tasks with weight decay: lam/2 ||x||^2 itself instead of decoupled decay
FREE, SPECTRAL, FREE_L2 = "schedule-free-sps", "schedule-free-sps-spectral", "schedule-free-sps-l2"
RIVALS = {IDENTITY: "sgd-momentum", ADAM: "adamw"}  # the baseline of the same family
EUCLIDEAN = (ADAM_L2, FREE_L2)
OF_NETWORKS = ("muon", SPECTRAL)  # for tasks with layers: their metric needs matrices

LRS: dict[str, tuple[float | None, ...]] = {  # None: not set
    "sgd-momentum": (1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3),
    "adamw": (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 1.0),
    "schedule-free": (3e-4, 1e-3, 2.5e-3, 1e-2, 3e-2, 0.1, 0.3),
    "muon": (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
    "prodigy": (1.0,),
    "schedule-free-plus": (1.0,),
    "prox-sps": (0.1, 1.0, 10.0),
    IDENTITY: (None, 1.0, 10.0, 1e6),
    ADAM: (None, 1e-2, 0.1, 1e6),
    ADAM_L2: (None,),
    FREE: (None,),
    SPECTRAL: (None,),
    FREE_L2: (None,),
}
COSINE_LRS = {"adamw": (3e-3, 1e-2, 3e-2, 0.1), "muon": (3e-3, 1e-2, 3e-2, 0.1)}  # with warm-up and cosine
# The tasks that take longest have fewer methods, and a few lr around the best one.
UNTUNED = {name: LRS[name] for name in ("prodigy", "schedule-free-plus", FREE, SPECTRAL)} | {ADAM: (None,)}
FEW_LRS: dict[str, dict[str, tuple[float | None, ...]]] = {
    "gru": UNTUNED | {"adamw": (1e-3, 3e-3, 1e-2), "schedule-free": (2.5e-3, 1e-2, 3e-2), "muon": (1e-3, 3e-3, 1e-2)},
    "gpt": UNTUNED | {"adamw": (3e-4, 1e-3, 3e-3), "schedule-free": (1e-3, 2.5e-3, 1e-2), "muon": (1e-3, 3e-3, 1e-2)},
}
FEW_COSINE_LRS = {
    "gru": {"adamw": (3e-3, 1e-2, 3e-2), "muon": (3e-3, 1e-2, 3e-2)},
    "gpt": {"adamw": (3e-4, 1e-3, 3e-3), "muon": (3e-3, 1e-2, 3e-2)},
}
# What counts as "lr not set" for methods that need one.
DEFAULTS = {name: methods.METHODS[name].lr for name, lrs in LRS.items() if None not in lrs}


def _schedule_free(params: Params, trial: Trial) -> Optimizer:
    options = dict(trial.method.options)
    warmup = trial.task.steps // options.pop("steps_per_warmup_step")
    return _baseline(params, trial, warmup_steps=warmup, **options)


def _prodigy(params: Params, trial: Trial) -> Optimizer:
    with redirect_stdout(io.StringIO()):  # it prints which weight decay it uses
        return _baseline(params, trial, **dict(trial.method.options))


def _baseline(params: Params, trial: Trial, **options: Any) -> Optimizer:
    try:
        kind = load(trial.method.optimizer)
    except ImportError:
        package = " and ".join(trial.method.needs)
        raise DataError(
            f"The experiment compares with {package}, which is not installed: {extra('baselines')}."
        ) from None
    optimizer: Optimizer = kind(params, lr=trial.lr, weight_decay=trial.task.weight_decay, **options)
    return optimizer


def _euclidean(params: Params, trial: Trial) -> Optimizer:
    phi, kind = L2(trial.task.weight_decay), load(trial.method.optimizer)
    optimizer: Optimizer = kind(
        params, regularizer=phi, lower_bound=trial.task.lower_bound, **dict(trial.method.options)
    )
    return optimizer


def adam_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Hidden matrices and other tensors, which have a distance cap each, all in Adam's metric."""
    return model_groups(model, "adam")


def _method(name: str, make: Callable[[Any, Trial], Optimizer] | None = None, **options: Any) -> Method:
    """A method of the table with further options."""
    known = methods.METHODS[name]
    return replace(known, make=make, options=(*known.options, *options.items()))


METHODS = {
    method.name: method
    for method in (
        _method("sgd-momentum"),
        _method("adamw"),
        _method("schedule-free", _schedule_free, steps_per_warmup_step=20),  # as its authors advise
        _method("muon"),
        _method("prodigy", _prodigy),
        _method("schedule-free-plus"),
        _method("prox-sps"),
        _method(IDENTITY, cap="matched", distance_cap=True),
        _method(ADAM, distance_cap=True),
        _method(ADAM_L2, _euclidean, distance_cap=True),
        replace(_method(FREE), groups=f"{__name__}:adam_groups"),
        replace(_method(SPECTRAL), swept=False),  # so that ids of trials are those from before sweeps had it
        replace(_method(FREE_L2, _euclidean), groups=f"{__name__}:adam_groups"),
    )
}
