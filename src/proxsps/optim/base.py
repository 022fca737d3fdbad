"""What all optimizers here share: checked groups, the loss that belongs to the gradient, one step, checkpoints."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps.core.array import Array
from proxsps.core.step import admissible
from proxsps.optim.arithmetic import Arithmetic, Sums, choose
from proxsps.optim.backward import LastBackward
from proxsps.optim.blocks import Block, gather
from proxsps.optim.checks import (
    check_bound,
    check_keys,
    check_limit,
    check_loss,
    check_nonnegative,
    check_positive,
    check_regularizer,
    check_unflattened,
)
from proxsps.optim.reduce import ProcessGroup, Ranks, join
from proxsps.optim.report import LastStep, Solution, report
from proxsps.regularizers import Regularizer

# Options of the loss or of the whole step, which one group cannot have for itself.
SHARED = ("lower_bound", "c", "c0", "max_move", "fused", "capturable")


class PolyakOptimizer(Optimizer):
    """Base of the optimizers that set their step from the loss value.

    A subclass says how a step is solved and written (`_solve`). Everything a later step depends on is in
    `param_groups`, and nothing is kept per parameter, so that checkpoints are small and complete.
    """

    needs_loss = True
    bounded = True  # whether the loss is held against a lower bound
    coupled = False  # whether the regulariser is part of the loss and its gradient

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        process_group: ProcessGroup | Literal[False] | None,
        check_replicas: bool,
    ) -> None:
        check_bound(defaults.get("lower_bound", 0.0))
        check_limit(defaults["max_move"])
        self._ranks = Ranks(process_group, check_replicas)
        self._forget()
        super().__init__(params, defaults)

    def _forget(self) -> None:
        """What is not part of a checkpoint: losses watched since the last step, its report, warnings already given."""
        self._watched: list[tuple[Tensor | float, float]] = []
        self._backward = LastBackward()
        # In a dictionary, because torch.compile loses what is assigned to attributes of an optimizer.
        self._taken: dict[str, tuple[Array, Solution] | None] = {"last": None}
        self._warned: set[str] = set()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own `lr`, `weight_decay` or `regularizer`; all groups share one joint step."""
        name = type(self).__name__
        check_keys(name, param_group, {*self.defaults, "params", "param_names", "initial_lr"})
        for key in SHARED:
            if key in param_group and param_group[key] != self.defaults[key]:
                raise ValueError(f"{key} cannot differ between parameter groups: pass it to {name}() itself.")
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_nonnegative("lr", group["lr"])
        check_nonnegative("weight_decay", group["weight_decay"])
        check_unflattened(group["params"])
        check_regularizer(group)

    # The loss that belongs to the gradient

    def watch(self, loss: Tensor | float, weight: float = 1.0) -> Tensor | float:
        """Remember the value of a loss for the next plain `step()`, and hand the loss back.

        The value of a loss that requires grad counts from the moment `backward` runs through it, so that the order of
        `watch` and `zero_grad` does not matter; any other counts at once. Over several micro-batches the step uses the
        mean of what was watched, weighted by `weight` (for instance the number of samples): watch each loss before it
        is divided by the number of micro-batches.
        """
        check_loss(loss)
        check_positive("weight", weight)
        if isinstance(loss, Tensor) and loss.requires_grad:
            value = loss.detach()
            loss.register_hook(lambda _: self._record(value, weight))
        else:
            self._watched.append((loss, weight))
        return loss

    def _record(self, value: Tensor, weight: float) -> None:
        """Take in a loss as `backward` reaches it, before any gradient is accumulated."""
        if self._watched and self._backward.cleared(self._gradients):
            self._watched.clear()  # as by model.zero_grad() after a skipped step
        self._watched.append((value, weight))
        self._backward.begin(self._gradients)

    def _gradients(self) -> Iterator[Tensor]:
        return (p.grad for group in self.param_groups for p in group["params"] if p.grad is not None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the watched losses that belong to them."""
        self._watched.clear()
        super().zero_grad(set_to_none)

    def _watched_mean(self) -> tuple[Tensor | float | None, float]:
        """The mean of what was watched, None for nothing, and its weight."""
        if not self._watched:
            return None, 1.0
        total = sum(weight for _, weight in self._watched)
        mean = sum(weight * value for value, weight in self._watched) / total
        self._watched.clear()
        return mean, total

    def _loss(self, closure: Callable[[], Any] | None, loss: Tensor | float | None) -> tuple[Any, float, Any]:
        """The loss to step with, None for no step; its weight among the ranks; and what `step` returns."""
        name = type(self).__name__
        if closure is not None and loss is not None:
            raise ValueError(f"{name}.step() got both a closure and a loss: give one of them.")
        returned = loss
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        # What was watched covers all micro-batches, a closure's loss only the last one.
        watched, weight = self._watched_mean()
        if watched is not None and loss is not None:
            raise ValueError(
                f"{name}.step() got a loss, and another was watched: use watch() or step(loss=...), not both."
            )
        value = returned if watched is None else watched
        if value is not None:
            check_loss(value)
            return value.detach() if isinstance(value, Tensor) else value, weight, returned
        if not self.needs_loss:
            return 0.0, weight, returned
        if all(float(group["lr"]) == 0 for group in self.param_groups):
            return None, weight, returned  # how torch.distributed.checkpoint initialises an optimizer
        raise ValueError(
            f"{name}.step() needs the loss value: call opt.step(loss=loss) after loss.backward(), opt.step(closure), "
            "or loss = opt.watch(loss) before loss.backward(). Got none of them."
        )

    # The step

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        loss: Tensor | float | None = None,
        lower_bound: Tensor | float | None = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: recomputes the model, calls `backward` and returns the loss.
            loss: the loss whose gradients are in `.grad`; a 0-d tensor or a number. It is not changed.
            lower_bound: lower bound of this batch's loss, instead of the optimizer's.

        Returns:
            The closure's or the given loss.
        """
        self._taken["last"] = None
        value, weight, returned = self._loss(closure, loss)
        options = self.param_groups[0]
        if lower_bound is None:
            lower_bound = options.get("lower_bound", 0.0)
        elif not self.bounded:
            raise ValueError(f"{type(self).__name__} has no use for a lower bound; leave it out, or use ProxSPS.")
        check_bound(lower_bound)
        blocks = gather(self.param_groups, self._ranks)
        # Among several ranks, one without gradients takes part all the same: the others wait for it.
        if value is not None and (self._ranks.size > 1 or any(block.params for block in blocks)):
            penalties = self._couple(blocks)
            arithmetic = choose(blocks, options["fused"], options["capturable"])
            self._step(arithmetic, value, weight, lower_bound, penalties)
        return returned

    def _couple(self, blocks: list[Block]) -> list[Tensor]:
        """Move regularisers into the gradients, where the method wants them there; their values, to add to the loss."""
        return []

    def _step(self, arithmetic: Arithmetic, value: Any, weight: float, bound: Any, penalties: list[Tensor]) -> None:
        m, C = arithmetic.scalar(value), arithmetic.scalar(bound)
        alpha = arithmetic.vector([block.alpha for block in arithmetic.blocks])
        lam = arithmetic.vector([block.lam for block in arithmetic.blocks])
        penalty = arithmetic.total(penalties)
        sums = arithmetic.sums(self.coupled, points=self.coupled or self._max_move is not None)
        agreed = True
        if self._ranks.size > 1:
            m, C, penalty, sums, agreed = join(self._ranks, arithmetic, m, C, weight, penalty, sums)
        if self.coupled:
            m = m + penalty + (lam * sums.x_sq).sum() / 2
        gap = m - C
        ok = admissible(gap, sums.d_sq, sums.d_dot_x, self.bounded) & agreed
        if arithmetic.refuses(ok):
            self._explain_skip(m, C)
            solution = Solution.skipped(gap)
        else:
            solution = self._solve(arithmetic, gap, sums, alpha, lam, ok)
        for block in arithmetic.blocks:
            for finish in block.afterwards:
                finish()
        if len(alpha) > len(self.param_groups):  # shards and whole tensors of one group
            caps = {id(block.group): block.alpha for block in arithmetic.blocks}
            alpha = arithmetic.vector([caps[id(group)] for group in self.param_groups])
        self._taken["last"] = (alpha, solution)
        if self._ranks.check and self._ranks.size > 1:
            self._ranks.compare(self.last_step.tau, self._named())

    @property
    def _max_move(self) -> float | None:
        return self.param_groups[0]["max_move"]

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        """All parameters with a name each."""
        for j, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {i} of group {j}" for i in range(len(group["params"]))]
            yield from zip(names, group["params"], strict=True)

    @abstractmethod
    def _solve(self, arithmetic: Arithmetic, gap: Array, sums: Sums, alpha: Array, lam: Array, ok: Array) -> Solution:
        """Solve a step and write it where `ok`."""

    @property
    def last_step(self) -> LastStep | None:
        """What the last step did; None before the first, and where there was no gradient to step with."""
        taken = self._taken["last"]
        return None if taken is None else report(*taken)

    def _explain_skip(self, m: Array, C: Array) -> None:
        """Warn once of each reason to leave parameters as they are."""
        if not abs(C) < math.inf:
            kind, reason = "bound", f"lower_bound is {float(C)}"
        elif not abs(m) < math.inf:
            kind, reason = "loss", f"The loss is {float(m)}"
        elif self.bounded and m < C:
            kind, reason = (
                "bound",
                (
                    f"The loss {float(m):.6g} is below lower_bound={float(C):.6g}; set lower_bound to a value "
                    "that it never falls below"
                ),
            )
        else:
            kind, reason = "gradient", "A gradient or a parameter is not finite"
        if kind not in self._warned:
            self._warned.add(kind)
            text = f"{type(self).__name__}: {reason}. Parameters were left untouched. This is said once."
            warnings.warn(text, RuntimeWarning, stacklevel=5)

    # Checkpoints

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ranks": self._ranks}

    def state_dict(self) -> dict[str, Any]:
        """As in torch, but only plain data (regularisers as text) and copies, which do not follow later steps."""
        state = super().state_dict()
        state["param_groups"] = [
            {key: _plain(value) for key, value in group.items()} for group in state["param_groups"]
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but each group keeps the regulariser it was constructed with; a different one is warned of."""
        own = [group["regularizer"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, phi in zip(self.param_groups, own, strict=True):
            saved, group["regularizer"] = group["regularizer"], phi
            if _plain(saved) != _plain(phi):  # a dictionary without one gets the default, which is no text
                text = (
                    f"The checkpoint has regularizer={saved}; this optimizer was constructed with {phi!r} and keeps it."
                )
                warnings.warn(text, UserWarning, stacklevel=2)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "_watched" not in self.__dict__:  # unpickled or copied
            self._forget()
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)


def _plain(value: Any) -> Any:
    """An option of a group as it goes into a checkpoint."""
    if isinstance(value, Regularizer):
        return repr(value)
    return value.clone() if isinstance(value, Tensor) else value
