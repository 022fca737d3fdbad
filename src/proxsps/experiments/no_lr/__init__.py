"""Training without a learning rate and without a schedule: the final metric on eleven tasks.

Not in the paper: our methods without a number to choose, compared with optimizers whose lr and schedule are tuned.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from proxsps import figures
from proxsps.experiments.base import Drawing, Experiment, Frames
from proxsps.experiments.catalogue import CATALOGUE
from proxsps.experiments.no_lr.claims import CLAIMS, SHORT, free_over_long_run, level_over_long_run
from proxsps.experiments.no_lr.methods import (
    ADAM,
    COSINE_LRS,
    EUCLIDEAN,
    FEW_COSINE_LRS,
    FEW_LRS,
    FREE,
    LRS,
    METHODS,
    OF_NETWORKS,
    RIVALS,
    SPECTRAL,
)
from proxsps.experiments.no_lr.tables import endings_table, no_lr_table, task_table
from proxsps.experiments.no_lr.tasks import DigitsTask, ImagesTask, MatrixTask, SparseTask
from proxsps.experiments.no_lr.text import RecurrentTask, TextTask
from proxsps.sweep.trials import Trial, TrialTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# From the quickest to the slowest.
TASKS: tuple[TrialTask, ...] = (
    DigitsTask("digits", "digits, no weight decay: accuracy"),
    DigitsTask("digits-1e-4", "digits, weight decay 1e-4: objective", weight_decay=1e-4),
    DigitsTask("digits-1e-3", "digits, weight decay 1e-3: objective", weight_decay=1e-3),
    MatrixTask("matrix", "matrix factorisation: objective"),
    SparseTask("l1", "l1 logistic regression: gap"),
    ImagesTask("fine-tuning", "fine-tuning a ResNet8 with a new last layer: accuracy", steps=150, tuned=250),
    TextTask("transformer", "transformer: validation loss"),
    ImagesTask("resnet", "ResNet8 without batch norm: accuracy"),
    ImagesTask("resnet-bn", "ResNet8 with batch norm: accuracy", batch_norm=True),
    RecurrentTask("gru", "GRU: validation loss"),
    TextTask("gpt", "GPT, 0.8 M parameters: validation loss", 400, width=128, layers=4, context=64, batch_size=8),
)
OPTIONAL = frozenset(task.name for task in TASKS if isinstance(task, ImagesTask))  # where CIFAR-10 is there
ENDINGS = ("none", "cool-down", "average")  # of the run of 10,000 steps
LONGER = 4  # times the steps, in the long version
LONG_TEXT = TextTask("transformer-10000", "transformer, 10,000 steps: validation loss", steps=10_000)
# Methods with lr and endings of the run of 10,000 steps.
LONG: tuple[tuple[str, float | None, tuple[str, ...]], ...] = (
    (FREE, None, ("none",)),
    (SPECTRAL, None, ("none",)),
    (ADAM, None, ENDINGS),
    ("adamw", 1e-3, (*ENDINGS, "cosine")),
    ("adamw", 3e-3, ("cosine",)),
    *(("schedule-free", lr, ("none",)) for lr in (2.5e-3, 1e-2, 3e-2)),
    ("muon", 1e-3, ("none", "average")),
    ("muon", 3e-3, ("none", "average", "cosine")),
    ("muon", 1e-2, ("average", "cosine")),
)


def trials(tasks: tuple[TrialTask, ...], seeds: int) -> list[Trial]:
    """Every method with each lr, schedule and seed on every task; the endings for our methods without an lr."""
    settings = [setting for task in tasks for setting in _settings(task)]
    return [
        Trial(task, METHODS[name], lr, seed, ending) for task, name, lr, ending in settings for seed in range(seeds)
    ]


def _settings(task: TrialTask) -> list[tuple[TrialTask, str, float | None, str]]:
    """Task, method, lr and ending of the runs on one task."""
    left_out = {name for name in EUCLIDEAN if not task.weight_decay}
    left_out |= set(OF_NETWORKS) if isinstance(task, (MatrixTask, SparseTask)) else set()
    lrs, cosine = FEW_LRS.get(task.name, LRS), FEW_COSINE_LRS.get(task.name, COSINE_LRS)
    grids = [(name, lrs.get(name, ()), "none") for name in METHODS] + [
        (name, cosine[name], "cosine") for name in cosine
    ]
    if task.name not in FEW_LRS:
        grids += [(name, (None,), ending) for name in RIVALS for ending in ("cool-down", "average")]
    return [(task, name, lr, ending) for name, own, ending in grids if name not in left_out for lr in own]


def long_trials(seeds: int) -> list[Trial]:
    """The same with more steps."""
    return trials(tuple(replace(task, steps=LONGER * task.steps) for task in TASKS), seeds)  # type: ignore[type-var]


def text_trials(seeds: int) -> list[Trial]:
    """A long run of the transformer by the methods that are best in short ones, with endings."""
    chosen = [(METHODS[name], lr, ending) for name, lr, endings in LONG for ending in endings]
    return [Trial(LONG_TEXT, method, lr, seed, ending) for method, lr, ending in chosen for seed in range(seeds)]


DRAWN = ("sgd-momentum", "adamw", "schedule-free", "muon", "prodigy", ADAM, FREE, SPECTRAL)


def _drawn(frames: Frames) -> Figure:
    """The baselines over lr, and the best of ours with lr not set."""
    rows = frames["trials"]
    return figures.over_lr(rows[rows["method"].isin(DRAWN) & (rows["lr"].isna() | (rows["method"] != ADAM))])


DRAWING = Drawing(
    "over-lr",
    "The metric after training over lr, mean and range of {runs}. Dashed lines: our methods, which have no lr. "
    "Crosses on the edge: a run diverged, or the value is outside of the panel.",
    _drawn,
)

NO_LR = Experiment(
    "no-lr",
    "Training without a learning rate",
    "Final metric against lr for SGD with momentum, AdamW, schedule-free AdamW, Muon and ProxSPS, and of optimizers "
    "that need no lr: Prodigy, ScheduleFree+, and ours. AdamW and Muon also with warm-up and cosine. Baselines have a "
    "finer grid where their best lr is. Three seeds of weights and batches; short runs.",
    (DRAWING,),
    CLAIMS,
    trials=partial(trials, TASKS),
    optional=OPTIONAL,
    table=no_lr_table,
    summary=task_table,
    seeds=3,
    **CATALOGUE["no-lr"].numbers,
)

NO_LR_LONG = replace(
    NO_LR,
    name="no-lr-long",
    title="Training without a learning rate, longer runs",
    description=f"As no-lr, with {LONGER} times the steps.",
    trials=long_trials,
    **CATALOGUE["no-lr-long"].numbers,
)

NO_LR_TRANSFORMER = replace(
    NO_LR,
    name="no-lr-transformer",
    title="Training without a learning rate, a transformer over 10,000 steps",
    description="Our methods without lr, and AdamW, schedule-free AdamW and Muon with up to three learning rates, with "
    "a constant step, with a cool-down over the last quarter, averaged, and with warm-up and a cosine. One seed.",
    drawings=(),
    claims=(
        *(partial(level_over_long_run, ending) for ending in ENDINGS),
        *(partial(free_over_long_run, method) for method in SHORT),
    ),
    trials=text_trials,
    optional=frozenset(),
    table=endings_table,
    summary=None,
    seeds=1,
    **CATALOGUE["no-lr-transformer"].numbers,
)

EXPERIMENTS = (NO_LR, NO_LR_LONG, NO_LR_TRANSFORMER)
