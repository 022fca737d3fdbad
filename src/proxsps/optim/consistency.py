"""Does a loss belong to the gradients? A check with a few more evaluations of the loss.

A Polyak step divides the loss by the squared length of the gradient. A factor on only one of them (a sum in place of a
mean, a scale, clipping) gives a wrong step, and the two numbers do not show it. Let f be the loss that a closure
evaluates. The gradient is cut into pieces g_i of about the same length, and the slope of f along each is compared with
that length,

    r_i = (f(x + t g_i) - f(x - t g_i)) / <g, 2 t g_i>.

If all r_i are the same, then g = c grad f with c = 1 / r_i, and the loss that was passed has to be c f as well. If they
differ, the gradient has another direction than the gradient of f.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from proxsps.optim.lists import is_sharded
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.optim.reduce import Ranks

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


@torch.no_grad()
def check_loss(
    opt: PolyakOptimizer,
    closure: Callable[[], Tensor | float],
    loss: Tensor | float | None = None,
    *,
    model: nn.Module | None = None,
    dtype: torch.dtype | None = None,
    rtol: float = 0.05,
) -> LossCheck:
    """Raise if the loss and the gradients of the next step do not belong together, and name the likely cause.

    Call it once, between `backward` and `step`; with a gradient scaler, after `scaler.unscale_(opt)`. It evaluates the
    loss about twenty times, and leaves parameters, gradients, watched losses and random numbers bitwise as they were.

    Args:
        opt: the optimizer that is about to step.
        closure: evaluates the loss of the whole batch again and returns it; it calls neither `backward` nor
            `zero_grad`. For several micro-batches it returns the mean.
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
    rtol = max(rtol, 12 * eps ** (2 / 3))  # 0.47 for bf16: factors of two are still found
    with _unchanged(opt, params, model) as start:
        given, weight = (loss, 1.0) if loss is not None else opt._watched_mean()
        mean = partial(_over_ranks, opt._ranks, weight)
        probe = _Probe(lambda: mean(_evaluated(closure)), params, start, eps)
        handed = probe.value if given is None else mean(given)
        ratios = probe.ratios(rtol / 2)
    fault = diagnose(handed, probe.value, ratios, rtol)
    if fault:
        raise ValueError(f"check_loss: {fault}")
    return LossCheck(handed / probe.value if probe.value else 1.0, len(ratios) / sum(ratios))


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


def _over_ranks(ranks: Ranks, weight: float, value: Tensor | float) -> float:
    """The mean over the ranks."""
    if ranks.size == 1:
        return float(value)
    total, weights = ranks.sum(np.array([weight * float(value), weight]))[0]
    return float(total / weights)


def _evaluated(closure: Callable[[], Any]) -> float:
    try:
        return float(closure())
    except RuntimeError as error:
        if "does not require grad" in str(error):
            text = "check_loss: the closure must evaluate the loss and return it, without backward."
            raise ValueError(text) from error
        raise


