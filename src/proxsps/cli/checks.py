"""Checks before work starts: that results can be written, and that numbers are not far too large."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import typer

PROBE = 64 * 1024  # bytes that a folder must have room for
MOST_STEPS = 100_000_000  # over all runs of a command: one number per step is kept in memory


def check_folder(folder: Path) -> None:
    """Raise an error if nothing can be written in a folder, which need not exist yet. No file is left behind."""
    try:
        place = _nearest(folder)
        with tempfile.TemporaryFile(dir=place) as stream:
            stream.write(bytes(PROBE))
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        reason = error.strerror or str(error)
        raise ValueError(f"Cannot use {folder}: {reason}. Choose another folder with --out.") from None


def _nearest(folder: Path) -> Path:
    """The folder, or the first existing folder above it."""
    for place in (folder, *folder.absolute().parents):
        try:
            os.stat(place)
        except FileNotFoundError:
            if place.is_symlink():  # to nowhere
                raise
            continue
        os.listdir(place)  # raises a clear error if it is a file
        return place
    return folder


def check_files(folder: Path, *names: str) -> None:
    """Raise an error if files of these names cannot be written in a folder, or replaced."""
    check_folder(folder)
    for file in (folder / name for name in names):
        if file.is_dir():
            raise ValueError(f"Cannot write {file}: it is a folder. Choose another folder with --out.")


def at_most(limit: int) -> Callable[[typer.CallbackParam, int | None], int | None]:
    """A callback for options that raises an error for larger numbers."""

    def check(param: typer.CallbackParam, value: int | None) -> int | None:
        if value is not None and value > limit:
            raise ValueError(f"{param.opts[0]} must be at most {limit:,}, got {_short(value)}.")
        return value

    return check


def check_steps(runs: int, epochs: int, steps: int) -> None:
    """Raise an error if runs have more steps than can be kept in memory."""
    if runs * epochs * steps > MOST_STEPS:
        raise ValueError(
            f"{runs} runs of {epochs} epochs, {steps} steps each, are {runs * epochs * steps:,} steps; at most "
            f"{MOST_STEPS:,} fit into memory. Choose fewer --epochs."
        )


def _short(value: int) -> str:
    text = str(value)
    return text if len(text) <= 30 else f"a number of {len(text)} digits"
