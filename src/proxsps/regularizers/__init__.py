"""Regularisers: convex functions with a value and a proximal operator, on arrays of any array-API library."""

from proxsps.regularizers.base import Regularizer, flatten, prox_all, unflatten, value_all
from proxsps.regularizers.constraints import (
    Box,
    L1Ball,
    L2Ball,
    LInfBall,
    NonNegative,
    Simplex,
    project_box,
    project_l1_ball,
    project_l2_ball,
    project_simplex,
)
from proxsps.regularizers.group import GroupLasso, SparseGroupLasso, block_soft_threshold
from proxsps.regularizers.separable import L1, L2, ElasticNet, Zero, shrink, shrink_towards, soft_threshold
from proxsps.regularizers.spectral import NuclearNorm, singular_value_threshold
from proxsps.regularizers.total_variation import TotalVariation1D, denoise_tv1d
from proxsps.regularizers.verify import check_regularizer

__all__ = [
    "L1",
    "L2",
    "Box",
    "ElasticNet",
    "GroupLasso",
    "L1Ball",
    "L2Ball",
    "LInfBall",
    "NonNegative",
    "NuclearNorm",
    "Regularizer",
    "Simplex",
    "SparseGroupLasso",
    "TotalVariation1D",
    "Zero",
    "block_soft_threshold",
    "check_regularizer",
    "denoise_tv1d",
    "flatten",
    "project_box",
    "project_l1_ball",
    "project_l2_ball",
    "project_simplex",
    "prox_all",
    "shrink",
    "shrink_towards",
    "singular_value_threshold",
    "soft_threshold",
    "unflatten",
    "value_all",
]
