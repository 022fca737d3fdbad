"""Orthogonalised directions: every way to compute them gives those of the core."""

from __future__ import annotations

import math

import pytest
import torch

from proxsps import ScheduleFreeSPS
from proxsps.core.schedule_free import counted, orthogonalized
from proxsps.optim import spectral
from proxsps.optim.plan import Plan

SHAPES = {"square": (3, 67, 67), "wide": (2, 16, 144), "tall": (2, 144, 16), "a little wide": (2, 65, 70)}


@pytest.fixture
def drawn() -> torch.Generator:
    return torch.Generator().manual_seed(0)


@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 3e-5), (torch.float64, 1e-13)])
def test_all_forms_of_the_iteration_agree(
    drawn: torch.Generator, shape: tuple[int, ...], dtype: torch.dtype, tolerance: float, few: bool
) -> None:
    d = torch.randn(shape, generator=drawn, dtype=dtype)
    wanted = orthogonalized(d)
    assert torch.linalg.vector_norm(spectral.orthogonal(d, few) - wanted) <= tolerance * torch.linalg.vector_norm(
        wanted
    )


@pytest.mark.parametrize("shape", [(2, 130, 150), (2, 150, 130)])
def test_large_matrices_in_bf16_where_the_cpu_multiplies_it(
    drawn: torch.Generator, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]
) -> None:
    d = torch.randn(shape, generator=drawn)
    wanted = orthogonalized(d)
    for fast, low, high in ((False, 0.0, 1e-5), (True, 1e-4, 0.03)):  # bf16 has eight bits
        monkeypatch.setattr(spectral, "_multiplies_bf16", lambda fast=fast: fast)
        off = torch.linalg.vector_norm(spectral.orthogonal(d) - wanted) / torch.linalg.vector_norm(wanted)
        assert low <= off <= high


@pytest.mark.parametrize("decades", [3, 9])
def test_gram_matrices_keep_directions_with_small_singular_values(drawn: torch.Generator, decades: int) -> None:
    left = torch.linalg.qr(torch.randn(16, 16, generator=drawn, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(144, 16, generator=drawn, dtype=torch.float64))[0]
    d = (left * torch.logspace(0, -decades, 16, dtype=torch.float64)) @ right.T
    found = spectral.orthogonal(d.float()[None])[0].double()
    wanted = orthogonalized(d)
    # Rounding of A in f32 shows in P by 6e-8 (a^2)^4, about 1e-3.
    assert torch.linalg.vector_norm(found - wanted) <= 1e-3 * torch.linalg.vector_norm(wanted)


@pytest.mark.parametrize("small", [1.0, 1e-1, 1e-2, 1e-3])
def test_wide_matrices_in_bf16_with_one_large_singular_value(
    drawn: torch.Generator, monkeypatch: pytest.MonkeyPatch, small: float
) -> None:
    monkeypatch.setattr(spectral, "_multiplies_bf16", lambda: True)
    left = torch.linalg.qr(torch.randn(128, 128, generator=drawn, dtype=torch.float64))[0]
    right = torch.linalg.qr(torch.randn(512, 128, generator=drawn, dtype=torch.float64))[0]
    d = (left * torch.tensor([1.0] + 127 * [small], dtype=torch.float64)) @ right.T
    wanted = orthogonalized(d)

    def off(found: torch.Tensor) -> float:
        return float(torch.linalg.vector_norm(found.double() - wanted) / torch.linalg.vector_norm(wanted))

    own, X = d.float()[None], (d / torch.linalg.vector_norm(d)).bfloat16()
    # A dozen more roundings to eight bits, of up to 0.004 each.
    assert off(spectral.orthogonal(own)[0]) <= off(spectral._iterated(X)) + 0.05
    assert off(spectral.orthogonal(own.mT)[0].mT) <= off(spectral._iterated(X)) + 0.05
    if small == 1e-2:  # where all rounds from one A would go wrong
        assert off(spectral._by_gram(X, spectral.ROUNDS)) > 1


@pytest.mark.parametrize("fast", [False, True], ids=["f32", "bf16"])
@pytest.mark.parametrize("few", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES.values(), (1, 130, 150), (1, 130, 400)], ids=str)
def test_directions_do_not_depend_on_the_scale(
    drawn: torch.Generator, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], few: bool, fast: bool
) -> None:
    """Bitwise for powers of two, over 33 decades."""
    monkeypatch.setattr(spectral, "_multiplies_bf16", lambda: fast)
    d = torch.randn(shape, generator=drawn)
    wanted = spectral.orthogonal(d, few)
    for power in (-56, -40, -24, 24, 40, 56):
        scaled = torch.ldexp(d, torch.tensor(power))
        assert torch.equal(spectral.orthogonal(scaled, few), wanted)
        assert torch.equal(orthogonalized(scaled), orthogonalized(d))
    for power in (-64, -76, -100, -140):  # squares are no normal numbers any more
        assert torch.linalg.vector_norm(spectral.orthogonal(torch.ldexp(d, torch.tensor(power)), few)) < 2 * min(
            shape[1:]
        )


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("power", [-40, -20, 20, 40])
def test_a_loss_in_other_units_has_the_same_run(
    drawn: torch.Generator, power: int, fused: bool, capturable: bool
) -> None:
    """Twelve decades down and up; bitwise, because the unit is a power of two."""
    start, goal = torch.randn(2, 12, 20, generator=drawn)
    found = []
    for unit in (1.0, 2.0**power):
        x = start.clone().requires_grad_()
        opt = ScheduleFreeSPS([{"params": [x], "metric": "spectral"}], fused=fused, capturable=capturable)
        for _ in range(8):
            x.grad = unit * (x.detach() - goal)
            opt.step(loss=unit * (x.detach() - goal).square().sum() / 2)
        found.append(x.detach())
    assert torch.equal(*found)
    assert not torch.equal(found[0], start)


