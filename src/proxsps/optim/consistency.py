"""Does a loss belong to the gradients? A check that computes both again.

A Polyak step divides the loss by the squared length of the gradient. A factor on only one of them (a sum in place of a
mean, a scale, clipping) gives a wrong step, and the two numbers do not show it. Let f be the loss that a closure
evaluates. The gradient g is cut into pieces g_i of about the same length, and f is differentiated along each,

    r_i = <grad f, g_i> / ||g_i||^2.

If all r_i are the same, then g = c grad f with c = 1 / r_i, and the loss that was passed has to be c f as well. If they
differ, the gradient has another direction than the gradient of f.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from proxsps.optim.device.numbers import Numbers
from proxsps.optim.lists import is_sharded
from proxsps.optim.optimizer import PolyakOptimizer

PIECES = 4
SCALE = 2.0**10  # gradient scalers have powers of two from here on; sums over samples are rarely that long

# What a factor means: a power of two, k, 1 / k, another one below 1, or any other.
ON_LOSS = {
    "power": "2^{k} times as much. Pass the loss before scaler.scale multiplies it.",
    "times": "{k} times as much. Likely a sum over {k} samples while the gradients are those of the mean, or a loss "
    "that was multiplied by a scale.",
    "part": "1/{k} of it. Pass the loss before it is divided by the number of micro-batches or samples.",
    "other": "no simple factor. Likely the loss of another batch, for instance of only one of several micro-batches, "
    "or one from before the last step, or one with a penalty that the gradients do not have.",
}
UNCLIPPED = "Do not clip, because it makes the step longer; max_move= limits the move instead."
ON_GRADIENTS = {
    "power": "2^{k} times too long: call scaler.unscale_(opt) first.",
    "times": "{k} times too long. Likely {k} passes were added up without zero_grad or without a division by their "
    "number, or the gradients are those of a sum and the loss is a mean.",
    "part": "{shorter:.3g} times too short. Likely they were clipped, or divided by {k} micro-batches while the loss "
    f"was not. {UNCLIPPED}",
    "less": f"{{shorter:.3g}} times too short. Likely they were clipped. {UNCLIPPED}",
    "other": "{longer:.3g} times too long. Likely zero_grad was not called and older gradients are in the sum, or "
    "something multiplied them after backward.",
}


class LossCheck(NamedTuple):
    """What was measured; both factors are 1 if the closure evaluates the same loss that was passed."""

    loss_factor: float  # the loss that was passed, divided by the closure's
    gradient_factor: float  # the length of the gradient, divided by that of the closure's


def check_loss(
    opt: PolyakOptimizer,
    closure: Callable[[], Tensor],
    loss: Tensor | float | None = None,
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    rtol: float = 0.05,
) -> LossCheck:
    """Raise if the loss and the gradients of the next step do not belong together, and name the likely cause.

    Call it once, between `backward` and `step`; with a gradient scaler, after `scaler.unscale_(opt)`. It computes the
    loss twice and its gradient once. Parameters, gradients, watched losses and random numbers stay bitwise the same.

    Args:
        opt: the optimizer that is about to step.
        closure: computes the loss of the whole batch again and returns it, as a tensor that can be differentiated; it
            calls neither `backward` nor `zero_grad`. For several micro-batches it returns the mean.
        loss: the loss that the step will be called with; None for the watched losses.
        model: its buffers are restored too, for instance the statistics of batch norm.
        dtype: the lowest precision in which the loss is computed, if it is not that of the parameters: the precision of
            autocast.
        rtol: how far the factors may differ; more is allowed if the precision is low.

    Raises:
        ValueError: the two do not belong together, or nothing can be said, for instance because of dropout.
    """
    params = [p for group in opt.param_groups for p in group["params"] if p.grad is not None]
    if not params:
        raise ValueError("check_loss found no gradients: call it after loss.backward() and before opt.step().")
    if any(map(is_sharded, params)):
        raise TypeError("check_loss cannot check sharded parameters (DTensor): check the same model in one process.")
    eps = max(torch.finfo(kind).eps for kind in {p.dtype for p in params} | ({dtype} if dtype else set()))
    rtol = max(rtol, 16 * eps)  # gradients of micro-batches are rounded one by one
    with _unchanged(opt, params, model) as grads:
        given, weight = (loss, 1.0) if loss is not None else opt._watched_mean()
        first, found = _differentiated(closure, params)
        again = _evaluated(closure).detach()
        if abs(float(again - first)) > 100 * eps * abs(float(first)):
            raise ValueError(
                f"check_loss: The closure returned {float(first):.6g} and then {float(again):.6g} for the same "
                "parameters. It must evaluate one fixed loss: take one batch, and switch dropout off for the gradients "
                "and here."
            )
        handed, value, own = _mean(opt, weight, [first if given is None else given, first, found])
    ratios = _ratios(_vector(grads), own)
    fault = diagnose(float(handed), float(value), ratios, rtol)
    if fault:
        raise ValueError(f"check_loss: {fault}")
    return LossCheck(float(handed / value) if value else 1.0, len(ratios) / sum(ratios))


def diagnose(handed: float, value: float, ratios: Sequence[float], rtol: float) -> str | None:
    """What is wrong with a loss that was `handed` over, beside the closure's `value` and its `ratios` r_i; or None."""
    if not all(map(math.isfinite, (handed, value, *ratios))):
        return f"Loss or slopes are not finite: got the loss {handed}, {value} from the closure, and slopes {ratios}."
    mean = sum(ratios) / len(ratios)
    same_value = abs(handed - value) <= rtol * abs(value)
    if mean <= 0 or max(abs(r - mean) for r in ratios) > 2 * rtol * mean:
        if same_value and min(ratios) > 1 - rtol:
            return (
                "The gradients are too short, by different factors: they were clipped by value or tensor by tensor. "
                "Do not clip; max_move= limits the move instead."
            )
        return (
            "The gradients have another direction than those of the closure's loss. Likely causes: zero_grad was not "
            "called, so that older gradients are in the sum; they come from another batch, or from before the last "
            "step; or the closure evaluates only one of several micro-batches."
        )
    gradient = 1 / mean
    if abs(handed - gradient * value) <= rtol * abs(gradient * value):
        return None
    texts = []
    if not same_value:
        texts.append(f"The loss that was passed is {handed:.6g}, the closure's is {value:.6g}:")
        texts.append(_cause(ON_LOSS, handed / value if value else math.inf, rtol / 2))
    if abs(gradient - 1) > rtol:
        texts += ["The gradients have the right direction, but are", _cause(ON_GRADIENTS, gradient, rtol)]
    return " ".join(texts)


