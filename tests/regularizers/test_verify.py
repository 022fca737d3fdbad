"""`check_regularizer` passes every regulariser of this package, and fails on mistakes that a user would make."""

from __future__ import annotations

import inspect
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from proxsps import (
    L1,
    L2,
    ElasticNet,
    GroupLasso,
    L2Ball,
    ProxSGD,
    ProxSPS,
    ProxSPSAdam,
    Regularizer,
    Simplex,
    check_regularizer,
)
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Scalar
from proxsps.regularizers.units import UnitLasso, UnitTensor


def test_own_regularisers_pass(case):
    phi = L2(0.7, torch.from_numpy(case.phi.center)) if case.name == "L2-center" else case.phi
    check_regularizer(phi, case.shape)


@pytest.mark.parametrize("library", ["numpy", "jax.numpy"])
@pytest.mark.parametrize("phi", [L1(0.3), GroupLasso.rows(1.1), Simplex(1.5)], ids=repr)
def test_own_regularisers_pass_in_other_libraries(phi, library):
    check_regularizer(phi, (4, 3), library=library)


@pytest.mark.parametrize(("shape", "scale"), [((1,), 1e-3), ((2, 3, 4), 1.0), ((40, 5), 1e3)])
def test_other_shapes_and_scales_pass(shape, scale):
    for phi in (L1(0.3), L2(0.1), ElasticNet(0.2, 0.3), GroupLasso(0.5), L2Ball(1.5), Simplex()):
        check_regularizer(phi, shape, scale=scale, seed=1)


def test_a_joint_regulariser_is_checked_as_one_vector():
    tensors = (UnitTensor((3, 4), 0, np.arange(3)), UnitTensor((3,), 0, np.arange(3)))
    check_regularizer(UnitLasso(0.4, tensors), (15,))


@dataclass(frozen=True)
class Own(Regularizer):
    """The l1 norm, with one thing replaced."""

    lam: float = 0.5

    def value(self, x):
        return self.lam * abs(x).sum()

    def prox(self, z, alpha):
        return z - z.clip(-alpha * self.lam, alpha * self.lam)


def made(**methods):
    return type("Wrong", (Own,), methods)()


def l1(z, threshold):
    return z - z.clip(-threshold, threshold)


def with_nan(z, alpha):
    y = l1(z, 0.5 * alpha)
    y[0, 0] = torch.nan
    return y


