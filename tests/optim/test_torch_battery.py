"""The subjects of PyTorch's own tests of optimizers, for ours: the same questions, with the loss handed over.

What `test_conformance.py`, `test_checkpoints.py`, `test_groups.py` and `test_loss.py` ask already is not repeated here.
"""

from __future__ import annotations

import copy
import functools
import pickle

import pytest
import torch
from files import through_disk
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Parameter
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from proxsps.optim import DecSPS, ProxSGD, ProxSPSAdam
from proxsps.regularizers import L1, GroupLasso

INPUTS = {
    "default": {},
    "lr": {"lr": 0.01},
    "tensor lr": {"lr": torch.tensor(0.01)},
    "weight decay": {"weight_decay": 0.1},
    "L1": {"regularizer": L1(0.01)},
    "rows": {"regularizer": GroupLasso(0.01)},
    "max_move": {"max_move": 0.5},
    "torch alone": {"fused": False},
    "capturable": {"capturable": True, "weight_decay": 0.1},
    "capturable search": {"capturable": True, "regularizer": L1(0.01)},
}
with_inputs = pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS)
FEW = {name: INPUTS[name] for name in ("tensor lr", "L1", "capturable")}
with_few_inputs = pytest.mark.parametrize("options", FEW.values(), ids=FEW)
CARRIERS = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    **{f"pickle {p}": lambda o, p=p: pickle.loads(pickle.dumps(o, p)) for p in range(2, pickle.HIGHEST_PROTOCOL + 1)},
    "torch.save": lambda o: through_disk(o, weights_only=False),
}


class Affine:
    """||W x + b||^2 for one input x, with a closure for optimizers of W and b."""

    def __init__(self, seed=0, contiguous=True, dtype=torch.float32, like=None):
        generator = torch.Generator().manual_seed(seed)
        weight = torch.randn(10, 5, 2, generator=generator, dtype=dtype)[..., 0]
        bias = torch.randn(10, 2, generator=generator, dtype=dtype)[..., 0]
        self.input = torch.randn(5, generator=generator, dtype=dtype)
        if like is not None:
            weight, bias = like.weight.detach(), like.bias.detach()
        self.weight, self.bias = (Parameter(x.clone() if contiguous or like is not None else x) for x in (weight, bias))

    @property
    def params(self):
        return [self.weight, self.bias]

    @property
    def named(self):
        return [("weight", self.weight), ("bias", self.bias)]

    def loss(self):
        return (self.weight.mv(self.input) + self.bias).square().sum()

    def closure(self, opt):
        opt.zero_grad()
        loss = self.loss()
        loss.backward()
        return loss

    def run(self, opt, steps):
        for _ in range(steps):
            opt.step(functools.partial(self.closure, opt))
        return self.loss().item()


def without_names(state):
    state = copy.deepcopy(state)
    for group in state["param_groups"]:
        group.pop("param_names", None)
    return state


# -- what the constructor does not take -------------------------------------------------------------------------------


def test_parameters_that_torch_refuses_are_refused_with_its_words(case, kit):
    a, b = kit.drawn((2, 2), (2, 2))
    with pytest.raises(TypeError, match="iterable of Tensors or dicts"):
        case.make(a)
    with pytest.raises(TypeError, match="can only optimize Tensors"):
        case.make([0.5])
    with pytest.raises(ValueError, match="non-leaf"):
        case.make([a * 2])
    with pytest.raises(ValueError, match="more than one parameter group"):
        case.make([{"params": a}, {"params": [a, b]}])
    with pytest.raises(ValueError, match=r"with/without names\. Some param names are missing"):
        case.make([("weight", a), b])
    with pytest.raises(ValueError, match=r"with/without names\. cannot add param group with names"):
        case.make([{"params": [a], "lr": 0.01}, {"params": [("weight", b)]}])
    with pytest.raises(ValueError, match=r"with/without names\. cannot add param group without names"):
        case.make([{"params": [("weight", a)]}, {"params": [b]}])


def test_a_parameter_that_is_given_twice_to_a_group_is_warned_of(case, kit):
    (a,) = kit.drawn((2, 2))
    with pytest.warns(UserWarning, match="duplicate parameters"):
        case.make([a, a])


