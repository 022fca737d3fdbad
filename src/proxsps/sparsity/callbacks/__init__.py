"""Sparsity, and what the steps did, in the logs of trainers: `callbacks.lightning` and `callbacks.transformers`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from proxsps.core.outcome import BRANCHES
from proxsps.optim.hints import warn
from proxsps.optim.optimizer import PolyakOptimizer
from proxsps.sparsity.counts import counted
from proxsps.sparsity.units import Units


class Journal:
    """Collects the steps of an epoch without waiting for the device, and sums them up at its end."""

    def __init__(self, units: Units | None = None, prefix: str = "sparsity/") -> None:
        self.units, self.prefix = units, prefix
        self._steps: list[Tensor] = []
        self._warned = False

    def step(self, optimizer: Any) -> None:
        """Record the last step of an optimizer of this package; others are ignored."""
        optimizer = getattr(optimizer, "optimizer", optimizer)  # trainers wrap it
        last = optimizer.last_step if isinstance(optimizer, PolyakOptimizer) else None
        if last is not None:
            self._steps.append(torch.stack([last.tau[0], last.zeta[0], last.branch.to(last.tau.dtype)]))

    def epoch(self, model: nn.Module) -> dict[str, float]:
        """Shares of zeros, medians of tau and zeta, shares of the branches; then clear the records."""
        report = counted(model, self.units)
        if report.notes and not self._warned:
            self._warned = True
            warn(report.notes[0])
        found = report.summary()
        if self._steps:
            tau, zeta, branch = torch.stack(self._steps).T.cpu()
            found |= {"tau": float(tau.nanmedian()), "zeta": float(zeta.nanmedian())}
            found |= {name: float((branch == code).float().mean()) for code, name in BRANCHES.items()}
        self._steps.clear()
        return {f"{self.prefix}{name}": value for name, value in found.items()}


__all__ = ["Journal"]
