"""Training and evaluation mode of ScheduleFreeSPS: what the parameters hold, and that nothing is lost on the way."""

from __future__ import annotations

import copy
import gc
import itertools
import pickle

import pytest
import torch
from files import through_disk
from torch import nn

from proxsps import L1, Box, GroupLasso, LInfBall, NonNegative, ProxSPS, ProxSPSAdam
from proxsps.optim import ScheduleFreeSPS, renew_statistics

SHAPES = ((13, 7), (5, 3, 3, 3), (1025,), (9,))
VARIANTS = {
    "adam": {},
    "spectral": {"metric": "spectral"},
    "decay": {"weight_decay": 0.2},
    "L1": {"regularizer": L1(0.02)},
    "GroupLasso": {"regularizer": GroupLasso(0.02)},
    "Box": {"regularizer": Box(-0.5, 0.6)},
    "torch": {"fused": False},
}
EVERY = pytest.mark.parametrize("variant", VARIANTS)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16], ids=str)


def make(kit, variant, dtype=torch.float32, shapes=SHAPES):
    params, options = kit.drawn(*shapes, dtype=dtype), dict(VARIANTS[variant])
    return params, grouped(params, options)


def grouped(params, options):
    options = dict(options)
    metric = options.pop("metric", "adam")
    matrices, rest = [p for p in params if p.dim() > 1], [p for p in params if p.dim() < 2]
    return ScheduleFreeSPS([{"params": matrices, "metric": metric}, {"params": rest}], **options)


def drive(kit, params, opt, first, last):
    for k in range(first, last):
        for p, q in zip(params, kit.drawn(*[p.shape for p in params], seed=k + 1, dtype=params[0].dtype), strict=True):
            p.grad = 0.5 * p.detach() + 0.3 * q.detach()
        opt.step(loss=5.0 / (1 + 0.1 * k))


def everything(opt):
    return opt.state_dict(), [p.detach().clone() for group in opt.param_groups for p in group["params"]]


@DTYPES
@EVERY
def test_switching_back_and_forth_changes_nothing(variant, dtype, kit):
    params, opt = make(kit, variant, dtype)
    twins, other = make(kit, variant, dtype)
    drive(kit, params, opt, 0, 6)
    drive(kit, twins, other, 0, 6)
    before, shown = everything(opt), []
    for _ in range(3):
        opt.eval()
        opt.eval()
        shown.append(kit.points(params))
        opt.train()
        opt.train()
        assert kit.same(before, everything(opt))
    assert all(kit.same(shown[0], one) for one in shown)
    assert not kit.same(shown[0], before[1])
    drive(kit, params, opt, 6, 12)
    for k in range(6, 12):  # a switch between any two steps
        with other.evaluating():
            pass
        drive(kit, twins, other, k, k + 1)
    assert kit.same(everything(opt), everything(other))


@EVERY
def test_evaluated_parameters_are_the_weighted_mean_of_all_z(variant, kit):
    params, opt = make(kit, variant, torch.float64)
    zs, weights, longest = [], [], 0.0
    for k in range(15):
        drive(kit, params, opt, k, k + 1)
        zs.append([opt.state[p]["z"].clone() for p in params])
        longest = max(longest, float(opt.last_step.tau.max()))
        weights.append((k + 1) * longest**2)
    opt.eval()
    for i, p in enumerate(params):
        mean = sum(w * z[i] for w, z in zip(weights, zs, strict=True)) / sum(weights)
        kept = (p != 0) if "regularizer" in VARIANTS[variant] else torch.ones_like(p, dtype=torch.bool)
        torch.testing.assert_close(p.detach()[kept], mean[kept], rtol=1e-9, atol=1e-10)
        assert kept.any()


def test_evaluation_before_any_step_shows_the_parameters(kit):
    for variant in VARIANTS:
        params, opt = make(kit, variant)
        before = kit.points(params)
        opt.eval()
        assert kit.same(before, kit.points(params))
        opt.train()
        assert kit.same(before, kit.points(params))
        drive(kit, params, opt, 0, 2)


