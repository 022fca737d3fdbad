"""Options of parameter groups: those of one group, those of the whole step, and keys that are no options."""

from __future__ import annotations

import copy
import inspect
import math
import pickle

import pytest
import torch

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam, ScheduleFreeSPS
from proxsps.regularizers import L1, Box, GroupLasso, NuclearNorm

SHARED = {"lower_bound": 0.25, "max_move": 0.125, "fused": False, "capturable": True, "c": 2.0, "c0": 2.0}
OPTIMIZERS = (ProxSPS, SPS, DecSPS, ProxSGD)
PAIRS = [(cls, key) for cls in OPTIMIZERS for key in SHARED if key in inspect.signature(cls).parameters]
of_the_whole_step = pytest.mark.parametrize(
    ("cls", "key"), PAIRS, ids=lambda x: x if isinstance(x, str) else x.__name__
)


def step(opt, loss=0.5):
    opt.step(loss=loss)
    return torch.cat([p.detach().reshape(-1) for group in opt.param_groups for p in group["params"]])


# -- options of the whole step ----------------------------------------------------------------------------------------


@of_the_whole_step
def test_an_option_of_the_whole_step_written_into_one_group_raises(cls, kit, key):
    a, b = kit.drawn((3,), (4,))
    opt = cls([{"params": [a]}, {"params": [b]}])
    before = kit.points([a, b])
    for i in (1, 0):
        old, opt.param_groups[i][key] = opt.param_groups[i][key], SHARED[key]
        with pytest.raises(
            ValueError, match=rf"{key} cannot differ between parameter groups.* in group 1\. Pass it to"
        ):
            opt.step(loss=0.5)
        opt.param_groups[i][key] = old
    assert all(map(torch.equal, kit.points([a, b]), before))
    opt.step(loss=0.5)


@of_the_whole_step
def test_an_option_of_the_whole_step_may_be_written_into_all_groups(cls, kit, key):
    written = cls([{"params": [p]} for p in kit.drawn((3,), (4,))])
    given = cls([{"params": [p]} for p in kit.drawn((3,), (4,))], **{key: SHARED[key]})
    for group in written.param_groups:
        group[key] = SHARED[key]
    assert torch.equal(step(written), step(given))


@of_the_whole_step
def test_groups_that_agree_on_an_option_of_the_whole_step_are_taken(cls, kit, key):
    by_group = cls([{"params": [p], key: SHARED[key]} for p in kit.drawn((3,), (4,))])
    given = cls([{"params": [p]} for p in kit.drawn((3,), (4,))], **{key: SHARED[key]})
    assert torch.equal(step(by_group), step(given))
    assert by_group.param_groups[0][key] == SHARED[key]


@of_the_whole_step
@pytest.mark.parametrize("which", [0, 1])
def test_an_option_of_the_whole_step_given_to_one_group_of_two_is_refused(cls, kit, key, which):
    groups = [{"params": [p]} for p in kit.drawn((3,), (4,))]
    groups[which][key] = SHARED[key]
    with pytest.raises(ValueError, match=f"{key} cannot differ between parameter groups"):
        cls(groups)


@of_the_whole_step
def test_a_group_added_later_takes_the_options_of_the_whole_step(cls, kit, key):
    a, b, c = kit.drawn((3,), (4,), (5,))
    opt = cls([a])
    opt.param_groups[0][key] = SHARED[key]
    opt = copy.deepcopy(opt)
    opt.add_param_group({"params": [b]})
    assert opt.param_groups[1][key] == SHARED[key]
    with pytest.raises(ValueError, match=f"{key} cannot differ between parameter groups.* in group 2"):
        opt.add_param_group({"params": [c], key: opt.defaults[key]})
    assert len(opt.param_groups) == 2


def test_tensors_for_an_option_of_the_whole_step_are_compared_by_value(bounded_case, kit):
    bound = torch.tensor(0.25)
    opt = bounded_case.make([{"params": [p]} for p in kit.drawn((3,), (4,))], lower_bound=bound)
    opt.step(loss=0.5)
    opt.load_state_dict(opt.state_dict())
    assert opt.param_groups[0]["lower_bound"] is not opt.param_groups[1]["lower_bound"]
    opt.step(loss=0.5)
    opt.param_groups[1]["lower_bound"] = torch.tensor(0.5)
    with pytest.raises(ValueError, match="lower_bound cannot differ"):
        opt.step(loss=0.5)


@pytest.mark.parametrize("value", [math.nan, "0.5"])
def test_the_bound_of_a_group_is_checked(bounded_case, kit, value):
    with pytest.raises(ValueError, match="lower_bound must be"):
        bounded_case.make([{"params": kit.drawn((3,)), "lower_bound": value}])


def test_the_limit_of_a_group_is_checked(case, kit):
    with pytest.raises(ValueError, match="max_move must be a positive number"):
        case.make([{"params": kit.drawn((3,)), "max_move": -1.0}])


@pytest.mark.parametrize(("cls", "key"), [(SPS, "c"), (DecSPS, "c0")])
def test_the_constant_of_a_group_is_checked(kit, cls, key):
    with pytest.raises(ValueError, match=f"{key} must be a positive number, got -1"):
        cls([{"params": kit.drawn((3,)), key: -1.0}])


# -- keys that are no options -----------------------------------------------------------------------------------------

TAGS = {
    "name": "backbone",
    "group_name": "head",
    "lr_scale": 0.5,
    "lr_mult": 2.0,
    "weight_decay_mult": 0.0,
    "max_lr": 1.0,
    "param_name": "x",
    "layer": 3,
    7: "seven",
}


