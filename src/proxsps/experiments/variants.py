"""Experiments with other options than the published ones. Each has its own name and store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from proxsps.experiments.catalogue import CATALOGUE, ENTRIES, EXPERIMENTS
from proxsps.experiments.grids import parse_settings, with_settings

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment

PUBLISHED = "published"
CONVENTIONS = (PUBLISHED, "text")
WITH_SENSORS = tuple(entry.name for entry in ENTRIES if entry.home == "sensor")
WITH_GRID = tuple(entry.name for entry in ENTRIES if entry.epochs)  # trials have no epochs, and no grid of specs
WITH_CONVENTION = tuple(entry.name for entry in ENTRIES if entry.home in ("matrix_fac", "sensor"))


class Options(NamedTuple):
    """Options that may differ from the published ones."""

    convention: str = PUBLISHED  # "text": loss and data as the text of the paper defines them, not as its figures
    sensors: str = ""  # a file with another month of sensors
    settings: tuple[str, ...] = ()  # of your own grid, as `grids.parse_settings` reads them


def variant(experiment: Experiment, options: Options) -> Experiment:
    """One experiment with these options, as far as it has them."""
    return with_settings(_other_data(experiment, options.convention, options.sensors), options.settings)


def _other_data(experiment: Experiment, convention: str, sensors: str) -> Experiment:
    if experiment.name in WITH_SENSORS and (sensors or convention != PUBLISHED):
        from proxsps.experiments import sensor

        return sensor.month(sensors, convention)
    if experiment.name in WITH_CONVENTION and convention != PUBLISHED:
        from proxsps.experiments import matrix_fac

        both = [(matrix_fac.pair(number), matrix_fac.pair(number, convention)) for number in matrix_fac.TEXTS]
        others = {old.name: new for published, changed in both for old, new in zip(published, changed, strict=True)}
        return others[experiment.name]
    return experiment


def check_options(names: Iterable[str], options: Options, everything: bool = False) -> None:
    """Raise an error if an option is for none of these experiments, or cannot be used. Nothing large is loaded.

    Args:
        names: the experiments that were named.
        options: what was passed.
        everything: whether `all` was named too, which has an experiment for every option.
    """
    chosen = {*names, *(entry.name for entry in ENTRIES if everything)}
    if options.convention not in CONVENTIONS:
        raise ValueError(f"The convention is {' or '.join(CONVENTIONS)}, got {options.convention!r}.")
    if options.sensors:
        _require(chosen, WITH_SENSORS, f"--sensors {options.sensors}")
        _check_month(options.sensors)
    if options.convention != PUBLISHED:
        _require(chosen, WITH_CONVENTION, f"--convention {options.convention}")
    if options.settings:
        parse_settings(options.settings)
        without = [] if everything else sorted(name for name in chosen if not _has_grid(name))
        if without:
            raise ValueError(f"--set changes a grid of runs; {', '.join(without)} has none.")


def _has_grid(name: str) -> bool:
    own = None if name in CATALOGUE else EXPERIMENTS.get(name)
    return name in WITH_GRID if name in CATALOGUE else own is None or own.specs is not None


def _require(chosen: set[str], able: tuple[str, ...], option: str) -> None:
    if chosen.isdisjoint(able):
        missing = f"{able[0]} was not named" if len(able) == 1 else "none of them was named"
        raise ValueError(f"{option} is for {', '.join(able)}; {missing}.")


def _check_month(file: str) -> None:
    """Raise an error if a file is not a month of sensors, before anything is run."""
    from proxsps.problems.datasets import DataError, parse_sensors, read_month

    if not file.endswith(".csv"):
        raise ValueError(f"--sensors takes a .csv file, or the name of one in the folder of data; got {file!r}.")
    try:
        parse_sensors(read_month(file), file, published=False)
    except DataError as error:
        raise ValueError(f"--sensors {file}: {error}") from None
