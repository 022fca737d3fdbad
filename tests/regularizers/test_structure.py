"""What regularisers say of themselves is what their prox does: a step uses the one in place of the other."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import pytest
import torch

from proxsps import ProxSPS
from proxsps.core.array import array_namespace
from proxsps.regularizers import L1, L2, GroupLasso, L2Ball, Regularizer
from proxsps.regularizers.structure import Entries, Quadratic, Rows, Scalar

GENERAL = {"SparseGroupLasso", "L1Ball", "Simplex", "NuclearNorm", "TotalVariation1D"}  # by their prox alone
ALPHAS, SCALES = (0.05, 1.2, 8.0), (0.1, 1.0, 4.0)


def prox_of(structure, z, alpha):
    """The prox that a structure stands for, written out."""
    if isinstance(structure, Quadratic):
        center = 0.0 if structure.center is None else structure.center
        return (z + alpha * structure.lam * center) / (1 + alpha * structure.lam)
    if isinstance(structure, Entries):
        return structure.psi.prox(z, alpha)
    dims = structure.dims if structure.dims is None else tuple(structure.dims)
    norm = np.sqrt(np.sum(z * z, axis=dims, keepdims=True))
    return z * (structure.psi.prox(norm, alpha) / norm)


def agrees(case, structure):
    draws = [(case.draw(seed, scale), alpha) for seed in range(3) for scale in SCALES for alpha in ALPHAS]
    return all(np.allclose(prox_of(structure, z, a), case.phi.prox(z, a), rtol=1e-12, atol=1e-13) for z, a in draws)


def test_structure_has_the_prox_of_its_regulariser(case):
    structure = case.phi.structure(case.shape)
    if type(case.phi).__name__ in GENERAL:
        assert structure is None
    else:
        assert agrees(case, structure)


def test_a_constant_that_is_wrong_is_seen(case):
    """Each number of each structure, one after the other, off by a tenth."""
    structure = case.phi.structure(case.shape)
    if structure is None:
        return
    if isinstance(structure, Quadratic):
        wrong = [structure._replace(lam=1.1 * structure.lam + 0.01)]
        if structure.center is not None:
            wrong.append(structure._replace(center=structure.center + 0.1))
    else:
        psi = structure.psi
        wrong = [
            structure._replace(psi=psi._replace(**{name: 1.1 * value + 0.01}))
            for name, value in psi._asdict().items()
            if math.isfinite(value) and not (isinstance(structure, Rows) and name == "lower")
        ]
    assert wrong
    assert not any(agrees(case, mutant) for mutant in wrong)


def test_dims_that_are_wrong_are_seen(case):
    structure = case.phi.structure(case.shape)
    if isinstance(structure, Rows):
        other = (0,) if structure.dims != (0,) else (1,)
        assert not agrees(case, structure._replace(dims=other))


def test_derivatives_of_entries_are_those_of_the_regulariser(case):
    structure = case.phi.structure(case.shape)
    if not isinstance(structure, Entries):
        return
    for scale in SCALES:
        z, v = case.draw(0, scale), case.draw(1)
        y = case.phi.prox(z, 1.2)
        np.testing.assert_allclose(structure.psi.prox_jvp(z, y, v, 1.2), case.phi.prox_jvp(z, y, v, 1.2), rtol=1e-14)


@pytest.mark.parametrize("psi", [Scalar(0.5), Scalar(0.5, 0.3), Scalar(0.2, 0.0, -0.3, 0.4), Scalar(0, 0, 0.1)])
def test_functions_of_a_number_are_minimised_by_their_prox(psi):
    """Against the best point of a fine grid."""
    grid, alpha = np.linspace(-4, 4, 16_001), 0.7
    z = np.linspace(-3, 3, 31)
    inside = (grid >= psi.lower) & (grid <= psi.upper)
    values = np.where(inside, psi.l1 * np.abs(grid) + psi.l2 / 2 * grid**2, np.inf)
    best = grid[np.argmin(values + (grid - z[:, None]) ** 2 / (2 * alpha), axis=1)]
    y = psi.prox(z, alpha)
    np.testing.assert_allclose(y, best, atol=5e-4)
    h = 1e-7
    slope = (psi.prox(z + h, alpha) - psi.prox(z - h, alpha)) / (2 * h)
    smooth = np.isclose(slope, 0, atol=1e-6) | np.isclose(slope, 1 / (1 + alpha * psi.l2), atol=1e-6)
    np.testing.assert_allclose(psi.prox_jvp(z, y, np.ones_like(z), alpha)[smooth], slope[smooth], atol=1e-6)
    assert smooth.sum() > 25


def test_constants_may_be_arrays():
    """One function for each entry."""
    z = np.array([2.0, 2.0, -2.0])
    psi = Scalar(np.array([0.5, 0.0, 0.0]), np.array([0.0, 1.0, 0.0]), np.full(3, -1.0), np.full(3, math.inf))
    np.testing.assert_allclose(psi.prox(z, 1.0), [1.5, 1.0, -1.0])
    np.testing.assert_allclose(psi.prox_jvp(z, psi.prox(z, 1.0), np.ones(3), 1.0), [1.0, 0.5, 0.0])


def test_groups_of_other_sizes_have_other_weights():
    for shape, weight in (((4, 9), 3.0), ((2, 16), 4.0)):
        assert GroupLasso.rows(1.0, scale_by_size=True).structure(shape) == Rows(Scalar(l1=weight), (1,))
    assert L2Ball(2.0).structure((3, 3)) == Rows(Scalar(upper=2.0), None)
    assert L2(0.3, 1.0).structure((3,)) == Quadratic(0.3, 1.0)


# -- regularisers of one's own ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Huber(Regularizer):
    """lam sum_i H(x_i) with H quadratic up to 1 and linear beyond."""

    lam: float

    def value(self, x):
        xp = array_namespace(x)
        return self.lam * xp.sum(xp.where(abs(x) <= 1, x * x / 2, abs(x) - 0.5))

    def prox(self, z, alpha):
        a = alpha * self.lam
        return z - a * (z / (1 + a)).clip(-1, 1)


class SeparableHuber(Huber):
    separable: ClassVar[bool] = True


@dataclass(frozen=True)
class SparseBox(Regularizer):
    """lam ||x||_1 where 0 <= x <= upper."""

    lam: float
    upper: float

    def value(self, x):
        xp = array_namespace(x)
        return xp.where(xp.all((x >= 0) & (x <= self.upper)), self.lam * xp.sum(abs(x)), xp.asarray(math.inf))

    def prox(self, z, alpha):
        return (z - alpha * self.lam).clip(0, self.upper)


class StructuredBox(SparseBox):
    def structure(self, shape):
        return Entries(Scalar(l1=self.lam, lower=0.0, upper=self.upper))


def steps(phi, loss, seed=0, shapes=((40, 3), (77,))):
    """Three steps on two tensors from one start."""
    rng = np.random.default_rng(seed)
    params = [torch.nn.Parameter(torch.as_tensor(rng.uniform(0, 1, shape))) for shape in shapes]
    opt = ProxSPS(params, lr=0.3, regularizer=phi)
    for _ in range(3):
        for param in params:
            param.grad = torch.as_tensor(rng.standard_normal(param.shape))
        opt.step(loss=loss)
    return torch.cat([param.detach().ravel() for param in params]), opt.last_step.branch_name


@pytest.mark.parametrize(
    ("slow", "fast"), [(Huber(0.5), SeparableHuber(0.5)), (SparseBox(0.4, 2), StructuredBox(0.4, 2))]
)
@pytest.mark.parametrize("loss", [3.0, 1e6])
def test_steps_are_the_same_with_and_without_structure(slow, fast, loss):
    assert slow.structure((3,)) is None
    assert isinstance(fast.structure((3,)), Entries)
    (one, branch), (other, same) = steps(slow, loss), steps(fast, loss)
    assert branch == same == ("capped" if loss == 1e6 else "inside")
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_separable_ones_act_on_entries_by_themselves():
    assert SeparableHuber(0.5).structure((3,)) == Entries(SeparableHuber(0.5))


def test_structure_is_not_inherited_with_another_prox():
    """Else a step would take the prox of the parent class, and nobody would notice."""

    class Doubled(L1):
        def prox(self, z, alpha):
            return super().prox(z, 2 * alpha)

    class Renamed(L1):
        pass

    assert Doubled(0.1).structure((3,)) == Entries(Doubled(0.1))
    assert Renamed(0.1).structure((3,)) == Entries(Scalar(l1=0.1))
    torch.testing.assert_close(steps(Doubled(0.1), 1e6)[0], steps(L1(0.2), 1e6)[0])
    assert not torch.equal(steps(Doubled(0.1), 1e6)[0], steps(L1(0.1), 1e6)[0])

    class DoubledGroups(GroupLasso):
        def prox(self, z, alpha):
            return super().prox(z, 2 * alpha)

    assert DoubledGroups(0.1).structure((3,)) is None


@dataclass(frozen=True)
class ByShape(Regularizer):
    """lam times the l1 norm of matrices, or of the norms of their rows; vectors are free, or squared."""

    lam: float
    rows: bool = False
    squared: bool = False
    stated: bool = True

    def value(self, x):
        raise NotImplementedError("steps use the prox alone")

    def prox(self, z, alpha):
        if z.ndim == 1:
            return z / (1 + alpha * self.lam) if self.squared else z
        length = z.norm(dim=1, keepdim=True) if self.rows else abs(z)
        return z * (1 - alpha * self.lam / length).clip(0)

    def structure(self, shape):
        if not self.stated:
            return None
        if len(shape) == 1:
            return Quadratic(self.lam) if self.squared else (None if self.rows else Quadratic())
        return Rows(Scalar(l1=self.lam), (1,)) if self.rows else Entries(Scalar(l1=self.lam))


@dataclass(frozen=True)
class Square(Regularizer):
    """lam/2 ||x - center||^2 of a class that is not `L2`."""

    lam: float
    center: float | None = None
    stated: bool = True

    def value(self, x):
        raise NotImplementedError("steps use the prox alone")

    def prox(self, z, alpha):
        return (z + alpha * self.lam * (self.center or 0.0)) / (1 + alpha * self.lam)

    def structure(self, shape):
        return Quadratic(self.lam, self.center) if self.stated else None


SHAPES = ((8, 3), (5,)), ((5,), (8, 3))


@pytest.mark.parametrize("shapes", SHAPES, ids=["matrix first", "vector first"])
@pytest.mark.parametrize(
    "phi",
    [ByShape(0.4), ByShape(0.4, rows=True), ByShape(0.4, squared=True), Square(0.4), Square(0.4, 0.5)],
    ids=["entries", "rows", "squares", "square", "centre"],
)
def test_each_tensor_has_the_structure_of_its_shape(phi, shapes):
    """Steps looked at the first tensor alone, and dropped squares of other classes than L2."""
    found, branch = steps(phi, 3.0, shapes=shapes)
    expected, same = steps(replace(phi, stated=False), 3.0, shapes=shapes)
    assert branch == same
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)


def test_a_square_with_another_prox_is_not_taken_for_l2():
    class Doubled(L2):
        def prox(self, z, alpha):
            return super().prox(z, 2 * alpha)

    torch.testing.assert_close(steps(Doubled(0.1), 1e6)[0], steps(L2(0.2), 1e6)[0], rtol=1e-10, atol=1e-10)
