"""Train a network without a learning rate: ProxSPSAdam alone, with a cool-down, and with an average of the weights.

AdamW is run beside it with learning rates over four decades. Takes a few seconds.

    python examples/without_a_learning_rate.py
"""

import math

import torch
from torch.nn.functional import cross_entropy
from torch.optim.swa_utils import AveragedModel

from proxsps import CoolDown, ProxSPSAdam, polynomial_multi_avg_fn

STEPS = 400


def spirals(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points on three spirals, with noise, and the number of their spiral."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    radius = torch.rand(count, generator=generator).sqrt()
    angle = 2 * math.pi * (labels / 3 + radius) + 0.25 * torch.randn(count, generator=generator)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], 1), labels


def network() -> torch.nn.Module:
    """A perceptron with two hidden layers, the same one each time."""
    torch.manual_seed(0)
    layers = [torch.nn.Linear(2, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3)]
    return torch.nn.Sequential(*layers)


def train(make, cool_down=False, average=False) -> torch.nn.Module:
    """The network after training; `make` returns the optimizer for its parameters."""
    model, (x, labels) = network(), spirals(1500, seed=0)
    optimizer = make(model.parameters())
    scheduler = CoolDown(optimizer, STEPS) if cool_down else None
    averaged = AveragedModel(model, multi_avg_fn=polynomial_multi_avg_fn()) if average else None
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[chosen]), labels[chosen])
        loss.backward()
        if isinstance(optimizer, ProxSPSAdam):
            optimizer.step(loss=loss)  # the step is chosen from the loss
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if averaged is not None:
            averaged.update_parameters(model)
    return averaged or model


@torch.no_grad()
def report(name: str, model: torch.nn.Module) -> None:
    """Print the loss and the accuracy on fresh points."""
    x, labels = spirals(3000, seed=2)
    scores = model(x)
    accuracy = (scores.argmax(1) == labels).float().mean()
    print(f"{name:36}  loss {cross_entropy(scores, labels):.3f}  accuracy {accuracy:.1%}")


torch.set_num_threads(1)
for lr in (1e-4, 1e-3, 1e-2, 1e-1):
    report(f"AdamW, lr {lr:g}", train(lambda params, lr=lr: torch.optim.AdamW(params, lr)))
report("ProxSPSAdam", train(ProxSPSAdam))
report("ProxSPSAdam, lr at most 1e6", train(lambda params: ProxSPSAdam(params, lr=1e6, distance_cap=True)))
report("ProxSPSAdam, cool-down", train(ProxSPSAdam, cool_down=True))
report("ProxSPSAdam, average", train(ProxSPSAdam, average=True))