@pytest.mark.parametrize("kind", ["generator", "tuple", "single tensor", "named_parameters"])
def test_parameters_come_in_every_form_that_torch_takes(case, kind):
    model = torch.nn.Linear(3, 2)
    params = {
        "generator": model.parameters(),
        "tuple": tuple(model.parameters()),
        "single tensor": [{"params": model.weight}, {"params": model.bias}],
        "named_parameters": model.named_parameters(),
    }[kind]
    opt = case.make(params)
    assert isinstance(opt, torch.optim.Optimizer)
    assert [p for group in opt.param_groups for p in group["params"]] == [model.weight, model.bias]


def test_options_become_defaults_and_options_of_groups(case):
    problem = Affine()
    options = {"lr": 0.125, "weight_decay": 0.25, "max_move": 3.0, "capturable": True, "fused": False}
    opt = case.make([{"params": [problem.weight]}, {"params": [problem.bias], "lr": 0.5}], **options)
    assert opt.defaults == {**opt.defaults, **options}
    assert opt.param_groups[0] == {**opt.param_groups[0], **options}
    assert opt.param_groups[1] == {**opt.param_groups[1], **options, "lr": 0.5}


# -- the right direction ----------------------------------------------------------------------------------------------


@with_inputs
@pytest.mark.parametrize("contiguous", [True, False])
def test_steps_go_in_the_right_direction(case, options, contiguous):
    problem = Affine(contiguous=contiguous)
    assert problem.weight.is_contiguous() is contiguous
    opt = case.make(problem.params, **({"lr": 0.005, **options} if case.cls is ProxSGD else options))
    before = problem.loss().item()
    assert problem.run(opt, 20) < before


@with_inputs
def test_a_group_without_weight_decay_of_its_own(case, options):
    if "regularizer" in options:
        options = {**options, "regularizer": None}
    problem = Affine()
    rest = {key: value for key, value in options.items() if key != "weight_decay"}
    groups = [{"params": [problem.weight], **options}, {"params": [problem.bias], **rest, "weight_decay": 0.0}]
    before = problem.loss().item()
    assert problem.run(case.make(groups, lr=0.005), 20) < before


@with_inputs
def test_a_group_with_next_to_no_cap_does_not_move(case, options):
    problem, irrelevant = Affine(), Parameter(torch.randn(2))
    kept, before = irrelevant.detach().clone(), problem.loss().item()
    shared = {key: value for key, value in options.items() if key in ("max_move", "fused", "capturable")}
    own = {"lr": 0.005, **{key: value for key, value in options.items() if key not in shared}}
    opt = case.make([{"params": problem.params, **own}, {"params": [irrelevant]}], **{**shared, "lr": 1e-28})
    for _ in range(20):
        loss = problem.closure(opt)
        irrelevant.grad = torch.rand_like(irrelevant)
        opt.step(loss=loss)
    assert problem.loss().item() < before
    torch.testing.assert_close(irrelevant.detach(), kept)


def test_averaged_weights_and_their_schedule(case):
    problem = Affine()
    model = torch.nn.ParameterList(problem.params)
    opt = case.make(model.parameters(), lr=0.01)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    schedule = torch.optim.swa_utils.SWALR(opt, swa_lr=0.005, anneal_epochs=3)
    seen = []
    for _ in range(5):
        problem.run(opt, 1)
        averaged.update_parameters(model)
        schedule.step()
        seen.append(problem.weight.detach().clone())
    assert opt.param_groups[0]["lr"] == pytest.approx(0.005)
    torch.testing.assert_close(averaged.module[0].detach(), torch.stack(seen).mean(0))


# -- every path computes the same -------------------------------------------------------------------------------------

PATHS = {
    "default": {},
    "capturable": {"capturable": True},
    "tensor lr": {"lr": torch.tensor(0.05, dtype=torch.float64)},
    "one-element lr": {"lr": torch.tensor([0.05], dtype=torch.float64)},
    "capturable tensor lr": {"capturable": True, "lr": torch.tensor([0.05], dtype=torch.float64)},
}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1}, {"regularizer": L1(0.01)}], ids=["plain", "l2", "l1"])
def test_every_path_follows_plain_torch_on_a_network(case, options, path):
    states = []
    for own in ({"fused": False, "lr": 0.05}, {"lr": 0.05, **path}):
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Sigmoid(), torch.nn.Linear(3, 1)).double()
        scalar, empty = (Parameter(torch.rand(shape, dtype=torch.float64)) for shape in ((), (0, 3)))
        inputs = torch.linspace(0.1, 0.6, 6, dtype=torch.float64).reshape(3, 2)
        opt = case.make([*model.parameters(), scalar, empty], **options, **own)
        for k in range(7):
            opt.zero_grad()
            loss = model(inputs).square().sum() + (scalar * empty.sum() + scalar).square()
            if k == 3:  # a step without gradients is none
                with pytest.warns(RuntimeWarning, match="No parameter has a gradient"):
                    opt.step(loss=loss)
                continue
            loss.backward()
            opt.step(loss=loss)
        assert empty.grad is not None
        states.append([p.detach() for p in (*model.parameters(), scalar, empty)])
    # Rounding grows from step to step, and the search for the dual variable stops at a small gap.
    tolerance = 1e-5 if "regularizer" in options else 1e-10
    torch.testing.assert_close(*states, rtol=tolerance, atol=tolerance)


