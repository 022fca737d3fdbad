"""A capturable step reads no number back to the host."""

from __future__ import annotations

import pytest
import torch
from reads import Reads

from proxsps.optim import ScheduleFreeSPS
from proxsps.regularizers import L1, Box, GroupLasso, NuclearNorm, SparseGroupLasso

OPTIONS = {
    "plain": {},
    "weight_decay": {"weight_decay": 0.3},
    "L1": {"regularizer": L1(0.2)},
    "GroupLasso": {"regularizer": GroupLasso(0.4)},
    "tensor lr": {"lr": torch.tensor(0.25), "weight_decay": 0.3},
    "limited": {"weight_decay": 0.3, "max_move": 0.01},
    "limited, L1": {"regularizer": L1(0.2), "max_move": 0.01},
    "tensor lr, L1": {"lr": torch.tensor(0.25), "regularizer": L1(0.2)},
}


@pytest.mark.parametrize("read", [lambda t: t.item(), float, bool, lambda t: torch.equal(t, t)])
def test_the_counter_counts(read):
    with Reads() as reads:
        read(torch.tensor(1.0) + 1)
    assert len(reads.seen) >= 1


@pytest.mark.parametrize(
    "loss", [0.7, torch.tensor(0.7), torch.tensor(0.7, requires_grad=True)], ids=["float", "tensor", "grad"]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_capturable_step_reads_nothing(case, kit, options, loss):
    opt = case.make(kit.drawn((4, 3), (7,), dtype=torch.float32), **options, capturable=True)
    opt.step(loss=loss)
    with Reads() as reads:
        opt.step(loss=loss)
        report = opt.last_step
    assert reads.operations > 5
    assert reads.seen == []
    assert report.branch_name != "skipped"


@pytest.mark.parametrize(
    "phi",
    [
        GroupLasso.rows(0.2),
        GroupLasso(0.2, dims=(0,)),
        NuclearNorm(0.2),
        SparseGroupLasso(0.1, 0.1, dims=(1,)),
        Box(-1, 1),
    ],
    ids=["rows", "columns", "NuclearNorm", "SparseGroupLasso", "Box"],
)
def test_rows_and_proxes_read_nothing(prox_case, kit, phi):
    groups = [
        {"params": kit.drawn((4, 3), (4, 3), (5, 2)), "regularizer": phi},
        {"params": kit.drawn((7,)), "weight_decay": 0.2, "lr": torch.tensor(0.1)},
        {"params": kit.drawn((4, 3), (4, 3)), "regularizer": phi, "lr": torch.tensor(0.2)},
    ]
    opt = prox_case.make(groups, capturable=True, max_move=0.1)
    opt.step(loss=0.7)
    with Reads() as reads:
        opt.step(loss=torch.tensor(0.7))
    assert reads.seen == []


@pytest.mark.parametrize("bad", ["loss", "grad", "bound"])
def test_a_masked_step_reads_nothing(case, kit, bad):
    params = kit.drawn((4, 3), (7,))
    opt, before = case.make(params, capturable=True), kit.points(params)
    if bad == "grad":
        params[0].grad[0, 0] = torch.nan
    loss = torch.tensor({"loss": torch.nan, "grad": 0.5, "bound": -1.0}[bad])
    with Reads() as reads:
        opt.step(loss=loss)
    assert reads.seen == []
    if bad != "bound" or case.loss:
        assert all(map(torch.equal, kit.points(params), before))


def test_a_watched_step_reads_nothing(case, kit):
    problem = kit.least_squares()
    w = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    opt = case.make([w], capturable=True)
    with Reads() as reads:
        opt.watch(problem.loss(w), weight=3).backward()
        opt.watch(problem.loss(w), weight=1).backward()
        opt.step()
    assert reads.seen == []


def test_groups_with_different_options_read_nothing(case, kit):
    a, b, c = kit.drawn((4, 3), (7,), (5,))
    groups = [
        {"params": [a], "lr": torch.tensor(0.1)},
        {"params": [b], "weight_decay": 0.2},
        {"params": [c], "regularizer": L1(0.1)},
    ]
    opt = case.make(groups, capturable=True)
    with Reads() as reads:
        opt.step(loss=torch.tensor(0.7), lower_bound=torch.tensor(0.1) if case.loss else None)
    assert reads.seen == []


def test_both_metrics_read_nothing_and_write_in_place(kit):
    """A captured step finds parameters, state and numbers where they were."""
    params = kit.drawn((4, 3), (6, 2), (4, 3), (7,))
    groups = [
        {"params": params[:2], "metric": "spectral", "packed": 2},
        {"params": params[2:3], "regularizer": L1(0.1)},
        {"params": params[3:], "weight_decay": 0.2},
    ]
    opt = ScheduleFreeSPS(groups, capturable=True, max_move=0.1)
    opt.step(loss=torch.tensor(0.7))

    def tensors():
        held = [value for group in opt.param_groups for value in group.values()]
        held += [value for own in opt.state.values() for value in own.values()]
        return [*params, *[t for t in held if isinstance(t, torch.Tensor)]]

    before, points = tensors(), kit.points(params)
    with Reads() as reads:
        opt.step(loss=torch.tensor(0.7))
    assert reads.seen == []
    assert list(map(id, tensors())) == list(map(id, before))
    assert len(before) > 40
    assert not any(map(torch.equal, kit.points(params), points))
