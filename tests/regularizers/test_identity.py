"""Equality, hash and text cover everything that changes a result: numbers, arrays by content, whatever a user adds."""

from __future__ import annotations

import copy
import gc
import pickle
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from proxsps import ProxSPS
from proxsps.regularizers import L1, L2, Regularizer, Zero
from proxsps.regularizers._identity import _digests, identity

ONES, TWOS = np.ones(70), np.full(70, 2.0)
LIBRARIES = {
    "numpy": lambda x: np.array(x),
    "torch": lambda x: torch.tensor(x),
    "bfloat16": lambda x: torch.tensor(x, dtype=torch.bfloat16),
    "jax": lambda x: jnp.array(x),
}


class Entrywise(Regularizer):
    """A weighted sum of absolute values, as users write it."""

    def value(self, x):
        return (self.weights * abs(x)).sum()

    def prox(self, z, alpha):
        return z - z.clip(-alpha * self.weights, alpha * self.weights)


@dataclass(frozen=True)
class Weighted(Entrywise):
    weights: Any


@dataclass(frozen=True)
class Hidden(Entrywise):
    weights: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Slotted(Entrywise):
    weights: Any


class Plain(Entrywise):
    def __init__(self, weights):
        self.weights = weights


class Undecorated(L1):
    """Adds to the fields of its base."""

    def __init__(self, weights):
        super().__init__(0.5)
        object.__setattr__(self, "weights", weights)


@dataclass(frozen=True)
class Inside:
    weights: Any


@dataclass(frozen=True)
class Nested(Entrywise):
    inner: Inside

    @property
    def weights(self):
        return self.inner.weights


KINDS = {
    "L2": lambda w: L2(0.1, w),
    "L2-list": lambda w: L2(0.1, [w, None]),
    "L2-long-list": lambda w: L2(0.1, [None, w] * 20),
    "field": Weighted,
    "field out of comparison": Hidden,
    "slots": Slotted,
    "no dataclass": Plain,
    "undecorated": Undecorated,
    "nested": lambda w: Nested(Inside(w)),
    "regulariser in a list": lambda w: Weighted([L2(1.0, w)]),
    "dictionary": lambda w: Weighted({"a": w}),
}


@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("array", LIBRARIES.values(), ids=LIBRARIES)
def test_arrays_count_by_their_content(make, array):
    phi, same, other = make(array(ONES)), make(array(ONES)), make(array(TWOS))
    assert phi == same
    assert hash(phi) == hash(same)
    assert repr(phi) == repr(same)
    assert phi != other
    assert hash(phi) != hash(other)
    assert repr(phi) != repr(other)
    assert len(repr(phi)) < 120
    for copied in (copy.deepcopy(phi), pickle.loads(pickle.dumps(phi))):
        assert phi == copied
        assert repr(phi) == repr(copied)


def test_shape_and_precision_count():
    assert L2(0.1, np.ones((2, 3))) != L2(0.1, np.ones((3, 2)))
    assert L2(0.1, np.ones(3)) != L2(0.1, np.ones(3, "float32"))
    assert L2(0.1, np.zeros(3)) != L2(0.1, np.zeros(3, "int64"))
    assert L2(0.1, np.ones(3)) != L2(0.1)
    assert L2(0.1, 1.0) != L2(0.1)
    assert L2(0.1, 1.0) == L2(0.1, 1)
    assert L2(0.1, np.zeros(0)) == L2(0.1, np.zeros(0))
    assert L2(0.1) != L1(0.1)
    assert L1(0.1) != 0.1


def test_a_single_bit_counts():
    near = ONES.copy()
    near[33] = np.nextafter(1.0, 2.0)
    assert L2(0.1, ONES) != L2(0.1, near)
    assert repr(L2(0.1, ONES)) != repr(L2(0.1, near))


def test_memory_layout_does_not_count():
    x = np.arange(12.0).reshape(3, 4)
    assert L2(0.1, x) == L2(0.1, np.asfortranarray(x)) == L2(0.1, np.repeat(x, 2, axis=1)[:, ::2])
    t = torch.arange(12.0)
    assert L2(0.1, t) == L2(0.1, torch.stack([t, t], 1)[:, 0])
    assert L2(0.1, -t) == L2(0.1, torch._neg_view(t))
    assert L2(0.1, t) != L2(0.1, torch._neg_view(t))
    assert L2(0.1, t) == L2(0.1, t.clone().requires_grad_())


def test_the_text_shows_shape_and_digest():
    assert repr(L2(0.1)) == "L2(lam=0.1)"  # as in older checkpoints
    assert repr(L2(0.1, 0.3)) == "L2(lam=0.1, center=0.3)"
    assert repr(L1(0.1)) == "L1(lam=0.1)"
    text = repr(L2(0.1, np.ones((2, 3), "float32")))
    assert text.startswith("L2(lam=0.1, center=<float32 (2, 3) ")
    assert text == repr(L2(0.1, torch.ones(2, 3)))  # a checkpoint does not tell where the centre lay
    assert repr(L2(0.1, [np.ones(2)] * 30)).startswith("L2(lam=0.1, center=<30 arrays ")


def test_changes_in_place_are_seen():
    for center in (np.ones(3), torch.ones(3)):
        phi = L2(0.1, center)
        text, key = repr(phi), hash(phi)
        center[1] = 5.0
        assert repr(phi) != text
        assert hash(phi) != key


def test_what_is_derived_does_not_count():
    class Derived(Weighted):
        @cached_property
        def total(self):
            return object()

    phi = Derived(ONES)
    assert phi.total is not None
    assert phi == Derived(ONES)


