"""Small problems and grids on which every method makes progress."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import proxsps
from proxsps.problems import MatrixFactorization, ModuleProblem, from_module, matrix_fac1
from proxsps.problems.base import Problem
from proxsps.sweep.spec import RunSpec

RATES = {"prox-sps": 2.0, "sps": 2.0, "sgd": 0.1, "prox-sgd": 0.1, "dec-sps": 5.0, "adamw": 0.01}


def tiny(**options: Any) -> MatrixFactorization:
    """Three steps an epoch."""
    return matrix_fac1(**{"N": 60, "dtype": "float64", **options})


def network(name: str = "network", **options: Any) -> ModuleProblem:
    """A network with one hidden layer, in float64, and four steps an epoch."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(40, 3, generator=generator, dtype=torch.float64)
    y = torch.sin(x.sum(1, keepdim=True))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    return from_module(
        name, model, nn.functional.mse_loss, (x[:32], y[:32]), (x[32:], y[32:]), **{"batch_size": 8, **options}
    )


def spec(problem: Problem | None = None, **fields: Any) -> RunSpec:
    """A run of ProxSPS, with any field replaced."""
    method = fields.get("method", "prox-sps")
    defaults = {"method": method, "schedule": "sqrt", "lr": RATES[method], "weight_decay": 1e-3, "seed": 0, "epochs": 2}
    return RunSpec(tiny() if problem is None else problem, **{**defaults, **fields})


def start(
    popen: type[subprocess.Popen[str]], file: Path, text: str, *arguments: object, **environment: str
) -> subprocess.Popen[str]:
    """A Python process of its own, in a process group of its own, that sees this package."""
    file.write_text(text)
    source = str(Path(proxsps.__file__).parents[1])
    return popen(
        [sys.executable, str(file), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment},
        start_new_session=True,
    )


class Kit:
    """The helpers above, for tests in this folder."""

    rates = RATES
    tiny = staticmethod(tiny)
    network = staticmethod(network)
    spec = staticmethod(spec)
    cold_script = staticmethod(partial(start, subprocess.Popen))

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request

    def script(self, *words: Any, **environment: str) -> subprocess.Popen[str]:
        return start(self._request.getfixturevalue("forked"), *words, **environment)


@pytest.fixture(scope="session")
def kit(request: pytest.FixtureRequest) -> Kit:
    return Kit(request)
