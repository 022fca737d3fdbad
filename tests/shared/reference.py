"""The methods in the paper's order, one line per formula, for one parameter vector. The fast code must agree with it.

Slow and plain on purpose: no groups, no blocks, no reductions shared between methods. Tests run both together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sps(x: Tensor, g: Tensor, f: float, alpha: float, C: float = 0.0, c: float = 1.0) -> Tensor:
    """Algorithm 1 (c = 1) and SPS_max."""
    if not g.any():
        return x
    gamma = min(alpha, (f - C) / (c * float(g @ g)))
    return x - gamma * g


def regularized_sps(x: Tensor, g: Tensor, f: float, alpha: float, lam: float, C: float = 0.0, c: float = 1.0) -> Tensor:
    """The paper's baseline: SPS on the loss with lam/2 ||x||^2 added to it."""
    return sps(x, g + lam * x, f + lam / 2 * float(x @ x), alpha, C, c)


def prox_sps_l2(x: Tensor, g: Tensor, f: float, alpha: float, lam: float, C: float = 0.0) -> Tensor:
    """Algorithm 3."""
    if not g.any():
        return x / (1 + alpha * lam)
    zeta = max(0.0, ((1 + alpha * lam) * (f - C) - alpha * lam * float(g @ x)) / float(g @ g))
    tau = min(alpha, zeta)
    return (x - tau * g) / (1 + alpha * lam)


def prox_sps(
    x: Tensor, g: Tensor, f: float, alpha: float, prox: Callable[[Tensor, float], Tensor], C: float = 0.0
) -> Tensor:
    """Algorithm 2 by the lemma on the general update, with the bisection its remark proposes."""

    def y(u: float) -> Tensor:
        return prox(x - u * alpha * g, alpha)

    def model(point: Tensor) -> float:
        return f + float(g @ (point - x))

    if model(y(1.0)) > C:
        return y(1.0)
    if model(y(0.0)) < C:
        return y(0.0)
    low, high = 0.0, 1.0
    while low < (u := (low + high) / 2) < high:
        low, high = (u, high) if model(y(u)) > C else (low, u)
    return y(u)


def prox_sgd(x: Tensor, g: Tensor, alpha: float, prox: Callable[[Tensor, float], Tensor]) -> Tensor:
    """Proximal stochastic gradient descent: the linear model."""
    return prox(x - alpha * g, alpha)


def dec_sps(
    x: Tensor, g: Tensor, f: float, k: int, previous: float | None, gamma_b: float, c0: float = 1.0, C: float = 0.0
) -> tuple[Tensor, float]:
    """DecSPS: the new point and gamma_k. `previous` is gamma_{k-1}, None at k = 0: c_{-1} gamma_{-1} = c_0 gamma_b."""
    c = c0 * (k + 1) ** 0.5
    memory = c0 * gamma_b if previous is None else c0 * k**0.5 * previous
    ratio = (f - C) / float(g @ g) if g.any() else torch.inf
    gamma = min(ratio, memory) / c
    return x - gamma * g, gamma


