"""Time of one jitted step of proxsps.jax, as ratios to optax's own optimizers in the same run.

    python benchmarks/jax_step_time.py [--rounds 60]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm (1.7 M entries), in f32. A step is one jitted
function, `update` and `apply_updates`, that is given its parameters and state to overwrite (donated buffers), for every
contestant alike. All of them step in turn, round after round, so that a busy moment of the machine hits all of them; a
time is the median over rounds.
"""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Callable

import jax
import numpy as np
import optax
from step_time import DECAY, interleaved, resnet110_shapes

from proxsps.jax import prox_sps, sps
from proxsps.regularizers import L1, GroupLasso

# Small rates: parameters must stay of the size they have while thousands of steps are timed.
RATE = 1e-9
CONTESTANTS = {
    "optax.sgd": optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE)),
    "optax.adamw": optax.adamw(RATE, weight_decay=DECAY),
    "optax.contrib.momo": optax.contrib.momo(RATE, weight_decay=DECAY),
    "sps": sps(RATE, weight_decay=DECAY),
    "prox_sps, weight decay": prox_sps(RATE, weight_decay=DECAY),
    "prox_sps, L1, capped": prox_sps(RATE, regularizer=L1(DECAY)),
    "prox_sps, L1, searched": prox_sps(1e3 * RATE, regularizer=L1(DECAY)),
    "prox_sps, GroupLasso, capped": prox_sps(RATE, regularizer=GroupLasso(DECAY)),
    "prox_sps, GroupLasso, searched": prox_sps(1e3 * RATE, regularizer=GroupLasso(DECAY)),
}
VALUE = 1.0  # between RATE ||g||^2 and 1e3 RATE ||g||^2, as g has 1.7 M entries of size 1
REFERENCE = "optax.adamw"


def drawn(seed: int) -> list[jax.Array]:
    """Standard normal arrays in the shapes of the network."""
    rng = np.random.default_rng(seed)
    return [jax.numpy.asarray(rng.standard_normal(shape), "float32") for shape in resnet110_shapes()]


def stepper(opt: optax.GradientTransformation, grads: list[jax.Array]) -> Callable[[], object]:
    """A function that takes one step and waits for it."""
    opt = optax.with_extra_args_support(opt)

    def step(params, state, grads):
        updates, state = opt.update(grads, state, params, value=VALUE)
        return optax.apply_updates(params, updates), state

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = drawn(0)
    kept = [params, opt.init(params)]

    def run() -> None:
        kept[:] = compiled(*kept, grads)
        jax.block_until_ready(kept)

    return run


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each optimizer (default: %(default)s)")
    rounds = parser.parse_args().rounds
    print(f"jax {jax.__version__}, optax {optax.__version__}, {os.cpu_count()} CPUs, {platform.machine()}\n")
    grads = drawn(1)
    times = interleaved({name: stepper(opt, grads) for name, opt in CONTESTANTS.items()}, rounds)
    print(f"| jitted step | ms | / {REFERENCE} |\n| --- | ---: | ---: |")
    for name, t in times.items():
        print(f"| {name} | {1e3 * t:.2f} | {t / times[REFERENCE]:.2f} |")


if __name__ == "__main__":
    main()
