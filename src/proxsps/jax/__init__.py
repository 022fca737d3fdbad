"""JAX front end: the same steps as optax transformations.

They take the loss as `update(grads, state, params, value=loss)` and return x+ - x, ready for `optax.apply_updates`. The
formulas are those of `proxsps.core`, the regularisers those of `proxsps.regularizers`; torch is not imported.
"""

from proxsps._install import extra as _extra

try:
    import jax as _jax  # noqa: F401
    import optax as _optax  # noqa: F401
except ImportError as error:
    raise ImportError(f"proxsps.jax needs jax and optax: {_extra('jax')} ({error}).") from error

from proxsps.jax.accumulation import multi_steps
from proxsps.jax.ending import PolynomialAverageState, cool_down, polynomial_average
from proxsps.jax.moments import Moments
from proxsps.jax.schedule_free import eval_params, schedule_free_sps
from proxsps.jax.second_point import ScheduleFreeMoments
from proxsps.jax.transformation import LastStep, PolyakState
from proxsps.jax.transforms import dec_sps, prox, prox_sgd, prox_sps, prox_sps_adam, sps
from proxsps.jax.tree_roles import Role, roles

__all__ = [
    "LastStep",
    "Moments",
    "PolyakState",
    "PolynomialAverageState",
    "Role",
    "ScheduleFreeMoments",
    "cool_down",
    "dec_sps",
    "eval_params",
    "multi_steps",
    "polynomial_average",
    "prox",
    "prox_sgd",
    "prox_sps",
    "prox_sps_adam",
    "roles",
    "schedule_free_sps",
    "sps",
]
