"""ProxSPSAdam: the step of ProxSPS in Adam's metric."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from proxsps.core.checks import check_nonnegative
from proxsps.optim.capped import MATCHED, CappedPolyak
from proxsps.optim.checks import check_betas, check_diagonal
from proxsps.optim.reduce import ProcessGroup
from proxsps.optim.rule import Rule
from proxsps.regularizers import Regularizer


class ProxSPSAdam(CappedPolyak):
    r"""Stochastic proximal Polyak step size in Adam's metric, by default without a learning rate.

    With averages $d_k$ of the gradients and $v_k$ of their squares, both with Adam's bias correction, and the metric
    $D_k = \sqrt{v_k} + \epsilon$,

    $$x^{k+1} = \mathrm{prox}^{D_k}_{\tau_k\varphi}(x^k - \tau_k D_k^{-1} d_k), \qquad
    \tau_k = \min\{\tau^*_k, A_k, \alpha_k\}.$$

    $\tau^*_k$ is the smallest step at which the average of the linear models reaches $C$ (the matched cap), and
    $A_k = 0.85\,\bar r_k / \sqrt{\hat G_k}$ the distance cap: $\bar r_k$ is the largest distance from the start, and
    $\hat G_k$ adds up $\|D_i^{-1} g_i\|^2$. A learning rate $\alpha_k$ is not needed. Without one, the `lr` of a group
    is a factor on its step, which starts at 1; schedulers scale it. All groups share one joint step.

    The state is two tensors per parameter, and a sample of the starting parameters: all entries of tensors with up to
    4,096, of others one in 16.

    Args:
        params: parameters or parameter groups.
        lr: $\alpha_k$, a further cap on the step; None for no learning rate.
        betas: the weights of the old $d$ and $v$ in each step.
        eps: $\epsilon$ of the metric.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|_D^2$: decay by $1/(1 + \tau\lambda)$, decoupled from the
            metric as in AdamW.
        regularizer: another regulariser, instead of `weight_decay`. It needs an exact prox in a diagonal metric; `L2`
            as a regulariser is Euclidean.
        lower_bound: as in `ProxSPS`.
        factor: as in `ProxSPS`.
        cap: "matched", or "proximal" for the step of `ProxSPS`, whose regulariser follows the cap, not the step.
            None means "matched".
        distance_cap: whether $A_k$ is a cap. None means True without an `lr`, False with one.
        max_move: as in `ProxSPS`.
        process_group: as in `ProxSPS`.
        check_replicas: as in `ProxSPS`.
        fused: as in `ProxSPS`.
        capturable: as in `ProxSPS`.
    """

    _decay_is_l2 = False

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float | None = 0.0,
        *,
        factor: float | Tensor | None = None,
        cap: Literal["proximal", "matched"] | None = None,
        distance_cap: bool | None = None,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "factor": factor,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "regularizer": regularizer,
            "lower_bound": lower_bound,
            "cap": MATCHED if cap is None else cap,
            "distance_cap": distance_cap,
            "max_move": max_move,
            "fused": fused,
            "capturable": capturable,
        }
        super().__init__(params, defaults, process_group, check_replicas)

    @staticmethod
    def _averages(options: dict[str, Any]) -> bool:
        return True

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        check_diagonal(type(self).__name__, group["regularizer"])

    def _check_numbers(self, group: dict[str, Any]) -> None:
        super()._check_numbers(group)
        check_betas(group["betas"])
        check_nonnegative("eps", group["eps"])

    def _rule(self) -> Rule:
        options = self.param_groups[0]
        beta, beta2 = options["betas"]
        return super()._rule()._replace(beta=beta, beta2=beta2, eps=options["eps"])
