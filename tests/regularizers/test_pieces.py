"""Which regularisers are sums over pieces of a tensor: those that say so are, and those that are say so."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

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

SHAPE = (4, 6)
CENTER = np.linspace(-1, 1, 24).reshape(SHAPE)
ALL = [
    Zero(),
    L2(0.7),
    L2(0.7, CENTER),
    L1(0.4),
    ElasticNet(0.3, 0.5),
    GroupLasso(1.0),
    GroupLasso.rows(0.8, scale_by_size=True),
    GroupLasso.columns(0.8, scale_by_size=True),
    GroupLasso(0.8, (-1,)),
    SparseGroupLasso(0.2, 0.5, (0,)),
    NuclearNorm(0.6),
    TotalVariation1D(0.3),
    NonNegative(),
    Box(-0.3, 0.4),
    LInfBall(0.4),
    L2Ball(1.0),
    L1Ball(2.0),
    Simplex(1.0),
]


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_pieces_are_treated_for_themselves_exactly_where_the_regularizer_says_so(phi, dim):
    z = np.random.default_rng(0).standard_normal(SHAPE)
    edges = [0, 1, SHAPE[dim]]  # uneven
    slices = [tuple(slice(*edge) if d == dim else slice(None) for d in (0, 1)) for edge in itertools.pairwise(edges)]
    pieces = [phi.piece(2, (dim,), lambda array, at=at: array[at]) for at in slices]
    whole = phi.prox(z, 0.9)
    if None in pieces:
        assert pieces == [None, None]
        apart = np.concatenate([phi.prox(z[at], 0.9) for at in slices], axis=dim)
        assert np.abs(apart - whole).max() > 1e-3
        return
    apart = np.concatenate([piece.prox(z[at], 0.9) for piece, at in zip(pieces, slices, strict=True)], axis=dim)
    np.testing.assert_allclose(apart, whole, rtol=0, atol=1e-15)
    values = [piece.value(whole[at]) for piece, at in zip(pieces, slices, strict=True)]
    assert sum(values) == pytest.approx(phi.value(whole), rel=1e-14, abs=1e-14)


@pytest.mark.parametrize("phi", ALL, ids=repr)
def test_separable_regularizers_can_be_cut_along_any_dim(phi):
    cut = [phi.piece(2, dims, lambda array: array) is not None for dims in ((0,), (1,), (0, 1))]
    assert all(cut) == phi.separable
    if not phi.separable:
        assert not cut[2]
