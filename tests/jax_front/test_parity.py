"""Every method with every regulariser takes the steps of its torch counterpart, from shared states, to rounding."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from proxsps.jax import dec_sps, prox_sgd, prox_sps, sps
from proxsps.regularizers import L1, L2, GroupLasso, L2Ball

SHAPE = (4, 3)
# A search stops at a duality gap of 1e-7 (f32) or 1e-12 (f64) of the loss's height; sums of a few entries round less.
TOLERANCE = {"float32": 4e-6, "float64": 4e-12}
MOST = 16  # evaluations of any search here
STATES = ((0, 1.0), (0, 0.02), (1, 300.0))  # seeds, and heights of the loss: at least one inside, and the last capped


def agree(kit: Any, ours: Any, theirs: Any, tolerance: float) -> None:
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(kit.as_numpy(a), kit.as_numpy(b), rtol=tolerance, atol=tolerance)


def agree_reports(kit: Any, ours: Any, theirs: Any, tolerance: float) -> None:
    for name in ("tau", "zeta", "u", "gap", "model_gap"):
        a, b = kit.as_numpy(getattr(ours, name)), kit.as_numpy(getattr(theirs, name))
        scale = 100.0 if name == "model_gap" else 1.0  # a difference of sums that are as large
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance * scale, err_msg=name)
    assert ours.branch_name == theirs.branch_name


def compare(kit: Any, method: Any, options: dict[str, Any], dtype: str) -> set[str]:
    """Steps from several states; the branches they took."""
    opt = method.make(method.lr, **options)
    step = kit.stepper(opt)
    branches = set()
    for seed, value in STATES:
        xs, ds = kit.drawn(seed, SHAPE, dtype=dtype), kit.drawn(100 + seed, SHAPE, dtype=dtype)
        other = kit.torch_optimizer(method, [xs], [{}], **options)
        expected = kit.torch_step(other, [ds], value)
        got, state = step(xs, opt.init(xs), ds, value=value)
        assert [x.dtype for x in got] == [x.dtype for x in xs]
        agree(kit, [got], expected, TOLERANCE[dtype])
        agree_reports(kit, state.last_step, other.last_step, TOLERANCE[dtype])
        searched = int(other.last_step.evaluations) > 0  # the number differs: torch takes several points at a time
        assert (0 < int(state.last_step.evaluations) <= MOST) if searched else int(state.last_step.evaluations) == 0
        branches.add(state.last_step.branch_name)
    return branches


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_steps_of_every_method_with_every_regularizer(kit, pair, dtype):
    method, name = pair
    with jax.enable_x64(dtype == "float64"):
        branches = compare(kit, method, kit.regularizers[name][0], dtype)
    assert branches >= ({"inside", "capped"} if method.bounded else {"capped"})


def test_steps_op_by_op(kit, method):
    """As users run them who look for an error; with a search it takes longer than compiling, so there are few."""
    with jax.disable_jit():
        branches = compare(kit, method, kit.regularizers["weight_decay" if method.coupled else "L1"][0], "float32")
    assert branches >= ({"inside", "capped"} if method.bounded else {"capped"})


@pytest.mark.parametrize("options", [{"weight_decay": 0.7}, {"regularizer": L1(0.6)}], ids=["weight_decay", "L1"])
def test_truncated_steps(kit, options):
    """A gradient along x: shrinkage alone takes the model below its bound."""
    (method, *_), (x,) = kit.methods, kit.drawn(0, SHAPE)
    opt = prox_sps(**options)
    other = kit.torch_optimizer(method, [[x]], [{}], **options)
    expected = kit.torch_step(other, [[x]], 0.1)
    got, state = kit.stepper(opt)(x, opt.init(x), x, value=0.1)
    assert state.last_step.branch_name == "truncated"
    agree(kit, got, expected, TOLERANCE["float32"])
    agree_reports(kit, state.last_step, other.last_step, TOLERANCE["float32"])


# Labels

GROUPS = {
    "sparse": {"regularizer": L1(0.3), "learning_rate": 0.5},
    "plain": {},
    "decayed": {"weight_decay": 0.4, "learning_rate": 2.0},
    "rows": {"regularizer": GroupLasso.rows(0.5)},
}


@pytest.mark.parametrize("method_groups", ["all", "closed form", "coupled"])
def test_labels_are_solved_jointly(kit, method_groups):
    names = {
        "all": ["sparse", "plain", "decayed", "rows"],
        "closed form": ["plain", "decayed"],
        "coupled": ["sparse", "decayed", "rows"],
    }[method_groups]
    method = kit.methods[1 if method_groups == "coupled" else 0]
    params = {name: {"w": w, "b": b} for name, w, b in zip(names, *tensors(kit, 0, len(names)), strict=True)}
    grads = {name: {"w": w, "b": b} for name, w, b in zip(names, *tensors(kit, 50, len(names)), strict=True)}
    groups = {name: GROUPS[name] for name in names}
    opt = method.make(1.0, labels={name: name for name in names}, groups=groups)
    step = kit.stepper(opt)
    for value in (2.0, 1e3):
        own = [[params[name]["b"], params[name]["w"]] for name in names]
        other = kit.torch_optimizer(method, own, list(groups.values()))
        expected = kit.torch_step(other, [[grads[name]["b"], grads[name]["w"]] for name in names], value)
        got, state = step(params, opt.init(params), grads, value=value)
        agree(kit, [[got[name]["b"], got[name]["w"]] for name in names], expected, TOLERANCE["float32"])
        agree_reports(kit, state.last_step, other.last_step, 2 * TOLERANCE["float32"])
        assert state.last_step.tau.shape == (len(names),)


def tensors(kit: Any, seed: int, count: int) -> tuple[list[jax.Array], list[jax.Array]]:
    return kit.drawn(seed, *[(4, 3)] * count), kit.drawn(seed + 1, *[(2, 2)] * count)


def test_labels_may_be_a_function_and_leave_a_label_empty(kit):
    params, grads = {"w": kit.drawn(0, SHAPE)[0]}, {"w": kit.drawn(1, SHAPE)[0]}
    groups = {"matrix": {"weight_decay": 0.4}, "vector": {"regularizer": L1(0.1)}}
    labelled = prox_sps(labels=lambda p: jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", p), groups=groups)
    plain = prox_sps(weight_decay=0.4)
    got, state = kit.stepper(labelled)(params, labelled.init(params), grads, value=1.0)
    expected, other = kit.stepper(plain)(params, plain.init(params), grads, value=1.0)
    assert jnp.array_equal(got["w"], expected["w"])
    assert state.last_step.tau.shape == (2,)
    assert float(state.last_step.u) == float(other.last_step.u)


def test_splitting_a_group_into_equal_ones_changes_nothing(kit):
    params, grads = kit.drawn(0, (5,), (3,)), kit.drawn(1, (5,), (3,))
    for own in ({"weight_decay": 0.3}, {"regularizer": L1(0.3)}):
        whole, split = prox_sps(**own), prox_sps(labels=["a", "b"], groups={"a": own, "b": own})
        agree(
            kit,
            kit.stepper(split)(params, split.init(params), grads, value=1.0)[0],
            kit.stepper(whole)(params, whole.init(params), grads, value=1.0)[0],
            1e-6,
        )


def test_a_centre_for_each_parameter_of_a_label(kit):
    """Counted over the label's parameters, those without gradient included."""
    a, b, c = kit.drawn(0, (2,), (3,), (4,))
    phi = L2(0.5, [jnp.ones(2), jnp.full(3, 2.0), jnp.full(4, 3.0)])
    opt = prox_sgd(1.0, regularizer=phi)
    params, grads = {"a": a, "b": b, "c": c}, {"a": jnp.zeros(2), "b": None, "c": jnp.zeros(4)}
    updates, _ = opt.update(grads, opt.init(params), params)
    assert updates["b"] is None
    agree(kit, [a + updates["a"], c + updates["c"]], [(a + 0.5) / 1.5, (c + 1.5) / 1.5], 1e-6)


