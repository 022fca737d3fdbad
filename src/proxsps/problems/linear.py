"""Linear models: ridge regression with its interpolation constant, and logistic regression."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus

from proxsps.problems.base import BASE_SEED, DTYPES, Problem, check_batch_size, check_choice, check_sizes
from proxsps.problems.datasets import DataError, load_libsvm
from proxsps.problems.matrix import as_tensor


@dataclass(frozen=True)
class RidgeRegression(Problem):
    """f_i(x) = 1/2 (<a_i, x> - b_i)^2 with b = A x_true, which x_true interpolates (appendix on the constant sigma^2).

    x_true is uniform in [0, 1]^n. The paper does not say how A is drawn: standard normal entries reproduce its figure,
    which falls again for large lambda; uniform ones do not.

    Parameters: x (n,). Data: A (N, n), b (N,).
    """

    name: ClassVar[str] = "ridge-regression"

    N: int = 80
    n: int = 100
    batch_size: int = 1
    data_seed: int = BASE_SEED
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes(N=self.N, n=self.n)
        check_batch_size(self.batch_size, self.N)
        check_choice("dtype", self.dtype, tuple(DTYPES))

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A, b and x_true in float64."""
        rng = np.random.RandomState(self.data_seed)
        x_true, A = rng.rand(self.n), rng.randn(self.N, self.n)
        return A, A @ x_true, x_true

    def start(self) -> dict[str, Tensor]:
        """Zeros."""
        return {"x": torch.zeros(self.n, dtype=DTYPES[self.dtype])}

    def train_data(self) -> tuple[Tensor, Tensor]:
        """A and b."""
        return _ridge_data(self)

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor]:
        """As many fresh rows, and their targets from the same x_true."""
        A = np.random.RandomState(self.data_seed + 2 + seed).randn(self.N, self.n)
        dtype = DTYPES[self.dtype]
        return as_tensor(A, dtype), as_tensor(A @ self.arrays()[2], dtype)

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Half the mean squared error."""
        A, b = batch
        return (A @ params["x"] - b).square().mean() / 2

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The loss on the validation data."""
        return self.loss(params, *data)

    def minimiser(self, lam: float) -> Tensor:
        """The minimiser of f + lam/2 ||.||^2, lam > 0, in float64: A'(A A' + N lam I)^{-1} b."""
        A, b, _ = self.arrays()
        return torch.from_numpy(A.T @ np.linalg.solve(A @ A.T + self.N * lam * np.eye(self.N), b))

    def interpolation_constant(self, lam: np.ndarray | float) -> np.ndarray:
        """sigma^2 for each strength lam; see `ridge_interpolation_constant`."""
        return ridge_interpolation_constant(*self.arrays()[:2], lam)


def ridge_interpolation_constant(A: np.ndarray, b: np.ndarray, lam: np.ndarray | float) -> np.ndarray:
    """sigma^2 = min_x [f(x) + phi(x)] - (1/N) sum_i inf_z [f_i(z) + phi(z)] with phi = lam/2 ||.||^2, lam > 0.

    The appendix on the interpolation constant, in closed form: with the eigenpairs (s_k, q_k) of A A',

        min f + phi = lam/2 sum_k <q_k, b>^2 / (s_k + N lam),    inf f_i + phi = lam/2 b_i^2 / (||a_i||^2 + lam).

    Args:
        A: rows a_i, (N, n).
        b: targets, (N,).
        lam: strengths, any shape; the result has the same.
    """
    lam = np.asarray(lam, dtype=np.float64)
    if not (np.isfinite(lam) & (lam > 0)).all():
        raise ValueError(f"lam must be positive and finite, got {lam}.")
    eigenvalues, eigenvectors = np.linalg.eigh(A @ A.T)
    weights = (eigenvectors.T @ b) ** 2
    strength = lam[..., None]
    joint = (weights / (np.maximum(eigenvalues, 0) + len(b) * strength)).sum(-1)
    single = (b**2 / ((A**2).sum(1) + strength)).mean(-1)
    constant: np.ndarray = lam / 2 * (joint - single)
    return constant


