"""Stochastic proximal Polyak step sizes.

Names and modules are loaded when they are first used, so that importing the package costs nothing and brings in no
framework.
"""

from typing import TYPE_CHECKING

from proxsps._lazy import attach as _attach

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(["SPS", "DecSPS", "PolyakOptimizer", "ProxSGD", "ProxSPS", "ProxSPSAdam"], "optim"),
    **dict.fromkeys(["LastStep", "LossCheck", "check_loss"], "optim"),
    **dict.fromkeys(["AdaptiveLR", "CoolDown", "HorizonLR", "SqrtLR", "StronglyConvexLR"], "optim"),
    **dict.fromkeys(["polynomial_avg_fn", "polynomial_multi_avg_fn"], "optim"),
    **dict.fromkeys(["ScheduleFreeSPS", "model_groups", "renew_statistics", "roles"], "optim"),
    **dict.fromkeys(
        [
            "Box",
            "ElasticNet",
            "GroupLasso",
            "L1",
            "L1Ball",
            "L2",
            "L2Ball",
            "LInfBall",
            "NonNegative",
            "NuclearNorm",
            "Regularizer",
            "Simplex",
            "SparseGroupLasso",
            "TotalVariation1D",
            "Zero",
            "check_regularizer",
        ],
        "regularizers",
    ),
    "UnitLasso": "regularizers.units",
}
_MODULES = (
    *("cli", "core", "experiments", "figures", "integrations", "jax", "methods", "optim", "problems"),
    *("regularizers", "report", "runs", "sparsity", "sweep", "theory", "training"),
)

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from proxsps.optim import *  # noqa: F403
    from proxsps.regularizers import *  # noqa: F403
    from proxsps.regularizers.units import UnitLasso as UnitLasso

__getattr__, __dir__ = _attach(__name__, _HOME, _MODULES)
