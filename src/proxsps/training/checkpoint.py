"""A run on disk: weights, optimizer and what was measured after its last complete epoch.

Random numbers are drawn from the seed and the epoch, so that no state of a generator is needed to go on. A file is
written beside its place and renamed: a kill leaves the last complete one. Only tensors and plain data are ever read.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from proxsps.sweep.spec import RunSpec, describe

FORMAT = 1


class CheckpointError(ValueError):
    """A checkpoint that this run cannot go on from. It was not changed."""


def facts(spec: RunSpec) -> dict[str, Any]:
    """What a checkpoint and a run must have in common; the number of epochs may differ."""
    return {**spec.columns(), **{f"problem {key}": value for key, value in describe(spec.problem).items()}}


def prepare(path: Path) -> None:
    """Make the folder of a checkpoint, so that a run finds out before its first epoch if it cannot."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    reason = getattr(error, "strerror", None) or str(error).splitlines()[0]
    return CheckpointError(f"The checkpoint {path} cannot be written ({reason}). Choose another place.")


def save(path: Path, spec: RunSpec, model: nn.Module, optimizer: Optimizer, history: dict[str, Any]) -> None:
    """Write a checkpoint; `history` is plain data and tensors."""
    content = {
        "format": FORMAT,
        "run": facts(spec),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": history,
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        torch.save(content, beside)
        os.replace(beside, path)
    except (OSError, RuntimeError) as error:  # torch raises the latter where a folder cannot be written to
        raise _unwritable(path, error) from None
    finally:
        beside.unlink(missing_ok=True)


def load(path: Path, spec: RunSpec, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint of this run."""
    try:
        content = torch.load(path, map_location=device, weights_only=True)
        known = content["format"] == FORMAT
        saved = content["run"]
    except Exception:  # of many kinds: bytes that are no checkpoint lead torch's reader astray in many ways
        raise CheckpointError(
            f"{path} is not a checkpoint of a training run, or is damaged. Move it away, or choose another place."
        ) from None
    if not known:
        raise CheckpointError(f"{path} was written by another version. Move it away, or choose another place.")
    wanted = facts(spec)
    differing = [key for key in {**wanted, **saved} if wanted.get(key) != saved.get(key)]
    if differing:
        pairs = ", ".join(f"{key} {saved.get(key)!r} instead of {wanted.get(key)!r}" for key in differing)
        raise CheckpointError(f"{path} is of another run: it has {pairs}. Choose another place, or those options.")
    done = len(content["history"]["metrics"])
    if done > spec.epochs:
        raise CheckpointError(f"{path} has {done} epochs already, more than {spec.epochs}. Ask for more epochs.")
    return content
