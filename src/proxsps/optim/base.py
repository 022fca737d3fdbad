"""What all optimizers here share: validated groups, the loss that belongs to the gradient, one step, one report of it."""

from __future__ import annotations

import difflib
import math
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps.core.array import Array, array_namespace
from proxsps.optim.arithmetic import Arithmetic, Sums, choose
from proxsps.optim.blocks import Block, gather
from proxsps.regularizers import Regularizer

BRANCHES = {-1: "skipped", 0: "truncated", 1: "inside", 2: "capped"}


@dataclass(frozen=True)
class LastStep:
    """What the last step did, as tensors on the device it ran on; reading `branch_name` waits for the device."""

    tau: Tensor  # step alpha_j u along the gradient, an entry a parameter group
    zeta: Tensor  # the step that the loss alone would have allowed, before the cap alpha_j; an entry a group
    u: Tensor  # dual variable in [0, 1]
    gap: Tensor  # m - C: how far the loss was above its lower bound
    model_gap: Tensor  # how far the linear model is above C at the new point; 0 inside, negative where truncated
    branch: Tensor  # -1 skipped, 0 truncated (u = 0), 1 inside, 2 capped (u = 1)
    evaluations: Tensor  # prox evaluations of a search; 0 where the step has a closed form

    @property
    def branch_name(self) -> str:
        """The branch in a word."""
        return BRANCHES[int(self.branch)]


class Solution(NamedTuple):
    """A step that was solved and written."""

    ok: Array  # whether loss and gradients allowed a step
    gap: Array
    root: Array
    u: Array
    model_gap: Array
    evaluations: Array | float = 0.0

    @classmethod
    def skipped(cls, gap: Array) -> Solution:
        """No step."""
        return cls(False, gap, math.nan, math.nan, math.nan)