@EVERY
def test_a_step_in_evaluation_mode_raises_and_changes_nothing(variant, kit):
    for steps in (0, 4):
        params, opt = make(kit, variant)
        drive(kit, params, opt, 0, steps)
        before = everything(opt)[1]
        opt.eval()
        shown = everything(opt)
        for p in params:
            p.grad = torch.ones_like(p)
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"evaluation mode.*Call opt.train"):
                opt.step(loss=1.0)
        assert kit.same(shown, everything(opt))
        opt.train()
        assert kit.same(before, everything(opt)[1])


def test_the_context_goes_back_to_the_mode_before_it(kit):
    params, opt = make(kit, "L1")
    drive(kit, params, opt, 0, 4)
    before = everything(opt)

    def fail():
        with opt.evaluating():
            assert opt.param_groups[0]["evaluating"]
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert kit.same(before, everything(opt))
    opt.eval()
    shown = everything(opt)
    with opt.evaluating():
        assert kit.same(shown, everything(opt))
    assert kit.same(shown, everything(opt))


def test_odd_tensors_come_back(kit):
    """Views with gaps, transposes, channels-last, complex, lazy signs, numbers, and tensors without a gradient."""
    (base,) = kit.drawn((12, 10), dtype=torch.float32)
    data = base.detach()
    params = [
        nn.Parameter(data.clone()[:, ::2]),
        nn.Parameter(data.clone().T),
        nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last)),
        nn.Parameter(torch.randn(7, 5, dtype=torch.complex64)),
        nn.Parameter(torch._neg_view(data[0].clone())),
        nn.Parameter(torch.tensor(0.3)),
        nn.Parameter(torch.randn(0, 4)),
        nn.Parameter(data[1].clone()),
    ]
    opt, untouched = ScheduleFreeSPS(params), params[-1].detach().clone()
    start = kit.points(params)
    for k in range(5):
        for i, p in enumerate(params[:-1]):
            p.grad = torch.full_like(p.detach(), 0.1 * (i + k + 1))
        opt.step(loss=3.0)
        before = everything(opt)
        opt.eval()
        shown = kit.points(params)
        opt.train()
        assert kit.same(before, everything(opt))
    assert torch.equal(params[-1], untouched)
    assert params[-1] not in opt.state or not opt.state[params[-1]]
    for p, s, x in zip(params[:-1], start, shown, strict=False):
        if p.numel():
            assert (p.detach() - s).real.max() < 0  # gradients are positive
            assert (x - s).real.max() < 0
            assert (x - s).abs().max() < (p.detach() - s).abs().max()