# Several steps, bounds, and steps that are left out


def test_dec_sps_remembers_as_torch_does(kit):
    """Six steps, the third of which is left out: its loss is below the bound."""
    method, (x,) = kit.methods[2], kit.drawn(0, SHAPE)
    opt = dec_sps(0.5, weight_decay=0.1, lower_bound=0.5, c0=2.0)
    other = kit.torch_optimizer(method, [[x]], [{}], learning_rate=0.5, weight_decay=0.1, lower_bound=0.5, c0=2.0)
    step, state = kit.stepper(opt), opt.init(x)
    for k, value in enumerate((3.0, 20.0, -9.0, 1.0, 2.0, 20.0)):
        (d,) = kit.drawn(k + 1, SHAPE)
        x, state = step(x, state, d, value=value)
        if value < 0:
            with pytest.warns(RuntimeWarning, match="below lower_bound"):
                expected = kit.torch_step(other, [[d]], value)
        else:
            expected = kit.torch_step(other, [[d]], value)
        agree(kit, x, expected, 1e-5)
        assert state.last_step.branch_name == other.last_step.branch_name
    assert float(state.memory.taken) == 5
    assert int(state.count) == 6


def test_sps_divides_the_step_by_c(kit):
    method, (x,), (d,) = kit.methods[1], kit.drawn(0, SHAPE), kit.drawn(1, SHAPE)
    opt = sps(10.0, c=3.0)
    other = kit.torch_optimizer(method, [[x]], [{}], learning_rate=10.0, c=3.0)
    expected = kit.torch_step(other, [[d]], 1.0)
    agree(kit, kit.stepper(opt)(x, opt.init(x), d, value=1.0)[0], expected, TOLERANCE["float32"])


