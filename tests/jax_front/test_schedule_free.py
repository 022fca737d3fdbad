"""The schedule-free step in optax's company: transformations of steps, evaluation, skips, dtypes, and bad input."""

from __future__ import annotations

import pickle
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from proxsps.jax import eval_params, multi_steps, prox_sps, roles, schedule_free_sps
from proxsps.jax.second_point import Matrix, _directions
from proxsps.regularizers import L1, Box, NuclearNorm

TREE = {"in": {"kernel": (6, 9), "bias": (9,)}, "mid": {"kernel": (9, 9)}, "head": {"kernel": (9, 2)}}


def tree_of(kit: Any, seed: int, dtype: Any = jnp.float32) -> Any:
    shapes, structure = jax.tree.flatten(TREE, is_leaf=lambda x: isinstance(x, tuple))
    return jax.tree.unflatten(structure, kit.drawn(seed, *shapes, dtype=dtype))


SPECTRAL = schedule_free_sps(metric="spectral", weight_decay=0.1)
ADAM = schedule_free_sps()


@cache
def stepper(kit: Any, opt: Any) -> Any:
    return kit.stepper(opt)


def run(kit: Any, opt: Any, params: Any, seeds: Any, state: Any = None) -> tuple[Any, Any]:
    """Steps with drawn gradients."""
    state, step = opt.init(params) if state is None else state, stepper(kit, opt)
    for seed in seeds:
        params, state = step(params, state, tree_of(kit, seed), value=3.0)
    return params, state


def same(a: Any, b: Any) -> bool:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(jnp.array_equal(x, y, equal_nan=True) and x.dtype == y.dtype for x, y in pairs)


def close(a: Any, b: Any, tolerance: float = 2e-6) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), a, b)


def test_it_trains_a_network(kit):
    """Both metrics learn a function that is not linear; the average is better than the last point of gradients."""
    X = kit.drawn(0, (256, 6))[0]
    target = (X[:, 0] * X[:, 1] > 0).astype(int)

    def loss(params):
        hidden = jnp.tanh(X @ params["in"]["kernel"] + params["in"]["bias"])
        logits = jnp.tanh(hidden @ params["mid"]["kernel"]) @ params["head"]["kernel"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, target).mean(), logits

    for metric in ("adam", "spectral"):
        opt = schedule_free_sps(metric=metric)

        def body(carry, _, opt=opt):
            params, state = carry
            (value, _), grads = jax.value_and_grad(loss, has_aux=True)(params)
            updates, state = opt.update(grads, state, params, value=value)
            return (optax.apply_updates(params, updates), state), value

        start = jax.tree.map(lambda x: 0.4 * x, tree_of(kit, 1))
        (params, state), _ = jax.jit(lambda c, b=body: jax.lax.scan(b, c, length=200))((start, opt.init(start)))
        _, logits = loss(eval_params(state, params))
        assert float(jnp.mean(jnp.argmax(logits, 1) == target)) > 0.97, metric
        assert state.last_step.tau.shape == (2,)


def test_jit_eager_vmap_and_scan_are_one_step(kit):
    opt, params = SPECTRAL, tree_of(kit, 0)
    expected, state = run(kit, opt, params, range(1, 4))
    eager, own = params, opt.init(params)
    for seed in range(1, 4):
        updates, own = opt.update(tree_of(kit, seed), own, eager, value=3.0)
        eager = optax.apply_updates(eager, updates)
    close(eager, expected)
    grads = jax.tree.map(lambda *gs: jnp.stack(gs), *(tree_of(kit, seed) for seed in range(1, 4)))

    def body(carry, g):
        updates, after = opt.update(g, carry[1], carry[0], value=3.0)
        return (optax.apply_updates(carry[0], updates), after), None

    def trained(start):
        return jax.lax.scan(body, (start, opt.init(start)), grads)[0]

    both = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), params)
    found, states = jax.jit(jax.vmap(trained))(both)
    close(jax.tree.map(lambda x: x[0], found), expected)
    shown = jax.vmap(eval_params)(states, found)
    close(jax.tree.map(lambda x: x[0], shown), eval_params(state, expected))
    assert not jnp.allclose(shown["mid"]["kernel"][1], 2 * shown["mid"]["kernel"][0])


