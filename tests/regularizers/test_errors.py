"""Each refusal says what was wrong, what was got, and what to do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

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
    TotalVariation1D,
    Zero,
)

WEIGHTED = {
    "L1": L1,
    "L2": L2,
    "ElasticNet-l1": lambda w: ElasticNet(w, 1.0),
    "ElasticNet-l2": lambda w: ElasticNet(1.0, w),
    "GroupLasso": GroupLasso,
    "GroupLasso-filters": GroupLasso.filters,
    "SparseGroupLasso-l1": lambda w: SparseGroupLasso(w, 1.0),
    "SparseGroupLasso-lam": lambda w: SparseGroupLasso(1.0, w),
    "NuclearNorm": NuclearNorm,
    "TotalVariation1D": TotalVariation1D,
}


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights(name, bad):
    with pytest.raises(ValueError, match=rf"{name.split('-')[0]}: \w+ must be a finite number >= 0, got {bad}; use"):
        WEIGHTED[name](bad)


@pytest.mark.parametrize("bad", [0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("family", [L1Ball, L2Ball, LInfBall, Simplex])
def test_radii(family, bad):
    with pytest.raises(ValueError, match=rf"{family.__name__}: radius must be a finite number > 0, got {bad}; give"):
        family(bad)


@pytest.mark.parametrize(
    ("lower", "upper"), [(1.0, 0.0), (math.nan, 0.0), (0.0, math.nan), (math.inf, math.inf), (-math.inf, -math.inf)]
)
def test_box_bounds(lower, upper):
    with pytest.raises(ValueError, match=rf"got lower={lower}, upper={upper}; give the smaller bound first"):
        Box(lower, upper)


@pytest.mark.parametrize("dims", [(), (1, 1), (0.5,), "0"])
@pytest.mark.parametrize("family", [GroupLasso, lambda lam, dims: SparseGroupLasso(0.1, lam, dims)])
def test_dims(family, dims):
    with pytest.raises(ValueError, match=r"dims must be distinct integers, at least one, got .*; use dims=None"):
        family(1.0, dims)


@pytest.mark.parametrize(
    ("dims", "shape"), [((1,), (3,)), ((-2,), (3,)), ((0, -1), (3,)), ((0,), ()), ((1, 2, 3), (3, 4))]
)
def test_dims_that_the_tensor_lacks(dims, shape):
    for phi in (GroupLasso(1.0, dims), SparseGroupLasso(0.1, 1.0, dims)):
        with pytest.raises(
            ValueError, match=r"do not name distinct dims of a tensor of shape \(.*put this tensor into"
        ):
            phi.check(shape)


def test_shapes_that_fit_pass(case):
    case.phi.check(case.shape)


@pytest.mark.parametrize("shape", [(), (5,)])
def test_nuclear_norm_needs_a_matrix(shape):
    with pytest.raises(ValueError, match=r"needs a matrix or a tensor of more dims, got shape \(.*put vectors"):
        NuclearNorm(1.0).check(shape)


def test_total_variation_needs_a_dim():
    with pytest.raises(ValueError, match=r"at least one dim, got a scalar"):
        TotalVariation1D(1.0).check(())


def test_simplex_needs_an_entry():
    with pytest.raises(ValueError, match=r"at least one entry, got shape \(0, 3\)"):
        Simplex().check((0, 3))


def test_centre_of_another_shape():
    with pytest.raises(ValueError, match=r"center has shape \(3,\), the tensor \(4,\); give a centre"):
        L2(1.0, np.zeros(3)).check((4,))


def test_centres_of_a_group_need_an_index():
    phi = L2(1.0, [np.zeros(3), np.zeros(2)])
    phi.check((3,))
    with pytest.raises(ValueError, match=r"holds 2 arrays and belongs to a group of tensors.*use at\(i\)"):
        phi.prox(np.zeros(3), 1.0)
    with pytest.raises(ValueError, match=r"holds 2 arrays, but the group has a tensor number 2"):
        phi.at(2)


@pytest.mark.parametrize("library", [np, torch], ids=["numpy", "torch"])
def test_integers_are_not_points(library):
    for phi in (L1(0.1), L2(0.1), Box(0, 1), GroupLasso(0.1), NonNegative(), Zero()):
        with pytest.raises(TypeError, match=rf"{type(phi).__name__}: z must be a real floating-point array, got dtype"):
            phi.prox(library.asarray([1, 2]), 1.0)
    with pytest.raises(TypeError, match="functions of real floating-point arrays, got dtype"):
        L1(0.1).value(library.asarray([1, 2]))


def test_negative_step_sizes():
    z = np.ones(3)
    for phi in (L1(0.5), Box(0, 1)):
        with pytest.raises(ValueError, match=rf"{type(phi).__name__}: alpha must be a number > 0, got -1.0"):
            phi.prox(z, -1.0)
        with pytest.raises(ValueError, match="alpha must be a number > 0"):
            phi.prox_jvp(z, z, z, alpha=-1.0)


def test_constants_that_are_no_numbers_are_named():
    for make, where in (
        (lambda: L1("a"), "L1: lam"),
        (lambda: L2(None), "L2: lam"),
        (lambda: L2Ball("1"), "L2Ball: radius"),
        (lambda: Box("a", 1), "Box: lower"),
        (lambda: ElasticNet(0.1, [1]), "ElasticNet: l2"),
    ):
        with pytest.raises(TypeError, match=rf"{where} must be a number, got"):
            make()


def test_bounds_may_be_equal_but_not_swapped():
    assert Box(0, 0).prox(np.ones(2), 1.0).tolist() == [0, 0]
    with pytest.raises(ValueError, match="Box: lower must be <= upper, and a finite number must lie between them"):
        Box(1, 0)