def test_a_gradient_of_zeros_has_no_direction() -> None:
    assert not spectral.orthogonal(torch.zeros(1, 16, 144)).any()


@pytest.mark.parametrize("packed", [1, 3])
@pytest.mark.parametrize("max_move", [None, 0.05])
def test_compiled_passes_take_the_steps_of_torch(drawn: torch.Generator, packed: int, max_move: float | None) -> None:
    runs = []
    start = [torch.randn(shape, generator=drawn) for shape in ((66, 65), (66, 7, 3, 3), (129, 66), (65,))]
    grads = [[torch.randn(x.shape, generator=drawn) for x in start] for _ in range(4)]
    for fused in (True, False):
        params = [x.clone().requires_grad_() for x in start]
        groups = [{"params": params[:3], "metric": "spectral", "packed": packed}, {"params": params[3:]}]
        opt = ScheduleFreeSPS(groups, weight_decay=0.1, max_move=max_move, fused=fused)
        for own in grads:
            for p, g in zip(params, own, strict=True):
                p.grad = g.clone()
            opt.step(loss=3.0)
        runs.append((params, opt))
    (fast, opt), (plain, other) = runs
    for p, q in zip(fast, plain, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=2e-5)
        for key in ("z", "average"):
            if key in opt.state[p]:
                torch.testing.assert_close(opt.state[p][key], other.state[q][key], rtol=0, atol=2e-5)


@pytest.mark.parametrize("rank", [8, 32])
def test_steps_hardly_fall_in_noise_of_low_rank(drawn: torch.Generator, rank: int) -> None:
    """They grow for full rank. If all entries counted, those of rank 8 would fall to a fifth or a third."""
    p = torch.nn.Parameter(torch.randn(32, 32, generator=drawn))
    left, right = (torch.linalg.qr(torch.randn(32, rank, generator=drawn))[0] for _ in range(2))
    opt = ScheduleFreeSPS([p], metric="spectral", lower_bound=None)
    taus = []
    for _ in range(200):
        p.grad = left @ torch.randn(rank, rank, generator=drawn) @ right.T
        opt.step(loss=1.0)
        taus.append(float(opt.last_step.tau))
    assert 0.5 < taus[-1] / taus[0] < 10


@pytest.mark.parametrize("path", [{}, {"fused": False}, {"capturable": True}], ids=["kernels", "torch", "device"])
@pytest.mark.parametrize("metric", ["adam", "spectral"])
def test_decay_acts_on_gradients_of_zeros_and_not_without_a_gradient(metric: str, path: dict[str, bool]) -> None:
    """As in other optimizers: zeros say that the loss does not depend on a matrix, no gradient that it is left out."""
    moving, still, absent = (torch.ones(6, 4, dtype=torch.float64, requires_grad=True) for _ in range(3))
    opt = ScheduleFreeSPS([{"params": [moving, still, absent], "metric": metric}], weight_decay=0.5, **path)
    z = 1.0
    for k in range(5):
        moving.grad, still.grad = torch.full((6, 4), 1.0 + k, dtype=torch.float64), torch.zeros(6, 4).double()
        opt.step(loss=10.0)
        z /= 1 + 0.5 * float(opt.last_step.tau[0])
        torch.testing.assert_close(opt.state[still]["z"], torch.full_like(still, z), rtol=1e-12, atol=0)
        assert torch.equal(absent, torch.ones_like(absent))
    assert z < 0.999


@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
def test_sums_of_large_matrices_are_accurate(
    drawn: torch.Generator, monkeypatch: pytest.MonkeyPatch, fused: bool
) -> None:
    """All sums of squares have one sign, and one sum in f32 over so many entries would be off by 1e-4."""
    monkeypatch.setattr(spectral, "orthogonal", lambda slopes, *_: slopes.clone())
    tables, take = [], Plan.sums
    monkeypatch.setattr(Plan, "sums", lambda *args: tables.append(take(*args)) or tables[-1])
    x = torch.rand(2500, 4000, generator=drawn).requires_grad_()
    x.grad = torch.rand(2500, 4000, generator=drawn)
    opt = ScheduleFreeSPS([{"params": [x], "metric": "spectral"}], fused=fused)
    g, z = x.grad.double(), x.detach().double()
    opt.step(loss=1.0)
    (table, _), p = tables[0], g * math.sqrt(4000)
    wanted = [float((g * p).sum()), float((g * z).sum()), counted(float((p * p).sum()), x.numel())]
    for (own,), number in zip((table.d_sq, table.d_dot_x, table.g_sq), wanted, strict=True):
        assert own == pytest.approx(number, rel=1e-5)
