"""Finished points of a path over the strength, on disk."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from proxsps._files import replacing
from proxsps.sparsity.inputs import first_line


class PathError(ValueError):
    """A folder that this path cannot continue from. It was not changed."""


@dataclass(frozen=True)
class Point:
    """A network trained at one strength."""

    strength: float
    accuracy: float
    size: float  # share of parameters that the shrunk model has, or of weights that are not zero, by `kind`
    zeros: float  # share of weights that are zero
    parameters: int  # of the shrunk model
    dead_units: int
    units: int


class Folder:
    """Finished points of a path on disk; without a folder, nothing is kept."""

    def __init__(self, folder: str | Path | None, facts: dict[str, Any]) -> None:
        self.folder, self.facts = None if folder is None else Path(folder), facts
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PathError(f"The folder {folder} cannot be made ({error.strerror}). Choose another.") from None

    def load(self, index: int, strength: float) -> dict[str, Any] | None:
        """The content of a point, None if there is none."""
        if self.folder is None or not self._file(index).exists():
            return None
        file = self._file(index)
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
            saved, about = content["point"]["strength"], content["facts"]
        except Exception as error:  # of many kinds: bytes that are no checkpoint
            raise PathError(
                f"{file} is not a point of a path, or is damaged ({first_line(error)}). Move it away."
            ) from None
        if about != self.facts or not math.isclose(saved, strength, rel_tol=1e-6):
            differing = [key for key in {**about, **self.facts} if about.get(key) != self.facts.get(key)]
            what = ", ".join(f"{key} {about.get(key)!r} instead of {self.facts.get(key)!r}" for key in differing)
            raise PathError(
                f"{file} belongs to another path: it has {what or f'strength {saved:.6g} instead of {strength:.6g}'}. "
                "Choose another folder, or use those options."
            )
        return content

    def save(self, index: int, strength: float, point: Point, state: dict[str, Any]) -> None:
        """Write a point; a kill leaves no incomplete file."""
        if self.folder is None:
            return
        file = self._file(index)
        try:
            with replacing(file) as partial:
                torch.save({"point": asdict(point), "facts": self.facts, "model": state}, partial)
        except (OSError, RuntimeError) as error:
            raise PathError(f"{file} cannot be written ({first_line(error)}). Choose another folder.") from None

    def _file(self, index: int) -> Path:
        return self.folder / f"point-{index:03d}.pt"


__all__ = ["Folder", "PathError", "Point"]
