"""Your own experiments in a Python file, which the command line accepts in place of a name: `proxsps run mine.py`.

The file is executed, like any Python program.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from proxsps.experiments.catalogue import CATALOGUE, EXPERIMENTS

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment


def is_file(name: str) -> bool:
    """Whether a word of the command line is a file rather than the name of an experiment."""
    return name.endswith(".py")


def load_file(name: str) -> list[str]:
    """Add the experiments of a file to the table; returns their names, in the order of the file.

    All `Experiment` objects that the file holds at its top level count. Methods that it adds to the table of methods
    are available from then on.
    """
    from proxsps.experiments.base import Experiment

    module = _import(Path(name))
    found = list({id(value): value for value in vars(module).values() if isinstance(value, Experiment)}.values())
    if not found:
        raise ValueError(f"{name} defines no experiment: it needs an Experiment(...) at its top level.")
    names = [experiment.name for experiment in found]
    if len(set(names)) < len(names):
        twice = next(one for one in names if names.count(one) > 1)
        raise ValueError(f"{name} has two experiments with the name {twice!r}. Choose another name for one of them.")
    for experiment in found:
        _check(experiment, name)
        EXPERIMENTS[experiment.name] = replace(experiment, words=(name,))
    return names


def _check(experiment: Experiment, file: str) -> None:
    if experiment.name in CATALOGUE:
        raise ValueError(f"{file} names an experiment {experiment.name!r}, like one of the paper. Choose another name.")
    if experiment.specs is not None and (experiment.seeds < 1 or experiment.epochs < 1):
        raise ValueError(
            f"The experiment {experiment.name!r} of {file} needs seeds >= 1 and epochs >= 1, got {experiment.seeds} "
            f"and {experiment.epochs}."
        )


def _import(path: Path) -> ModuleType:
    """The module of a file under its own name, so that processes of a pool can import it too."""
    place = path.resolve()
    known = sys.modules.get(path.stem)
    if known is not None and getattr(known, "__file__", None) == str(place):
        return known
    if not path.is_file():
        raise ValueError(f"{path} is not a file. Pass a Python file that defines an experiment, or a name.")
    if not path.stem.isidentifier():
        raise ValueError(f"{path} has a name that no module can have. Use letters, digits and underscores.")
    found = None if known is not None else importlib.util.find_spec(path.stem)
    if known is not None or (found is not None and found.origin != str(place)):
        raise ValueError(f"{path} has the name of another module, {path.stem!r}. Rename the file.")
    if str(place.parent) not in sys.path:
        sys.path.append(str(place.parent))
    spec = importlib.util.spec_from_file_location(path.stem, place)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} cannot be loaded as a Python file.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[path.stem]
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(place)]
        where = f", line {lines[-1]}" if lines else ""
        raise ValueError(f"{path}{where}: {type(error).__name__}: {error}") from error
    return module
