"""An experiment as data: what to run, what to draw, and which sentences of the paper it checks."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from proxsps.experiments.catalogue import CORES
from proxsps.experiments.published import Published, recorded
from proxsps.sweep.spec import RunSpec
from proxsps.sweep.store import Store, StoreError, TrialStore

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from proxsps.sweep.engines import Engine
    from proxsps.sweep.trials import Trial

Frames = dict[str, pd.DataFrame]
RESERVED = {"all", "report.html", "sparsify", "theory", "train"}  # a word of commands, and what they write beside


def check_name(name: str, what: str, reserved: Collection[str] = ()) -> None:
    """Raise an error unless this can be the name of a file or folder of results, in the folder that it belongs to."""
    if not isinstance(name, str) or not re.fullmatch(r"[\w+-][\w.+-]*", name):
        raise ValueError(
            f"{what} is named {name!r}. Its results are written under this name, which may only have letters, digits, "
            "hyphens, underscores, plus signs, and dots that are not at the start."
        )
    if name.lower() in reserved:  # some file systems do not tell upper from lower case
        raise ValueError(f"{what} is named {name!r}, which means something else in commands. Choose another name.")


HOLDS, IN_PART, FAILS = VERDICTS = ("holds", "holds in part", "does not hold")


@dataclass(frozen=True)
class Claim:
    """A sentence of the paper's discussion, the number that tests it, and the verdict."""

    name: str
    gist: str
    quantity: str
    rule: str
    measured: str
    holds: bool  # as a whole
    part: str = ""  # if not as a whole: the part that holds, and why not all of it
    strict: str = ""  # what a stricter rule would have measured, where the rule was chosen with data in sight
    checked: bool = True  # False if numbers are missing
    published: Published | None = None  # the same rule on the paper's own curves

    @property
    def verdict(self) -> str:
        """One of `VERDICTS`."""
        return HOLDS if self.holds else IN_PART if self.part else FAILS


@dataclass(frozen=True)
class Drawing:
    """A figure and what it shows."""

    name: str
    caption: str  # "{runs}" in it stands for the number of runs of each setting
    draw: Callable[[Frames], Figure]

    def __post_init__(self) -> None:
        check_name(self.name, "A drawing")

    def caption_for(self, frames: Frames) -> str:
        """The caption, with the number of runs that the figure is drawn from; one run has no mean and no deviation."""
        rows = frames.get("runs", frames.get("trials"))
        count = 0 if rows is None else rows["seed"].nunique()
        if count != 1:
            return self.caption.replace("{runs}", f"{count} runs")
        single = re.sub(r",? shaded (one|two) standard deviations?", "", self.caption)
        return re.sub(r"(mean over |mean and range of )?\{runs\}", "one run", single)


