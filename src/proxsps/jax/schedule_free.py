"""The schedule-free step as an optax transformation, and the average that it is evaluated at."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from numbers import Real
from typing import Any, cast

import jax
import jax.numpy as jnp
import optax

from proxsps.core.schedule_free import average, cleaned
from proxsps.jax.checks import check_constants, check_diagonal, check_rates, with_known_arguments
from proxsps.jax.groups import Groups, Options, is_absent
from proxsps.jax.moments import Held, Kind
from proxsps.jax.parts import like
from proxsps.jax.second_point import Matrix, ScheduleFreeMoments, kept_point
from proxsps.jax.transformation import Number, Schedule
from proxsps.jax.transforms import GroupOptions, Labels, truncated
from proxsps.jax.tree_roles import MATRICES, REST, Role, as_matrix, roles
from proxsps.regularizers import L2, Regularizer, Zero

ADAM, SPECTRAL, AUTO = "adam", "spectral", "auto"
KEYS = ("learning_rate", "scale", "weight_decay", "regularizer", "metric", "set")


@with_known_arguments
def schedule_free_sps(
    learning_rate: Schedule | None = None,
    b1: Number = 0.9,
    b2: Number = 0.999,
    eps: Number = 1e-8,
    weight_decay: Number | None = None,
    regularizer: Regularizer | None = None,
    lower_bound: Number | str | None = AUTO,
    *,
    metric: str = ADAM,
    scale: Schedule | None = None,
    max_move: Number | None = None,
    labels: Labels = None,
    groups: GroupOptions | None = None,
) -> optax.GradientTransformationExtraArgs:
    r"""Stochastic proximal Polyak steps without a learning rate and without a schedule.

    Gradients are taken at $y$, which the parameters are while you train; proximal steps move $z$; and what you evaluate
    is $x$, the average of all $z$ (Defazio et al., 2024):

    $$z^{k+1} = \mathrm{prox}^{D_k}_{\tau_k\varphi}(z^k - \tau_k p_k), \qquad
    x^{k+1} = x^k + w_k (z^{k+1} - x^k), \qquad y^{k+1} = \beta_1 x^{k+1} + (1 - \beta_1) z^{k+1}.$$

    `update` returns $y^{k+1} - y^k$, and `eval_params(state, params)` the average. In Adam's metric,
    $p_k = D_k^{-1} g_k$ with $D_k = \sqrt{v_k} + \epsilon$. With `metric="spectral"`, hidden matrices move along
    orthogonalised averages of their gradients, as in Muon (Jordan et al., 2024). $\tau_k$ is the first step at which
    the linear model of the loss, seen from $z^k$, reaches $C$, or the distance cap. Hidden matrices and other
    parameters have a distance cap each; `roles` says which are which.

    Args:
        learning_rate: a further cap on the step: a number or an optax schedule. None for none.
        b1: $\beta_1$, the part of $x$ in $y$, above 0 and below 1.
        b2: how much of the average square is old, in [0, 1).
        eps: $\epsilon \ge 0$ of the metric.
        weight_decay: $\lambda$ of decoupled decay, which divides the new point by $1 + \tau\lambda$; None for none.
        regularizer: one with an exact prox in a diagonal metric, instead of `weight_decay`, for parameters in Adam's
            metric. The evaluated average has its exact zeros.
        lower_bound: as in `prox_sps`. "auto" is 0, or None if there is a regulariser other than `L2`: with one, steps
            would become short when the loss alone is small, long before the objective is.
        metric: "adam", or "spectral" for the hidden matrices.
        scale: as in `prox_sps`.
        max_move: limit on the Euclidean length of the move of all $z$ together; None for none.
        labels: as in `prox_sps`.
        groups: as in `prox_sps`; a label may also have a `metric`, which is then that of all its arrays, and a `set`:
            labels of one set share a distance cap, whatever the roles of their arrays are.

    Examples:
        >>> import jax, jax.numpy as jnp, optax
        >>> from proxsps.jax import eval_params, schedule_free_sps
        >>> opt = schedule_free_sps()
        >>> y = jnp.array([1.0, 2.0])
        >>> state = opt.init(y)
        >>> for _ in range(200):
        ...     value, grad = jax.value_and_grad(lambda y: jnp.sum((y - 3.0) ** 2))(y)
        ...     updates, state = opt.update(grad, state, y, value=value)
        ...     y = optax.apply_updates(y, updates)
        >>> x = eval_params(state, y)
        >>> bool(jnp.sum((x - 3.0) ** 2) < 0.01)
        True
    """
    owner = "schedule_free_sps"
    constants = {"b1": b1, "b2": b2, "eps": eps} | ({} if max_move is None else {"max_move": max_move})
    check_constants(**constants)
    if isinstance(b1, Real) and not float(b1) > 0:
        raise ValueError(
            f"b1 must be above 0, got {b1!r}: it is the part of the average in the parameters, from which the average "
            "is computed."
        )
    default = Options(learning_rate, weight_decay, regularizer, scale, _checked_metric(metric))
    given = Groups.make(owner, default, labels, groups, KEYS)
    check_rates(owner, learning_rate, given.options)
    explicit = {label for label, own in (groups or {}).items() if "metric" in own}
    made = _by_role(owner, given, explicit)
    sets = list(dict.fromkeys(own.set for own in made.options.values()))
    held = [
        Held(sets.index(own.set), own.metric == SPECTRAL, not isinstance(own.phi, (Zero, L2)))
        for own in made.options.values()
    ]
    kind = Kind(metric=True, distance=True, factors=learning_rate is None, second=tuple(held))
    if isinstance(lower_bound, str):
        if lower_bound != AUTO:
            raise ValueError(f'lower_bound must be a number, None or "auto", got {lower_bound!r}.')
        lower_bound = None if any(own.cleans for own in held) else 0.0
    return truncated(owner, kind, made, True, lower_bound, constants)


def eval_params(state: Any, params: Any) -> Any:
    """The parameters to evaluate, save and deploy: the average x of all points of `schedule_free_sps`.

    It has the exact zeros of a regulariser: an entry is 0 if a proximal step, ten times as long as the last one, would
    set it to 0, and the last point is not near the average.

    Args:
        state: the state of `schedule_free_sps`, or of a transformation that contains it.
        params: the parameters after the update that returned this state. Keep them, to train on.
    """
    found = [own for own in jax.tree.leaves(state, is_leaf=_is_moments) if _is_moments(own)]
    if not found:
        raise ValueError(
            f"eval_params needs a state of schedule_free_sps, got a {type(state).__name__} without one. Other "
            "transformations are evaluated at their parameters."
        )
    for memory in found:
        params = _averages(memory, params)
    return params


def _averages(memory: ScheduleFreeMoments, params: Any) -> Any:
    def averaged(z: Any, y: Any, zeros: Any, shown: Any) -> Any:
        if is_absent(z):  # a parameter of another transformation, or no parameter
            return shown
        y = kept_point(y, shown)
        x = average(y, z, like(memory.mix, y))
        return (cleaned(x, zeros) if zeros.size else x).astype(jnp.result_type(shown))

    return jax.tree.map(averaged, memory.z, memory.y, memory.zeros, params, is_leaf=is_absent)


def _is_moments(state: Any) -> bool:
    return isinstance(state, ScheduleFreeMoments)


@dataclass(frozen=True)
class Member:
    """The label of parameters that have the same options and the same role."""

    label: Hashable
    role: str
    matrix: Matrix | None = field(default=None, compare=False)  # how a parameter is read as matrices


def _by_role(owner: str, given: Groups, explicit: set[Hashable]) -> Groups:
    """Labels divided by the roles of their parameters, if they have no set and no spectral metric of their own."""
    options: dict[Hashable, Options] = {}
    spectral = {label for label, own in given.options.items() if _checked_metric(own.metric) == SPECTRAL}
    named = {label for label, own in given.options.items() if own.set is not None}
    matrices, whole = spectral & explicit, (spectral & explicit) | (named - spectral)
    for label, own in given.options.items():
        if label in spectral and own.regularizer is not None:
            raise ValueError(
                f'{owner} has metric="spectral" and regularizer={own.regularizer!r} for the same parameters (label '
                f'{label!r}), and its prox is not exact in this metric. Use weight_decay there, or metric="adam" for a '
                "label that is to be sparse or constrained."
            )
        check_diagonal(owner, own.phi)
        for role in (MATRICES,) if label in whole else (MATRICES, REST):
            metric = own.metric if role == MATRICES else ADAM
            options[Member(label, role)] = replace(own, metric=metric, set=role if own.set is None else own.set)

    def members(params: Any) -> Any:
        labels = given.label_tree(params)
        known = jax.tree.map(lambda label, role: label if isinstance(label, Role) else role, labels, roles(params))
        pairs = set(zip(jax.tree.leaves(labels), map(str, jax.tree.leaves(known)), strict=True))
        joint = {label for label, role in pairs if role == MATRICES and _is_whole(given.options[label].regularizer)}

        def name(label: Any, role: Role) -> Member:
            if label in matrices:
                return Member(label, MATRICES, role.matrix or _matrix(label, role))
            return Member(label, MATRICES if label in whole | joint else str(role), role.matrix)

        return jax.tree.map(name, labels, known)

    return Groups(options, members)


def _is_whole(phi: Regularizer | None) -> bool:
    """Whether a regulariser needs all parameters of its label, which then have one distance cap."""
    return phi is not None and (phi.joint or type(phi).at is not Regularizer.at)


def _matrix(label: Hashable, role: Role) -> Matrix:
    """How an array that is no hidden matrix is read, because its label says that it is one."""
    if len(role.shape) < 2:
        raise ValueError(
            f'Label {label!r} has metric="spectral", which is for matrices and filters, and {role.name or "an array"} '
            f'has shape {role.shape}. Give it a label with metric="adam", or leave labels out: '
            'schedule_free_sps(metric="spectral") uses the roles of proxsps.jax.roles(params).'
        )
    return as_matrix(role.name, role.shape)


def _checked_metric(metric: Any) -> str:
    if metric not in (ADAM, SPECTRAL):
        raise ValueError(f'metric must be "adam" or "spectral", got {metric!r}.')
    return cast(str, metric)
