"""Tiny networks on synthetic images, one thread: runs of a tenth of a second that are bitwise the same again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from proxsps.methods import METHODS
from proxsps.problems.vision import ImageClassification
from proxsps.sweep.spec import RunSpec

RATES = {"prox-sps": 1.0, "sps": 1.0, "sgd": 0.05, "prox-sgd": 0.05, "dec-sps": 5.0, "adamw": 1e-2}
RATES |= {method.name: 1.0 for method in METHODS.values() if method.rateless}  # factors on their own steps


def tiny(**options: Any) -> ImageClassification:
    defaults = {"depth": 8, "width": 2, "size": 8, "images": 80, "validation_images": 30, "batch_size": 16}
    return ImageClassification(data="synthetic", **{**defaults, **options})


def spec(problem: ImageClassification | None = None, **fields: Any) -> RunSpec:
    method = fields.get("method", "prox-sps")
    defaults = {"method": method, "schedule": "sqrt", "lr": RATES[method], "weight_decay": 5e-4, "seed": 0, "epochs": 3}
    return RunSpec(problem or tiny(), **{**defaults, **fields})


class Kit:
    """The helpers above, for tests in this folder."""

    rates = RATES
    tiny = staticmethod(tiny)
    spec = staticmethod(spec)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