def test_a_lower_bound_by_batch(kit, bounded_method):
    x, d = kit.drawn(0, SHAPE, SHAPE)
    opt, plain = bounded_method.make(), bounded_method.make(lower_bound=3.0)
    got, state = kit.stepper(opt)(x, opt.init(x), d, value=4.0, lower_bound=3.0)
    expected, _ = kit.stepper(plain)(x, plain.init(x), d, value=4.0)
    assert jnp.array_equal(got, expected)
    assert float(state.last_step.gap) == 1.0


@pytest.mark.parametrize(
    ("value", "slope"), [(-1.0, 1.0), (math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan), (1.0, math.inf)]
)
@pytest.mark.parametrize("name", ["weight_decay", "L1", "L2Ball"])
def test_a_bad_loss_or_gradient_leaves_everything_as_it_is(kit, bounded_step, name, value, slope):
    step, opt = bounded_step(name)
    (x,) = kit.drawn(0, (3,))
    got, state = step(x, opt.init(x), jnp.array([1.0, slope, 1.0]), value=value)
    assert jnp.array_equal(got, x)
    assert state.last_step.branch_name == "skipped"
    assert float(state.last_step.tau[0]) == 0
    assert np.isnan(float(state.last_step.u))
    assert int(state.count) == 1
    if name != "weight_decay":
        assert int(state.last_step.evaluations) == 1  # nothing is searched for


@pytest.fixture(scope="module")
def bounded_step(kit):
    made = {}

    def get(name):
        if name not in made:
            opt = prox_sps(**kit.regularizers[name][0])
            made[name] = kit.stepper(opt), opt
        return made[name]

    return get


def test_methods_without_a_bound_need_no_loss_and_skip_bad_gradients(kit):
    opt = prox_sgd(0.1, weight_decay=1.0)
    (x,) = kit.drawn(0, (3,))
    step = kit.stepper(opt)
    got, state = step(x, opt.init(x), jnp.array([1.0, jnp.nan, 1.0]))
    assert jnp.array_equal(got, x)
    assert state.last_step.branch_name == "skipped"
    got, _ = step(x, opt.init(x), jnp.ones(3))
    agree(kit, got, (x - 0.1) / 1.1, 1e-6)


# Sizes


