"""The methods as optax transformations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import optax

from proxsps.core import rules
from proxsps.core.array import Array
from proxsps.core.outcome import Report, Solution, report
from proxsps.jax.checks import check_constants, check_lower_bound, check_update
from proxsps.jax.groups import ALL, Groups, Options
from proxsps.jax.parts import prox_at
from proxsps.jax.solve import Method, settled, solve
from proxsps.regularizers import Regularizer
from proxsps.regularizers.checks import check_subgradient

LastStep = Report
Labels = Any  # a tree of labels, or a function from parameters to one
GroupOptions = Mapping[Hashable, Mapping[str, Any]]
Number = Any  # a Python number or a 0-d array, traced or not
Schedule = Number | Callable[[Array], Array]


class PolyakState(NamedTuple):
    """State of the transformations here: a few numbers, whatever the size of the model."""

    count: Array  # updates so far, which schedules are asked with
    last_step: LastStep  # what the last update did
    memory: rules.StepMemory | tuple[()] = ()  # of `dec_sps`


def prox_sps(
    learning_rate: Schedule = 1.0,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number = 0.0,
    *,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic proximal Polyak step size (Schaipp, Gower and Ulbrich, 2023; Algorithms 2 and 3).

    Minimises in every step the truncated model of the loss plus the regulariser itself,

    $$x^{k+1} = \arg\min_y \; \max\{f(x^k) + \langle g_k, y - x^k\rangle, C\} + \varphi(y)
    + \tfrac{1}{2\alpha_k}\|y - x^k\|^2,$$

    jointly over all labels, each with its own $\alpha_k$ and $\varphi$. The squared l2 norm has a closed form; other
    regularisers cost a few evaluations of their prox, in a `jax.lax.while_loop`.

    Args:
        learning_rate: $\alpha_k$, the cap on the step; a number or an optax schedule.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$; None for none.
        regularizer: any other regulariser that can be traced, instead of `weight_decay`.
        lower_bound: $C$, which the loss never falls below; `update(..., lower_bound=...)` gives one by batch.
        labels: a tree of labels that is a prefix of the parameters', or a function from parameters to one.
        groups: for each label a mapping with its own `learning_rate`, `weight_decay` or `regularizer`, which may be
            empty; what is missing is taken from the arguments above.

    Example:
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
    check_constants(lower_bound=lower_bound)
    options = Groups.make("prox_sps", Options(learning_rate, weight_decay, regularizer), labels, groups)
    return _transformation(PROX_SPS, options, lower_bound)


def prox_sgd(
    learning_rate: Schedule,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    *,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Proximal stochastic gradient descent: `prox_sps` with the linear model, whose step is always the cap.

    $x^{k+1} = \mathrm{prox}_{\alpha_k\varphi}(x^k - \alpha_k g_k)$. It needs no `value`; one that is given is reported.

    Args:
        learning_rate: $\alpha_k$, the step; a number or an optax schedule.
        weight_decay: as in `prox_sps`.
        regularizer: as in `prox_sps`.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.
    """
    options = Groups.make("prox_sgd", Options(learning_rate, weight_decay, regularizer), labels, groups)
    return _transformation(PROX_SGD, options)


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

    Hand over value and gradient of the loss *without* regulariser; the method adds it.

    Args:
        learning_rate: $\alpha_k$, the cap on the step; a number or an optax schedule.
        weight_decay: $\lambda$ of $\varphi = \lambda/2 \|x\|^2$; None for none.
        regularizer: another regulariser with a subgradient, instead of `weight_decay`.
        lower_bound: $C$, which the regularised loss never falls below.
        c: divides the adaptive step; 1 is the truncated model's own.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`.
    """
    check_constants(lower_bound=lower_bound, c=c)
    options = _coupled("sps", Options(learning_rate, weight_decay, regularizer), labels, groups)
    return _transformation(SPS, options, lower_bound, c)


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
    return _transformation(DEC_SPS, options, lower_bound, c0)


def prox(regularizer: Regularizer, learning_rate: Schedule = 1.0) -> optax.GradientTransformationExtraArgs:
    r"""The prox of a regulariser, to be chained after any optax optimizer.

    Turns an update $v$ into $\mathrm{prox}_{\alpha_k\varphi}(x + v) - x$.

    Args:
        regularizer: a regulariser that can be traced.
        learning_rate: $\alpha_k$, which multiplies the regulariser's weight; a number or a schedule. Give that of
            the optimizer in front. Constraints do not depend on it.
    """
    groups = Groups({ALL: Options(learning_rate, None, regularizer)})

    def init(params: Any) -> optax.ScaleByScheduleState:
        groups.check(params)
        return optax.ScaleByScheduleState(jnp.zeros((), jnp.int32))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        check_update("prox", params, value=0.0)
        (block,), scatter = groups.gather(updates, params, state.count)
        ys = prox_at(block, [x + d for x, d in zip(block.xs, block.ds, strict=True)])
        moved = [y - x for x, y in zip(block.xs, ys, strict=True)]
        return scatter([moved]), optax.ScaleByScheduleState(optax.safe_increment(state.count))

    return optax.GradientTransformationExtraArgs(init, update)


def _coupled(owner: str, default: Options, labels: Labels, groups: GroupOptions | None) -> Groups:
    """Groups whose regularisers are to be put into the loss."""
    made = Groups.make(owner, default, labels, groups)
    for options in made.options.values():
        check_subgradient(options.phi, owner, "prox_sps or prox_sgd")
    return made


PROX_SPS = Method("prox_sps", rules.truncated)
PROX_SGD = Method("prox_sgd", rules.linear, bounded=False)
SPS = Method("sps", rules.sps_max, coupled=True)
DEC_SPS = Method("dec_sps", rules.dec_sps, coupled=True, remembers=True)


def _transformation(
    method: Method, groups: Groups, bound: Number = 0.0, constant: Number | None = None
) -> optax.GradientTransformationExtraArgs:
    """Gather, solve, scatter."""
    blocks_count = len(groups.options)

    def init(params: Any) -> PolyakState:
        groups.check(params)
        dtype = groups.dtype(params)
        nothing = report(jnp.zeros(blocks_count, dtype), Solution.skipped(jnp.nan))
        memory = rules.start_memory(jnp.zeros(blocks_count, dtype)) if method.remembers else ()
        return PolyakState(jnp.zeros((), jnp.int32), settled(nothing, dtype), memory)

    def update(
        updates: Any,
        state: PolyakState,
        params: Any = None,
        *,
        value: Number | None = None,
        lower_bound: Number | None = None,
        **extra: Any,
    ) -> tuple[Any, PolyakState]:
        if value is None and not method.bounded:
            value = 0.0
        check_update(method.name, params, value)
        check_lower_bound(method.name, lower_bound, method.bounded)
        dtype = groups.dtype(params)
        blocks, scatter = groups.gather(updates, params, state.count)
        m, C = (jnp.asarray(x, dtype).reshape(()) for x in (value, bound if lower_bound is None else lower_bound))
        moved, last, memory = solve(method, blocks, m, C, state.memory, constant)
        return scatter(moved), PolyakState(optax.safe_increment(state.count), last, memory)

    return optax.GradientTransformationExtraArgs(init, update)
