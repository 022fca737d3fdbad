"""Records of numbers that the modules of a step share: what sets a method apart, the sums of a step, heights."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from proxsps.core.distance import SCALE
from proxsps.core.plain_step import Blocks, Loss, Step


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


class Table(NamedTuple):
    """The sums of a step, each with one number per block."""

    d_sq: list[float]  # <d, p>
    d_dot_x: list[float]
    noise_sq: list[float]  # sum of (d x)^2 over entries with a prox
    x_sq: list[float]  # with lengths of moves, and in coupled methods
    g_dot_x: list[float]  # with averages, like the next one; <g, z - y> in the schedule-free form
    g_sq: list[float]  # ||D^-1 g||^2
    p_sq: list[float]  # with lengths of moves, like the next one
    p_dot_x: list[float]
    moved_sq: list[float]  # ||x - x_0||^2 of the tensors that are compared in the passes
    p_abs: Sequence[float] = ()  # ||p||_1 over entries with a prox, by kernels
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
    write: Callable[[], float]  # returns the height where it was written, which some steps do not know before
    memory: Sequence[float] = ()  # of DecSPS after the step, one number per block
