"""All optimizers as cases: a test that takes `case` runs over every line of the table below."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from proxsps.optim import SPS, DecSPS, PolyakOptimizer, ProxSGD, ProxSPS


@dataclass(frozen=True)
class Case:
    cls: type[PolyakOptimizer]
    lr: float  # right for the small problems of this battery
    loss: bool = True  # whether a step needs the loss value and holds it against a bound
    coupled: bool = False  # whether the regulariser is part of the loss

    def make(self, params: Iterable[Any], **options: Any) -> PolyakOptimizer:
        return self.cls(params, **{"lr": self.lr, **options})


OPTIMIZERS = [
    Case(ProxSPS, lr=1.0),
    Case(SPS, lr=1.0, coupled=True),
    Case(DecSPS, lr=1.0, coupled=True),
    Case(ProxSGD, lr=0.05, loss=False),
]

SELECTIONS = {
    "case": OPTIMIZERS,
    "bounded_case": [c for c in OPTIMIZERS if c.loss],
    "prox_case": [c for c in OPTIMIZERS if not c.coupled],
    "coupled_case": [c for c in OPTIMIZERS if c.coupled],
    "polyak_case": [c for c in OPTIMIZERS if c.cls in (ProxSPS, SPS)],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, cases in SELECTIONS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, cases, ids=[c.cls.__name__ for c in cases])


def copied(param: Tensor) -> Tensor:
    out = torch.nn.Parameter(param.detach().clone())
    out.grad = None if param.grad is None else param.grad.clone()
    return out


def drawn(
    *shapes: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float64, scale: float = 1.0
) -> list[Tensor]:
    """Parameters with gradients, both standard normal; gradients times `scale`."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    params = []
    for shape in shapes:
        param = torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=wide).to(dtype))
        param.grad = (scale * torch.randn(shape, generator=generator, dtype=wide)).to(dtype)
        params.append(param)
    return params


def points(params: Iterable[Tensor]) -> list[Tensor]:
    return [p.detach().clone() for p in params]


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([t.detach().reshape(-1) for t in tensors])


class LeastSquares:
    """f(w) = ||A w - b||^2 / (2 rows), b = A w* (+ noise); w is given by a function of the parameters."""

    def __init__(self, rows: int = 24, columns: int = 6, noise: float = 0.0, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.A = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
        self.solution = torch.randn(columns, generator=generator, dtype=torch.float64)
        self.b = self.A @ self.solution + noise * torch.randn(rows, generator=generator, dtype=torch.float64)

    def loss(self, w: Tensor, rows: slice | Tensor = slice(None)) -> Tensor:
        return (self.A[rows] @ w - self.b[rows]).square().mean() / 2

    def curvature(self) -> tuple[float, float]:
        values = torch.linalg.eigvalsh(self.A.T @ self.A / len(self.b))
        return float(values[0]), float(values[-1])


class Kit:
    """The helpers above, for tests in this folder."""

    drawn = staticmethod(drawn)
    copied = staticmethod(copied)
    points = staticmethod(points)
    flat = staticmethod(flat)
    least_squares = LeastSquares


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
