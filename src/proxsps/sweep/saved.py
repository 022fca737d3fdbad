"""The state of a running batch on disk: a kill costs half a minute, not the whole batch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import proxsps
from proxsps import _sealed
from proxsps.sweep.files import MAKE_ROOM, StoreError
from proxsps.sweep.spec import RunSpec

FORMAT = 3
EVERY = 30.0  # seconds between two saves

State = dict[str, Any]  # of tensors and numbers


class SavedBatch:
    """One file for one batch of specs, run by this version of the package and of torch.

    A file that is damaged or holds other objects is ignored: the batch is then run from its start, to the same result.
    """

    def __init__(self, folder: Path, specs: Sequence[RunSpec], every: float = EVERY) -> None:
        facts = (str(FORMAT), proxsps.__version__, torch.__version__, *(spec.id for spec in specs))
        self.file = folder / f"{hashlib.sha256(' '.join(facts).encode()).hexdigest()[:16]}.pt"
        self.every, self.last = every, time.monotonic()

    def is_due(self) -> bool:
        """Whether the last save was long enough ago."""
        return time.monotonic() - self.last >= self.every

    def save(self, state: State) -> None:
        """Replace the file."""
        try:
            _sealed.write(self.file, state)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"Cannot write {self.file}: {reason}. {MAKE_ROOM}") from None
        self.last = time.monotonic()  # so that slow disks do not spend all their time on saves

    def load(self) -> State | None:
        """What was saved, or None."""
        try:
            state: State = _sealed.read(self.file)
        except (OSError, _sealed.SealError):
            return None
        return state

    def remove(self) -> None:
        """Delete the batch; its results are in the store."""
        try:
            self.file.unlink(missing_ok=True)
            self.file.parent.rmdir()
        except OSError:
            return  # the folder has other batches, or does not exist
