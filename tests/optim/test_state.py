"""State of averaged models: bitwise resumed, untouched by skipped steps, exact for parameters that come and go."""

from __future__ import annotations

import copy
import io
import warnings

import numpy as np
import pytest
import torch
from files import through_disk
from sampled import sample
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.regularizers import L1, L1Ball, NuclearNorm

SHAPES = ((80, 60), (67,), (3, 4, 2))  # a sample of the first is kept as its start, and all of the others
VARIANTS = {
    "momentum": (ProxSPS, {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1}),
    "distance": (ProxSPS, {"lr": None, "weight_decay": 0.1}),
    "no lr": (ProxSPS, {"lr": None, "momentum": 0.9, "regularizer": L1(0.01)}),
    "adam": (ProxSPSAdam, {"weight_decay": 0.1}),
    "adam, lr": (ProxSPSAdam, {"lr": 0.05, "regularizer": L1(0.01), "distance_cap": True}),
}
EVERY = pytest.mark.parametrize("variant", VARIANTS)
PATHS = pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "plain", "device"])
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.complex64]


def make(kit, variant, dtype=torch.float32, **more):
    cls, options = VARIANTS[variant]
    if dtype.is_complex:
        options = {key: value for key, value in options.items() if key != "regularizer"}
    params = kit.drawn(*SHAPES, dtype=dtype)
    return params, cls(params, **{**options, **more})


def gradients(kit, params, k):
    for p, q in zip(params, kit.drawn(*[p.shape for p in params], seed=k + 1, dtype=params[0].dtype), strict=True):
        p.grad = 0.3 * p.detach() + 0.1 * q.detach()


def drive(kit, params, opt, first, last):
    for k in range(first, last):
        gradients(kit, params, k)
        opt.step(loss=torch.tensor(0.9 - 0.05 * k))


def snapshot(opt):
    """All that a later step depends on, as bytes."""
    file = io.BytesIO()
    torch.save([opt.state_dict(), [p.detach() for group in opt.param_groups for p in group["params"]]], file)
    return file.getvalue()


@PATHS
@EVERY
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_resumed_run_goes_on_bitwise(variant, dtype, path, kit):
    params, opt = make(kit, variant, dtype, **path)
    drive(kit, params, opt, 0, 4)
    saved = through_disk(opt.state_dict())
    twins, other = make(kit, variant, dtype, **path)
    for p, q in zip(twins, params, strict=True):
        p.data.copy_(q.detach())
    other.load_state_dict(saved)
    for one, two in zip(params, twins, strict=True):
        for key, value in opt.state[one].items():
            assert torch.equal(value, other.state[two][key])
            assert value.dtype == other.state[two][key].dtype
    drive(kit, params, opt, 4, 7)
    drive(kit, twins, other, 4, 7)
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))
    assert any(not torch.equal(p, q) for p, q in zip(params, make(kit, variant, dtype)[0], strict=True))


@EVERY
def test_what_is_in_the_state(variant, kit):
    params, opt = make(kit, variant, torch.bfloat16)
    start = [sample(p.detach().reshape(-1)).clone() for p in params]
    drive(kit, params, opt, 0, 3)
    has = {"average"} if variant == "momentum" else {"origin"} if variant == "distance" else {"average", "origin"}
    has |= {"square", "steps"} if variant.startswith("adam") else set()
    for p, x0 in zip(params, start, strict=True):
        own = opt.state[p]
        assert set(own) == has
        assert all(own[key].dtype is torch.float32 for key in has - {"origin"})
        if "origin" in own:
            assert torch.equal(own["origin"], x0)
        if "steps" in own:
            assert own["steps"] == 3
    numbers = set(opt.param_groups[0]) & {"model_value", "model_offset", "k", "reach", "g_sq"}
    assert numbers == ({"k"} | ({"model_value", "model_offset"} if "average" in has else set())) | (
        {"reach", "g_sq"} if "origin" in has else set()
    )
    assert float(opt.param_groups[0]["k"]) == 3
    floats = sum(v.numel() for own in opt.state.values() for v in own.values()) / sum(p.numel() for p in params)
    assert floats <= {"momentum": 1, "distance": 1 / 12}.get(variant, 1 + 1 / 12 if "no" in variant else 2.1)


