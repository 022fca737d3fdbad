"""Print the table "when to use it, when not" from `proxsps reproduce no-lr`.

python docs/tables/when_to_use.py [OUT] [PAGE ...]

Pages that are named get the table between their lines "<!-- when-to-use -->".
"""

import sys
from pathlib import Path

import pandas as pd

MARK = "<!-- when-to-use -->"
TASKS = {
    "transformer": "text, small transformer: validation loss",
    "gpt": "text, GPT of 0.8 M parameters: validation loss",
    "gru": "text, GRU: validation loss",
    "resnet": "CIFAR-10, ResNet8 without batch norm: accuracy",
    "resnet-bn": "CIFAR-10, ResNet8 with batch norm: accuracy",
    "fine-tuning": "CIFAR-10, fine-tuning a ResNet8: accuracy",
    "digits": "digits, MLP: accuracy",
    "l1": "l1 logistic regression: objective gap",
    "matrix": "matrix factorisation: objective",
}
BEST = object()  # the lr of the grid with the best result
COLUMNS = {  # method, lr and ending
    "ScheduleFreeSPS, spectral": ("schedule-free-sps-spectral", None, "none"),
    "ScheduleFreeSPS": ("schedule-free-sps", None, "none"),
    "ProxSPSAdam": ("prox-sps-adam", None, "none"),
    "ProxSPS, momentum": ("prox-sps-momentum", None, "none"),
    "AdamW, lr=1e-3": ("adamw", 1e-3, "none"),
    "AdamW, best lr": ("adamw", BEST, "none"),
    "AdamW, best cosine": ("adamw", BEST, "cosine"),
    "schedule-free AdamW, best lr": ("schedule-free", BEST, "none"),
    "Muon, best lr": ("muon", BEST, "none"),
}


def table(trials):
    """The table as lines of Markdown; the best of a row is bold."""
    lines = [
        "| task | " + " | ".join(COLUMNS) + " |",
        "| --- |" + " ---: |" * len(COLUMNS),
    ]
    for task, title in TASKS.items():
        rows = trials[trials["task"] == task]
        if len(rows):
            lines.append(f"| {title} | {' | '.join(cells(rows))} |")
    return lines


def cells(rows):
    higher = rows["metric"].iloc[0] == "accuracy"
    values = [final(rows, *column, higher) for column in COLUMNS.values()]
    best = (max if higher else min)(
        value for value in values if value is not None and value == value
    )
    shown = "{:.1%}" if higher else "{:#.3g}"
    texts = [
        "" if value is None else "diverged" if value != value else shown.format(value)
        for value in values
    ]
    return [f"**{text}**" if text == shown.format(best) else text for text in texts]


def final(rows, method, lr, ending, higher):
    """Mean over seeds; NaN where a run diverged, None if there was no such run."""
    own = rows[(rows["method"] == method) & (rows["ending"] == ending)]
    means = own.groupby("lr", dropna=False)["value"].agg(
        lambda values: values.mean(skipna=False)
    )
    chosen = (
        means.index.notna()
        if lr is BEST
        else means.index.isna()
        if lr is None
        else means.index == lr
    )
    means = means[chosen]
    return None if means.empty else means.max() if higher else means.min()


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
