"""Data parallel training on two processes: one step for all replicas, that of the joint batch."""

from __future__ import annotations

import pytest
import torch

# Of parameters of size one after a few steps: rounding of sums in another order, in single and in double precision.
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12}


def close(points, tolerance=1e-12):
    got, want = points
    torch.testing.assert_close(got, want, rtol=0, atol=tolerance)


def test_replicas_are_bitwise_equal_after_50_steps(replicated):
    for name, (points, steps) in replicated.of("bitwise")[0].items():
        assert steps == 50
        assert torch.equal(points[0], points[1]), name


def test_averaged_models_stay_together_for_100_steps_and_with_one_process(replicated):
    for name, (points, single, steps) in replicated.of("averaged")[0].items():
        assert steps == 100
        assert torch.equal(points[0], points[1]), name
        close((points[0], single))


def test_without_the_all_reduce_replicas_drift_apart(replicated):
    one, two = replicated.of("drift")[0]["points"]
    assert (one - two).abs().max() > 0.01


def test_every_method_takes_the_steps_of_one_process_on_the_joint_batch(replicated):
    for outcome in replicated.of("joint"):
        for (_, dtype), (got, want, _) in outcome.items():
            close((got, want), TOLERANCE[dtype])


def test_the_runs_compared_are_set_by_the_loss_and_by_the_limit(replicated):
    for (name, _), (*_, seen) in replicated.of("joint")[0].items():
        if "no lr" not in name and "Adam" not in name:
            assert ("inside" in {branch for branch, _ in seen}) != name.startswith("ProxSGD"), name
        assert any(limited for _, limited in seen) == ("limited" in name), name


def test_a_step_sends_one_all_reduce_and_nothing_else(replicated):
    for outcome in replicated.of("collectives"):
        for name, sent in outcome.items():
            assert sent == {"c10d.allreduce_": 2 if "limited" in name else 1}, name  # the length of a move is another


@pytest.mark.parametrize("weights", ["weighted", "plain"])
def test_batches_of_different_size_are_one_batch_if_loss_and_gradient_are_weighted_alike(replicated, weights):
    for outcome in replicated.of("uneven"):
        close(outcome[weights])


def test_micro_batches_without_sync_are_one_batch(replicated):
    for outcome in replicated.of("accumulation"):
        close(outcome["points"])


def test_lower_bounds_of_ranks_are_averaged(replicated):
    for outcome in replicated.of("bounds"):
        close(outcome["points"], 1e-15)


def test_all_ranks_skip_what_is_not_finite_on_one(replicated):
    for outcome in replicated.of("not_finite"):
        assert len(outcome) == 4
        assert set(outcome.values()) == {(True, "skipped")}
    for said in replicated.of("not_finite", "warnings"):
        assert [("loss is nan" in said[0]), ("gradient or a parameter is not finite" in said[1])] == [True, True]


def test_gradients_for_different_parameters_are_refused_on_all_ranks(replicated):
    for outcome in replicated.of("missing"):
        for (_, capturable), (text, untouched) in outcome.items():
            assert untouched
            # A capturable step does not look at numbers, and leaves the parameters alone instead.
            assert len(text) == (0 if capturable else 1)
            assert all("gradients for different parameters" in line for line in text)


def test_as_many_gradients_for_other_parameters_are_refused_on_all_ranks(replicated):
    for rank, outcome in enumerate(replicated.of("swapped")):
        for (case, capturable), (text, untouched) in outcome.items():
            assert untouched, case
            assert len(text) == (0 if capturable else 1), case
            assert all("gradients for different parameters" in line for line in text)
        (text,) = outcome["one each", False][0]
        lacking = "parameter 1 of group 0" if rank == 0 else "parameter 0 of group 0"
        assert f"On this rank 1 of 2 have one: {lacking} lacks one." in text


def test_ranks_with_other_groups_are_refused_on_all_ranks(replicated):
    for outcome in replicated.of("lopsided"):
        assert outcome["untouched"]
        assert "gradients for different parameters" in outcome["text"][0]


def test_ranks_without_any_gradient_stay_where_they_are(replicated):
    assert all(outcome["untouched"] for outcome in replicated.of("nobody"))


def test_layers_used_on_some_ranks_or_on_none(replicated):
    points = replicated.of("buffers")[0]["points"]
    assert torch.equal(points[0], points[1])


@pytest.mark.parametrize(
    ("fault", "named"), [("start", "parameter 0 of group 0"), ("lr", "tau, "), ("no averaging", "0.weight, ")]
)
def test_the_check_of_replicas_raises_on_every_rank(replicated, fault, named):
    for outcome in replicated.of("checked"):
        (text,) = outcome[fault]
        assert text.startswith(f"check_replicas: {named}")
        assert "process_group=False" in text


def test_the_check_of_replicas_is_silent_where_all_is_well(replicated):
    assert all(outcome["none"] == [] for outcome in replicated.of("checked"))


def test_process_groups_are_the_ranks_that_step_together(replicated):
    for rank, outcome in enumerate(replicated.of("groups")):
        assert outcome["all"] == pytest.approx(0.15)
        assert outcome["own"] == outcome["copied"] == pytest.approx(0.1 * (1 + rank))
        assert outcome["sent when off"] == 0
        assert outcome["saved"]
        assert "save its state_dict()" in outcome["pickled"][0]
        assert "not in the process_group" in outcome["foreign"][0]


def test_a_capturable_step_reads_nothing(replicated):
    assert all(outcome == {"closed": [], "search": []} for outcome in replicated.of("reads"))


def test_an_overflow_on_one_rank_skips_the_step_on_all(replicated):
    for outcome in replicated.of("scaled"):
        assert outcome["scales"] == [1024.0, 512.0, 512.0]
        first, second, third = outcome["points"]
        assert torch.equal(first, second)
        close((third, outcome["alone"]), 1e-6)


def test_a_compiled_step_is_the_same_step(replicated):
    for outcome in replicated.of("compiled"):
        close(outcome["points"], 1e-13)


def test_loss_and_gradients_are_checked_over_all_ranks(replicated):
    one, other = replicated.of("loss_checked")
    assert one["factors"] == other["factors"] == pytest.approx((1, 1), rel=1e-6)
    assert one["scaled"] == other["scaled"]
    assert "The loss that was passed is" in one["scaled"][0]