class _Probe:
    """The loss along pieces of the gradient."""

    def __init__(
        self, evaluate: Callable[[], float], params: Sequence[Tensor], start: Sequence[Tensor], eps: float
    ) -> None:
        self._evaluate, self._params, self._start, self._eps = evaluate, params, start, eps
        self._grads = [p.grad for p in params if p.grad is not None]
        self._labels, self._length = _pieces(self._grads)
        self._h = eps ** (1 / 3)  # rounding of f / h and curvature h^2 are of one size
        self._limit = 10 * self._h * (1 + math.sqrt(sum(map(_square, self._start))))
        self.value, again = evaluate(), evaluate()
        if abs(again - self.value) > 100 * eps * abs(self.value):
            raise ValueError(
                f"check_loss: The closure returned {self.value:.6g} and then {again:.6g} for the same parameters. It "
                "must evaluate one fixed loss: take one batch, and switch dropout off for the gradients and here."
            )

    def ratios(self, tolerance: float) -> list[float]:
        """The slope of the loss along each piece of the gradient, over the length of the piece."""
        labels = sorted({label for own in self._labels for label in own.unique().tolist()})
        slopes = [self._slopes(label, tolerance) for label in labels]
        largest = max(abs(found[-1]) for found in slopes)
        ratios = []
        for found in slopes:
            pairs = [(a, b) for a, b in itertools.pairwise(found) if abs(a - b) <= tolerance * largest]
            if not pairs:
                raise ValueError(
                    "check_loss: The loss is too noisy to measure its slope. Over ever shorter distances it is "
                    f"{', '.join(f'{r:.3g}' for r in found)}. Pass the precision of autocast as dtype=, or check in "
                    "float32 or float64."
                )
            ratios.append((4 * pairs[-1][1] - pairs[-1][0]) / 3)  # the error falls with the square of the distance
        return ratios

    def _slopes(self, piece: int, tolerance: float) -> list[float]:
        """Slopes along a piece: over a distance that changes the loss enough, then over ever shorter ones.

        Gradients may have any length, so the distance is found by trial. It ends when two slopes agree.
        """
        wanted = 2 * self._h * abs(self.value)
        t = self._h * abs(self.value) / self._length if self.value else self._h
        found: list[float] = []
        for trial in range(14):
            slope, change = self._slope(piece, t)
            enough = wanted / 2 <= change <= wanted * 8 or (t >= self._limit and change < wanted)
            if trial < 7 and not (found or enough):
                factor = wanted / change if change > 0 else 1e3
                t = min(self._limit, t * min(1e4, max(1e-4, factor if math.isfinite(factor) else 1e-2)))
                continue
            if found and 4 * tolerance * change < self._eps * abs(self.value):
                break  # only rounding is left
            found.append(slope)
            if len(found) > 1 and abs(slope - found[-2]) <= tolerance * abs(slope):
                break
            t /= 2
        return found

    def _slope(self, piece: int, t: float) -> tuple[float, float]:
        """The slope over a distance, and the change of the loss."""
        up, forth = self._at(piece, t)
        down, back = self._at(piece, -t)
        return (up - down) / (forth - back) if forth != back else math.nan, abs(up - down)

    def _at(self, piece: int, t: float) -> tuple[float, float]:
        """The loss after a move along a piece, and <g, move> as it was rounded."""
        moved = 0.0
        for x, start, g, labels in zip(self._params, self._start, self._grads, self._labels, strict=True):
            x.copy_(start)
            if (own := labels == piece).any():
                move = g.to(torch.promote_types(x.dtype, torch.float32)) * (t / self._length)
                x.copy_(start + move * own)
                exact = torch.promote_types(x.dtype, torch.float64)
                moved += float((g.to(exact).conj() * (x.to(exact) - start.to(exact))).sum().real)
        return self._evaluate(), moved


def _pieces(grads: Sequence[Tensor]) -> tuple[list[Tensor], float]:
    """The piece of the gradient that each entry belongs to, and the length of a piece, which is the same for all."""
    total, before = sum(map(_square, grads)), 0.0
    if not 0 < total < math.inf:
        raise ValueError(f"check_loss needs gradients that are finite and not zero, got a squared norm of {total}.")
    labels = []
    for g in grads:
        passed = before + g.abs().double().square().flatten().cumsum(0).view(g.shape)
        labels.append((PIECES * passed / total).clamp(max=PIECES - 1).byte())
        before += _square(g)
    return labels, math.sqrt(total / PIECES)


def _square(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x.abs(), dtype=torch.float64)) ** 2


@contextlib.contextmanager
def _unchanged(opt: PolyakOptimizer, params: Sequence[Tensor], model: nn.Module | None) -> Iterator[list[Tensor]]:
    """Restore parameters, gradients, watched losses, buffers and random numbers; yields copies of the parameters."""
    grads, watched = [p.grad for p in params], list(opt._watched)
    tensors = [*params, *(model.buffers() if model is not None else ())]
    copies = [x.clone() for x in tensors]
    devices = sorted({p.device for p in params if not p.is_cpu}, key=str)
    try:
        with torch.random.fork_rng(devices=devices, device_type=devices[0].type if devices else "cuda"):
            yield copies[: len(params)]
    finally:
        opt._watched[:] = watched
        for p, grad in zip(params, grads, strict=True):
            p.grad = grad
        for x, copied in zip(tensors, copies, strict=True):
            x.copy_(copied)
