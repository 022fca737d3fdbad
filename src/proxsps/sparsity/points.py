"""Finished points of a path over the strength, on disk, in files with a digest (see `proxsps._sealed`)."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from proxsps import _sealed


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


class State(NamedTuple):
    """Where a training can continue: the tensors of the network, and the state of the optimizer if the path has one."""

    model: dict[str, Tensor]
    optimizer: dict[str, Any]


class Saved(NamedTuple):
    """A finished point, and the state after it."""

    point: Point
    state: State


class Folder:
    """Finished points of a path on disk; without a folder, nothing is kept.

    Args:
        folder: where the points are.
        facts: plain data that all points of a path have in common; "tensors" are the shapes of the network.
        weights: names of the tensors that must be finite.
    """

    def __init__(self, folder: str | Path | None, facts: dict[str, Any], weights: Collection[str] = ()) -> None:
        self.folder, self.facts, self.weights = None if folder is None else Path(folder), facts, weights
        try:
            _sealed.unsealed(_sealed.sealed(facts))
        except Exception:  # of many kinds: a setting may be anything that cannot be saved
            raise ValueError("settings must be plain data: numbers, text, lists and dictionaries.") from None
        if self.folder is not None:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise PathError(f"The folder {folder} cannot be made ({error.strerror}). Choose another.") from None

    def load(self, index: int, strength: float) -> Saved | None:
        """A point, None if there is none."""
        file = self._file(index)
        if file is None or not file.exists():
            return None
        try:
            content = _sealed.read(file)
        except OSError as error:
            raise PathError(f"{file} cannot be read ({error.strerror}). Choose another folder.") from None
        except _sealed.SealError as error:
            raise _unusable(file, str(error)) from None
        found, about = _point(file, content), content["facts"]
        if about != self.facts or not math.isclose(found.point.strength, strength, rel_tol=1e-6):
            differing = [key for key in {**about, **self.facts} if about.get(key) != self.facts.get(key)]
            what = ", ".join(f"{key} {about.get(key)!r} instead of {self.facts.get(key)!r}" for key in differing)
            other = f"strength {found.point.strength:.6g} instead of {strength:.6g}"
            raise PathError(
                f"{file} belongs to another path: it has {what or other}. Choose another folder, or use those options."
            )
        if {name: list(tensor.shape) for name, tensor in found.state.model.items()} != self.facts["tensors"]:
            raise _unusable(file, "has the tensors of another model")
        if not finite(found.state.model[name] for name in self.weights):
            raise _unusable(file, "has weights that are not finite")
        return found

    def save(self, index: int, point: Point, state: State) -> None:
        """Write a point; a kill or a full disk leaves no incomplete file."""
        file = self._file(index)
        if file is None:
            return
        try:
            _sealed.write(file, {"point": asdict(point), "facts": self.facts, **state._asdict()})
        except OSError as error:
            raise PathError(
                f"{file} cannot be written ({error.strerror}). Make room, or choose another folder; the same call "
                "continues from the points that were written."
            ) from None

    def _file(self, index: int) -> Path | None:
        return None if self.folder is None else self.folder / f"point-{index:03d}.pt"


def _point(file: Path, content: Any) -> Saved:
    """The point in the content of a file, with all its parts and no others."""
    if not isinstance(content, dict) or content.keys() != {"point", "facts", *State._fields}:
        raise _unusable(file, "does not have the parts of a point")
    numbers, state = content["point"], content["model"]
    if not all(isinstance(part, dict) for part in content.values()):
        raise _unusable(file, "does not have the parts of a point")
    if numbers.keys() != {field.name for field in fields(Point)} or not _all_are(numbers, (int, float)):
        raise _unusable(file, "does not have the numbers of a point")
    if not _all_are(state, Tensor):
        raise _unusable(file, "does not have the tensors of a network")
    return Saved(Point(**numbers), State(state, content["optimizer"]))


def _all_are(values: dict[str, Any], kinds: type | tuple[type, ...]) -> bool:
    return all(isinstance(value, kinds) for value in values.values())


def finite(tensors: Iterable[Tensor]) -> bool:
    """Whether all entries are finite."""
    return all(bool(tensor.isfinite().all()) for tensor in tensors)


def _unusable(file: Path, reason: str) -> PathError:
    return PathError(f"{file} {reason}. Delete it to train this strength again, or restore it from a copy.")


__all__ = ["Folder", "PathError", "Point", "Saved", "State", "finite"]