def test_around_other_transformations(kit):
    """Micro-batches, a chain, injected constants and frozen parameters; the average is found in every state."""
    params, plain = tree_of(kit, 0), ADAM
    expected, state = run(kit, plain, params, [1, 2])
    average = eval_params(state, expected)
    wrapped = {
        "micro": (multi_steps(plain, 2), [1, 1, 2, 2]),
        "chain": (optax.chain(optax.identity(), plain), [1, 2]),
        "inject": (optax.inject_hyperparams(schedule_free_sps)(b1=0.9, max_move=1e9), [1, 2]),
    }
    for opt, seeds in wrapped.values():
        found, own = run(kit, opt, params, seeds)
        close(found, expected)
        close(eval_params(own, found), average)
    frozen = optax.partition(
        {"train": plain, "not": optax.set_to_zero()}, {"in": "not", "mid": "train", "head": "train"}
    )
    found, own = run(kit, frozen, params, [1, 2])
    assert same(found["in"], params["in"])
    shown = eval_params(own, found)
    assert same(shown["in"], params["in"])
    assert not jnp.allclose(shown["mid"]["kernel"], found["mid"]["kernel"])


def test_an_injected_mix_may_change(kit):
    """The average of a state does not depend on the mix of later steps."""
    opt = optax.inject_hyperparams(schedule_free_sps)(b1=0.9)
    params, state = run(kit, opt, tree_of(kit, 0), [1, 2])
    before = eval_params(state, params)
    state.hyperparams["b1"] = jnp.float32(0.5)
    close(eval_params(state, params), before, 0)
    params, state = run(kit, opt, params, [3], state)
    z = state.inner_state.memory.z
    middle = jax.tree.map(lambda x, z: (x + z) / 2, eval_params(state, params), z)
    close(middle, params)


@pytest.mark.parametrize("bad", ["nan loss", "inf gradient", "loss below its bound"])
def test_a_skipped_step_leaves_everything_as_it_was(kit, bad):
    opt = SPECTRAL
    params, state = run(kit, opt, tree_of(kit, 0), [1, 2])
    grads = tree_of(kit, 3)
    if bad == "inf gradient":
        grads["mid"]["kernel"] = grads["mid"]["kernel"].at[0, 0].set(jnp.inf)
    value = {"nan loss": jnp.nan, "inf gradient": 1.0}.get(bad, -1.0)
    found, after = stepper(kit, opt)(params, state, grads, value=value)
    assert same(found, params)
    assert same(after.memory, state.memory)
    assert after.last_step.branch_name == "skipped"
    later, _ = run(kit, opt, found, [4], after)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(later))


def test_resumed_runs_continue_bitwise(kit):
    opt = SPECTRAL
    params, state = run(kit, opt, tree_of(kit, 0), [1, 2])
    saved = pickle.loads(pickle.dumps(jax.tree.map(np.asarray, (params, state))))
    assert same(run(kit, opt, *saved[:1], [3], saved[1]), run(kit, opt, params, [3], state))


def test_state_has_two_arrays_per_parameter_and_keeps_its_types(kit):
    params = tree_of(kit, 0)
    for opt in (ADAM, SPECTRAL):
        state = opt.init(params)
        size = sum(x.size for x in jax.tree.leaves(params))
        trees = state.memory[:5]
        assert sum(x.size for x in jax.tree.leaves(trees)) == 2 * size
        after = run(kit, opt, params, [1])[1]
        assert jax.tree.structure(after) == jax.tree.structure(state)
        assert [x.dtype for x in jax.tree.leaves(after)] == [x.dtype for x in jax.tree.leaves(state)]


def test_half_precision_follows_single(kit):
    """Steps below the resolution of bf16 add up, because y and z are kept in f32; arrays are longer than a register."""
    half = {"w": kit.drawn(0, (9, 37))[0].astype(jnp.bfloat16), "b": kit.drawn(1, (131,))[0].astype(jnp.bfloat16)}
    full = jax.tree.map(lambda x: x.astype(jnp.float32), half)
    opt = schedule_free_sps(learning_rate=1e-4)
    step, states = kit.stepper(opt), [opt.init(half), opt.init(full)]
    start = full
    for seed in range(40):
        grads = dict(zip("wb", kit.drawn(seed % 4, (9, 37), (131,)), strict=True))
        half, states[0] = step(half, states[0], grads, value=1e3)
        full, states[1] = step(full, states[1], grads, value=1e3)
    close(states[0].memory.y, full, 1e-6)
    assert jnp.abs(full["w"] - start["w"]).max() > 1e-3
    for name in "wb":
        assert half[name].dtype == jnp.bfloat16
        np.testing.assert_allclose(half[name].astype(jnp.float32), full[name], rtol=2**-7, atol=1e-4)
        assert eval_params(states[0], half)[name].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=str)
