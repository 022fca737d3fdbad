"""The baselines of the experiment without a learning rate, against torch and against their formulas."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from proxsps.experiments.no_lr.baselines import MuonAdamW, ScheduleFreePlus, matrix_view


def filters(layout: torch.memory_format) -> nn.Conv2d:
    torch.manual_seed(0)
    return nn.Conv2d(3, 6, 3).to(memory_format=layout)


def trained(layer: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, steps: int = 5) -> list[torch.Tensor]:
    for _ in range(steps):
        layer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in layer.parameters()]


def groups(layer: nn.Module) -> list[dict[str, object]]:
    return [{"params": [layer.weight], "metric": "spectral"}, {"params": [layer.bias]}]


def test_muon_takes_matrices_and_adamw_the_rest():
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    found, wanted = [], []
    for made in (True, False):
        torch.manual_seed(0)
        layer = nn.Linear(8, 4)
        if made:
            found = trained(layer, MuonAdamW(groups(layer), lr=0.02, weight_decay=0.1), x)
        else:
            start = layer.bias.detach().clone()
            muon = torch.optim.Muon([layer.weight], 0.02, 0.1, adjust_lr_fn="match_rms_adamw")
            adamw = torch.optim.AdamW([layer.bias], 0.02, weight_decay=0.1)
            adamw.register_step_post_hook(lambda *_, muon=muon: muon.step())
            wanted = trained(layer, adamw, x)
            assert not torch.equal(wanted[1], start)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_muon_gets_filters_as_matrices_in_any_layout():
    """Columns in another order are the same problem; Newton-Schulz in bfloat16 rounds differently."""
    x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    start = filters(torch.contiguous_format).weight.detach()
    ends = []
    for layout in (torch.contiguous_format, torch.channels_last):
        layer = filters(layout)
        assert matrix_view(layer.weight.detach()).data_ptr() == layer.weight.data_ptr()
        ends.append(trained(layer, MuonAdamW(groups(layer), lr=0.02), x)[0])
    moved = (ends[0] - start).norm()
    assert moved > 0.1
    assert (ends[0] - ends[1]).norm() < 5 * 2**-8 * moved


def test_a_scheduler_reaches_both_optimizers():
    layer = nn.Linear(8, 4)
    optimizer = MuonAdamW(groups(layer), lr=0.02)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 0.0)
    start = [p.detach().clone() for p in layer.parameters()]
    assert all(map(torch.equal, trained(layer, optimizer, torch.ones(2, 8)), start))


@pytest.mark.parametrize("warmup", [0, 3])
def test_schedule_free_plus_follows_its_formulas(warmup):
    """min ||A w - b||^2 in NumPy, in double precision, with the average computed from the whole history."""
    rng = np.random.default_rng(0)
    A, b, w = rng.standard_normal((5, 3)), rng.standard_normal(5), rng.standard_normal(3)
    p = nn.Parameter(torch.from_numpy(w.copy()))
    optimizer = ScheduleFreePlus([p], weight_decay=0.3, warmup_steps=warmup)
    zs, weights, steps, grads = [w], [], [], []
    x = y = w
    for k in range(1, 9):
        residual = A @ y - b
        f, g = residual @ residual, 2 * A.T @ residual
        grads.append(g)
        polyak = max(0.0, f + 0.9 * g @ (zs[-1] - x)) / (np.sqrt(np.pi / 2) * np.abs(g).sum())
        steps.append(polyak * (min(1, k / warmup) if warmup else 1))
        ages = np.arange(k)[::-1]
        m = sum(0.1 * 0.9**age * old for age, old in zip(ages, grads, strict=True)) / (1 - 0.9**k)
        v = sum(0.05 * 0.95**age * old**2 for age, old in zip(ages, grads, strict=True)) / (1 - 0.95**k)
        zs.append(zs[-1] - steps[-1] ** 2 * 0.3 * y - steps[-1] * m / (np.sqrt(v) + 1e-8))
        weights.append(max(steps) ** 2)
        late = slice(max(0, warmup - 1), k)  # the average begins with the last z of the warm-up, which has all weight
        past = sum(weights[: late.start + 1]) if k >= warmup else 0.0
        shares = np.array([past, *weights[late.start + 1 : k]]) if k > warmup else np.array([1.0])
        x = np.average(zs[late.start + 1 :] if k > warmup else zs[-1:], axis=0, weights=shares)
        y = 0.9 * x + 0.1 * zs[-1]
        optimizer.zero_grad()
        loss = (torch.from_numpy(A) @ p - torch.from_numpy(b)).square().sum()
        loss.backward()
        optimizer.step(loss)
        np.testing.assert_allclose(p.detach().numpy(), y, rtol=1e-10)
    optimizer.eval()
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-10)
    optimizer.train()
    np.testing.assert_allclose(p.detach().numpy(), y, rtol=1e-10)
