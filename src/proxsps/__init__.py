"""Stochastic proximal Polyak step sizes.

Names are loaded when they are first used, so that importing the package costs nothing and brings in no framework.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    **dict.fromkeys(["SPS", "DecSPS", "ProxSGD", "ProxSPS", "ProxSPSAdam"], "proxsps.optim"),
    **dict.fromkeys(["LastStep", "LossCheck", "check_loss"], "proxsps.optim"),
    **dict.fromkeys(["AdaptiveLR", "CoolDown", "HorizonLR", "SqrtLR", "StronglyConvexLR"], "proxsps.optim"),
    **dict.fromkeys(["polynomial_avg_fn", "polynomial_multi_avg_fn"], "proxsps.optim"),
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
        "proxsps.regularizers",
    ),
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from proxsps.optim import *  # noqa: F403
    from proxsps.regularizers import *  # noqa: F403


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'proxsps' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
