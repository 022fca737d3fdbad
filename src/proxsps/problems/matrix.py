"""Matrix factorisation: two linear layers learn a badly conditioned matrix (the paper's matrix-fac1 and matrix-fac2).

    min over W1, W2 of  (1/N) sum_i ||W2 W1 y_i - b_i||^2,    b_i = A y_i,    A = D B,

B with entries uniform in [0, 1] and D diagonal, equidistant on a logarithmic scale. In training every entry of A is
disturbed by a factor 1 + E with E uniform in [-noise, noise]; validation measures the undisturbed A.

The published figures differ from the paper's text in two ways, and `convention` chooses between them:

- "published" (default, used for the reference figures): D runs from 10 to upsilon, and the squared error is the
  mean over the batch and over the q outputs;
- "text": D runs from 1 to upsilon, and the squared error is summed over the outputs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from proxsps.problems.base import BASE_SEED, DTYPES, Problem, check_batch_size, check_choice, check_sizes, seeded

LARGEST = {"published": 10.0, "text": 1.0}


@dataclass(frozen=True)
class MatrixFactorization(Problem):
    """Factorise a (q, p) matrix with rank r from N measurements.

    With the default `data_seed` the training data and the starting weights are those of the published experiments;
    another one is a fresh draw of both. Validation inputs depend on the seed of the run as well.

    Parameters: W1 of shape (r, p), W2 of shape (q, r). Data: inputs (N, p), targets (N, q).
    """

    name: ClassVar[str] = "matrix-factorization"

    p: int = 6
    q: int = 10
    r: int = 4
    N: int = 1000
    upsilon: float = 1e-5
    noise: float = 0.0
    batch_size: int = 20
    convention: str = "published"
    data_seed: int = BASE_SEED
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes(p=self.p, q=self.q, r=self.r, N=self.N)
        check_batch_size(self.batch_size, self.N)
        check_choice("convention", self.convention, tuple(LARGEST))
        check_choice("dtype", self.dtype, tuple(DTYPES))
        if not 0 < self.upsilon <= 1 or not 0 <= self.noise < 1:
            raise ValueError(
                f"upsilon must be in (0, 1] and noise in [0, 1), got upsilon={self.upsilon!r}, noise={self.noise!r}."
            )

    def matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """A, which validation measures, and the disturbed matrix behind the training targets; both (q, p)."""
        rng = np.random.RandomState(self.data_seed)
        diagonal = np.logspace(np.log10(LARGEST[self.convention]), np.log10(self.upsilon), self.q)
        true = diagonal[:, None] * rng.rand(self.q, self.p)
        disturbance = self.noise * (2 * rng.rand(self.q, self.p) - 1)
        return true, true * (1 + disturbance)

    def start(self) -> dict[str, Tensor]:
        """Torch's default initialisation of two linear layers without bias."""
        return {name: weight.clone() for name, weight in _start(self).items()}

    def train_data(self) -> tuple[Tensor, Tensor]:
        """Inputs and disturbed targets."""
        return _train_data(self)

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor]:
        """As many fresh inputs, with targets from the undisturbed matrix."""
        return _measure(self.matrices()[0], self.data_seed + 2 + seed, self)

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Mean squared error; see the module's text for `convention`."""
        inputs, targets = batch
        residual = inputs @ params["W1"].T @ params["W2"].T - targets
        mean = residual.square().mean()
        return mean if self.convention == "published" else self.q * mean

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The loss on the validation data."""
        return self.loss(params, *data)


def matrix_fac1(**options: Any) -> MatrixFactorization:
    """The paper's matrix-fac1: rank 4, no noise. Options are those of `MatrixFactorization`."""
    return MatrixFactorization(**{"r": 4, "noise": 0.0, **options})


def matrix_fac2(**options: Any) -> MatrixFactorization:
    """The paper's matrix-fac2: rank 10, noise 0.05. Options are those of `MatrixFactorization`."""
    return MatrixFactorization(**{"r": 10, "noise": 0.05, **options})


@lru_cache(maxsize=32)
def _train_data(problem: MatrixFactorization) -> tuple[Tensor, Tensor]:
    return _measure(problem.matrices()[1], problem.data_seed, problem)


def _measure(matrix: np.ndarray, seed: int, problem: MatrixFactorization) -> tuple[Tensor, Tensor]:
    inputs = np.random.RandomState(seed).randn(problem.p, problem.N)
    dtype = DTYPES[problem.dtype]
    return as_tensor(inputs.T, dtype), as_tensor((matrix @ inputs).T, dtype)


@lru_cache(maxsize=32)
def _start(problem: MatrixFactorization) -> dict[str, Tensor]:
    with seeded(problem.data_seed):
        first, second = linear_weight(problem.p, problem.r), linear_weight(problem.r, problem.q)
    dtype = DTYPES[problem.dtype]
    return {"W1": first.to(dtype), "W2": second.to(dtype)}


def linear_weight(inputs: int, outputs: int) -> Tensor:
    """Initial weight of a linear layer without bias, (outputs, inputs), always drawn in float32."""
    return nn.Linear(inputs, outputs, bias=False, device="cpu", dtype=torch.float32).weight.detach()


def as_tensor(array: np.ndarray, dtype: torch.dtype) -> Tensor:
    """A new contiguous tensor, cast from float64 once."""
    return torch.from_numpy(np.ascontiguousarray(array)).to(dtype, copy=True)
