"""The methods as optax transformations."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from numbers import Real
from typing import Any

import jax.numpy as jnp
import optax

from proxsps.core import rules
from proxsps.jax.checks import (
    check_caps,
    check_constants,
    check_diagonal,
    check_needs_rate,
    check_rates,
    check_update,
    with_known_arguments,
)
from proxsps.jax.groups import ALL, Groups, Options
from proxsps.jax.measured import prox_at
from proxsps.jax.moments import Kind
from proxsps.jax.solve import JaxMethod
from proxsps.jax.transformation import Number, Schedule, transformation
from proxsps.regularizers import Regularizer
from proxsps.regularizers.checks import check_subgradient

Labels = Any  # a tree of labels, or a function from parameters to one
GroupOptions = Mapping[Hashable, Mapping[str, Any]]

PROX_SGD = JaxMethod("prox_sgd", rules.linear, bounded=False)
SPS = JaxMethod("sps", rules.sps_max, coupled=True)
DEC_SPS = JaxMethod("dec_sps", rules.dec_sps, coupled=True, remembers=True)


@with_known_arguments
def prox_sps(
    learning_rate: Schedule | None = 1.0,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number | None = 0.0,
    *,
    momentum: Number | None = None,
    cap: str | None = None,
    distance_cap: bool | None = None,
    scale: Schedule | None = None,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic proximal Polyak step size (Schaipp, Gower and Ulbrich, 2023; Algorithms 2 and 3).

    Every step minimises the truncated model of the loss plus the regulariser itself,

    $$x^{k+1} = \arg\min_y \; \max\{f(x^k) + \langle g_k, y - x^k\rangle, C\} + \varphi(y)
    + \tfrac{1}{2\alpha_k}\|y - x^k\|^2,$$

    jointly over all labels, each with its own $\alpha_k$ and $\varphi$. The squared l2 norm has a closed form; other
    regularisers cost a few evaluations of their prox, in a `jax.lax.while_loop`.

    With momentum, the model is the average of all linear models so far, evaluated at $x^k$. With the matched cap, slope
    and regulariser have the same step size, the first at which the model reaches $C$, so that shrinkage follows the
    step. The distance cap limits the step by the distance from the start and the size of the gradients; with it, no
    learning rate is needed.

    Args:
        learning_rate: $\alpha_k$, the cap on the step; a number or an optax schedule. None for no learning rate: the
            step is then the smaller of the matched Polyak step and the distance cap.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$; None for none.
        regularizer: any other regulariser that can be traced, instead of `weight_decay`.
        lower_bound: $C$, which the loss never falls below; `update(..., lower_bound=...)` sets one per batch. None for
            an unknown bound: nothing is truncated, and the step is as long as its other caps allow.
        momentum: $\beta$ in [0, 1), how much of the averages is old; None or 0 for none.
        cap: "proximal", the step above, or "matched"; None for "proximal" with a learning rate, "matched" without.
        distance_cap: whether to use the distance cap; None: only without a learning rate.
        scale: without a learning rate, a factor on the step after all caps; a number or a schedule, for instance
            `cool_down`. None for 1.
        labels: a tree of labels that is a prefix of the parameters', or a function from parameters to one.
        groups: for each label a mapping with its own `learning_rate` (or `scale`), `weight_decay` or `regularizer`,
            which may be empty; missing options are taken from the arguments above.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from proxsps.jax import prox_sps
        >>> opt = prox_sps(learning_rate=1.0, weight_decay=1e-3)
        >>> x = jnp.array([1.0, 2.0])
        >>> state = opt.init(x)
        >>> value, grad = jax.value_and_grad(lambda x: jnp.sum(x**2))(x)
        >>> updates, state = opt.update(grad, state, x, value=value)
        >>> x = optax.apply_updates(x, updates)
        >>> state.last_step.branch_name
        'inside'
    """
    if momentum is not None:
        check_constants(momentum=momentum)
    averaged = not (momentum is None or (isinstance(momentum, Real) and momentum == 0))
    options = Options(learning_rate, weight_decay, regularizer, scale)
    kind = Kind(averages=averaged)
    constants = {"b1": momentum} if averaged else {}
    return _capped("prox_sps", kind, options, labels, groups, cap, distance_cap, lower_bound, constants)


