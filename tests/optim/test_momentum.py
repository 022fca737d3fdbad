"""Averaged models, both caps and both metrics: single steps against the formulas and a numeric minimiser."""

from __future__ import annotations

import warnings

import cvxpy as cp
import numpy as np
import pytest
import torch

from proxsps.optim import ProxSPS, ProxSPSAdam
from proxsps.regularizers import L1, L2, Box, ElasticNet, GroupLasso, NonNegative, SparseGroupLasso, Zero

SHAPE = (13, 5)  # 65 entries: more than a SIMD block, with an odd tail
BOUND = 0.25
# A regulariser with the same function for cvxpy, from y and the metric.
FUNCTIONS = {
    "none": (None, lambda y, D: (0, [])),
    "decay": (0.7, lambda y, D: (0.35 * cp.sum(cp.multiply(D, cp.square(y))), [])),  # decoupled: in the metric
    "L2": (L2(0.7), lambda y, D: (0.35 * cp.sum_squares(y), [])),
    "L1": (L1(0.2), lambda y, D: (0.2 * cp.sum(cp.abs(y)), [])),
    "ElasticNet": (ElasticNet(0.2, 0.3), lambda y, D: (0.2 * cp.sum(cp.abs(y)) + 0.15 * cp.sum_squares(y), [])),
    "Box": (Box(-0.5, 0.8), lambda y, D: (0, [y >= -0.5, y <= 0.8])),
    "NonNegative": (NonNegative(), lambda y, D: (0, [y >= 0])),
    "GroupLasso": (GroupLasso.rows(0.4), lambda y, D: (0.4 * cp.sum(cp.norm(y, 2, axis=1)), [])),
    "SparseGroupLasso": (
        SparseGroupLasso(0.1, 0.3, dims=(1,)),
        lambda y, D: (0.1 * cp.sum(cp.abs(y)) + 0.3 * cp.sum(cp.norm(y, 2, axis=1)), []),
    ),
}
PROBLEMS = {name: [(name, 1.0)] for name in FUNCTIONS} | {
    "decays": [("decay", 1.0), ("none", 0.3)],
    "mixed": [("L1", 1.0), ("decay", 0.25), ("GroupLasso", 0.5), ("none", 0.1)],
}


