"""Draw the pictures of `proxsps reproduce no-lr`: all tasks, one for the first page.

python docs/img/no_lr.py [OUT] [FOLDER]
"""

import sys
from pathlib import Path

import pandas as pd

from proxsps import figures
from proxsps.experiments import EXPERIMENTS

FIRST = (
    "adamw",
    "schedule-free",
    "muon",
    "schedule-free-sps",
    "schedule-free-sps-spectral",
)

out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
folder = Path(sys.argv[2] if len(sys.argv) > 2 else Path(__file__).parent)
trials = pd.read_parquet(out / "no-lr" / "trials.parquet")
(drawing,) = EXPERIMENTS["no-lr"].drawings
print(
    f"Picture: {figures.save(drawing.draw({'trials': trials}), folder / 'no-lr.png')}"
)
one = trials[(trials["task"] == "transformer") & trials["method"].isin(FIRST)]
print(
    f"Picture: {figures.save(figures.over_lr(one), folder / 'no-lr-transformer.svg')}"
)
