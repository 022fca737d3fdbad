"""All optimizers as cases: a test that takes `case` runs over every line of the table below."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import pytest
import torch
from sampled import norm_sq
from torch import Tensor

from proxsps.optim import SPS, DecSPS, PolyakOptimizer, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.optim.plan import Plan


@dataclass(frozen=True)
class Case:
    cls: type[PolyakOptimizer]
    lr: float | None  # right for the small problems of this battery
    loss: bool = True  # whether a step needs the loss value and holds it against a bound
    coupled: bool = False  # whether the regulariser is part of the loss
    options: tuple[tuple[str, Any], ...] = ()  # that make another method of the class

    def make(self, params: Iterable[Any], **options: Any) -> PolyakOptimizer:
        """An optimizer; without a learning rate, the `lr` of groups are set as factors once it is made."""
        bound = {"lower_bound": 0.0} if self.cls is OneSet else {}  # also with a regulariser
        options = {"lr": self.lr, **bound, **dict(self.options), **options}
        given = params if options["lr"] is None and isinstance(params, list) else []
        factors = [group.get("lr") for group in given if isinstance(group, dict)]
        if factors:
            params = [{key: value for key, value in group.items() if key != "lr"} for group in given]
        opt = self.cls(params, **options)
        for group, factor in zip(opt.param_groups, factors, strict=False):
            if factor is not None:
                group["lr"] = factor
        return opt

    @property
    def averaged(self) -> bool:
        return self.cls in (ProxSPSAdam, OneSet) or "momentum" in dict(self.options)

    def __str__(self) -> str:
        options = [f"{key}={value}" for key, value in self.options]
        return "-".join([self.cls.__name__, *options, *(["no lr"] if self.lr is None else [])])


class OneSet(ScheduleFreeSPS):
    """The schedule-free step with one distance cap, so that the groups are those that a test passes."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if isinstance(param_group, dict):
            param_group = {**param_group, "set": param_group.get("set") or "all"}
        super().add_param_group(param_group)


OPTIMIZERS = [
    Case(ProxSPS, lr=1.0),
    Case(SPS, lr=1.0, coupled=True),
    Case(DecSPS, lr=1.0, coupled=True),
    Case(ProxSGD, lr=0.05, loss=False),
]

# Methods with state, in some of the batteries; others are about a step from nothing.
AVERAGED = [
    Case(ProxSPS, lr=1.0, options=(("momentum", 0.9),)),
    Case(ProxSPS, lr=1.0, options=(("momentum", 0.9), ("cap", "matched"))),
    Case(ProxSPS, lr=None, options=(("momentum", 0.9),)),
    Case(ProxSPSAdam, lr=0.1),
    Case(ProxSPSAdam, lr=None),
    Case(OneSet, lr=1.0),
    Case(OneSet, lr=None),
]
WITH_STATE = {
    *("test_conformance", "test_mixed_precision", "test_tensors", "test_syncs"),
    *("test_torch_battery", "test_torch_schedulers", "test_checkpoints"),
}
# Asks for much progress in thirty steps; a run without an lr begins with steps of a hundredth of 1 + ||x||.
WITH_LR = {"test_conformance"}
# Tests of methods without state, and of kernels and decays that are not those of Adam's metric.
WITHOUT = {
    "test_nothing_grows_with_the_number_of_steps",
    "test_squared_l2_with_a_center_is_the_same_step_about_another_origin",
    "test_every_path_takes_the_same_steps",
    "test_every_path_takes_the_same_steps_over_mixed_groups",
    "test_state_is_empty_or_in_the_groups",
    "test_schedulers_of_a_momentum_say_that_there_is_none",
}
# Tests of caps that are numbers: the schedule-free form always has a distance cap, and decay follows the step.
CAPPED = {"test_tiny_gradients_do_not_overflow", "test_last_step_has_an_entry_a_group"}
MANY = 8  # combinations of other parameters, from which on cases share them
SHARE = 3

SELECTIONS = {
    "case": OPTIMIZERS,
    "bounded_case": [c for c in OPTIMIZERS if c.loss],
    "prox_case": [c for c in OPTIMIZERS if not c.coupled],
    "coupled_case": [c for c in OPTIMIZERS if c.coupled],
    "polyak_case": [c for c in OPTIMIZERS if c.cls in (ProxSPS, SPS)],
}


# Runs a second time with plans that are never kept; with this environment variable, all tests in this folder do.
TWICE, DROP_PLANS = {"test_conformance"}, bool(os.environ.get("PROXSPS_DROP_PLANS"))


