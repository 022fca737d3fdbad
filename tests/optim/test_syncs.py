"""A capturable step reads no number back to the host."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps.optim import ScheduleFreeSPS
from proxsps.regularizers import L1, Box, GroupLasso, NuclearNorm, SparseGroupLasso

READS = ("aten._local_scalar_dense", "aten.item", "aten.is_nonzero", "aten.equal", "aten.nonzero")

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


class CountReads(TorchDispatchMode):
    """Counts operations whose result the host waits for."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.operations = [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.operations += 1
        if str(func).startswith(READS):
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("read", [lambda t: t.item(), float, bool, lambda t: torch.equal(t, t)])
def test_the_counter_counts(read):
    with CountReads() as count:
        read(torch.tensor(1.0) + 1)
    assert len(count.reads) >= 1


@pytest.mark.parametrize(
    "loss", [0.7, torch.tensor(0.7), torch.tensor(0.7, requires_grad=True)], ids=["float", "tensor", "grad"]
)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_capturable_step_reads_nothing(case, kit, options, loss):
    opt = case.make(kit.drawn((4, 3), (7,), dtype=torch.float32), **options, capturable=True)
    opt.step(loss=loss)
    with CountReads() as count:
        opt.step(loss=loss)
        report = opt.last_step
    assert count.operations > 5
    assert count.reads == []
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
    with CountReads() as count:
        opt.step(loss=torch.tensor(0.7))
    assert count.reads == []


@pytest.mark.parametrize("bad", ["loss", "grad", "bound"])
def test_a_masked_step_reads_nothing(case, kit, bad):
    params = kit.drawn((4, 3), (7,))
    opt, before = case.make(params, capturable=True), kit.points(params)
    if bad == "grad":
        params[0].grad[0, 0] = torch.nan
    loss = torch.tensor({"loss": torch.nan, "grad": 0.5, "bound": -1.0}[bad])
    with CountReads() as count:
        opt.step(loss=loss)
    assert count.reads == []
    if bad != "bound" or case.loss:
        assert all(map(torch.equal, kit.points(params), before))


def test_a_watched_step_reads_nothing(case, kit):
    problem = kit.least_squares()
    w = torch.nn.Parameter(torch.zeros(6, dtype=torch.float64))
    opt = case.make([w], capturable=True)
    with CountReads() as count:
        opt.watch(problem.loss(w), weight=3).backward()
        opt.watch(problem.loss(w), weight=1).backward()
        opt.step()
    assert count.reads == []


def test_groups_with_different_options_read_nothing(case, kit):
    a, b, c = kit.drawn((4, 3), (7,), (5,))
    groups = [
        {"params": [a], "lr": torch.tensor(0.1)},
        {"params": [b], "weight_decay": 0.2},
        {"params": [c], "regularizer": L1(0.1)},
    ]
    opt = case.make(groups, capturable=True)
    with CountReads() as count:
        opt.step(loss=torch.tensor(0.7), lower_bound=torch.tensor(0.1) if case.loss else None)
    assert count.reads == []


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
    with CountReads() as count:
        opt.step(loss=torch.tensor(0.7))
    assert count.reads == []
    assert list(map(id, tensors())) == list(map(id, before))
    assert len(before) > 40
    assert not any(map(torch.equal, kit.points(params), points))
