"""The report of several experiments: each figure is drawn once, for the page and as a file.

Drawing takes a second or more for each experiment. A separate process draws one experiment while the next one runs.
It loads the figures but not torch, and ends with the command in all cases.
"""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxsps import figures
from proxsps.cli.console import show, show_claims
from proxsps.experiments.catalogue import CATALOGUE, EXPERIMENTS
from proxsps.experiments.variants import Options, variant
from proxsps.sweep.pool import sendable, watch_parent

if TYPE_CHECKING:
    import pandas as pd

    from proxsps.experiments.base import Claim, Drawing, Experiment, Frames
    from proxsps.figures.export import Picture

TITLE = "Stochastic proximal Polyak step sizes"
OVERVIEW = ("matrix-fac1-stability", "matrix-fac1")
OVERVIEW_TEXT = (
    "Matrix factorisation. Left: how far the objective at the end is above the best one found, for each limit alpha_0 "
    "of the step. Right: validation error for each strength lambda. Medians over ten epochs, means over the runs."
)
Pictures = Sequence[tuple[str, "Picture"]]  # with their captions
_Choice = tuple[str, Options]  # the name of a published experiment, and the options that differ from the published
_Task = tuple[_Choice, "Frames", Path, tuple[str, ...]]


@dataclass(frozen=True)
class _Part:
    experiment: Experiment
    claims: list[Claim]
    pictures: Callable[[], Pictures]
    table: pd.DataFrame | None
    note: str = ""  # on an experiment with fewer seeds or epochs

    @property
    def description(self) -> str:
        """What the experiment is, and that it was shortened."""
        return "\n\n".join(text for text in (self.note, self.experiment.description) if text)


class Report:
    """A page about experiments that are added one after the other; it is written at the end.

    Args:
        folder: the folder of results; figures are written to `<experiment>/figures` in it.
        kind: the file format of the figures; SVG is always written.
        beside: whether to draw in a separate process, while experiments run.
        options: the options of the experiments; the drawing process uses the same.
    """

    def __init__(self, folder: Path, kind: str, beside: bool = False, options: Options | None = None) -> None:
        self.options = options or Options()
        self.folder, self.kinds = folder, tuple(dict.fromkeys(("svg", str(kind))))
        self._artist = _Artist() if beside else None
        self._parts: list[_Part] = []
        self._speed: dict[str, str] = {}

    def __enter__(self) -> Report:
        return self

    def __exit__(self, *_: object) -> None:
        if self._artist is not None:
            self._artist.end()

    def add(self, experiment: Experiment, summary: dict[str, Any] | None = None) -> None:
        """Draw the figures of an experiment, and check its claims; `summary` says how its runs went."""
        frames, place = experiment.frames(self.folder), self.folder / experiment.name / "figures"
        # The drawings of your own grid depend on its runs, and these need torch.
        published = experiment.origin in CATALOGUE and experiment.specs is not None and not self.options.settings
        if self._artist is not None and published:
            pictures = self._artist.draw((experiment.origin, self.options), frames, place, self.kinds)
        else:
            drawn = draw(experiment.drawings, frames, place, self.kinds)
            pictures = lambda: drawn  # noqa: E731
        table = None if experiment.table is None else experiment.table(frames)
        note = experiment.shortened(frames)
        self._parts.append(_Part(experiment, experiment.judge(frames), pictures, table, note))
        if summary is not None and summary["ran"]:
            self._speed[experiment.title] = f"{summary['ran']} runs in {summary['seconds']:.1f} s"

    def write(self, path: Path, everything: bool = False) -> dict[str, list[Claim]]:
        """Show the claims, those that hold only if `everything` is set, and write the page."""
        judged = {part.experiment.name: part.claims for part in self._parts}
        notes = {part.experiment.name: part.note for part in self._parts}
        show_claims(judged, False, notes, everything)
        from proxsps.report import Section, describe_environment, write_report

        sections = [
            Section(part.experiment.title, part.description, part.claims, part.pictures(), part.table)
            for part in self._parts
        ]
        environment = describe_environment()
        write_report(path, sections, title=TITLE, environment=environment, speed=self._speed, first=self._overview())
        for part in self._parts:
            if part.experiment.drawings:
                show(f"Figures: {self.folder / part.experiment.name / 'figures'}")
        show(f"Report: {path}")
        return judged

    def _overview(self) -> tuple[str, Picture] | None:
        """The picture of what the method is for, if the experiments that it shows are on the page."""
        shown = {part.experiment.name: part.experiment for part in self._parts}
        if not set(OVERVIEW) <= set(shown):
            return None
        stability, path = (shown[name].frames(self.folder)["runs"] for name in OVERVIEW)
        return OVERVIEW_TEXT, figures.picture(figures.overview(stability, path))


def draw(drawings: Sequence[Drawing], frames: Frames, place: Path, kinds: Sequence[str]) -> Pictures:
    """Draw figures, each once, and write them in files of these kinds."""
    pictures = []
    for drawing in drawings:
        figure = drawing.draw(frames)
        picture = figures.picture(figure)
        for kind in kinds:
            file = place / f"{drawing.name}.{kind}"
            picture.save(file) if kind == "svg" else figures.save(figure, file)
        pictures.append((drawing.caption_for(frames), picture))
    return pictures


class _Artist:
    """A process that draws one experiment after the other. If it dies, this process draws instead."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork after torch has started threads may hang
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other,), daemon=True)
        self._process.start()
        other.close()  # so that the death of the process ends the connection
        self._thread = ThreadPoolExecutor(1)  # sends and waits, while the main thread runs experiments

    def draw(self, choice: _Choice, frames: Frames, place: Path, kinds: tuple[str, ...]) -> Callable[[], Pictures]:
        """Start drawing an experiment; the returned function waits for its pictures."""
        task = (choice, frames, place, kinds)
        answer = self._thread.submit(self._ask, task)

        def wait() -> Pictures:
            pictures = answer.result()
            if isinstance(pictures, Exception):
                raise pictures
            return _draw(*task) if pictures is None else pictures

        return wait

    def _ask(self, task: _Task) -> Pictures | Exception | None:
        """The answer of the process; None if it is dead."""
        try:
            self._connection.send(task)
            answer: Pictures | Exception = self._connection.recv()
        except (EOFError, OSError, pickle.UnpicklingError):
            return None
        return answer

    def end(self) -> None:
        """End the process, even in the middle of a figure, whose file is then not written."""
        self._process.terminate()
        self._process.join()
        self._thread.shutdown()
        self._connection.close()


# In the process


def _serve(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends this one
    watch_parent()
    for name in ("lambda_path", "picture", "stability", "step_sizes"):
        getattr(figures, name)  # loads what they need, while the first experiment runs
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: Pictures | Exception = _draw(*task)
        except Exception as error:
            answer = sendable(error)
        connection.send(answer)


def _draw(choice: _Choice, frames: Frames, place: Path, kinds: tuple[str, ...]) -> Pictures:
    name, options = choice
    return draw(variant(EXPERIMENTS[name], options).drawings, frames, place, kinds)
