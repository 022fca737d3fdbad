"""Ranks with different numbers of batches, under torch's Join."""

from __future__ import annotations

import torch


def test_ranks_that_are_done_leave_the_steps_of_the_others_exact(uneven):
    for outcome in uneven.of("joined"):
        for case, ((got, memory), (want, wanted)) in outcome.items():
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12, msg=str(case))
            assert (memory is None) == (wanted is None)
            if memory is not None:
                assert abs(memory - wanted) < 1e-12


def test_the_two_ways_to_divide_gradients_are_two_methods(uneven):
    """Except where a factor on loss and gradient leaves the step as it is: no regulariser, and no cap that is met."""
    outcome = uneven.of("joined")[0]
    (one, _), _ = outcome["SPS, L1", True]
    (other, _), _ = outcome["SPS, L1", False]
    assert not torch.allclose(one, other, atol=1e-4)


def test_a_limited_step_that_is_skipped_leaves_no_message_without_a_partner(uneven):
    branches = [outcome["branches"] for outcome in uneven.of("skipped")]
    assert list(map(len, branches)) == [4, 10]
    assert [i for i, name in enumerate(branches[1]) if name == "skipped"] == [3, 8]


def test_training_goes_on_after_a_context(uneven):
    for outcome in uneven.of("afterwards"):
        assert torch.equal(*outcome["points"])
        assert outcome["steps"] == 3


def test_what_would_wait_for_ever_is_refused_on_every_rank(uneven):
    for outcome in uneven.of("refusals"):
        assert "use `with Join([model, opt]):` instead of `with model.join():`" in outcome["model alone"][0]
        assert "use Join([model, opt])" in outcome["optimizer first"][0]
        assert "2 losses were watched" in outcome["accumulation"][0]
        assert "Join does not work with sharded parameters" in outcome["shards"][0]


def test_contexts_that_wait_for_nobody_are_left_alone(uneven):
    for outcome in uneven.of("refusals"):
        assert outcome["switched off"] == outcome["all stop"] == []
