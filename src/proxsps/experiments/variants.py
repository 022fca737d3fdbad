"""Experiments with other options than the published ones. Each has a name and a store of its own."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from proxsps.experiments.catalogue import ENTRIES

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment

PUBLISHED = "published"
CONVENTIONS = (PUBLISHED, "text")
WITH_SENSORS = tuple(entry.name for entry in ENTRIES if entry.home == "sensor")
WITH_CONVENTION = tuple(entry.name for entry in ENTRIES if entry.home in ("matrix_fac", "sensor"))


def variants(chosen: Iterable[Experiment], convention: str = PUBLISHED, sensors: str = "") -> list[Experiment]:
    """The experiments with these options, in the same order; those that do not have them stay as they are.

    Args:
        chosen: published experiments.
        convention: "published": as the figures were made; "text": as the text of the paper defines loss and data.
        sensors: a file with another month of sensors.
    """
    experiments = list(chosen)
    check_options([experiment.name for experiment in experiments], convention, sensors)
    return [variant(experiment, convention, sensors) for experiment in experiments]


def variant(experiment: Experiment, convention: str = PUBLISHED, sensors: str = "") -> Experiment:
    """One experiment with these options, as far as it has them."""
    if experiment.name in WITH_SENSORS and (sensors or convention != PUBLISHED):
        from proxsps.experiments import sensor

        return sensor.month(sensors, convention)
    if experiment.name in WITH_CONVENTION and convention != PUBLISHED:
        from proxsps.experiments import matrix_fac

        both = [(matrix_fac.pair(number), matrix_fac.pair(number, convention)) for number in matrix_fac.TEXTS]
        others = {old.name: new for published, changed in both for old, new in zip(published, changed, strict=True)}
        return others[experiment.name]
    return experiment


def check_options(names: Iterable[str], convention: str = PUBLISHED, sensors: str = "") -> None:
    """Raise an error if none of these experiments has an option that is given. Nothing large is loaded for that."""
    chosen = set(names)
    if convention not in CONVENTIONS:
        raise ValueError(f"The convention is {' or '.join(CONVENTIONS)}, got {convention!r}.")
    if sensors:
        _require(chosen, WITH_SENSORS, f"--sensors {sensors}")
    if convention != PUBLISHED:
        _require(chosen, WITH_CONVENTION, f"--convention {convention}")


def _require(chosen: set[str], able: tuple[str, ...], option: str) -> None:
    if chosen.isdisjoint(able):
        raise ValueError(f"{option} is for {', '.join(able)}; none of them was named.")
