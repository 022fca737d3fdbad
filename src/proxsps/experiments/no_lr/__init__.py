"""Training without a learning rate: the final metric against lr, over six decades, on nine tasks.

Not in the paper: ProxSPS with momentum, the matched cap and the distance cap has no number to choose. It is compared
with optimizers whose lr is tuned.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from proxsps import figures
from proxsps.experiments.base import Drawing, Experiment
from proxsps.experiments.no_lr.claims import CLAIMS, level_over_long_run
from proxsps.experiments.no_lr.methods import ADAM, ADAM_L2, IDENTITY, LRS, METHODS
from proxsps.experiments.no_lr.tables import endings_table, no_lr_table, task_table
from proxsps.experiments.no_lr.tasks import DigitsTask, ImagesTask, MatrixTask, SparseTask
from proxsps.experiments.no_lr.text import TextTask
from proxsps.sweep.trials import Trial, TrialTask

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
)
OPTIONAL = frozenset(task.name for task in TASKS if isinstance(task, ImagesTask))  # where CIFAR-10 is there
ENDINGS = ("none", "cool-down", "average")  # of the run of 10,000 steps
LONGER = 4  # times the steps, in the long version
LONG_TEXT = TextTask("transformer-10000", "transformer, 10,000 steps: validation loss", steps=10_000)
LONG_LRS = (3e-4, 1e-3, 3e-3, 1e-2)  # AdamW's, for the run of 10,000 steps


def trials(tasks: tuple[TrialTask, ...], seeds: int) -> list[Trial]:
    """Every method with each lr and seed on every task; the endings for our methods without an lr."""
    found = []
    for task in tasks:
        for method in METHODS.values():
            if method.name != ADAM_L2 or task.weight_decay:
                found += [Trial(task, method, lr, seed) for lr in LRS[method.name] for seed in range(seeds)]
        for name in (IDENTITY, ADAM):
            endings = [(ending, seed) for ending in ("cool-down", "average") for seed in range(seeds)]
            found += [Trial(task, METHODS[name], None, seed, ending) for ending, seed in endings]
    return found


def long_trials(seeds: int) -> list[Trial]:
    """The same with more steps."""
    return trials(tuple(replace(task, steps=LONGER * task.steps) for task in TASKS), seeds)  # type: ignore[type-var]


def text_trials(seeds: int) -> list[Trial]:
    """A long run of the transformer: our method in Adam's metric and AdamW, with every ending."""
    ours, theirs = [(METHODS[ADAM], None)], [(METHODS["adamw"], lr) for lr in LONG_LRS]
    chosen = [(method, lr, ending) for method, lr in ours + theirs for ending in ENDINGS]
    return [Trial(LONG_TEXT, method, lr, seed, ending) for method, lr, ending in chosen for seed in range(seeds)]


DRAWING = Drawing(
    "over-lr",
    "The metric after training over lr, mean and range of {runs}. Lines without a marker: our methods with lr not set. "
    "Crosses on the edge: a run diverged, or the value is outside of the panel.",
    lambda frames: figures.over_lr(frames["trials"]),
)

NO_LR = Experiment(
    "no-lr",
    "Training without a learning rate",
    "Final metric against lr for SGD, SGD with momentum, AdamW, schedule-free AdamW, Prodigy, ProxSPS, and ProxSPS "
    "with momentum, the matched cap and the distance cap, in the identity metric and in Adam's. Baselines have a finer "
    "grid where their best lr is. Three seeds of weights and batches; short runs at constant lr.",
    (DRAWING,),
    CLAIMS,
    trials=partial(trials, TASKS),
    optional=OPTIONAL,
    table=no_lr_table,
    summary=task_table,
    seeds=3,
    seconds=1500,
)

NO_LR_LONG = replace(
    NO_LR,
    name="no-lr-long",
    title="Training without a learning rate, longer runs",
    description=f"As no-lr, with {LONGER} times the steps.",
    trials=long_trials,
    seconds=LONGER * NO_LR.seconds,
    hardware="two cores, hours",
)

NO_LR_TRANSFORMER = replace(
    NO_LR,
    name="no-lr-transformer",
    title="Training without a learning rate, a transformer over 10,000 steps",
    description="ProxSPSAdam without lr, and AdamW with four learning rates, each with a constant step, with a "
    "cool-down over the last quarter, and averaged. One seed.",
    drawings=(),
    claims=tuple(partial(level_over_long_run, ending) for ending in ENDINGS),
    trials=text_trials,
    optional=frozenset(),
    table=endings_table,
    summary=None,
    seeds=1,
    seconds=780,
)

EXPERIMENTS = (NO_LR, NO_LR_LONG, NO_LR_TRANSFORMER)