@with_inputs
def test_complex_parameters_among_real_ones_step_as_their_real_views(case, options):
    if "regularizer" in options:
        options = {**options, "regularizer": None}
    generator = torch.Generator().manual_seed(0)
    kinds = ((8, torch.complex64), (2, torch.complex64), (8, torch.float32))
    complexes = [torch.randn(rows, 5, dtype=dtype, generator=generator).requires_grad_() for rows, dtype in kinds]
    reals = [torch.view_as_real_copy(p.detach()) if p.is_complex() else p.detach().clone() for p in complexes]
    reals = [p.requires_grad_() for p in reals]
    one, two = case.make(complexes, **options), case.make(reals, **options)
    for _ in range(3):
        for p, q in zip(complexes, reals, strict=True):
            p.grad = torch.randn(p.shape, dtype=p.dtype, generator=generator)
            q.grad = torch.view_as_real(p.grad).clone() if p.is_complex() else p.grad.clone()
        one.step(loss=0.5)
        two.step(loss=0.5)
        for p, q in zip(complexes, reals, strict=True):
            torch.testing.assert_close(torch.view_as_real(p.detach()) if p.is_complex() else p.detach(), q.detach())


def test_a_complex_variable_follows_its_two_real_parts(case):
    def rosenbrock(z):
        return ((1 - z[0]).abs().square() + 100 * (z[1] - z[0] ** 2).abs().square()).real

    start = torch.tensor([0.5 + 0.1j, -0.3 + 0.2j], dtype=torch.complex128)
    z, re, im = start.clone().requires_grad_(), start.real.clone().requires_grad_(), start.imag.clone().requires_grad_()
    # With an lr: a distance cap samples other entries of two tensors than of one.
    one, two = case.make([z], lr=1e-3), case.make([re, im], lr=1e-3)
    for _ in range(10):
        for opt, point in ((one, z), (two, torch.complex(re, im))):
            opt.zero_grad()
            loss = rosenbrock(point)
            loss.backward()
            opt.step(loss=loss)
        torch.testing.assert_close(torch.view_as_real(z.detach()), torch.stack([re, im], -1).detach())


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["default", "capturable"])
def test_parameters_of_four_dtypes_share_one_step(case, options):
    dtypes = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    low = [Parameter(torch.randn(3, 33, generator=generator).to(dtype)) for dtype in dtypes]
    high = [Parameter(p.detach().to(torch.float64, copy=True)) for p in low]
    for p, q in zip(low, high, strict=True):
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)
        q.grad = p.grad.double()
    # The loss is large, so that the step is the cap, and a tensor that stays where it is would show. One step only:
    # the distance cap of a second one would be that of parameters that were rounded.
    lr = {} if case.lr is None else {"lr": 0.1}
    case.make(low, **lr, **options).step(loss=500.0)
    case.make(high, **lr, fused=False).step(loss=500.0)
    for p, q in zip(low, high, strict=True):
        eps = max(torch.finfo(p.dtype).eps, torch.finfo(torch.float32).eps)
        assert p.dtype is not q.dtype or p.dtype is torch.float64
        torch.testing.assert_close(p.detach().double(), q.detach(), rtol=2 * eps, atol=2 * eps)


@with_inputs
def test_the_default_dtype_does_not_matter(case, options):
    start = torch.get_default_dtype()
    results = []
    try:
        for dtype in (torch.float32, torch.float64):
            torch.set_default_dtype(dtype)
            problem = Affine()
            problem.run(case.make(problem.params, **options), 5)
            results.append(problem.weight.detach())
    finally:
        torch.set_default_dtype(start)
    assert torch.equal(*results)


def test_parameters_on_two_devices_are_refused(case):
    here, there = Parameter(torch.ones(3)), Parameter(torch.ones(3, device="meta"))
    here.grad, there.grad = torch.ones(3), torch.ones(3, device="meta")
    with pytest.raises(ValueError, match=r"must be on one device, got \['cpu', 'meta'\]"):
        case.make([here, there]).step(loss=0.5)


