"""The compiled passes of averaged slopes: sums against NumPy in doubles, state that a first pass leaves alone."""

from __future__ import annotations

import weakref

import numpy as np
import pytest
import torch
from sampled import sample

pytest.importorskip("numba")

from proxsps.optim import kernels
from proxsps.optim.kernels import layout, moments

SIZES = {
    "one": [[1]],
    "odd": [[63, 64], [65], [16_384 + 7, 16, 17, 18]],
    "empty": [[0], [], [5, 0, 3]],
    "large": [[300_001, 11], [2 * 300_001]],
}
EPS = 1e-8


class Case:
    """Tensors of a step: parameters, gradients, averages and a start, one list per block."""

    def __init__(self, sizes, dtype, adam, start, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw():
            return [[torch.randn(n, generator=generator, dtype=dtype) for n in block] for block in sizes]

        self.x, self.g, self.d, v, far = (draw() for _ in range(5))
        self.v = [[t.square() for t in block] for block in v] if adam else None
        self.x0 = [[sample(t).clone() for t in block] for block in far] if start else None
        count = sum(map(len, sizes))
        old, old_v = np.full(count, 0.9), np.linspace(0.5, 0.999, count)  # tensors may have a count of their own
        self.weights = np.array([old, 1 - old, old_v, 1 - old_v])

    def memory(self):
        at = moments.averages(self.x, self.g, self.d, self.v, self.weights, EPS)
        if at is None or self.x0 is None:
            return at
        start = kernels.start_of(self.x, self.x0, at.like)
        return None if start is None else at._replace(start=start)

    def state(self):
        return [t for lists in (self.x, self.g, self.d, self.v or []) for block in lists for t in block]

    def expected(self):
        """The new tensors x, d, v, D^-1 d and D^-1 g of each tensor, and its terms of all sums, in doubles."""
        for b, block in enumerate(self.x):
            for j, x in enumerate(block):
                place = sum(map(len, self.x[:b])) + j
                yield b, self._expected(b, j, self.weights[:, place], x)

    def _expected(self, b, j, weights, x):
        old, new, old_v, new_v = weights
        x, g, d = (t.double().numpy().copy() for t in (x, self.g[b][j], self.d[b][j]))
        d = old * d + new * g
        v, scale = None, np.ones_like(x)
        if self.v is not None:
            v = old_v * self.v[b][j].double().numpy() + new_v * g**2
            scale = 1 / (np.sqrt(v) + EPS)
        r = scale * d
        terms = [d * r, d * x, x * x, g * x, (scale * g) ** 2, r * r, r * x]
        moved = 0.0
        if self.x0 is not None and len(x):
            far = sample(x) - self.x0[b][j].double().numpy()
            moved = (far**2).sum() * len(x) / len(far)
        return x, d, v, r, terms, moved


def cases(name, dtype, adam, start=True):
    return Case(SIZES[name], dtype, adam, start)


both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
both_metrics = pytest.mark.parametrize("adam", [False, True], ids=["identity", "adam"])


@both_dtypes
@both_metrics
@pytest.mark.parametrize("name", SIZES)
def test_sums_agree_with_double_precision_and_leave_everything_as_it_was(name, adam, dtype):
    case = cases(name, dtype, adam)
    before = [t.clone() for t in case.state()]
    got = moments.sums(case.memory())
    assert all(map(torch.equal, case.state(), before))
    want, sizes = np.zeros((2, 8, len(case.x)))
    for b, (*_, terms, moved) in case.expected():
        want[:7, b] += [t.sum() for t in terms]
        sizes[:7, b] += [np.abs(t).sum() for t in terms]
        want[7, b] += moved
        sizes[7, b] += moved
    bound = (layout.RUN + 16) * torch.finfo(dtype).eps / 2  # a run is summed in the dtype, the rest in doubles
    assert (np.abs(np.array(got) - want) <= bound * sizes + 1e-300).all()


@both_dtypes
@both_metrics
@pytest.mark.parametrize("name", SIZES)
def test_writes_agree_with_double_precision(name, adam, dtype):
    case = cases(name, dtype, adam)
    expected = list(case.expected())
    grads = [g.clone() for block in case.g for g in block]
    keep, move = np.linspace(0.5, 1, len(case.x)), np.linspace(-0.3, -0.1, len(case.x))
    moments.write(case.memory(), keep, move)
    eps = torch.finfo(dtype).eps
    assert all(map(torch.equal, (g for block in case.g for g in block), grads))
    places = [(b, j) for b, block in enumerate(case.x) for j in range(len(block))]
    for (b, (x, d, v, r, _, _)), (_, j) in zip(expected, places, strict=True):
        slope = np.abs(case.g[b][j].double().numpy()) + np.abs(d)  # d may be a small difference
        assert (np.abs(case.d[b][j].double().numpy() - d) <= 4 * eps * slope).all()
        if adam:
            assert (np.abs(case.v[b][j].double().numpy() - v) <= 4 * eps * v).all()
            slope = slope / (np.sqrt(v) + EPS)
        want = keep[b] * x + move[b] * r
        assert (np.abs(case.x[b][j].double().numpy() - want) <= 8 * eps * (np.abs(x) + slope)).all()


@both_dtypes
def test_without_memory_of_older_gradients_writes_are_bitwise_those_of_the_plain_kernel(dtype):
    case, plain = cases("odd", dtype, False), cases("odd", dtype, False)
    case.weights[0], case.weights[1] = 0.0, 1.0
    keep, move = np.full(3, 0.97), np.array([-0.1, -0.2, -0.3])
    averaged, simple = moments.sums(case.memory()), kernels.sums(kernels.memory(plain.x, plain.g), np.zeros(3), True)
    np.testing.assert_allclose(averaged[:3], simple, rtol=200 * torch.finfo(dtype).eps)
    assert np.array_equal(averaged.d_sq, averaged.g_sq)
    assert np.array_equal(averaged.d_dot_x, averaged.g_dot_x)  # so that the averaged value is exactly the loss
    moments.write(case.memory(), keep, move)
    kernels.write(kernels.memory(plain.x, plain.g), keep, move)
    for b in range(3):
        assert all(map(torch.equal, case.x[b], plain.x[b]))
        assert all(map(torch.equal, case.d[b], plain.g[b]))


@both_metrics
def test_the_number_of_threads_does_not_change_a_bit(monkeypatch, adam):
    before = torch.get_num_threads()
    monkeypatch.setattr(layout, "ALONE", 4 * layout.CHUNK)
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            layout.layout.cache_clear()
            case = cases("large", torch.float32, adam)
            sums = moments.sums(case.memory())
            moments.write(case.memory(), np.full(2, 0.9), np.full(2, -0.2))
            results.append((np.array(sums), case.state()))
    finally:
        torch.set_num_threads(before)
        layout.layout.cache_clear()
    for sums, state in results[1:]:
        assert np.array_equal(sums, results[0][0])
        assert all(map(torch.equal, state, results[0][1]))


@both_metrics
def test_entries_that_are_not_finite_show_in_the_sums(adam):
    for name in "xg":
        for bad in (np.nan, np.inf):
            case = cases("odd", torch.float32, adam)
            getattr(case, name)[2][0][16_389] = bad
            sums = moments.sums(case.memory())
            assert not np.isfinite([sums.d_sq[2], sums.d_dot_x[2]]).all()
            assert np.isfinite(np.array(sums)[:, :2]).all()


def test_a_step_in_adams_metric_takes_slopes_whose_squares_leave_single_precision():
    case = cases("odd", torch.float32, True)
    for block in case.g:
        for g in block:
            g *= 1e18
    sums = moments.sums(case.memory())
    want = np.zeros(3)
    for b, (*_, terms, _) in case.expected():
        want[b] += terms[0].sum()
    np.testing.assert_allclose(sums.d_sq, want, rtol=1e-4)


NOT_TAKEN = {
    "half": lambda case: case.x[0].__setitem__(0, case.x[0][0].bfloat16()),
    "average of another dtype": lambda case: case.d[0].__setitem__(0, case.d[0][0].double()),
    "average of another size": lambda case: case.d[0].__setitem__(0, case.d[0][0][:-1].clone()),
    "square with gaps": lambda case: case.v[0].__setitem__(0, torch.ones(126)[::2]),
    "start of another size": lambda case: case.x0[0].__setitem__(0, case.x0[0][0][:-1].clone()),
    "start of another dtype": lambda case: case.x0[0].__setitem__(0, case.x0[0][0].double()),
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_other_tensors_are_not_taken(name):
    case = cases("odd", torch.float32, True)
    assert case.memory() is not None
    NOT_TAKEN[name](case)
    assert case.memory() is None


def test_channels_last_parameters_are_taken_but_their_samples_are_not():
    x, g, d = (torch.randn(3, 5, 4, 2).to(memory_format=torch.channels_last) for _ in range(3))
    weights = np.array([[0.9], [0.1]])
    at = moments.averages([[x]], [[g]], [[d]], None, weights)
    assert at is not None
    assert moments.averages([[x]], [[g]], [[d.contiguous()]], None, weights) is None
    assert kernels.start_of([[x]], [[sample(x.ravel())]], at.like) is None


@both_dtypes
@pytest.mark.parametrize("points", [True, False])
@pytest.mark.parametrize("name", SIZES)
def test_plain_sums_measure_the_distance_too(name, points, dtype):
    case = cases(name, dtype, False)
    at = kernels.memory(case.x, case.g)
    lam = np.zeros(len(case.x))
    got = kernels.sums(at, lam, points, kernels.start_of(case.x, case.x0, at.like))
    want = np.zeros(len(case.x))
    for b, (*_, moved) in case.expected():
        want[b] += moved
    np.testing.assert_allclose(got[3], want, rtol=4 * torch.finfo(dtype).eps)
    assert np.array_equal(got[:3], kernels.sums(at, lam, points))


# -- checks of state tensors that are remembered -------------------------------------------------------------------


def state():
    return [torch.randn(n) for n in (5, 70, 3)]


def test_state_tensors_are_checked_once_while_they_stay_where_they_are():
    tensors = state()
    first = layout.contiguous_addresses(tensors)
    assert layout.contiguous_addresses(list(tensors)) is first
    assert first.at.tolist() == [t.data_ptr() for t in tensors]


CHANGES = {
    "other memory": lambda tensors: tensors[1].set_(torch.randn(70)),
    "another tensor": lambda tensors: tensors.__setitem__(2, torch.randn(3)),
    "fewer tensors": lambda tensors: tensors.pop(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_state_tensors_that_changed_are_checked_again(name):
    tensors = state()
    before = layout.contiguous_addresses(tensors)
    CHANGES[name](tensors)
    after = layout.contiguous_addresses(tensors)
    assert after is not before
    assert after.at.tolist() == [t.data_ptr() for t in tensors]


def test_state_tensors_that_became_unfit_are_not_taken():
    tensors = state()
    assert layout.contiguous_addresses(tensors) is not None
    tensors[1] = torch.randn(70, dtype=torch.float64)
    assert layout.contiguous_addresses(tensors) is None
    tensors[1] = torch.randn(140)[::2]
    assert layout.contiguous_addresses(tensors) is None


def test_what_is_remembered_keeps_no_tensor_alive_and_does_not_grow():
    tensors = state()
    layout.contiguous_addresses(tensors)
    seen = weakref.ref(tensors[1])
    del tensors
    assert seen() is None
    kept = [state() for _ in range(2 * layout.REMEMBERED)]
    for other in kept:
        layout.contiguous_addresses(other)
    assert len(layout._checked) <= layout.REMEMBERED
