"""The parts of a step by kind: rows by their sums, entries in joined passes, anything else by its prox."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from proxsps.jax import prox_sgd, prox_sps
from proxsps.jax.passes import RUNS, SHORT, add_up
from proxsps.regularizers import L1, Box, ElasticNet, GroupLasso, L2Ball, Regularizer

SHAPES = [(5, 3), (7,), (4, 2, 3, 3), (), (SHORT + 9,), (5, 3)]
MATRICES = [(5, 3), (4, 6), (5, 3)]


@dataclass(frozen=True)
class Own(Regularizer):
    """An l1 norm, as users write it: separable, and without a derivative."""

    lam: float
    separable: ClassVar[bool] = True

    def value(self, x):
        return self.lam * abs(x).sum()

    def prox(self, z, alpha):
        return z - z.clip(-alpha * self.lam, alpha * self.lam)


@dataclass(frozen=True)
class Mixed(GroupLasso):
    """A group lasso that says so for matrices only."""

    def structure(self, shape):
        return super().structure(shape) if len(shape) == 2 else None


@dataclass(frozen=True)
class Growing(L1):
    """An l1 norm whose weight differs from tensor to tensor."""

    def at(self, index):
        return L1(self.lam * (1 + index))


CASES = {
    "L1": (L1(0.2), SHAPES),
    "ElasticNet": (ElasticNet(0.2, 0.4), SHAPES),
    "Box": (Box(-0.4, 0.7), SHAPES),
    "own": (Own(0.2), SHAPES),
    "GroupLasso": (GroupLasso(0.3, scale_by_size=True), SHAPES),
    "GroupLasso.rows": (GroupLasso.rows(0.3, scale_by_size=True), MATRICES),
    "GroupLasso.columns": (GroupLasso(0.3, dims=(-2,)), MATRICES),
    "L2Ball": (L2Ball(255.0), SHAPES),
    "L2Ball-joint": (L2Ball(255.0, joint=True), SHAPES),
}


@pytest.mark.parametrize("name", CASES)
def test_short_and_long_tensors_of_any_shape(kit, name):
    phi, shapes = CASES[name]
    compare(kit, phi, shapes, ["float64"], 4e-12)


@pytest.mark.parametrize("name", ["L1", "GroupLasso"])
def test_tensors_of_several_dtypes(kit, name):
    phi, shapes = CASES[name]
    compare(kit, phi, shapes[:4], ["float32", "float64"], 4e-6)


def compare(kit, phi, shapes, dtypes, tolerance):
    """Compiled steps against torch's, one with the root inside and a capped one."""
    with jax.enable_x64(True):
        opt = prox_sps(0.5, regularizer=phi)
        step, branches = kit.stepper(opt), set()
        kinds = [dtypes[i % len(dtypes)] for i in range(len(shapes))]
        xs, ds = ([x.astype(kind) for x, kind in zip(kit.drawn(seed, *shapes), kinds, strict=True)] for seed in (0, 1))
        size = sum(x.size for x in xs)
        for value in (0.02 * size, 3.0 * size):
            other = kit.torch_optimizer(kit.methods[0], [xs], [{}], learning_rate=0.5, regularizer=phi)
            (expected,) = kit.torch_step(other, [ds], value)
            got, state = step(xs, opt.init(xs), ds, value=value)
            for a, b in zip(got, expected, strict=True):
                np.testing.assert_allclose(a, kit.as_numpy(b), rtol=tolerance, atol=tolerance)
            branches.add(state.last_step.branch_name)
        assert branches == {"inside", "capped"}