@pytest.mark.parametrize("fused", [None, False], ids=["kernels", "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("phi", [Box(0.1, 0.3), NonNegative(), LInfBall(0.3)], ids=str)
def test_constraints_hold_at_both_points(phi, dtype, fused):
    generator = torch.Generator().manual_seed(0)
    x = nn.Parameter(torch.rand(3001, generator=generator, dtype=dtype) * 0.2 + 0.1)
    lower, upper = {Box: (0.1, 0.3), NonNegative: (0.0, torch.inf), LInfBall: (-0.3, 0.3)}[type(phi)]
    lower, upper = (torch.tensor(bound, dtype=dtype) for bound in (lower, upper))
    opt, touched = ScheduleFreeSPS([x], regularizer=phi, fused=fused), False
    for _ in range(40):
        x.grad = torch.randn(3001, generator=generator, dtype=dtype)
        opt.step(loss=1e3)
        for mode in ("eval", "train"):
            getattr(opt, mode)()
            assert (x >= lower).all()
            assert (x <= upper).all()
        z = opt.state[x]["z"]
        touched |= bool((z == lower).any() or (z == upper).any())
    assert touched


@pytest.mark.parametrize("phi", [L1(0.3), GroupLasso(0.3, dims=(1,))], ids=["L1", "GroupLasso"])
def test_evaluated_models_have_the_exact_zeros_of_the_regularizer(phi):
    """Of forty features five are used."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(200, 40, generator=generator)
    weight = torch.zeros(40)
    weight[:5] = torch.tensor([3.0, -2.0, 4.0, 2.5, -3.5])
    outputs, x = inputs @ weight, nn.Parameter(torch.zeros(40, 1))
    opt = ScheduleFreeSPS([x], regularizer=phi)
    for _ in range(400):
        rows = torch.randint(0, 200, (50,), generator=generator)
        opt.zero_grad()
        loss = (inputs[rows] @ x[:, 0] - outputs[rows]).square().mean()
        loss.backward()
        opt.step(loss=loss)
    y = x.detach().clone()
    with opt.evaluating():
        zero = (x.detach() == 0)[:, 0]
        assert not zero[:5].any()
        assert int(zero[5:].sum()) >= 30
        assert float((x.detach()[:5, 0] - weight[:5]).abs().max()) < 0.7
    assert torch.equal(x, y)


# Checkpoints


def saved(opt, params):
    return through_disk({"opt": opt.state_dict(), "params": [p.detach().clone() for p in params]})


def loaded(kit, variant, dtype, checkpoint, mode, opt_first):
    """Another optimizer, in some mode of its own run, after the checkpoint was loaded into it."""
    params, opt = make(kit, variant, dtype)
    drive(kit, params, opt, 20, 23)
    getattr(opt, mode)()
    actions = [
        lambda: opt.load_state_dict(checkpoint["opt"]),
        lambda: [p.data.copy_(q) for p, q in zip(params, checkpoint["params"], strict=True)],
    ]
    for action in actions if opt_first else reversed(actions):
        action()
    return params, opt


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY
def test_checkpoints_of_either_mode_load_in_either_mode_and_go_on_bitwise(variant, dtype, kit):
    for old, new, opt_first in itertools.product(["train", "eval"], ["train", "eval"], [True, False]):
        params, opt = make(kit, variant, dtype)
        drive(kit, params, opt, 0, 5)
        getattr(opt, old)()
        twins, other = loaded(kit, variant, dtype, saved(opt, params), new, opt_first)
        assert kit.same(everything(opt), everything(other))
        for one in (opt, other):
            one.train()
        drive(kit, params, opt, 5, 9)
        drive(kit, twins, other, 5, 9)
        assert kit.same(everything(opt), everything(other))


@EVERY
@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_go_on_bitwise_and_are_independent(variant, mode, how, kit):
    params, opt = make(kit, variant)
    drive(kit, params, opt, 0, 4)
    getattr(opt, mode)()
    other = copy.deepcopy(opt) if how == "deepcopy" else pickle.loads(pickle.dumps(opt))
    twins = [p for group in other.param_groups for p in group["params"]]
    params = [p for group in opt.param_groups for p in group["params"]]
    assert kit.same(everything(opt), everything(other))
    before = everything(opt)
    other.train()
    drive(kit, twins, other, 4, 8)
    assert kit.same(before, everything(opt))
    opt.train()
    drive(kit, params, opt, 4, 8)
    assert kit.same(everything(opt), everything(other))


def test_the_state_of_another_metric_or_optimizer_is_refused_and_nothing_is_lost(kit):
    params, opt = make(kit, "spectral")
    drive(kit, params, opt, 0, 3)
    before = everything(opt)
    others = [make(kit, "adam")[1], *[cls(group(kit)) for cls in (ProxSPSAdam, ProxSPS)]]
    others.append(torch.optim.AdamW(group(kit)))
    for other in others:
        with pytest.raises(ValueError, match=r"state_dict.*Nothing was changed"):
            opt.load_state_dict(other.state_dict())
        assert kit.same(before, everything(opt))
        kept = everything(other)
        if not isinstance(other, torch.optim.AdamW):
            with pytest.raises(ValueError, match=r"state_dict.*Nothing was changed"):
                other.load_state_dict(opt.state_dict())
            assert kit.same(kept, everything(other))
    drive(kit, params, opt, 3, 5)


def group(kit):
    params = kit.drawn(*SHAPES, dtype=torch.float32)
    return [{"params": [p for p in params if p.dim() > 1]}, {"params": [p for p in params if p.dim() < 2]}]


def test_a_bare_step_makes_the_state_that_a_checkpoint_needs_and_starts_nothing(kit):
    """As `torch.distributed.checkpoint` does it; what parameters are loaded afterwards is where z begins."""
    for variant in VARIANTS:
        params, opt = make(kit, variant)
        for p in params:
            p.grad = torch.zeros_like(p)
        for own in opt.param_groups:
            own["lr"] = 0.0
        opt.step()
        done, other = make(kit, variant)
        drive(kit, done, other, 0, 1)
        for p, q in zip(params, done, strict=True):
            assert opt.state[p].keys() == other.state[q].keys()
        for own in opt.param_groups:
            own["lr"] = 1.0
        twins = [nn.Parameter(p.detach() + 1) for p in params]
        with torch.no_grad():
            for p in params:
                p.add_(1)
        fresh = grouped(twins, VARIANTS[variant])
        drive(kit, params, opt, 0, 3)
        drive(kit, twins, fresh, 0, 3)
        assert kit.same(everything(opt), everything(fresh))


# Following a model


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))


def train(model, opt, steps=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        inputs = torch.randn(32, 6, generator=generator)
        opt.zero_grad()
        loss = (model(inputs) - inputs[:, :3]).square().mean()
        loss.backward()
        opt.step(loss=loss)


def is_evaluating(opt):
    return bool(opt.param_groups[0]["evaluating"])


def test_a_model_switches_its_optimizer(kit):
    model = network()
    opt = ScheduleFreeSPS(model)
    train(model, opt)
    before = kit.points(model.parameters())
    assert model.eval() is model
    assert is_evaluating(opt)
    assert not model[1].training
    assert not kit.same(before, kit.points(model.parameters()))
    assert model.train() is model
    assert not is_evaluating(opt)
    assert model[1].training
    assert kit.same(before, kit.points(model.parameters()))
    model.train(False)
    assert is_evaluating(opt)
    model.train(True)
    train(model, opt)


def test_only_a_model_can_be_followed(kit):
    opt = ScheduleFreeSPS(kit.drawn((3, 2)))
    with pytest.raises(TypeError, match="needs the model"):
        opt.follow(opt)


class Wrapper(nn.Module):
    """As DistributedDataParallel holds its model."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


@pytest.mark.parametrize("wrap", [Wrapper, lambda model: torch.compile(model, backend="eager")], ids=["DDP", "compile"])
def test_wrappers_of_the_model_switch_too(wrap):
    model = network()
    opt = ScheduleFreeSPS(model)
    wrapped = wrap(model)
    train(wrapped, opt, 2)
    wrapped.eval()
    assert is_evaluating(opt)
    assert not model.training
    wrapped.train()
    assert not is_evaluating(opt)
    train(wrapped, opt, 2)


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_copies_of_a_model_leave_the_optimizer_alone(how, mode, kit):
    model = network()
    opt = ScheduleFreeSPS(model)
    train(model, opt)
    getattr(model, mode)()
    before = everything(opt)
    if how == "deepcopy":
        other = copy.deepcopy(model)
    elif how == "pickle":
        other = pickle.loads(pickle.dumps(model))
    else:
        other = through_disk(model, weights_only=False)
    assert kit.same(kit.points(model.parameters()), kit.points(other.parameters()))
    held = kit.points(other.parameters())
    for switch in ("eval", "train", "eval"):
        assert getattr(other, switch)() is other
        assert other.training is other[1].training is (switch == "train")
        assert kit.same(before, everything(opt))
        assert model.training is (mode == "train")
    assert kit.same(held, kit.points(other.parameters()))
    twin = ScheduleFreeSPS(other.train())  # and may have one of its own
    train(other, twin)
    other.eval()
    assert is_evaluating(twin)
    assert kit.same(before, everything(opt))


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("order", ["model first", "optimizer first", "inside", "inside, before"])
def test_copies_of_a_model_with_its_optimizer_follow_each_other(order, mode, kit):
    model = network()
    if order == "inside, before":
        model.opt = None
    opt = ScheduleFreeSPS(model)
    if "inside" in order:
        model.opt = opt
    train(model, opt)
    getattr(model, mode)()
    before = everything(opt)
    if "inside" in order:
        other = copy.deepcopy(model)
        twin = other.opt
    elif order == "model first":
        other, twin = copy.deepcopy((model, opt))
    else:
        twin, other = copy.deepcopy((opt, model))
    again, third = copy.deepcopy((other, twin))
    del third
    for one, own in ((again, None), (other, twin)):
        for switch in ("train", "eval", "train"):
            getattr(one, switch)()
            assert one.training is (switch == "train")
            assert own is None or is_evaluating(own) is (switch == "eval")
            assert kit.same(before, everything(opt))
    train(other, twin, seed=3)
    model.train()
    train(model, opt, seed=3)
    assert kit.same(everything(opt), everything(twin))


def test_two_optimizers_of_one_model_both_switch(kit):
    model = network()
    opts = [ScheduleFreeSPS(model[i].parameters()) for i in (0, 3)]
    for opt in opts:
        opt.follow(model)
        opt.follow(model)
    for _ in range(3):
        loss = model(torch.ones(4, 6)).square().mean()
        loss.backward()
        for opt in opts:
            opt.step(loss=loss)
    before = kit.points(model.parameters())
    model.eval()
    assert all(map(is_evaluating, opts))
    model.train()
    assert not any(map(is_evaluating, opts))
    assert kit.same(before, kit.points(model.parameters()))


def test_an_optimizer_that_is_gone_is_forgotten():
    model = network()
    opt = ScheduleFreeSPS(model)
    train(model, opt, 2)
    del opt
    gc.collect()
    model.eval()
    model.train()
    assert model.training
    later = ScheduleFreeSPS(model)
    train(model, later, 2)
    model.eval()
    assert is_evaluating(later)


def test_a_model_with_a_train_of_its_own_keeps_it():
    class Own(nn.Linear):
        calls = 0

        def train(self, mode=True):
            self.calls += 1
            return super().train(mode)

    model = Own(6, 3)
    opt = ScheduleFreeSPS(model)
    before = model.calls
    model.eval()
    assert model.calls == before + 1
    assert is_evaluating(opt)


def test_statistics_of_batch_norm_are_those_at_the_average():
    model = network()
    opt = ScheduleFreeSPS(model)
    train(model, opt, 30)
    batches = [torch.randn(64, 6, generator=torch.Generator().manual_seed(k)) for k in range(8)]
    model.eval()
    stale, momentum = model[1].running_mean.clone(), model[1].momentum
    renew_statistics(model, [(batch, None) for batch in batches])
    with torch.no_grad():
        outputs = [model[0](batch) for batch in batches]
    mean = torch.stack([out.mean(0) for out in outputs]).mean(0)
    variance = torch.stack([out.var(0) for out in outputs]).mean(0)
    torch.testing.assert_close(model[1].running_mean, mean)
    torch.testing.assert_close(model[1].running_var, variance)
    assert not torch.allclose(stale, mean, atol=1e-4)
    assert model[1].momentum == momentum
    assert not model.training
    assert not model[1].training
    assert is_evaluating(opt)
    with pytest.raises(ValueError, match="at least one batch"):
        renew_statistics(model, [])
    renew_statistics(nn.Linear(2, 1), [])  # nothing to renew
