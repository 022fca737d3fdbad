"""Several tensors as one parameter group: each for itself, all as one vector, and one centre for each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from proxsps.regularizers import L1, L2, GroupLasso, L1Ball, L2Ball, Simplex, prox_all, value_all


@pytest.fixture(params=["numpy", "torch"])
def tensors(request):
    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal(shape) for shape in [(3, 4), (5,), (), (2, 1, 2)]]
    return arrays if request.param == "numpy" else [torch.as_tensor(a) for a in arrays]


def joined(xs):
    return np.concatenate([np.ravel(x) for x in xs])


@pytest.mark.parametrize("family", [L1Ball, L2Ball, Simplex])
def test_joint_is_the_prox_of_the_concatenation(family, tensors):
    phi = family(1.5, joint=True)
    ys = prox_all(phi, tensors, 0.7)
    assert [tuple(y.shape) for y in ys] == [tuple(x.shape) for x in tensors]
    # Equal up to the order of summation.
    np.testing.assert_allclose(joined(ys), family(1.5).prox(joined(tensors), 0.7), atol=1e-15)
    assert float(value_all(phi, ys)) == 0
    assert float(value_all(phi, tensors)) == np.inf


@pytest.mark.parametrize("family", [L1Ball, L2Ball, Simplex])
def test_separate_projects_each_tensor(family, tensors):
    phi = family(0.5)
    ys = prox_all(phi, tensors, 0.7)
    for y, x in zip(ys, tensors, strict=True):
        np.testing.assert_array_equal(np.asarray(y), np.asarray(phi.prox(x, 0.7)))
    assert float(value_all(phi, ys)) == 0
    # All tensors together are larger than one of them may be: joint and separate are not the same set.
    assert float(value_all(family(0.5, joint=True), ys)) == np.inf


def test_values_add_up(tensors):
    assert float(value_all(L1(0.3), tensors)) == pytest.approx(0.3 * np.sum(np.abs(joined(tensors))), rel=1e-14)


def test_each_tensor_has_its_own_centre(tensors):
    phi = L2(0.7, center=tensors)
    assert float(value_all(phi, tensors)) == 0
    for y, x in zip(prox_all(phi, [2 * x for x in tensors], 0.5), tensors, strict=True):
        expected = (2 * np.asarray(x) + 0.35 * np.asarray(x)) / 1.35
        np.testing.assert_allclose(np.asarray(y), expected, rtol=1e-15)
    for i, x in enumerate(tensors):
        phi.at(i).check(tuple(x.shape))
    assert L2(0.7).at(3) == L2(0.7)


def test_group_lasso_counts_groups_by_the_other_dims():
    x = np.ones((4, 9))
    assert float(GroupLasso.rows(1.0).value(x)) == 4 * 3
    assert float(GroupLasso.columns(1.0).value(x)) == 9 * 2
    assert float(GroupLasso(1.0).value(x)) == 6
    assert float(GroupLasso.rows(1.0, scale_by_size=True).value(x)) == 4 * 3 * 3
    assert float(GroupLasso(1.0, dims=(-1,)).value(x)) == float(GroupLasso.rows(1.0).value(x))
    assert GroupLasso(1.0, dims=[0, 1]) == GroupLasso(1.0, dims=(0, 1))
    assert float(GroupLasso.filters(1.0).value(np.ones((5, 1, 2, 2)))) == 5 * 2
