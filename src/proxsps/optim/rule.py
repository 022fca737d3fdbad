"""Records that the modules of a step share: what sets a method apart and what it keeps, the sums of a step, heights."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxsps.core.distance import SCALE
from proxsps.core.plain_step import Blocks, Loss, Step

# Numbers that steps keep in the groups.
MODEL = ("model_value", "model_offset")  # of an averaged model
TRAVEL = ("reach", "g_sq", "first_reach", "factors_sq")  # of each set with a distance cap, as in `plain.distances`
AVERAGING = ("total", "longest", "tau", "squares")  # of the schedule-free form: W, taumax, the last step and rho^2
KEPT = ("k", "memory", *MODEL, *TRAVEL, *AVERAGING)


class Rule(NamedTuple):
    """What sets methods apart: the model of the loss, and how a step is chosen from it."""

    name: str = "truncated"  # or linear, sps_max, dec_sps
    c: float = 1.0  # of the last two
    beta: float | None = None  # weight of the old average of gradients; None without averages
    beta2: float | None = None  # the same of their squares; None in the identity metric
    eps: float = 0.0  # of the metric
    coupled: bool = False  # whether the squared l2 norm is part of the loss
    matched: bool = False  # whether step and prox have the same size
    distance: bool = False  # whether there is a distance cap
    factor: bool = False  # whether learning rates are factors on the step
    scale: float = SCALE  # c of the distance cap
    mix: float | None = None  # b of the schedule-free form, None for all other methods
    max_move: float | None = None

    @property
    def numbers(self) -> dict[str, float]:
        """What the method keeps in the groups, as it is before the first step; k is the number of steps so far."""
        names = [*MODEL * (self.beta is not None), *TRAVEL * self.distance, *AVERAGING * (self.mix is not None)]
        found = dict.fromkeys(names, 0.0) | ({"memory": math.inf} if self.name == "dec_sps" else {})
        return {"k": 0.0, **found} if found else {}

    def averages(self, spectral: bool = False) -> tuple[str, ...]:
        """The averages in the state of a parameter: of its gradients, and of their squares."""
        kept = (self.beta is not None or spectral, self.beta2 is not None and not spectral)
        return tuple([name for name, own in zip(("average", "square"), kept, strict=True) if own])


class Table(NamedTuple):
    """The sums of a step, each with one number per block."""

    d_sq: list[float]  # <d, p>
    d_dot_x: list[float]
    noise_sq: list[float]  # sum of (d x)^2 over entries with a prox
    g_dot_x: list[float]  # with averages, like the next one; <g, z - y> in the schedule-free form
    g_sq: list[float]  # ||D^-1 g||^2
    moved_sq: list[float]  # ||x - x_0||^2 of the tensors that are compared in the passes
    p_abs: Sequence[float] = ()  # ||p||_1 over entries with a prox, by kernels
    x_sq: Sequence[float] = ()  # in coupled methods
    d_dot_c: Sequence[float] = ()  # <d, center>; blocks with a centre have x - center in place of x in other sums


class Heights(NamedTuple):
    """sum <d, y - x> and its derivative at several points; the derivative is NaN where it is not known."""

    h: list[float]
    slope: list[float]


class Solved(NamedTuple):
    """A step on the host that was solved, before it is written."""

    step: Step
    k: float  # steps so far
    loss: Loss  # over all ranks
    blocks: Blocks
    share: list[float]  # `Room.share`
    after: list[list[float]]  # `Room.after`
    write: Callable[[], Step]  # returns the step, with what only the write tells
    memory: Sequence[float] = ()  # of DecSPS after the step, one number per block