class Run:
    """An optimizer beside the plain formulas, on least squares with one tensor per group.

    Args:
        kit: the helpers of this folder.
        problem: names and shares of the groups.
        adam: whether in Adam's metric.
        beta: momentum.
        lr: of the groups with share 1; None for no learning rate.
        options: of the optimizer.
    """

    def __init__(self, kit, problem, adam, beta, lr, **options):
        rng = np.random.default_rng(5)
        self.names, self.shares = zip(*problem, strict=True)
        n = len(problem)
        self.A = rng.standard_normal((40, n * 65)) / 8
        self.b = self.A @ rng.standard_normal(n * 65) + 0.3 * rng.standard_normal(40)
        self.params = [torch.nn.Parameter(torch.as_tensor(rng.standard_normal(SHAPE))) for _ in range(n)]
        groups = []
        for name, share, p in zip(self.names, self.shares, self.params, strict=True):
            phi = FUNCTIONS[name][0]
            own = {"weight_decay": phi} if isinstance(phi, float) else {"regularizer": phi}
            groups.append({"params": [p], **own, **({} if lr is None else {"lr": lr * share})})
        own = {"betas": (beta, 0.99)} if adam else {"momentum": beta}
        self.opt = (ProxSPSAdam if adam else ProxSPS)(groups, lr=lr, lower_bound=BOUND, **own, **options)
        for group, share in zip(self.opt.param_groups, self.shares, strict=True):
            if lr is None:
                group["lr"] = share
        self.lr = lr
        self.plain = kit.plain_model(self.points(), beta, 0.99 if adam else None)

    def points(self):
        return [p.detach().numpy().copy() for p in self.params]

    def step(self, k):
        """One step; what it started from is kept."""
        rows = slice(k % 5 * 8, k % 5 * 8 + 8)
        x = torch.cat([p.flatten() for p in self.params])
        loss = (torch.as_tensor(self.A[rows]) @ x - torch.as_tensor(self.b[rows])).square().mean() / 2 + BOUND
        self.opt.zero_grad()
        loss.backward()
        self.before, grads = self.points(), [p.grad.numpy().copy() for p in self.params]
        self.plain.take(self.before, grads, loss.item(), self.shares)
        self.opt.step(loss=loss)
        return self.opt.last_step

    @property
    def longest(self):
        """The cap of a group with share 1."""
        caps = [cap for cap in (self.lr, self.plain.distance if self.opt.defaults["distance_cap"] else None) if cap]
        return min(caps)

    def minimum(self, alpha):
        """The least value of the truncated model with these caps, and the function itself."""
        plain, variables = self.plain, [cp.Variable(SHAPE) for _ in self.params]
        height, rest, constraints = plain.m - BOUND, 0, []
        for y, x, d, D, a, name in zip(variables, self.before, plain.d, plain.metric, alpha, self.names, strict=True):
            value, more = FUNCTIONS[name][1](y, D)
            height = height + cp.sum(cp.multiply(d, y - x))
            rest = rest + value + cp.sum(cp.multiply(D, cp.square(y - x))) / (2 * a)
            constraints += more
        problem = cp.Problem(cp.Minimize(cp.maximum(height, 0) + rest), constraints)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Solution may be inaccurate")  # by less than what is allowed below
            problem.solve(solver=cp.CLARABEL, tol_gap_abs=1e-9, tol_gap_rel=1e-9, tol_feas=1e-9)

        def value(ys):
            for variable, y in zip(variables, ys, strict=True):
                variable.value = y
            assert max([float(np.max(c.violation())) for c in constraints], default=0.0) <= 1e-12
            return float(problem.objective.value)

        return float(problem.value), value

    def moved(self, steps):
        """x+ of the matched cap for a step size per group."""
        found = []
        for x, d, D, tau, name in zip(self.before, self.plain.d, self.plain.metric, steps, self.names, strict=True):
            z, phi = x - tau * d / D, FUNCTIONS[name][0]
            found.append(z / (1 + tau * phi) if isinstance(phi, float) else (phi or Zero()).prox_diagonal(z, tau / D))
        return found


def near_minimum(run, alpha):
    least, value = run.minimum(alpha)
    # The solver may stop a little above the minimum; the step must not be above the solver.
    return -1e-6 <= (value(run.points()) - least) / max(1.0, abs(least)) <= 1e-8


METRICS = pytest.mark.parametrize("adam", [False, True], ids=["identity", "adam"])


@METRICS
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_proximal_cap_minimises_the_averaged_model(name, beta, adam, kit):
    run = Run(kit, PROBLEMS[name], adam, beta, lr=0.05 if adam else 2.0, cap="proximal")
    seen = set()
    for k in range(4):
        last = run.step(k)
        seen.add(last.branch_name)
        assert float(last.gap) == pytest.approx(run.plain.m - BOUND, rel=1e-9, abs=1e-10)
        assert k != 3 or near_minimum(run, [run.lr * share for share in run.shares])
    assert seen & {"inside", "capped"}


@METRICS
@pytest.mark.parametrize("name", ["ElasticNet", "mixed"])
def test_so_does_torch_alone(name, adam, kit):
    run = Run(kit, PROBLEMS[name], adam, 0.9, lr=0.05 if adam else 2.0, cap="proximal", fused=False)
    for k in range(3):
        run.step(k)
    assert near_minimum(run, [run.lr * share for share in run.shares])


