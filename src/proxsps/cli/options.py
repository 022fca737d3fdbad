"""The options that commands about experiments share, each list once."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from enum import StrEnum
from functools import cached_property, update_wrapper
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from proxsps.cli.checks import at_most
from proxsps.cli.console import DEFAULT_OUT
from proxsps.experiments.variants import PUBLISHED, Options

EngineName = StrEnum("EngineName", ["batched", "single", "processes", "ray"])
BATCH = 300  # as in `sweep.engines`, which loads torch


def use_data(folder: Path | None) -> Path | None:
    """Read data from this folder, in this process and in the processes that it starts."""
    if folder is not None:
        os.environ["PROXSPS_DATA"] = str(folder)
    return folder


Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", callback=use_data, help="Folder of data sets; default: PROXSPS_DATA."),
]


@dataclass
class Asked:
    """Which experiments, where their results are, and what differs from the published ones."""

    names: Annotated[
        list[str],
        typer.Argument(
            metavar="EXPERIMENT...", help="Names as in `proxsps list`, `all`, or your own Python file, executed."
        ),
    ]
    folder: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Folder for results; each experiment has its own folder in it.")
    ] = DEFAULT_OUT
    data: Data = None
    convention: Annotated[
        str,
        typer.Option(
            metavar="published|text",
            help="Loss and data of matrix-fac and sensor: as in the published figures, or as in the paper's text.",
        ),
    ] = PUBLISHED
    sensors: Annotated[
        str, typer.Option(metavar="FILE", help="For sensor: a file of another month, in the same format.")
    ] = ""
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUES",
            help="Your own grid: lr=0.1,1, lam=1e-3, method=prox-sps,sgd, sgd.lr=0.1, schedule=sqrt, regularizer=l1.",
        ),
    ] = None

    @cached_property
    def options(self) -> Options:
        """What differs from the published experiments."""
        return Options(self.convention, self.sensors, tuple(self.settings or ()))


@dataclass
class Effort:
    """How much is run, and by which engine."""

    seeds: Annotated[
        int | None, typer.Option(min=1, callback=at_most(10**4), help="Seeds for each setting; default: as published.")
    ] = None
    epochs: Annotated[
        int | None, typer.Option(min=1, callback=at_most(10**6), help="Epochs of each run; default: as published.")
    ] = None
    engine: Annotated[
        EngineName,
        typer.Option(help="batched: many runs as one program; single: one by one; processes: a pool; ray: a cluster."),
    ] = EngineName.batched
    address: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Address of a Ray cluster, or `auto`; default: the cores of this machine."
        ),
    ] = None
    per_batch: Annotated[
        int | None,
        typer.Option("--runs-per-batch", min=1, help=f"Runs in one tensor program (batched, ray); default: {BATCH}."),
    ] = None

    def check(self) -> None:
        """Raise an error for an option that the engine does not have."""
        if self.address and self.engine != "ray":
            raise ValueError(f"--address names a Ray cluster: use it with --engine ray, not {self.engine}.")
        if self.per_batch and self.engine not in ("batched", "ray"):
            raise ValueError(f"--runs-per-batch works only with --engine batched or ray; {self.engine} has no batches.")


def with_options(command: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses: each of their fields is an option on the command line."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}
    options: list[inspect.Parameter] = []
    for name, own in inspect.signature(command).parameters.items():
        kinds = get_type_hints(groups[name], include_extras=True) if name in groups else {name: hints[name]}
        defaults = inspect.signature(groups[name]).parameters if name in groups else {name: own}
        options += [
            inspect.Parameter(field, own.KEYWORD_ONLY, default=defaults[field].default, annotation=kind)
            for field, kind in kinds.items()
        ]

    def called(**given: Any) -> None:
        bundles = {
            name: kind(**{field.name: given.pop(field.name) for field in fields(kind)}) for name, kind in groups.items()
        }
        command(**bundles, **given)

    update_wrapper(called, command).__dict__["__signature__"] = inspect.Signature(options)
    return called
