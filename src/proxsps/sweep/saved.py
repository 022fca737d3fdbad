"""The state of a running batch on disk: a kill costs half a minute, not the whole batch."""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import proxsps
from proxsps._files import replace_file
from proxsps.sweep.files import StoreError
from proxsps.sweep.spec import RunSpec

FORMAT = 2
EVERY = 30.0  # seconds between two saves
DIGITS = 64  # of the digest at the head of a file

State = dict[str, Any]  # of tensors and numbers


class SavedBatch:
    """One file for one batch of specs, run by this version of the package and of torch.

    The file is a digest and the output of `torch.save` for tensors and numbers. A damaged file is ignored: the batch is
    then run from its start, with the same result.
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
        buffer = io.BytesIO()
        torch.save(state, buffer)
        payload = buffer.getvalue()
        try:
            replace_file(self.file, hashlib.sha256(payload).hexdigest().encode() + payload)
        except OSError as error:
            reason = error.strerror or error
            raise StoreError(f"Cannot write {self.file}: {reason}. Choose another folder with --out.") from None
        self.last = time.monotonic()  # so that slow disks do not spend all their time on saves

    def load(self) -> State | None:
        """What was saved, or None."""
        try:
            content = self.file.read_bytes()
        except OSError:
            return None
        digest, payload = content[:DIGITS], content[DIGITS:]
        if hashlib.sha256(payload).hexdigest().encode() != digest:
            return None
        state: State = torch.load(io.BytesIO(payload), weights_only=True)
        return state

    def remove(self) -> None:
        """Delete the batch; its results are in the store."""
        try:
            self.file.unlink(missing_ok=True)
            self.file.parent.rmdir()
        except OSError:
            return  # the folder has other batches, or does not exist
