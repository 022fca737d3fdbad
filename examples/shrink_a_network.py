"""Train a network with a unit lasso, watch its units die, and take them out: a smaller network with the same output.

Data: the digits that scikit-learn ships, or noisy patterns of the same size where it is not installed.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxsps import ProxSPS
from proxsps.sparsity import shrink, sparsity_report, unit_groups

EPOCHS, BATCH, CAP = 12, 64, 1.0
STRENGTH = 1.2e-3


def load() -> tuple[Tensor, Tensor]:
    """Samples with 64 features and their labels, shuffled."""
    generator = torch.Generator().manual_seed(0)
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        labels = torch.randint(10, (1797,), generator=generator)
        patterns = torch.randn(10, 64, generator=generator)
        return patterns[labels] + torch.randn(1797, 64, generator=generator), labels
    data = load_digits()
    order = torch.randperm(len(data.target), generator=generator)
    return torch.from_numpy(data.data / 16).float()[order], torch.from_numpy(data.target).long()[order]


def train(model: nn.Module, optimizer: ProxSPS, x: Tensor, labels: Tensor) -> None:
    """A few epochs with a cap that falls to zero, so that the last weights carry little noise."""
    generator = torch.Generator().manual_seed(1)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = CAP * (1 - epoch / EPOCHS)
        for batch in torch.randperm(len(x), generator=generator).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[batch]), labels[batch])
            loss.backward()
            optimizer.step(loss=loss)


def accuracy(model: nn.Module, x: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    with torch.no_grad():
        return float((model(x).argmax(1) == labels).float().mean())


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors
    torch.manual_seed(0)
    x, labels = load()
    (x, test_x), (labels, test_labels) = x.split([1347, 450]), labels.split([1347, 450])
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))

    train(model, ProxSPS(model.parameters()), x, labels)
    print(f"dense: accuracy {accuracy(model, test_x, test_labels):.1%}\n")

    groups = unit_groups(model, x[:2], STRENGTH)
    print(f"{groups}\n")
    train(model, ProxSPS(groups), x, labels)
    print(sparsity_report(model, groups.units))

    small, report = shrink(model, x[:256], units=groups.units, timing_seconds=0.5)
    print(f"\nsparse: accuracy {accuracy(model, test_x, test_labels):.1%}")
    print(f"shrunk: accuracy {accuracy(small, test_x, test_labels):.1%}\n")
    print(report)
