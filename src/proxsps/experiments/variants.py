"""Experiments with other options than the published ones. Each has a name and a store of its own."""

from __future__ import annotations

from collections.abc import Iterable

from proxsps.experiments import matrix_fac, sensor
from proxsps.experiments.base import Experiment

CONVENTIONS = ("published", "text")


def variants(chosen: Iterable[Experiment], convention: str = "published", sensors: str = "") -> list[Experiment]:
    """The experiments with these options, in the same order; those that do not have them stay as they are.

    Args:
        chosen: published experiments.
        convention: "published": as the figures were made; "text": as the text of the paper defines loss and data.
        sensors: a file with another month of sensors.
    """
    experiments = list(chosen)
    if convention not in CONVENTIONS:
        raise ValueError(f"The convention is {' or '.join(CONVENTIONS)}, got {convention!r}.")
    if sensors:
        _require(experiments, [sensor.SENSOR], f"--sensors {sensors}")
    others = {sensor.SENSOR.name: sensor.month(sensors, convention)}
    for number in matrix_fac.TEXTS:
        both = zip(matrix_fac.pair(number), matrix_fac.pair(number, convention), strict=True)
        others |= {published.name: variant for published, variant in both}
    if convention != "published":
        _require(experiments, [*matrix_fac.EXPERIMENTS, sensor.SENSOR], f"--convention {convention}")
    return [others.get(experiment.name, experiment) for experiment in experiments]


def _require(experiments: list[Experiment], able: list[Experiment], option: str) -> None:
    """Raise an error if no experiment has this option."""
    names = [experiment.name for experiment in able]
    if not any(experiment.name in names for experiment in experiments):
        raise ValueError(f"{option} is for {', '.join(names)}; none of them was named.")
