"""Bad input of steps with momentum, in Adam's metric and without a learning rate gets one clear line."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
import pytest

from proxsps.jax import cool_down, polynomial_average, prox_sgd, prox_sps, prox_sps_adam, sps
from proxsps.regularizers import L2Ball, NuclearNorm, Simplex, TotalVariation1D


def test_constants_out_of_range():
    for name in ("b1", "b2"):
        for constant in (-0.1, 1.0, math.nan):
            with pytest.raises(ValueError, match=rf"{name} must be at least 0 and below 1, got"):
                prox_sps_adam(**{name: constant})
    with pytest.raises(ValueError, match=r"momentum must be at least 0 and below 1, got 1.0"):
        prox_sps(momentum=1.0)
    with pytest.raises(ValueError, match="eps must be a finite number >= 0, got -1e-08"):
        prox_sps_adam(eps=-1e-8)
    with pytest.raises(ValueError, match="cap must be 'proximal' or 'matched', got 'paper'"):
        prox_sps(cap="paper")
    with pytest.raises(ValueError, match="distance_cap must be True or False"):
        prox_sps(distance_cap=0.85)
    with pytest.raises(ValueError, match=r"scale must be a finite number >= 0, got -1.0"):
        prox_sps(None, scale=-1.0)
    for fraction, steps in ((1.5, 10), (0.5, 0)):
        with pytest.raises(ValueError, match="must be"):
            cool_down(steps, fraction)
    with pytest.raises(ValueError, match="power must be"):
        polynomial_average(-1.0)


def test_a_missing_learning_rate():
    for method in (prox_sgd, sps):
        with pytest.raises(ValueError, match=f"{method.__name__} has no distance cap and needs a learning_rate"):
            method(None)
        with pytest.raises(ValueError, match="needs a learning_rate"):
            method(1.0, labels="a", groups={"a": {"learning_rate": None}})
    for method in (prox_sps, prox_sps_adam):
        with pytest.raises(ValueError, match="without a learning rate needs the distance cap"):
            method(None, distance_cap=False)
        with pytest.raises(ValueError, match=r"Label 'a' has learning_rate=1.0, but .* has None: either all"):
            method(None, labels="a", groups={"a": {"learning_rate": 1.0}})
        with pytest.raises(ValueError, match=r"Label 'a' has learning_rate=None, but .* has 1.0: either all"):
            method(1.0, labels="a", groups={"a": {"learning_rate": None}})
        with pytest.raises(ValueError, match=r"both learning_rate=1.0 and scale=0.5. Pass one"):
            method(1.0, scale=0.5)
    with pytest.raises(ValueError, match="Unknown key 'scale' in a parameter group of sps"):
        sps(1.0, labels="a", groups={"a": {"scale": 0.5}})


@pytest.mark.parametrize("phi", [L2Ball(1.0), Simplex(1.0), NuclearNorm(0.1)], ids=["L2Ball", "Simplex", "NuclearNorm"])
def test_regularizers_without_a_prox_in_a_metric(phi):
    with pytest.raises(ValueError, match=r"which .* does not have. Zero, L2, L1, .* have one; .*use prox_sps"):
        prox_sps_adam(regularizer=phi)
    with pytest.raises(ValueError, match="cannot be traced"):
        prox_sps_adam(regularizer=TotalVariation1D(0.1))


def test_a_bound_where_there_is_none():
    opt, x = prox_sps(lower_bound=None), jnp.ones(3)
    updates, _ = opt.update(x, opt.init(x), x)  # nor is there a need of the loss
    np.testing.assert_allclose(updates, -x)
    with pytest.raises(ValueError, match="prox_sps does not use a lower bound"):
        opt.update(x, opt.init(x), x, lower_bound=0.5)
