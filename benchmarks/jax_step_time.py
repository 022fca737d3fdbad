"""Time of one jitted step of proxsps.jax, as ratios to optax's own optimizers in the same run.

    python benchmarks/jax_step_time.py [--rounds 60] [--device cpu|cuda|tpu] [--only NAME] [--programs]

The parameters are the 329 tensors of a CIFAR ResNet110 with batch norm (1.7 M entries), in f32. A step is one jitted
function, `update` and `apply_updates`, that is given its parameters and state to overwrite (donated buffers), for every
contestant alike. All of them step in turn, round after round, so that a busy moment of the machine hits all of them; a
time is the median over rounds, and the least one stands next to it; the last column is how long the step took to trace
and compile. `--programs` prints how many kernels each program has and how much memory it takes beside its arguments.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable

import jax
import numpy as np
import optax
from step_time import DECAY, resnet110_shapes

from proxsps.jax import prox_sps, prox_sps_adam, sps
from proxsps.regularizers import L1, Box, ElasticNet, GroupLasso, Regularizer

# Small rates: parameters must stay of the size they have while thousands of steps are timed.
RATE = 1e-9


def labels(params: list[jax.Array]) -> list[str]:
    """Filters, which a group lasso may drop, and the rest, which gets weight decay."""
    return ["filters" if x.ndim == 4 else "rest" for x in params]


def filters(rate: float) -> optax.GradientTransformationExtraArgs:
    """A group lasso on the filters, weight decay on the rest."""
    groups = {"filters": {"regularizer": GroupLasso.filters(DECAY)}, "rest": {"weight_decay": DECAY}}
    return prox_sps(rate, labels=labels, groups=groups)


def general(phi: Regularizer) -> Callable[[float], optax.GradientTransformationExtraArgs]:
    """prox_sps with this regulariser on everything."""
    return lambda rate: prox_sps(rate, regularizer=phi)


SEARCHED = {
    "L1": general(L1(DECAY)),
    "ElasticNet": general(ElasticNet(DECAY, DECAY)),
    "Box": general(Box(-1.0, 1.0)),
    "GroupLasso, tensors": general(GroupLasso(DECAY)),
    "GroupLasso.filters, weight decay": filters,
}
CONTESTANTS = {
    "optax.sgd": optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(RATE)),
    "optax.adamw": optax.adamw(RATE, weight_decay=DECAY),
    "optax.contrib.momo": optax.contrib.momo(RATE, weight_decay=DECAY),
    "sps": sps(RATE, weight_decay=DECAY),
    "prox_sps, weight decay": prox_sps(RATE, weight_decay=DECAY),
    "prox_sps, momentum": prox_sps(RATE, weight_decay=DECAY, momentum=0.9),
    "prox_sps, momentum, no rate": prox_sps(None, weight_decay=DECAY, momentum=0.9, scale=RATE),
    "prox_sps_adam, rate": prox_sps_adam(RATE, weight_decay=DECAY),
    "prox_sps_adam": prox_sps_adam(weight_decay=DECAY, scale=RATE),
    "prox_sps_adam, L1": prox_sps_adam(regularizer=L1(DECAY), scale=RATE),
}
for _name, _make in SEARCHED.items():
    CONTESTANTS[f"prox_sps, {_name}, capped"] = _make(RATE)
    CONTESTANTS[f"prox_sps, {_name}, searched"] = _make(1e3 * RATE)
VALUE = 1.0  # between RATE ||g||^2 and 1e3 RATE ||g||^2, as g has 1.7 M entries of size 1
REFERENCE = "optax.adamw"


def drawn(seed: int) -> list[jax.Array]:
    """Standard normal arrays in the shapes of the network."""
    rng = np.random.default_rng(seed)
    return [jax.numpy.asarray(rng.standard_normal(shape), "float32") for shape in resnet110_shapes()]


def stepper(
    opt: optax.GradientTransformation, grads: list[jax.Array], name: str = ""
) -> tuple[Callable[[], object], float]:
    """A function that takes one step and waits for it, and the seconds it took to compile.

    With a name it prints what the compiler made of it.
    """
    opt = optax.with_extra_args_support(opt)

    def step(params, state, grads):
        updates, state = opt.update(grads, state, params, value=VALUE)
        return optax.apply_updates(params, updates), state

    params = drawn(0)
    kept = [params, opt.init(params)]
    start = time.perf_counter()
    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(*kept, grads).compile()
    seconds = time.perf_counter() - start
    if name:
        kernels = sum(" fusion(" in line or " reduce(" in line for line in compiled.as_text().splitlines())
        extra = compiled.memory_analysis().temp_size_in_bytes / 1e6
        print(f"{name}: {kernels} kernels, {extra:.1f} MB", flush=True)

    def run() -> None:
        kept[:] = compiled(*kept, grads)
        jax.block_until_ready(kept)

    return run, seconds


def interleaved(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each step, all of which are taken in turn."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            step()  # brings the state of this step, not of the one before, into the caches
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: series[2:] for name, series in times.items()}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60, help="timed steps of each optimizer (default: %(default)s)")
    parser.add_argument("--device", default=None, help="platform to run on: cpu, cuda or tpu (default: JAX's own)")
    parser.add_argument("--only", default="", help="steps whose name contains this, next to the reference")
    parser.add_argument("--programs", action="store_true", help="print what the compiler made of each step")
    options = parser.parse_args()
    device = jax.devices(options.device)[0]
    print(f"jax {jax.__version__}, optax {optax.__version__}, {os.cpu_count()} CPUs, {platform.machine()}, {device}\n")
    with jax.default_device(device):
        grads = drawn(1)
        chosen = {name: opt for name, opt in CONTESTANTS.items() if options.only in name or name == REFERENCE}
        made = {name: stepper(opt, grads, name * options.programs) for name, opt in chosen.items()}
        times = interleaved({name: step for name, (step, _) in made.items()}, options.rounds)
    print(f"| jitted step | ms | / {REFERENCE} | least ms | / {REFERENCE} | compile: s |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    base = times[REFERENCE]
    for name, series in times.items():
        cells = [f"{1e3 * of(series):.2f} | {of(series) / of(base):.2f}" for of in (statistics.median, min)]
        print(f"| {name} | {' | '.join(cells)} | {made[name][1]:.1f} |")


if __name__ == "__main__":
    main()