@pytest.mark.parametrize(
    "options",
    [{"weight_decay": 0.5}, {"regularizer": L1(0.5)}, {"regularizer": GroupLasso(0.5)}],
    ids=["weight_decay", "L1", "GroupLasso"],
)
def test_squares_of_gradients_may_leave_the_range_of_f32(kit, options):
    """Compared with the same step in f64, where they do not."""
    x, d = kit.drawn(0, (6,), (6,))
    opt = prox_sps(**options)
    step = kit.stepper(opt)
    branches = set()
    for size in (1e-30, 1e-22, 1e18, 1e22, 1e30):
        slope = d * jnp.float32(size)
        got, state = step(x, opt.init(x), slope, value=1.0)
        with jax.enable_x64(True):
            x64, d64 = (jnp.asarray(np.asarray(a), "float64") for a in (x, slope))
            expected, other = step(x64, opt.init(x64), d64, value=1.0)
        assert state.last_step.branch_name == other.last_step.branch_name
        agree(kit, got, expected, TOLERANCE["float32"])
        branches.add(state.last_step.branch_name)
    assert branches == {"capped", "inside"}


def test_zero_gradients_leave_the_prox_alone(kit):
    (x,) = kit.drawn(0, SHAPE)
    for options, expected in (({"weight_decay": 0.5}, x / 1.5), ({"regularizer": L1(0.5)}, L1(0.5).prox(x, 1.0))):
        opt = prox_sps(**options)
        agree(kit, kit.stepper(opt)(x, opt.init(x), jnp.zeros_like(x), value=1.0)[0], expected, 1e-7)


@pytest.mark.parametrize("name", ["weight_decay", "L2Ball", "Box", "GroupLasso", "Simplex"])
def test_a_rate_of_zero_leaves_parameters_as_they_are(kit, name):
    (x,), (d,) = kit.drawn(0, SHAPE, scale=9.0), kit.drawn(1, SHAPE)
    opt = prox_sps(0.0, **kit.regularizers[name][0])
    assert jnp.array_equal(kit.stepper(opt)(x, opt.init(x), d, value=1.0)[0], x)


def test_half_precision_is_reduced_in_f32(kit):
    """Values whose sums of squares overflow in f16; the update is rounded once more than torch's new point."""
    method = kit.methods[0]
    for dtype in ("bfloat16", "float16"):
        x, d = kit.drawn(0, (512,), (512,), dtype=dtype)
        x, d = 30 * x, 30 * d
        opt = prox_sps(1e-3, weight_decay=1.0)
        got, state = kit.stepper(opt)(x, opt.init(x), d, value=300.0)
        assert got.dtype == x.dtype
        assert state.last_step.u.dtype == jnp.float32
        wide_x, wide_d = x.astype("float32"), d.astype("float32")
        other = kit.torch_optimizer(method, [[wide_x]], [{}], learning_rate=1e-3, weight_decay=1.0)
        expected = kit.torch_step(other, [[wide_d]], 300.0)
        assert state.last_step.branch_name == "inside"
        agree(kit, got, expected, float(jnp.finfo(dtype).eps))
        agree_reports(kit, state.last_step, other.last_step, TOLERANCE["float32"])


# x + (x+ - x)


def test_exact_zeros_survive_apply_updates(kit):
    opt = prox_sps(regularizer=L1(0.6))
    step = kit.stepper(opt)
    for dtype in ("float32", "bfloat16"):
        x, d = kit.drawn(0, (2000,), (2000,), dtype=dtype)
        got, state = step(x, opt.init(x), d, value=100.0)
        y = L1(0.6).prox(x - state.last_step.tau[0].astype(x.dtype) * d, 1.0)
        assert 0.1 < float(jnp.mean(got == 0)) < 0.9
        if dtype == "float32":
            assert jnp.array_equal(got == 0, y == 0)


def test_a_projection_is_exact_up_to_the_rounding_of_the_point_it_came_from(kit):
    """From far away x + (y - x) misses y by a rounding of x; from then on it is feasible."""
    ball = L2Ball(1.0)
    opt = prox_sps(regularizer=ball)
    (x,), step = kit.drawn(0, (50,), scale=1e4), kit.stepper(opt)
    state = opt.init(x)
    x, state = step(x, state, jnp.zeros_like(x), value=1.0)
    assert float(jnp.linalg.norm(x)) <= 1 + 1e4 * 50**0.5 * jnp.finfo(x.dtype).eps
    for _ in range(3):
        x, state = step(x, state, jnp.zeros_like(x), value=1.0)
        assert float(ball.value(x)) == 0
