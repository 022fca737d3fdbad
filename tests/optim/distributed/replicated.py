"""Scenarios of data parallel training: every rank has a replica and its own rows of the batch."""

from __future__ import annotations

import copy
import io
import math
import pickle
from pathlib import Path
from typing import Any

import common
import torch
import torch._dynamo  # once, before the ranks are forked: torch.compile would import it in each of them
import torch.distributed as dist
from common import F32, F64, METHODS, ROWS
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode

from proxsps.optim import SPS, ProxSPS, check_loss
from proxsps.regularizers import L1

Result = dict[str, Any]


def bitwise(rank: int, world: int, folder: Path) -> Result:
    """50 steps, in single precision, on other rows on every rank."""
    out = {}
    for name in ("ProxSPS", "ProxSPS, L1", "DecSPS", "ProxSPS, no lr", "Adam"):
        cls, options = METHODS[name]
        model = common.parallel(common.network(F32))
        opt = cls(model.parameters(), **options)
        seen = common.train(model, opt, lambda k: common.part(common.batch(k, world, F32), rank), 50)
        out[name] = common.everywhere(common.vector(model), world), len(seen)
    return out


AVERAGED = ("ProxSPS, momentum", "ProxSPS, matched", "ProxSPS, no lr", "Adam", "Adam, tensors, limited")


def averaged(rank: int, world: int, folder: Path) -> Result:
    """100 steps of averaged models, on ranks and in one process."""
    out = {}
    for name in AVERAGED:
        cls, options = METHODS[name]
        if "matched" in name:  # with steps of 8 the run itself doubles a change of its start in each step
            options = {**options, "lr": 2.0}
        model = common.parallel(common.network())
        opt = cls(model.parameters(), **options)
        seen = common.train(model, opt, lambda k: common.part(common.batch(k, world), rank), 100)
        single = common.alone(cls, world, 100, F64, **options) if rank == 0 else None
        out[name] = common.everywhere(common.vector(model), world), single, len(seen)
    return out


def drift(rank: int, world: int, folder: Path) -> Result:
    """What happens without the optimizer's all-reduce."""
    model = common.parallel(common.network())
    opt = ProxSPS(model.parameters(), lr=8.0, process_group=False)
    common.train(model, opt, lambda k: common.part(common.batch(k, world), rank), 3)
    return {"points": common.everywhere(common.vector(model), world)}


def joint(rank: int, world: int, folder: Path) -> Result:
    """Every method on ranks and in one process."""
    out = {}
    for dtype, steps in ((F32, 3), (F64, 5)):
        for name, (cls, options) in METHODS.items():
            model = common.parallel(common.network(dtype))
            opt = cls(model.parameters(), **options)
            seen = common.train(model, opt, lambda k, d=dtype: common.part(common.batch(k, world, d), rank), steps)
            out[name, dtype] = common.vector(model), common.alone(cls, world, steps, dtype, **options), seen
    return out


def collectives(rank: int, world: int, folder: Path) -> Result:
    """What the optimizer sends in one step."""
    out = {}
    for name, (cls, options) in METHODS.items():
        model = common.parallel(common.network())
        opt = cls(model.parameters(), **options)
        common.train(model, opt, lambda k: common.part(common.batch(k, world), rank), 1)
        with CommDebugMode() as seen:
            opt.step(loss=1.0)
        out[name] = {str(kind): count for kind, count in seen.get_comm_counts().items()}
    return out


def uneven(rank: int, world: int, folder: Path) -> Result:
    """Ranks with batches of different size: losses and gradients weighted alike, and not at all."""
    x, y = common.batch(0, world)
    sizes = [3, len(x) - 3]
    start = sum(sizes[:rank])
    mine = slice(start, start + sizes[rank])
    out = {}
    for weighted in (True, False):
        model = common.parallel(common.network())
        opt = ProxSPS(model.parameters(), weight_decay=0.05)
        loss = opt.watch(mse_loss(model(x[mine]), y[mine]), weight=sizes[rank] if weighted else 1.0)
        (loss * (sizes[rank] * world / len(x) if weighted else 1.0)).backward()
        opt.step()
        single = common.network()
        other = ProxSPS(single.parameters(), weight_decay=0.05, process_group=False)
        prediction = single(x)
        means = [mse_loss(prediction[:3], y[:3]), mse_loss(prediction[3:], y[3:])]
        loss = mse_loss(prediction, y) if weighted else sum(means) / world
        loss.backward()
        other.step(loss=loss)
        out["weighted" if weighted else "plain"] = common.vector(model), common.vector(single)
    return out


def accumulation(rank: int, world: int, folder: Path) -> Result:
    """Uneven micro-batches without synchronisation but for the last, against one joint batch."""
    model = common.parallel(common.network())
    opt = ProxSPS(model.parameters(), weight_decay=0.05)
    for k in range(3):
        x, y = common.part(common.batch(k, world), rank)
        opt.zero_grad()
        pieces = list(zip(x.split([1, 2, ROWS - 3]), y.split([1, 2, ROWS - 3]), strict=True))
        with model.no_sync():
            for xs, ys in pieces[:-1]:
                (opt.watch(mse_loss(model(xs), ys), weight=len(xs)) * len(xs) / ROWS).backward()
        xs, ys = pieces[-1]
        (opt.watch(mse_loss(model(xs), ys), weight=len(xs)) * len(xs) / ROWS).backward()
        opt.step()
    return {"points": (common.vector(model), common.alone(ProxSPS, world, 3, F64, weight_decay=0.05))}


