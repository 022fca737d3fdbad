"""Heights between two points from the entries that change their branch there: the same as from all entries."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("numba")

from proxsps.optim import ProxSPS, ProxSPSAdam, host
from proxsps.optim.kernels.between import ROOM
from proxsps.optim.kernels.layout import CHUNK
from proxsps.regularizers import L1, Box, ElasticNet, LInfBall, NonNegative

SHAPES = ((211, 307), (30_011,), (97, 53), (1_023,), (7,))
REGULARIZERS = [L1(0.2), ElasticNet(0.2, 0.5), NonNegative(), Box(-0.7, 0.9), Box(0.3, 0.9), LInfBall(0.6)]
METHODS = {
    "gradient": (ProxSPS, {}),
    "average": (ProxSPS, {"momentum": 0.9}),
    "adam": (ProxSPSAdam, {"cap": "proximal"}),
}
CAP = 0.3

of_both_dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
of_all_methods = pytest.mark.parametrize("method", METHODS)


def drawn(dtype, spread=1.0, shapes=SHAPES):
    generator = torch.Generator().manual_seed(3)
    params = []
    for shape in shapes:
        x, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        params.append(torch.nn.Parameter((1 + spread * x).to(dtype)))
        params[-1].grad = (1 + spread * (noise + 0.5 * x)).to(dtype)
    return params


def part_of(params, phi, method):
    """The part of a plan after some steps, with averages that differ from the gradients."""
    kind, options = METHODS[method]
    opt = kind(
        [{"params": params[:2], "regularizer": phi}, {"params": params[2:], "weight_decay": 0.1}], lr=CAP, **options
    )
    for _ in range(3):
        opt.step(loss=torch.tensor(0.01 * sum(p.numel() for p in params)))
    (member,) = opt._plan.parts
    assert opt._plan.holds(opt)
    assert member.part.curved
    opt._plan.prepare(3.0, opt._plan.lam)
    member.part.keeps = opt  # and so the memory that it reads
    return member.part


def count_passes(part, monkeypatch):
    """Counts the passes over all entries."""
    passes, full = [], type(part)._pass
    monkeypatch.setattr(
        type(part), "_pass", lambda self, *args, **kwargs: passes.append(1) or full(self, *args, **kwargs)
    )
    return passes


@of_both_dtypes
@of_all_methods
@pytest.mark.parametrize("phi", REGULARIZERS, ids=str)
@pytest.mark.parametrize("ends", [(0.4, 0.41), (1e-3, 2e-3), (0.98, 1.0)], ids=str)
def test_heights_are_those_of_a_pass_over_all_entries(phi, method, dtype, ends, monkeypatch):
    part = part_of(drawn(dtype), phi, method)
    low, high = ends
    u = [low, low + 0.3 * (high - low), high]
    alpha = [CAP, CAP]
    expected = part.heights(alpha, u)
    table, at_ends = part.sums(alpha, [low, high])
    passes = count_passes(part, monkeypatch)
    found = part.heights(alpha, u)
    assert not passes
    assert 0 < part._between.counts.sum() < 2_000  # some entries change their branch
    scale = torch.finfo(dtype).eps * sum(abs(number) for number in (*table[0], *table[1]))
    assert found.h == pytest.approx(expected.h, rel=1e-12, abs=scale)
    assert [at_ends.h[0], at_ends.h[1]] == pytest.approx([expected.h[0], expected.h[2]], rel=1e-12, abs=scale)
    # A slope inside follows from the difference of two heights.
    inside = scale / (high - low) + 1e-3 * abs(expected.slope[1])
    assert found.slope[1] == pytest.approx(expected.slope[1], abs=inside)


@of_all_methods
def test_sums_do_not_depend_on_the_points(method):
    part = part_of(drawn(torch.float64), L1(0.2), method)
    expected, _ = part.sums([CAP, CAP], [])
    for u in ([1.0], [0.4, 0.41]):
        found, heights = part.sums([CAP, CAP], u)
        assert found[0] == pytest.approx(expected[0], rel=1e-12)
        assert all(a == pytest.approx(b, rel=1e-12) for a, b in zip(found, expected, strict=True))
        assert heights.h == pytest.approx(part.heights([CAP, CAP], u).h, rel=1e-11)


def test_points_outside_other_caps_and_gradients_take_a_pass(monkeypatch):
    params = drawn(torch.float32)
    part = part_of(params, L1(0.2), "gradient")
    part.sums([CAP, CAP], [0.4, 0.41])
    passes = count_passes(part, monkeypatch)
    part.heights([CAP, CAP], [0.405])
    assert not passes
    part.heights([CAP, CAP], [0.42])
    part.heights([2 * CAP, CAP], [0.405])
    assert len(passes) == 2
    part.sums([CAP, CAP], [0.4, 0.405, 0.41])  # which lists nothing
    part.heights([CAP, CAP], [0.405])
    assert len(passes) == 4


@of_all_methods
def test_where_too_many_entries_change_their_branch_heights_take_passes(method, monkeypatch):
    part = part_of(drawn(torch.float32, 1e-3), L1(0.2), method)  # nearly equal entries reach 0 together
    alpha = [8.0, 8.0]
    expected = part.heights(alpha, [0.3])
    part.sums(alpha, [0.0, 1.0])
    assert part._between.counts.max() > ROOM
    passes = count_passes(part, monkeypatch)
    assert part.heights(alpha, [0.3]) == expected
    assert passes


@of_both_dtypes
@of_all_methods
@pytest.mark.parametrize("spread", [1.0, 1e-3, 0.0])
def test_a_step_is_the_same_as_with_passes_over_all_entries(method, dtype, spread, monkeypatch):
    monkeypatch.setattr(host, "WORTH", 10_000)
    kind, options = METHODS[method]
    found = {}
    for sampled in (True, False):
        params = drawn(dtype, spread, (*SHAPES, (3 * CHUNK + 5,)))
        opt = kind(params, lr=CAP, regularizer=L1(0.01), **options)
        if not sampled:
            monkeypatch.setattr(host, "first_points", lambda *args: [1.0])
        for part in (0.4, 0.3, 0.3):
            opt.step(loss=torch.tensor(part * CAP * sum(p.numel() for p in params), dtype=torch.float64))
            assert opt.last_step.branch_name == "inside"
        found[sampled] = torch.cat([p.detach().reshape(-1) for p in params])
    accuracy = 1e-5 if dtype is torch.float32 else 1e-10
    torch.testing.assert_close(found[True], found[False], rtol=accuracy, atol=accuracy)


def test_lists_do_not_depend_on_the_number_of_threads():
    found = []
    for threads in (1, 2):
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            part = part_of(drawn(torch.float32, shapes=((1 << 21,), (30_011,), (97, 53))), L1(0.2), "adam")
            _, heights = part.sums([CAP, CAP], [0.4, 0.41])
            found.append((heights, part.heights([CAP, CAP], [0.405]), part._between.counts.tolist()))
        finally:
            torch.set_num_threads(before)
    assert found[0] == found[1]
