"""What all optimizers here share: checked groups, the loss that belongs to the gradient, one step, checkpoints."""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps.core.array import Array
from proxsps.core.rules import Decision, Model
from proxsps.core.step import admissible
from proxsps.optim.assembly import Assembly
from proxsps.optim.backward import LastBackward
from proxsps.optim.blocks import Block, gather
from proxsps.optim.checks import (
    SHARED,
    check_agreement,
    check_bound,
    check_constructor,
    check_group_keys,
    check_limit,
    check_loss,
    check_lr,
    check_nonnegative,
    check_origin,
    check_positive,
    check_regularizer,
    check_unflattened,
    computable,
    is_fake,
    loss_value,
)
from proxsps.optim.estimate import Estimate
from proxsps.optim.last_step import LastStep, Solution, report
from proxsps.optim.numbers import Numbers, choose
from proxsps.optim.reduce import ProcessGroup, Ranks, join
from proxsps.optim.uneven import TakesUnevenInputs
from proxsps.regularizers import Regularizer


class PolyakOptimizer(Optimizer, TakesUnevenInputs):
    """Base of the optimizers that set their step from the loss value.

    A step has four parts: the estimate makes a linear model of the loss, the assembly reduces it to a few numbers, the
    rule of the method chooses the dual variable from these, and the assembly writes. A subclass says which estimate and
    which rule (`_decide`). Everything a later step depends on is in `state` or `param_groups`.
    """

    needs_loss = True
    bounded = True  # whether the loss is held against a lower bound
    _complete = False  # whether the groups of the constructor are all there

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """An empty optimizer, once the names of the options are known to be right."""
        check_constructor(cls, options)
        return super().__new__(cls)

    def __init__(
        self,
        params: Iterable[Any],
        defaults: dict[str, Any],
        process_group: ProcessGroup | Literal[False] | None,
        check_replicas: bool,
    ) -> None:
        self._ranks = Ranks(process_group, check_replicas)
        self._forget()
        super().__init__(params, defaults)
        self._complete = True
        self.register_state_dict_post_hook(_only_plain_data)

    def _forget(self) -> None:
        """What is not part of a checkpoint: losses watched since the last step, its report, warnings already given."""
        self._watched: list[tuple[Tensor | float, float]] = []
        self._backward = LastBackward()
        # In a dictionary, because torch.compile loses what is assigned to attributes of an optimizer.
        self._taken: dict[str, tuple[Array, Solution] | None] = {"last": None}
        self._warned: set[str] = set()
        self._leave_join()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own `lr`, `weight_decay` or `regularizer`; all groups share one joint step.

        A group that is added later takes the options of the whole step, such as `lower_bound`, from the others.
        """
        name = type(self).__name__
        if isinstance(param_group, dict):  # torch raises for anything else
            param_group = dict(param_group)  # torch fills in defaults, which the next optimizer would take as given
            check_group_keys(name, param_group, self.defaults)
            for key in self.defaults if self._complete else ():
                if key in SHARED:
                    param_group.setdefault(key, self.param_groups[0][key])
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
            check_agreement(name, self.param_groups, len(self.param_groups) - 1)
        except Exception:
            self.param_groups.pop()
            raise

    def _check_group(self, group: dict[str, Any]) -> None:
        check_lr(group["lr"], group["params"])
        check_nonnegative("weight_decay", group["weight_decay"])
        check_bound(group.get("lower_bound", 0.0))
        check_limit(group["max_move"])
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

    def _loss(
        self, closure: Callable[[], Any] | Tensor | float | None, loss: Tensor | float | None
    ) -> tuple[Any, float, Any]:
        """The loss to step with, None for no step; its weight among the ranks; and what `step` returns."""
        name = type(self).__name__
        if closure is not None and loss is not None:
            raise ValueError(f"{name}.step() got both a closure and a loss, or two losses: give one of them.")
        if closure is not None and not callable(closure):  # step(loss)
            closure, loss = None, closure
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
            return loss_value(value), weight, returned
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
        closure: Callable[[], Any] | Tensor | float | None = None,
        *,
        loss: Tensor | float | None = None,
        lower_bound: Tensor | float | None = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: recomputes the model, calls `backward` and returns the loss. The loss itself is taken here too.
            loss: the loss whose gradients are in `.grad`; a 0-d tensor or a number. It is not changed.
            lower_bound: lower bound of this batch's loss, instead of the optimizer's.

        Returns:
            The closure's or the given loss.
        """
        self._taken["last"] = None
        if self._ranks.size > 1:
            self._check_uneven()
        value, weight, returned = self._loss(closure, loss)
        options = self.param_groups[0]
        check_agreement(type(self).__name__, self.param_groups)
        if lower_bound is None:
            lower_bound = options.get("lower_bound", 0.0)
        elif not self.bounded:
            raise ValueError(f"{type(self).__name__} has no use for a lower bound; leave it out, or use ProxSPS.")
        check_bound(lower_bound)
        blocks = gather(self.param_groups, self._ranks)
        # Among several ranks, one without gradients takes part all the same: the others wait for it.
        found = [block.params[0] for block in blocks if block.params]
        if not found and (returned is not None or (value is not None and self.needs_loss)):
            self._warn_once("no gradient", "No parameter has a gradient. Call loss.backward() before the step", 5)
        if value is not None and (found or self._ranks.size > 1) and computable(found, value, self.needs_loss):
            numbers = choose(blocks, options["capturable"] or any(map(is_fake, found)))
            self._step(blocks, numbers, value, weight, lower_bound)
        return returned

    def _estimate(self) -> Estimate:
        """The estimate that a step starts with."""
        return Estimate()

    @abstractmethod
    def _decide(self, model: Model, blocks: Sequence[Block], numbers: Numbers, ok: Array) -> Decision:
        """The rule of the method; where not `ok`, it leaves its memory as it is."""

    def _step(self, blocks: list[Block], numbers: Numbers, value: Any, weight: float, bound: Any) -> None:
        m, C = numbers.scalar(value), numbers.scalar(bound)
        estimate = self._estimate()
        addition = estimate.prepare(blocks, numbers)
        alpha = numbers.vector([block.alpha for block in blocks])
        lam = numbers.vector([block.lam for block in blocks])
        assembly = Assembly(blocks, numbers, self._ranks, self.param_groups[0]["fused"], estimate.coupled)
        alone = self._ranks.size == 1
        ahead = None
        if alone and not estimate.coupled:
            ahead = m - C if self.bounded else math.inf
        sums = assembly.sums(points=estimate.coupled or self._max_move is not None, gap=ahead)
        agreed, active = True, self._ranks.size
        if not alone:
            m, C, addition, sums, agreed, active = join(
                self._ranks, numbers, blocks, m, C, weight, addition, sums, active=True
            )
        m = estimate.value(m, addition, sums, lam)
        gap = m - C
        ok = admissible(gap, sums.d_sq, sums.d_dot_x, self.bounded) & agreed
        if numbers.refuses(ok):
            self._explain_skip(m, C)
            solution = Solution.skipped(gap)
        else:
            decision = self._decide(assembly.model(gap, sums, alpha, lam), blocks, numbers, ok)
            s = assembly.write(decision.u, sums, alpha, lam, ok, self._max_move)
            solution = Solution(ok, gap, *decision, s)
            estimate.commit(ok)
        for block in blocks:
            for finish in block.afterwards:
                finish()
        if len(blocks) > len(self.param_groups):  # shards and whole tensors of one group
            caps = {id(block.group): block.alpha for block in blocks}
            alpha = numbers.vector([caps[id(group)] for group in self.param_groups])
        self._taken["last"] = (alpha, solution)
        if self._ranks.check and 1 < self._ranks.size == active:
            self._ranks.compare(self.last_step.tau, self._named())

    @property
    def _max_move(self) -> float | None:
        return self.param_groups[0]["max_move"]

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        """All parameters with a name each."""
        for j, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {i} of group {j}" for i in range(len(group["params"]))]
            yield from zip(names, group["params"], strict=True)

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
        self._warn_once(kind, reason, 7)

    def _warn_once(self, kind: str, reason: str, stacklevel: int) -> None:
        """Warn the first time that there is this kind of reason."""
        if kind not in self._warned:
            self._warned.add(kind)
            text = f"{type(self).__name__}: {reason}. Parameters were left untouched. This is said once."
            warnings.warn(text, RuntimeWarning, stacklevel=stacklevel)

    # Checkpoints

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ranks": self._ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict calls this last, after its hooks and checks: an error here leaves everything as it was.
        own = self.param_groups if "defaults" not in state else None
        for group, saved in zip(own or (), state["param_groups"], strict=own is not None):
            check_origin(type(self).__name__, self.defaults, group, saved)
        super().__setstate__(state)
        self._complete = True
        self.defaults.pop("differentiable", None)  # torch adds it, to optimizers without that option too
        if "_watched" not in self.__dict__:  # unpickled or copied
            self._forget()
            self.register_state_dict_post_hook(_only_plain_data)
        for group in self.param_groups:
            group.pop("differentiable", None)
            for key, default in self.defaults.items():
                group.setdefault(key, default)
        for group, mine in zip(self.param_groups, own or (), strict=own is not None):
            _keep_regularizer(group, mine["regularizer"])


def _only_plain_data(opt: Optimizer, state: dict[str, Any]) -> None:
    """Make a dictionary of state one of plain data (regularisers as text) and copies, which do not follow later steps.

    A hook, because hooks of the user, which come after it, are to see what will be saved.
    """
    state["param_groups"] = [{key: _plain(value) for key, value in group.items()} for group in state["param_groups"]]


def _keep_regularizer(group: dict[str, Any], phi: Regularizer | None) -> None:
    """Give a loaded group the regulariser it was constructed with, which a checkpoint has only as text."""
    saved, group["regularizer"] = group["regularizer"], phi
    if _plain(saved) != _plain(phi):  # a dictionary without one gets the default, which is no text
        text = f"The checkpoint has regularizer={saved}; this optimizer was constructed with {phi!r} and keeps it."
        warnings.warn(text, UserWarning, stacklevel=6)


def _plain(value: Any) -> Any:
    """An option of a group as it goes into a checkpoint."""
    if isinstance(value, Regularizer):
        return repr(value)
    return value.clone() if isinstance(value, Tensor) else value
