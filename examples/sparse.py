"""Sparse regression with exact zeros: l1 for one output, group lasso for ten outputs that share their features.

The proximal operator sets weights to zero, not nearly to zero, so that counting and cutting them needs no threshold.
ProxSPS starts from its default step size in both; only the strength of the penalty is chosen.

    python examples/sparse.py
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from proxsps import L1, GroupLasso, ProxSPS, Regularizer, SqrtLR

FEATURES, ACTIVE, SAMPLES, BATCH, EPOCHS = 100, 5, 1000, 100, 50
NOISE = 0.1


def make_data(outputs: int) -> tuple[Tensor, Tensor]:
    """Targets that depend linearly on the first ACTIVE features only, with noise."""
    random = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=random)
    weight = 1 + torch.rand(ACTIVE, outputs, generator=random)
    return x, x[:, :ACTIVE] @ weight + NOISE * torch.randn(SAMPLES, outputs, generator=random)


def fit(phi: Regularizer, outputs: int) -> Tensor:
    """The weight matrix, outputs in rows; the bias has a group of its own, without a regulariser."""
    torch.manual_seed(0)
    model = nn.Linear(FEATURES, outputs)
    optimizer = ProxSPS([{"params": [model.weight], "regularizer": phi}, {"params": [model.bias]}])
    scheduler = SqrtLR(optimizer)  # lr = 1 / sqrt(epoch)
    x, y = make_data(outputs)
    for _ in range(EPOCHS):
        for batch in torch.randperm(SAMPLES).split(BATCH):
            optimizer.zero_grad()
            loss = nn.functional.mse_loss(model(x[batch]), y[batch])
            loss.backward()
            optimizer.step(loss=loss)
        scheduler.step()
    return model.weight.detach()


def report(phi: Regularizer, outputs: int) -> None:
    """Fit, and say which features are left."""
    weight = fit(phi, outputs)
    kept = weight.any(dim=0).nonzero().squeeze(1).tolist()
    print(f"{phi}, {outputs} output{'s' if outputs > 1 else ''}")
    print(f"  exact zeros: {int((weight == 0).sum())} of {weight.numel()} weights")
    print(f"  features kept: {kept}; features in the data: {list(range(ACTIVE))}\n")


if __name__ == "__main__":
    torch.set_num_threads(1)  # small tensors
    report(L1(0.1), outputs=1)
    report(GroupLasso.columns(0.05), outputs=10)