def test_edits_of_half_precision_parameters_count(kit, dtype):
    """As in single precision: a step goes on from the new values, and evaluation shows them."""
    opt, edited = schedule_free_sps(), jnp.arange(131) % 3 == 0
    step, found = kit.stepper(opt), []
    for kind in (dtype, jnp.float32):
        x = kit.drawn(0, (131,))[0].astype(dtype).astype(kind)
        state = opt.init(x)
        for seed in range(1, 9):
            if seed == 5:
                x = jnp.where(edited, x + 1, x)
                before = eval_params(state, x)
            x, state = step(x, state, kit.drawn(seed, (131,))[0], value=1e3)
        found.append([before, x, eval_params(state, x)])
    for half, full in zip(*found, strict=True):
        np.testing.assert_allclose(half.astype(jnp.float32), full, rtol=2**-6, atol=2**-6)


def test_large_and_missing_gradients(kit):
    """Squares beyond the range of f32 do not stop spectral steps; zero gradients leave the prox alone."""
    opt, params, grads = SPECTRAL, tree_of(kit, 0), tree_of(kit, 1)
    step = stepper(kit, opt)
    plain, _ = step(params, opt.init(params), grads, value=1e10)
    large = grads | {"mid": {"kernel": 1e25 * grads["mid"]["kernel"]}}
    found, state = step(params, opt.init(params), large, value=1e35)
    assert state.last_step.branch_name == "capped"
    close(found, plain, 1e-5)
    still, state = step(params, opt.init(params), jax.tree.map(jnp.zeros_like, params), value=1.0)
    assert same(still["in"]["bias"], params["in"]["bias"])
    shrunk = still["mid"]["kernel"] / params["mid"]["kernel"]  # the prox alone, of weight decay
    assert float(shrunk.min()) > 0.9
    assert float(shrunk.max()) < 1
    close(eval_params(state, still), state.memory.z)


def test_evaluated_models_have_exact_zeros_and_constraints_hold(kit):
    params = tree_of(kit, 0)
    opt = schedule_free_sps(regularizer=L1(3.0))
    found, state = run(kit, opt, params, range(1, 30))
    shown = jax.jit(eval_params)(state, found)
    count = sum(int((x == 0).sum()) for x in jax.tree.leaves(shown))
    assert 10 < count < 170
    assert sum(int((x == 0).sum()) for x in jax.tree.leaves(found)) < count
    assert same(eval_params(opt.init(params), params), params)
    opt = schedule_free_sps(regularizer=Box(-0.5, 0.5))
    found, state = run(kit, opt, jax.tree.map(lambda x: x.clip(-0.5, 0.5), params), range(1, 9))
    for x in jax.tree.leaves([found, eval_params(state, found)]):
        assert jnp.abs(x).max() <= 0.5 * (1 + 4 * jnp.finfo(x.dtype).eps)


FLAX = {
    "Embed_0": {"embedding": (50, 8)},
    "Dense_2": {"kernel": (8, 8), "bias": (8,)},
    "Dense_10": {"kernel": (8, 3)},
    "attn": {"query": {"kernel": (8, 2, 4)}, "qkv": {"kernel": (8, 24)}, "out": {"kernel": (2, 4, 8)}},
    "Conv_0": {"kernel": (3, 3, 4, 6)},
    "blocks": {"kernel": (5, 8, 16)},
    "LayerNorm_0": {"scale": (8,)},
}


def test_roles():
    tree = jax.tree.map(jnp.zeros, FLAX, is_leaf=lambda x: isinstance(x, tuple))
    found = roles(tree, stacked=["^blocks"])
    matrices = {role.name: role.matrix for role in jax.tree.leaves(found) if role == "matrices"}
    assert matrices == {
        "Dense_2.kernel": Matrix((1, 8, 8)),
        "attn.query.kernel": Matrix((1, 8, 8)),
        "attn.qkv.kernel": Matrix((8, 3, 8), 1),
        "attn.out.kernel": Matrix((1, 8, 8)),
        "Conv_0.kernel": Matrix((1, 36, 6)),
        "blocks.kernel": Matrix((5, 8, 16)),
    }
    assert repr(found["Dense_10"]["kernel"]) == "rest      Dense_10.kernel  (8 x 3): last layer"
    assert found["Embed_0"]["embedding"].why == "embedding or table"
    other = roles(tree, include=["Dense_10", "scale"], exclude=["attn"])
    assert other["Dense_10"]["kernel"] == "matrices"
    assert other["LayerNorm_0"]["scale"] == other["attn"]["query"]["kernel"] == "rest"


