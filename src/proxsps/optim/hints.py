"""What is allowed but rarely intended: options of another optimizer or of a scheduler, steps that lead nowhere."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from proxsps.core.plain_step import Step
from proxsps.core.sampling import BLOCK_BITS, WHOLE
from proxsps.optim.checks import is_fake
from proxsps.optim.rule import Rule, Solved

INSIDE = tuple(str(Path(str(module.__file__)).parent) for module in (sys.modules["proxsps"], torch))

SHRINKAGE = 0.02  # share of the weights that weight decay may remove in one step without a hint
SMALL_FACTOR = 0.05  # on the steps without a learning rate: smaller ones are usually meant as learning rates
SKORCH = 0.01  # its own lr, where the user gave none
FIRST_STEPS = 100  # in which all factors have to be small for a hint
LOW = 100  # steps in a row that were skipped, or had a model at or below the bound, after which there is a warning
UNTOUCHED = "Parameters were left untouched."

# If after so many steps the measured distance was never more than this part of the longest of them, the entries that
# moved are not those that are measured: by the triangle inequality, a step of length L begins or ends at least L/2 from
# the start. Some rest of the largest distance is normal: a run that has arrived moves around its solution, and one that
# starts close to it never goes further than the first estimate. So the measured distance is compared with the steps
# themselves, and only in runs that are observed from their first step: later, steps are short.
LIMITED, STILL = 100, 0.01

REASON = (
    f"In {LIMITED} steps that were limited by the distance from the start, the measured distance was never more than "
    f"{STILL:.0%} of the longest of these steps, and steps do not become longer while it rests. Of parameters with "
    f"more than {WHOLE:,} entries one in {1 << BLOCK_BITS} is measured: either few entries move and none of those, or "
    "parameters are set back after the steps"
)
EFFECT = (
    "Training hardly proceeds. Check that all parameters get the gradients that you expect; if only a few entries of a "
    "large parameter do, pass a number as lr."
)


def warn(text: str, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, with the line of the user's code that called this package, directly or through torch."""
    warnings.warn(text, category, stacklevel=_caller()[1])


def _caller() -> tuple[FrameType, int]:
    """The innermost frame outside of this package and torch, and how many frames it is from here."""
    frame, level = sys._getframe(), 0
    while frame.f_back is not None and frame.f_code.co_filename.startswith(INSIDE):
        frame, level = frame.f_back, level + 1
    return frame, level


def shrinkage_hint(groups: Iterable[dict[str, Any]], decay_is_l2: bool) -> str | None:
    """Advice if `lr` times `weight_decay` removes more than a few percent of a group's weights in every step.

    A group with `regularizer=L2(lam)` gets no advice; it takes the same step if `decay_is_l2`. Tensors are read only on
    the host.
    """
    for group in groups:
        lr, lam = group["lr"], group["weight_decay"]
        if isinstance(lr, Tensor) and (group["capturable"] or lr.device.type != "cpu" or is_fake(lr)):
            continue
        product = float(lr) * float(lam)
        share = product / (1 + product)
        if share > SHRINKAGE:
            text = (
                f"lr={float(lr):g} with weight_decay={float(lam):g} shrinks the weights by {share:.1%} in every step. "
                "If weight_decay comes from AdamW, multiply it by the lr there and divide it by the lr here"
            )
            wanted = (
                f". If you want this, pass regularizer=L2({float(lam):g}) instead: the same step, without this warning"
            )
            return text + wanted if decay_is_l2 else text
    return None


def skorch_hint(lr: Any) -> str | None:
    """Advice if skorch has passed its own lr: the caller is a method of its net, which has no `optimizer__lr`."""
    if "skorch" not in sys.modules or type(lr) is not float or lr != SKORCH:
        return None
    net = _caller()[0].f_locals.get("self")
    if not any(kind.__module__.startswith("skorch.") for kind in type(net).__mro__) or hasattr(net, "optimizer__lr"):
        return None
    return (
        f"lr={lr:g} is skorch's default, and would be the upper limit of every step. Pass lr=None to the net for steps "
        f"without a learning rate, or a larger number. If you want this limit, pass optimizer__lr={lr:g}"
    )


def factor_hint(groups: Sequence[dict[str, Any]]) -> str:
    """Advice for a training without a learning rate whose first steps all had small factors."""
    largest = max(group["lr"] for group in groups)
    return (
        f"the lr of no group was above {SMALL_FACTOR:g} in the first {FIRST_STEPS} steps; it is at most {largest:.3g}. "
        "Without a learning rate, lr is a factor on the step that starts at 1, so these steps were probably too short. "
        "Schedulers that set rates of their own (OneCycleLR, CyclicLR, SWALR) and long warm-ups do this: use CoolDown, "
        "no scheduler, or max_lr=1"
    )


def sibling_hint(groups: Sequence[dict[str, Any]], siblings: Iterable[range]) -> str | None:
    """Advice if the `lr` of one group was set, but not that of another one made of the same list or model."""
    for places in siblings:
        rates = [groups[i]["lr"] for i in places]
        if any([type(lr) is float and type(rates[0]) is float and lr != rates[0] for lr in rates]):
            listed = ", ".join(f"{lr:g} in group {i}" for i, lr in zip(places, rates, strict=True))
            return (
                f"lr is {listed}, and these groups were made of one list of parameters, or of one model: matrices and "
                'other tensors have groups of their own. Set it in all: for group in opt.param_groups: group["lr"] = '
                '... If the steps are to differ, pass groups with "set" and "factor" of your own'
            )
    return None