@PATHS
@EVERY
@pytest.mark.parametrize("bad", ["loss", "gradient", "bound"])
def test_a_skipped_step_leaves_everything_bitwise(variant, bad, path, kit):
    for steps in (0, 3):
        params, opt = make(kit, variant, **path)
        drive(kit, params, opt, 0, steps)
        before = copy.deepcopy(opt.state_dict()), kit.points(params)
        gradients(kit, params, 9)
        if bad == "gradient":
            params[1].grad[5] = torch.inf
        loss = {"loss": torch.nan, "gradient": 0.5, "bound": -0.5}[bad]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            opt.step(loss=torch.tensor(loss))
        assert opt.last_step.branch_name == opt.last_step.cap_name == "skipped"
        assert all(torch.equal(p, q) for p, q in zip(params, before[1], strict=True))
        after = opt.state_dict()
        for one, two in zip(before[0]["param_groups"], after["param_groups"], strict=True):
            assert all(two[key] == value for key, value in one.items() if key != "regularizer")
        if steps or "capturable" not in path:  # a device makes its state, of zeros, before it knows
            assert before[0]["state"].keys() == after["state"].keys()
        for i, own in before[0]["state"].items():
            assert all(torch.equal(value, after["state"][i][key]) for key, value in own.items())
        fresh, other = make(kit, variant, **path)
        drive(kit, fresh, other, 0, steps + 2)
        drive(kit, params, opt, steps, steps + 2)
        assert all(torch.equal(p, q) for p, q in zip(params, fresh, strict=True))


@EVERY
def test_a_step_that_the_scaler_skips_leaves_everything(variant, kit):
    params, opt = make(kit, variant)
    drive(kit, params, opt, 0, 2)
    before = snapshot(opt)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for p in params:
        p.grad = None
    loss = sum((p.square().sum() for p in params), torch.tensor(0.0)) / 10
    scaler.scale(opt.watch(loss)).backward()
    params[0].grad[0, 0] = torch.inf
    scaler.step(opt)
    scaler.update()
    assert snapshot(opt) == before
    opt.zero_grad()
    scaler.scale(opt.watch(loss.detach() * 0 + sum(p.square().sum() for p in params) / 10)).backward()
    scaler.step(opt)
    assert snapshot(opt) != before


@EVERY
def test_a_saved_state_does_not_follow_later_steps(variant, kit):
    for path in ({}, {"capturable": True}):
        params, opt = make(kit, variant, **path)
        drive(kit, params, opt, 0, 2)
        saved = opt.state_dict()
        kept = copy.deepcopy(saved)
        twins, other = make(kit, variant, **path)
        other.load_state_dict(saved)
        drive(kit, params, opt, 2, 4)
        drive(kit, twins, other, 2, 4)
        for i, own in kept["state"].items():
            assert all(torch.equal(value, saved["state"][i][key]) for key, value in own.items())
        for one, two in zip(kept["param_groups"], saved["param_groups"], strict=True):
            assert all(two[key] == value for key, value in one.items() if key != "regularizer")


# -- parameters that come and go --------------------------------------------------------------------------------------


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("adam", [False, True])
def test_parameters_without_a_gradient_rest(adam, capturable, kit):
    """Against the formulas, with the average as the gradient where there is none; frozen and late ones too."""
    a, b, c = kit.drawn((70,), (5,), (6,))
    cls, own = (ProxSPSAdam, {"betas": (0.9, 0.99)}) if adam else (ProxSPS, {"momentum": 0.9})
    opt = cls([a, b, c], lr=0.02, cap="matched", lower_bound=None, capturable=capturable, **own)
    d, v, count = ([np.zeros(p.shape) for p in (a, b, c)] for _ in range(3))
    fbar = gamma = 0.0
    for k in range(6):
        gradients(kit, (a, b, c), k)
        missing = {2: [b], 3: [a], 4: [b]}.get(k, []) + ([c] if k < 2 else [])  # c gets its first gradient late
        a.requires_grad_(k != 3)
        for p in missing:
            p.grad = None
        xs = [p.detach().numpy().copy() for p in (a, b, c)]
        gs = [d[i] if p.grad is None else p.grad.numpy() for i, p in enumerate((a, b, c))]
        before = {p: {key: value.clone() for key, value in opt.state.get(p, {}).items()} for p in missing}
        f, beta = 0.8 - 0.1 * k, 0.9
        new = (1 - beta) / (1 - beta ** (k + 1)) if adam else (1.0 if k == 0 else 1 - beta)
        d = [(1 - new) * old + new * g for old, g in zip(d, gs, strict=True)]
        fbar = (1 - new) * fbar + new * f
        gamma = (1 - new) * gamma + new * sum(float(g @ x) for g, x in zip(gs, xs, strict=True))
        for i, p in enumerate((a, b, c)):
            if p.grad is not None:
                count[i] = count[i] + 1
                share = 0.01 / (1 - 0.99 ** count[i])
                v[i] = (1 - share) * v[i] + share * gs[i] ** 2
        opt.step(loss=torch.tensor(f, dtype=torch.float64))
        m = fbar - gamma + sum(float(e @ x) for e, x in zip(d, xs, strict=True))
        assert float(opt.last_step.gap) == pytest.approx(m, rel=1e-10)
        for i, p in enumerate((a, b, c)):
            if p.grad is None:
                np.testing.assert_array_equal(p.detach().numpy(), xs[i])
                assert all(torch.equal(value, opt.state[p][key]) for key, value in before[p].items())
            else:
                D = np.sqrt(v[i]) + 1e-8 if adam else 1.0
                np.testing.assert_allclose(p.detach().numpy(), xs[i] - 0.02 * d[i] / D, rtol=1e-9, atol=1e-12)