def test_roles_of_an_equinox_model():
    eqx = pytest.importorskip("equinox")
    net = eqx.nn.MLP(4, 3, 8, 2, key=jax.random.key(0))
    found = [role for role in jax.tree.leaves(roles(net)) if role == "matrices"]
    assert [role.name for role in found] == ["layers.0.weight", "layers.1.weight"]
    grads = eqx.filter_grad(lambda net: net(jnp.ones(4)).sum())(net)
    opt = schedule_free_sps(metric="spectral")
    updates, state = opt.update(grads, opt.init(net), net, value=1.0)
    shown = eval_params(state, eqx.apply_updates(net, updates))
    assert shown(jnp.ones(4)).shape == (3,)


def test_filters_of_both_layouts_and_packed_matrices_have_the_same_directions(kit):
    d, *parts = kit.drawn(0, (6, 4, 3, 2), (5, 5), (5, 5), (5, 5))
    arrays = [d, jnp.moveaxis(d, 0, -1), *parts, jnp.concatenate(parts), jnp.hstack(parts)]
    matrices = [
        Matrix((1, 6, 24)),
        Matrix((1, 24, 6)),
        *[Matrix((1, 5, 5))] * 3,
        Matrix((3, 5, 5)),
        Matrix((5, 3, 5), 1),
    ]
    found = jax.jit(lambda own: _directions(own, matrices, jnp.float32(1.0)))(arrays)
    ours, turned, *alone, rows, columns = map(np.asarray, found)
    close(np.moveaxis(turned, -1, 0), ours, 1e-5)
    close(rows, np.concatenate(alone), 1e-5)
    close(columns, np.hstack(alone), 1e-5)
    singular = np.linalg.svd(alone[0] / 5**0.5, compute_uv=False)
    assert singular.min() > 0.5
    assert singular.max() < 1.3


def test_sets_and_labels(kit):
    """Labels that name a set share its cap; roles that were chosen by the user are used."""
    params = tree_of(kit, 0)
    opt = schedule_free_sps(
        labels={"in": "a", "mid": "b", "head": "c"},
        groups={"a": {"set": "one"}, "b": {"set": "one"}, "c": {"set": "two"}},
    )
    tau = run(kit, opt, params, [1, 2])[1].last_step.tau
    assert tau.shape == (3,)
    assert tau[0] == tau[1] != tau[2]
    chosen = schedule_free_sps(
        labels=lambda tree: roles(tree, exclude=["in"], include=["head"]),
        groups={"matrices": {"metric": "spectral"}, "rest": {}},
    )
    memory = run(kit, chosen, params, [1])[1].memory
    assert [x.size for x in jax.tree.leaves(memory.average)] == [18, 0, 0, 81]


def test_bad_input(kit):
    params = tree_of(kit, 0)
    spectral = {"labels": "all", "groups": {"all": {"metric": "spectral"}}}
    for make, message in (
        (lambda: schedule_free_sps(b1=0.0), "b1 must be above 0, got 0.0"),
        (lambda: schedule_free_sps(metric="muon"), 'metric must be "adam" or "spectral", got \'muon\''),
        (lambda: schedule_free_sps(max_move=0.0), "max_move must be a positive number"),
        (
            lambda: schedule_free_sps(metric="spectral", regularizer=L1(0.1)),
            "prox is not exact in this metric. Use weight",
        ),
        (lambda: schedule_free_sps(regularizer=NuclearNorm(0.1)), "needs an exact prox with one step size per entry"),
        (lambda: schedule_free_sps(0.1, scale=0.5), "got both learning_rate=0.1 and scale=0.5"),
        (lambda: schedule_free_sps(**spectral).init(params), "matrices and filters, and in.bias has shape"),
        (lambda: schedule_free_sps().update(params, schedule_free_sps().init(params), params), "needs the loss value"),
        (
            lambda: schedule_free_sps().update(params, prox_sps().init(params), params, value=1.0),
            "another transformation",
        ),
        (lambda: eval_params(prox_sps().init(params), params), "eval_params needs a state of schedule_free_sps, got a"),
    ):
        with pytest.raises(ValueError, match=message.replace("(", r"\(")):
            make()
    with pytest.raises(TypeError, match="has no argument 'lr'"):
        schedule_free_sps(lr=0.1)
