"""The loss that belongs to the gradient: by keyword, by closure, watched; and what is refused, with which words."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

from proxsps.optim import SPS, DecSPS, ProxSPS
from proxsps.regularizers import L1, L2, Box, GroupLasso, NuclearNorm, Simplex, TotalVariation1D

F64 = torch.float64


# -- forms of the loss ------------------------------------------------------------------------------------------------

FORMS = {
    "float": 0.75,
    "int": 3,
    "numpy f64": np.float64(0.75),
    "numpy f32": np.float32(0.75),
    "numpy 0-d": np.array(0.75),
    "numpy one entry": np.array([0.75], dtype=np.float32),
    "0-d": torch.tensor(0.75, dtype=F64),
    "one entry": torch.tensor([[0.75]], dtype=F64),
    "f32": torch.tensor(0.75),
    "bf16": torch.tensor(0.75, dtype=torch.bfloat16),
    "f16": torch.tensor(0.75, dtype=torch.float16),
    "with grad": torch.tensor(0.75, dtype=F64, requires_grad=True),
}


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
@pytest.mark.parametrize("regularizer", [None, L1(0.1)], ids=["plain", "L1"])
@pytest.mark.parametrize("form", FORMS)
def test_the_form_of_the_loss_does_not_matter(case, kit, form, regularizer, path):
    loss = FORMS[form]
    one, two = kit.drawn((3,), (4,)), kit.drawn((3,), (4,))
    assert case.make(one, regularizer=regularizer, **path).step(loss=loss) is loss
    case.make(two, regularizer=regularizer, **path).step(loss=torch.as_tensor(loss).item())
    assert torch.equal(kit.flat(one), kit.flat(two))


@pytest.mark.parametrize("form", FORMS)
def test_the_loss_may_be_the_first_argument(case, kit, form):
    loss = FORMS[form]
    one, two = kit.drawn((3,), (4,)), kit.drawn((3,), (4,))
    assert case.make(one).step(loss) is loss
    case.make(two).step(loss=loss)
    assert torch.equal(kit.flat(one), kit.flat(two))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "with grad"])
def test_the_form_of_a_watched_loss_does_not_matter(case, kit, form):
    loss = FORMS[form]
    one, two = kit.drawn((3,), (4,)), kit.drawn((3,), (4,))
    watching = case.make(one)
    assert watching.watch(loss) is loss
    watching.step()
    case.make(two).step(loss=torch.as_tensor(loss).item())
    assert torch.equal(kit.flat(one), kit.flat(two))


def test_closure_runs_with_gradients_and_its_loss_is_returned(case, kit):
    problem = kit.least_squares()
    w, v = (torch.nn.Parameter(torch.zeros(6, dtype=F64)) for _ in range(2))
    opt, by_keyword, seen = case.make([w]), case.make([v]), []

    def closure():
        seen.append(torch.is_grad_enabled())
        opt.zero_grad()
        loss = problem.loss(w)
        loss.backward()
        seen.append(loss)
        return loss

    with torch.no_grad():
        returned = opt.step(closure)
    assert seen[0] is True
    assert returned is seen[1]
    assert len(seen) == 2
    loss = problem.loss(v)
    loss.backward()
    by_keyword.step(loss=loss)
    assert torch.equal(w.detach(), v.detach())


# -- watch ------------------------------------------------------------------------------------------------------------


def two_points():
    return [torch.nn.Parameter(torch.full((6,), 0.5, dtype=F64)) for _ in range(2)]


@pytest.mark.parametrize("path", [{"fused": False}, {}, {"capturable": True}], ids=["torch", "default", "capturable"])
def test_a_watched_loss_is_the_loss_of_the_step(case, kit, path):
    problem, (w, v) = kit.least_squares(noise=1.0), two_points()
    watching, told = case.make([w], **path), case.make([v], **path)
    loss = problem.loss(w)
    assert watching.watch(loss) is loss
    loss.backward()
    watching.step()
    loss = problem.loss(v)
    loss.backward()
    told.step(loss=loss)
    assert torch.equal(w.detach(), v.detach())


@pytest.mark.parametrize("sizes", [(8, 8, 8), (4, 12, 8)], ids=["equal", "unequal"])
def test_micro_batches_are_one_batch(case, kit, sizes):
    problem, (w, v) = kit.least_squares(noise=1.0), two_points()
    parts, whole = case.make([w], lr=0.5), case.make([v], lr=0.5)
    for _ in range(2):  # the second round starts from what the first one left
        for rows in torch.arange(24).split(sizes):
            loss = parts.watch(problem.loss(w, rows), weight=len(rows))
            (loss * (len(rows) / 24)).backward()
        parts.step()
        parts.zero_grad()
        loss = problem.loss(v)
        loss.backward()
        whole.step(loss=loss)
        whole.zero_grad()
        torch.testing.assert_close(w.detach(), v.detach(), rtol=1e-13, atol=1e-13)


def test_micro_losses_may_be_divided_before_backward(case, kit):
    problem, (w, v) = kit.least_squares(noise=1.0), two_points()
    parts, whole = case.make([w], lr=0.5), case.make([v], lr=0.5)
    for rows in torch.arange(24).split(6):
        loss = problem.loss(w, rows)
        loss = parts.watch(loss, weight=6) / 4
        loss.backward()
    parts.step()
    loss = problem.loss(v)
    loss.backward()
    whole.step(loss=loss)
    torch.testing.assert_close(w.detach(), v.detach(), rtol=1e-13, atol=1e-13)


def test_zero_grad_between_watch_and_backward_is_harmless(case, kit):
    problem, (w, v) = kit.least_squares(noise=1.0), two_points()
    late, early = case.make([w]), case.make([v])
    loss = late.watch(problem.loss(w))
    late.zero_grad()
    loss.backward()
    late.step()
    early.zero_grad()
    early.watch(problem.loss(v)).backward()
    early.step()
    assert torch.equal(w.detach(), v.detach())


@pytest.mark.parametrize("cleared_by", ["optimizer", "model"])
def test_a_step_left_out_does_not_leak_into_the_next(case, kit, cleared_by):
    problem, (w, v) = kit.least_squares(noise=1.0), two_points()
    opt, other = case.make([w]), case.make([v])
    opt.watch(1000 * problem.loss(w)).backward()
    # A trainer that found an overflow skips the step and clears the gradients: its own way, or by model.zero_grad().
    if cleared_by == "optimizer":
        opt.zero_grad()
    else:
        w.grad = None
    for o, p in ((opt, w), (other, v)):
        o.watch(problem.loss(p)).backward()
        o.step()
    assert torch.equal(w.detach(), v.detach())


def test_a_watched_loss_is_used_once(bounded_case, kit):
    problem, (w, _) = kit.least_squares(noise=1.0), two_points()
    opt = bounded_case.make([w])
    opt.watch(problem.loss(w)).backward()
    opt.step()
    with pytest.raises(ValueError, match="needs the loss value"):
        opt.step()


def test_a_loss_watched_but_never_sent_backward_does_not_count(bounded_case, kit):
    problem, (w, _) = kit.least_squares(noise=1.0), two_points()
    opt = bounded_case.make([w])
    problem.loss(w).backward()
    opt.watch(problem.loss(w))
    with pytest.raises(ValueError, match="one was watched, but backward"):
        opt.step()


def test_watching_does_not_keep_losses_for_ever(case, kit):
    problem, (w, _) = kit.least_squares(noise=1.0), two_points()
    opt = case.make([w])
    for _ in range(5):
        opt.watch(problem.loss(w)).backward()
        opt.step()
        opt.zero_grad()
    lists = {name: value for name, value in vars(opt).items() if isinstance(value, list) and name != "param_groups"}
    assert not any(lists.values())


# -- what is refused --------------------------------------------------------------------------------------------------


def test_closure_and_loss_together_are_refused(case, kit):
    with pytest.raises(ValueError, match="both a closure and a loss"):
        case.make(kit.drawn((3,))).step(lambda: torch.tensor(1.0), loss=1.0)
    with pytest.raises(ValueError, match="two losses"):
        case.make(kit.drawn((3,))).step(torch.tensor(1.0), loss=1.0)


def test_a_step_without_a_loss_says_what_to_do(bounded_case, kit):
    params = kit.drawn((3,))
    before = kit.points(params)
    with pytest.raises(
        ValueError, match=r"step\(\) needs the loss value: call opt\.step\(loss=loss\).*opt\.step\(closure\)"
    ):
        bounded_case.make(params).step()
    assert torch.equal(params[0].detach(), before[0])


def test_a_closure_that_returns_nothing_is_refused(bounded_case, kit):
    with pytest.raises(ValueError, match="needs the loss value"):
        bounded_case.make(kit.drawn((3,))).step(lambda: None)


def test_watching_and_telling_together_are_refused(case, kit):
    problem, (w, _) = kit.least_squares(noise=1.0), two_points()
    opt = case.make([w])
    loss = opt.watch(problem.loss(w))
    loss.backward()
    with pytest.raises(ValueError, match=r"watch\(\) or step\(loss=\.\.\.\), not both"):
        opt.step(loss=loss)


@pytest.mark.parametrize("capturable", [False, True])
def test_a_loss_with_many_entries_is_refused(case, kit, capturable):
    opt = case.make(kit.drawn((3,)), capturable=capturable)
    with pytest.raises(ValueError, match=r"one number, got shape \(2,\).*loss\.mean\(\)"):
        opt.step(loss=torch.ones(2))
    with pytest.raises(ValueError, match=r"one number, got shape \(2,\)"):
        opt.watch(torch.ones(2))
    with pytest.raises(ValueError, match=r"one number, got shape \(0,\)"):
        opt.step(loss=torch.ones(0))
    with pytest.raises(ValueError, match=r"one number, got shape \(2,\)"):
        opt.step(loss=np.ones(2))


@pytest.mark.parametrize("weight", [0.0, -1.0, math.nan, math.inf])
def test_weights_of_watched_losses_are_positive_and_finite(case, kit, weight):
    with pytest.raises(ValueError, match=f"weight.*{weight}"):
        case.make(kit.drawn((3,))).watch(0.5, weight=weight)


def test_a_loss_that_is_no_number_is_refused(case, kit):
    opt = case.make(kit.drawn((3,)))
    for step in (lambda loss: opt.step(loss=loss), opt.step, opt.watch, lambda loss: opt.step(lambda: loss)):
        with pytest.raises(TypeError, match="tensor with one entry or a number, got str"):
            step("0.5")
        with pytest.raises(TypeError, match=r"real number, got dtype torch\.complex64"):
            step(torch.tensor(1j))
        with pytest.raises(TypeError, match=r"real number, got dtype <U3"):
            step(np.array("0.5"))


def test_a_bound_of_a_batch_that_is_not_finite_is_named(bounded_case, kit):
    params = kit.drawn((3,))
    before = kit.points(params)
    with pytest.raises(ValueError, match="lower_bound must be a finite number, got nan"):
        bounded_case.make(params).step(loss=0.5, lower_bound=math.nan)
    with pytest.warns(RuntimeWarning, match="lower_bound"):
        bounded_case.make(params).step(loss=0.5, lower_bound=torch.tensor(math.nan))
    assert torch.equal(params[0].detach(), before[0])


@pytest.mark.parametrize("value", [-1.0, math.nan, torch.tensor(-0.5), torch.tensor(math.nan)], ids=str)
@pytest.mark.parametrize("name", ["lr", "weight_decay"])
def test_negative_and_nan_options_are_refused(case, kit, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be a (finite )?number >= 0, got .*({float(value)}|-0\.5)"):
        case.make(kit.drawn((3,)), **{name: value})
    with pytest.raises(ValueError, match=f"{name} must be"):
        case.make([{"params": kit.drawn((3,)), name: value}])


@pytest.mark.parametrize("name", ["lr", "weight_decay", "max_move"])
@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), torch.ones(0), "0.1", 1j, [0.1]], ids=repr)
def test_options_that_are_not_one_number_are_named(case, kit, name, value):
    with pytest.raises(ValueError, match=rf"{name} must be (one|a real) number, got (shape \([20],\)|.*0\.1|1j)"):
        case.make(kit.drawn((3,)), **{name: value})


@pytest.mark.parametrize("value", [torch.ones(2), np.ones(2), "0.1"], ids=repr)
def test_a_bound_that_is_not_one_number_is_named(bounded_case, kit, value):
    with pytest.raises(ValueError, match=r"lower_bound must be (one|a real) number, got"):
        bounded_case.make(kit.drawn((3,)), lower_bound=value)
    with pytest.raises(ValueError, match=r"lower_bound must be (one|a real) number, got"):
        bounded_case.make(kit.drawn((3,))).step(loss=0.5, lower_bound=value)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_bound_that_is_no_number_is_refused(bounded_case, kit, value):
    with pytest.raises(ValueError, match=rf"lower_bound must be a finite number, got {value}"):
        bounded_case.make(kit.drawn((3,)), lower_bound=value)


def test_negative_bounds_are_fine(bounded_case, kit):
    params = kit.drawn((3,))
    opt = bounded_case.make(params, lower_bound=-2.0)
    opt.step(loss=-1.0)
    assert float(opt.last_step.gap) == 1.0


@pytest.mark.parametrize(("cls", "name"), [(SPS, "c"), (DecSPS, "c0")])
@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_constants_of_a_method_are_positive(kit, cls, name, value):
    with pytest.raises(ValueError, match=f"{name} must be a positive number, got {value}"):
        cls(kit.drawn((3,)), **{name: value})


def test_an_empty_parameter_list_is_refused(case):
    with pytest.raises(ValueError, match="empty parameter list"):
        case.make([])


def test_weight_decay_and_a_regularizer_in_one_group_are_refused(case, kit):
    with pytest.raises(ValueError, match=r"both weight_decay=0\.1 and regularizer=L1\(lam=0\.2\)"):
        case.make(kit.drawn((3,)), weight_decay=0.1, regularizer=L1(0.2))
    with pytest.raises(ValueError, match="both weight_decay"):
        case.make([{"params": kit.drawn((3,)), "regularizer": L1(0.2)}], weight_decay=0.1)


def test_something_else_than_a_regularizer_is_refused(case, kit):
    with pytest.raises(ValueError, match=r"regularizer must be a proxsps\.regularizers\.Regularizer, got 'l1'"):
        case.make(kit.drawn((3,)), regularizer="l1")


@pytest.mark.parametrize(
    ("phi", "shape"),
    [(NuclearNorm(1.0), (3,)), (GroupLasso.rows(1.0), (3,)), (Simplex(1.0), (0,)), (TotalVariation1D(1.0), ())],
    ids=repr,
)
def test_a_regularizer_that_does_not_fit_is_refused(kit, phi, shape):
    with pytest.raises(ValueError, match=rf"does not fit parameter 1 of its group.*{re.escape(str(shape))}"):
        ProxSPS(kit.drawn((4, 3), shape), regularizer=phi)


def test_centers_that_do_not_fit_are_refused(case, kit):
    with pytest.raises(ValueError, match=r"does not fit parameter 0 of its group.*\(3,\)"):
        case.make(kit.drawn((3,)), regularizer=L2(0.1, torch.zeros(4)))
    with pytest.raises(ValueError, match="does not fit parameter 1 of its group"):
        case.make(kit.drawn((3,), (3,)), regularizer=L2(0.1, [torch.zeros(3)]))


def test_a_shape_that_does_not_fit_is_named_by_its_parameter(case, kit):
    named = [("head.weight", kit.drawn((4, 3))[0]), ("head.bias", kit.drawn((3,))[0])]
    with pytest.raises(ValueError, match=r"L2.*does not fit parameter 'head\.bias': .*\(3,\)"):
        case.make(named, regularizer=L2(0.1, [torch.zeros(4, 3), torch.zeros(4)]))
    named = [("rotation", kit.drawn((3,), dtype=torch.complex128)[0])]
    with pytest.raises(ValueError, match="does not take complex parameters, got 'rotation'"):
        case.make(named, regularizer=L1(0.1))


def test_a_regularizer_without_subgradient_cannot_be_part_of_the_loss(coupled_case, kit):
    with pytest.raises(ValueError, match=r"needs its subgradient.*Box.*Use ProxSPS or ProxSGD"):
        coupled_case.make(kit.drawn((3,)), regularizer=Box(0.0, 1.0))


def test_capturable_refuses_a_regularizer_of_the_host(prox_case, kit):
    with pytest.raises(ValueError, match=r"TotalVariation1D.*cannot be captured"):
        prox_case.make(kit.drawn((3,)), regularizer=TotalVariation1D(0.1), capturable=True)


@pytest.mark.parametrize("capturable", [False, True])
def test_sparse_gradients_are_refused(case, capturable):
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1, 3])).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(TypeError, match=r"Sparse gradients are not supported.*sparse=False"):
        case.make([table.weight], capturable=capturable).step(loss=1.0)
    assert torch.equal(table.weight.detach(), before)


def test_complex_parameters_with_a_regularizer_are_refused(case, kit):
    with pytest.raises(ValueError, match=r"L1\(lam=0\.1\) does not take complex parameters"):
        case.make(kit.drawn((3,), dtype=torch.complex128), regularizer=L1(0.1))


def test_fused_names_what_it_needs(case, kit):
    opt = case.make(kit.drawn((3,), dtype=torch.bfloat16), fused=True)
    with pytest.raises(RuntimeError, match=r"fused=True needs numba.*fused=None falls back"):
        opt.step(loss=0.5)


def test_a_process_group_is_none_or_a_group_or_false(case, kit):
    with pytest.raises(ValueError, match="process_group must be None, a process group or False, got True"):
        case.make(kit.drawn((3,)), process_group=True)