def bounds(rank: int, world: int, folder: Path) -> Result:
    """A lower bound of its own on every rank: the step uses their mean."""
    points = []
    for bound, group in ((0.1 + 0.2 * rank, None), (0.2, None)):
        model = common.parallel(common.network())
        opt = ProxSPS(model.parameters(), process_group=group)
        x, y = common.part(common.batch(0, world), rank)
        loss = mse_loss(model(x), y)
        loss.backward()
        opt.step(loss=loss, lower_bound=bound)
        points.append(common.vector(model))
    return {"points": tuple(points)}


def not_finite(rank: int, world: int, folder: Path) -> Result:
    """Loss or gradient that is not finite on the last rank only."""
    out = {}
    for where in ("loss", "grad"):
        for capturable in (False, True):
            model = common.network()
            opt = ProxSPS(model.parameters(), weight_decay=0.005, capturable=capturable)
            before = common.vector(model)
            for p in model.parameters():
                p.grad = torch.ones_like(p)
            if where == "grad" and rank == world - 1:
                p.grad[0] = math.inf
            opt.step(loss=math.nan if where == "loss" and rank == world - 1 else 0.5)
            untouched = torch.equal(common.vector(model), before)
            out[where, capturable] = untouched, opt.last_step.branch_name
    return out


def missing(rank: int, world: int, folder: Path) -> Result:
    """The last rank lacks some gradients, or all of them."""
    out = {}
    for lacking in ("some", "all"):
        for capturable in (False, True):
            model = common.network()
            params = list(model.parameters())
            opt = ProxSPS(params, capturable=capturable)
            before = common.vector(model)
            for p in params:
                p.grad = torch.ones_like(p)
            if rank == world - 1:
                for p in params if lacking == "all" else params[:1]:
                    p.grad = None
            with common.refused(RuntimeError) as text:
                opt.step(loss=0.5)
            out[lacking, capturable] = text, torch.equal(common.vector(model), before)
    return out


def swapped(rank: int, world: int, folder: Path) -> Result:
    """Every rank has as many gradients as the others, but for other parameters."""
    out = {}
    cases = {"one each": (2, [[0], [1]]), "a pair": (6, [[0, 3], [1, 2]]), "all but one": (20, [[18], [19]])}
    for case, (size, places) in cases.items():
        for capturable in (False, True):
            params = [nn.Parameter(torch.ones(3, dtype=F64)) for _ in range(size)]
            opt = ProxSPS(params, weight_decay=0.1, capturable=capturable)
            for i, p in enumerate(params):
                if (i in places[rank]) != (case == "all but one"):
                    p.grad = torch.ones_like(p)
            with common.refused(RuntimeError) as text:
                opt.step(loss=0.5)
            out[case, capturable] = text, all(torch.equal(p, torch.ones_like(p)) for p in params)
    return out


def lopsided(rank: int, world: int, folder: Path) -> Result:
    """One rank has all parameters in one group, the other in two."""
    params = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for p in params:
        p.grad = torch.ones_like(p)
    opt = ProxSPS(params if rank == 0 else [{"params": [p]} for p in params])
    with common.refused(RuntimeError) as text:
        opt.step(loss=0.5)
    return {"text": text, "untouched": all(torch.equal(p, torch.ones_like(p)) for p in params)}


def nobody(rank: int, world: int, folder: Path) -> Result:
    """No rank has a gradient."""
    model = common.network()
    before = common.vector(model)
    for capturable in (False, True):
        ProxSPS(model.parameters(), weight_decay=0.1, capturable=capturable).step(loss=0.5)
    return {"untouched": torch.equal(common.vector(model), before)}


def checked(rank: int, world: int, folder: Path) -> Result:
    """The debug switch: silent where all is well, and on every rank where it is not."""
    out = {}
    for fault in ("none", "start", "lr", "no averaging"):
        model = common.network(seed=rank if fault == "start" else 0)
        trained = common.parallel(model) if fault in ("none", "lr") else model
        lr = 0.01 + 0.01 * rank if fault == "lr" else 1.0
        named = fault == "no averaging"
        opt = ProxSPS(model.named_parameters() if named else model.parameters(), lr=lr, check_replicas=True)
        with common.refused(RuntimeError) as text:
            common.train(trained, opt, lambda k: common.part(common.batch(k, world), rank), 2)
        out[fault] = text
    return out


