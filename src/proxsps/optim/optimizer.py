"""What all optimizers here share: checked groups, and one step with the loss that belongs to the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from proxsps.core.plain_step import SKIPPED, TAKEN, Loss
from proxsps.optim.blocks import Block, gather
from proxsps.optim.checks import (
    NUMBERS,
    SHARED,
    check_agreement,
    check_bound,
    check_constructor,
    check_group_keys,
    check_lr,
    check_regularizer,
    check_unflattened,
    computable,
    is_fake,
)
from proxsps.optim.device import step as device_step
from proxsps.optim.device.numbers import step_device
from proxsps.optim.distance import Known
from proxsps.optim.hints import skip_reason
from proxsps.optim.host import solve
from proxsps.optim.last_step import LastStep, Taken, report
from proxsps.optim.memory import follow_dtypes
from proxsps.optim.plan import Plan
from proxsps.optim.reduce import ProcessGroup, Ranks
from proxsps.optim.rule import Rule
from proxsps.optim.saving import SavesState
from proxsps.optim.uneven import TakesUnevenInputs
from proxsps.optim.watching import WatchesLosses

SCHEDULED = ("lr", "weight_decay")  # numbers that schedulers change


class PolyakOptimizer(WatchesLosses, SavesState, Optimizer, TakesUnevenInputs):
    """Base of the optimizers that set their step from the loss value.

    A step makes a linear model of the loss, reduces it to a few numbers, chooses the dual variable from these, and
    writes: on the host by a plan (`proxsps.optim.plan`, `proxsps.optim.host`), on a device by `proxsps.optim.device`. A
    method is its options and its `_rule`. Everything a later step depends on is in `state` or `param_groups`.
    """

    bounded = True  # whether the loss has a lower bound
    _complete = False  # whether all groups of the constructor have been added

    def __new__(cls, *args: Any, **options: Any) -> Self:
        """Check the names of the options, then create an empty optimizer."""
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
        for group in [self.defaults, *self.param_groups]:
            for name, number in self._rule().numbers.items():
                group.setdefault(name, number)
        self._complete = True
        self._register_hooks()

    def _forget(self) -> None:
        """What is not part of a checkpoint: losses watched since the last step, its report, warnings already given."""
        self._forget_losses()
        self._forget_warnings()
        # In a dictionary, because torch.compile loses what is assigned to attributes of an optimizer.
        self._taken: dict[str, Taken | None] = {"last": None}
        self._loading: dict[str, Any] | None = None
        self._plan: Plan | None = None
        self._scheduled: tuple[Any, ...] = ()  # numbers of the groups, as the last step found them
        self._dtypes: tuple[torch.dtype, ...] = ()  # of the parameters, at the last step
        self._regularizers: tuple[Any, ...] = ()  # of the groups, as they were checked
        self._places: Known = {}  # of sampled entries
        self._leave_join()

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own `lr`, `weight_decay` or `regularizer`; all groups share one joint step.

        A group that is added later gets the options of the whole step, such as `lower_bound`, from the others.
        """
        name = type(self).__name__
        if isinstance(param_group, dict):  # torch raises for anything else
            param_group = dict(param_group)  # torch fills in defaults, which another optimizer would keep
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
        check_lr(type(self).__name__, group, False)
        self._check_numbers(group)
        check_bound(group.get("lower_bound"))
        check_unflattened(group["params"])
        self._check_regularizer(group)

    def _check_regularizer(self, group: dict[str, Any]) -> None:
        check_regularizer(type(self).__name__, self._rule(), group)

    def _check_numbers(self, group: dict[str, Any]) -> None:
        check_lr(type(self).__name__, group, True)
        for name, check in NUMBERS.items():
            if name in self.defaults:
                check(name, group[name])

    def _check_changes(self) -> None:
        """Check numbers and new regularisers in the groups, and let state follow the parameters into another dtype."""
        self._check_groups(self._check_numbers)
        regularizers = tuple([group["regularizer"] for group in self.param_groups])
        if list(map(id, regularizers)) != list(map(id, self._regularizers)):
            self._check_groups(self._check_regularizer)
            self._regularizers = regularizers
        dtypes = tuple([param.dtype for group in self.param_groups for param in group["params"]])
        if dtypes != self._dtypes:
            follow_dtypes(self.state, self.param_groups)
            self._dtypes = dtypes

    def _check_groups(self, check: Callable[[dict[str, Any]], None]) -> None:
        for i, group in enumerate(self.param_groups):
            try:
                check(group)
            except ValueError as error:
                text = f"{error} It is in parameter group {i}, from a scheduler or an assignment. Nothing was changed."
                raise ValueError(text) from None

    # The step

    def step(
        self,
        closure: Callable[[], Any] | Tensor | float | None = None,
        *,
        loss: Tensor | float | None = None,
        lower_bound: Tensor | float | None = None,
    ) -> Any:
        """Take one step.

        Args:
            closure: recomputes the model, calls `backward` and returns the loss. The loss may be passed here too.
            loss: the loss whose gradients are in `.grad`; a 0-d tensor or a number. It is not changed.
            lower_bound: lower bound of this batch's loss, instead of the optimizer's.

        Returns:
            The closure's or the given loss.
        """
        # Torch would wrap every step for hooks and profilers, which takes as long as a step of a small model.
        hooked = self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        profiled = not torch.compiler.is_compiling() and _profiler_enabled()
        if hooked or profiled or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return self._observed_step(closure, loss=loss, lower_bound=lower_bound)
        return self._step_once(closure, loss=loss, lower_bound=lower_bound)

    step.hooked = True  # type: ignore[attr-defined]

    @torch.no_grad()
    def _step_once(
        self,
        closure: Callable[[], Any] | Tensor | float | None,
        *,
        loss: Tensor | float | None,
        lower_bound: Tensor | float | None,
    ) -> Any:
        self._taken["last"] = None
        changed = self._read_scheduled()
        if self._ranks.size > 1:
            self._check_uneven()
        value, weight, returned = self._loss(closure, loss)
        bound = self._bound(lower_bound)
        take = self._kept_plan(value, changed) or self._new_plan(value, bound, returned)
        if take is not None:
            self._taken["last"] = take(value, weight, bound)
        return returned

    def _bound(self, given: Tensor | float | None) -> Any:
        """The lower bound of this step's loss; None if it has none."""
        if given is None:
            return self.param_groups[0].get("lower_bound", 0.0) if self.bounded else None
        if not self.bounded:
            raise ValueError(f"{type(self).__name__} does not use a lower bound; leave it out, or use ProxSPS.")
        check_bound(given)
        return given

    def _read_scheduled(self) -> bool:
        """Check numbers that schedulers have changed, and tensors; returns whether there are any."""
        if torch.compiler.is_compiling():
            return True
        numbers = tuple([group[key] for group in self.param_groups for key in SCHEDULED])
        known = set(map(type, numbers)) <= {float, int}
        if known and numbers == self._scheduled:
            return False
        if not (known and all([0 <= number < math.inf for number in numbers])):
            self._check_groups(self._check_numbers)
        self._scheduled = numbers
        return True

    def _kept_plan(self, value: Any, changed: bool) -> Callable[..., Taken] | None:
        """What takes the step, if the plan of an earlier step still holds."""
        if value is None or self._plan is None or torch.compiler.is_compiling() or not self._plan.holds(self):
            return None
        if changed:
            self._check_options()
        return partial(self._take, self._plan)

    def _new_plan(self, value: Any, bound: Any, returned: Any) -> Callable[..., Taken] | None:
        """What takes the step, after all checks that a kept plan has passed; None if there is nothing to do."""
        if not torch.compiler.is_compiling():
            self._check_changes()
        check_bound(bound)
        check_agreement(type(self).__name__, self.param_groups)
        if value is not None:
            self._drop_blank_state()
        blocks = self._blocks()
        # A rank without gradients takes part too, because the other ranks wait for it.
        found = [x for block in blocks for x in block.params[:1]]
        if not found and (returned is not None or (value is not None and self.needs_loss)):
            self._warn_once("no gradient", "No parameter has a gradient. Call loss.backward() before the step")
        if value is None:
            self._start_state()
            return None
        if not (found or self._ranks.size > 1) or not computable(found, value, self.needs_loss):
            return None
        params = [x for block in blocks for x in block.params] or [p for _, p in self._named()]
        device = step_device(params, self.param_groups[0]["capturable"] or any(map(is_fake, found)))
        self._check_options()
        if device is not None:
            return partial(device_step.take, self, blocks, device)
        self._plan = Plan(self, blocks, self._rule())
        return partial(self._take, self._plan)

    def _blocks(self) -> list[Block]:
        return gather(self.param_groups, self._ranks, self._rule().beta2 is not None)

    _observed_step = Optimizer.profile_hook_step(_step_once)

    def _take(self, plan: Plan, value: Any, weight: float, bound: Any) -> Taken:
        """Take the step of a plan, or none if it has to be skipped; in doubles if its numbers need them."""
        loss = Loss(float(value), 0.0 if bound is None else float(bound), bound is not None)
        closed, taking = plan.closed_form, plan
        solved = closed.solve(self, loss) if closed is not None and closed.ready() else solve(self, plan, loss, weight)
        while solved is None:  # its numbers need doubles
            taking = Plan(self, self._blocks(), plan.rule, exact=True)
            solved = solve(self, taking, loss, weight)
        ok = solved.step.code == TAKEN
        if ok:
            step = solved.write()
            solved = solved if step is solved.step else solved._replace(step=step)
            taking.keep_numbers(self.param_groups, solved)
            self._skips = 0
            if self._observed or solved.step.gap <= 0 or (plan.rule.distance and solved.k == 0):
                self._notice(solved, plan.rule)
        else:
            if plan.rule.max_move is not None:
                taking.relaxation(None)
            beyond = "move", "The step leaves the range of the parameters' precision"
            self._skip(*(skip_reason(*solved.loss) if solved.step.code == SKIPPED else beyond))
        taken = Taken(solved.share, ok, solved.step.gap, solved.step if ok else None)
        plan.note(self)
        if self._ranks.check and 1 < self._ranks.size == taking.active:
            self._ranks.compare(report(taken).tau, self._named())
        return taken

    def _rule(self) -> Rule:
        """The rule of the method, with the options that it has now."""
        return Rule(max_move=self.param_groups[0]["max_move"])

    def _check_options(self) -> None:
        """Raise an error, or warn, for options that schedulers or users have set since the last step."""

    def _named(self) -> Iterable[tuple[str, Tensor]]:
        """All parameters with their names."""
        for j, group in enumerate(self.param_groups):
            names = group.get("param_names") or [f"parameter {i} of group {j}" for i in range(len(group["params"]))]
            yield from zip(names, group["params"], strict=True)

    @property
    def last_step(self) -> LastStep | None:
        """What the last step did; None before the first step, and if there was no gradient."""
        taken = self._taken["last"]
        return None if taken is None else report(taken)