# -- tensors without values -------------------------------------------------------------------------------------------


@with_inputs
def test_a_step_over_fake_tensors_runs_as_that_of_sgd_does(case, options):
    with FakeTensorMode():
        problem = torch.nn.Linear(5, 3)
        options = {**options, "lr": torch.tensor(0.1)} if "lr" in options else options
        opt = case.make(problem.parameters(), **options)
        for _ in range(2):
            opt.zero_grad()
            loss = problem(torch.randn(4, 5)).square().mean()
            loss.backward()
            opt.step(loss=loss)
        assert opt.last_step.tau.shape == (1,)


def test_a_step_on_the_meta_device_has_nothing_to_do(case):
    model = torch.nn.Linear(5, 3, device="meta")
    opt = case.make(model.parameters())
    loss = model(torch.empty(4, 5, device="meta")).square().mean()
    loss.backward()
    assert opt.step(loss=loss) is loss
    assert opt.last_step is None


def test_values_and_meta_tensors_do_not_mix(bounded_case):
    real, meta = torch.nn.Linear(5, 3), torch.nn.Linear(5, 3, device="meta")
    for model in (real, meta):
        model(torch.ones(4, 5, device=model.weight.device)).square().mean().backward()
    before = real.weight.detach().clone()
    with pytest.raises(ValueError, match="loss is on the meta device"):
        bounded_case.make(real.parameters()).step(loss=torch.ones((), device="meta"))
    with pytest.raises(ValueError, match=r"Parameters are on the meta device.*to_empty"):
        bounded_case.make(meta.parameters()).step(loss=0.5)
    with pytest.raises(ValueError, match="lr has a shape, but no value"):
        bounded_case.make(real.parameters(), lr=torch.ones((), device="meta"))
    assert torch.equal(real.weight.detach(), before)


# -- steps that change nothing ----------------------------------------------------------------------------------------


@with_inputs
def test_parameters_that_need_no_gradient_stay(case, options):
    params = [torch.randn(2, 3) for _ in range(2)]
    before = [p.clone() for p in params]
    opt = case.make(params, **options)
    with pytest.warns(RuntimeWarning, match="No parameter has a gradient"):
        opt.step(lambda: torch.tensor([1.0]))
    assert all(map(torch.equal, params, before))


@with_inputs
def test_zero_and_empty_gradients_change_nothing(case, options):
    options = {key: value for key, value in options.items() if key not in ("weight_decay", "regularizer")}
    param, empty = Parameter(torch.randn(5, 1)), Parameter(torch.empty(0, 4))
    before = param.detach().clone()
    param.grad, empty.grad = torch.zeros(5, 1), torch.zeros(0, 4)
    opt = case.make([param, empty], **options)
    opt.step(lambda: torch.tensor([1.0]))
    assert torch.equal(param.detach(), before)
    empty_alone = case.make([empty], **options)
    empty_alone.step(loss=1.0)


@pytest.mark.parametrize("fused", [None, True])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_has_the_meaning_of_torch(case, set_to_none, fused):
    if fused:
        pytest.importorskip("numba")
    problem = Affine()
    opt = case.make(problem.params, fused=fused)
    loss = problem.loss()
    (gradient,) = torch.autograd.grad(loss, problem.weight, create_graph=True)
    problem.weight.grad, problem.bias.grad = gradient, None
    opt.zero_grad(set_to_none)
    assert problem.bias.grad is None
    if set_to_none:
        assert problem.weight.grad is None
    else:
        assert problem.weight.grad.grad_fn is None
        assert not problem.weight.grad.any()


# -- the closure and hooks around the step ----------------------------------------------------------------------------


@pytest.mark.parametrize("loss", [1, 0.5, torch.tensor(0.5), torch.tensor([10.0])], ids=repr)
def test_a_step_returns_the_loss_of_the_closure(case, kit, loss):
    assert case.make(kit.drawn((3,))).step(lambda: loss) is loss


def test_step_hooks_run_until_they_are_removed(case, kit):
    opt, seen = case.make(kit.drawn((3,))), []
    handles = [
        opt.register_step_pre_hook(lambda *_: seen.append("before")),
        opt.register_step_post_hook(lambda *_: seen.append("after")),
    ]
    opt.step(loss=0.5)
    opt.step(loss=0.5)
    for handle in handles:
        handle.remove()
    opt.step(loss=0.5)
    assert seen == ["before", "after"] * 2


