"""State: only plain data, complete, and of one size for ever."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
from files import through_disk

from proxsps.optim import SPS, DecSPS, ProxSGD, ProxSPS
from proxsps.regularizers import L1

F64 = torch.float64
SHAPES = [(4, 3), (7,)]


def drive(opt, seed, steps=3):
    params = [p for group in opt.param_groups for p in group["params"]]
    for k in range(steps):
        generator = torch.Generator().manual_seed(seed + k)
        for p in params:
            p.grad = torch.randn(p.shape, generator=generator, dtype=F64)
        opt.step(loss=0.3 + k)
    return torch.cat([p.detach().reshape(-1) for p in params])


def reloaded(opt):
    opt.load_state_dict(opt.state_dict())
    return opt


def groups(params, regularizer):
    first, second = params
    return [
        {"params": [first], "lr": 0.7, "weight_decay": 0.1},
        {"params": [second], "lr": 0.4, "regularizer": regularizer},
    ]


@pytest.mark.parametrize("regularizer", [None, L1(0.1)], ids=["plain", "L1"])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("carry", [copy.deepcopy, through_disk], ids=["memory", "disk"])
def test_resuming_gives_bitwise_the_same_next_steps(case, kit, carry, capturable, regularizer):
    params = kit.drawn(*SHAPES)
    opt = case.make(groups(params, regularizer), capturable=capturable)
    drive(opt, seed=0)
    saved = carry(opt.state_dict())
    resumed = case.make(groups([kit.copied(p) for p in params], regularizer), capturable=capturable)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[1]["regularizer"] == regularizer
    assert torch.equal(drive(resumed, seed=5), drive(opt, seed=5))


def test_state_dict_survives_a_round_trip(case, kit):
    opt = case.make(kit.drawn(*SHAPES), weight_decay=0.1)
    drive(opt, seed=0)
    state = through_disk(opt.state_dict())
    assert kit.same(state, opt.state_dict())
    fresh = case.make(kit.drawn(*SHAPES))
    fresh.load_state_dict(state)
    assert kit.same(fresh.state_dict(), state)


def test_a_saved_state_does_not_follow_later_steps(case, kit):
    opt = case.make(kit.drawn(*SHAPES), capturable=True)
    drive(opt, seed=0)
    state = opt.state_dict()
    kept = copy.deepcopy(state)
    drive(opt, seed=5)
    assert kit.same(state, kept)


def test_loading_does_not_tie_an_optimizer_to_the_dictionary(case, kit):
    one, two = case.make(kit.drawn(*SHAPES)), case.make(kit.drawn(*SHAPES))
    drive(one, seed=0)
    state = one.state_dict()
    kept = copy.deepcopy(state)
    two.load_state_dict(state)
    drive(two, seed=5)
    assert kit.same(state, kept)


@pytest.mark.parametrize("regularizer", [None, L1(0.1)], ids=["plain", "L1"])
def test_an_older_dictionary_gets_the_defaults_of_what_it_lacks(case, kit, regularizer):
    opt = case.make(kit.drawn(*SHAPES), regularizer=regularizer)
    state = opt.state_dict()
    state["param_groups"] = [{"params": group["params"], "lr": 0.125} for group in state["param_groups"]]
    older = case.make(kit.drawn(*SHAPES), regularizer=regularizer)
    older.load_state_dict(state)
    assert older.param_groups[0]["lr"] == 0.125
    opt.param_groups[0]["lr"] = 0.125
    assert torch.equal(drive(older, seed=5), drive(opt, seed=5))


def test_another_regularizer_than_the_checkpoint_s_is_said(case, kit):
    state = case.make(kit.drawn(*SHAPES), regularizer=L1(0.1)).state_dict()
    other = case.make(kit.drawn(*SHAPES), regularizer=L1(0.5))
    with pytest.warns(UserWarning, match=r"checkpoint.*regularizer=L1\(lam=0\.1\).*L1\(lam=0\.5\)"):
        other.load_state_dict(state)
    assert other.param_groups[0]["regularizer"] == L1(0.5)


def test_names_of_parameters_are_kept(case, kit):
    opt = case.make(list(zip(["weight", "bias"], kit.drawn(*SHAPES), strict=True)))
    drive(opt, seed=0)
    state = through_disk(opt.state_dict())
    assert state["param_groups"][0]["param_names"] == ["weight", "bias"]
    fresh = case.make(list(zip(["weight", "bias"], kit.drawn(*SHAPES), strict=True)))
    fresh.load_state_dict(state)
    assert fresh.param_groups[0]["param_names"] == ["weight", "bias"]


@pytest.mark.parametrize("carry", [copy.copy, copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o)), reloaded])
def test_no_key_is_added_by_a_copy_or_a_load(case, kit, carry):
    opt = case.make(kit.drawn(*SHAPES))
    groups, defaults = opt.state_dict()["param_groups"], set(opt.defaults)
    other = carry(opt)
    assert other.state_dict()["param_groups"] == groups
    assert set(other.defaults) == defaults
    assert "differentiable" not in repr(other)


def test_a_key_that_earlier_versions_saved_is_dropped(case, kit):
    opt = case.make(kit.drawn(*SHAPES))
    state = opt.state_dict()
    older = copy.deepcopy(state)
    older["param_groups"][0]["differentiable"] = False
    opt.load_state_dict(older)
    assert kit.same(opt.state_dict(), state)


@pytest.mark.parametrize("regularizer", [None, L1(0.1)], ids=["plain", "L1"])
def test_a_flat_distributed_checkpoint_can_be_read_again_and_again(case, kit, tmp_path, regularizer):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    tools = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    options = tools.StateDictOptions(flatten_optimizer_state_dict=True)
    model = torch.nn.Linear(3, 2, dtype=F64)
    opt = case.make(model.parameters(), regularizer=regularizer)
    drive(opt, seed=0)
    saved = tools.get_optimizer_state_dict(model, opt, options=options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that it runs in one process
        dcp.save({"optimizer": saved}, checkpoint_id=tmp_path, no_dist=True)
        for seed in (1, 2):
            drive(opt, seed=seed)
            state = tools.get_optimizer_state_dict(model, opt, options=options)
            dcp.load({"optimizer": state}, checkpoint_id=tmp_path, no_dist=True)
            tools.set_optimizer_state_dict(model, opt, state, options=options)
            assert kit.same(tools.get_optimizer_state_dict(model, opt, options=options), saved)


# -- dictionaries of other optimizers ---------------------------------------------------------------------------------

FOREIGN = {
    "AdamW": torch.optim.AdamW,
    "SGD": torch.optim.SGD,
    "Adagrad": torch.optim.Adagrad,
    "ProxSPS": ProxSPS,
    "SPS": SPS,
    "DecSPS": DecSPS,
    "ProxSGD": ProxSGD,
}


@pytest.mark.parametrize("stepped", [False, True])
@pytest.mark.parametrize("foreign", FOREIGN)
def test_the_state_of_another_optimizer_is_refused_and_nothing_changes(case, kit, foreign, stepped):
    if FOREIGN[foreign] is case.cls:
        return
    params = kit.drawn(*SHAPES)
    other, opt = FOREIGN[foreign](params, lr=0.125), case.make(kit.drawn(*SHAPES), weight_decay=0.25)
    if stepped:
        other.step(lambda: 0.5)
        drive(opt, seed=0)
    before, groups = opt.state_dict(), opt.param_groups
    with pytest.raises(ValueError, match=rf"not one of {case.cls.__name__}: a parameter group (has|lacks) .*Nothing"):
        opt.load_state_dict(other.state_dict())
    assert kit.same(opt.state_dict(), before)
    assert opt.param_groups is groups
    assert case.averaged or not opt.state


def test_a_hook_may_translate_the_state_of_another_optimizer(case, kit):
    other, opt = torch.optim.SGD(kit.drawn(*SHAPES), lr=0.125), case.make(kit.drawn(*SHAPES))

    def translate(_, state):
        groups = [{"params": group["params"], "lr": group["lr"]} for group in state["param_groups"]]
        return {"state": {}, "param_groups": groups}

    opt.register_load_state_dict_pre_hook(translate)
    opt.load_state_dict(other.state_dict())
    assert opt.param_groups[0]["lr"] == 0.125


@pytest.mark.parametrize("change", ["groups", "sizes"])
def test_a_dictionary_of_other_parameters_is_refused_and_nothing_changes(case, kit, change):
    a, b = kit.drawn(*SHAPES)
    opt, other = case.make([a, b]), case.make([{"params": [a]}, {"params": [b]}] if change == "groups" else [a])
    before = opt.state_dict()
    with pytest.raises(ValueError, match=r"different number of parameter groups|doesn't match the size"):
        opt.load_state_dict(other.state_dict())
    assert opt.state_dict() == before


def test_hooks_after_loading_see_the_regularizer(case, kit):
    opt, seen = case.make(kit.drawn(*SHAPES), regularizer=L1(0.1)), []
    opt.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["regularizer"]))
    opt.load_state_dict(opt.state_dict())
    assert seen == [L1(0.1)]


def test_hooks_of_the_state_dict_run(case, kit):
    opt, seen = case.make(kit.drawn(*SHAPES)), []
    opt.register_state_dict_post_hook(lambda o, state: seen.append("saved"))
    opt.register_load_state_dict_pre_hook(lambda o, state: seen.append("loaded"))
    opt.load_state_dict(opt.state_dict())
    assert seen == ["saved", "loaded"]


@pytest.mark.parametrize("lr", [0.0, torch.tensor(0.0)], ids=["float", "tensor"])
def test_a_bare_step_with_lr_zero_and_zero_gradients_is_allowed(case, kit, lr):
    # torch.distributed.checkpoint creates optimizer state this way.
    params = kit.drawn(*SHAPES, scale=0.0)
    opt, before = case.make(params, weight_decay=0.3), kit.points(params)
    usual, opt.param_groups[0]["lr"] = opt.param_groups[0]["lr"], lr
    opt.step()
    assert all(map(torch.equal, kit.points(params), before))
    opt.param_groups[0]["lr"] = usual
    assert drive(opt, seed=1).isfinite().all()
    fresh = case.make(kit.drawn(*SHAPES), weight_decay=0.3)
    assert torch.equal(drive(fresh, seed=1), torch.cat([p.detach().reshape(-1) for p in params]))


def test_torch_distributed_checkpoint_reads_and_writes_the_state(case, kit):
    dcp = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = torch.nn.Linear(3, 2, dtype=F64)
    opt = case.make(model.parameters(), weight_decay=0.1)
    drive(opt, seed=0)
    state = dcp.get_optimizer_state_dict(model, opt)
    other = torch.nn.Linear(3, 2, dtype=F64)
    other.load_state_dict(model.state_dict())
    resumed = case.make(other.parameters(), weight_decay=0.1)
    dcp.set_optimizer_state_dict(other, resumed, state)
    assert torch.equal(drive(resumed, seed=5), drive(opt, seed=5))