class PolyakOptimizer(Optimizer):
    """Base of the optimizers that set their step from the loss value.

    A subclass says how a step is solved and written (`_solve`). Everything a later step depends on is in `param_groups`
    (no per-parameter state), so that checkpoints are complete.
    """

    needs_loss = True
    bounded = True  # whether the loss is held against a lower bound
    coupled = False  # whether the regulariser is part of the loss and its gradient

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any]) -> None:
        self._watched: list[tuple[Tensor | float, float]] = []
        self._warned: set[str] = set()
        self._taken: tuple[Array, Solution] | None = None
        super().__init__(params, defaults)

    # -- groups -----------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own `lr`, `weight_decay` or `regularizer`; one joint step is solved over all groups."""
        self._check_keys(param_group)
        super().add_param_group(param_group)
        try:
            self._check_group(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check_keys(self, group: dict[str, Any]) -> None:
        known = {*self.defaults, "params", "param_names", "initial_lr"}
        for key in group.keys() - known:
            hint = difflib.get_close_matches(key, known, 1)
            raise ValueError(
                f"Unknown key {key!r} in a parameter group of {type(self).__name__}."
                + (f" Did you mean {hint[0]!r}?" if hint else f" Known: {', '.join(sorted(self.defaults))}.")
            )
        for key in self._shared:
            if key in group and group[key] != self.defaults.get(key):
                raise ValueError(f"{key} belongs to the loss or the optimizer, not to one group: pass it to {type(self).__name__}().")

    _shared = ("lower_bound", "fused", "capturable")

    def _check_group(self, group: dict[str, Any]) -> None:
        _check_nonnegative("lr", group["lr"])
        _check_nonnegative("weight_decay", group["weight_decay"])
        phi = group["regularizer"]
        if phi is None:
            return
        if not isinstance(phi, Regularizer):
            raise ValueError(f"regularizer must be a proxsps.regularizers.Regularizer, got {phi!r}.")
        if group["weight_decay"]:
            raise ValueError(
                f"A parameter group has both weight_decay={group['weight_decay']} and regularizer={phi!r}. Give one: "
                "ElasticNet(l1, l2) joins an l1 and a squared l2 term, L2(lam) is weight_decay=lam."
            )
        self._check_fit(group, phi)

    def _check_fit(self, group: dict[str, Any], phi: Regularizer) -> None:
        for i, param in enumerate(group["params"]):
            if param.is_complex():
                raise ValueError(f"{phi!r} does not take complex parameters; use weight_decay, which does.")
            try:
                phi.at(i).check(tuple(param.shape))
            except (ValueError, IndexError) as error:
                raise ValueError(f"{phi!r} does not fit parameter {i} of its group, shape {tuple(param.shape)}: {error}") from None
        if group["capturable"] and not phi.traceable:
            raise ValueError(f"{phi!r} runs on the host and cannot be captured; use capturable=False with CPU parameters.")

    # -- the loss that belongs to the gradient ----------------------------------------------------------------------

    def watch(self, loss: Tensor | float, weight: float = 1.0) -> Tensor | float:
        """Remember the value of a loss for the next plain `step()`, and hand the loss back.

        The value counts from the moment `backward` runs through it, so the order of `watch` and `zero_grad` does not
        matter. Over several micro-batches the step uses the mean of what was watched, weighted by `weight` (for instance
        the number of samples): watch each loss before it is divided by the number of micro-batches.
        """
        _check_loss(loss)
        if isinstance(loss, Tensor) and loss.requires_grad:
            value = loss.detach()
            loss.register_hook(lambda _: self._watched.append((value, weight)))
        else:
            self._watched.append((loss, weight))
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients, and the watched losses that belong to them."""
        self._watched.clear()
        super().zero_grad(set_to_none)

    def _watched_loss(self) -> Tensor | float | None:
        if not self._watched:
            return None
        total = sum(weight for _, weight in self._watched)
        value = sum(weight * value for value, weight in self._watched) / total
        self._watched.clear()
        return value

    def _loss(self, closure: Callable[[], Any] | None, loss: Tensor | float | None) -> tuple[Any, Any]:
        """The loss to step with, and what `step` returns."""
        name = type(self).__name__
        if closure is not None and loss is not None:
            raise ValueError(f"{name}.step() got both a closure and a loss: give one of them.")
        returned = loss
        if closure is not None:
            with torch.enable_grad():
                returned = closure()
        watched = self._watched_loss()
        if watched is not None:
            if loss is not None:
                raise ValueError(f"{name}.step() got a loss, and another one was watched: use watch() or step(loss=...), not both.")
            return watched, returned
        if returned is None and self.needs_loss:
            if all(float(group["lr"]) == 0 for group in self.param_groups):
                return None, None  # how torch.distributed.checkpoint creates optimizer state
            raise ValueError(
                f"{name}.step() needs the loss value: call opt.step(loss=loss) after loss.backward(), opt.step(closure), "
                "or loss = opt.watch(loss) before loss.backward(). Got none of them."
            )
        return returned, returned

    # -- the step ---------------------------------------------------------------------------------------------------

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
        value, returned = self._loss(closure, loss)
        blocks = gather(self.param_groups)
        penalties = self._couple(blocks)
        if (value is None and self.needs_loss) or not any(block.params for block in blocks):
            return returned
        first = self.param_groups[0]
        arithmetic = choose(blocks, first["fused"], first["capturable"])
        bound = first.get("lower_bound", 0.0) if lower_bound is None else lower_bound
        self._step(arithmetic, value, bound, penalties)
        return returned

    def _couple(self, blocks: list[Block]) -> list[Tensor]:
        """Move regularisers into loss and gradients, where the method wants them there; the values to add to the loss."""
        return []

    def _step(self, arithmetic: Arithmetic, value: Any, bound: Any, penalties: list[Tensor]) -> None:
        if value is not None:
            _check_loss(value)
        value = value.detach() if isinstance(value, Tensor) else value
        m, C = arithmetic.scalar(0.0 if value is None else value), arithmetic.scalar(bound)
        alpha = arithmetic.vector([block.alpha for block in arithmetic.blocks])
        lam = arithmetic.vector([block.lam for block in arithmetic.blocks])
        sums = arithmetic.sums(self.coupled)
        if self.coupled:
            m = m + arithmetic.total(penalties) + (lam * sums.x_sq).sum() / 2
        gap = m - C
        xp = array_namespace(sums.d_sq)
        ok = xp.isfinite(gap) & xp.all(xp.isfinite(sums.d_sq)) & xp.all(xp.isfinite(sums.d_dot_x))
        ok = ok & (gap >= 0) if self.bounded else ok
        if arithmetic.refuses(ok):
            self._explain_skip(m, gap, C)
            solution = Solution.skipped(gap)
        else:
            solution = self._solve(arithmetic, gap, sums, alpha, lam, ok)
        self._taken = (alpha, solution)

    @abstractmethod
    def _solve(self, arithmetic: Arithmetic, gap: Array, sums: Sums, alpha: Array, lam: Array, ok: Array) -> Solution:
        """Solve a step and write it where `ok`."""

    @property
    def last_step(self) -> LastStep | None:
        """What the last step did; None before the first."""
        return None if self._taken is None else _report(*self._taken)

    def _explain_skip(self, m: Array, gap: Array, C: Array) -> None:
        if not math.isfinite(gap):
            self._warn_once("loss", f"The loss is {float(m)}: parameters were left untouched. This is said once.")
        elif self.bounded and gap < 0:
            self._warn_once(
                "bound",
                f"The loss {float(gap + C):.6g} is below lower_bound={float(C):.6g}: parameters were left untouched. Set "
                "lower_bound to a value that the loss never falls below. This is said once.",
            )
        else:
            self._warn_once("grad", "A gradient is not finite: parameters were left untouched. This is said once.")

    def _warn_once(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(f"{type(self).__name__}: {message}", RuntimeWarning, stacklevel=5)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As in torch, with regularisers as text: a checkpoint holds only plain data."""
        state = super().state_dict()
        state["param_groups"] = [
            {**group, "regularizer": None if group["regularizer"] is None else repr(group["regularizer"])}
            for group in state["param_groups"]
        ]
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As in torch, but each group keeps the regulariser it was constructed with; a different one is warned of."""
        own = [group["regularizer"] for group in self.param_groups]
        super().load_state_dict(state_dict)
        for group, phi in zip(self.param_groups, own, strict=True):
            saved, group["regularizer"] = group.get("regularizer"), phi
            if (saved is not None or phi is not None) and saved != repr(phi):
                warnings.warn(
                    f"The checkpoint was written with regularizer={saved}, this optimizer was constructed with {phi!r} and keeps it.",
                    UserWarning,
                    stacklevel=2,
                )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("_watched", [])
        self.__dict__.setdefault("_warned", set())
        self.__dict__.setdefault("_taken", None)
        for group in self.param_groups:
            for key, default in self.defaults.items():
                group.setdefault(key, default)


def _report(alpha: Array, solution: Solution) -> LastStep:
    xp = array_namespace(alpha)
    ok, gap, root, u, model_gap, evaluations = (xp.asarray(field) for field in solution)
    blank = xp.where(ok, 0.0, math.nan)
    branch = xp.where(u <= 0, 0, xp.where(u >= 1, 2, 1))
    fields = {
        "tau": alpha * xp.where(ok, u, xp.zeros_like(u)),
        "zeta": alpha * xp.clip(root, 0.0, None) + blank,
        "u": u + blank,
        "gap": gap,
        "model_gap": model_gap + blank,
        "branch": xp.where(ok, branch, -1),
        "evaluations": evaluations,
    }
    return LastStep(**{name: torch.as_tensor(value) for name, value in fields.items()})


def _check_nonnegative(name: str, value: Any) -> None:
    number = float(value)
    if math.isnan(number) or number < 0:
        raise ValueError(f"{name} must be a number >= 0, got {value!r}.")


def check_bound(value: float) -> None:
    """Refuse a lower bound that is not a finite number."""
    if not math.isfinite(value):
        raise ValueError(f"lower_bound must be a finite number, got {value!r}. 0 is right for losses that are never negative.")


def _check_loss(loss: Any) -> None:
    if isinstance(loss, Tensor) and loss.numel() != 1:
        raise ValueError(f"The loss must be one number, got shape {tuple(loss.shape)}: reduce it, for instance by loss.mean().")
    if not isinstance(loss, (Tensor, float, int)):
        raise TypeError(f"The loss must be a tensor with one entry or a number, got {type(loss).__name__}.")


__all__ = ["LastStep", "PolyakOptimizer", "Solution", "check_bound"]
