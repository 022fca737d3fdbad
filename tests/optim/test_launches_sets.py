"""Sets of tensors on a device: few launches, the steps of the host, and nothing moves where a step is skipped."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from proxsps import L1, ScheduleFreeSPS

SHAPES = ((9, 8), (70,), (3, 4, 2), (5,))
OPTIONS = {
    "plain": {},
    "decay": {"weight_decay": 0.3},
    "strong decay": {"weight_decay": 50.0},
    "L1": {"regularizer": L1(0.02)},
    "limit": {"max_move": 0.05, "weight_decay": 0.1},
    "spectral": {"metric": "spectral"},
}


def made(capturable, kit, dtype=torch.float32, **options):
    params = kit.drawn(*SHAPES, dtype=dtype)
    own = {key: options.pop(key) for key in ("metric",) if key in options}
    groups = [{"params": params[::2], **own}, {"params": params[1::2]}]
    return params, ScheduleFreeSPS(groups, capturable=capturable, **options)


def step(params, opt, k, without=(), bad=None):
    generator = torch.Generator().manual_seed(k)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in without else 0.3 * g + 0.2 * p.detach()
    if bad is not None:
        params[bad].grad.view(-1)[0] = float("nan")
    opt.step(loss=torch.tensor(0.5 + 0.2 * k))


def everything(params, opt):
    """All numbers that a later step depends on."""
    state = {(i, key): value.clone() for i, p in enumerate(params) for key, value in opt.state[p].items()}
    keys = ("k", "reach", "g_sq", "first_reach", "factors_sq", "total", "longest")
    groups = enumerate(opt.param_groups)
    return state | {(f"group {i}", key): torch.as_tensor(float(own[key])) for i, own in groups for key in keys}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_set_may_get_its_first_gradients_later(options, kit):
    found = []
    for capturable in (False, True):
        params, opt = made(capturable, kit, torch.float64, **options)
        for k in range(6):
            step(params, opt, k, without=(1, 3) if k < 2 else (2,) if k == 3 else ())
        found.append(everything(params, opt) | {("p", i): p.detach() for i, p in enumerate(params)})
    assert found[0].keys() == found[1].keys()
    for key, want in found[0].items():
        torch.testing.assert_close(found[1][key], want, rtol=1e-9, atol=1e-11)  # six steps in doubles
    assert found[0]["group 1", "k"] == 6


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_skipped_step_leaves_every_bit(options, bad, kit):
    params, opt = made(True, kit, **options)
    for k in range(3):
        step(params, opt, k)
    before = everything(params, opt) | {("p", i): p.detach().clone() for i, p in enumerate(params)}
    step(params, opt, 3, bad=bad)
    assert opt.last_step.branch_name == "skipped"
    after = everything(params, opt) | {("p", i): p.detach() for i, p in enumerate(params)}
    assert all(torch.equal(after[key], value) for key, value in before.items())
    step(params, opt, 4)
    assert not torch.equal(params[0], before["p", 0])


def test_a_further_group_takes_few_launches(monkeypatch, kit):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import launches

    def count(groups):
        params = [kit.drawn((6, 5), (7,), dtype=torch.float32) for _ in range(groups)]
        opt = ScheduleFreeSPS([{"params": own} for own in params], capturable=True)
        return launches.counted(lambda: opt.step(loss=torch.tensor(1.0))).total()

    # Each group is two blocks, of three products and an update each, of one share and one sum of squares.
    assert count(2) < count(5) <= count(2) + 3 * 2 * 7
