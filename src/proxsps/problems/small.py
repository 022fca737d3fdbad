"""Losses in one and two dimensions, on which the paper's first figure shows the models and the flow of the methods."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from proxsps.problems.base import DTYPES, Problem, check_choice


@dataclass(frozen=True)
class PlanarSquares(Problem):
    """f(x) = ||A x - b||^2 in the plane, deterministic: its one sample is the whole system (figure 1b).

    The paper does not give A and b. The default has condition number 6.9, so that f + phi has a valley, and a small
    residual at the origin: with alpha = lam = 1 SPS goes down into the valley and bends along it, while ProxSPS goes
    almost straight. (With b = 0 ProxSPS's path would be exactly straight, as then <grad f(x), x> = 2 f(x).)

    Parameters: x (2,). Data: A (1, 2, 2), b (1, 2).
    """

    name: ClassVar[str] = "planar-squares"

    a11: float = 2.0
    a12: float = 1.0
    a21: float = 1.0
    a22: float = 1.0
    b1: float = 1.0
    b2: float = 0.5
    start1: float = -2.5
    start2: float = 2.0
    batch_size: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))
        _check_single(self.name, self.batch_size)

    def start(self) -> dict[str, Tensor]:
        """The point (start1, start2)."""
        return {"x": torch.tensor([self.start1, self.start2], dtype=DTYPES[self.dtype])}

    def train_data(self) -> tuple[Tensor, Tensor]:
        """A and b."""
        return _planar_data(self)

    def validation_data(self, seed: int) -> tuple[Tensor, Tensor]:
        """A and b."""
        return self.train_data()

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """||A x - b||^2."""
        A, b = batch
        return (A @ params["x"] - b).square().sum(-1).mean()

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The loss."""
        return self.loss(params, *data)

    def minimiser(self, lam: float) -> Tensor:
        """The minimiser of f + lam/2 ||.||^2 in float64: (2 A'A + lam I)^{-1} 2 A'b."""
        A, b = (array[0].double() for array in self.train_data())
        x: Tensor = torch.linalg.solve(2 * A.T @ A + lam * torch.eye(2, dtype=torch.float64), 2 * A.T @ b)
        return x


@dataclass(frozen=True)
class ScalarLogistic(Problem):
    """f(x) = ln(1 + exp(-slope x)) on the line (figure 1a, with slope 1/2 and starting points -4, -1 and 0).

    Parameters: x (1,). Data: slope (1,).
    """

    name: ClassVar[str] = "scalar-logistic"

    slope: float = 0.5
    start1: float = -4.0
    batch_size: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        check_choice("dtype", self.dtype, tuple(DTYPES))
        _check_single(self.name, self.batch_size)

    def start(self) -> dict[str, Tensor]:
        """The point start1."""
        return {"x": torch.tensor([self.start1], dtype=DTYPES[self.dtype])}

    def train_data(self) -> tuple[Tensor]:
        """The slope."""
        return _scalar_data(self)

    def validation_data(self, seed: int) -> tuple[Tensor]:
        """The slope."""
        return self.train_data()

    def loss(self, params: dict[str, Tensor], *batch: Tensor) -> Tensor:
        """ln(1 + exp(-slope x))."""
        return softplus(-batch[0] * params["x"]).mean()

    def validation_error(self, params: dict[str, Tensor], *data: Tensor) -> Tensor:
        """The loss."""
        return self.loss(params, *data)

    def minimiser(self, lam: float) -> float:
        """The minimiser of f + lam/2 x^2: the root of lam x = slope / (1 + exp(slope x)), by bisection."""
        if not 0 < lam < math.inf:
            raise ValueError(f"Without regularisation the loss has no minimiser: lam must be positive, got {lam!r}.")
        side = math.copysign(1.0, self.slope)
        slope, low, high = abs(self.slope), 0.0, abs(self.slope) / (2 * lam)
        for _ in range(200):
            middle = (low + high) / 2
            decay = math.exp(-slope * middle)
            falling = lam * middle < slope * decay / (1 + decay)
            low, high = (middle, high) if falling else (low, middle)
        return side * (low + high) / 2


@lru_cache(maxsize=32)
def _planar_data(problem: PlanarSquares) -> tuple[Tensor, Tensor]:
    dtype = DTYPES[problem.dtype]
    A = torch.tensor([[[problem.a11, problem.a12], [problem.a21, problem.a22]]], dtype=dtype)
    return A, torch.tensor([[problem.b1, problem.b2]], dtype=dtype)


@lru_cache(maxsize=32)
def _scalar_data(problem: ScalarLogistic) -> tuple[Tensor]:
    return (torch.tensor([problem.slope], dtype=DTYPES[problem.dtype]),)


def _check_single(name: str, batch_size: int) -> None:
    if batch_size != 1:
        raise ValueError(f"{name} has one sample: batch_size must be 1, got {batch_size!r}.")