def test_hooks_of_all_optimizers_run_around_those_of_one(case, kit):
    params, seen = kit.drawn((3,)), []
    opt, other = case.make(params), torch.optim.SGD(params)
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append(0)),
        register_optimizer_step_post_hook(lambda *_: seen.append(5)),
        *(o.register_step_pre_hook(lambda *_: seen.append(1)) for o in (opt, other)),
        *(o.register_step_post_hook(lambda *_: seen.append(2)) for o in (opt, other)),
    ]
    opt.step(loss=0.5)
    other.step()
    opt.step(loss=0.5)
    for handle in handles:
        handle.remove()
    opt.step(loss=0.5)
    assert seen == [0, 1, 2, 5] * 3


def test_a_hook_may_change_the_arguments_of_a_step(bounded_case, kit):
    one, two = kit.drawn((3,)), kit.drawn((3,))
    opt = bounded_case.make(one)
    opt.register_step_pre_hook(lambda o, args, kwargs: (args, {**kwargs, "loss": 0.25}))
    opt.step(loss=1000.0)
    bounded_case.make(two).step(loss=0.25)
    assert torch.equal(kit.flat(one), kit.flat(two))


def test_the_profiler_finds_steps_by_the_name_of_the_optimizer(case, kit):
    opt = case.make(kit.drawn((3,)))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        opt.step(loss=0.5)
        opt.zero_grad()
    names = {event.name for event in profile.events()}
    name = case.cls.__name__
    assert {f"Optimizer.step#{name}.step", f"Optimizer.zero_grad#{name}.zero_grad"} <= names


# -- dictionaries of state --------------------------------------------------------------------------------------------


@with_few_inputs
@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True), (True, True)], ids=str)
def test_equal_optimizers_have_equal_dictionaries(case, kit, options, named):
    problem = Affine()
    opt = case.make(problem.named if named[0] else problem.params, **options)
    problem.run(opt, 5)
    twin_problem = Affine(like=problem)
    twin = case.make(twin_problem.named if named[1] else twin_problem.params, **options)
    twin.load_state_dict(copy.deepcopy(opt.state_dict()))
    for _ in range(5):
        problem.run(opt, 1)
        twin_problem.run(twin, 1)
        assert torch.equal(problem.weight, twin_problem.weight)
        assert torch.equal(problem.bias, twin_problem.bias)
    assert kit.same(without_names(opt.state_dict()), without_names(twin.state_dict()))
    if any(named):
        assert twin.state_dict()["param_groups"][0]["param_names"] == ["weight", "bias"]
    twin.param_groups.extend(twin.param_groups)  # parameters that are repeated keep their place
    assert without_names(opt.state_dict())["param_groups"][-1] == without_names(twin.state_dict())["param_groups"][-1]


@with_few_inputs
@pytest.mark.parametrize("flag", ["fused", "capturable", "max_move", "weight_decay", "all"])
def test_dictionaries_from_before_an_option_load(case, options, flag):
    problem = Affine()
    opt = case.make(problem.params, **options)
    problem.run(opt, 3)
    state = opt.state_dict()
    gone = ("fused", "capturable", "max_move", "weight_decay") if flag == "all" else (flag,)
    for group in state["param_groups"]:
        for key in gone:
            del group[key]
    opt.load_state_dict(state)
    filled = opt.param_groups[0]
    assert set(filled) == {"params", *opt.defaults}
    assert filled["regularizer"] == options.get("regularizer")
    assert [filled[key] for key in gone] == [opt.defaults[key] for key in gone]
    problem.run(opt, 1)


@with_inputs
@pytest.mark.parametrize("named", [False, True])
def test_dictionaries_survive_the_disk(case, kit, options, named):
    problem = Affine()
    opt = case.make(problem.named if named else problem.params, **options)
    problem.run(opt, 3)
    state = opt.state_dict()
    assert kit.same(through_disk(state, weights_only=True), state)
    assert kit.same(through_disk(state, weights_only=False), state)


@pytest.mark.parametrize("options", [{}, {"capturable": True}], ids=["default", "capturable"])
def test_a_dictionary_goes_from_one_precision_to_another(case, kit, options):
    problem, wide = Affine(), Affine(dtype=torch.float64)
    opt = case.make(problem.params, **options)
    problem.run(opt, 3)
    state = opt.state_dict()
    kept = copy.deepcopy(state)
    wider = case.make(wide.params, **options)
    wider.load_state_dict(state)
    before = wide.loss().item()
    assert wide.run(wider, 5) <= before
    assert kit.same(state, kept)


