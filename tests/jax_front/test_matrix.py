"""A grid of strengths and caps on matrix factorisation: one vmapped program in JAX, the batched engine in torch."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from proxsps.jax import prox_sps
from proxsps.problems import matrix_fac1
from proxsps.sweep.batched import run_batched
from proxsps.sweep.spec import RunSpec, batches

EPOCHS = 4


def test_a_vmapped_grid_agrees_with_the_batched_engine():
    problem = matrix_fac1(N=100, dtype="float64")
    steps = problem.steps_per_epoch
    grid = list(itertools.product((1e-4, 1e-2, 1.0), (0.5, 2.0, 10.0)))  # lambda, alpha_0
    specs = [RunSpec(problem, "prox-sps", "sqrt", alpha, lam, seed=0, epochs=EPOCHS) for lam, alpha in grid]
    order = np.stack([batches(problem, 0, epoch) for epoch in range(EPOCHS)]).reshape(EPOCHS * steps, -1)

    with jax.enable_x64(True):
        inputs, targets = (jnp.asarray(array.numpy()) for array in problem.train_data())
        start = {name: jnp.asarray(weight.numpy()) for name, weight in problem.start().items()}

        def loss(params, rows):
            return jnp.mean((inputs[rows] @ params["W1"].T @ params["W2"].T - targets[rows]) ** 2)

        def run(lam, alpha):
            def schedule(count):
                return alpha / jnp.sqrt((count // steps + 1).astype(alpha.dtype))

            opt = prox_sps(schedule, weight_decay=lam, lower_bound=problem.lower_bound)

            def step(carry, rows):
                params, state = carry
                value, grads = jax.value_and_grad(loss)(params, rows)
                updates, state = opt.update(grads, state, params, value=value)
                params = optax.apply_updates(params, updates)
                everything = jnp.arange(len(inputs))
                return (params, state), (state.last_step.zeta[0], loss(params, everything), optax.tree.norm(params))

            return jax.lax.scan(step, (start, opt.init(start)), order)[1]

        strengths, caps = map(jnp.asarray, zip(*grid, strict=True))
        zetas, losses, norms = map(np.asarray, jax.jit(jax.vmap(run))(strengths, caps))

    ends = slice(steps - 1, None, steps)
    branches = set()
    for i, result in enumerate(run_batched(specs)):
        # Twenty steps multiply rounding errors of 1e-16; zetas are kept in float32 by the engine.
        np.testing.assert_allclose(zetas[i].reshape(EPOCHS, steps), result.zetas, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(losses[i, ends], result.metrics[:, 1], rtol=1e-12)
        np.testing.assert_allclose(norms[i, ends], result.metrics[:, 3], rtol=1e-12)
        caps = np.repeat([result.spec.lr / (epoch + 1) ** 0.5 for epoch in range(EPOCHS)], steps)
        for zeta, cap in zip(zetas[i], caps, strict=True):
            branches.add("truncated" if zeta == 0 else "capped" if zeta >= cap else "inside")
    assert branches == {"inside", "capped"}
