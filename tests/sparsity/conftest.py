"""Networks to make smaller, with example inputs; and how to kill some of their units."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from proxsps.problems.resnet import ResNet
from proxsps.sparsity import Units


def convolutional(batch_norm: bool = True) -> nn.Module:
    """With a channel of the last convolution as four inputs of the linear layer."""

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.Conv2d(inputs, outputs, 3, padding=1), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]

    layers = [layer for sizes in ((3, 8), (8, 12)) for layer in stage(*sizes)]
    if not batch_norm:
        layers = [layer for layer in layers if not isinstance(layer, nn.BatchNorm2d)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(12 * 4, 5))


class Residual(nn.Module):
    """Two stages of residual blocks with a projection between them, as torchvision's ResNets have it."""

    def __init__(self, batch_norm: bool = True) -> None:
        super().__init__()
        norm = nn.BatchNorm2d if batch_norm else (lambda channels: nn.Identity())

        def conv(inputs: int, outputs: int, size: int = 3, stride: int = 1) -> nn.Sequential:
            layer = nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)
            return nn.Sequential(layer, norm(outputs))

        self.stem = conv(3, 6)
        self.a1, self.a2 = conv(6, 5), conv(5, 6)
        self.b1, self.b2, self.project = conv(6, 8, 3, 2), conv(8, 10), conv(6, 10, 1, 2)
        self.c1, self.c2 = conv(10, 7), conv(7, 10)
        self.head = nn.Linear(10, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.a2(self.a1(x).relu())).relu()
        x = (self.project(x) + self.b2(self.b1(x).relu())).relu()
        x = (x + self.c2(self.c1(x).relu())).relu()
        return self.head(x.mean((2, 3)))


class Transformer(nn.Module):
    """Words, two encoder layers, a linear layer on the mean."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu") for _ in range(2)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(1))


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    # Units that torch-pruning and the trial are expected to find, by their numbers.
    sets: tuple[int, ...]

    def model(self, seed: int = 0) -> nn.Module:
        """With random running statistics and biases, so that nothing is zero by accident."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.make()
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    for tensor in (module.running_mean, module.weight, module.bias):
                        nn.init.normal_(tensor)
                    nn.init.uniform_(module.running_var, 0.5, 2.0)
        return model.eval()


def images(size: int = 8) -> Callable[[], Tensor]:
    return lambda: torch.randn(3, 3, size, size, generator=torch.Generator().manual_seed(1))


CASES = [
    Case(
        "mlp",
        lambda: nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.Tanh(), nn.Linear(12, 3)),
        lambda: torch.randn(5, 6, generator=torch.Generator().manual_seed(1)),
        (20, 12),
    ),
    Case("conv-bn", convolutional, images(), (8, 12)),
    Case("resnet-bn", Residual, images(), (6, 5, 8, 10, 7)),
    Case("resnet", lambda: Residual(batch_norm=False), images(), (6, 5, 8, 10, 7)),
    # Shortcuts that pad channels leave only the inner channels of the blocks.
    Case("resnet20-bn", lambda: ResNet(20, 4), images(16), (4, 4, 4, 8, 8, 8, 16, 16, 16)),
    Case("resnet20", lambda: ResNet(20, 4, batch_norm=False), images(16), (4, 4, 4, 8, 8, 8, 16, 16, 16)),
    Case(
        "transformer",
        Transformer,
        lambda: torch.randint(11, (3, 7), generator=torch.Generator().manual_seed(1)),
        (16, 16),
    ),
]


def kill(model: nn.Module, units: Units, share: float = 0.4, seed: int = 0) -> list[np.ndarray]:
    """Set some units of each set to zero; which."""
    rng = np.random.default_rng(seed)
    params = dict(model.named_parameters())
    chosen = [rng.permutation(len(one))[: max(int(share * len(one)), 1)] for one in units.sets]
    with torch.no_grad():
        for one, dead in zip(units.sets, chosen, strict=True):
            for member in one.members:
                slices = torch.from_numpy(np.flatnonzero(np.isin(member.ids, dead)))
                params[member.name].index_fill_(member.dim, slices, 0.0)
    return chosen


class Kit:
    """The helpers above."""

    Residual, convolutional = Residual, staticmethod(convolutional)
    cases: ClassVar = {case.name: case for case in CASES}
    kill = staticmethod(kill)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=[case.name for case in CASES])