@pytest.mark.parametrize(("cls", "key"), [(DecSPS, "memory"), (ProxSPSAdam, "reach")])
def test_memory_may_be_numbers_or_tensors(cls, key):
    # A capturable optimizer saves tensors, another one numbers; each loads the other's.
    for first, second in ((False, True), (True, False)):
        problem = Affine()
        opt = cls(problem.params, capturable=first)
        problem.run(opt, 3)
        state = opt.state_dict()
        assert isinstance(state["param_groups"][0][key], torch.Tensor) is first
        twin_problem = Affine(like=problem)
        twin = cls(twin_problem.params, capturable=second)
        twin.load_state_dict(state)
        twin.param_groups[0]["capturable"] = second
        problem.run(opt, 1)
        twin_problem.run(twin, 1)
        torch.testing.assert_close(problem.weight, twin_problem.weight)


def test_hooks_of_saving(case, kit):
    def before(opt):
        opt.state["test"] = 1

    def after(opt, state):
        state["seen"] = state["state"].pop("test", None)
        return state

    opt = case.make(kit.drawn((2, 3)))
    handle = opt.register_state_dict_post_hook(after)
    assert opt.state_dict()["seen"] is None
    handle.remove()
    handle = opt.register_state_dict_pre_hook(before)
    assert opt.state_dict()["state"]["test"] == 1
    opt.register_state_dict_post_hook(after)
    state = opt.state_dict()
    assert state["seen"] == 1
    assert "test" not in state["state"]
    assert isinstance(state["param_groups"][0]["regularizer"], (str, type(None)))


def test_a_hook_of_saving_may_return_another_dictionary(case, kit):
    opt = case.make(kit.drawn((2, 3)))
    opt.register_state_dict_post_hook(lambda o, state: {"only": len(state["param_groups"])})
    assert opt.state_dict() == {"only": 1}


def test_hooks_of_saving_see_plain_data(case, kit):
    opt, seen = case.make(kit.drawn((2, 3)), regularizer=L1(0.1)), []
    opt.register_state_dict_post_hook(lambda o, state: seen.append(state["param_groups"][0]["regularizer"]))
    opt.state_dict()
    assert seen == ["L1(lam=0.1)"]


def test_hooks_of_loading(case, kit):
    def in_place(opt, state):
        state["param_groups"][0]["lr"] = 0.002

    def replaced(opt, state):
        state = copy.deepcopy(state)
        state["param_groups"][0]["lr"] = 0.003
        return state

    def after(opt):
        opt.state["lr"] = opt.param_groups[0]["lr"]

    opt = case.make(kit.drawn((2, 3)))
    opt.register_load_state_dict_pre_hook(in_place)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.002
    opt.register_load_state_dict_pre_hook(replaced, prepend=True)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lr"] == 0.002  # the one put first was overruled
    opt.register_load_state_dict_pre_hook(replaced)
    opt.register_load_state_dict_post_hook(after)
    opt.load_state_dict(opt.state_dict())
    assert opt.state["lr"] == 0.003


def test_state_is_empty_or_in_the_groups(case):
    problem = Affine()
    opt = case.make(problem.params)
    problem.run(opt, 1)
    assert not opt.state
    assert opt.param_groups[0].get("k") == (1.0 if case.cls is DecSPS else None)


# -- copies -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("carry", CARRIERS.values(), ids=CARRIERS)
@with_few_inputs
def test_copies_have_the_same_attributes_and_dictionary(case, kit, options, carry):
    problem = Affine()
    opt = case.make(problem.named, **options)
    problem.run(opt, 3)
    other = carry(opt)
    assert type(other) is type(opt)
    assert {k for k in vars(other) if not k.startswith("_")} == {k for k in vars(opt) if not k.startswith("_")}
    assert kit.same(other.state_dict(), opt.state_dict())
    assert repr(other) == repr(opt)
    assert other.defaults == opt.defaults
    for p in other.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    other.step(loss=0.5)
    other.zero_grad()
    other.add_param_group({"params": [("later", Parameter(torch.zeros(2)))]})
    assert other.param_groups[1]["max_move"] == options.get("max_move")


@with_inputs
def test_an_optimizer_can_be_printed(case, options):
    opt = case.make(Affine().params, **options)
    lines = repr(opt).splitlines()
    assert lines[0].startswith(case.cls.__name__)
    assert {line.split(":")[0].strip() for line in lines[2:-1]} == set(opt.defaults)
