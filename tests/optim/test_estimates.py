"""The seam for other estimates of the loss: momentum needs one of these classes, and nothing else of a step changes."""

from __future__ import annotations

import pytest
import torch

from proxsps.optim import ProxSPS
from proxsps.optim.estimate import Estimate
from proxsps.regularizers import L1, GroupLasso

BETA = 0.9


class Averaged(Estimate):
    """Averaged linear models: d, fbar and gamma = <g, x> averaged, m = fbar + <d, x> - gamma."""

    def __init__(self, opt):
        self.opt = opt

    def prepare(self, blocks, numbers):
        self.new, gamma = {}, numbers.scalar(0.0)
        for block in blocks:
            for owner, x, g in zip(block.owners, block.params, block.slopes, strict=True):
                self.new[owner] = torch.lerp(g, self.opt.state[owner].get("d", g), BETA)
                gamma = gamma + numbers.total([torch.sum(g * x)])
            block.slopes = [self.new[owner] for owner in block.owners]
        self.gamma = gamma
        return numbers.scalar(0.0)

    def value(self, m, addition, sums, lam):
        f, gamma = self.opt.numbers or (m, self.gamma)
        self.numbers = (BETA * f + (1 - BETA) * m, BETA * gamma + (1 - BETA) * self.gamma)
        return self.numbers[0] + sums.d_dot_x.sum() - self.numbers[1]

    def commit(self, ok):
        self.opt.numbers = self.numbers
        for owner, d in self.new.items():
            self.opt.state[owner]["d"] = d


class Momentum(ProxSPS):
    numbers = None

    def _estimate(self):
        return Averaged(self)


def plain_step(x, g, f, state, alpha, prox):
    """The same in the order of the formulas, with bisection."""
    d, fbar, gamma = state or (g, f, float(g @ x))
    d, fbar, gamma = (
        BETA * old + (1 - BETA) * new for old, new in zip((d, fbar, gamma), (g, f, float(g @ x)), strict=True)
    )
    m = fbar + float(d @ x) - gamma

    def height(u):
        return m + float(d @ (prox(x - u * alpha * d, alpha) - x))

    low, high = 0.0, 1.0
    if height(1.0) >= 0:
        low = high = 1.0
    while low < (u := (low + high) / 2) < high:
        low, high = (u, high) if height(u) > 0 else (low, u)
    return prox(x - u * alpha * d, alpha), (d, fbar, gamma)


@pytest.mark.parametrize("phi", [L1(0.05), GroupLasso(0.1), None], ids=str)
@pytest.mark.parametrize("fused", [None, False])
def test_momentum_needs_one_estimate(phi, fused, kit):
    problem = kit.least_squares(noise=0.3)
    w = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    opt = Momentum([w], lr=0.5, regularizer=phi, fused=fused)
    x, state = w.detach().clone(), None
    for k in range(12):
        rows = slice(2 * k, 2 * k + 8)
        opt.zero_grad()
        loss = problem.loss(w, rows)
        loss.backward()
        prox = phi.prox if phi is not None else lambda z, alpha: z
        x, state = plain_step(w.detach().clone(), w.grad, loss.item(), state, 0.5, prox)
        opt.step(loss=loss)
        torch.testing.assert_close(w.detach(), x, rtol=0, atol=1e-9)
    assert (opt.last_step.branch >= 0).all()


def test_a_skipped_step_leaves_the_state_as_it_was(kit):
    problem = kit.least_squares()
    w = torch.nn.Parameter(torch.ones(6, dtype=torch.float64))
    opt = Momentum([w], lr=0.5)
    problem.loss(w).backward()
    opt.step(loss=problem.loss(w))
    before, numbers = opt.state[w]["d"].clone(), opt.numbers
    w.grad = torch.full_like(w, torch.nan)
    with pytest.warns(RuntimeWarning, match="left untouched"):
        opt.step(loss=1.0)
    assert torch.equal(opt.state[w]["d"], before)
    assert opt.numbers == numbers
