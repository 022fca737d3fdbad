"""Factors on sets of tensors that have a distance cap each."""

from __future__ import annotations

import pytest
import torch

from proxsps import ScheduleFreeSPS


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("factor", [0.1, 1e-3])
def test_a_factor_on_a_set_is_a_factor_on_its_first_steps(factor: float, capturable: bool) -> None:
    """While gradients do not depend on the moves, all moves of a set are multiplied."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((33, 20), (33,))
    grads = [[torch.randn(shape, generator=generator).double() for shape in shapes] for _ in range(8)]
    taus = []
    for own in (1.0, factor):
        params = [torch.ones(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]
        groups = [{"params": params[:1], "factor": own}, {"params": params[1:]}]
        opt = ScheduleFreeSPS(groups, lower_bound=None, capturable=capturable)
        found = []
        for step in grads:
            for p, g in zip(params, step, strict=True):
                p.grad = g.clone()
            opt.step(loss=1.0)
            found.append(opt.last_step.tau.double().clone())
        taus.append(torch.stack(found))
    torch.testing.assert_close(taus[1][:, 0], factor * taus[0][:, 0], rtol=1e-9, atol=0)
    torch.testing.assert_close(taus[1][:, 1], taus[0][:, 1], rtol=1e-9, atol=0)
