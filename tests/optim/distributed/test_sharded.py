"""Sharded training: norms, inner products and proxes over shards are those of the whole parameters."""

from __future__ import annotations

import common
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def close(got, want, tolerance=1e-12):
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_every_method_takes_the_steps_of_one_process_on_the_joint_batch(sharded):
    for outcome in sharded.of("joint"):
        for (_, dtype), (got, want, _) in outcome.items():
            close(got, want, TOLERANCE[dtype])


def test_regularizers_on_shards_and_on_gathered_tensors(sharded):
    for outcome in sharded.of("regularizers"):
        assert len(outcome) == 11
        for got, want, seen in outcome.values():
            close(got, want)
            assert "inside" in {branch for branch, _ in seen}


def test_a_group_of_which_one_rank_has_nothing(sharded):
    """All ranks take part in its search, and in its limit on the move."""
    branches = set()
    for outcome in sharded.of("one_row"):
        for got, want, seen in outcome.values():
            close(got, want, 1e-11)
            branches |= set(seen)
    assert {("inside", False), ("inside", True)} <= branches


def test_units_need_all_their_tensors_and_gather_them(sharded):
    for outcome in sharded.of("units"):
        (text,) = outcome.pop("missing")
        assert "each must have a gradient, but parameter 0" in text
        for got, want in outcome.values():
            close(got, want, 1e-11)


def test_parameters_at_rest_take_the_steps_of_one_process(sharded):
    for outcome in sharded.of("resting"):
        for got, want in outcome.values():
            close(got, want, 1e-11)


@pytest.mark.parametrize("kind", ["whole", "sharded", "weights"])
def test_arrays_of_a_regularizer_are_cut_with_the_parameters(sharded, kind):
    for outcome in sharded.of("arrays"):
        close(*outcome[kind])


def test_what_a_step_sends(sharded):
    for outcome in sharded.of("collectives"):
        assert outcome["decay"] == ({"c10d.allreduce_": 1}, 0)
        # A search adds one for every round of three points.
        sent, evaluations = outcome["L1"]
        assert evaluations > 3
        assert sent == {"c10d.allreduce_": 1 + evaluations / 3}
        # Three matrices and their gradients are gathered, and searched over without another word.
        sent, evaluations = outcome["whole"]
        assert evaluations > 1
        assert sent == {"c10d.allreduce_": 1, "c10d_functional.all_gather_into_tensor": 6}


def test_sharded_and_replicated_parameters_in_one_group(sharded):
    for outcome in sharded.of("mixed"):
        for got, want, entries in outcome.values():
            # A search ends at a duality gap of 1e-12 of the loss's, wherever its rounds have led it.
            torch.testing.assert_close(got, want, rtol=0, atol=1e-11)
            assert entries == (1,)


def test_all_ranks_skip_what_is_not_finite_in_one_shard(sharded):
    for outcome in sharded.of("not_finite"):
        assert set(outcome.values()) == {(True, "skipped")}


def test_an_overflow_in_one_shard_skips_the_step_on_all(sharded):
    for outcome in sharded.of("scaled"):
        assert outcome["scales"] == [1024.0, 512.0, 512.0]
        close(*outcome["points"], 1e-6)


def test_bf16_compute_with_f32_shards_makes_progress(sharded):
    one, two = (outcome["losses"] for outcome in sharded.of("half"))
    assert one == two
    assert min(one) < 0.5 * one[0]


def test_what_cannot_be_right_is_refused(sharded):
    for outcome in sharded.of("refusals"):
        assert "sharded over ranks [0, 1]" in outcome["off"][0]
        assert "sharded over ranks [0, 1]" in outcome["own"][0]
        assert "fully_shard" in outcome["FSDP1"][0]
        for name in ("ProxSPS, no lr", "Adam"):
            (text,), untouched = outcome[name]
            assert "samples rows, and a parameter is sharded as (Shard(dim=1),)" in text
            assert untouched


def test_a_checkpoint_read_on_two_ranks_goes_on_bitwise(sharded):
    for outcome in sharded.of("save"):
        for saved, loaded, went_on, resumed in outcome.values():
            assert torch.equal(saved, loaded)
            assert torch.equal(went_on, resumed)
            assert not torch.equal(saved, went_on)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")  # that is the point
@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("name", common.SAVED)
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(sharded, name, steps):
    cls, own = common.SAVED[name]
    saved, _, went_on, _ = sharded.of("save")[0][name, steps]
    model = common.network(seed=1)
    opt = cls(model.parameters(), **{"lr": 0.1, **own})
    weights, state = get_state_dict(model, opt)
    holder = {"model": weights, "optim": state}
    dcp.load(holder, checkpoint_id=sharded.folder / f"{name}-{steps}")
    set_state_dict(model, opt, model_state_dict=holder["model"], optim_state_dict=holder["optim"])
    assert torch.equal(common.vector(model), saved)
    assert opt.param_groups[0]["lr"] == (1.0 if "lr" in own else 0.8)
    common.train(model, opt, lambda k: common.batch(k + 50, 2), 2)
    close(common.vector(model), went_on)


def test_a_checkpoint_of_one_process_goes_on_on_two_ranks(sharded):
    keys = {"momentum": {"average"}, "no lr": {"average", "origin"}, "Adam": {"average", "square", "steps", "origin"}}
    keys["free"] = keys["spectral"] = {"square", "steps", "origin", "z"}
    for outcome in sharded.of("spread_out"):
        for name, ((want, got), points) in outcome.items():
            assert want.keys() == got.keys()
            for i, own in want.items():
                matrix = name == "spectral" and own["z"].dim() > 1
                assert own.keys() == got[i].keys() == ({"average", "origin", "z"} if matrix else keys[name])
                assert all(torch.equal(value, got[i][key]) for key, value in own.items())
            assert len(want) == (6 if name in keys else 0)
            close(*points)


def test_replicas_of_shards(meshes):
    for outcome in meshes.of("replicas_of_shards"):
        assert outcome.pop("sent") == {"c10d.allreduce_": 1}
        (text,) = outcome.pop("astray")
        assert text.startswith("check_replicas: parameter 0 of group 0 differ")
        for got, want in outcome.values():
            close(got, want)


def test_shards_in_two_directions(meshes):
    for outcome in meshes.of("two_directions"):
        for got, want in outcome.values():
            close(got, want)