@pytest.mark.parametrize("phi", [Mixed(0.3), Growing(0.2)], ids=["mixed", "growing"])
def test_structures_that_differ_between_tensors(kit, phi):
    """Such a block is evaluated by its prox, which is always right."""
    xs, ds = kit.drawn(0, (5, 3), (7,)), kit.drawn(1, (5, 3), (7,))
    opt = prox_sps(0.5, regularizer=phi)
    got, state = kit.stepper(opt)(xs, opt.init(xs), ds, value=0.5)
    assert state.last_step.branch_name == "inside"
    tau = state.last_step.tau[0]
    for i, (x, d, y) in enumerate(zip(xs, ds, got, strict=True)):
        np.testing.assert_allclose(y, phi.at(i).prox(x - tau * d, 0.5), rtol=1e-5, atol=1e-6)
    drop = sum(float(jnp.sum(d * (y - x))) for x, d, y in zip(xs, ds, got, strict=True))
    assert drop == pytest.approx(-0.5, rel=1e-5)


def test_weights_of_rows_may_be_traced(kit):
    """With another weight for each shape, in one program for a grid of them."""
    xs, ds = kit.drawn(0, *MATRICES), kit.drawn(1, *MATRICES)

    def points(weight):
        opt = prox_sps(0.5, regularizer=GroupLasso.rows(weight, scale_by_size=True))
        updates, _ = opt.update(ds, opt.init(xs), xs, value=1.0)
        return [x + update for x, update in zip(xs, updates, strict=True)]

    grid = jax.jit(jax.vmap(points))(jnp.array([0.1, 0.5]))
    for i, weight in enumerate((0.1, 0.5)):
        for got, expected in zip(grid, points(weight), strict=True):
            np.testing.assert_allclose(got[i], expected, rtol=1e-5, atol=1e-6)


def test_rows_are_written_with_their_own_norms(kit):
    """Where x and the step nearly cancel, the difference of their sums has no correct digit; here it is negative."""
    (v,), (small,) = kit.drawn(0, (6, 50)), kit.drawn(1, (6, 50), scale=1e-3)
    phi = GroupLasso.rows(2e-3)
    x, d = 1e3 * v + small, 1e3 * v
    opt = prox_sgd(1.0, regularizer=phi)
    updates, _ = opt.update(d, opt.init(x), x)
    expected = phi.prox(x - d, 1.0)
    assert 0 < float(jnp.max(jnp.abs(expected))) < 1e-2
    np.testing.assert_allclose(x + updates, expected, atol=1e3 * 4 * jnp.finfo("float32").eps)
    assert jnp.array_equal(x + updates, x + (expected - x))


# What a search costs


def loops(opt, xs):
    """The jaxprs of the bodies of all loops of a step."""
    jaxpr = jax.make_jaxpr(lambda xs, ds: opt.update(ds, opt.init(xs), xs, value=1.0))(xs, xs).jaxpr
    found = []

    def visit(jaxpr):
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "while":
                found.append(eqn.params["body_jaxpr"].jaxpr)
            for value in eqn.params.values():
                for part in value if isinstance(value, (list, tuple)) else [value]:
                    if hasattr(part, "jaxpr"):
                        visit(part.jaxpr)

    visit(jaxpr)
    return found


def test_a_search_over_rows_reads_no_tensor(kit):
    xs = kit.drawn(0, *[(8, 30)] * 5, (6, 40))
    (body,) = loops(prox_sps(regularizer=GroupLasso.rows(0.1)), xs)
    assert max(var.aval.size for var in body.invars) == 5 * 8 + 6


def test_a_search_over_entries_reads_short_tensors_in_one_pass(kit):
    xs = kit.drawn(0, *[(8, 30)] * 20, (SHORT, 2))
    (body,) = loops(prox_sps(regularizer=L1(0.1)), xs)
    assert str(body).count(" reduce[") == 2  # one for all short ones, one for the long one
    assert len([var for var in body.invars if var.aval.size > 1000]) == 4


# Sums


@pytest.mark.parametrize(
    "shape", [(3,), (4, 5), (2 * RUNS[1] + 5,), (3, RUNS[1]), (RUNS[1], 3), (70, 90, 3), (2, 3, 4, 600)]
)
def test_sums_in_one_pass(kit, shape):
    a, b = (np.asarray(x) for x in kit.drawn(0, shape, shape))
    every = [None, *({(axis,) for axis in range(len(shape))} | {(0, len(shape) - 1)} if len(shape) > 1 else [])]
    for axes in every:
        for got, x in zip(add_up([jnp.asarray(a), jnp.asarray(b)], axes), (a, b), strict=True):
            expected = x.astype("float64").sum(axis=axes)
            np.testing.assert_allclose(got, expected, atol=1e-7 * np.abs(x).sum(axis=axes).max())