def groups(rank: int, world: int, folder: Path) -> Result:
    """Given process groups: all ranks, one rank each, and one that this rank is not in."""
    everyone = dist.new_group(list(range(world)))
    singles = [dist.new_group([r]) for r in range(world)]
    out = {}
    for name, group in {"all": everyone, "own": singles[rank]}.items():
        model = common.network()
        opt = ProxSPS(model.parameters(), process_group=group)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        opt.step(loss=0.1 * (1 + rank))
        out[name] = float(opt.last_step.gap)
    twin = copy.deepcopy(ProxSPS(model.parameters(), process_group=singles[rank], check_replicas=True))
    for p in twin.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    twin.step(loss=0.1 * (1 + rank))
    out["copied"] = float(twin.last_step.gap)
    with common.refused(TypeError) as out["pickled"]:
        pickle.dumps(twin)
    with common.refused(ValueError) as out["foreign"]:
        ProxSPS(model.parameters(), process_group=singles[1 - rank]).step(loss=1.0)
    file = io.BytesIO()
    torch.save(twin.state_dict(), file)
    file.seek(0)
    out["saved"] = torch.load(file, weights_only=True) == twin.state_dict()
    off = pickle.loads(pickle.dumps(ProxSPS(model.parameters(), process_group=False)))
    with CommDebugMode() as seen:
        off.step(loss=1.0)
    out["sent when off"] = seen.get_total_counts()
    return out


class CountReads(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.reads: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if str(func).startswith(("aten._local_scalar_dense", "aten.equal", "aten.nonzero", "aten.is_nonzero")):
            self.reads.append(str(func))
        return func(*args, **(kwargs or {}))


def reads(rank: int, world: int, folder: Path) -> Result:
    """Numbers that a capturable step reads back to the host."""
    out = {}
    for name, options in {"closed": {"max_move": 0.1}, "search": {"regularizer": L1(0.01), "max_move": 0.1}}.items():
        opt = ProxSPS(common.parallel(common.network()).parameters(), capturable=True, **options)
        for p in opt.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        with CountReads() as seen:
            opt.step(loss=torch.tensor(0.5))
        out[name] = seen.reads
    return out


def scaled(rank: int, world: int, folder: Path) -> Result:
    """A gradient scaler: inf on one rank skips the step on all, and its loss is forgotten."""
    model = common.parallel(common.network(F32))
    opt = ProxSPS(model.parameters(), weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales, points = [], []
    for k in range(3):
        x, y = common.part(common.batch(k, world, F32), rank)
        opt.zero_grad()
        loss = mse_loss(model(x), y)
        if k == 1 and rank == 1:
            loss = loss * math.inf
        opt.watch(loss)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        scales.append(scaler.get_scale())
        points.append(common.vector(model))
    single = common.network(F32)
    other = ProxSPS(single.parameters(), weight_decay=0.05, process_group=False)
    common.train(single, other, lambda k: common.batch(2 * k, world, F32), 2)
    return {"scales": scales, "points": points, "alone": common.vector(single)}


def compiled(rank: int, world: int, folder: Path) -> Result:
    """torch.compile of the step, all-reduce included."""
    out = {}
    for traced in (True, False):
        model = common.parallel(common.network())
        opt = ProxSPS(model.parameters(), lr=8.0, weight_decay=0.05, max_move=0.5)

        def step(loss, opt=opt):
            opt.step(loss=loss)

        step = torch.compile(step, backend="eager", fullgraph=True) if traced else step
        x, y = common.part(common.batch(0, world), rank)
        loss = mse_loss(model(x), y)
        loss.backward()
        step(loss.detach())
        out[traced] = common.vector(model)
    return {"points": (out[True], out[False])}


def buffers(rank: int, world: int, folder: Path) -> Result:
    """An unused layer: DDP leaves its gradient empty on all ranks, or fills it from the ranks that use it."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3), nn.Linear(6, 3)]).double()

    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = model

        def forward(self, x):
            return self.layers[rank](x)  # the third is used nowhere

    wrapped = nn.parallel.DistributedDataParallel(Branches(), find_unused_parameters=True)
    opt = SPS(wrapped.parameters(), check_replicas=True)
    common.train(wrapped, opt, lambda k: common.part(common.batch(k, world), rank), 2)
    return {"points": common.everywhere(common.vector(model), world)}


def loss_checked(rank: int, world: int, folder: Path) -> Result:
    """Does the loss belong to the gradients? A question about the joint batch, answered alike on all ranks."""
    model = common.parallel(common.network())
    opt = ProxSPS(model.parameters())
    x, y = common.part(common.batch(0, world), rank)
    loss = mse_loss(model(x), y)
    loss.backward()
    out = {"factors": tuple(check_loss(opt, lambda: mse_loss(model(x), y), loss))}
    with common.refused(ValueError) as out["scaled"]:
        check_loss(opt, lambda: mse_loss(model(x), y), loss * (64 if rank == 0 else 1))
    return out


SCENARIOS = (
    bitwise,
    averaged,
    drift,
    joint,
    collectives,
    uneven,
    accumulation,
    bounds,
    not_finite,
    missing,
    swapped,
    lopsided,
    nobody,
    checked,
    groups,
    reads,
    scaled,
    compiled,
    buffers,
    loss_checked,
)
