"""Residual networks on images: the paper's deep experiments, and twins: small versions for half an hour on two cores.

A ResNet110 without batch normalisation is hard because of its depth. So the twins keep the depth, and have fewer
channels, pixels and steps. One epoch of a twin has 20,000 images, and counts as 0.4 epochs in the schedule.

What happens late, when methods are near their final accuracy, needs many steps rather than pixels. The long twin has
23,400 steps on images of 8 x 8 pixels, and four channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from proxsps import figures
from proxsps.experiments import deep_claims as cifar
from proxsps.experiments import first_epoch
from proxsps.experiments import imagenet_claims as imagenet
from proxsps.experiments.adaptive_claims import adaptive_helps, on_published_caps, published_caps, relabelled
from proxsps.experiments.base import Claim, Drawing, Experiment, Frames
from proxsps.experiments.catalogue import CATALOGUE
from proxsps.experiments.norm_claims import norms_so_far, smaller_norm
from proxsps.experiments.sentences import POLYAK
from proxsps.experiments.standard import step_sizes
from proxsps.problems.vision import ImageClassification, image_problem
from proxsps.sweep.spec import RunSpec, grid
from proxsps.training import Training

Claims = tuple[Callable[[Frames], Claim], ...]
Specs = Callable[[int, int], list[RunSpec]]  # from seeds and epochs

LAMBDAS = (5e-6, 5e-5, 5e-4)
TWIN = {"width": 8, "size": 16, "validation_images": 5_000}
TWIN_IMAGES = 20_000
LONG = {"width": 4, "size": 8, "validation_images": 5_000}


def specs(
    problem: ImageClassification, lambdas: Sequence[float], methods: Sequence[str], seeds: int, epochs: int
) -> list[RunSpec]:
    """Methods with the sqrt schedule and alpha_0 = 1, and AdamW with a constant 1e-3."""
    steps = grid(problem, dict.fromkeys(methods, (1.0,)), lambdas, ["sqrt"], seeds, epochs)
    return steps + grid(problem, {"adamw": (1e-3,)}, lambdas, ["constant"], seeds, epochs)


def adaptive_specs(seeds: int, epochs: int) -> list[RunSpec]:
    """ProxSPS with both caps at the largest strength; all images, so that an epoch is one of the paper's."""
    problem = image_problem("cifar10-resnet56", **TWIN)
    return grid(problem, {"prox-sps": (1.0,)}, LAMBDAS[-1:], ["sqrt", "adaptive"], seeds, epochs)


def long_specs(seeds: int, epochs: int) -> list[RunSpec]:
    """Three methods at the largest strength, and ProxSPS with the adaptive cap; all images, few pixels and channels."""
    problem = image_problem("cifar10-resnet56", **LONG)
    followed = grid(problem, {"prox-sps": (1.0,)}, LAMBDAS[-1:], ["adaptive"], seeds, epochs)
    return specs(problem, LAMBDAS[-1:], POLYAK, seeds, epochs) + followed


# Figures


def _curves(name: str, metric: str, caption: str, **options: Any) -> Drawing:
    """A metric over the epochs; `options` are those of `figures.per_lambda`."""
    return Drawing(name, caption, lambda f: figures.per_lambda(relabelled(f)["runs"], metric, **options))


def drawings(window: int, deviations: float) -> tuple[Drawing, ...]:
    """Accuracy, norm, loss and step sizes; the accuracy as a running median over `window` epochs."""
    median = f" as a running median over {window} epochs" if window > 1 else ""
    shaded = ", shaded two standard deviations" if deviations else ""
    accuracy = f"Validation accuracy{median}, mean over {{runs}}{shaded}."
    norm = f"Norm of all weights, mean over {{runs}}{shaded}."
    return (
        _curves("accuracy", "val_accuracy", accuracy, window=window, deviations=deviations, scale="linear"),
        _curves("norm", "model_norm", norm, deviations=deviations),
        _curves("loss", "train_loss", "Training loss after each epoch, mean over {runs}.", scale="log"),
    )


STEP_SIZES = step_sizes(
    "step-sizes",
    "Adaptive step sizes zeta_k of one run (dots), their medians over each epoch (lines), and the caps alpha_k. Where "
    "zeta_k is tiny SPS stands still, while ProxSPS shrinks the weights by 1 + alpha_k lambda in every step.",
)


def _steps_of(schedule: str, text: str) -> Drawing:
    caption = f"Adaptive step sizes zeta_k of ProxSPS with {text} (dots), their medians over each epoch (line), and "
    return step_sizes(f"step-sizes-{schedule}", f"{caption}alpha_k.", schedule)


