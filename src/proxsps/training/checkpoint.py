"""A run on disk: weights, optimizer and measurements after its last complete epoch.

Random numbers are drawn from the seed and the epoch, so that no state of a generator is needed to continue. A kill
leaves the last complete file. `torch.save` writes a zip archive; its comment holds the sha256 of all bytes before it.
The sha256 is checked first, and then only tensors and plain data are read.
"""

from __future__ import annotations

import hashlib
import io
import os
import struct
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from proxsps._files import replace_file
from proxsps.training.identity import TrainingSpec

FORMAT = 2
MARK = b"proxsps sha256 "
LENGTH = len(MARK) + 2 * hashlib.sha256().digest_size


class CheckpointError(ValueError):
    """A checkpoint that this run cannot continue from. It was not changed."""


def prepare(path: Path) -> None:
    """Create the folder of a checkpoint and write a file there, so that a run fails at once if this is not possible."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.test")
    try:
        replace_file(beside, bytes(4096))
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path} is not a checkpoint but a folder or a device. Choose another place.")


def save(path: Path, spec: TrainingSpec, model: nn.Module, optimizer: Optimizer, history: dict[str, Any]) -> None:
    """Write a checkpoint; `history` is plain data and tensors."""
    content = {
        "format": FORMAT,
        "run": spec.facts(),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "history": history,
    }
    stream = io.BytesIO()
    torch.save(content, stream)
    try:
        replace_file(path, sealed(stream.getvalue()))
    except OSError as error:
        raise _unwritable(path, error) from None


def sealed(archive: bytes) -> bytes:
    """A zip archive without a comment, with its digest as one."""
    body = archive[:-2] + struct.pack("<H", LENGTH)  # an archive ends with the length of its comment
    return body + _seal(body)


def load(path: Path, spec: TrainingSpec, device: torch.device) -> dict[str, Any]:
    """The content of a checkpoint of this run."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"The checkpoint {path} cannot be read ({error.strerror}).") from None
    if MARK not in data[-LENGTH:]:
        raise CheckpointError(
            f"{path} is not a checkpoint of a training run, is damaged, or was written by another version. "
            "Delete it to start the run again, or choose another place."
        )
    if _seal(data[:-LENGTH]) != data[-LENGTH:]:
        raise CheckpointError(
            f"The checkpoint {path} is damaged: its content does not have the digest it was written with. "
            "Delete it to start the run again, or restore it from a copy."
        )
    content = _read(path, data, device)
    wanted, saved = spec.facts(), content["run"]
    differing = [key for key in {**wanted, **saved} if wanted.get(key) != saved.get(key)]
    if differing:
        pairs = ", ".join(f"{key} {saved.get(key)!r} instead of {wanted.get(key)!r}" for key in differing)
        raise CheckpointError(f"{path} belongs to another run: it has {pairs}. Use another file, or those options.")
    done = len(content["history"]["metrics"])
    if done > spec.epochs:
        raise CheckpointError(f"{path} has {done} epochs already, more than {spec.epochs}. Choose more epochs.")
    return content


def incomplete(path: Path) -> CheckpointError:
    """The error for a checkpoint with other parts than those of a run."""
    return CheckpointError(
        f"The checkpoint {path} lacks parts of a run. Delete it to start the run again, or choose another place."
    )


def _read(path: Path, data: bytes, device: torch.device) -> dict[str, Any]:
    try:
        content = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        known = content["format"] == FORMAT
    except Exception:  # of many kinds: torch's reader fails in many ways on bytes that are not a checkpoint
        raise incomplete(path) from None
    if not known:
        raise CheckpointError(f"{path} was written by another version. Delete it, or choose another place.")
    parts = {name: content.get(name) for name in ("run", "model", "optimizer", "history")}
    if not all(isinstance(part, dict) for part in parts.values()) or "metrics" not in parts["history"]:
        raise incomplete(path)
    return content


def _seal(body: bytes) -> bytes:
    return MARK + hashlib.sha256(body).hexdigest().encode()


def _unwritable(path: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"The checkpoint {path} cannot be written ({error.strerror}). Choose another place.")