class ScheduleFree:
    """The schedule-free step, one formula per line: gradients at y, proximal steps of z, x the average of all z.

    Args:
        ys: the parameters at the start; they are not changed.
        sets: the set of each, with a distance cap per set.
        spectral: which of them are matrices with orthogonalised directions; the others have Adam's metric.
        lam: decoupled weight decay.
        prox: (tensor, step sizes) -> prox in a diagonal metric, instead of weight decay.
        C: the lower bound of the loss.
        c: the constant of the distance caps.
    """

    def __init__(
        self,
        ys: Sequence[Tensor],
        sets: Sequence[int],
        spectral: Sequence[bool] = (),
        lam: float = 0.0,
        prox: Callable[[Tensor, Tensor], Tensor] | None = None,
        C: float = 0.0,
        c: float = 2.0,
    ) -> None:
        self.ys, self.zs, self.start = ([y.detach().clone() for y in ys] for _ in range(3))
        self.sets, self.spectral = list(sets), list(spectral) or [False] * len(self.ys)
        self.lam, self.prox, self.C, self.c, self.k = lam, prox, C, c, 0
        self.memory = [torch.zeros_like(y) for y in self.ys]
        self.reach = {s: 0.01 * (1 + self._norm(s, self.start)) for s in set(self.sets)}
        self.G = dict.fromkeys(self.reach, 0.0)
        self.total = self.longest = self.squares = 0.0

    def _norm(self, s: int, tensors: Sequence[Tensor]) -> float:
        return (
            sum(float(t.double().square().sum()) for t, own in zip(tensors, self.sets, strict=True) if own == s) ** 0.5
        )

    @property
    def xs(self) -> list[Tensor]:
        """What is evaluated."""
        return [(y - 0.1 * z) / 0.9 for y, z in zip(self.ys, self.zs, strict=True)]

    def _directions(self, gs: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor], list[float], list[Tensor]]:
        """d, p, the squared length that counts in G, and 1/D of each tensor."""
        mu = min(0.9, self.k / (self.k + 100))
        self.squares = mu**2 * self.squares + (1 - mu) ** 2
        ds, ps, lengths, inverses = [], [], [], []
        for i, g in enumerate(gs):
            if self.spectral[i]:
                d = self.memory[i] = mu * self.memory[i] + (1 - mu) * g
                rows = d.reshape(d.shape[0], -1)
                p = (self.squares * max(rows.shape)) ** 0.5 * newton_schulz(rows).reshape(d.shape)
                lengths.append(d.numel() / 4 + 0.75 * float(p.double().square().sum()) / (0.8 * self.squares))
                inverses.append(torch.ones_like(d))
            else:
                self.memory[i] = 0.999 * self.memory[i] + 0.001 * g * g
                r = 1 / ((self.memory[i] / (1 - 0.999 ** (self.k + 1))).sqrt() + 1e-8)
                d, p = g, r * g
                lengths.append(float(p.double().square().sum()))
                inverses.append(r)
            ds.append(d)
            ps.append(p)
        return ds, ps, lengths, inverses

    def moved(self, t: float, ps: Sequence[Tensor], inverses: Sequence[Tensor]) -> list[Tensor]:
        """z after a step of t times the caps."""
        steps = [t * self.caps[s] for s in self.sets]
        if self.prox is None:
            return [(z - a * p) / (1 + a * self.lam) for z, p, a in zip(self.zs, ps, steps, strict=True)]
        return [self.prox(z - a * p, a * r) for z, p, r, a in zip(self.zs, ps, inverses, steps, strict=True)]

    def step(self, gs: Sequence[Tensor], f: float) -> dict[int, float]:
        """Take a step with the gradients and the loss at `ys`; returns tau of each set."""
        xs = self.xs
        ds, ps, lengths, inverses = self._directions(gs)
        self.caps = {}
        for s in self.reach:
            self.reach[s] = max(self.reach[s], self._norm(s, [x - o for x, o in zip(xs, self.start, strict=True)]))
            q = sum(length for length, own in zip(lengths, self.sets, strict=True) if own == s)
            self.G[s] = 0.99 * self.G[s] + 0.01 * q
            mean = self.G[s] / (1 - 0.99 ** (self.k + 1))
            self.caps[s] = self.c * self.reach[s] / ((self.k + 1) * mean) ** 0.5 if mean > 0 else 0.0
        gap = f - self.C + _dots(gs, [z - y for z, y in zip(self.zs, self.ys, strict=True)])

        def height(t: float) -> float:
            return gap + _dots(ds, [new - z for new, z in zip(self.moved(t, ps, inverses), self.zs, strict=True)])

        t = first_zero(height) if gap > 0 else 0.0
        if t > 0:
            self.zs = self.moved(t, ps, inverses)
        self.k += 1
        self.longest = max(self.longest, *(t * cap for cap in self.caps.values()))
        weight = self.k * self.longest**2
        self.total += weight
        share = weight / self.total if self.total > 0 else 1.0
        xs = [x + share * (z - x) for x, z in zip(xs, self.zs, strict=True)]
        self.ys = [0.9 * x + 0.1 * z for x, z in zip(xs, self.zs, strict=True)]
        return {s: t * cap for s, cap in self.caps.items()}


def _dots(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(ones, others, strict=True))


def first_zero(height: Callable[[float], float]) -> float:
    """The first zero of a function on (0, 1] that is positive at 0 and does not rise again, by bisection; else 1."""
    if height(1.0) >= 0:
        return 1.0
    low, high = 0.0, 1.0
    while low < (t := (low + high) / 2) < high:
        low, high = (t, high) if height(t) > 0 else (low, t)
    return low


def newton_schulz(d: Tensor) -> Tensor:
    """Muon's direction of a matrix, through the Gram matrix of its smaller side."""
    X = d / (torch.linalg.matrix_norm(d) + 1e-7)
    for _ in range(5):
        if d.shape[0] <= d.shape[1]:
            A = X @ X.T
            X = 3.4445 * X - 4.7750 * A @ X + 2.0315 * A @ A @ X
        else:
            A = X.T @ X
            X = 3.4445 * X - 4.7750 * X @ A + 2.0315 * X @ A @ A
    return X
