"""Train a network along a path of strengths of a unit lasso, take the dead units out, and look at the accuracy.

The path starts at a strength that is computed from the weights, and ends at a tenth of the parameters, or where the
accuracy on validation data falls.
Data: the digits that scikit-learn ships, or noisy patterns of the same size where it is not installed.

    python examples/shrink_a_network.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from proxsps import ProxSPSAdam
from proxsps.sparsity import shrink, strength_path

EPOCHS, BATCH = 12, 64


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


def train(model: nn.Module, optimizer: Optimizer, x: Tensor, labels: Tensor) -> None:
    """A few epochs with steps that fall to zero, so that the last weights carry little noise."""
    generator = torch.Generator().manual_seed(1)
    for epoch in range(EPOCHS):
        for group in optimizer.param_groups:
            group["lr"] = 1 - epoch / EPOCHS
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
    (x, check_x, test_x), (labels, check, test) = (part.split([1047, 300, 450]) for part in (x, labels))
    model = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 100), nn.ReLU(), nn.Linear(100, 10))

    path = strength_path(
        model,
        lambda model, optimizer: train(model, optimizer, x, labels),
        lambda model: accuracy(model, check_x, check),
        x[:2],
        optimizer=ProxSPSAdam,
        keep=0.1,
    )
    print(f"{path}\n")

    small, report = shrink(model, x[:256], timing_seconds=0.5)
    print(f"{report}\n")
    train(small, ProxSPSAdam(small.parameters()), x, labels)  # without the penalty, which made its weights too small
    print(f"{accuracy(small, test_x, test):.1%} of {len(test)} test samples are right")
    assert report.after.parameters < 0.2 * report.before.parameters
    assert accuracy(small, test_x, test) > 0.95
