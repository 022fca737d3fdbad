"""All methods as cases, each with its torch counterpart, and the regularisers they are tried with."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from proxsps import optim
from proxsps.jax import dec_sps, prox_sgd, prox_sps, sps
from proxsps.regularizers import (
    L1,
    L2,
    Box,
    ElasticNet,
    GroupLasso,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    NuclearNorm,
    Simplex,
    SparseGroupLasso,
    Zero,
)

# Before JAX starts: one thread per test process, as for torch; and a second device for tests of parallel steps.
os.environ.setdefault("NPROC", "1")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_include_full_tracebacks_in_locations", False)  # they take time, and nobody reads them
if version("jaxlib") == "0.10.2":  # XLA ends the process if it does not know a flag
    # Programs here run for microseconds, and nearly all the time is that of XLA: a sixth of it without optimisations.
    FLAGS = (
        "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
        " --xla_cpu_multi_thread_eigen=false"
    )
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"

CENTERS = [np.linspace(-1, 2, 12).reshape(4, 3)]
# name -> (options of JAX and torch alike, whether there is a subgradient)
REGULARIZERS = {
    "none": ({}, True),
    "weight_decay": ({"weight_decay": 0.7}, True),
    "Zero": ({"regularizer": Zero()}, True),
    "L2": ({"regularizer": L2(0.7)}, True),
    "L2-centers": ({"regularizer": L2(0.7, CENTERS)}, True),
    "L1": ({"regularizer": L1(0.6)}, True),
    "ElasticNet": ({"regularizer": ElasticNet(0.5, 0.3)}, True),
    "GroupLasso": ({"regularizer": GroupLasso.rows(1.1, scale_by_size=True)}, True),
    "SparseGroupLasso": ({"regularizer": SparseGroupLasso(0.3, 0.8, dims=(1,))}, True),
    "NuclearNorm": ({"regularizer": NuclearNorm(1.2)}, True),
    "NonNegative": ({"regularizer": NonNegative()}, False),
    "Box": ({"regularizer": Box(-0.3, 0.8)}, False),
    "LInfBall": ({"regularizer": LInfBall(0.5)}, False),
    "L1Ball": ({"regularizer": L1Ball(2.0)}, False),
    "L2Ball": ({"regularizer": L2Ball(1.5)}, False),
    "L2Ball-joint": ({"regularizer": L2Ball(1.5, joint=True)}, False),
    "Simplex": ({"regularizer": Simplex(1.5)}, False),
}


@dataclass(frozen=True)
class Method:
    make: Callable[..., optax.GradientTransformationExtraArgs]
    torch: type[optim.PolyakOptimizer]
    lr: float  # right for the small problems of this battery
    bounded: bool = True
    coupled: bool = False

    @property
    def name(self) -> str:
        return self.make.__name__


METHODS = [
    Method(prox_sps, optim.ProxSPS, lr=1.0),
    Method(sps, optim.SPS, lr=1.0, coupled=True),
    Method(dec_sps, optim.DecSPS, lr=1.0, coupled=True),
    Method(prox_sgd, optim.ProxSGD, lr=0.05, bounded=False),
]

SELECTIONS = {
    "method": METHODS,
    "bounded_method": [m for m in METHODS if m.bounded],
    "prox_method": [m for m in METHODS if not m.coupled],
    "coupled_method": [m for m in METHODS if m.coupled],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    for name, methods in SELECTIONS.items():
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, methods, ids=[m.name for m in methods])
    if "pair" in metafunc.fixturenames:
        pairs = [(m, name) for m in METHODS for name, (_, smooth) in REGULARIZERS.items() if smooth or not m.coupled]
        metafunc.parametrize("pair", pairs, ids=[f"{m.name}-{name}" for m, name in pairs])


def drawn(seed: int, *shapes: tuple[int, ...], scale: float = 1.0, dtype: Any = jnp.float32) -> list[jax.Array]:
    rng = np.random.default_rng(seed)
    return [jnp.asarray(scale * rng.standard_normal(shape), dtype) for shape in shapes]


def as_torch(x: Any) -> torch.Tensor:
    x = jnp.asarray(x)
    wide = torch.tensor(np.asarray(x, np.float64))
    return wide.to({"bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}[x.dtype.name])


def as_numpy(x: Any) -> np.ndarray:
    return x.detach().double().numpy() if isinstance(x, torch.Tensor) else np.asarray(x, np.float64)


def as_torch_options(options: dict[str, Any]) -> dict[str, Any]:
    """Options with JAX's names and arrays as torch's."""
    out = {"lr" if key == "learning_rate" else key: value for key, value in options.items()}
    phi = out.get("regularizer")
    if isinstance(phi, L2) and phi.center is not None:
        out["regularizer"] = L2(phi.lam, [torch.tensor(c) for c in phi.center])
    return out


def torch_optimizer(method: Method, groups: list[list[jax.Array]], options: list[dict[str, Any]], **shared: Any) -> Any:
    """The torch counterpart over copies of the parameters, a list a group."""
    params = [
        {"params": [torch.nn.Parameter(as_torch(x)) for x in xs], **as_torch_options(own)}
        for xs, own in zip(groups, options, strict=True)
    ]
    return method.torch(params, **as_torch_options({"learning_rate": method.lr, **shared}))


def torch_step(opt: Any, grads: list[list[jax.Array]], value: float, **extra: Any) -> list[list[torch.Tensor]]:
    """One step of it; the new parameters."""
    for group, ds in zip(opt.param_groups, grads, strict=True):
        for param, d in zip(group["params"], ds, strict=True):
            param.grad = as_torch(d)
    opt.step(loss=value, **extra)
    return [[param.detach().clone() for param in group["params"]] for group in opt.param_groups]


def stepper(opt: optax.GradientTransformationExtraArgs) -> Callable[..., Any]:
    """A jitted step: parameters, state, gradients -> new ones."""

    @jax.jit
    def step(params, state, grads, **extra):
        updates, state = opt.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    return step


class Kit:
    """The helpers above, for tests in this folder."""

    methods = METHODS
    regularizers = REGULARIZERS
    drawn = staticmethod(drawn)
    as_numpy = staticmethod(as_numpy)
    as_torch = staticmethod(as_torch)
    torch_optimizer = staticmethod(torch_optimizer)
    torch_step = staticmethod(torch_step)
    stepper = staticmethod(stepper)


@pytest.fixture(scope="session")
def kit() -> Kit:
    return Kit()