@dataclass(frozen=True)
class LogisticRegression(Problem):
    """f_i(x) = ln(1 + exp(-b_i <a_i, x>)) with labels b_i of -1 and 1.

    Synthetic by default: normal features, labels by the side of a random plane through the origin, a share `flip` of
    them wrong; validation takes fresh samples in each run. With `file`, the data is a LIBSVM file (see
    `datasets.load_libsvm`) with two labels, of which the larger counts as 1; a fifth is held out for validation, and N,
    n and flip are not used. The options hold the file's name; results are also stored under a digest of its content.

    Parameters: x (n,). Data: features (N, n), labels (N,).
    """

    name: ClassVar[str] = "logistic-regression"

    N: int = 1000
    n: int = 50
    flip: float = 0.05
    file: str = ""
    batch_size: int = 20
    data_seed: int = BASE_SEED
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_sizes(N=self.N, n=self.n)
        check_batch_size(self.batch_size, None if self.file else self.N)
        check_choice("dtype", self.dtype, tuple(DTYPES))
        if not 0 <= self.flip <= 0.5:
            raise ValueError(f"flip must be in [0, 0.5], got {self.flip!r}.")

    def start(self) -> dict[str, Tensor]:
        """Zeros."""
        return {"x": torch.zeros(self.train_data()[0].shape[1], dtype=DTYPES[self.dtype])}

    def train_data(self) -> tuple[Tensor, Tensor]:
        """Features and labels."""
        return _read_labelled(self)[0] if self.file else _draw_labelled(self, self.data_seed)

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor]:
        """Fresh samples for each seed, or the part of the file that was held out."""
        return _read_labelled(self)[1] if self.file else _draw_labelled(self, self.data_seed + 2 + seed)

    def fingerprint(self, seed: int) -> str | None:
        """A digest of the content of a file."""
        return self._digest(None, lambda: _read_labelled(self)) if self.file else None

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """Mean logistic loss."""
        features, labels = batch
        return softplus(-labels * (features @ params["x"])).mean()

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The share of wrong labels; a sample on the plane counts as wrong."""
        features, labels = data
        return (labels * (features @ params["x"]) <= 0).to(features.dtype).mean()


@lru_cache(maxsize=32)
def _ridge_data(problem: RidgeRegression) -> tuple[Tensor, Tensor]:
    A, b, _ = problem.arrays()
    return as_tensor(A, DTYPES[problem.dtype]), as_tensor(b, DTYPES[problem.dtype])


@lru_cache(maxsize=32)
def _draw_labelled(problem: LogisticRegression, seed: int) -> tuple[Tensor, Tensor]:
    # The plane has its own generator, so that training and validation share it.
    normal = np.random.RandomState(problem.data_seed + 1).randn(problem.n)
    rng = np.random.RandomState(seed)
    features = rng.randn(problem.N, problem.n)
    labels = np.where(features @ normal >= 0, 1.0, -1.0) * np.where(rng.rand(problem.N) < problem.flip, -1.0, 1.0)
    return as_tensor(features, DTYPES[problem.dtype]), as_tensor(labels, DTYPES[problem.dtype])


@lru_cache(maxsize=8)
def _read_labelled(problem: LogisticRegression) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    features, labels = load_libsvm(problem.file)
    kinds = np.unique(labels)
    if len(kinds) != 2 or len(labels) < 5:
        raise DataError(
            f"{problem.file} has {len(kinds)} different labels in {len(labels)} samples; logistic regression needs two "
            "labels and at least 5 samples."
        )
    labels = np.where(labels == kinds[1], 1.0, -1.0)
    order = np.random.RandomState(problem.data_seed).permutation(len(labels))
    held_out, kept = np.split(order, [len(order) // 5])
    dtype = DTYPES[problem.dtype]

    def part(chosen: np.ndarray) -> tuple[Tensor, Tensor]:
        return as_tensor(features[chosen], dtype), as_tensor(labels[chosen], dtype)

    return part(kept), part(held_out)
