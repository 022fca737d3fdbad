"""SPS and DecSPS: the regulariser, if there is one, is part of the loss."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.optim.reduce import ProcessGroup
from proxsps.optim.rule import Rule
from proxsps.regularizers import Regularizer
from proxsps.regularizers.checks import check_subgradient


class CoupledPolyak(PolyakOptimizer):
    """Steps along the gradient of loss plus regulariser, with one length for both."""

    def _check_regularizer(self, group: dict[str, Any]) -> None:
        super()._check_regularizer(group)
        if group["regularizer"] is not None:
            check_subgradient(group["regularizer"], type(self).__name__, "ProxSPS or ProxSGD")


class SPS(CoupledPolyak):
    r"""Stochastic Polyak step size (Algorithm 1 of the paper; SPS_max of Loizou et al., 2021, with `c`).

    With $\ell = f + \varphi$ the regularised loss and $d$ its gradient,

    $$x^{k+1} = x^k - \min\Big\{\alpha_k, \frac{\ell(x^k) - C}{c\,\|d_k\|^2}\Big\}\, d_k.$$

    This is the paper's baseline: the regulariser is part of the loss, and `lower_bound` bounds their sum. `ProxSPS`
    treats the two separately.

    `max_move`, `process_group`, `check_replicas`, `fused` and `capturable` are as in `ProxSPS`.

    Args:
        params: parameters or parameter groups.
        lr: $\alpha_k$, the cap on the step (gamma_b of SPS_max).
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$.
        regularizer: another regulariser with a subgradient, instead of `weight_decay`.
        lower_bound: $C$, which the regularised loss never falls below.
        c: divides the adaptive step; 1 gives the step of the truncated model.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float = 0.0,
        c: float = 1.0,
        *,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "regularizer": regularizer}
        options |= {"lower_bound": lower_bound, "c": c, "max_move": max_move, "fused": fused, "capturable": capturable}
        super().__init__(params, options, process_group, check_replicas)

    def _rule(self) -> Rule:
        return Rule("sps_max", self.param_groups[0]["c"], coupled=True, max_move=self._max_move)


class DecSPS(CoupledPolyak):
    r"""Decreasing stochastic Polyak step size (Orvieto, Lacoste-Julien and Loizou, 2022).

    $$\gamma_k = \frac{1}{c_k}\min\Big\{\frac{\ell(x^k) - C}{\|d_k\|^2},\; c_{k-1}\gamma_{k-1}\Big\},
    \qquad c_k = c_0\sqrt{k+1}.$$

    It converges without interpolation and without a schedule. It keeps one number per group, in `param_groups`.

    `max_move`, `process_group`, `check_replicas`, `fused` and `capturable` are as in `ProxSPS`.

    Args:
        params: parameters or parameter groups.
        lr: bound on the first step (gamma_b); lowering it later bounds later steps.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$, part of the loss.
        regularizer: another regulariser with a subgradient, instead of `weight_decay`.
        lower_bound: $C$, which the regularised loss never falls below.
        c0: $c_0$.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 10.0,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float = 0.0,
        c0: float = 1.0,
        *,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        options: dict[str, Any] = {"lr": lr, "weight_decay": weight_decay, "regularizer": regularizer}
        options |= {"lower_bound": lower_bound, "c0": c0, "k": 0.0, "memory": math.inf}
        options |= {"max_move": max_move, "fused": fused, "capturable": capturable}
        super().__init__(params, options, process_group, check_replicas)

    def _rule(self) -> Rule:
        return Rule("dec_sps", self.param_groups[0]["c0"], coupled=True, max_move=self._max_move)
