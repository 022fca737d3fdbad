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
figure = figures.over_lr(one)
print(f"Picture: {figures.save(figure, folder / 'no-lr-transformer.svg')}")
(legend,) = figure.legends
labels = [text.get_text() for text in legend.texts]
legend.remove()
figure.set_size_inches(5.2, 5.0)  # for phones
figure.legend(legend.legend_handles, labels, loc="outside lower center", ncols=2)
figures.save(figure, folder / "no-lr-transformer-narrow.svg")
