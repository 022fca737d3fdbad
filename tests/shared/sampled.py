"""The sample of the distance cap, written a second time: which entries of a tensor are compared with their start."""

import numpy as np


def places(n):
    """The indices of the sampled entries of n, by remainders and quotients of Python's integers."""
    if n <= 4096:
        return np.arange(n)

    def mixed(number):
        return (number ^ number // 2**16) * 0x45D9F3B % 2**31

    return np.array([16 * block + mixed(mixed(block)) // 2**27 for block in range(n // 16)])


def sample(flat):
    """The sampled entries of a vector."""
    return flat[places(len(flat))]


def norm_sq(x):
    """||x||^2, estimated from the sample."""
    sampled = sample(np.ravel(x))
    return float((sampled**2).sum()) * np.size(x) / max(1, len(sampled))