@dataclass(frozen=True)
class Experiment:
    """Runs (or tables that are computed at once), drawings and claims under one name."""

    name: str
    title: str
    description: str
    drawings: tuple[Drawing, ...]
    claims: tuple[Callable[[Frames], Claim | None], ...]  # None if the runs of a claim are missing
    specs: Callable[[int, int], list[RunSpec]] | None = None  # from seeds and epochs
    tables: Callable[..., Frames] | None = None  # if there is nothing to store; takes a number of seeds, if `seeds`
    trials: Callable[[int], list[Trial]] | None = None  # from seeds, if each run gives one number
    optional: frozenset[str] = frozenset()  # tasks of trials that are skipped if their data is missing
    table: Callable[[Frames], pd.DataFrame] | None = None  # a table of numbers, for reports
    summary: Callable[[Frames], pd.DataFrame] | None = None  # a short one, for documentation
    seeds: int = 0
    epochs: int = 0
    seconds: float = 0.0  # time for the published grid, batched, on this hardware
    hardware: str = CORES
    engine: Callable[[Path], Engine] | None = None  # from a folder for checkpoints; else one of the sweep's engines
    words: tuple[str, ...] = ()  # its name on the command line, if that is not `name` alone
    caution: str = ""  # what its verdicts do not say

    def __post_init__(self) -> None:
        check_name(self.name, "An experiment", RESERVED)

    @property
    def origin(self) -> str:
        """The name on the command line; for a variant, the name of the published experiment."""
        return self.words[0] if self.words else self.name

    def frames(self, folder: Path) -> Frames:
        """The tables that drawings and claims are made from; an error if the store in `folder` is not a whole sweep."""
        if self.trials is not None:
            store = self._filled(folder)
            seeds = int(store.rows["seed"].max()) + 1
            return {"trials": store.require(self.trials(seeds), self.optional, self._command(folder, seeds))}
        if self.specs is None:
            return {} if self.tables is None else self.tables()
        store = self._filled(folder)
        lengths = store.runs.groupby("run")["epoch"].max()
        if lengths.nunique() > 1:
            raise StoreError(
                f"{store.folder} holds runs of {lengths.min()} and of {lengths.max()} epochs, which cannot be "
                "compared. Use a separate folder for each (--out)."
            )
        seeds, epochs = int(store.runs["seed"].max()) + 1, int(lengths.iloc[0])
        command = self._command(folder, seeds, epochs)
        if seeds > len(lengths):  # every seed has at least one run in a whole sweep
            total = seeds * len(self.specs(1, epochs))
            raise StoreError(f"{total - len(lengths)} of {total} runs are missing in {store.folder}: run `{command}`.")
        store.require(self.specs(seeds, epochs), command, by_id=self.engine is None)
        return {"runs": store.runs, "steps": store.steps}

    def _filled(self, folder: Path) -> Any:
        store = self.store(folder)
        if not store.done:
            raise StoreError(f"{store.folder} has no runs of {self.name}. Run it first: {self._command(folder)}")
        return store

    def store(self, folder: Path) -> Any:
        """The store of its runs or trials, in a folder of results."""
        return (Store if self.trials is None else TrialStore)(folder / self.name, self.name)

    def _command(self, folder: Path, seeds: int | None = None, epochs: int | None = None) -> str:
        """The command that runs the experiment, with the options that are not the defaults."""
        words = ["proxsps", "run", *(self.words or (self.name,))]
        words += ["--seeds", str(seeds)] if seeds not in (None, self.seeds) else []
        words += ["--epochs", str(epochs)] if epochs not in (None, self.epochs) else []
        return shlex.join(words + (["--out", str(folder)] if folder != Path("out") else []))

    def judge(self, frames: Frames) -> list[Claim]:
        """All claims, checked on these results. One that cannot be checked does not hold, and says why."""
        judged, published = (_checked(claim, frames) for claim in self.claims), recorded(self.name)
        return [replace(claim, published=published.get(claim.name)) for claim in judged if claim is not None]

    def shortened(self, frames: Frames) -> str:
        """A line on what verdicts do not say, and on fewer seeds or epochs than the experiment has; mostly empty."""
        rows = frames.get("runs", frames.get("trials"))
        if rows is None or rows.empty:
            return self.caution
        seeds, epochs = rows["seed"].nunique(), int(rows["epoch"].max()) if "epoch" in rows else self.epochs
        parts = [f"{seeds} of {self.seeds} seeds"] if seeds < self.seeds else []
        parts += [f"{epochs} of {self.epochs} epochs"] if epochs < self.epochs else []
        fewer = f"{', '.join(parts)}: not the full experiment." if parts else ""
        return " ".join(text for text in (fewer, self.caution) if text)


def _checked(claim: Callable[[Frames], Claim | None], frames: Frames) -> Claim | None:
    try:
        return claim(frames)
    except (LookupError, ValueError, ArithmeticError, TypeError, AttributeError) as error:
        inner: Any = claim
        while isinstance(inner, partial):
            inner = inner.func
        name = getattr(inner, "__name__", type(inner).__name__).replace("_", "-")
        gist = (getattr(inner, "__doc__", None) or name).strip().splitlines()[0]
        return Claim(name, gist, "", "", cannot_be_checked(error), False, checked=False)


def cannot_be_checked(error: Exception) -> str:
    """Why a claim has no verdict, with the place in the code where the numbers were missing."""
    if type(error) is ValueError:
        return f"cannot be checked: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "site-packages" not in frame.filename] or list(frames)
    place = f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""
    return f"cannot be checked: {type(error).__name__}: {error}{place}"


def last_medians(runs: pd.DataFrame, metric: str, last: int = 10) -> pd.Series:
    """Median of a metric over the last epochs of each run; infinity for a run that diverged.

    Indexed by method, schedule, lr, weight_decay and seed.
    """
    tail = runs[runs["epoch"] > runs["epoch"].max() - last]
    keys = ["method", "schedule", "lr", "weight_decay", "seed"]
    return tail.groupby(keys)[metric].agg(lambda values: values.median(skipna=False)).fillna(float("inf"))


def over_seeds(runs: pd.DataFrame, metric: str, last: int = 10) -> pd.Series:
    """Mean over seeds of `last_medians`, indexed by method, schedule, lr and weight_decay."""
    return last_medians(runs, metric, last).groupby(["method", "schedule", "lr", "weight_decay"]).mean()


def setting(lr: float, weight_decay: float | None = None) -> str:
    """How claims name a setting."""
    return f"alpha_0 = {lr:g}" + ("" if weight_decay is None else f", lambda = {weight_decay:g}")
