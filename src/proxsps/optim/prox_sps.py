"""ProxSPS, and proximal SGD, which is ProxSPS without a lower bound."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from torch import Tensor

from proxsps.core.array import Array
from proxsps.core.rules import Decision, Model, linear, truncated
from proxsps.optim.base import PolyakOptimizer
from proxsps.optim.blocks import Block
from proxsps.optim.numbers import Numbers
from proxsps.optim.reduce import ProcessGroup
from proxsps.regularizers import Regularizer


class ProxSPS(PolyakOptimizer):
    r"""Stochastic proximal Polyak step size (Schaipp, Gower and Ulbrich, 2023; Algorithms 2 and 3).

    Minimises in every step the truncated model of the loss plus the regulariser itself,

    $$x^{k+1} = \arg\min_y \; \max\{f(x^k) + \langle g_k, y - x^k\rangle, C\} + \varphi(y)
    + \tfrac{1}{2\alpha_k}\|y - x^k\|^2,$$

    jointly over all parameter groups, each with its own $\alpha_k$ and $\varphi$. The squared l2 norm has a closed
    form; other regularisers cost a few evaluations of their prox. There is no optimizer state.

    Args:
        params: parameters or parameter groups.
        lr: $\alpha_k$, the cap on the step. 1 is a good start; the loss sets the step below it.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$.
        regularizer: any other regulariser, instead of `weight_decay`.
        lower_bound: $C$, which the loss never falls below. 0 is right for losses that are never negative.
        max_move: limit on the Euclidean length of the move of all parameters together; a longer one is shortened to it.
        process_group: ranks whose losses and sums make one step. None for the default group, where torch.distributed
            runs with several ranks; a group; or False where each rank trains a model of its own.
        check_replicas: compare steps and replicas of all ranks after every step, bit by bit; slow, for debugging.
        fused: True for the compiled CPU kernels, False for plain torch, None for the first where it applies.
        capturable: never read a number back to the host, also on the CPU (on accelerators this is so anyway).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1.0,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float = 0.0,
        *,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "regularizer": regularizer,
            "lower_bound": lower_bound,
            "max_move": max_move,
            "fused": fused,
            "capturable": capturable,
        }
        super().__init__(params, defaults, process_group, check_replicas)

    def _decide(self, model: Model, blocks: Sequence[Block], numbers: Numbers, ok: Array) -> Decision:
        return truncated(model)


class ProxSGD(PolyakOptimizer):
    r"""Proximal stochastic gradient descent: ProxSPS with the linear model, whose step is always the cap.

    $x^{k+1} = \mathrm{prox}_{\alpha_k\varphi}(x^k - \alpha_k g_k)$. It needs no loss value. With `weight_decay` it is
    SGD with step $\alpha_k / (1 + \alpha_k\lambda)$ (appendix of the paper on the equivalence for SGD).

    Args:
        params: parameters or parameter groups.
        lr: $\alpha_k$, the step.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$.
        regularizer: any other regulariser, instead of `weight_decay`.
        max_move: as in `ProxSPS`.
        process_group: as in `ProxSPS`.
        check_replicas: as in `ProxSPS`.
        fused: as in `ProxSPS`.
        capturable: as in `ProxSPS`.
    """

    needs_loss = False
    bounded = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor = 1e-2,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        *,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "regularizer": regularizer,
            "max_move": max_move,
            "fused": fused,
            "capturable": capturable,
        }
        super().__init__(params, defaults, process_group, check_replicas)

    def _decide(self, model: Model, blocks: Sequence[Block], numbers: Numbers, ok: Array) -> Decision:
        return linear(model)
