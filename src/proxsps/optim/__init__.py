"""Optimizers for torch: `ScheduleFreeSPS`, `ProxSPS`, `ProxSPSAdam`, `SPS`, `DecSPS`, `ProxSGD`, and schedulers."""

from proxsps.optim.averaging import polynomial_avg_fn, polynomial_multi_avg_fn, renew_statistics
from proxsps.optim.consistency import LossCheck, check_loss
from proxsps.optim.last_step import LastStep
from proxsps.optim.model_groups import model_groups, roles
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.optim.polyak import SPS, DecSPS, ProxSGD, ProxSPS, ProxSPSAdam
from proxsps.optim.schedule_free import ScheduleFreeSPS
from proxsps.optim.schedulers import AdaptiveLR, CoolDown, HorizonLR, SqrtLR, StronglyConvexLR

__all__ = [
    "SPS",
    "AdaptiveLR",
    "CoolDown",
    "DecSPS",
    "HorizonLR",
    "LastStep",
    "LossCheck",
    "PolyakOptimizer",
    "ProxSGD",
    "ProxSPS",
    "ProxSPSAdam",
    "ScheduleFreeSPS",
    "SqrtLR",
    "StronglyConvexLR",
    "check_loss",
    "model_groups",
    "polynomial_avg_fn",
    "polynomial_multi_avg_fn",
    "renew_statistics",
    "roles",
]
