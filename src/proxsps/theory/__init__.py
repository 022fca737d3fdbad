"""The paper's theory as functions: envelopes, one-step inequalities, rates, and the results it is compared with.

Nothing here depends on runs: functions take constants by name and return numbers. If an assumption does not hold, they
raise an `AssumptionError` that names it. `proxsps theory verify` compares all of them with runs.
"""

from proxsps.theory.advice import Advice, Known, advise
from proxsps.theory.assumptions import AssumptionError, envelope_alpha, repair_alpha, smallest_theta, smooth_alpha
from proxsps.theory.bounds import (
    bounded_strongly_convex,
    bounded_weakly_convex,
    bounded_weakly_convex_alpha,
    envelope_horizon,
    envelope_sqrt,
    envelope_sum,
    smooth_constant_step,
    smooth_convex,
    smooth_strongly_convex,
)
from proxsps.theory.caps import (
    matched_inequality,
    matched_neighbourhood,
    matched_progress,
    matched_recursion,
    raised_bound,
)
from proxsps.theory.interpolation import (
    dec_sps_radius,
    dec_sps_rate,
    interpolation_constant,
    sps_max_floor,
    sps_max_neighbourhood,
    sps_max_rate,
)
from proxsps.theory.moreau import (
    Cut,
    Envelope,
    Interval,
    Norms,
    gradient_mapping,
    gradient_mapping_range,
    moreau_envelope,
    norm_identity,
    prox_by_cuts,
    prox_by_gradient,
)
from proxsps.theory.recursions import (
    Sides,
    basic_inequality,
    bounded_envelope_recursion,
    bounded_recursion,
    convex_recursion,
    envelope_recursion,
)
from proxsps.theory.schedule_free import average_inequality, schedule_free_neighbourhood

__all__ = [
    "Advice",
    "AssumptionError",
    "Cut",
    "Envelope",
    "Interval",
    "Known",
    "Norms",
    "Sides",
    "advise",
    "average_inequality",
    "basic_inequality",
    "bounded_envelope_recursion",
    "bounded_recursion",
    "bounded_strongly_convex",
    "bounded_weakly_convex",
    "bounded_weakly_convex_alpha",
    "convex_recursion",
    "dec_sps_radius",
    "dec_sps_rate",
    "envelope_alpha",
    "envelope_horizon",
    "envelope_recursion",
    "envelope_sqrt",
    "envelope_sum",
    "gradient_mapping",
    "gradient_mapping_range",
    "interpolation_constant",
    "matched_inequality",
    "matched_neighbourhood",
    "matched_progress",
    "matched_recursion",
    "moreau_envelope",
    "norm_identity",
    "prox_by_cuts",
    "prox_by_gradient",
    "raised_bound",
    "repair_alpha",
    "schedule_free_neighbourhood",
    "smallest_theta",
    "smooth_alpha",
    "smooth_constant_step",
    "smooth_convex",
    "smooth_strongly_convex",
    "sps_max_floor",
    "sps_max_neighbourhood",
    "sps_max_rate",
]
