"""One step of a plan on the host, on Python floats: from the sums of the blocks to the step that is written.

The formulas are those of `proxsps.core`, in the form of `proxsps.core.plain`. Blocks that are not affine need a search:
for the dual variable, or for the matched step. In large problems it starts from a sample of the entries, which gives an
estimate of the root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from proxsps.core import plain
from proxsps.core.affine_step import l2_matched
from proxsps.core.dual import DOUBLE, SINGLE
from proxsps.core.plain import search
from proxsps.core.rules import Decision
from proxsps.optim.distance import TRAVEL
from proxsps.optim.last_step import Chosen, L2Step, Taken
from proxsps.optim.plan import Plan
from proxsps.optim.reduce import join_tables
from proxsps.optim.rule import Heights, Rule, Table
from proxsps.optim.sampled_start import LIMIT, SAMPLE, SPREAD, WORTH, first_points, matched_points

Floats = Sequence[float]
Pairs = Sequence[tuple[float, float]]


class Model(NamedTuple):
    """The linear model of a step, with one number per block in each list."""

    gap: float  # m - C
    table: Table
    alpha: list[float]  # caps, or shares of one cap
    lam: list[float]  # strengths of the squared l2 norm; 0 for blocks that are not affine


def take(opt: Any, plan: Plan, f: float, C: float, bounded: bool, weight: float) -> Taken | None:
    """Take the step of a plan, or none if it has to be skipped; None if its numbers need doubles.

    f is the loss of this rank, with its weight among the ranks, and C its lower bound, 0 if it is not bounded.
    """
    rule, options = plan.rule, opt.param_groups[0]
    alpha, lam, k = [float(block.group["lr"]) for block in plan.blocks], plan.lam, float(options.get("k", 0.0))
    largest, scaled = max(alpha), rule.matched or rule.distance
    if scaled:
        plain.shares(alpha, alpha)
    plan.prepare(k, lam)
    resting, ahead = plan.resting_dots(), list[float]()
    if plan.curves and not (scaled or rule.coupled) and plan.ranks == 1:
        ahead = _ahead(plan, options, f, C if bounded else -math.inf, alpha, lam, resting)
    table, heights = plan.sums(alpha, ahead, rule.coupled or rule.max_move is not None)
    if not plan.ordinary(table):
        return None
    travelled: Pairs = plan.distance_sq(opt, table) if rule.distance else ()
    if plan.ranks > 1:
        f, C, table, travelled, resting = join_tables(opt._ranks, plan, f, C, weight, table, travelled, resting)
    m, after = estimate(plan, options, f, table, lam, resting)
    elsewhere = rule.beta is not None or rule.mix is not None  # the model may be below the bound, even if no loss is
    gap, above = m - C, (f if elsewhere else m) - C
    if not _admissible(table, gap, above, bounded):
        opt._explain_skip(m if rule.coupled else f, C, bounded)
        return Taken(alpha, False, gap)
    distance, found = distance_cap(plan, travelled, table, k, largest, alpha) if rule.distance else (math.nan, [])
    model = Model(gap, table, alpha, lam)
    chosen = choose(plan, rule, model, bounded, largest, distance, Search(plan, model, ahead, heights))
    if not _is_finite(plan, model, chosen):
        opt._skip_far_move()
        return Taken(alpha, False, gap)
    opt._skips = 0
    if rule.distance and rule.max_move is None:
        squares = sum([moved for moved, _ in travelled]), gap, sum(table.d_sq), sum(_gradients(plan, table))
        opt._notice_rest(k, *squares, chosen)
    if rule.mix is not None:
        after |= _next_average(plan, options, k, chosen.u * chosen.reach)
    s = _write(plan, model, chosen)
    for block, memory in zip(plan.blocks, chosen.memory, strict=False):
        block.group |= {"memory": memory, "k": k + 1}
    plan.keep_numbers(opt.param_groups, after, found, chosen.u * chosen.reach, alpha)
    if bounded and elsewhere:
        opt._notice_low(gap, C)
    return Taken(alpha, True, gap, chosen, s)


# The model


def estimate(
    plan: Plan, options: dict[str, Any], f: float, table: Table, lam: Floats, resting: Floats
) -> tuple[float, dict[str, float]]:
    """The value m of the linear model at x, and the numbers of averages after the step (`proxsps.core.estimate`)."""
    if plan.rule.coupled:
        return f + plan.penalty + sum([b * e for b, e in zip(lam, table.x_sq, strict=True)]) / 2, {}
    if plan.rule.mix is not None:
        return f + sum(table.g_dot_x), {"k": float(options["k"]) + 1}
    if plan.rule.beta is None:
        return f, {}
    at_rest = sum(resting)
    g_dot_x, d_dot_x = sum(table.g_dot_x) + at_rest, sum(table.d_dot_x) + sum(table.d_dot_c) + at_rest
    numbers = float(options["model_value"]), float(options["model_offset"])
    m, value, offset = plain.averaged_model(f, plan.weight, *numbers, g_dot_x, d_dot_x)
    return m, {"model_value": value, "model_offset": offset, "k": float(options["k"]) + 1}


def _admissible(table: Table, gap: float, above: float, bounded: bool) -> bool:
    """Whether a step may be taken (`proxsps.core.step.admissible`)."""
    finite = math.isfinite(gap) and math.isfinite(above) and all(map(math.isfinite, table.d_sq + table.d_dot_x))
    return finite and not (bounded and above < 0)


# Caps


def distance_cap(
    plan: Plan, travelled: Pairs, table: Table, k: float, largest: float, share: list[float]
) -> tuple[float, list[dict[str, float]]]:
    """The distance cap, and the numbers of each set after the step; shares are those of the caps of their sets."""
    rule, sets = plan.rule, plan.sets
    before = [[float(groups[0][key]) for key in TRAVEL] for groups in sets.groups]
    after = [[0.0] * 5 for _ in before]
    moved_sq, start_sq = zip(*travelled, strict=True)
    factor, limit = (largest, math.inf) if rule.factor else (1.0, largest)
    plain.distances(
        sets.of_block, share, _gradients(plan, table), moved_sq, start_sq, k, factor, rule.factor, rule.scale, before,
        after,
    )  # fmt: skip
    cap = plain.share_out(sets.of_block, after, limit, share)
    return cap, [dict(zip(TRAVEL, numbers, strict=False), k=k + 1) for numbers in after]


def _gradients(plan: Plan, table: Table) -> Floats:
    """||D^-1 g||^2 of each block."""
    return table.d_sq if plan.rule.beta is None and plan.rule.mix is None else table.g_sq


def _next_average(plan: Plan, options: dict[str, Any], k: float, tau: float) -> dict[str, float]:
    """Choose the share of the new point in the average of the schedule-free form; the numbers after the step."""
    plan.share, total, latest = plain.next_share(float(options["total"]), float(options["longest"]), k, tau)
    return {"total": total, "longest": latest, "squares": plan.momentum[1]}


# The step


def choose(
    plan: Plan, rule: Rule, model: Model, bounded: bool, largest: float, distance: float, search: Search
) -> Chosen:
    """The step of ProxSPS and its relatives; `largest` is the largest learning rate."""
    if rule.name in _RULES:
        return _RULES[rule.name](plan, model)
    if not (rule.matched or rule.distance):
        return _chosen(plan, model, bounded, search)
    factor = largest if rule.factor else 1.0
    longest = distance if rule.factor else min(largest, distance) if rule.distance else largest
    caps = factor * longest
    if not longest > 0:
        return Chosen(Decision(0.0, 0.0, model.gap), 0.0, 0.0, caps, distance, longest)
    if not (rule.matched and bounded):
        scaled = model._replace(alpha=[longest * w for w in model.alpha])
        return _chosen(plan, scaled, bounded, Search(plan, scaled))._replace(
            reach=caps, caps=caps, distance=distance, longest=longest
        )
    if all(plan.affine):
        gap, table, share, lam = model
        s = l2_matched(gap, table.d_sq, table.d_dot_x, share, lam, longest)
        found = L2Step(*map(np.array, (gap, table.d_sq, table.d_dot_x, share, lam, longest, s)))
        return Chosen(found, 1.0, factor * s, caps, distance, longest)
    decision, s = search.matched(longest)
    return Chosen(decision, 1.0, factor * s, caps, distance, longest)


def _chosen(plan: Plan, model: Model, bounded: bool, search: Search) -> Chosen:
    """The dual variable with known caps."""
    gap, table, alpha, lam = model
    if all(plan.affine):
        start, fall = plain.l2_line(gap, table.d_sq, table.d_dot_x, alpha, lam)
        root = plain.line_root(start, fall) if bounded else 1.0
        u = plain.clipped(root)
        return Chosen(Decision(root, u, start - fall * u), u)
    if bounded:
        decision = search.dual(alpha)
        return Chosen(decision, decision.u)
    return Chosen(Decision(1.0, 1.0, search.heights(alpha, [1.0])[0][0]), 1.0)


def _sps_max(plan: Plan, model: Model) -> Chosen:
    """SPS and SPS_max (`proxsps.core.rules.sps_max`)."""
    fall = sum([a * e for a, e in zip(model.alpha, model.table.d_sq, strict=True)])
    root = plain.line_root(model.gap, plan.rule.c * fall)
    u = plain.clipped(root)
    return Chosen(Decision(root, u, model.gap - u * fall), u)


def _dec_sps(plan: Plan, model: Model) -> Chosen:
    """DecSPS, with its memory in the groups (`proxsps.core.rules.dec_sps`)."""
    groups, alpha = [block.group for block in plan.blocks], model.alpha
    fall = sum([a * e for a, e in zip(alpha, model.table.d_sq, strict=True)])
    c = plan.rule.c * math.sqrt(float(groups[0]["k"]) + 1)
    root = plain.line_root(model.gap, c * fall)
    limits = [float(group["memory"]) / a for group, a in zip(groups, alpha, strict=True) if a > 0]
    u = min([plain.clipped(root) if fall > 0 else 1.0, *[limit / c for limit in limits]])
    memory = [c * u * a if a > 0 else float(group["memory"]) for group, a in zip(groups, alpha, strict=True)]
    return Chosen(Decision(root, u, model.gap - u * fall), u, memory=memory)


_RULES = {"sps_max": _sps_max, "dec_sps": _dec_sps}


class Search:
    """Searches of a step over the blocks of a plan that are not affine; heights at points `ahead` are `known`."""

    def __init__(self, plan: Plan, model: Model, ahead: Sequence[float] = (), known: Heights | None = None) -> None:
        self._plan, self._model, self._ahead, self._known = plan, model, list(ahead), known
        self._eps = plan.eps

    def line(self, alpha: Floats) -> tuple[float, float]:
        """h(0) and how far h falls, of the affine blocks."""
        gap, table, _, lam = self._model
        affine = [a if own else 0.0 for a, own in zip(alpha, self._plan.affine, strict=True)]
        return plain.l2_line(gap, table.d_sq, table.d_dot_x, affine, lam)

    def heights(self, alpha: Floats, u: list[float], every: int = 1) -> tuple[list[float], list[float]]:
        """h and its slope at the points u, with the line of the affine blocks."""
        start, fall = self.line(alpha)
        if every == 1 and self._known is not None and u == self._ahead:
            h, slope = self._known
        else:
            h, slope = self._plan.heights(alpha, u, every)
        return [start - fall * v + own for v, own in zip(u, h, strict=True)], [own - fall for own in slope]

    def dual(self, alpha: Floats) -> Decision:
        """The dual variable of the truncated model."""
        start, _ = self.line(alpha)
        tolerance, noise = self._stopping(start)
        points, several = self._ahead, 1
        if not points:
            points = first_points(self._plan, lambda u, n: self.heights(alpha, u, n), start)
            several = self._plan.points if len(points) > 1 else 1
        found = search(lambda u: self.heights(alpha, u), tolerance, self._eps, LIMIT, noise, points, several)
        return Decision(found.unclipped_root(), found.u, found.h, float(found.evaluations))

    def matched(self, longest: float) -> tuple[Decision, float]:
        """The step of the matched cap: its report, and its size s."""
        gap, table, share, lam = self._model
        if gap <= 0:
            return Decision(0.0, 0.0, gap), 0.0
        d_sq = sum([w * e for w, e in zip(share, table.d_sq, strict=True)])
        ratio = plain.ray_ratio(gap, d_sq, longest)
        lines = [w if own else 0.0 for w, own in zip(share, self._plan.affine, strict=True)]

        def height(steps: list[float], every: int = 1) -> list[float]:
            found = self._plan.ray(share, steps, every)
            return [
                plain.l2_matched_height(gap, table.d_sq, table.d_dot_x, lines, lam, s) + h
                for s, h in zip(steps, found, strict=True)
            ]

        def evaluate(v: list[float], every: int = 1) -> tuple[list[float], list[float]]:
            positive = [plain.ray_step(one, longest, ratio) for one in v if one > 0]
            found = iter(height(positive, every)) if positive else iter(())
            return [next(found) if one > 0 else gap for one in v], [math.nan] * len(v)

        start = [1.0] if self._plan.entries < WORTH else matched_points(self._plan, evaluate, gap)
        tolerance, noise = self._stopping(gap)
        found = search(evaluate, tolerance, self._eps, LIMIT, noise, start, at_zero=gap)
        s, h = plain.ray_step(found.u, longest, ratio), found.h
        shortest = plain.shortest_step(gap, d_sq, longest)
        if s < shortest:
            s, h = shortest, height([shortest])[0]
        u = s / longest
        steep = longest * d_sq
        root = u if u < 1 else max(gap / steep if steep > 0 else gap, 1.0)
        return Decision(root, u, h, float(found.evaluations)), s

    def _stopping(self, gap: float) -> tuple[float, float]:
        """The certificate, and the size of h, at which a search stops (`proxsps.core.dual.stopping`)."""
        products = math.sqrt(self._plan.noise_sq(self._model.table))
        return (SINGLE if self._eps > 1e-10 else DOUBLE) * abs(gap), 2 * self._eps * products


def _ahead(
    plan: Plan, options: dict[str, Any], f: float, C: float, alpha: list[float], lam: list[float], resting: Floats
) -> list[float]:
    """Points at which the pass that computes the sums evaluates heights as well; none if they would not help."""
    if -math.inf == C:
        return [1.0]
    if plan.entries < WORTH:
        return SPREAD[plan.points]
    if len(plan.parts) > 1:
        return []
    table = plan.sampled_sums(SAMPLE)
    m, _ = estimate(plan, options, f, table, lam, resting)
    # A sum over a sample is off by about the root of its squares, scaled up.
    doubt = 0.0 if plan.rule.beta is None else 2 * math.sqrt(SAMPLE * sum(table.noise_sq))
    if not math.isfinite(m + doubt):
        return []
    search = Search(plan, Model(m - C, table, alpha, lam))
    start, _ = search.line(alpha)
    return first_points(plan, lambda u, every: search.heights(alpha, u, every), start, doubt)


# The write


def _is_finite(plan: Plan, model: Model, chosen: Chosen) -> bool:
    """Whether no entry moves beyond the range of numbers, by the length of the whole move."""
    adam, tau = plan.rule.beta2 is not None, chosen.u * chosen.reach
    moves = zip(model.alpha, model.table.d_sq, strict=True)  # in Adam's metric, directions are about 1
    return all([tau * a * (1.0 if adam else math.sqrt(d_sq)) < plan.longest for a, d_sq in moves])


def _write(plan: Plan, model: Model, chosen: Chosen) -> float:
    """Move all blocks; returns the factor by which `max_move` shortens the move."""
    u, reach, lam, coupled = chosen.u, chosen.reach, model.lam, plan.rule.coupled
    alpha = [reach * a for a in model.alpha]
    if not reach > 0:  # averages are stored, nothing moves
        plan.write([1.0] * len(alpha), [0.0] * len(alpha), alpha, 0.0, 0.0)
        return 1.0
    if coupled:
        keep, move = [1 - a * u * b for a, b in zip(alpha, lam, strict=True)], [-a * u for a in alpha]
    else:
        keep = [1 / (1 + a * b) for a, b in zip(alpha, lam, strict=True)]
        move = [-(a * shrink) * u for a, shrink in zip(alpha, keep, strict=True)]
    s = 1.0
    if plan.rule.max_move is not None:
        s = plain.relaxation(_move_sq(plan, model.table, keep, move, alpha, u), plan.rule.max_move)
        keep, move = [a + (1 - s) * (1 - a) for a in keep], [s * b for b in move]
    plan.write(keep, move, alpha, u, s)
    return s


def _move_sq(plan: Plan, table: Table, keep: Floats, move: Floats, alpha: list[float], u: float) -> float:
    """||x+ - x||^2 over all blocks (`proxsps.core.step.prox_move_sq`)."""
    if plan.rule.coupled:
        return sum([b * b * e for b, e in zip(move, table.d_sq, strict=True)])
    total = plan.move_sq(alpha, u) if plan.curves else 0.0
    in_metric = plan.rule.beta2 is not None
    p_sq, p_dot_x = (table.p_sq, table.p_dot_x) if in_metric else (table.d_sq, table.d_dot_x)
    for i, affine in enumerate(plan.affine):
        if affine:
            a, lost = move[i], 1 - keep[i]
            total += a * a * p_sq[i] - 2 * a * lost * p_dot_x[i] + lost * lost * table.x_sq[i]
    return total