PUBLISHED_DRAWINGS = (*drawings(5, 2), STEP_SIZES)
LATE56 = (cifar.less_sensitive(), cifar.stagnates, cifar.zeta_below_alpha)
RESNET56_CLAIMS = (cifar.both_work, cifar.competitive, cifar.good_with_c_1, smaller_norm, *LATE56)
RESNET110_CLAIMS = (
    *(cifar.leaves_chance(sps_after=50), cifar.tiny_steps, cifar.faster_than_adamw, cifar.competitive),
    *(partial(smaller_norm, which="largest"), cifar.less_sensitive(ours=("prox-sps",))),
)
BOTH_LEAVE_CHANCE = partial(cifar.both_work, floor=cifar.CHANCE), partial(cifar.competitive, floor=cifar.CHANCE)
# An epoch of a twin counts as 0.4 epochs: twins reach the published epochs 5 and 6.
TWIN56_CLAIMS = (*BOTH_LEAVE_CHANCE, partial(norms_so_far, epoch=5))
TWIN110_CLAIMS = (
    *(cifar.leaves_chance(), cifar.tiny_steps, cifar.faster_than_adamw, BOTH_LEAVE_CHANCE[1]),
    partial(norms_so_far, epoch=6),
)
LONG_CLAIMS: Claims = (
    *BOTH_LEAVE_CHANCE,
    *(partial(claim, floor=cifar.CHANCE) for claim in (smaller_norm, cifar.stagnates)),
    cifar.zeta_below_alpha,
)


def _deep(
    name: str, title: str, text: str, shown: tuple[Drawing, ...], claims: Claims, specs: Specs, seeds: int = 1
) -> Experiment:
    """An experiment that trains networks, with the numbers of the catalogue."""
    return Experiment(name, title, text, shown, claims, specs, seeds=seeds, engine=Training, **CATALOGUE[name].numbers)


def _published(depth: int, claims: Claims) -> Experiment:
    name = f"cifar10-resnet{depth}"
    return _deep(
        name,
        f"ResNet{depth} without batch norm on CIFAR-10",
        "As published: 100 epochs in batches of 128, three strengths, three runs of ProxSPS and SPS (sqrt schedule, "
        "alpha_0 = 1) and AdamW (1e-3).",
        PUBLISHED_DRAWINGS,
        claims,
        partial(specs, image_problem(name), LAMBDAS, POLYAK),
        seeds=3,
    )


def _twin(depth: int, claims: Claims, seeds: int) -> Experiment:
    name = f"cifar10-resnet{depth}"
    return _deep(
        f"{name}-twin",
        f"ResNet{depth}, twin for a CPU",
        f"Depth {depth} with 8 channels instead of 16, 20,000 images of 16 x 16 pixels, lambda = 5e-4; else as "
        "published.",
        (*drawings(1, 2 if seeds > 1 else 0), STEP_SIZES),
        claims,
        partial(specs, image_problem(name, images=TWIN_IMAGES, **TWIN), LAMBDAS[-1:], POLYAK),
        seeds=seeds,
    )


IMAGENET32 = _deep(
    "imagenet32-resnet110",
    "ResNet110 with batch norm on ImageNet32",
    "As published: 50 epochs in batches of 512, three strengths, one run of ProxSPS, SPS and SGD (sqrt schedule, "
    "alpha_0 = 1) and AdamW (1e-3).",
    PUBLISHED_DRAWINGS,
    imagenet.CLAIMS,
    partial(specs, image_problem("imagenet32-resnet110"), LAMBDAS, (*POLYAK, "sgd")),
)
FIRST_EPOCH = _deep(
    "cifar10-resnet110-epoch",
    "ResNet110 without batch norm: the first epoch",
    "The published network, images and settings at lambda = 5e-4: one epoch (390 steps) of ProxSPS and SPS.",
    (STEP_SIZES,),
    first_epoch.CLAIMS,
    partial(grid, image_problem("cifar10-resnet110"), dict.fromkeys(POLYAK, (1.0,)), LAMBDAS[-1:], ["sqrt"]),
)
ADAPTIVE = _deep(
    "cifar10-resnet56-adaptive",
    "ResNet56: a cap that follows the adaptive step",
    "The twin of ResNet56 with all images, lambda = 5e-4: ProxSPS with the sqrt schedule, and with alpha_k the median "
    "of zeta_k over the epoch before, at most 1.",
    (
        *drawings(1, 0),
        _steps_of("sqrt", "the sqrt schedule"),
        _steps_of("adaptive", "the cap that follows the epoch before"),
    ),
    (adaptive_helps,),
    adaptive_specs,
)
LONG_TWIN = _deep(
    "cifar10-resnet56-long",
    "ResNet56: a long twin for a CPU",
    "Depth 56 with 4 channels instead of 16, all images at 8 x 8 pixels, lambda = 5e-4, 60 epochs (23,400 steps); else "
    "as published. ProxSPS also with the cap that follows the adaptive step.",
    (
        *drawings(5, 0),
        Drawing(STEP_SIZES.name, STEP_SIZES.caption, lambda f: STEP_SIZES.draw(published_caps(f))),
        _steps_of("adaptive", "the cap that follows the epoch before"),
    ),
    (*map(on_published_caps, LONG_CLAIMS), adaptive_helps),
    long_specs,
)
EXPERIMENTS = (
    _published(56, RESNET56_CLAIMS),
    _published(110, RESNET110_CLAIMS),
    IMAGENET32,
    FIRST_EPOCH,
    _twin(56, TWIN56_CLAIMS, seeds=3),
    _twin(110, TWIN110_CLAIMS, seeds=1),
    ADAPTIVE,
    LONG_TWIN,
)
