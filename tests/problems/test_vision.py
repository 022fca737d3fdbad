"""Augmentation against one image at a time, and the problem as sweeps see it."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch

from proxsps.problems import DataError
from proxsps.problems.resnet import ResNet
from proxsps.problems.vision import Draws, ImageClassification, crop_and_mirror, draw, image_problem, normalize
from proxsps.sweep.loop import run_single
from proxsps.sweep.spec import RunSpec

TINY = {"data": "synthetic", "depth": 8, "width": 2, "size": 8, "images": 40, "validation_images": 20, "batch_size": 10}


def one_by_one(images: np.ndarray, draws: Draws, padding: int) -> np.ndarray:
    out = []
    for image, top, left, mirrored in zip(images, *(part.tolist() for part in draws), strict=True):
        size = image.shape[-1]
        frame = np.zeros((3, size + 2 * padding, size + 2 * padding), image.dtype)
        frame[:, padding : padding + size, padding : padding + size] = image
        crop = frame[:, top : top + size, left : left + size]
        out.append(crop[:, :, ::-1] if mirrored else crop)
    return np.stack(out)


@pytest.mark.parametrize("size", [32, 16, 8])
def test_augmentation_is_that_of_one_image_at_a_time(size):
    problem = ImageClassification(**{**TINY, "size": size})
    images = torch.randint(0, 256, (60, 3, size, size), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    draws = draw(problem, 3, 1, 60)
    out = crop_and_mirror(images, draws, problem.padding)
    np.testing.assert_array_equal(out, one_by_one(images.numpy(), draws, problem.padding))
    assert out.is_contiguous(memory_format=torch.channels_last)
    assert problem.padding == size // 8


def test_draws_cover_all_corners_and_depend_on_seed_and_epoch_alone():
    problem = ImageClassification(data="synthetic")
    draws = draw(problem, 0, 0, 5000)
    for corner in draws[:2]:
        counts = torch.bincount(corner, minlength=9)
        assert len(counts) == 9
        assert (counts - 5000 / 9).abs().max() < 5 * (5000 / 9) ** 0.5
    assert abs(draws.mirrored.float().mean() - 0.5) < 5 * 0.5 / 5000**0.5
    assert all(torch.equal(a, b) for a, b in zip(draws, draw(problem, 0, 0, 5000), strict=True))
    for seed, epoch in ((1, 0), (0, 1)):
        assert not torch.equal(draws.top, draw(problem, seed, epoch, 5000).top)


def test_pixels_are_normalised_by_the_published_constants():
    pixels = torch.tensor([0, 128, 255], dtype=torch.uint8).reshape(1, 1, 1, 3).expand(1, 3, 1, 3)
    wanted = [[(p / 255 - m) / s for p in (0, 128, 255)] for m, s in ((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))]
    np.testing.assert_allclose(normalize(pixels)[0, :, 0], wanted, rtol=1e-5)


def test_smaller_images_are_means_of_squares():
    full = ImageClassification(**{**TINY, "size": 32}).train_data()[0].double()
    for size in (16, 8):
        small = ImageClassification(**{**TINY, "size": size}).train_data()[0]
        means = torch.nn.functional.avg_pool2d(full, 32 // size)
        np.testing.assert_array_equal(small, (means + 0.5).floor())


def test_parts_of_the_data():
    problem = ImageClassification(**TINY)
    images, labels = problem.train_data()
    assert images.shape == (40, 3, 8, 8)
    assert images.dtype == torch.uint8
    assert len(labels) == 40
    assert len(problem.validation_data(0)[1]) == 20
    assert problem.steps_per_epoch == 4
    assert problem.pace == 40 / 2000
    assert ImageClassification(data="synthetic").pace == 1
    assert image_problem("cifar10-resnet56", images=20_000).pace == 0.4
    with pytest.raises(DataError, match="synthetic has 500 validation images, but 501 are needed"):
        ImageClassification(**{**TINY, "validation_images": 501}).validation_data(0)


@pytest.mark.parametrize("norm", [False, True])
def test_losses_are_those_of_the_network(norm):
    problem = ImageClassification(**TINY, batch_norm=norm)
    images, labels = problem.train_data()
    network = problem.network()
    assert isinstance(network, ResNet)
    loss = torch.nn.functional.cross_entropy(network(normalize(images)), labels)
    start = problem.start()
    torch.testing.assert_close(problem.loss(start, images, labels), loss)
    torch.testing.assert_close(problem.loss(start, images, labels), loss)  # nothing was changed by the first call
    wrong = (problem.network()(normalize(images)).argmax(1) != labels).float().mean()
    assert problem.validation_error(start, images, labels) == wrong
    assert all(torch.equal(a, b) for a, b in zip(start.values(), problem.start().values(), strict=True))


def test_single_runs_of_the_sweep_can_train_it():
    result = run_single(RunSpec(ImageClassification(**TINY), "prox-sps", "sqrt", 1.0, 5e-4, 0, 3))
    assert result.metrics[-1, 1] < result.metrics[0, 1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("cifar10-resnet110", {"data": "cifar10", "depth": 110, "batch_norm": False, "batch_size": 128}),
        ("imagenet32-resnet110", {"data": "imagenet32", "depth": 110, "batch_norm": True, "batch_size": 512}),
        ("synthetic-resnet8", {"data": "synthetic", "depth": 8, "batch_norm": False}),
    ],
)
def test_names_stand_for_published_settings(name, options):
    problem = image_problem(name)
    assert {key: getattr(problem, key) for key in options} == options
    assert (problem.width, problem.size, problem.augment, problem.images) == (16, 32, True, 0)
    assert image_problem(name, batch_norm=not problem.batch_norm).batch_norm != problem.batch_norm


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: image_problem("cifar-resnet110"), "Did you mean 'cifar10-resnet110'?"),
        (lambda: image_problem("mnist"), "a data set (cifar10, imagenet32, synthetic) and a depth"),
        (lambda: image_problem("cifar10-resnet57"), "depth must be 6n + 2"),
        (lambda: ImageClassification(size=12), "size must be 32, 16 or 8, got 12"),
        (lambda: ImageClassification(images=50_001), "images must be between 0 (all) and 50000"),
        (lambda: ImageClassification(data="mnist"), "data must be one of"),
        (lambda: ImageClassification(batch_size=0), "batch_size must be at least 1"),
    ],
)
def test_impossible_problems_are_refused(call, message):
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        call()
    assert "\n" not in str(caught.value)