def test_a_group_added_later_starts_where_it_is(kit):
    a, b = kit.drawn((70,), (51,))
    opt = ProxSPSAdam([a])
    drive(kit, [a], opt, 0, 3)
    opt.add_param_group({"params": [b], "weight_decay": 0.1})
    where = sample(b.detach().clone())
    drive(kit, [a, b], opt, 3, 6)
    assert torch.equal(opt.state[b]["origin"], where)
    assert opt.state[b]["steps"] == 3
    assert opt.state[a]["steps"] == 6
    assert opt.param_groups[1]["k"] == opt.param_groups[0]["k"] == 6


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("variant", ["distance", "no lr", "adam"])  # in the others lr is a cap
def test_a_factor_scales_the_step_and_zero_stops_it(variant, capturable, kit):
    cls, options = VARIANTS[variant]
    steps = []
    for factor in (1.0, 0.5, 0.0):
        params = kit.drawn(*SHAPES, dtype=torch.float64)
        bound = None if variant == "adam" else 0.0  # without a bound the distance cap is active
        opt = cls(params, **{**options, "lr": None, "lower_bound": bound, "capturable": capturable})
        drive(kit, params, opt, 0, 2)
        opt.param_groups[0]["lr"] = factor
        before = kit.points(params)
        drive(kit, params, opt, 2, 3)
        steps.append(float(opt.last_step.tau[0]))
        if factor == 0:
            assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
    squares = (3.0, 2.25) if variant == "adam" else (1.0, 1.0)  # of three factors, where the distance cap is active
    assert steps[1] == pytest.approx(steps[0] / 2 * (squares[0] / squares[1]) ** 0.5, rel=1e-9)
    assert steps[2] == 0


@PATHS
@pytest.mark.parametrize("lr", [0.05, None])
@pytest.mark.parametrize("adam", [False, True])
def test_groups_with_an_lr_of_their_own_and_one_at_rest(adam, lr, path, kit):
    """Against the formulas: a group with lr = 0 stays where it is; it counts in the model, not in the distance cap."""
    params = kit.drawn((70,), (5, 13), (34,))
    cls, own = (ProxSPSAdam, {"betas": (0.9, 0.99)}) if adam else (ProxSPS, {"momentum": 0.9})
    opt = cls([{"params": [p]} for p in params], lr=lr, cap="matched", lower_bound=None, **own, **path)
    shares = (1.0, 0.25, 0.0)
    for group, share in zip(opt.param_groups, shares, strict=True):
        group["lr"] = share * (1.0 if lr is None else lr)
    plain = kit.plain_model([p.detach().numpy().copy() for p in params], 0.9, 0.99 if adam else None)
    for k in range(4):
        gradients(kit, params, k)
        xs = [p.detach().numpy().copy() for p in params]
        plain.take(xs, [p.grad.numpy() for p in params], 0.9 - 0.05 * k, shares)
        opt.step(loss=0.9 - 0.05 * k)
        assert float(opt.last_step.gap) == pytest.approx(plain.m, rel=1e-9)
        for p, x, d, D, share in zip(params, xs, plain.d, plain.metric, shares, strict=True):
            tau = share * (plain.distance if lr is None else lr)
            np.testing.assert_allclose(p.detach().numpy(), x - tau * d / D, rtol=1e-9, atol=1e-12)
        assert np.array_equal(params[2].detach().numpy(), xs[2])