def skip_reason(f: float, C: float, bounded: bool) -> tuple[str, str]:
    """Why the numbers of a step leave the parameters as they are: its kind, and a sentence."""
    if not abs(C) < math.inf:
        return "bound", f"lower_bound is {C}"
    if not abs(f) < math.inf:
        return "loss", f"The loss is {f}"
    if bounded and f < C:
        return "bound", (
            f"The loss {f:.6g} is below lower_bound={C:.6g}; set lower_bound to a value that it never falls below, "
            "or to None if there is none"
        )
    return "gradient", "A gradient or a parameter is not finite"


def limited_length(d_sq: float, g_sq: float, step: Step) -> float:
    """How far a step goes if the distance cap limits it, else 0.

    A regulariser, or a share of 0, may keep entries where they are. A part q of the fall of the linear model is left
    then, and at most sqrt(q) of the length: ||x+ - x||^2 <= tau <d, x - x+> where x minimises the regulariser. Sums are
    over all blocks: <d, D^-1 d> and ||D^-1 g||^2.
    """
    free = step.longest * d_sq
    if step.dual < 1 or step.distance > step.longest or not free > 0:
        return 0.0
    return step.caps * math.sqrt(g_sq * min(1.0, max(0.0, (step.gap - step.height) / free)))


class WarnsOnce:
    """The part of an optimizer that warns, once for each kind of reason, and notices steps that lead nowhere."""

    param_groups: list[dict[str, Any]]

    def _forget_warnings(self) -> None:
        """No warning was given, and no step was taken yet."""
        self._warned: set[str] = set()
        self._skips = 0  # steps in a row that were skipped
        self._observed = True  # whether the next step has to be looked at, even if its model is above the bound
        self._low = 0  # steps in a row with a model at or below its bound
        self._small: int | None = 0  # steps since the start of a run, if the factors of all were small
        # Limited steps since the start of a run, and the longest of them; None once the measured distance has grown.
        self._rest: tuple[int, float] | None = None

    def _warn_once(
        self, kind: str, reason: str, effect: str = UNTOUCHED, category: type[Warning] = RuntimeWarning
    ) -> None:
        """Warn the first time that this kind of reason occurs."""
        if kind not in self._warned:
            self._warned.add(kind)
            parts = f"{type(self).__name__}: {reason}.", effect, "This warning is shown once."
            warn(" ".join(filter(None, parts)), category)

    def _skip(self, kind: str, reason: str) -> None:
        """Count a skipped step, and warn once for each reason."""
        self._warn_once(kind, reason)
        self._skips += 1
        if self._skips == LOW:
            self._warn_once("skips", f"The last {LOW} steps were all skipped. {reason}")

    def _notice(self, solved: Solved, rule: Rule) -> None:
        """Warn once if the steps that are taken lead nowhere."""
        averaged = rule.beta is not None or rule.mix is not None
        if averaged and solved.loss.bounded:
            self._low = self._low + 1 if solved.step.gap <= 0 else 0
            if self._low == LOW:
                reason = (
                    f"The average of the linear models was at or below lower_bound={solved.loss.C:.6g} for {LOW} steps "
                    "in a row. The bound is too high for this loss; lower it, or set it to None"
                )
                self._warn_once("low", reason, "The loss had no effect on the parameters in these steps.")
        if rule.distance and rule.max_move is None:
            self._notice_rest(solved, solved.blocks.g_sq if averaged else solved.blocks.d_sq)
        self._small = self._small if rule.factor else None
        if self._small is not None:
            self._notice_factors(solved.k)
        self._observed = self._low > 0 or self._small is not None or self._rest is not None

    def _notice_factors(self, k: float) -> None:
        """Warn if the factors of all steps from the very first on were small; a resumed training gets no warning."""
        rates = [group["lr"] for group in self.param_groups]
        small = k == self._small and all([not isinstance(lr, Tensor) and lr < SMALL_FACTOR for lr in rates])
        self._small = int(k) + 1 if small else None
        if self._small == FIRST_STEPS:
            self._small = None
            self._warn_once("factors", factor_hint(self.param_groups), "")

    def _notice_rest(self, solved: Solved, g_sq: Sequence[float]) -> None:
        """Warn once if the measured distance rests although steps are taken (see `STILL`)."""
        if solved.k == 0:
            self._rest = 0, 0.0
        if self._rest is None:
            return
        (steps, longest), self._rest = self._rest, None
        if not math.sqrt(sum(solved.blocks.moved_sq)) > STILL * longest:
            length = limited_length(float(sum(solved.blocks.d_sq)), float(sum(g_sq)), solved.step)
            steps, longest = steps + (length > 0), max(longest, length)
            if steps < LIMITED:
                self._rest = steps, longest
            else:
                self._warn_once("rest", REASON, EFFECT)
