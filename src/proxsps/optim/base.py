"""What all optimizers here share: checked groups, and one step with the loss that belongs to the gradient."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from proxsps.core.array import Array
from proxsps.core.rules import Decision, Model
from proxsps.core.step import admissible
from proxsps.optim.assembly import Assembly
from proxsps.optim.blocks import Block, gather
from proxsps.optim.caps import Caps, Known, Step
from proxsps.optim.checks import (
    SHARED,
    check_agreement,
    check_bound,
    check_constructor,
    check_group_keys,
    check_limit,
    check_lr,
    check_nonnegative,
    check_rate,
    check_regularizer,
    check_unflattened,
    computable,
    is_fake,
)
from proxsps.optim.estimate import Estimate
from proxsps.optim.hints import warn
from proxsps.optim.host import take
from proxsps.optim.last_step import LastStep, Taken, report
from proxsps.optim.memory import follow_dtypes, keep_numbers
from proxsps.optim.numbers import Device, Host, Numbers, choose
from proxsps.optim.plan import Plan, Rule
from proxsps.optim.reduce import ProcessGroup, Ranks, join
from proxsps.optim.saving import SavesState
from proxsps.optim.search import Gap
from proxsps.optim.uneven import TakesUnevenInputs
from proxsps.optim.watching import WatchesLosses

NUMBERS = ("lr", "weight_decay")  # that schedulers change
LOW = 100  # steps in a row that were skipped, or had a model at or below the bound, after which there is a warning


class PolyakOptimizer(WatchesLosses, SavesState, Optimizer, TakesUnevenInputs):
    """Base of the optimizers that set their step from the loss value.

    A step has four parts: the estimate makes a linear model of the loss, the assembly reduces it to a few numbers, the
    rule of the method chooses the dual variable from these, and the assembly writes. A subclass chooses estimate and
    rule (`_decide`). Everything a later step depends on is in `state` or `param_groups`.
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
        self._complete = True
        self._register_hooks()

    def _forget(self) -> None:
        """What is not part of a checkpoint: losses watched since the last step, its report, warnings already given."""
        self._forget_losses()
        # In a dictionary, because torch.compile loses what is assigned to attributes of an optimizer.
        self._taken: dict[str, Taken | None] = {"last": None}
        self._warned: set[str] = set()
        self._loading: dict[str, Any] | None = None
        self._low = 0  # steps in a row with a model at or below its bound
        self._skips = 0  # steps in a row that were skipped
        self._plan: Plan | None = None
        self._dtypes: tuple[torch.dtype, ...] = ()  # of the parameters, at the last step
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
        check_lr(type(self).__name__, group["lr"], group["params"])
        self._check_numbers(group)
        if (bound := group.get("lower_bound")) is not None:
            check_bound(bound)
        check_unflattened(group["params"])
        check_regularizer(group)

    def _check_numbers(self, group: dict[str, Any]) -> None:
        check_rate(group)
        check_nonnegative("weight_decay", group["weight_decay"])
        check_limit(group["max_move"])

    def _check_changes(self) -> None:
        """Check the numbers in the groups again, and let state follow the parameters into another dtype."""
        for i, group in enumerate(self.param_groups):
            try:
                self._check_numbers(group)
            except ValueError as error:
                text = f"{error} It is in parameter group {i}, from a scheduler or an assignment. Nothing was changed."
                raise ValueError(text) from None
        dtypes = tuple([param.dtype for group in self.param_groups for param in group["params"]])
        if dtypes != self._dtypes:
            follow_dtypes(self.state, self.param_groups)
            self._dtypes = dtypes

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
        observed = (
            self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks or torch.autograd._profiler_enabled()
        )
        if observed or _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
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
        compiling = torch.compiler.is_compiling()
        if not compiling and not all([sound(group[key]) for group in self.param_groups for key in NUMBERS]):
            self._check_changes()
        if self._ranks.size > 1:
            self._check_uneven()
        value, weight, returned = self._loss(closure, loss)
        options = self.param_groups[0]
        if lower_bound is None:
            lower_bound = options.get("lower_bound", 0.0)
        elif not self.bounded:
            raise ValueError(f"{type(self).__name__} does not use a lower bound; leave it out, or use ProxSPS.")
        if lower_bound is not None:
            check_bound(lower_bound)
        plan = None if value is None or compiling else self._plan
        if plan is not None and plan.holds(self):
            self._check_options()
            self._take(plan, value, weight, lower_bound)
            return returned
        if not compiling:
            self._check_changes()
        check_agreement(type(self).__name__, self.param_groups)
        if value is not None:
            self._drop_blank_state()
        blocks = gather(self.param_groups, self._ranks, self._rule().beta2 is not None)
        # A rank without gradients takes part too, because the other ranks wait for it.
        found = [x for block in blocks for x in block.params[:1]]
        if not found and (returned is not None or (value is not None and self.needs_loss)):
            self._warn_once("no gradient", "No parameter has a gradient. Call loss.backward() before the step")
        if value is None:
            self._start_state()
        if value is not None and (found or self._ranks.size > 1) and computable(found, value, self.needs_loss):
            numbers = choose(blocks, options["capturable"] or any(map(is_fake, found)))
            self._check_options()
            if isinstance(numbers, Host):
                self._plan = Plan(self, blocks, self._rule())
                self._take(self._plan, value, weight, lower_bound)
            else:
                self._step(blocks, numbers, value, weight, lower_bound)
        return returned

    _observed_step = Optimizer.profile_hook_step(_step_once)

    def _take(self, plan: Plan, value: Any, weight: float, bound: Any) -> None:
        """Take the step of a plan; in doubles if its numbers need them."""
        bounded = self.bounded and bound is not None
        numbers = float(value), float(bound) if bounded else 0.0, bounded, weight
        taken = take(self, plan, *numbers)
        if taken is None:
            blocks = gather(self.param_groups, self._ranks, plan.rule.beta2 is not None)
            plan = Plan(self, blocks, plan.rule, exact=True)
            taken = take(self, plan, *numbers)
        self._taken["last"] = taken
        if taken is not None and self._ranks.check and 1 < self._ranks.size == plan.active:
            self._ranks.compare(report(taken).tau, self._named())

    def _rule(self) -> Rule:
        """The rule of the method, with the options that it has now."""
        return Rule(max_move=self._max_move)

    def _start_state(self) -> None:
        """Create the state of parameters with a gradient, so that a checkpoint can be loaded into it."""

    def _drop_blank_state(self) -> None:
        """Drop such state of parameters that have no gradient at the first step: it would count in the distance cap."""

    @property
    def _remembers(self) -> bool:
        """Whether there is state beside the numbers in the groups."""
        return False

    def _check_options(self) -> None:
        """Raise an error, or warn, for options that schedulers or users have set since the last step."""

    def _estimate(self) -> Estimate:
        """The estimate of a step."""
        return Estimate()

    @property
    def _further_sums(self) -> tuple[int, int]:
        """The number of rows of sums besides those of the slopes, and of vectors of the distance cap."""
        return self._estimate().rows, 0

    def _caps(self, numbers: Numbers) -> Caps:
        """The caps of a step."""
        return Caps()

    @abstractmethod
    def _decide(self, model: Model, blocks: Sequence[Block], numbers: Numbers, ok: Array) -> Decision:
        """The rule of the method; if not `ok`, its memory does not change."""

    def _choose(self, assembly: Assembly, caps: Caps, known: Known, ok: Array) -> Step:
        """The step of a rule on the model with known caps."""
        model = assembly.model(known.gap, known.sums, known.alpha, known.lam)
        decision = self._decide(model, assembly.blocks, assembly.numbers, ok)
        return Step(decision, decision.u)

    def _step(self, blocks: list[Block], numbers: Host | Device, value: Any, weight: float, bound: Any) -> None:
        bounded = self.bounded and bound is not None
        f, C = numbers.scalar(value), numbers.number(bound if bounded else 0.0)
        estimate, caps = self._estimate(), self._caps(numbers)
        estimate.prepare(blocks, numbers)
        rates = [block.alpha for block in blocks if isinstance(block.alpha, Tensor)]  # on a device, not read
        alpha = caps.prepare(blocks, numbers)
        lam = numbers.vector([block.lam for block in blocks])
        assembly = Assembly(blocks, numbers, self._ranks, estimate.coupled)
        alone = self._ranks.size == 1
        ahead: Gap | None = None
        if alone and not estimate.coupled and not caps.scaled:
            ahead = (lambda *dots: _above(estimate.expected(f, *dots), C)) if bounded else math.inf
            if estimate.plain and bounded:
                ahead = _above(f, C)
        sums = assembly.sums(points=estimate.coupled or self._max_move is not None, gap=ahead)
        extras, travelled = estimate.extras(assembly.parts), caps.sums(assembly.parts)
        agreed, active = True, self._ranks.size
        if not alone:
            f, C, sums, extras, travelled, agreed, active = join(
                self._ranks, numbers, blocks, f, C, weight, sums, extras, travelled, active=True
            )
        m = estimate.value(f, extras, sums, lam)
        # An averaged model may be below the bound, even if no loss is.
        gap = _above(m, C)
        above, further = (gap, ()) if estimate.plain or estimate.coupled else (_above(f, C), (gap,))
        ok = admissible(above, sums.d_sq, sums.d_dot_x, bounded, *further)
        ok = ok if agreed is True else ok & agreed
        ok = ok & are_rates(torch.stack(rates)) if rates else ok
        if numbers.refuses(ok):
            self._explain_skip(m if estimate.coupled else f, C, bounded)
            taken = Taken(alpha, False, gap)
        else:
            self._skips = 0
            known = Known(gap, sums, alpha, lam, bounded, travelled, estimate.g_sq(extras, sums))
            step = self._choose(assembly, caps, known, ok)
            assembly.reach = step.reach
            s = assembly.write(step.u, estimate.move_sums(extras, sums), alpha, lam, ok, self._max_move)
            taken = Taken(alpha, ok, gap, step, s)
            keep_numbers(self.param_groups, numbers, ok, estimate.changes() | caps.changes())
            estimate.commit(ok)
            caps.commit()
            if bounded and not estimate.plain and isinstance(numbers, Host):
                self._notice_low(gap, C)
        for block in blocks:
            for finish in block.afterwards:
                finish()
        if len(blocks) > len(self.param_groups):  # shards and whole tensors of one group
            places = {id(block.group): i for i, block in reversed(list(enumerate(blocks)))}
            taken = taken._replace(alpha=numbers.vector([alpha[places[id(group)]] for group in self.param_groups]))
        self._taken["last"] = taken
        if self._ranks.check and 1 < self._ranks.size == active:
            self._ranks.compare(report(taken).tau, self._named())

    @property
    def _max_move(self) -> float | None:
        limit: float | None = self.param_groups[0]["max_move"]
        return limit

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

    def _explain_skip(self, m: Array, C: Array, bounded: bool) -> None:
        """Warn once for each reason to leave parameters as they are."""
        if not abs(C) < math.inf:
            kind, reason = "bound", f"lower_bound is {float(C)}"
        elif not abs(m) < math.inf:
            kind, reason = "loss", f"The loss is {float(m)}"
        elif bounded and m < C:
            kind, reason = (
                "bound",
                (
                    f"The loss {float(m):.6g} is below lower_bound={float(C):.6g}; set lower_bound to a value "
                    "that it never falls below, or to None if there is none"
                ),
            )
        else:
            kind, reason = "gradient", "A gradient or a parameter is not finite"
        self._skip(kind, reason)

    def _skip(self, kind: str, reason: str) -> None:
        """Count a skipped step, and warn once for each reason."""
        self._warn_once(kind, reason)
        self._skips += 1
        if self._skips == LOW:
            self._warn_once("skips", f"The last {LOW} steps were all skipped. {reason}")

    def _notice_low(self, gap: Array, C: Array) -> None:
        """Warn once if the model stays at or below its bound, so that the loss has no effect."""
        self._low = self._low + 1 if gap <= 0 else 0
        if self._low == LOW:
            reason = (
                f"The average of the linear models was at or below lower_bound={float(C):.6g} for {LOW} steps in a "
                "row. The bound is too high for this loss; lower it, or set it to None"
            )
            self._warn_once("low", reason, "The loss had no effect on the parameters in these steps")

    def _warn_once(self, kind: str, reason: str, effect: str = "Parameters were left untouched") -> None:
        """Warn the first time that this kind of reason occurs."""
        if kind not in self._warned:
            self._warned.add(kind)
            warn(f"{type(self).__name__}: {reason}. {effect}. This warning is shown once.")


def sound(number: Any) -> bool:
    """Whether a number is known to be finite and not negative."""
    return type(number) is float and 0 <= number < math.inf


def are_rates(rates: Tensor) -> Tensor:
    """Whether all caps on the step are finite numbers >= 0."""
    return ((rates >= 0) & (rates < math.inf)).all()


def _above(m: Array, C: Array | float) -> Array:
    """m - C; without an operation for the usual C = 0."""
    return m if isinstance(C, float) and C == 0 else m - C
