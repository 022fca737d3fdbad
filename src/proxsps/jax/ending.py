"""The end of training: a schedule that cools down, and an average of the parameters that follows them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from proxsps.core import averaging, schedules
from proxsps.core.array import Array
from proxsps.core.checks import check_nonnegative
from proxsps.jax.groups import is_parameter
from proxsps.regularizers._support import wide


def cool_down(total_steps: int, fraction: float = 0.25, value: float = 1.0) -> Callable[[Array], Array]:
    """An optax schedule: constant, then linearly to 0 over the last part of training.

    Use it as the `scale` of a step without a learning rate; only the number of steps has to be chosen. It also works as
    a schedule for a learning rate.

    Args:
        total_steps: updates of the whole training; from then on the schedule is 0.
        fraction: the part of these updates over which it falls.
        value: where it starts.

    Examples:
        >>> from proxsps.jax import cool_down, prox_sps_adam
        >>> opt = prox_sps_adam(scale=cool_down(1000))
        >>> [round(float(cool_down(1000)(count)), 2) for count in (0, 749, 900, 1000)]
        [1.0, 1.0, 0.4, 0.0]
    """
    schedules.check_horizon(total_steps, fraction)
    check_nonnegative("value", value)

    def schedule(count: Array) -> Array:
        return schedules.cool_down(jnp.asarray(count), value, total_steps, fraction)

    return schedule


class PolynomialAverageState(NamedTuple):
    """State of `polynomial_average`."""

    count: Array  # points so far
    mean: Any  # their average, in at least f32


def polynomial_average(power: float = 8.0) -> optax.GradientTransformation:
    r"""An average of parameters that follows them: $\bar x \mathrel{+}= \frac{9}{k+10} (x - \bar x)$.

    Use it like `optax.ema` on parameters: pass the parameters after each step to `update`, which returns the average.

    Args:
        power: how quickly old parameters lose influence: the parameters after step k count with about k^power. 8 is
            the 9 / (k + 10) above, 0 the plain mean.

    Examples:
        >>> import jax.numpy as jnp
        >>> from proxsps.jax import polynomial_average
        >>> average = polynomial_average()
        >>> state = average.init(jnp.zeros(2))
        >>> for k in range(3):
        ...     mean, state = average.update(jnp.full(2, float(k)), state)
        >>> [round(float(x), 3) for x in mean]
        [1.8, 1.8]
    """
    check_nonnegative("power", power)

    def init(params: Any) -> PolynomialAverageState:
        mean = jax.tree.map(lambda x: jnp.zeros_like(wide(jnp.asarray(x))) if is_parameter(x) else x, params)
        return PolynomialAverageState(jnp.zeros((), jnp.int32), mean)

    def update(updates: Any, state: PolynomialAverageState, params: Any = None) -> tuple[Any, PolynomialAverageState]:
        def follow(x: Any, mean: Any) -> Any:
            if not is_parameter(x):
                return x
            return averaging.polynomial_average(mean, jnp.asarray(x, mean.dtype), state.count.astype(mean.dtype), power)

        mean = jax.tree.map(follow, updates, state.mean)
        out = jax.tree.map(lambda x, y: y.astype(jnp.result_type(x)) if is_parameter(x) else y, updates, mean)
        return out, PolynomialAverageState(optax.safe_increment(state.count), mean)

    return optax.GradientTransformation(init, update)
