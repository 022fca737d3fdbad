"""The table of methods: how each is named, drawn, constructed in torch and JAX, and run in a sweep.

The command line, sweeps, figures and the documentation read it. It is plain data: classes and functions are named by
"module:name" and loaded when a run needs them. `add` adds your own method.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

# The methods of this package have the colours of Okabe and Ito; these can be distinguished from them.
SPARE_COLOURS = ("#FF4FD8", "#8C5A2B", "#B22A5B", "#3E7F86", "#A3A82B", "#1F2A6B", "#F08A8A", "#4F8F2F")
SPARE_MARKERS = ("X", "*", "h", "<", ">", "d", "8", "H")
LOOKS = ("label", "colour", "marker", "dashes")  # fields of a method that no result depends on


@dataclass(frozen=True)
class Method:
    """A method of a sweep.

    For your own method, `name` and `make` are enough.

    Args:
        name: the name in results and on the command line.
        make: make(parameters, run) returns the optimizer of a run, any `torch.optim.Optimizer`. `run` is the `RunSpec`,
            with `run.lr`, `run.weight_decay`, `run.phi` (the regulariser) and `run.problem.lower_bound`. The sweep
            calls `step(loss=loss)` if the optimizer takes a loss, else `step(closure)`.
        label: the name in figures and tables; default: `name`.
        colour: the colour of its lines; default: one that no other method has.
        marker: the marker of its points, one of matplotlib's; default: one that no other method has.
        rule: a rule like those in `proxsps.core.rules`, from a `Model` to a `Decision`. With a rule, runs are batched:
            many of them are one tensor program. It must choose the same step as the optimizer.
        coupled: whether the regulariser is part of the loss. For your own method, the sweep then adds its value to
            the loss and its subgradient to the gradients; else the optimizer has to apply it.
        bounded: whether a step at a loss below its lower bound is skipped (for `rule`).
        guarded: whether a step with a loss or gradient that is not finite is skipped (for `rule`).
        followed: whether the schedule `adaptive` may follow its adaptive step.
        rateless: whether it needs no learning rate: `lr` of a run is then a factor on its step. Not batched.
        lr: alpha_0 if none is given.
        schedule: the schedule if none is given.
        optimizer: the class in torch, as "module:name".
        options: further arguments of this class, as pairs of name and value.
        groups: a function from a model to parameter groups, as "module:name"; without it the optimizer gets all
            parameters as one group.
        optax: the function for JAX, as "module:name".
        dashes: the dashes of its lines, as in matplotlib; none for a solid line.
        swept: whether a sweep can run it, if it has an optimizer; the experiment `no-lr` has methods of its own.
    """

    name: str
    make: Callable[[Iterable[Any], Any], Any] | None = None
    label: str = ""
    colour: str = ""
    marker: str = ""
    rule: str | Callable[[Any], Any] = ""
    coupled: bool = True
    bounded: bool = False
    guarded: bool = False
    followed: bool = False
    rateless: bool = False
    lr: float = 1.0
    schedule: str = "sqrt"
    optimizer: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    groups: str = ""
    optax: str = ""
    dashes: tuple[float, tuple[float, ...]] | None = None
    swept: bool = True

    def __post_init__(self) -> None:
        if not self.name or not all(letter.isalnum() or letter in "-_." for letter in self.name):
            raise ValueError(
                f"The name of a method may only have letters, digits, dots, hyphens and underscores, got {self.name!r}."
            )
        if self.make is not None and not callable(self.make):
            raise ValueError(f"make of the method {self.name!r} must be a function of parameters and run.")

    @property
    def runs(self) -> bool:
        """Whether a sweep can run it."""
        return self.swept and bool(self.optimizer or self.make)

    @property
    def needs(self) -> tuple[str, ...]:
        """The package of its optimizer, if it is not installed with this one."""
        package = self.optimizer.partition(":")[0].partition(".")[0]
        return () if package in ("", "proxsps", "torch") else (package,)

    @property
    def home(self) -> str:
        """The module and the name of its optimizer, as in an import."""
        return self.optimizer.replace(":", ".")


def load(name: str) -> Any:
    """What "module:name" stands for."""
    module, _, attribute = name.partition(":")
    return getattr(import_module(module), attribute)


RULES, OURS, JAX = "proxsps.core.rules:", "proxsps.optim:", "proxsps.jax:"
BASELINES = "proxsps.experiments.no_lr.baselines:"
POLYAK: dict[str, Any] = {"bounded": True, "guarded": True}
PROXIMAL: dict[str, Any] = {**POLYAK, "coupled": False}
RATELESS: dict[str, Any] = {**PROXIMAL, "rateless": True, "schedule": "constant"}
BASELINE: dict[str, Any] = {"coupled": False, "schedule": "constant", "swept": False}


def _entry(
    name: str, label: str, colour: str, marker: str, optimizer: str = "", optax: str = "", **fields: Any
) -> Method:
    return Method(name, None, label, colour, marker, optimizer=optimizer, optax=optax, **fields)


TRUNCATED, SPS_MAX, LINEAR, DEC_SPS = (f"{RULES}{name}" for name in ("truncated", "sps_max", "linear", "dec_sps"))
APART = (0.0, (3.2, 1.8))  # SPS is often the same as ProxSPS: where lines coincide, both are visible
GROUPED = f"{OURS}model_groups"
MOMENTUM = (("momentum", 0.9),)
PROX_SPS, ADAM, FREE = f"{OURS}ProxSPS", f"{OURS}ProxSPSAdam", f"{OURS}ScheduleFreeSPS"
SGD = "torch.optim:SGD"
_TABLE = (
    _entry(
        "prox-sps", "ProxSPS", "#0072B2", "o", PROX_SPS, f"{JAX}prox_sps", rule=TRUNCATED, followed=True, **PROXIMAL
    ),
    _entry(
        "sps", "SPS", "#D55E00", "s", f"{OURS}SPS", f"{JAX}sps", rule=SPS_MAX, followed=True, dashes=APART, **POLYAK
    ),
    _entry("sgd", "SGD", "#009E73", "^", SGD, rule=LINEAR),
    _entry(
        *("prox-sgd", "ProxSGD", "#CC79A7", "D", f"{OURS}ProxSGD", f"{JAX}prox_sgd"),
        rule=LINEAR,
        coupled=False,
        guarded=True,
    ),
    _entry("dec-sps", "DecSPS", "#E69F00", "v", f"{OURS}DecSPS", f"{JAX}dec_sps", rule=DEC_SPS, **POLYAK),
    _entry(
        *("adamw", "AdamW", "#6B6F76", "p", "torch.optim:AdamW", "optax:adamw"),
        lr=1e-3,
        coupled=False,
        schedule="constant",
    ),
    _entry(
        *("prox-sps-momentum", "ProxSPS, momentum, three caps", "#A80000", "<", PROX_SPS, f"{JAX}prox_sps"),
        options=MOMENTUM,
        **RATELESS,
    ),
    _entry("prox-sps-adam", "ProxSPSAdam", "#22262B", "*", ADAM, f"{JAX}prox_sps_adam", **RATELESS),
    _entry("prox-sps-adaptive", "ProxSPS, adaptive cap", "#56B4E9", "P", coupled=False),
    _entry(
        *("sgd-momentum", "SGD with momentum", "#4DB38F", "v", SGD),
        **{**BASELINE, "coupled": True, "lr": 1e-3, "options": MOMENTUM},
    ),
    _entry(
        *("schedule-free", "schedule-free AdamW", "#E08A00", "h", "schedulefree:AdamWScheduleFree"),
        lr=2.5e-3,
        **BASELINE,
    ),
    _entry("prodigy", "Prodigy", "#B8860B", "D", "prodigyopt:Prodigy", **BASELINE),
    _entry("prox-sps-adam-l2", "ProxSPSAdam, Euclidean l2", "#7A4FBF", "X", ADAM, swept=False, **RATELESS),
    _entry("schedule-free-sps", "ScheduleFreeSPS", "#D81B60", "d", FREE, **RATELESS),
    _entry("schedule-free-sps-spectral", "ScheduleFreeSPS, spectral", "#5E35B1", "8", FREE, groups=GROUPED, **RATELESS),
    _entry("schedule-free-sps-l2", "ScheduleFreeSPS, Euclidean l2", "#C98BB9", "P", FREE, swept=False, **RATELESS),
    _entry("muon", "Muon with AdamW", "#2E9CCA", "s", f"{BASELINES}MuonAdamW", lr=1e-3, groups=GROUPED, **BASELINE),
    _entry("schedule-free-plus", "ScheduleFree+", "#8D6E63", "H", f"{BASELINES}ScheduleFreePlus", **BASELINE),
    _entry("prox-point", "proximal point", "#E69F00", "D", coupled=False),
)
METHODS: dict[str, Method] = {method.name: method for method in _TABLE}  # with those that were added
OWN_TABLE = frozenset(METHODS)  # names of this package
RUNNABLE = tuple(method.name for method in _TABLE if method.runs)


def add(method: Method) -> Method:
    """Add your own method to the table, so that grids, figures and commands accept its name.

    A name that was added before is replaced; the methods of this package stay as they are. Returns the method, with its
    own label, colour and marker if it had none.
    """
    if method.name in OWN_TABLE:
        raise ValueError(f"{method.name!r} is a method of this package. Choose another name for yours.")
    METHODS[method.name] = _with_looks(method)
    return METHODS[method.name]


def find(name: str) -> Method:
    """The method of this name that a sweep can run; else an error with the name that was probably meant."""
    known = [method.name for method in METHODS.values() if method.runs]
    if name in known:
        return METHODS[name]
    near = difflib.get_close_matches(name, known, 1)
    hint = f"Did you mean {near[0]!r}? " if near else ""
    raise ValueError(
        f"Unknown method {name!r}. {hint}Known names: {', '.join(known)}; add your own with proxsps.methods.add."
    )


def looks(name: str) -> Method:
    """The entry that says how a method is drawn. A name without an entry gets a free colour and marker."""
    return METHODS[name] if name in METHODS else add(Method(name))


def _with_looks(method: Method) -> Method:
    others = [known for known in METHODS.values() if known.name != method.name]
    colour = method.colour or _spare(SPARE_COLOURS, [known.colour for known in others], method.name)
    marker = method.marker or next((m for m in SPARE_MARKERS if m not in {known.marker for known in others}), "o")
    return replace(method, label=method.label or method.name, colour=colour, marker=marker)


def _spare(palette: tuple[str, ...], taken: list[str], name: str) -> str:
    free = [colour for colour in palette if colour not in taken]
    if not free:
        raise ValueError(
            f"There is no spare colour for the method {name!r}: {len(palette)} methods have one already. Give it one: "
            "proxsps.methods.add(Method(name, colour='#1133AA'))."
        )
    return free[0]


__all__ = ["METHODS", "RUNNABLE", "Method", "add", "find", "load", "looks"]
