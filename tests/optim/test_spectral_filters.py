"""Spectral directions for filters: one matrix per filter bank, whatever the memory format."""

from __future__ import annotations

import torch
from torch import nn

from proxsps import ScheduleFreeSPS


def trained(layout: torch.memory_format, x: torch.Tensor) -> list[torch.Tensor]:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.ReLU(), nn.Conv2d(5, 40, 1), nn.ReLU(), nn.Conv2d(40, 1, 3))
    net = net.double().to(memory_format=layout)
    opt = ScheduleFreeSPS(net, metric="spectral")
    for _ in range(5):
        opt.zero_grad()
        loss = (net(x) - 1).square().mean()
        loss.backward()
        opt.step(loss=loss)
    net.eval()
    return [p.detach().clone() for p in net.parameters()]


def test_filters_in_channels_last_move_as_contiguous_ones():
    """The order of columns does not change an orthogonalised matrix; in double precision sums differ in last bits."""
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain, last = (trained(layout, x) for layout in (torch.contiguous_format, torch.channels_last))
    for one, other in zip(plain, last, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_filters_and_matrices_with_the_same_rows_and_columns_step_together():
    torch.manual_seed(2)
    wide, filters = nn.Parameter(torch.randn(4, 27)), nn.Parameter(torch.randn(4, 3, 3, 3))
    wide.grad, filters.grad = torch.randn(4, 27), torch.randn(4, 3, 3, 3)
    flat = nn.Parameter(filters.detach().reshape(4, 27).clone())
    flat.grad = filters.grad.reshape(4, 27)
    alike = nn.Parameter(wide.detach().clone())
    alike.grad = wide.grad
    for params in ([wide, filters], [alike, flat]):
        ScheduleFreeSPS([{"params": params, "metric": "spectral"}]).step(loss=1.0)
    torch.testing.assert_close(filters.reshape(4, 27), flat)
    torch.testing.assert_close(wide, alike)