def _cause(texts: dict[str, str], factor: float, rtol: float) -> str:
    """What a factor on the loss, or on the gradients, probably comes from."""
    kind, k = "other", 0
    if factor >= SCALE / 2 and _whole(math.log2(factor), 0.05):
        kind, k = "power", round(math.log2(factor))
    elif factor > 1 and _whole(factor, rtol):
        kind, k = "times", round(factor)
    elif 0 < factor < 1 and _whole(1 / factor, rtol):
        kind, k = "part", round(1 / factor)
    elif factor < 1 and "less" in texts:
        kind = "less"
    return texts[kind].format(k=k, longer=factor, shorter=1 / factor if factor else math.inf)


def _whole(number: float, tolerance: float) -> bool:
    """Whether a number is an integer from 2 on, up to a relative error that still distinguishes neighbours."""
    return round(number) >= 2 and abs(number - round(number)) <= min(tolerance * number, 0.2)


def _evaluated(closure: Callable[[], Any]) -> Tensor:
    """The loss, with its graph."""
    with torch.enable_grad():
        loss = closure()
    if not isinstance(loss, Tensor) or not loss.requires_grad:
        raise ValueError(
            f"check_loss: the closure must compute the loss and return it as a tensor that can be differentiated, "
            f"got {type(loss).__name__}{' without a graph' * isinstance(loss, Tensor)}."
        )
    return loss


def _differentiated(closure: Callable[[], Any], params: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The loss, and its gradient as one vector."""
    loss = _evaluated(closure)
    if any([p.grad is not None for p in params]):
        raise ValueError("check_loss: the closure must evaluate the loss and return it, without backward.")
    found = torch.autograd.grad(loss, params, allow_unused=True)
    return loss.detach(), _vector([torch.zeros_like(p) if g is None else g for p, g in zip(params, found, strict=True)])


def _vector(tensors: Sequence[Tensor]) -> Tensor:
    """All entries, in doubles where the device has them."""
    real = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in tensors]
    return torch.cat([t.detach().reshape(-1).to(Numbers(t.device).dtype) for t in real])


def _mean(opt: PolyakOptimizer, weight: float, numbers: Sequence[Any]) -> list[Tensor]:
    """The means over the ranks."""
    own = [torch.as_tensor(number).detach().to(numbers[-1]) for number in (1.0, *numbers)]
    if opt._ranks.size > 1:
        own = opt._ranks.sum(*(weight * number for number in own))
    return [number / own[0] for number in own[1:]]


def _ratios(g: Tensor, own: Tensor) -> list[float]:
    """<own, g_i> / ||g_i||^2 of each piece of a gradient."""
    passed = g.square().cumsum(0)
    total = float(passed[-1])
    if not 0 < total < math.inf:
        raise ValueError(f"check_loss needs gradients that are finite and not zero, got a squared norm of {total}.")
    piece = (PIECES * passed / total).clamp(max=PIECES - 1).byte()
    products = [(float((own * g)[piece == i].sum()), float(g.square()[piece == i].sum())) for i in range(PIECES)]
    return [along / square for along, square in products if square > 0]


@contextlib.contextmanager
def _unchanged(opt: PolyakOptimizer, params: Sequence[Tensor], model: nn.Module | None) -> Iterator[list[Tensor]]:
    """Restore gradients, watched losses, buffers and random numbers; yields the gradients, which are not there then.

    Hooks of parameters are not called meanwhile, because gradients may have been clipped by them.
    """
    hooks = [p._backward_hooks for p in params]
    grads, watched, seen = [p.grad for p in params], list(opt._watched), (opt._waiting, opt._left)
    buffers = list(model.buffers()) if model is not None else []
    copies = [x.clone() for x in buffers]
    devices = sorted({p.device for p in params if not p.is_cpu}, key=str)
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"))
        for wrapped in opt._wrappers():  # whose buckets would wait for gradients
            stack.enter_context(wrapped.no_sync())
        try:
            for p in params:
                p.grad, p._backward_hooks = None, None
            yield [g for g in grads if g is not None]
        finally:
            opt._watched[:], (opt._waiting, opt._left) = watched, seen
            for p, grad, hook in zip(params, grads, hooks, strict=True):
                p.grad, p._backward_hooks = grad, hook
            with torch.no_grad():
                for x, copied in zip(buffers, copies, strict=True):
                    x.copy_(copied)