def test_own_methods_of_a_user_stay():
    @dataclass(frozen=True)
    class Named(Weighted):
        def __repr__(self):
            return "named"

        def __eq__(self, other):
            return True

        __hash__ = None

    assert repr(Named(ONES)) == "named"
    assert Named(ONES) == Named(TWOS)
    with pytest.raises(TypeError, match="unhashable"):
        hash(Named(ONES))


UNREADABLE = {
    "meta": lambda: torch.ones(3, device="meta"),
    "deleted": lambda: _deleted(jnp.ones(3)),
    "object": lambda: np.array([None, 1], dtype=object),
}


def _deleted(x):
    x.delete()
    return x


@pytest.mark.parametrize("make", UNREADABLE.values(), ids=UNREADABLE)
def test_arrays_that_cannot_be_read_count_as_themselves(make):
    array = make()
    assert Weighted(array) == Weighted(array)
    assert Weighted(array) != Weighted(make())
    assert hash(Weighted(array)) == hash(Weighted(array))
    assert repr(Weighted(array)) == repr(Weighted(make()))  # no address, which would differ in every run


def test_traced_arrays_count_as_themselves():
    @jax.jit
    def look(a, b):
        assert L2(0.1, a) == L2(0.1, a)
        assert hash(L1(a[0])) != hash(L1(b[0]))
        assert L2(0.1, a) != L2(0.1, b)
        assert repr(L2(0.1, a)) == "L2(lam=0.1, center=<float32 (3,)>)"
        return a

    look(jnp.ones(3), jnp.ones(3))


def test_digests_of_jax_arrays_are_kept_as_long_as_the_arrays():
    center = jnp.arange(5.0)
    gc.collect()
    before = len(_digests)
    first = identity(L2(0.1, center))
    assert len(_digests) == before + 1
    assert identity(L2(0.1, center)) == first
    del center, first
    gc.collect()
    assert len(_digests) == before


# What stands on it


@pytest.mark.parametrize("array", [np.array, jnp.array], ids=["numpy", "jax"])
@pytest.mark.parametrize("family", [lambda w: L2(1.0, w), Weighted], ids=["L2", "own"])
def test_a_static_regularizer_of_jit_is_never_taken_for_another(array, family):
    step = jax.jit(lambda phi, z: phi.prox(z, 1.0), static_argnums=0)
    z = jnp.full(70, 5.0)
    for content in (ONES, TWOS, ONES):
        np.testing.assert_allclose(step(family(array(content)), z), family(content).prox(np.full(70, 5.0), 1.0))
    assert step._cache_size() == 2


@pytest.mark.parametrize("family", [lambda w: L2(1.0, w), lambda w: L2(1.0, [w]), Weighted], ids=["L2", "list", "own"])
def test_a_checkpoint_with_another_array_is_warned_of(family):
    def optimizer(content):
        return ProxSPS([torch.nn.Parameter(torch.zeros(70))], regularizer=family(torch.tensor(content)))

    saved = pickle.loads(pickle.dumps(optimizer(ONES).state_dict()))
    optimizer(ONES).load_state_dict(saved)
    with pytest.warns(UserWarning, match=r"The checkpoint has regularizer=.*70,\) \w{12}>.* and keeps it"):
        optimizer(TWOS).load_state_dict(saved)


# Numbers as centres


CENTERS = {
    "float": lambda like: 0.3,
    "int": lambda like: 1,
    "numpy scalar": lambda like: np.float64(0.3),
    "0-d array": lambda like: like.reshape(-1)[0] * 0 + 0.3,
}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("make", CENTERS.values(), ids=CENTERS)
def test_a_number_as_centre(library, make):
    x = {"numpy": np.array, "torch": torch.tensor, "jax": jnp.array}[library]([[1.0, -2.0], [0.5, 3.0]])
    center = make(x)
    phi, full = L2(0.7, center), L2(0.7, x * 0 + center)
    phi.check((2, 2))
    assert phi.piece(2, (0,), lambda array: array[:1]) is phi
    for got, expected in (
        (phi.prox(x, 0.4), full.prox(x, 0.4)),
        (phi.prox_diagonal(x, abs(x)), full.prox_diagonal(x, abs(x))),
        (phi.value(x), full.value(x)),
        (phi.subgradient(x), full.subgradient(x)),
        (L2(0.7, [0.1, center]).at(1).prox(x, 0.4), full.prox(x, 0.4)),
    ):
        assert got.dtype == x.dtype
        np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_a_number_as_centre_of_an_optimizer():
    points = []
    for center in (0.3, torch.full((70,), 0.3)):
        p = torch.nn.Parameter(torch.linspace(-1, 1, 70))
        p.grad = torch.ones(70)
        ProxSPS([p], lr=0.1, regularizer=L2(0.7, center)).step(loss=1.0)
        points.append(p.detach())
    torch.testing.assert_close(*points)


@pytest.mark.parametrize("bad", ["a", np.nan, np.inf, [0.1, "a"], object()])
def test_centres_that_are_none(bad):
    with pytest.raises(ValueError, match="L2: center must be a finite number, an array of the tensor's shape"):
        L2(0.1, bad)


def test_constants_of_jax_are_checked_where_they_have_a_value():
    with pytest.raises(ValueError, match="lam must be a finite number >= 0"):
        L1(jnp.float32(-1.0))
    with pytest.raises(ValueError, match="lam must be a finite number >= 0"):
        jax.jit(lambda w: L1(w).lam)(jnp.ones(3))
    assert Zero() == Zero()