PROX = r"does not minimise value\(y\)"
WRONG = {
    "sign": (made(prox=lambda self, z, alpha: z + z.clip(-alpha * 0.5, alpha * 0.5)), PROX),
    "half": (made(prox=lambda self, z, alpha: l1(z, alpha * 0.25)), PROX),
    "a little too much": (
        made(prox=lambda self, z, alpha: l1(z, alpha * 0.501)),
        "does not minimise|do not belong to one",
    ),
    "no alpha": (made(prox=lambda self, z, alpha: l1(z, 0.5)), PROX),
    "identity": (made(prox=lambda self, z, alpha: z), PROX),
    "one entry": (made(prox=lambda self, z, alpha: torch.cat([l1(z[:1], alpha * 0.5), z[1:]])), PROX),
    "value": (made(value=lambda self, x: abs(x).sum()), PROX),
    "scalar": (made(prox=lambda self, z, alpha: z.sum()), r"prox must return an array of shape \(4, 3\)"),
    "number": (made(prox=lambda self, z, alpha: 0.0), r"prox must return an array of shape .* got 0\.0"),
    "none": (made(prox=lambda self, z, alpha: None), "got None"),
    "transposed": (made(prox=lambda self, z, alpha: l1(z, alpha * 0.5).T), r"got an array of shape \(3, 4\)"),
    "float64": (made(prox=lambda self, z, alpha: l1(z, alpha * 0.5).double()), "dtype torch.float32.*got.*float64"),
    "numpy": (made(prox=lambda self, z, alpha: l1(z, alpha * 0.5).numpy()), "prox must return"),
    "nan": (made(prox=lambda self, z, alpha: with_nan(z, alpha)), "prox returns NaN or infinity"),
    "vector value": (made(value=lambda self, x: 0.5 * abs(x)), "value.* must return a 0-d array"),
    "nan value": (made(value=lambda self, x: 0 * abs(x).sum() / 0), "value.* is NaN"),
    "outside": (made(value=lambda self, x: torch.tensor(torch.inf)), "must lie in the domain"),
    "not convex": (
        made(
            value=lambda self, x: 0.5 * (x != 0).sum().double(),
            prox=lambda self, z, alpha: torch.where(z * z > alpha, z, 0 * z),
        ),
        "do not belong to one convex function",
    ),
    "strong convexity": (made(strong_convexity=0.1), "whose strong_convexity is 0.1"),
    "structure": (made(structure=lambda self, shape: Entries(Scalar(l1=0.4))), "structure does not agree with prox"),
    "rows": (made(structure=lambda self, shape: Rows(Scalar(l1=0.5), (1,))), "structure does not agree with prox"),
    "square": (made(structure=lambda self, shape: Quadratic(0.5)), "structure does not agree with prox"),
    "no structure": (made(structure=lambda self, shape: "entries"), r"structure\(4, 3\) returned 'entries'"),
    "jvp": (made(prox_jvp=lambda self, z, y, v, alpha: v), "prox_jvp does not agree with differences of prox"),
    "diagonal": (made(prox_diagonal=lambda self, z, alpha: l1(z, 0.4 * alpha)), "prox_diagonal does not agree"),
    "one step size": (
        made(prox_diagonal=lambda self, z, alpha: l1(z, 0.5 * alpha.mean())),
        r"prox_diagonal\(z, alpha\) does not minimise",
    ),
    "subgradient": (made(subgradient=lambda self, x: x), r"subgradient\(x\) is none"),
}


@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_found(name):
    phi, message = WRONG[name]
    for seed in range(3):
        with pytest.raises(ValueError, match=message):
            check_regularizer(phi, (4, 3), seed=seed)


def test_norms_are_not_separable():
    group = GroupLasso(0.5)
    wrong = made(separable=True, value=lambda self, x: group.value(x), prox=lambda self, z, alpha: group.prox(z, alpha))
    with pytest.raises(ValueError, match="structure does not agree with prox"):
        check_regularizer(wrong, (4, 3))


def test_a_projection_that_is_not_onto_the_nearest_point():
    """Clipping and dividing by the sum gives a point of the simplex, but not the nearest."""

    class Wrong(Simplex):
        def prox(self, z, alpha):
            y = z.clip(1e-3)
            return y / y.sum()

    with pytest.raises(ValueError, match=PROX):
        check_regularizer(Wrong(), (6,))


def test_the_correct_one_passes():
    check_regularizer(Own(), (4, 3))


def test_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="center has shape"):
        check_regularizer(L2(0.1, np.zeros(3)), (4,))


@pytest.mark.parametrize("kind", [ProxSPS, ProxSGD, ProxSPSAdam])
@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("name", ["scalar", "number", "none", "float64", "numpy"])
def test_a_step_does_not_broadcast_or_convert_what_a_prox_returns(kind, separable, name):
    prox = inspect.unwrap(type(WRONG[name][0]).prox)
    methods = {"prox": prox, "prox_diagonal": prox, "separable": separable}
    x = torch.nn.Parameter(torch.ones(4, 3))
    opt = kind([x], regularizer=made(**methods))
    loss = x.square().sum()
    loss.backward()
    with pytest.raises(ValueError, match=r"Wrong\.prox.* must return an array of shape .* and dtype torch\.float32"):
        opt.step(loss=loss)
    assert torch.equal(x, torch.ones(4, 3))


def test_a_step_in_jax_does_not_broadcast_either():
    jnp, jax_front = pytest.importorskip("jax.numpy"), pytest.importorskip("proxsps.jax")
    opt, x = jax_front.prox_sps(1.0, regularizer=WRONG["scalar"][0]), jnp.ones((4, 3))
    with pytest.raises(ValueError, match=r"Wrong\.prox must return an array of shape \(4, 3\)"):
        opt.update(x, opt.init(x), x, value=1.0)
