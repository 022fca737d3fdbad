"""The paper's own curves, in the layout of a store, so that every claim is checked on them by the same rule.

A rule that fails on the numbers of the paper says something about the rule, not about a reproduction. The curves were
read out of the vector graphics that the authors published beside their code: means over their runs, one row per epoch.
They are not part of this package; `read` takes the folder that has them. What the claims gave on them is
recorded in `published.json`, and `python -m proxsps.experiments.published FOLDER` writes it again.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd

if TYPE_CHECKING:
    from proxsps.experiments.base import Frames

FOLDER = "PROXSPS_PUBLISHED"  # environment variable: where the curves are, for tests
RECORD = "published.json"
STRONGEST = 5e-4  # lambda of the experiments that are small enough for a CPU
CIRCULAR = {"norms-as-published"}  # compares with numbers of these very curves
SETTINGS = ["method", "schedule", "lr", "weight_decay"]


class Published(NamedTuple):
    """What the rule of a claim gives on the paper's own curves."""

    verdict: str
    measured: str


class Curves(NamedTuple):
    """A file of curves, and how much of it an experiment is compared with."""

    file: str
    epochs: int = 0  # of the paper that the experiment reaches; 0 for all
    only: float = 0.0  # the one lambda that the experiment has; 0 for all


RESNET56, RESNET110 = "cifar10-resnet56.csv", "cifar10-resnet110.csv"
SOURCES = {
    "matrix-fac1": Curves("matrix_fac1.csv"),
    "matrix-fac1-stability": Curves("matrix_fac1_stability_gap.csv"),
    "sensor": Curves("sensor1.csv"),
    "cifar10-resnet56": Curves(RESNET56),
    "cifar10-resnet110": Curves(RESNET110),
    "imagenet32-resnet110": Curves("imagenet32-resnet110.csv"),
    # An epoch of a twin has 20,000 of 50,000 images.
    "cifar10-resnet56-twin": Curves(RESNET56, epochs=5, only=STRONGEST),
    "cifar10-resnet110-twin": Curves(RESNET110, epochs=6, only=STRONGEST),
    "cifar10-resnet56-long": Curves(RESNET56, epochs=60, only=STRONGEST),
    "cifar10-resnet110-epoch": Curves(RESNET110, epochs=1, only=STRONGEST),
}


def read(name: str, folder: Path) -> Frames:
    """The published curves of an experiment: one run for each setting, without the columns that are not known."""
    source = SOURCES[name]
    rows = pd.read_csv(folder / source.file).rename(columns={"val_error_rolling5": "val_error"})
    if "gap" in rows:
        rows = _with_objective(rows, folder)
    if "val_accuracy" in rows:
        rows["val_error"] = 1 - rows["val_accuracy"]
    adamw = rows["method"] == "adamw"
    if "schedule" not in rows:
        steady = adamw | (source.file == SOURCES["sensor"].file)
        rows["schedule"] = steady.map({True: "constant", False: "sqrt"})
    if "lr" not in rows:
        rows["lr"] = adamw.map({True: 1e-3, False: 1.0})
    if source.only:
        rows = rows[rows["weight_decay"] == source.only]
    if source.epochs:
        rows = rows[rows["epoch"] <= source.epochs]
    return {"runs": _complete(rows)}


def _with_objective(rows: pd.DataFrame, folder: Path) -> pd.DataFrame:
    """Objectives at lambda = 1e-3 from a figure that shows them above their minimum, which another figure has.

    One curve is not there: SGD diverged at its largest alpha_0 with constant steps.
    """
    lam = 1e-3
    other = pd.read_csv(folder / SOURCES["matrix-fac1"].file)
    best = other.loc[other["weight_decay"] == lam, "objective"].min()
    lost = pd.DataFrame({"method": ["sgd"], "schedule": "constant", "lr": 0.7, "epoch": 1})
    return pd.concat([rows.assign(objective=rows["gap"] + best), lost]).assign(weight_decay=lam)


def _complete(rows: pd.DataFrame) -> pd.DataFrame:
    """Every epoch of each run once.

    The best curve of the stability figure leaves it at the lower edge, where it stays; rolling medians begin late, and
    get their first value.
    """
    every = range(1, int(rows["epoch"].max()) + 1)
    parts = []
    for number, (key, part) in enumerate(rows.groupby(SETTINGS, sort=False)):
        part = part.drop_duplicates("epoch").set_index("epoch").reindex(every).ffill().bfill()
        constants = dict(zip(SETTINGS, key, strict=True))
        parts.append(part.rename_axis("epoch").reset_index().assign(**constants, run=number, seed=0))
    return pd.concat(parts, ignore_index=True)


# The record


@cache
def _record() -> dict[str, dict[str, Published]]:
    text = resources.files("proxsps.experiments").joinpath(RECORD).read_text(encoding="utf-8")
    return {
        name: {claim: Published(**found) for claim, found in claims.items()}
        for name, claims in json.loads(text).items()
    }


def recorded(name: str) -> dict[str, Published]:
    """What the claims of an experiment gave on the paper's curves, by name; without those that lack numbers there."""
    return _record().get(name, {})


def judged(name: str, folder: Path) -> dict[str, Published]:
    """As `recorded`, computed from the curves in a folder."""
    from proxsps.experiments.catalogue import EXPERIMENTS
    from proxsps.experiments.sentences import NO_BOUNDS

    reached = f"epoch {SOURCES[name].epochs}: " if SOURCES[name].epochs else ""
    found = {}
    for claim in EXPERIMENTS[name].judge(read(name, folder)):
        if claim.checked and claim.name not in CIRCULAR:
            text = f"{reached}{claim.measured.removesuffix(NO_BOUNDS)}" + (f"; {claim.part}" if claim.part else "")
            found[claim.name] = Published(claim.verdict, text)
    return found


def main(folder: str) -> None:
    """Write the record again."""
    record: dict[str, Any] = {
        name: {claim: found._asdict() for claim, found in judged(name, Path(folder)).items()} for name in SOURCES
    }
    Path(__file__).with_name(RECORD).write_text(
        json.dumps(record, indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main(sys.argv[1])
