"""The check that a loss belongs to the gradients: it passes right use, and names the cause of every wrong use."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.nn.utils import clip_grad_norm_, clip_grad_value_

from proxsps import ProxSPS, check_loss
from proxsps.optim.consistency import diagnose

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


class Case:
    """An MLP with batch norm, the batch it is trained on, and another batch."""

    def __init__(self, dtype: torch.dtype = F32) -> None:
        generator = torch.Generator().manual_seed(0)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(6, 32), nn.ReLU(), nn.BatchNorm1d(32), nn.Linear(32, 1)).to(dtype)
        self.x, self.other = torch.randn(2, 64, 6, generator=generator).to(dtype)
        self.opt = ProxSPS(self.net.parameters())

    def loss(self, x: Tensor | None = None, offset: float = 1.0) -> Tensor:
        x = self.x if x is None else x
        return mse_loss(self.net(x), torch.sin(x.sum(1, keepdim=True)) + offset)

    def check(self, handed: Tensor | float | None) -> str:
        """What is wrong, in the words of the check."""
        try:
            check_loss(self.opt, self.loss, handed, model=self.net)
        except ValueError as error:
            return str(error)
        return "yes"


def right(case):
    loss = case.loss()
    loss.backward()
    return loss


def watched(case):
    case.opt.watch(case.loss()).backward()


def micro_batches(case):
    """Batch norm would see other batches, so the pieces are those of the loss."""
    for _ in range(2):
        (case.opt.watch(case.loss()) / 2).backward()


def same_factor(case):
    loss = 64 * case.loss()
    loss.backward()
    return loss


@pytest.mark.parametrize("dtype", [F32, F64, BF16])
@pytest.mark.parametrize("use", [right, watched, micro_batches, same_factor])
def test_right_use_passes(use, dtype):
    case = Case(dtype)
    assert case.check(use(case)) == "yes"


def divided(case):
    for _ in range(4):
        case.opt.watch(case.loss() / 4).backward()


def clipped(case):
    loss = right(case)
    clip_grad_norm_(case.net.parameters(), 0.1)
    return loss


def clipped_by_value(case):
    loss = right(case)
    clip_grad_value_(case.net.parameters(), 0.01)
    return loss


def no_zero_grad(case):
    case.loss(case.other, offset=-1).backward()
    return right(case)


def no_zero_grad_alike(case):
    """Before anything is learned, batches have nearly the same gradient."""
    case.loss(case.other).backward()
    return right(case)


def stale(case):
    """A step away from where the gradients were taken, with the new loss."""
    loss = right(case)
    case.opt.step(loss=loss)
    return case.loss()


def twice(case):
    right(case)
    return right(case)


def other_loss(case):
    right(case)
    return case.loss(10 * case.other)


def still_scaled(case):
    loss = case.loss()
    (65536 * loss).backward()
    return loss


def summed(case):
    loss = case.loss()
    (64 * loss).backward()
    return loss


FAULTS = {
    "loss x 64": (lambda case: 64 * right(case), "64 times as much. Likely a sum over 64 samples"),
    "scaled AMP loss": (lambda case: 65536 * right(case), "2^16 times as much. Pass the loss before scaler.scale"),
    "loss / 64": (lambda case: right(case) / 64, "1/64 of it. Pass the loss before it is divided"),
    "divided micro-batches watched": (
        divided,
        "1/4 of it. Pass the loss before it is divided",
    ),
    "another micro-batch": (other_loss, "no simple factor. Likely the loss of another batch"),
    "clipped": (clipped, "times too short. Likely they were clipped"),
    "clipped by value": (clipped_by_value, "they were clipped by value or tensor by tensor"),
    "no zero_grad": (
        no_zero_grad,
        "another direction than those of the closure's loss. Likely causes: zero_grad",
    ),
    "no zero_grad, batches alike": (no_zero_grad_alike, "2 passes were added up without zero_grad"),
    "stale gradients": (stale, "another direction"),
    "the same batch twice": (twice, "2 times too long. Likely 2 passes were added up without zero_grad"),
    "gradients still scaled": (still_scaled, "2^16 times too long: call scaler.unscale_(opt) first"),
    "gradients of a sum": (summed, "64 times too long"),
}


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_use_is_named(fault, dtype):
    case = Case(dtype)
    use, cause = FAULTS[fault]
    assert cause in case.check(use(case))


@pytest.mark.parametrize("fault", ["loss x 64", "scaled AMP loss", "clipped", "gradients still scaled"])
def test_wrong_use_is_named_in_half_precision(fault):
    case = Case(BF16)
    use, cause = FAULTS[fault]
    assert cause in case.check(use(case))


def test_small_factors_are_seen_in_half_precision():
    case = Case(BF16)
    assert "1.2 times" not in case.check(right(case))
    assert "no simple factor" in case.check(1.2 * case.loss().detach())


def test_what_hooks_of_parameters_do_is_seen_and_they_stay():
    case = Case()
    hooks = [p.register_hook(lambda g: g / 8) for p in case.net.parameters()]
    assert "8 times too short. Likely they were clipped" in case.check(right(case))
    case.opt.zero_grad()
    right(case)
    shorter = case.net[0].weight.grad.clone()
    for hook in hooks:
        hook.remove()
    case.opt.zero_grad()
    right(case)
    torch.testing.assert_close(case.net[0].weight.grad, 8 * shorter)


@pytest.mark.parametrize(("factor", "cause"), [(1, "yes"), (65536, "2^16 times as much")])
def test_under_autocast(factor, cause):
    case = Case()

    def closure():
        with torch.autocast("cpu", torch.bfloat16):
            return case.loss()

    loss = closure()
    loss.backward()
    try:
        check_loss(case.opt, closure, factor * loss, model=case.net, dtype=BF16)
        said = "yes"
    except ValueError as error:
        said = str(error)
    assert cause in said


def test_everything_is_left_as_it_was():
    case = Case()
    case.opt.watch(case.loss()).backward()
    before = copy.deepcopy(case.net.state_dict()), [p.grad.clone() for p in case.net.parameters()]
    grads, random, watched = [p.grad for p in case.net.parameters()], torch.get_rng_state(), list(case.opt._watched)

    def closure():
        case.opt.zero_grad()
        case.opt.watch(1.0)
        torch.rand(3)
        return case.loss()

    check_loss(case.opt, closure, model=case.net)
    assert all(torch.equal(a, b) for a, b in zip(case.net.state_dict().values(), before[0].values(), strict=True))
    assert all(p.grad is grad for p, grad in zip(case.net.parameters(), grads, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(grads, before[1], strict=True))
    assert torch.equal(random, torch.get_rng_state())
    assert case.opt._watched == watched


def test_parameters_are_put_back_where_the_closure_fails():
    case = Case()
    loss, before, calls = right(case), copy.deepcopy(case.net.state_dict()), []

    def closure():
        calls.append(1)
        if len(calls) == 2:
            raise KeyError("no more data")
        return case.loss()

    with pytest.raises(KeyError):
        check_loss(case.opt, closure, loss, model=case.net)
    assert all(torch.equal(a, b) for a, b in zip(case.net.state_dict().values(), before.values(), strict=True))


def test_dropout_and_changing_batches_are_told_from_faults():
    case = Case()
    loss = right(case)
    with pytest.raises(ValueError, match=r"for the same parameters.*switch dropout off"):
        check_loss(case.opt, lambda: torch.nn.functional.dropout(case.loss(), 0.1) + torch.rand(()), loss)


def test_a_closure_with_backward_gets_a_hint():
    case = Case()
    loss = right(case)

    def closure():
        loss = case.loss()
        loss.backward()
        return loss

    with pytest.raises(ValueError, match="evaluate the loss and return it, without backward"):
        check_loss(case.opt, closure, loss, model=case.net)


def test_gradients_have_to_be_there():
    case = Case()
    with pytest.raises(ValueError, match="call it after loss"):
        check_loss(case.opt, case.loss, 1.0)
    case.net[0].weight.grad = torch.zeros_like(case.net[0].weight)
    with pytest.raises(ValueError, match="finite and not zero"):
        check_loss(case.opt, case.loss, 1.0)


def test_one_parameter_and_complex_ones():
    x = nn.Parameter(torch.tensor(3.0, dtype=F64))
    opt = ProxSPS([x])
    loss = x**2
    loss.backward()
    assert check_loss(opt, lambda: x**2, loss).gradient_factor == pytest.approx(1, rel=1e-8)
    z = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128))
    opt = ProxSPS([z])
    loss = (z - 1j).abs().square().sum()
    loss.backward()
    assert check_loss(opt, lambda: (z - 1j).abs().square().sum(), loss).gradient_factor == pytest.approx(1, rel=1e-8)


@pytest.mark.parametrize("lazy", ["gradient", "parameter"])
def test_conjugations_that_torch_has_put_off(lazy):
    start, target = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex128), torch.tensor([1j, 2 - 1j])
    z = nn.Parameter(start if lazy == "gradient" else start.conj())

    def value():
        return ((z.conj() if lazy == "gradient" else z) * target).sum().abs()

    opt = ProxSPS([z])
    loss = value()
    loss.backward()
    assert (z.grad if lazy == "gradient" else z).is_conj()
    assert check_loss(opt, value, loss).gradient_factor == pytest.approx(1, rel=1e-6)


def test_the_diagnosis_needs_no_tensors():
    assert diagnose(2.0, 2.0, [1.0, 1.0], 0.05) is None
    assert "not finite" in diagnose(float("nan"), 2.0, [1.0], 0.05)
    assert "another direction" in diagnose(2.0, 2.0, [-1.0, -1.0], 0.05)
    assert "1/3 of it" in diagnose(1.0, 3.0, [1.0], 0.05)
    both = diagnose(6.0, 2.0, [2.0, 2.0], 0.05)
    assert "3 times as much" in both
    assert "2 times too short" in both