@with_known_arguments
def prox_sps_adam(
    learning_rate: Schedule | None = None,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number | None = 0.0,
    *,
    cap: str | None = None,
    distance_cap: bool | None = None,
    scale: Schedule | None = None,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""`prox_sps` with momentum in Adam's metric, by default without a learning rate.

    With Adam's averages $d$ of $g$ and $v$ of $g^2$, and $D = \sqrt v + \epsilon$,

    $$x^{k+1} = \mathrm{prox}^{D}_{\tau\varphi}(x^k - \tau D^{-1} d), \qquad
    \tau = \min\{\alpha_k, \tau^*, A_k\},$$

    where $\tau^*$ is the first step size at which the averaged model reaches $C$, and $A_k$ the distance cap.

    Args:
        learning_rate: $\alpha_k$, a further cap on $\tau$: a number or an optax schedule. None for none.
        b1: how much of the average gradient is old, in [0, 1).
        b2: how much of the average square is old, in [0, 1).
        eps: $\epsilon \ge 0$.
        weight_decay: $\lambda$ of decoupled decay, which divides the new point by $1 + \tau\lambda$; None for none.
        regularizer: one with an exact prox in a diagonal metric (`Regularizer.has_diagonal_prox`), instead of
            `weight_decay`. `L2` is the squared Euclidean norm: each entry then decays differently.
        lower_bound: as in `prox_sps`.
        cap: "matched" or "proximal"; None for "matched".
        distance_cap: as in `prox_sps`.
        scale: as in `prox_sps`.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from proxsps.jax import prox_sps_adam
        >>> opt = prox_sps_adam(weight_decay=1e-3)
        >>> x = jnp.array([1.0, 2.0])
        >>> state = opt.init(x)
        >>> for _ in range(100):
        ...     value, grad = jax.value_and_grad(lambda x: jnp.sum((x - 3.0) ** 2))(x)
        ...     updates, state = opt.update(grad, state, x, value=value)
        ...     x = optax.apply_updates(x, updates)
        >>> bool(value < 0.01)
        True
    """
    check_constants(b1=b1, b2=b2, eps=eps)
    options = Options(learning_rate, weight_decay, regularizer, scale)
    kind, constants = Kind(averages=True, metric=True), {"b1": b1, "b2": b2, "eps": eps}
    cap = "matched" if cap is None else cap
    return _capped("prox_sps_adam", kind, options, labels, groups, cap, distance_cap, lower_bound, constants)


def _capped(
    owner: str,
    kind: Kind,
    default: Options,
    labels: Labels,
    groups: GroupOptions | None,
    cap: str | None,
    distance_cap: bool | None,
    lower_bound: Number | None,
    constants: Mapping[str, Number],
) -> optax.GradientTransformationExtraArgs:
    """The truncated model with its caps."""
    rateless = default.learning_rate is None
    check_caps(owner, default.learning_rate, cap, distance_cap)
    keys = ["learning_rate", "scale", "weight_decay", "regularizer"]
    made = Groups.make(owner, default, labels, groups, keys)
    check_rates(owner, default.learning_rate, made.options)
    for options in made.options.values() if kind.metric else ():
        check_diagonal(owner, options.phi)
    kind = kind._replace(distance=rateless if distance_cap is None else distance_cap, factors=rateless)
    return truncated(owner, kind, made, rateless if cap is None else cap == "matched", lower_bound, constants)


def truncated(
    owner: str, kind: Kind, groups: Groups, matched: bool, lower_bound: Number | None, constants: Mapping[str, Number]
) -> optax.GradientTransformationExtraArgs:
    """The truncated model, or the linear one where there is no lower bound: both caps are then the longest step."""
    bounded = lower_bound is not None
    if bounded:
        check_constants(lower_bound=lower_bound)
    known = {name: float(number) for name, number in constants.items() if isinstance(number, Real)}
    rule, numbers = rules.truncated if bounded else rules.linear, tuple(known.items())
    method = JaxMethod(owner, rule, bounded, moments=kind, matched=bounded and matched, numbers=numbers)
    traced = {name: number for name, number in constants.items() if name not in known}
    return transformation(method, groups, lower_bound, traced)


@with_known_arguments
def prox_sgd(
    learning_rate: Schedule,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    *,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Proximal stochastic gradient descent: `prox_sps` with the linear model, whose step is always the cap.

    $x^{k+1} = \mathrm{prox}_{\alpha_k\varphi}(x^k - \alpha_k g_k)$. It needs no `value`; a passed one is reported.

    Args:
        learning_rate: $\alpha_k$, the step; a number or an optax schedule.
        weight_decay: as in `prox_sps`.
        regularizer: as in `prox_sps`.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.
    """
    options = Groups.make("prox_sgd", Options(learning_rate, weight_decay, regularizer), labels, groups)
    check_needs_rate("prox_sgd", options.options)
    return transformation(PROX_SGD, options)


@with_known_arguments
def sps(
    learning_rate: Schedule = 1.0,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number = 0.0,
    c: Number = 1.0,
    *,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic Polyak step size (Algorithm 1 of the paper; SPS_max of Loizou et al., 2021, with `c`).

    With $\ell = f + \varphi$ the regularised loss and $d$ its gradient,

    $$x^{k+1} = x^k - \min\Big\{\alpha_k, \frac{\ell(x^k) - C}{c\,\|d_k\|^2}\Big\}\, d_k.$$

    Pass value and gradient of the loss *without* the regulariser; the method adds it.

    Args:
        learning_rate: $\alpha_k$, the cap on the step; a number or an optax schedule.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$; None for none.
        regularizer: another regulariser with a subgradient, instead of `weight_decay`.
        lower_bound: $C$, which the regularised loss never falls below.
        c: divides the adaptive step; 1 gives the step of the truncated model.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.
    """
    check_constants(lower_bound=lower_bound, c=c)
    options = _coupled("sps", Options(learning_rate, weight_decay, regularizer), labels, groups)
    return transformation(SPS, options, lower_bound, {"c": c})


@with_known_arguments
def dec_sps(
    learning_rate: Schedule = 10.0,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number = 0.0,
    c0: Number = 1.0,
    *,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Decreasing stochastic Polyak step size (Orvieto, Lacoste-Julien and Loizou, 2022).

    $$\gamma_k = \frac{1}{c_k}\min\Big\{\frac{\ell(x^k) - C}{\|d_k\|^2},\; c_{k-1}\gamma_{k-1}\Big\},
    \qquad c_k = c_0\sqrt{k+1}.$$

    Args:
        learning_rate: bound on the first step; a schedule that falls bounds later ones.
        weight_decay: as in `sps`.
        regularizer: as in `sps`.
        lower_bound: as in `sps`.
        c0: $c_0$.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.
    """
    check_constants(lower_bound=lower_bound, c0=c0)
    options = _coupled("dec_sps", Options(learning_rate, weight_decay, regularizer), labels, groups)
    return transformation(DEC_SPS, options, lower_bound, {"c0": c0})


@with_known_arguments
def prox(regularizer: Regularizer, learning_rate: Schedule = 1.0) -> optax.GradientTransformationExtraArgs:
    r"""The prox of a regulariser, to be chained after any optax optimizer.

    Turns an update $v$ into $\mathrm{prox}_{\alpha_k\varphi}(x + v) - x$.

    Args:
        regularizer: a regulariser that can be traced.
        learning_rate: $\alpha_k$, which multiplies the regulariser's weight; a number or a schedule. Pass that of
            the optimizer before it. Constraints do not depend on it.
    """
    groups = Groups({ALL: Options(learning_rate, None, regularizer)})

    def init(params: Any) -> optax.ScaleByScheduleState:
        groups.check(params)
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        check_update("prox", params, value=0.0)
        gathered = groups.gather(updates, params, state.count)
        (block,) = gathered.blocks
        ys = prox_at(block, [x + d for x, d in zip(block.xs, block.ds, strict=True)], block.alpha)
        moved = [y - x for x, y in zip(block.xs, ys, strict=True)]
        return gathered.scatter([moved]), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def _coupled(owner: str, default: Options, labels: Labels, groups: GroupOptions | None) -> Groups:
    """Groups whose regularisers are added to the loss."""
    made = Groups.make(owner, default, labels, groups)
    check_needs_rate(owner, made.options)
    for options in made.options.values():
        check_subgradient(options.phi, owner, "prox_sps or prox_sgd")
    return made
