"""A run on disk: weights, optimizer and measurements after its last complete epoch.

Random numbers are drawn from the seed and the epoch, so that no state of a generator is needed to continue. A kill
leaves the last complete file. Files have a digest, see `proxsps._sealed`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from proxsps import _sealed
from proxsps._files import replace_file

if TYPE_CHECKING:
    from proxsps.training.loop import TrainingSpec

FORMAT = 2


class CheckpointError(ValueError):
    """A checkpoint that this run cannot continue from. It was not changed."""


def checkpoint_file(folder: Path, spec: TrainingSpec) -> Path:
    """Where the checkpoint of a run is kept, beside the store in `folder`."""
    return folder / "checkpoints" / f"{spec.id}.pt"


def prepare(path: Path) -> bool:
    """Whether there is a checkpoint. A test file is written beside it, so that a run fails at once if that fails."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.test")
    try:
        replace_file(beside, bytes(4096))
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint but a folder or a device. Choose another place.")
    return path.exists()


def save(path: Path, spec: TrainingSpec, content: dict[str, Any]) -> None:
    """Write a checkpoint of this run: plain data and tensors."""
    try:
        _sealed.write(path, {"format": FORMAT, "run": spec.facts(), **content})
    except OSError as error:
        raise _unwritable(path, error) from None


def load(path: Path, spec: TrainingSpec, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint of this run."""
    try:
        content: dict[str, Any] = _sealed.read(path, device)
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read ({error.strerror}).") from None
    except _sealed.SealError as error:
        raise CheckpointError(
            f"The checkpoint {path} {error}. Delete it to start the run again, restore it from a copy, or choose "
            "another place."
        ) from None
    with complete(path):
        if content["format"] != FORMAT:
            raise CheckpointError(f"{path} was written by another version. Delete it, or choose another place.")
        wanted, saved = spec.facts(), content["run"]
        differing = [key for key in {**wanted, **saved} if wanted.get(key) != saved.get(key)]
        if differing:
            pairs = ", ".join(f"{key} {saved.get(key)!r} instead of {wanted.get(key)!r}" for key in differing)
            raise CheckpointError(f"{path} belongs to another run: it has {pairs}. Use another file, or those options.")
        done = len(content["history"]["metrics"])
        if done > spec.epochs:
            raise CheckpointError(f"{path} has {done} epochs already, more than {spec.epochs}. Choose more epochs.")
    return content


@contextmanager
def complete(path: Path) -> Iterator[None]:
    """Errors that come from a checkpoint with other parts than those of a run, as one that says so."""
    try:
        yield
    except CheckpointError:
        raise
    except (KeyError, ValueError, TypeError, AttributeError, RuntimeError):
        raise CheckpointError(
            f"The checkpoint {path} lacks parts of a run. Delete it to start the run again, or choose another place."
        ) from None


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint {path} cannot be written ({error.strerror}). Make room, or choose another place; the same run "
        "continues from the last checkpoint that was written."
    )
