"""Print the table "when to use it, when not" from `proxsps reproduce no-lr`.

python docs/tables/when_to_use.py [OUT] [PAGE ...]

Pages that are named get the table between their lines "<!-- when-to-use -->".
"""

import sys
from pathlib import Path

import pandas as pd

MARK = "<!-- when-to-use -->"
TASKS = {
    "digits": "digits, MLP: accuracy",
    "transformer": "text, small transformer: validation loss",
    "resnet": "CIFAR-10, ResNet8 without batch norm: accuracy",
    "l1": "l1 logistic regression: objective gap",
    "matrix": "matrix factorisation: objective",
}
BEST = object()  # the lr of the grid with the best result
COLUMNS = {
    "ProxSPSAdam, no lr": ("prox-sps-adam", None),
    "ProxSPS, momentum, no lr": ("prox-sps-momentum", None),
    "SGD with momentum, best lr": ("sgd-momentum", BEST),
    "AdamW, lr=1e-3": ("adamw", 1e-3),
    "AdamW, best lr": ("adamw", BEST),
    "ProxSPS, lr=1": ("prox-sps", 1.0),
    "ProxSPS, best lr": ("prox-sps", BEST),
}


def table(trials):
    """The table as lines of Markdown; the best of a row is bold."""
    plain = trials[trials["ending"] == "none"]
    lines = [
        "| task | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * len(COLUMNS),
    ]
    for task, title in TASKS.items():
        rows = plain[plain["task"] == task]
        if len(rows):
            lines.append(f"| {title} | {' | '.join(cells(rows))} |")
    return lines


def cells(rows):
    higher = rows["metric"].iloc[0] == "accuracy"
    values = [final(rows, *column, higher) for column in COLUMNS.values()]
    best = (max if higher else min)(value for value in values if value == value)
    shown = "{:.1%}" if higher else "{:#.3g}"
    texts = ["diverged" if value != value else shown.format(value) for value in values]
    return [f"**{text}**" if text == shown.format(best) else text for text in texts]


def final(rows, method, lr, higher):
    """Mean over seeds; NaN where a run diverged."""
    means = rows[rows["method"] == method].groupby("lr", dropna=False)["value"]
    means = means.agg(lambda values: values.mean(skipna=False))
    if lr is BEST:
        tuned = means[means.index.notna()]
        return tuned.max() if higher else tuned.min()
    return means[means.index.isna() if lr is None else means.index == lr].iloc[0]


def put(page, lines):
    """Replace what is between the two marks of a page."""
    before, _, after = page.read_text().split(MARK)
    page.write_text("\n".join([before + MARK, "", *lines, "", MARK + after]))


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    lines = table(pd.read_parquet(out / "no-lr" / "trials.parquet"))
    print("\n".join(lines))
    for page in sys.argv[2:]:
        put(Path(page), lines)