def test_long_sums_keep_their_digits():
    """Entry after entry in f32, a million tenths add up to 100958."""
    for shape in ((1 << 20,), (1 << 5, 1 << 15), (1 << 10, 1 << 10), (1 << 14, 64), (1 << 16, 4, 4)):
        totals = add_up([jnp.full(shape, 0.1), jnp.full(shape, 0.3)])  # of a single array XLA takes care itself
        for total, tenths in zip(totals, (1, 3), strict=True):
            assert float(total) == pytest.approx(0.1 * tenths * (1 << 20), rel=2e-5)


def test_products_beyond_the_range_of_f32_do_not_end_a_search(kit):
    """||d||^2 fits, ||d x||^2 does not; compared with the same step in f64, where it does."""
    x, d = kit.drawn(0, (6,), scale=1e8)[0], kit.drawn(1, (6,), scale=1e13)[0]
    us = []
    for dtype in ("float32", "float64"):
        with jax.enable_x64(dtype == "float64"):
            opt = prox_sps(regularizer=L1(1e3))
            wide = [jnp.asarray(np.asarray(part), dtype) for part in (x, d)]
            _, state = kit.stepper(opt)(wide[0], opt.init(wide[0]), wide[1], value=1e22)
            assert state.last_step.branch_name == "inside"
            us.append(float(state.last_step.u))
    assert us[0] == pytest.approx(us[1], rel=1e-5)


# Transformations of JAX


@pytest.mark.parametrize("phi", [L1(0.1), Box(-0.5, 0.6), GroupLasso(0.1)], ids=["L1", "Box", "GroupLasso"])
def test_steps_without_a_search_can_be_differentiated(phi):
    x, d = jnp.linspace(-1.0, 2.0, 6), jnp.linspace(1.0, -0.5, 6)

    def after(cap, regularised):
        opt = prox_sgd(cap, regularizer=phi)
        updates, _ = opt.update(d, opt.init(x), x)
        return jnp.sum((x + updates) ** 2) if regularised else jnp.sum(phi.prox(x - cap * d, cap) ** 2)

    slope, expected = (float(jax.jit(jax.grad(after), static_argnums=1)(0.3, own)) for own in (True, False))
    assert slope == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("phi", [L1(0.1), GroupLasso.rows(0.1)], ids=["L1", "GroupLasso"])
def test_tensors_that_are_sharded_are_not_gathered(kit, phi):
    """Devices exchange sums of rows, and short tensors where only the compiler knows that they are sharded."""
    shapes = [(256, 512), (8, 4), (4, 8), (2, SHORT + 2), (128, 1152)]
    xs, ds = kit.drawn(0, *shapes), kit.drawn(1, *shapes)
    opt = prox_sps(regularizer=phi)
    expected, _ = kit.stepper(opt)(xs, opt.init(xs), ds, value=1.0)
    for kind, spec in itertools.product((AxisType.Auto, AxisType.Explicit), (P("data"), P(None, "data"))):
        split = NamedSharding(jax.make_mesh((2,), ("data",), axis_types=(kind,)), spec)
        placed = jax.device_put((xs, ds), split)
        step = kit.stepper(opt).lower(placed[0], opt.init(placed[0]), placed[1], value=1.0).compile()
        got, state = step(placed[0], opt.init(placed[0]), placed[1], value=1.0)
        assert state.last_step.branch_name == "inside"
        for a, b in zip(got, expected, strict=True):
            assert a.sharding.is_equivalent_to(split, 2)
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
        exchanged = [
            np.prod([int(n) for n in shape.split(",") if n])
            for shape in re.findall(
                r"= \w+\[([\d,]*)\]\S* (?:all-gather|all-to-all|collective-permute)", step.as_text()
            )
        ]
        assert max(exchanged, default=0) < 2048
