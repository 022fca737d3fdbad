"""Published experiments on your own grid, as on the command line: `--set lr=0.1,1 --set lam=1e-3`.

| key | sets |
| --- | --- |
| lr | the values of alpha_0 of all methods; `METHOD.lr` those of one method |
| lam | the strengths lambda of the regulariser |
| method | the methods, as in the table of methods |
| schedule | the schedules: constant, sqrt, adaptive |
| regularizer | the regulariser as a function of lambda: one of `REGULARIZERS` |

Everything else stays as in the experiment. The sentences of the paper are about the published grid, so an experiment on
your own grid has no claims; its drawings are those of `standard_drawings`.
"""

from __future__ import annotations

import difflib
import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from proxsps import methods

if TYPE_CHECKING:
    from proxsps.experiments.base import Experiment
    from proxsps.sweep.spec import RunSpec

REGULARIZERS = {"l2": "", "l1": "L1", "group-lasso": "GroupLasso", "nuclear-norm": "NuclearNorm", "l2-ball": "L2Ball"}
SCHEDULES = ("constant", "sqrt", "adaptive")
ALIASES = {"lambda": "lam", "weight_decay": "lam", "alpha": "lr", "alpha_0": "lr"}
LONGEST = 60  # letters that settings may take in the name of a folder

Settings = dict[str, tuple[Any, ...]]


def parse_settings(texts: Sequence[str]) -> Settings:
    """The values of `--set KEY=VALUE,VALUE` options, each once; raises an error for others. Nothing large is loaded."""
    settings: Settings = {}
    for text in texts:
        key, equals, values = text.partition("=")
        key = ALIASES.get(key.strip(), key.strip())
        if not equals or not values.strip():
            raise ValueError(f"--set needs KEY=VALUE or KEY=VALUE,VALUE, for instance --set lr=0.1,1; got {text!r}.")
        if key in settings:
            raise ValueError(f"--set {key}=... was given twice. Pass all values at once, with commas between them.")
        settings[key] = tuple(dict.fromkeys(_read(key, value.strip()) for value in values.split(",")))
    return settings


def _read(key: str, value: str) -> Any:
    choices = {"schedule": SCHEDULES, "regularizer": tuple(REGULARIZERS)}
    if key == "method":
        return methods.find(value).name
    if key in choices:
        if value not in choices[key]:
            raise ValueError(f"--set {key}=... takes {', '.join(choices[key])}; got {value!r}.")
        return value
    owner, dot, rest = key.rpartition(".")
    if key not in ("lr", "lam") and not (dot and rest == "lr"):
        near = difflib.get_close_matches(key, ("lr", "lam", "method", *choices), 1)
        hint = f"Did you mean {near[0]!r}? " if near else ""
        raise ValueError(f"--set has no key {key!r}. {hint}Keys are lr, METHOD.lr, lam, method, schedule, regularizer.")
    if dot:
        methods.find(owner)
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    wanted = ">= 0" if key == "lam" else "> 0"  # with lr = 0 nothing would move
    if not 0 <= number < math.inf or (number == 0 and key != "lam"):
        raise ValueError(f"--set {key}=... takes numbers {wanted} with commas between them; got {value!r}.")
    return number


def with_settings(experiment: Experiment, texts: Sequence[str]) -> Experiment:
    """An experiment on your own grid, with its own name and store; the same experiment if it has no grid."""
    if not texts or experiment.specs is None:
        return experiment
    settings = parse_settings(texts)
    from proxsps.experiments.standard import standard_drawings

    specs = partial(own_specs, experiment.specs, settings)
    chosen = describe(settings)
    return replace(
        experiment,
        name=f"{experiment.name}-{_folder_name(settings)}",
        title=f"{experiment.title}: {chosen}",
        description=f"{experiment.description} Here on your own grid: {chosen}.",
        drawings=standard_drawings(specs(1, 1)),
        claims=(),
        specs=specs,
        seconds=0.0,
        words=(*(experiment.words or (experiment.name,)), *(word for text in texts for word in ("--set", text))),
    )


def own_specs(
    published: Callable[[int, int], list[RunSpec]], settings: Settings, seeds: int, epochs: int
) -> list[RunSpec]:
    """The runs of a grid whose settings replace those of the published one."""
    from proxsps.sweep.spec import grid

    base = published(1, epochs)
    strengths = settings.get("lam") or tuple(dict.fromkeys(spec.weight_decay for spec in base))
    make = _regularizer(settings)
    specs: list[RunSpec] = []
    for name in settings.get("method") or dict.fromkeys(spec.method for spec in base):
        own = [spec for spec in base if spec.method == name]
        lrs = settings.get(f"{name}.lr") or settings.get("lr") or tuple(dict.fromkeys(spec.lr for spec in own))
        schedules = settings.get("schedule") or tuple(dict.fromkeys(spec.schedule for spec in own))
        entry = methods.METHODS[name]
        for problem in dict.fromkeys(spec.problem for spec in base):
            chosen = {name: lrs or (entry.lr,)}
            specs += grid(problem, chosen, strengths, schedules or (entry.schedule,), seeds, epochs, make)
    unused = {key for key in settings if "." in key} - {f"{spec.method}.lr" for spec in specs}
    if unused:
        raise ValueError(f"--set {sorted(unused)[0]}=... is for a method that is not run. Add it with --set method=...")
    return specs


def _regularizer(settings: Settings) -> Any:
    chosen = settings.get("regularizer", ("l2",))
    if len(chosen) > 1:
        raise ValueError("--set regularizer=... takes one name: objectives with different ones cannot be compared.")
    if not REGULARIZERS[chosen[0]]:
        return None
    from proxsps import regularizers

    return getattr(regularizers, REGULARIZERS[chosen[0]])


def describe(settings: Settings) -> str:
    """Settings in words."""
    return "; ".join(f"{key} = {', '.join(map(_text, values))}" for key, values in settings.items())


def _folder_name(settings: Settings) -> str:
    """A name that every file system accepts; a digest if it would be too long."""
    text = "-".join(f"{key}_{'_'.join(map(_text, settings[key]))}" for key in sorted(settings))
    return text if len(text) <= LONGEST else f"own_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) and float(f"{value:g}") == value else str(value)
