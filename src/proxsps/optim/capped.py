"""What ProxSPS, ProxSPSAdam and ScheduleFreeSPS share: caps on the step, and steps that need no learning rate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from proxsps.core.checks import check_nonnegative
from proxsps.optim.hints import SMALL_FACTOR, shrinkage_hint, skorch_hint, warn
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.optim.rule import Rule

PROXIMAL, MATCHED = "proximal", "matched"


class CappedPolyak(PolyakOptimizer):
    """Steps of the truncated model, capped by learning rates or by the distance from the start."""

    def __init__(self, params: Iterable[Any], defaults: dict[str, Any], *ranks: Any) -> None:
        # `lr`, `factor`, `cap` and `distance_cap` are as the user passed them.
        name, lr, distance = type(self).__name__, defaults["lr"], defaults["distance_cap"]
        if distance not in (None, True, False):
            raise ValueError(f"distance_cap must be True, False, or None for True without an lr, got {distance!r}.")
        if lr is None and distance is False:
            raise ValueError(
                f"{name}(lr=None) needs the distance cap to set its steps, got distance_cap=False: leave distance_cap "
                "out, or pass a number as lr."
            )
        if (hint := skorch_hint(lr)) is not None:
            warn(f"{name}: {hint}.", UserWarning)
        cap, factor = defaults["cap"], defaults.pop("factor")
        if cap not in (None, PROXIMAL, MATCHED):
            raise ValueError(f'cap must be "proximal" or "matched", or None for the default, got {cap!r}.')
        if lr is not None and factor is not None:
            raise ValueError(
                f"{name} got lr={lr!r} and factor={factor!r}: factor multiplies the steps without a learning rate. "
                "Pass one of the two."
            )
        if factor is not None and not isinstance(factor, Tensor):
            check_nonnegative("factor", factor)
        defaults |= {
            "lr": lr if lr is not None else 1.0 if factor is None else factor,
            "cap": cap or (MATCHED if lr is None else PROXIMAL),
            "distance_cap": bool(distance or lr is None),
            "lr_is_factor": lr is None,
        }
        super().__init__(params, defaults, *ranks)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters with their own `lr`, `weight_decay` or `regularizer`; all groups share one joint step.

        Without a learning rate, a group has none either, but may have a `factor` on its step, which becomes its `lr`. A
        group that is added later gets the options of the whole step, such as `lower_bound`, from the others, and
        measures its distance from its values at that time.
        """
        if isinstance(param_group, dict):
            param_group = self._with_lr(param_group)
        super().add_param_group(param_group)

    def _with_lr(self, given: dict[str, Any]) -> dict[str, Any]:
        """The group with its factor, or None, as `lr`; an error for an lr beside lr=None, or the other way round."""
        group, name, is_factor = dict(given), type(self).__name__, self.defaults["lr_is_factor"]
        if "factor" in group:
            if not is_factor or "lr" in group:
                raise ValueError(
                    f"A parameter group has factor={group['factor']!r}, which is for {name}(lr=None) and stands for "
                    "the lr of the group: pass one of the two."
                )
            group["lr"] = group.pop("factor")
        elif "lr" in group and group["lr"] is None:
            if not is_factor:
                raise ValueError(
                    f"A parameter group has lr=None, but {name}() was given lr={self.defaults['lr']!r}: all groups "
                    f"share one step, so pass lr=None to {name}() itself, and no lr to any group."
                )
            group["lr"] = 1.0
        elif "lr" in group and is_factor:
            lr, meaning = group["lr"], "Without a learning rate, the lr of a group is a factor on its step"
            if not self._complete:
                raise ValueError(
                    f"A parameter group has lr={lr!r}, but {name}() was given lr=None: all groups share one step. "
                    f'{meaning}. To set it, pass "factor" in place of "lr".'
                )
            if not isinstance(lr, Tensor) and lr < SMALL_FACTOR:  # larger ones come from trainers that divide the lr
                text = (
                    f'A group with lr={lr!r} was added to {name}(lr=None). {meaning}; leave it out, or pass "factor".'
                )
                warn(text, UserWarning)
        return group

    def _check_options(self) -> None:
        options = self.param_groups[0]
        if options.get("momentum") and "model_value" not in options:
            name = type(self).__name__
            raise ValueError(
                f"{name} was made with momentum=0, but a group now has momentum={options['momentum']:g}. OneCycleLR "
                f"and CyclicLR change it: pass cycle_momentum=False to them, or make {name} with momentum."
            )
        if torch.compiler.is_compiling() or "options" in self._warned:
            return
        if options["cap"] == PROXIMAL and not options["distance_cap"]:  # else weight decay follows the step, not lr
            hint = shrinkage_hint(self.param_groups, self._rule().beta2 is None)
            if hint is not None:
                self._warn_once("options", hint, "")

    def _rule(self) -> Rule:
        options = self.param_groups[0]
        return (
            super()
            ._rule()
            ._replace(
                matched=options["cap"] == MATCHED, distance=options["distance_cap"], factor=options["lr_is_factor"]
            )
        )