@pytest.mark.parametrize("key", TAGS, ids=str)
def test_keys_of_the_user_s_own_are_kept(case, kit, key):
    tagged = case.make([{"params": kit.drawn((3,)), key: TAGS[key]}])
    plain = case.make(kit.drawn((3,)))
    assert torch.equal(step(tagged), step(plain))
    tagged.add_param_group({"params": kit.drawn((4,)), key: TAGS[key]})
    for opt in (copy.deepcopy(tagged), pickle.loads(pickle.dumps(tagged))):
        opt.load_state_dict(opt.state_dict())
        assert [group[key] for group in opt.param_groups] == [TAGS[key]] * 2


MISSPELT = {
    "regulariser": "regularizer",
    "regularisation": "regularizer",
    "Regularizer": "regularizer",
    "weigth_decay": "weight_decay",
    "weight-decay": "weight_decay",
    "wd": "weight_decay",
    "learning_rate": "lr",
    "LR": "lr",
    "max_moves": "max_move",
}


@pytest.mark.parametrize("key", MISSPELT)
def test_misspelt_options_of_a_group_are_refused_with_a_hint(case, kit, key):
    with pytest.raises(
        ValueError, match=rf"Unknown key '{key}'.*{case.cls.__name__}.*Did you mean '{MISSPELT[key]}'\?"
    ):
        case.make([{"params": kit.drawn((3,)), key: 0.1}])
    opt = case.make(kit.drawn((3,)))
    with pytest.raises(ValueError, match=rf"Did you mean '{MISSPELT[key]}'\?"):
        opt.add_param_group({"params": kit.drawn((4,)), key: 0.1})
    assert len(opt.param_groups) == 1


@pytest.mark.parametrize("key", MISSPELT)
def test_misspelt_options_of_the_constructor_are_refused_with_a_hint(case, kit, key):
    with pytest.raises(
        TypeError,
        match=rf"{case.cls.__name__}\(\) got an unexpected keyword argument '{key}'.*mean '{MISSPELT[key]}'\?",
    ):
        case.cls(kit.drawn((3,)), **{key: L1(0.1)})


def test_an_option_that_nobody_knows_lists_those_that_exist(case, kit):
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'xyzzy'\. Known names: .*lr.*weight_decay"):
        case.cls(kit.drawn((3,)), xyzzy=1)


def test_a_subclass_may_take_options_of_its_own(case, kit):
    class Sub(case.cls):
        def __init__(self, params, **options):
            self.tag = options.pop("tag")
            super().__init__(params, **options)

    opt = Sub(kit.drawn((3,)), tag="a", lr=0.5)
    assert (opt.tag, opt.param_groups[0]["lr"]) == ("a", 0.5)


ABSENT = {
    "maximize": True,
    "differentiable": True,
    "momentum": 0.9,
    "nesterov": True,
    "betas": (0.9, 0.99),
    "amsgrad": True,
}


@pytest.mark.parametrize("key", ABSENT)
def test_options_of_other_optimizers_that_would_change_the_step_are_refused(case, kit, key):
    if key in case.make(kit.drawn((3,))).defaults:
        return
    advice = ".*torch's optimizers.*" + ("Minimise the negated loss" if key == "maximize" else "")
    with pytest.raises(TypeError, match=f"unexpected keyword argument '{key}'{advice}"):
        case.make(kit.drawn((3,)), **{key: ABSENT[key]})
    with pytest.raises(ValueError, match=f"{key}=.*an option that {case.cls.__name__} does not have"):
        case.make([{"params": kit.drawn((3,)), key: ABSENT[key]}])
    case.make([{"params": kit.drawn((3,)), "maximize": False}])


def test_a_bound_in_a_group_of_an_optimizer_without_one_is_refused(kit):
    with pytest.raises(ValueError, match=r"lower_bound=0\.0, an option that ProxSGD does not have"):
        ProxSGD([{"params": kit.drawn((3,)), "lower_bound": 0.0}])


def test_what_is_no_group_is_refused_as_torch_does(case, kit):
    opt = case.make(kit.drawn((3,)))
    with pytest.raises(TypeError, match="param_group must be a dict"):
        opt.add_param_group(kit.drawn((4,)))
    with pytest.raises(TypeError, match="ordered collections"):
        opt.add_param_group({"params": set(kit.drawn((4,)))})
    assert len(opt.param_groups) == 1


def test_a_list_of_which_a_part_does_not_fit_adds_no_group():
    first, matrix, vector = (torch.nn.Parameter(torch.ones(shape)) for shape in ((2, 2), (4, 3), (5,)))
    opt = ScheduleFreeSPS([first])
    with pytest.raises(ValueError, match="does not fit parameter 0"):
        opt.add_param_group({"params": [matrix, vector], "regularizer": GroupLasso(0.1, dims=1)})
    opt.add_param_group({"params": [matrix, vector]})
    assert [len(group["params"]) for group in opt.param_groups] == [1, 1, 1]


@pytest.mark.parametrize(
    ("cls", "phi", "message"),
    [
        (ProxSPS, GroupLasso(0.1, dims=5), "does not fit parameter 0.*group 0.*Nothing was changed"),
        (ProxSPSAdam, NuclearNorm(0.1), "no exact prox"),
        (SPS, Box(-1.0, 1.0), "subgradient"),
        (ScheduleFreeSPS, NuclearNorm(0.1), "no exact prox"),
    ],
)
def test_a_regularizer_that_is_written_into_a_group_is_checked(cls, phi, message):
    param = torch.nn.Parameter(torch.ones(4, 3))
    param.grad = torch.ones(4, 3)
    opt = cls([param])
    step(opt)
    before, opt.param_groups[0]["regularizer"] = param.detach().clone(), phi
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            step(opt)
    assert torch.equal(param, before)