def test_last_step_says_which_cap_was_active(kit):
    def after(loss, **options):
        (p,) = kit.drawn((70,))
        opt = ProxSPS([p], cap="matched", **options)
        opt.step(loss=loss)
        return opt.last_step

    assert after(1e-3, lr=10.0).cap_name == "polyak"
    assert after(1e3, lr=1e-4).cap_name == "lr"
    assert after(1e3, lr=None).cap_name == "distance"
    assert after(1e3, lr=1e-6, distance_cap=True).cap_name == "lr"
    last = after(1e3, lr=1e3, distance_cap=True)
    assert last.cap_name == "distance"
    assert float(last.distance_cap) == pytest.approx(float(last.tau[0]))
    assert torch.isnan(after(1.0, lr=1.0).distance_cap)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "options", "message"),
    [
        (ProxSPS, {"momentum": 1.0}, "momentum must be at least 0 and below 1"),
        (ProxSPS, {"momentum": -0.1}, "momentum must be at least 0 and below 1"),
        (ProxSPS, {"cap": "polyak"}, 'cap must be "proximal" or "matched"'),
        (ProxSPS, {"lr": None, "distance_cap": False}, "needs the distance cap to set its steps"),
        (ProxSPS, {"distance_cap": 0.5}, "distance_cap must be True, False"),
        (ProxSPSAdam, {"betas": (0.9, 1.0)}, r"betas\[1\] must be at least 0 and below 1"),
        (ProxSPSAdam, {"betas": (-0.1, 0.9)}, r"betas\[0\] must be at least 0 and below 1"),
        (ProxSPSAdam, {"betas": 0.9}, "betas must be two numbers"),
        (ProxSPSAdam, {"eps": -1e-8}, "eps must be a finite number >= 0"),
        (ProxSPSAdam, {"regularizer": NuclearNorm(0.1)}, "NuclearNorm has no exact prox. Zero, L2, L1"),
        (ProxSPSAdam, {"regularizer": L1Ball(1.0)}, "L1Ball has no exact prox"),
        (SPS, {"lr": None}, "SPS needs a learning rate, got lr=None.*ProxSPS and ProxSPSAdam have"),
        (DecSPS, {"lr": None}, "DecSPS needs a learning rate"),
        (ProxSGD, {"lr": None}, "ProxSGD needs a learning rate"),
    ],
)
def test_bad_options_are_refused(cls, options, message, kit):
    with pytest.raises(ValueError, match=message):
        cls(kit.drawn((4, 3)), **options)


def test_a_learning_rate_for_some_groups_only_is_refused(kit):
    a, b = kit.drawn((3,), (4,))
    with pytest.raises(ValueError, match=r"has lr=None, but ProxSPS\(\) was given lr=0.5"):
        ProxSPS([{"params": [a]}, {"params": [b], "lr": None}], lr=0.5)
    with pytest.raises(ValueError, match=r"has lr=0.5, but ProxSPSAdam\(\) was given lr=None"):
        ProxSPSAdam([{"params": [a]}, {"params": [b], "lr": 0.5}])
    with pytest.raises(ValueError, match="momentum cannot differ between parameter groups"):
        ProxSPS([{"params": [a]}, {"params": [b], "momentum": 0.5}])


def test_a_checkpoint_of_another_variant_is_refused_and_nothing_changes(kit):
    def made(cls, **options):
        return cls(kit.drawn((4, 3)), **options)

    variants = [
        made(ProxSPS),
        made(ProxSPS, momentum=0.9),
        made(ProxSPS, cap="matched"),
        made(ProxSPS, lr=None),
        made(ProxSPS, distance_cap=True, cap="matched"),
        made(ProxSPSAdam),
    ]
    for opt in variants:
        for other in variants:
            before = snapshot(opt)
            if other is opt:
                opt.load_state_dict(other.state_dict())
            else:
                with pytest.raises(ValueError, match="Nothing was changed"):
                    opt.load_state_dict(other.state_dict())
            assert snapshot(opt) == before
    with pytest.raises(ValueError, match="saved by ProxSPSAdam with an lr, and this one has lr=None: make it with"):
        made(ProxSPSAdam).load_state_dict(made(ProxSPSAdam, lr=1e-3).state_dict())
    again = made(ProxSPS, momentum=0.5)
    again.load_state_dict(variants[1].state_dict())
    assert again.param_groups[0]["momentum"] == 0.9


def test_a_loss_that_stays_below_its_bound_is_said_again(kit):
    (p,) = kit.drawn((70,))
    opt = ProxSPSAdam([p])
    p.grad = torch.ones_like(p)

    def stay(steps):
        for _ in range(steps):
            opt.step(loss=-0.3)

    with pytest.warns(RuntimeWarning, match=r"below lower_bound=0; .*never falls below, or to None if there is none"):
        stay(1)
    stay(98)
    with pytest.warns(RuntimeWarning, match="The last 100 steps were all skipped. The loss -0.3 is below") as found:
        stay(150)
    assert len(found) == 1


