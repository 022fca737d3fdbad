"""Print tables from `proxsps reproduce no-lr` and `no-lr-transformer`.

python docs/tables/when_to_use.py [OUT] [PAGE ...]

Pages that are named get each table between its lines "<!-- NAME -->", if any.
"""

import sys
from pathlib import Path

import pandas as pd

TASKS = {  # with the unit of their numbers, and what is better
    "transformer": "transformer: loss ↓",
    "gpt": "GPT: loss ↓",
    "gru": "GRU: loss ↓",
    "resnet": "ResNet8: % correct ↑",
    "resnet-bn": "ResNet8, batch norm: % correct ↑",
    "fine-tuning": "fine-tuning: % correct ↑",
    "digits": "digits: % correct ↑",
    "digits-1e-4": "digits, decay 1e-4: thousandths ↓",
    "digits-1e-3": "digits, decay 1e-3: thousandths ↓",
    "matrix": "matrices: thousandths ↓",
    "l1": "l1 regression: thousandths ↓",
}
UNSET, BEST = object(), object()  # no lr, and that of the grid with the best result
SPECTRAL = ("schedule-free-sps-spectral", UNSET, ("none",))
FREE = ("schedule-free-sps", UNSET, ("none",))
EUCLIDEAN = ("prox-sps-momentum", UNSET, ("none",))
TUNED = ("none", "cosine")
COLUMNS = {  # of each table: method, lr, and endings of which the best counts
    "when-to-use": {
        "**ours**, spectral": SPECTRAL,
        "**ours**, Adam's metric": FREE,
        "**ours**, ProxSPS": EUCLIDEAN,
        "SGD, tuned": ("sgd-momentum", BEST, ("none",)),
        "AdamW, 1e-3": ("adamw", 1e-3, ("none",)),
        "AdamW, tuned": ("adamw", BEST, TUNED),
        "schedule-free, tuned": ("schedule-free", BEST, ("none",)),
        "Muon, tuned": ("muon", BEST, TUNED),
    },
    "no-lr-ours": {
        "schedule-free, spectral": SPECTRAL,
        "schedule-free": FREE,
        "schedule-free, `L2`": ("schedule-free-sps-l2", UNSET, ("none",)),
        "Adam": ("prox-sps-adam", UNSET, ("none",)),
        "Adam, cool-down": ("prox-sps-adam", UNSET, ("cool-down",)),
        "Adam, `L2`": ("prox-sps-adam-l2", UNSET, ("none",)),
        "ProxSPS": EUCLIDEAN,
        "ProxSPS, cool-down": ("prox-sps-momentum", UNSET, ("cool-down",)),
    },
    "no-lr-baselines": {
        "SGD, momentum": ("sgd-momentum", BEST, ("none",)),
        "AdamW": ("adamw", BEST, ("none",)),
        "AdamW, cosine": ("adamw", BEST, ("cosine",)),
        "schedule-free AdamW": ("schedule-free", BEST, ("none",)),
        "Muon": ("muon", BEST, ("none",)),
        "Muon, cosine": ("muon", BEST, ("cosine",)),
        "Prodigy": ("prodigy", 1.0, ("none",)),
        "ScheduleFree+": ("schedule-free-plus", 1.0, ("none",)),
    },
}


def table(trials, name="when-to-use"):
    """The table as lines of Markdown; the best of a row is bold."""
    columns = COLUMNS[name]
    lines = [
        "| task | " + " | ".join(columns) + " |",
        "| --- |" + " ---: |" * len(columns),
    ]
    for task, title in TASKS.items():
        rows = trials[trials["task"] == task]
        if len(rows):
            found = cells(rows, columns.values(), name == "no-lr-baselines")
            lines.append(f"| {title} | {' | '.join(found)} |")
    return lines


def cells(rows, columns, lrs):
    """The numbers of a row: mean and half of the range over seeds, and the best lr."""
    higher = rows["metric"].iloc[0] == "accuracy"
    scale = (
        100 if higher else 1000 if "thousandths" in TASKS[rows["task"].iloc[0]] else 1
    )
    rows = rows.assign(value=rows["value"] * scale)
    found = [final(rows, *column, higher) for column in columns]
    means = [own.value for own in found if own is not None and own.value == own.value]
    best = (max if higher else min)(means)
    style = "{:.1f}" if best > 10 else "{:.3f}" if scale == 1 else "{:#.3g}"
    best = style.format(best)
    texts = [cell(own, style, best) for own in found]
    return [
        f"{text} ({own.lr:g})" if lrs and text and lr is BEST else text
        for text, own, (_, lr, _) in zip(texts, found, columns, strict=True)
    ]


def cell(own, style, best):
    """A mean with its spread; empty if there was no such run."""
    if own is None:
        return ""
    if own.value != own.value:
        return "diverged"
    text = style.format(own.value)
    places = len(text.partition(".")[2])
    spread = f"{own.spread:.{places}f}"
    spread = spread.removeprefix("0") if places else spread
    return f"{f'**{text}**' if text == best else text}\N{NO-BREAK SPACE}±{spread}"


def final(rows, method, lr, endings, higher):
    """Mean (NaN if a run diverged), half range and lr; None without such a run."""
    own = rows[(rows["method"] == method) & rows["ending"].isin(endings)]
    if lr is BEST:
        own = own[own["lr"].notna()]
    else:
        own = own[own["lr"].isna() if lr is UNSET else own["lr"] == lr]
    if own.empty:
        return None
    means = own.groupby(["lr", "ending"], dropna=False)["value"].agg(
        value=lambda values: values.mean(skipna=False),
        spread=lambda values: (values.max() - values.min()) / 2,
    )
    means = means.reset_index().sort_values("value", ascending=not higher)
    return next(means.itertuples())  # NaN is last


def long_table(trials):
    """The run of 10,000 steps: one row per method and lr, one column per ending."""
    from proxsps.experiments import EXPERIMENTS

    found = EXPERIMENTS["no-lr-transformer"].table({"trials": trials})
    found = found.rename(columns={"none": "constant"})
    lines = ["| " + " | ".join(found.columns) + " |"]
    lines.append("| --- | --- |" + " ---: |" * (len(found.columns) - 2))
    for method, lr, *losses in found.itertuples(index=False):
        texts = [f"{float(loss):.3f}" if loss else "" for loss in losses]
        lines.append(f"| {' | '.join([method, lr, *texts])} |")
    return lines


def put(page, name, lines):
    """Replace what is between the two marks of a page, if it has them."""
    mark, text = f"<!-- {name} -->", page.read_text()
    if mark in text:
        before, _, after = text.split(mark)
        page.write_text("\n".join([before + mark, "", *lines, "", mark + after]))


if __name__ == "__main__":
    out = Path(sys.argv[1] if len(sys.argv) > 1 else "out")
    trials = pd.read_parquet(out / "no-lr" / "trials.parquet")
    tables = {name: table(trials, name) for name in COLUMNS}
    long = out / "no-lr-transformer" / "trials.parquet"
    if long.exists():
        tables["no-lr-transformer"] = long_table(pd.read_parquet(long))
    for name, lines in tables.items():
        print("\n".join([f"{name}:", *lines, ""]))
        for page in sys.argv[2:]:
            put(Path(page), name, lines)