@METRICS
@pytest.mark.parametrize("beta", [0.0, 0.9])
@pytest.mark.parametrize("lr", [1e4, 0.03])
@pytest.mark.parametrize("name", PROBLEMS)
def test_the_matched_cap_reaches_the_bound_and_not_earlier(name, lr, beta, adam, kit):
    run = Run(kit, PROBLEMS[name], adam, beta, lr, cap="matched")
    seen = set()
    for k in range(4):
        last = run.step(k)
        seen.add(last.branch_name)
        shares, steps = np.array(run.shares), last.tau.numpy()
        if run.plain.m <= BOUND:
            assert all(np.array_equal(x, y) for x, y in zip(run.before, run.points(), strict=True))
            continue
        if k == 3 and (name, lr) != ("mixed", 1e4):  # on which the solver fails
            assert near_minimum(run, steps)
        for y, moved in zip(run.points(), run.moved(steps), strict=True):
            np.testing.assert_allclose(y, moved, rtol=1e-9, atol=1e-11)
        assert steps == pytest.approx(steps[0] * shares, rel=1e-12)
        height = run.plain.height(run.before, run.points(), BOUND)
        if last.branch_name == "inside":
            assert abs(height) <= 1e-8 * (run.plain.m - BOUND)
        else:
            assert steps[0] == pytest.approx(run.longest, rel=1e-9)
            assert height >= 0
        # No zero before, on a fine grid.
        for s in np.geomspace(1e-4, 1 - 1e-6, 25) * steps[0]:
            assert run.plain.height(run.before, run.moved(s * shares), BOUND) >= -1e-9
    if name in ("none", "decay", "decays") and lr is not None:
        assert ("capped" if lr == 0.03 else "inside") in seen


@METRICS
@pytest.mark.parametrize("cap", ["proximal", "matched"])
@pytest.mark.parametrize("name", ["mixed", "decay"])
def test_the_distance_cap_is_the_formula(name, cap, adam, kit):
    run = Run(kit, PROBLEMS[name], adam, 0.9, None, cap=cap)
    for k in range(4):
        last = run.step(k)
        if last.branch_name == "capped":
            assert last.tau.numpy() == pytest.approx(run.plain.distance * np.array(run.shares), rel=1e-9)
        elif cap == "proximal":
            assert near_minimum(run, run.plain.distance * np.array(run.shares))


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "device"])
@pytest.mark.parametrize("options", [{"weight_decay": 0.3}, {"regularizer": L1(0.1)}], ids=["decay", "L1"])
def test_without_momentum_and_with_a_unit_metric_the_step_is_that_of_prox_sps(options, path, kit):
    """Gradients of 1 and -1 make Adam's metric the identity; the first step of an average is that of the gradient."""
    points = []
    for cls, own in (
        (ProxSPS, {}),
        (ProxSPS, {"momentum": 0.0, "cap": "proximal", "distance_cap": False}),
        (ProxSPS, {"momentum": 0.9}),
        (ProxSPSAdam, {"betas": (0.0, 0.99), "eps": 0.0, "cap": "proximal"}),
    ):
        params = kit.drawn((13, 5), (67,))
        for p in params:
            p.grad = p.grad.sign()
        opt = cls(params, lr=0.1, **own, **options, **path)
        opt.step(loss=torch.tensor(5.0, dtype=torch.float64))
        points.append(kit.flat(params))
    assert torch.equal(points[0], points[1])
    for other in points[2:]:
        torch.testing.assert_close(other, points[0], rtol=1e-9, atol=1e-10)


@METRICS
@pytest.mark.parametrize("cap", ["proximal", "matched"])
@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "device"])
def test_a_center_is_another_origin_of_the_averaged_model(path, cap, adam, kit):
    params, twins = kit.drawn((13, 5), (67,)), kit.drawn((13, 5), (67,))
    centers = [c.detach() for c in kit.drawn((13, 5), (67,), seed=7)]
    for q, c in zip(twins, centers, strict=True):
        q.data.sub_(c)
    cls, own = (ProxSPSAdam, {"lr": 0.05}) if adam else (ProxSPS, {"lr": 0.5, "momentum": 0.9})
    one = cls(params, regularizer=L2(0.7, centers), cap=cap, **own, **path)
    two = cls(twins, regularizer=L2(0.7), cap=cap, **own, **path)
    for k in range(4):
        for p, q, drawn in zip(params, twins, kit.drawn((13, 5), (67,), seed=20 + k), strict=True):
            p.grad, q.grad = drawn.grad, drawn.grad.clone()
        for opt in (one, two):
            opt.step(loss=20.0)
        assert float(one.last_step.gap) == pytest.approx(float(two.last_step.gap), rel=1e-10)
        for p, q, c in zip(params, twins, centers, strict=True):
            torch.testing.assert_close(p.detach() - c, q.detach(), rtol=1e-9, atol=1e-9)
