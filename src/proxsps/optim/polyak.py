"""The methods whose parameters hold the iterate: ProxSPS, proximal SGD, ProxSPSAdam, and SPS and DecSPS.

Proximal SGD is the plain form of ProxSPS without a lower bound, and ProxSPSAdam its form in Adam's metric. In SPS and
DecSPS the regulariser, if there is one, is part of the loss.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

from torch import Tensor

from proxsps.optim.capped import MATCHED, CappedPolyak
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.optim.reduce import ProcessGroup
from proxsps.optim.rule import Rule
from proxsps.regularizers import Regularizer


def options_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The options of the groups among the arguments of a constructor, which are its `locals()`."""
    others = ("self", "__class__", "params", "process_group", "check_replicas")
    return {name: value for name, value in arguments.items() if name not in others}


class ProxSPS(CappedPolyak):
    r"""Stochastic proximal Polyak step size (Schaipp, Gower and Ulbrich, 2023; Algorithms 2 and 3).

    Every step minimises the truncated model of the loss plus the regulariser itself,

    $$x^{k+1} = \arg\min_y \; \max\{f(x^k) + \langle g_k, y - x^k\rangle, C\} + \varphi(y)
    + \tfrac{1}{2\alpha_k}\|y - x^k\|^2,$$

    jointly over all parameter groups, each with its own $\alpha_k$ and $\varphi$. The squared l2 norm has a closed
    form; other regularisers cost a few evaluations of their prox. In this plain form there is no optimizer state.

    With `momentum` $\beta$, the model is the average of all linear models so far. With averages $d_k$, $\bar f_k$ and
    $\gamma_k$ of $g_i$, $f(x^i)$ and $\langle g_i, x^i\rangle$, its value
    $m_k = \bar f_k - \gamma_k + \langle d_k, x^k\rangle$ takes the place of the loss, and $d_k$ that of the gradient.

    With `cap="matched"`, gradient step and regulariser use the same step size,
    $x^{k+1} = \mathrm{prox}_{\tau\varphi}(x^k - \tau d_k)$, where $\tau$ is the smallest step size at which the linear
    model reaches $C$, or the cap if the model stays above $C$. Weight decay then follows the step, not the cap.

    Without a learning rate (`lr=None`), the cap is the distance cap $A_k = 0.85\,\bar r_k / \sqrt{\hat G_k}$:
    $\bar r_k$ is the largest distance from the start so far, and $\hat G_k$ adds up the squared norms of the gradients.
    The `lr` of a group is then a factor on its step, which starts at 1; schedulers scale it.

    Args:
        params: parameters or parameter groups.
        lr: $\alpha_k$, the cap on the step. 1 is a good start; the loss sets the step below it. None for a step without
            a learning rate.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$.
        regularizer: any other regulariser, instead of `weight_decay`.
        lower_bound: $C$, which the loss never falls below. 0 is right for losses that are never negative. None for
            losses whose bound is not known: nothing is truncated, and the step is the cap.
        factor: without an `lr`, multiplies all steps; None for 1. It becomes the `lr` of the groups, which schedulers
            scale; groups may have their own. $\hat G_k$ adds up squared gradients times squared factors, so that short
            steps at first do not make all later ones short.
        momentum: $\beta$, the weight of the old averages in each step; 0 for the loss of the batch alone. Needs one
            tensor of state per parameter.
        cap: "proximal" for the step above, or "matched". None means "proximal" with an `lr`, "matched" without.
        distance_cap: whether $A_k$ is a cap too. None means True without an `lr`, False with one. It keeps a
            sample of the starting parameters as state: all entries of tensors with up to 4,096, of others one in 16.
        max_move: limit on the Euclidean length of the move of all parameters together; longer moves are shortened. It
            takes a copy of the parameters during the step, and with several ranks one more all-reduce.
        process_group: ranks whose losses and sums make one step. None for the default group, if torch.distributed
            runs with several ranks; a group; or False if each rank trains its own model.
        check_replicas: compare steps and replicas of all ranks bitwise after every step; slow, for debugging.
        fused: True for the compiled CPU kernels, False for plain torch, None for the kernels where they apply.
        capturable: never read a number back to the host, even on the CPU (on accelerators this is always so).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float | Tensor | None = 1.0,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float | None = 0.0,
        *,
        factor: float | Tensor | None = None,
        momentum: float = 0.0,
        cap: Literal["proximal", "matched"] | None = None,
        distance_cap: bool | None = None,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        super().__init__(params, options_of(locals()), process_group, check_replicas)

    def _rule(self) -> Rule:
        return super()._rule()._replace(beta=self.param_groups[0]["momentum"] or None)


class ProxSGD(PolyakOptimizer):
    r"""Proximal stochastic gradient descent: ProxSPS with the linear model, whose step is always the cap.

    $x^{k+1} = \mathrm{prox}_{\alpha_k\varphi}(x^k - \alpha_k g_k)$. It needs no loss value. With `weight_decay` it is
    SGD with step $\alpha_k / (1 + \alpha_k\lambda)$ (appendix of the paper on the equivalence for SGD). All options are
    as in `ProxSPS`; `lr` is the step itself.
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
        super().__init__(params, options_of(locals()), process_group, check_replicas)


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

    All other options are as in `ProxSPS`.

    Args:
        lr: $\alpha_k$, a further cap on the step; None for no learning rate.
        betas: the weights of the old $d$ and $v$ in each step.
        eps: $\epsilon$ of the metric.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|_D^2$: decay by $1/(1 + \tau\lambda)$, decoupled from the
            metric as in AdamW.
        regularizer: another regulariser, instead of `weight_decay`. It needs an exact prox in a diagonal metric; `L2`
            as a regulariser is Euclidean.
        cap: "matched", or "proximal" for the step of `ProxSPS`, whose regulariser follows the cap, not the step.
            None means "matched".
        distance_cap: whether $A_k$ is a cap. None means True without an `lr`, False with one.
    """

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
        options = options_of(locals()) | {"cap": MATCHED if cap is None else cap}
        super().__init__(params, options, process_group, check_replicas)

    def _rule(self) -> Rule:
        options = self.param_groups[0]
        beta, beta2 = options["betas"]
        return super()._rule()._replace(beta=beta, beta2=beta2, eps=options["eps"])


class SPS(PolyakOptimizer):
    r"""Stochastic Polyak step size (Algorithm 1 of the paper; SPS_max of Loizou et al., 2021, with `c`).

    With $\ell = f + \varphi$ the regularised loss and $d$ its gradient,

    $$x^{k+1} = x^k - \min\Big\{\alpha_k, \frac{\ell(x^k) - C}{c\,\|d_k\|^2}\Big\}\, d_k.$$

    This is the paper's baseline: the regulariser is part of the loss, and `lower_bound` bounds their sum. `ProxSPS`
    treats the two separately. All other options are as in `ProxSPS`.

    Args:
        lr: $\alpha_k$, the cap on the step (gamma_b of SPS_max).
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
        super().__init__(params, options_of(locals()), process_group, check_replicas)

    def _rule(self) -> Rule:
        return super()._rule()._replace(name="sps_max", c=self.param_groups[0]["c"], coupled=True)


class DecSPS(PolyakOptimizer):
    r"""Decreasing stochastic Polyak step size (Orvieto, Lacoste-Julien and Loizou, 2022).

    $$\gamma_k = \frac{1}{c_k}\min\Big\{\frac{\ell(x^k) - C}{\|d_k\|^2},\; c_{k-1}\gamma_{k-1}\Big\},
    \qquad c_k = c_0\sqrt{k+1}.$$

    It converges without interpolation and without a schedule. It keeps one number per group, in `param_groups`. All
    other options are as in `SPS`.

    Args:
        lr: bound on the first step (gamma_b); lowering it later bounds later steps.
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
        super().__init__(params, options_of(locals()), process_group, check_replicas)

    def _rule(self) -> Rule:
        return super()._rule()._replace(name="dec_sps", c=self.param_groups[0]["c0"], coupled=True)
