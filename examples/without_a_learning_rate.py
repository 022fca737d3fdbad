"""Train a network without a learning rate: ScheduleFreeSPS in both metrics, and ProxSPSAdam with a cool-down.

AdamW is run beside it with learning rates over four decades. Takes a few seconds.

    python examples/without_a_learning_rate.py
"""

import math

import torch
from torch.nn.functional import cross_entropy

from proxsps import CoolDown, PolyakOptimizer, ProxSPSAdam, ScheduleFreeSPS

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


def train(make, cool_down=False) -> torch.nn.Module:
    """The network after training; `make` returns the optimizer for it."""
    model, (x, labels) = network(), spirals(1500, seed=0)
    optimizer = make(model)
    scheduler = CoolDown(optimizer, STEPS) if cool_down else None
    generator = torch.Generator().manual_seed(1)
    model.train()
    for _ in range(STEPS):
        chosen = torch.randint(len(x), (64,), generator=generator)
        optimizer.zero_grad()
        loss = cross_entropy(model(x[chosen]), labels[chosen])
        loss.backward()
        if isinstance(optimizer, PolyakOptimizer):
            optimizer.step(loss=loss)  # the step is chosen from the loss
        else:
            optimizer.step()
        if scheduler is not None:
            scheduler.step()
    return model.eval()  # with ScheduleFreeSPS, the average of the weights


@torch.no_grad()
def report(name: str, model: torch.nn.Module) -> None:
    """Print the loss and the accuracy on fresh points."""
    x, labels = spirals(3000, seed=2)
    scores = model(x)
    accuracy = (scores.argmax(1) == labels).float().mean()
    print(f"{name:36}  loss {cross_entropy(scores, labels):.3f}  accuracy {accuracy:.1%}")


torch.set_num_threads(1)
for lr in (1e-4, 1e-3, 1e-2, 1e-1):
    report(f"AdamW, lr {lr:g}", train(lambda model, lr=lr: torch.optim.AdamW(model.parameters(), lr)))
report("ScheduleFreeSPS", train(ScheduleFreeSPS))
report("ScheduleFreeSPS, spectral", train(lambda model: ScheduleFreeSPS(model, metric="spectral")))
report("ProxSPSAdam", train(lambda model: ProxSPSAdam(model.parameters())))
report("ProxSPSAdam, cool-down", train(lambda model: ProxSPSAdam(model.parameters()), cool_down=True))
