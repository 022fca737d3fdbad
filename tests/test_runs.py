"""Many runs as rows of arrays take the steps that the optimizers take, whatever the regulariser and the library."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from proxsps import SPS, DecSPS, ProxSGD, ProxSPS, runs
from proxsps.core import rules
from proxsps.core.rules import Decision
from proxsps.regularizers import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    NonNegative,
    Regularizer,
    Simplex,
    TotalVariation1D,
    Zero,
)

RUNS, SIZE = 6, 9
CAPS = np.array([0.01, 0.2, 0.7, 1.5, 5.0, 30.0])


@dataclass(frozen=True)
class Ramp(Regularizer):
    """0.3 sum_i max(x_i, 0): a separable function with nothing but value and prox."""

    separable: ClassVar[bool] = True

    def value(self, x: Any) -> Any:
        return 0.3 * x.clip(0, None).sum()

    def prox(self, z: Any, alpha: Any) -> Any:
        return z - z.clip(0, None).clip(None, 0.3 * alpha)


class DiagonalRamp(Ramp):
    """The same with one step size per entry, and still without derivative."""

    def prox_diagonal(self, z: Any, alpha: Any) -> Any:
        return z - z.clip(0, None).clip(None, 0.3 * alpha)


REGULARISERS = {
    "none": Zero(),
    "l2": L2(0.4),
    "l2 around a centre": L2(0.4, np.linspace(-1, 1, SIZE)),
    "l1": L1(0.3),
    "elastic net": ElasticNet(0.2, 0.3),
    "non-negative": NonNegative(),
    "box": Box(-0.5, 0.8),
    "group": GroupLasso(0.9),
    "l2 ball": L2Ball(1.2),
    "l1 ball": L1Ball(2.0),
    "simplex": Simplex(),
    "total variation": TotalVariation1D(0.3),
    "own": Ramp(),
    "own, one step size per entry": DiagonalRamp(),
}


def states(seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points, gradients, and losses from small to large."""
    rng = np.random.default_rng(seed)
    x, g = rng.standard_normal((2, RUNS, SIZE))
    return x, g, np.array([5.0, 0.01, 1.0, 0.3, 2.0, 100.0])


def optimizer_steps(make: Any, states: list[tuple[np.ndarray, float]], start: np.ndarray) -> tuple[np.ndarray, float]:
    """Steps of one run by an optimizer of torch: the point after each, and the last u."""
    param = torch.nn.Parameter(torch.as_tensor(start.copy()))
    opt = make([param])
    points = []
    for g, loss in states:
        param.grad = torch.as_tensor(g)
        opt.step(loss=float(loss))
        points.append(param.detach().clone().numpy())
    return np.stack(points), float(opt.last_step.u)


@pytest.mark.parametrize("name", REGULARISERS)
def test_steps_are_those_of_the_optimizer(name: str) -> None:
    phi, (x, g, loss) = REGULARISERS[name], states()
    x = np.stack([phi.prox(row, 1.0) for row in x]) if name == "simplex" else x  # else only shrinkage would count
    points, decision = runs.step(x, loss - 0.005, g, CAPS, phi)
    assert len({0.0 < u < 1.0 for u in decision.u}) == 2  # some inside, some at an end
    if name == "l2 around a centre":
        phi = L2(0.4, torch.as_tensor(phi.center))
    for i in range(RUNS):
        make = lambda params, i=i: ProxSPS(params, lr=CAPS[i], regularizer=phi, lower_bound=0.005)  # noqa: E731
        expected, u = optimizer_steps(make, [(g[i], loss[i])], x[i])
        np.testing.assert_allclose(points[i], expected[0], rtol=1e-9, atol=1e-9)
        assert decision.u[i] == pytest.approx(u, rel=1e-9, abs=1e-12)
        assert decision.height[i] == pytest.approx(loss[i] - 0.005 + g[i] @ (points[i] - x[i]), abs=1e-9)


@pytest.mark.parametrize("name", REGULARISERS)
def test_the_linear_rule_is_proximal_sgd(name: str) -> None:
    phi, (x, g, loss) = REGULARISERS[name], states(1)
    points, decision = runs.step(x, loss, g, CAPS, phi, rules.linear)
    for i in range(RUNS):
        np.testing.assert_allclose(points[i], phi.prox(x[i] - CAPS[i] * g[i], CAPS[i]), rtol=1e-12, atol=1e-14)
        assert decision.height[i] == pytest.approx(loss[i] + g[i] @ (points[i] - x[i]), rel=1e-11, abs=1e-11)
    np.testing.assert_array_equal(decision.u, np.ones(RUNS))
    make = lambda params: ProxSGD(params, lr=CAPS[0], regularizer=L1(0.3))  # noqa: E731
    expected, _ = optimizer_steps(make, [(g[0], loss[0])], x[0])
    if name == "l1":
        np.testing.assert_allclose(points[0], expected[0], rtol=1e-13)