@pytest.fixture(autouse=True)
def plans(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether optimizers keep their plans."""
    if DROP_PLANS or getattr(request, "param", "kept") == "dropped":
        monkeypatch.setattr(Plan, "holds", lambda self, opt: False)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.split(".")[-1] in TWICE and not DROP_PLANS:
        metafunc.parametrize("plans", ["kept", "dropped"], indirect=True)
    for name, cases in SELECTIONS.items():
        if name in metafunc.fixturenames:
            module, test = metafunc.module.__name__.split(".")[-1], metafunc.function.__name__
            stateful = name == "case" and module in WITH_STATE and test not in WITHOUT
            averaged = [c for c in AVERAGED if c.lr is not None or module not in WITH_LR] if stateful else []
            found = cases + [c for c in averaged if c.cls is not OneSet or test not in CAPPED]
            metafunc.parametrize(name, found, ids=map(str, found))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where a test has many parameters besides the case, the first case takes all combinations, others a third each.

    The thirds are shifted from case to case, so that each combination is met by several of them.
    """
    tests: dict[Any, dict[Case, list[pytest.Item]]] = {}
    for item in items:
        if "case" in (own := item.callspec.params if hasattr(item, "callspec") else {}):
            tests.setdefault((item.function, own.get("plans")), {}).setdefault(own["case"], []).append(item)
    dropped = set()
    for cases in tests.values():
        for shift, combinations in enumerate(cases.values()):
            if shift > 0 and len(combinations) >= MANY:
                dropped |= {item for i, item in enumerate(combinations) if (i + i // SHARE + shift) % SHARE}
    items[:] = [item for item in items if item not in dropped]


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


def same(one: Any, other: Any) -> bool:
    """Whether nested dictionaries and lists are equal, tensors in them bit by bit."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        alike = isinstance(one, Tensor) and isinstance(other, Tensor) and one.dtype is other.dtype
        return alike and torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


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


class PlainModel:
    """Averaged models and their caps, one formula per line, in NumPy doubles: what the optimizers must agree with.

    Args:
        xs: the first point, one array per parameter group.
        beta: how much of d, fbar and gamma stays.
        beta2: how much of v stays; None for the identity metric.
    """

    def __init__(self, xs: list[np.ndarray], beta: float, beta2: float | None = None, eps: float = 1e-8) -> None:
        self.beta, self.beta2, self.eps, self.k = beta, beta2, eps, 0
        self.d = [np.zeros_like(x) for x in xs]
        self.v = [np.zeros_like(x) for x in xs]
        self.f = self.gamma = self.G = 0.0
        self.start = [x.copy() for x in xs]
        self.first = 1e-2 * (1 + self.sampled(xs) ** 0.5)
        self.reach = self.K = 0.0

    @staticmethod
    def sampled(xs: list[np.ndarray]) -> float:
        """||x||^2, estimated from the sampled entries."""
        return sum(map(norm_sq, xs))

    def take(self, xs: list[np.ndarray], gs: list[np.ndarray], f: float, factors: Sequence[float] = (1.0,)) -> None:
        """Take in a loss and its gradient, and the factors of the groups on the step."""
        beta, k = self.beta, self.k
        if self.beta2 is None:
            old, new = (0.0, 1.0) if k == 0 else (beta, 1 - beta)
            self.metric = [np.ones_like(x) for x in xs]
        else:
            old, new = beta * (1 - beta**k) / (1 - beta ** (k + 1)), (1 - beta) / (1 - beta ** (k + 1))
            b = self.beta2
            self.v = [b * v + (1 - b) * g * g for v, g in zip(self.v, gs, strict=True)]
            self.metric = [np.sqrt(v / (1 - b ** (k + 1))) + self.eps for v in self.v]
        self.d = [old * d + new * g for d, g in zip(self.d, gs, strict=True)]
        self.f = old * self.f + new * f
        self.gamma = old * self.gamma + new * sum(float((g * x).sum()) for g, x in zip(gs, xs, strict=True))
        self.m = self.f - self.gamma + sum(float((d * x).sum()) for d, x in zip(self.d, xs, strict=True))
        factor, parts = max(factors), zip(cycle(factors), gs, self.metric, strict=False)
        g_sq = sum(float(((own / factor * g / D) ** 2).sum()) for own, g, D in parts)
        self.k += 1
        self.K += factor**2
        self.G = 0.99 * self.G + 0.01 * g_sq
        moved = self.sampled([x - s for x, s in zip(xs, self.start, strict=True)]) ** 0.5
        self.reach = max(self.reach, factor * self.first, moved)
        self.distance = 0.85 * self.reach / (self.K * self.G / (1 - 0.99**self.k)) ** 0.5

    def height(self, xs: list[np.ndarray], ys: list[np.ndarray], C: float) -> float:
        """The linear model above C."""
        return self.m - C + sum(float((d * (y - x)).sum()) for d, x, y in zip(self.d, xs, ys, strict=True))


class Kit:
    """The helpers above, for tests in this folder."""

    drawn = staticmethod(drawn)
    copied = staticmethod(copied)
    points = staticmethod(points)
    same = staticmethod(same)
    flat = staticmethod(flat)
    least_squares = LeastSquares
    plain_model = PlainModel


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
