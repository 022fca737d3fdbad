"""The sample of the distance cap: its definition, pieces of tensors, and patterns of entries that stand still."""

from __future__ import annotations

import itertools
import math

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from sampled import places, sample

from proxsps.core.sampling import block_bits, sample_size, sampled_at, sampled_blocks, sampled_square

SHAPES = [(34, 300), (300, 34), (64, 128), (128, 65), (512, 16), (17, 17, 17), (16, 32, 3, 3), (4097,), (2, 9_999)]
STRIDES = (2, 3, 4, 8, 15, 16, 17, 32, 34, 51, 64, 100, 128, 256)


@pytest.mark.parametrize("n", [0, 1, 17, 4096, 4097, 4111, 4112, 100_003])
def test_small_tensors_are_whole_and_others_have_one_entry_per_block(n):
    expected = places(n)
    assert sample_size(n) == len(expected)
    blocks = np.arange(len(expected))
    for integers in (blocks, torch.from_numpy(blocks)):
        assert np.array_equal(sampled_at(integers, block_bits(n)), expected)
    assert [sampled_at(block, block_bits(n)) for block in range(0, len(expected), 97)] == expected[::97].tolist()
    assert np.array_equal(expected // (16 if n > 4096 else 1), blocks)
    assert not n or max(expected) < n
    assert sample_size(n) <= max(4096, n / 16)


@pytest.mark.parametrize("n", [40, 5000])
@pytest.mark.parametrize("cuts", [(), (0,), (1, 15), (16, 33), (17, 18, 19, 34), tuple(range(0, 40, 3))])
def test_pieces_sample_what_the_whole_tensor_would(n, cuts):
    edges = [0, *cuts, n]
    pieces = [sampled_blocks(n, low, high) for low, high in itertools.pairwise(edges)]
    assert [block for piece in pieces for block in piece] == list(sampled_blocks(n)) == list(range(sample_size(n)))
    for (low, high), piece in zip(itertools.pairwise(edges), pieces, strict=True):
        assert all(low <= sampled_at(block, block_bits(n)) < high for block in piece)


def patterns(shape):
    """Many sets of entries, as masks: single rows, columns and channels, the first of each axis, and strides."""
    index = np.arange(math.prod(shape)).reshape(shape)
    for axis, length in enumerate(shape):
        along = np.indices(shape)[axis]
        for place in {0, 1, length // 2, length - 1}:
            yield along == place
        for stride in STRIDES:
            yield along % stride == 0
            yield along % stride == stride - 1
    for stride in STRIDES:
        for offset in (0, 1, stride - 1):
            yield index % stride == offset


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_pattern_of_still_entries_misleads_the_estimate(shape):
    """Of entries that move by 1 while the rest stands still, and the other way round."""
    n = math.prod(shape)
    taken = sample_size(n)
    for still in patterns(shape):
        for moved in (~still, still):
            part = moved.mean()
            found = sampled_square(sample(moved.ravel().astype(float)), n) / n
            # The variance of a random sample, and half an entry of an incomplete block; blocks only lower it.
            assert abs(found - part) <= 4.5 * math.sqrt(part * (1 - part) / taken) + 1 / taken


@pytest.mark.parametrize("as_array", [np.asarray, torch.from_numpy, jnp.asarray], ids=["numpy", "torch", "jax"])
def test_a_scaled_sample_estimates_the_distance_in_every_library(as_array):
    rng = np.random.default_rng(0)
    ratios = []
    for _ in range(20):
        x0, x = rng.standard_normal((2, 80 * 80))
        estimate = sampled_square(as_array(sample(x)), x.size, as_array(sample(x0)))
        ratios.append(float(estimate) / ((x - x0) ** 2).sum())
    # The mean of 400 squares scatters by sqrt(2/400) = 7 %, that of 20 such means by 1.6 %.
    assert np.mean(ratios) == pytest.approx(1, abs=0.06)
    assert np.std(ratios) < 0.12
    assert sampled_square(as_array(np.array([3.0, 1.0])), 2) == 10.0
    assert sampled_square(as_array(np.zeros(0)), 0) == 0.0