def test_methods_with_the_regulariser_in_the_loss() -> None:
    """SPS and, over several steps with its memory, DecSPS."""
    lam, (x, g, loss) = 0.4, states(2)
    d_value = runs.coupled(loss, g, x, lam)
    points = runs.step(x, d_value[0], d_value[1], CAPS, Zero(), rules.sps_max).points
    memory, path, many = rules.start_memory(CAPS[:, None]), [x], [states(seed)[1] for seed in (2, 3, 4)]

    def rule(model: rules.Model) -> Decision:
        nonlocal memory
        decision, memory = rules.dec_sps(model, memory, model.gap >= 0)
        return decision

    for slope in many:
        value, d = runs.coupled(loss, slope, path[-1], lam)
        path.append(runs.step(path[-1], value, d, CAPS, Zero(), rule).points)
    for i in range(RUNS):
        expected, _ = optimizer_steps(lambda p, i=i: SPS(p, CAPS[i], lam), [(g[i], loss[i])], x[i])
        np.testing.assert_allclose(points[i], expected[0], rtol=1e-11, atol=1e-12)
        expected, _ = optimizer_steps(lambda p, i=i: DecSPS(p, CAPS[i], lam), [(s[i], loss[i]) for s in many], x[i])
        np.testing.assert_allclose(np.stack(path[1:])[:, i], expected, rtol=1e-9, atol=1e-10)
    np.testing.assert_array_equal(memory.taken, np.full(RUNS, 3.0))


@pytest.mark.parametrize("name", REGULARISERS)
def test_runs_do_not_depend_on_their_company(name: str) -> None:
    """Bitwise."""
    phi, (x, g, loss) = REGULARISERS[name], states(3)
    together = runs.step(x, loss, g, CAPS, phi)
    few = runs.step(x[2:4], loss[2:4], g[2:4], CAPS[2:4], phi)
    np.testing.assert_array_equal(together.points[2:4], few.points)
    np.testing.assert_array_equal(together.decision.u[2:4], few.decision.u)
    lost = loss.copy()
    lost[0] = np.nan
    with np.errstate(invalid="ignore"):
        beside = runs.step(x, lost, g, CAPS, phi)
    np.testing.assert_array_equal(together.points[1:], beside.points[1:])


@pytest.mark.parametrize("name", ["none", "l2", "l1", "box", "group", "own, one step size per entry"])
def test_every_array_library_gives_the_same_numbers(name: str) -> None:
    phi, (x, g, loss) = REGULARISERS[name], states(4)
    mine = runs.step(x, loss, g, CAPS, phi)
    theirs = runs.step(*map(torch.as_tensor, (x, loss, g, CAPS)), phi)
    assert isinstance(theirs.points, torch.Tensor)
    np.testing.assert_allclose(theirs.points.numpy(), mine.points, rtol=1e-10, atol=1e-11)
    if name != "l2":  # one is enough: JAX compiles every operation
        return
    jnp = pytest.importorskip("jax.numpy")
    single = runs.step(*(jnp.asarray(part, "float32") for part in (x, loss, g, CAPS)), phi)
    np.testing.assert_allclose(np.asarray(single.points), mine.points, rtol=2e-3, atol=2e-4)


def test_inputs_are_left_alone() -> None:
    inputs = (*states(5), CAPS.copy())
    copies = [part.copy() for part in inputs]
    x, g, loss, alpha = inputs
    runs.step(x, loss, g, alpha, L1(0.3))
    runs.coupled(loss, g, x, 0.1)
    for part, copy in zip(inputs, copies, strict=True):
        np.testing.assert_array_equal(part, copy)


def test_each_run_gets_the_decision_of_its_own_rule() -> None:
    model = runs.line_model(np.array([1.0, 0.5, 9.0]), np.ones(3), np.zeros(3), np.full(3, 2.0), np.array([0, 1, 0.0]))
    mine, theirs = rules.truncated(model), rules.sps_max(model, 0.5)
    masks = [np.array([True, False, False]), np.array([False, True, False])]
    chosen = runs.select(masks, [mine, theirs], rules.linear(model))
    assert chosen.u.tolist() == [mine.u[0], theirs.u[1], 1.0]
    assert chosen.height.tolist() == [mine.height[0], theirs.height[1], rules.linear(model).height[2]]


def test_a_regulariser_that_does_not_fit_is_refused() -> None:
    x, g, loss = states()
    with pytest.raises(ValueError, match="do not name distinct dims of a tensor of shape"):
        runs.step(x, loss, g, CAPS, GroupLasso.rows(0.1))