def test_a_bound_that_is_too_high_is_said_once(kit):
    (p,) = kit.drawn((70,))
    opt = ProxSPS([p], lr=None, momentum=0.9, lower_bound=0.4)
    p.grad = torch.ones_like(p)
    opt.step(loss=0.4)
    p.data.sub_(0.01)  # downhill: the model of the average stays below the bound by more than it is rounded
    p.grad = torch.zeros_like(p)

    def stay(steps):
        for _ in range(steps):
            opt.step(loss=0.4)

    stay(98)
    with pytest.warns(RuntimeWarning, match="at or below lower_bound=0.4 for 100 steps in a row"):
        stay(4)
    stay(110)


def test_distributed_checkpoints_find_state_to_fill(kit):
    """They take a step with lr = 0 and gradients of zero, without a loss."""
    for cls in (ProxSPS, ProxSPSAdam):
        params = kit.drawn(*SHAPES)
        opt = cls(params, lr=None, **({"momentum": 0.9} if cls is ProxSPS else {}))
        before = kit.points(params)
        for p in params:
            p.grad = torch.zeros_like(p)
        opt.param_groups[0]["lr"] = 0.0
        opt.step()
        assert all({"average", "origin"} <= set(opt.state[p]) for p in params)
        assert all(torch.equal(p, q) for p, q in zip(params, before, strict=True))
        opt.param_groups[0]["lr"] = 1.0
        fresh = kit.drawn(*SHAPES)
        other = cls(fresh, lr=None, **({"momentum": 0.9} if cls is ProxSPS else {}))
        drive(kit, params, opt, 0, 2)
        drive(kit, fresh, other, 0, 2)
        assert all(torch.equal(p, q) for p, q in zip(params, fresh, strict=True))


@PATHS
@EVERY
def test_reading_the_state_before_the_first_step_changes_no_later_step(variant, path, kit):
    """Readers of checkpoints let torch create the state of all parameters, of those that never get a gradient too."""
    cls, options = VARIANTS[variant]
    points = []
    for reads in (False, True):
        model = torch.nn.ModuleDict({"used": torch.nn.Linear(40, 2), "unused": torch.nn.Linear(500, 1)})
        for p, q in zip(model.parameters(), kit.drawn(*[p.shape for p in model.parameters()]), strict=True):
            p.data.copy_(q.detach())
        unused = model["unused"].weight.detach().clone()
        opt = cls(model.parameters(), **options, **path)
        if reads:
            get_optimizer_state_dict(model, opt)
        used = list(model["used"].parameters())
        drive(kit, used, opt, 0, 3)
        assert torch.equal(model["unused"].weight, unused)
        points.append(kit.flat(used))
    assert torch.equal(*points)


def test_a_parameter_whose_only_gradient_was_in_a_skipped_step_stays_on_a_device_too():
    """Its second moments are 0 there, and a prox in this metric would have a step of infinite size."""
    for capturable in (False, True):
        a, b = (torch.nn.Parameter(torch.ones(70)) for _ in range(2))
        opt = ProxSPSAdam([a, b], regularizer=L1(1e-3), capturable=capturable)
        a.grad, b.grad = torch.ones(70), torch.ones(70)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            opt.step(loss=float("nan"))
        b.grad = None
        opt.step(loss=1.0)
        assert (a < 1).all()
        assert torch.equal(b.detach(), torch.ones(70))


@PATHS
@EVERY
def test_what_a_user_keeps_beside_the_state_survives_the_first_step(variant, path, kit):
    params, opt = make(kit, variant, **path)
    get_optimizer_state_dict(torch.nn.ParameterList(params), opt)  # creates state, which the first step creates again
    opt.state[params[1]]["mine"] = 3
    drive(kit, params, opt, 0, 1)
    assert opt.state[params[1]]["mine"] == 3


@PATHS
def test_momentum_may_be_passed_with_all_groups(path, kit):
    """The numbers of the averages are then in the groups, as if it had been passed to the optimizer."""
    points, keys = [], []
    for everywhere, own in (({"momentum": 0.9}, {}), ({}, {"momentum": 0.9})):
        params = kit.drawn(*SHAPES)
        opt = ProxSPS([{"params": params[:1], **own}, {"params": params[1:], **own}], **everywhere, **path)
        drive(kit, params, opt, 0, 3)
        points.append(kit.flat(params))
        keys.append([group.keys() for group in opt.param_groups])
    assert torch.equal(*points)
    assert keys[0] == keys[1]
