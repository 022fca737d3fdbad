"""One step, exactly: against the methods in the paper's order, and against a numeric minimiser of the step's model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cvxpy as cp
import numpy as np
import pytest
import reference
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS
from proxsps.regularizers import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    NonNegative,
    NuclearNorm,
    Regularizer,
    Simplex,
    SparseGroupLasso,
    TotalVariation1D,
)

F64 = torch.float64
BRANCHES = ("truncated", "inside", "capped")


def parameter(x, g):
    x = torch.nn.Parameter(torch.as_tensor(x, dtype=F64).clone())
    x.grad = torch.as_tensor(g, dtype=F64).clone()
    return x


# -- against a numeric minimiser --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Group:
    """A parameter group with one tensor: its cap, its regulariser, and the same function for cvxpy."""

    phi: Regularizer | None
    model: Callable[[Any], tuple[Any, list[Any]]]  # phi(y) and constraints
    alpha: float
    shape: tuple[int, ...] = (4, 3)

    def options(self):
        if isinstance(self.phi, L2) and self.phi.center is None:
            return {"lr": self.alpha, "weight_decay": self.phi.lam}
        return {"lr": self.alpha, "regularizer": self.phi}

    def prox(self, z):
        return z if self.phi is None else self.phi.prox(z, self.alpha)


CENTER = np.linspace(-1, 2, 12).reshape(4, 3)

GROUPS = {
    "Zero": Group(None, lambda y: (0, []), 0.6),
    "L2": Group(L2(0.7), lambda y: (0.35 * cp.sum_squares(y), []), 0.8),
    "L2-center": Group(L2(0.7, torch.as_tensor(CENTER)), lambda y: (0.35 * cp.sum_squares(y - CENTER), []), 0.8),
    "L1": Group(L1(0.6), lambda y: (0.6 * cp.sum(cp.abs(y)), []), 0.9),
    "ElasticNet": Group(ElasticNet(0.5, 0.3), lambda y: (0.5 * cp.sum(cp.abs(y)) + 0.15 * cp.sum_squares(y), []), 1.3),
    "GroupLasso": Group(GroupLasso.rows(1.1), lambda y: (1.1 * cp.sum(cp.norm(y, 2, axis=1)), []), 0.7),
    "SparseGroupLasso": Group(
        SparseGroupLasso(0.3, 0.8, dims=(1,)),
        lambda y: (0.3 * cp.sum(cp.abs(y)) + 0.8 * cp.sum(cp.norm(y, 2, axis=1)), []),
        0.7,
    ),
    "Box": Group(Box(-0.3, 0.8), lambda y: (0, [y >= -0.3, y <= 0.8]), 0.9),
    "NonNegative": Group(NonNegative(), lambda y: (0, [y >= 0]), 0.9),
    "L1Ball": Group(L1Ball(2.0), lambda y: (0, [cp.sum(cp.abs(y)) <= 2.0]), 0.9),
    "L2Ball": Group(L2Ball(1.5), lambda y: (0, [cp.norm(cp.vec(y, order="C"), 2) <= 1.5]), 1.1),
    "Simplex": Group(Simplex(1.5), lambda y: (0, [y >= 0, cp.sum(y) == 1.5]), 0.8),
    "NuclearNorm": Group(NuclearNorm(1.2), lambda y: (1.2 * cp.normNuc(y), []), 0.7),
    "TotalVariation1D": Group(
        TotalVariation1D(0.4), lambda y: (0.4 * cp.sum(cp.abs(y[:, 1:] - y[:, :-1])), []), 0.9, shape=(2, 9)
    ),
}

# Groups that share a step, each with its own cap and regulariser.
MIXED = {
    "decays": [
        Group(L2(lam), lambda y, lam=lam: (lam / 2 * cp.sum_squares(y), []), a) for lam, a in ((0.1, 2.0), (3.0, 0.2))
    ],
    "L1+L2+none": [GROUPS["L1"], GROUPS["L2"], Group(None, lambda y: (0, []), 0.1)],
    "sets+norms": [
        GROUPS["Box"],
        GROUPS["GroupLasso"],
        GROUPS["Simplex"],
        Group(L1(0.2), lambda y: (0.2 * cp.sum(cp.abs(y)), []), 3.0),
    ],
    "matrices": [GROUPS["NuclearNorm"], GROUPS["TotalVariation1D"], GROUPS["L2-center"]],
}

PROBLEMS = {**{name: [group] for name, group in GROUPS.items()}, **MIXED}


class Instance:
    """A random point and slope, and the loss gap at which each branch of the step is taken."""

    def __init__(self, groups, seed):
        rng = np.random.default_rng(seed)
        self.groups = groups
        self.xs = [torch.as_tensor(1.5 * rng.standard_normal(group.shape)) for group in groups]
        self.ds = [torch.as_tensor(rng.standard_normal(group.shape)) for group in groups]
        if self.fall(0.0) < 0:  # the prox alone shall lower the linear model, so that it can fall below C
            self.ds = [-d for d in self.ds]

    def fall(self, u):
        """<d, x - y(u)>: the gap at which the linear model reaches C at y(u)."""
        ys = [group.prox(x - u * group.alpha * d) for group, x, d in zip(self.groups, self.xs, self.ds, strict=True)]
        return sum(float((d * (x - y)).sum()) for d, x, y in zip(self.ds, self.xs, ys, strict=True))

    def gap(self, branch):
        start, end = self.fall(0.0), self.fall(1.0)
        return {"truncated": 0.6 * start, "inside": 0.4 * start + 0.6 * end, "capped": 1.5 * end + 0.2}[branch]

    def step(self, gap, bound=0.25, cls=ProxSPS, **options):
        params = [parameter(x, d) for x, d in zip(self.xs, self.ds, strict=True)]
        groups = [{"params": [p], **group.options()} for p, group in zip(params, self.groups, strict=True)]
        opt = cls(groups, **options) if cls is ProxSGD else cls(groups, lower_bound=bound, **options)
        opt.step(loss=gap + bound)
        return [p.detach() for p in params], opt.last_step

    def model_height(self, gap, ys):
        return gap + sum(float((d * (y - x)).sum()) for d, x, y in zip(self.ds, self.xs, ys, strict=True))

    def minimise(self, gap, truncate=True):
        """The minimum over y of max{gap + <d, y - x>, 0} + sum_j phi_j(y_j) + ||y_j - x_j||^2 / (2 alpha_j), and the
        same function to evaluate elsewhere, with the largest violation of a constraint there."""
        variables = [cp.Variable(group.shape) for group in self.groups]
        height, rest, constraints = gap, 0, []
        for y, group, x, d in zip(variables, self.groups, self.xs, self.ds, strict=True):
            value, more = group.model(y)
            height = height + cp.sum(cp.multiply(d.numpy(), y - x.numpy()))
            rest = rest + value + cp.sum_squares(y - x.numpy()) / (2 * group.alpha)
            constraints += more
        objective = (cp.maximum(height, 0) if truncate else height) + rest
        problem = cp.Problem(cp.Minimize(objective), constraints)
        problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)
        assert problem.status == cp.OPTIMAL

        def evaluate(ys):
            for variable, y in zip(variables, ys, strict=True):
                variable.value = y.numpy()
            return float(objective.value), max([float(np.max(c.violation())) for c in constraints], default=0.0)

        return float(problem.value), evaluate


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_step_minimises_its_model(name, branch):
    instance = Instance(PROBLEMS[name], seed=3)
    if name == "Zero" and branch == "truncated":
        gap = 0.0  # without a regulariser the only truncated step is from a loss at its bound
    else:
        assert instance.fall(0.0) > 1e-3 or name == "Zero"
        gap = instance.gap(branch)
    minimum, evaluate = instance.minimise(gap)
    ys, report = instance.step(gap)
    value, violation = evaluate(ys)
    assert report.branch_name == branch
    # CLARABEL is asked for 1e-9; the search stops at a duality gap of 1e-12 of the loss gap.
    assert abs(value - minimum) <= 1e-8 * max(1.0, abs(minimum))
    assert violation <= 1e-13


@pytest.mark.parametrize("branch", BRANCHES)
@pytest.mark.parametrize("name", [n for n in PROBLEMS if n not in ("TotalVariation1D", "matrices", "Zero")])
def test_the_capturable_step_minimises_its_model(name, branch):
    instance = Instance(PROBLEMS[name], seed=4)
    gap = instance.gap(branch)
    host, _ = instance.step(gap)
    minimum, evaluate = instance.minimise(gap)
    ys, report = instance.step(gap, capturable=True)
    assert report.branch_name == branch
    assert abs(evaluate(ys)[0] - minimum) <= 1e-8 * max(1.0, abs(minimum))
    # The model is 1/alpha-strongly convex: points whose values differ by e are within sqrt(2 alpha e) of each other.
    for y, z in zip(ys, host, strict=True):
        torch.testing.assert_close(y, z, rtol=0, atol=math.sqrt(2 * 3.0 * 1e-8))


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_proximal_gradient_step_minimises_the_linear_model(name):
    instance = Instance(PROBLEMS[name], seed=5)
    minimum, evaluate = instance.minimise(0.7, truncate=False)
    ys, report = instance.step(0.7, cls=ProxSGD)
    assert report.branch_name == "capped"
    value, violation = evaluate(ys)
    assert abs(value - minimum) <= 1e-8 * max(1.0, abs(minimum))
    assert violation <= 1e-13


def test_a_joint_ball_takes_the_tensors_of_a_group_as_one_vector():
    rng = np.random.default_rng(8)
    xs, ds = ([torch.as_tensor(rng.standard_normal(shape)) for shape in ((3, 2), (4,))] for _ in range(2))
    params = [parameter(x, d) for x, d in zip(xs, ds, strict=True)]
    flat = parameter(torch.cat([x.reshape(-1) for x in xs]), torch.cat([d.reshape(-1) for d in ds]))
    one, two = (
        ProxSPS(params, lr=0.5, regularizer=L2Ball(1.2, joint=True)),
        ProxSPS([flat], lr=0.5, regularizer=L2Ball(1.2)),
    )
    for opt in (one, two):
        opt.step(loss=5.0)
    joined = torch.cat([p.detach().reshape(-1) for p in params])
    assert joined.norm() == pytest.approx(1.2, rel=1e-14)
    torch.testing.assert_close(joined, flat.detach(), rtol=1e-14, atol=1e-14)


def test_a_center_for_each_tensor_of_a_group_finds_its_tensor():
    centers = [torch.full((3,), 2.0, dtype=F64), torch.full((3,), -1.0, dtype=F64)]
    # The first tensor has no gradient: the second one must still get the second centre.
    a, b = parameter(torch.ones(3), torch.ones(3)), parameter(torch.zeros(3), torch.zeros(3))
    a.grad = None
    ProxSPS([a, b], lr=1.0, regularizer=L2(1.0, centers)).step(loss=1.0)
    assert torch.equal(b.detach(), centers[1] / 2)


# -- one u for all groups ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"fused": False}, {"fused": None}, {"capturable": True}], ids=["torch", "default", "capturable"]
)
@pytest.mark.parametrize("name", ["decays", "L1+L2+none", "sets+norms"])
def test_inside_the_linear_model_ends_at_the_bound(name, options):
    # A step per group from sums over all groups would end below it.
    for seed in range(10):
        instance = Instance(PROBLEMS[name], seed=100 + seed)
        gap = instance.gap("inside")
        ys, report = instance.step(gap, **options)
        assert report.branch_name == "inside"
        scale = gap + sum(
            float((d * (y - x)).abs().sum()) for d, x, y in zip(instance.ds, instance.xs, ys, strict=True)
        )
        height = instance.model_height(gap, ys)
        # Closed form: rounding of the sums. Search: min(u, 1 - u) |h| is below 1e-12 of the gap, or at rounding of h.
        tolerance = 1e-14 if name == "decays" else 1e-11
        assert abs(height) <= tolerance * scale / min(float(report.u), 1 - float(report.u))
        assert abs(float(report.model_gap) - height) <= 1e-13 * scale


def test_the_model_is_never_below_the_bound_unless_truncated():
    for seed in range(10):
        instance = Instance(PROBLEMS["decays"], seed=200 + seed)
        capped, report = instance.step(instance.gap("capped"))
        assert report.branch_name == "capped"
        assert instance.model_height(instance.gap("capped"), capped) > 0
        truncated, report = instance.step(instance.gap("truncated"))
        assert report.branch_name == "truncated"
        assert instance.model_height(instance.gap("truncated"), truncated) < 0
        for y, x, group in zip(truncated, instance.xs, instance.groups, strict=True):
            torch.testing.assert_close(y, x / (1 + group.alpha * group.phi.lam), rtol=1e-15, atol=0)  # the prox alone


def test_coupled_groups_share_one_step_ratio_and_end_at_the_bound():
    rng = np.random.default_rng(0)
    for _ in range(10):
        xs, gs = ([torch.as_tensor(rng.standard_normal(5)) for _ in range(2)] for _ in range(2))
        alphas, lams, f, C = (0.9, 2.5), (0.4, 0.0), 0.7, 0.1
        params = [parameter(x, g) for x, g in zip(xs, gs, strict=True)]
        groups = [{"params": [p], "lr": a, "weight_decay": w} for p, a, w in zip(params, alphas, lams, strict=True)]
        opt = SPS(groups, lower_bound=C)
        opt.step(loss=f)
        ds = [g + w * x for g, w, x in zip(gs, lams, xs, strict=True)]
        m = f + sum(w / 2 * float(x @ x) for w, x in zip(lams, xs, strict=True))
        u = (m - C) / sum(a * float(d @ d) for a, d in zip(alphas, ds, strict=True))
        for p, x, d, a in zip(params, xs, ds, alphas, strict=True):
            torch.testing.assert_close(p.detach(), x - min(u, 1) * a * d, rtol=1e-13, atol=1e-13)
        if u < 1:
            end = m + sum(float(d @ (p.detach() - x)) for d, p, x in zip(ds, params, xs, strict=True))
            assert end == pytest.approx(C, abs=1e-13 * m)


# -- against the methods in the paper's order -------------------------------------------------------------------------

FINITE = {"allow_nan": False, "allow_infinity": False}
CAPS = st.floats(1e-3, 1e2, **FINITE)
DECAYS = st.floats(0, 10, **FINITE)
LOSSES = st.floats(0, 100, **FINITE)
SEEDS = st.integers(0, 10_000)
SETTINGS = settings(max_examples=120, deadline=None, derandomize=True, database=None)
PATHS = st.sampled_from([{"fused": False}, {"fused": None}, {"capturable": True}])


def state(seed, size=6):
    rng = np.random.default_rng(seed)
    scale = 10.0 ** rng.uniform(-2, 2)
    return torch.as_tensor(rng.standard_normal(size)), torch.as_tensor(scale * rng.standard_normal(size))


def close(got, want, x, g, reach):
    """Entries agree up to rounding of x and of a step that is the sum of terms of size `reach`."""
    bound = 1e-13 * (x.abs() + reach * g.abs()) + 1e-300
    assert ((got - want).abs() <= bound).all()


@SETTINGS
@given(SEEDS, CAPS, DECAYS, LOSSES, PATHS)
def test_prox_sps_with_decay_is_algorithm_3(seed, alpha, lam, gap, path):
    x, g = state(seed)
    p = parameter(x, g)
    ProxSPS([p], lr=alpha, weight_decay=lam, lower_bound=-1.5, **path).step(loss=gap - 1.5)
    want = reference.prox_sps_l2(x, g, gap - 1.5, alpha, lam, C=-1.5)
    terms = (gap + 1.5) / float(g @ g) + alpha * lam / (1 + alpha * lam) * float((g * x).abs().sum()) / float(g @ g)
    close(p.detach(), want, x, g, 10 * min(alpha, terms) + 10 * terms)


@SETTINGS
@given(SEEDS, CAPS, DECAYS, LOSSES, st.floats(0.2, 5), PATHS)
def test_sps_is_algorithm_1_on_the_regularised_loss(seed, alpha, lam, loss, c, path):
    x, g = state(seed)
    p = parameter(x, g)
    SPS([p], lr=alpha, weight_decay=lam, c=c, **path).step(loss=loss)
    want = reference.regularized_sps(x, g, loss, alpha, lam, c=c)
    d = g + lam * x
    terms = (loss + lam * float(x @ x)) / (c * float(d @ d))
    # ||g + lam x||^2 loses digits where the two cancel.
    loss_of_digits = float((g.abs() + lam * x.abs()).square().sum()) / float(d @ d)
    close(p.detach(), want, x, g.abs() + lam * x.abs(), 10 * min(alpha, terms) * loss_of_digits)


@SETTINGS
@given(SEEDS, CAPS, st.sampled_from([None, 0.3]), PATHS)
def test_prox_sgd_is_the_proximal_gradient_step(seed, alpha, threshold, path):
    x, g = state(seed)
    p = parameter(x, g)

    def prox(z, a):
        return z if threshold is None else z.sign() * (z.abs() - a * threshold).clamp(min=0)

    ProxSGD([p], lr=alpha, regularizer=None if threshold is None else L1(threshold), **path).step()
    close(p.detach(), reference.prox_sgd(x, g, alpha, prox), x, g, 10 * alpha)


def soft(z, a):
    return z.sign() * (z.abs() - 0.3 * a).clamp(min=0)


def ball(z, a):
    return z * min(1.0, 1.1 / float(z.norm()))


def box(z, a):
    return z.clamp(-0.4, 0.5)


@pytest.mark.parametrize(
    ("phi", "prox"), [(L1(0.3), soft), (L2Ball(1.1), ball), (Box(-0.4, 0.5), box)], ids=["L1", "L2Ball", "Box"]
)
def test_prox_sps_is_algorithm_2_on_every_branch(phi, prox):
    seen = dict.fromkeys(BRANCHES, 0)
    for seed in range(60):
        x, g = state(seed)
        alpha, gap = (
            10.0 ** np.random.default_rng(seed).uniform(-2, 1),
            10.0 ** np.random.default_rng(-seed % 97).uniform(-2, 2),
        )
        p = parameter(x, g)
        opt = ProxSPS([p], lr=alpha, regularizer=phi)
        opt.step(loss=gap)
        seen[opt.last_step.branch_name] += 1
        want = reference.prox_sps(x, g, gap, alpha, prox)

        def objective(y, x=x, g=g, gap=gap, alpha=alpha):
            penalty = 0.3 * float(y.abs().sum()) if isinstance(phi, L1) else 0.0
            return max(gap + float(g @ (y - x)), 0.0) + penalty + float((y - x) @ (y - x)) / (2 * alpha)

        got, best = objective(p.detach()), objective(want)
        assert abs(got - best) <= 1e-11 * (best + gap)
        # Strong convexity turns the difference of values into one of points.
        assert float((p.detach() - want).norm()) <= math.sqrt(2 * alpha * 2e-11 * (best + gap)) + 1e-13 * float(
            x.norm()
        )
    assert all(count >= 3 for count in seen.values()), seen


@pytest.mark.parametrize(
    "path", [{"fused": False}, {"fused": None}, {"capturable": True}], ids=["torch", "default", "capturable"]
)
@pytest.mark.parametrize("quiet", [None, 0, 2], ids=["moving", "zero gradient first", "zero gradient later"])
def test_dec_sps_is_the_published_rule_step_by_step(path, quiet):
    x, _ = state(1)
    p = parameter(x, x)
    opt = DecSPS([p], lr=0.8, c0=1.3, lower_bound=0.1, **path)
    previous = None
    for k, loss in enumerate([9.0, 4.0, 0.6, 5.0, 0.2, 7.0, 7.0]):
        g = torch.zeros_like(x) if k == quiet else state(20 + k)[1]
        x = p.detach().clone()
        p.grad = g.clone()
        opt.step(loss=loss)
        want, previous = reference.dec_sps(x, g, loss, k, previous, gamma_b=0.8, c0=1.3, C=0.1)
        torch.testing.assert_close(p.detach(), want, rtol=1e-12, atol=1e-13)


def test_dec_sps_puts_decay_into_the_loss():
    x, g = state(2)
    p = parameter(x, g)
    DecSPS([p], lr=0.8, weight_decay=0.5).step(loss=3.0)
    d = g + 0.5 * x
    want, _ = reference.dec_sps(x, d, 3.0 + 0.25 * float(x @ x), 0, None, gamma_b=0.8)
    torch.testing.assert_close(p.detach(), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("cls", [SPS, DecSPS])
def test_coupled_methods_take_a_subgradient_of_the_penalty(cls):
    x, g = state(3)
    p = parameter(x, g)
    cls([p], lr=0.8, regularizer=L1(0.5)).step(loss=3.0)
    want = reference.sps(x, g + 0.5 * x.sign(), 3.0 + 0.5 * float(x.abs().sum()), 0.8)
    torch.testing.assert_close(p.detach(), want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("branch", BRANCHES)
def test_zeta_is_the_paper_s_adaptive_step(branch):
    alpha, lam = 0.8, 0.7
    instance = Instance([GROUPS["L2"]], seed=6)
    gap = instance.gap(branch)
    _, report = instance.step(gap)
    assert report.branch_name == branch
    (x,), (d,) = instance.xs, instance.ds
    zeta = max(0.0, ((1 + alpha * lam) * gap - alpha * lam * float((d * x).sum())) / float((d * d).sum()))
    assert float(report.zeta[0]) == pytest.approx(zeta, rel=1e-13)
    assert float(report.tau[0]) == pytest.approx(min(alpha, zeta), rel=1e-13)
