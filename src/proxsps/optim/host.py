"""One step of a plan on the host, on Python floats: from the sums of the blocks to the step that is written.

The formulas are those of `proxsps.core`, in the form of `proxsps.core.plain`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from proxsps.core import plain
from proxsps.core.dual import geometric
from proxsps.core.rules import Decision
from proxsps.optim.closed_form import OUT_OF_RANGE, TRAVEL
from proxsps.optim.host_search import SAMPLE, WORTH, Model, Search, first_points
from proxsps.optim.last_step import Chosen, L2Step, Taken
from proxsps.optim.plan import Plan
from proxsps.optim.reduce import Sums, join
from proxsps.optim.rule import Rule, Table

Floats = Sequence[float]
Pairs = Sequence[tuple[float, float]]


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
        s = plain.l2_matched(gap, table.d_sq, table.d_dot_x, share, lam, longest)
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


def _ahead(
    plan: Plan, options: dict[str, Any], f: float, C: float, alpha: list[float], lam: list[float], resting: Floats
) -> list[float]:
    """Points at which the pass that computes the sums evaluates heights as well; none if they would not help."""
    if -math.inf == C:
        return [1.0]
    if plan.entries < WORTH:
        return list(geometric(plan.points))
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


def _admissible(table: Table, gap: float, above: float, bounded: bool) -> bool:
    """Whether a step may be taken (`proxsps.core.step.admissible`)."""
    finite = math.isfinite(gap) and math.isfinite(above) and all(map(math.isfinite, table.d_sq + table.d_dot_x))
    return finite and not (bounded and above < 0)


def _is_finite(plan: Plan, model: Model, chosen: Chosen) -> bool:
    """Whether no entry moves beyond the range of numbers, by the length of the whole move."""
    adam, tau = plan.rule.beta2 is not None, chosen.u * chosen.reach
    moves = zip(model.alpha, model.table.d_sq, strict=True)  # in Adam's metric, directions are about 1
    return all([tau * a * (1.0 if adam else math.sqrt(d_sq)) < plan.longest for a, d_sq in moves])


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
        sets.of_block,
        share,
        _gradients(plan, table),
        moved_sq,
        start_sq,
        k,
        factor,
        rule.factor,
        rule.scale,
        before,
        after,
    )
    cap = plain.share_out(sets.of_block, after, limit, share)
    return cap, [dict(zip(TRAVEL, numbers, strict=False), k=k + 1) for numbers in after]


def _gradients(plan: Plan, table: Table) -> Floats:
    """||D^-1 g||^2 of each block."""
    return table.d_sq if plan.rule.beta is None and plan.rule.mix is None else table.g_sq


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


def _join(
    opt: Any,
    plan: Plan,
    f: float,
    C: float,
    weight: float,
    table: Table,
    travelled: Pairs,
    resting: list[float],
) -> tuple[float, float, Table, Pairs, list[float]]:
    """The same numbers over all ranks, in one all-reduce."""
    rows = {name: np.array(row) for name, row in table._asdict().items()}
    sums = Sums(rows["d_sq"], rows["d_dot_x"], rows["x_sq"])
    extras: list[Any] = []
    elsewhere = plan.rule.beta is not None or plan.rule.mix is not None
    if elsewhere:
        # <d, center> and <d, x> of resting tensors, which are in one product and in both.
        at_rest = np.array(resting)
        center = np.array(table.d_dot_c or [0.0] * len(plan.blocks))
        extras = [rows["g_dot_x"] + at_rest, rows["g_sq"], center + at_rest]
        if plan.rule.max_move is not None:
            extras += [rows["p_sq"], rows["p_dot_x"]]
    elif plan.rule.coupled:
        extras = [np.array(plan.penalties)]
    squared = [np.array(travelled).reshape(-1)] if plan.rule.distance else []
    found = join(opt._ranks, np.array, plan.blocks, f, C, weight, sums, extras, squared, active=True)
    plan.active = int(found.active)
    rows |= {"d_sq": found.sums.d_sq, "d_dot_x": found.sums.d_dot_x, "x_sq": found.sums.x_sq}
    if elsewhere:
        rows |= dict(zip(("g_dot_x", "g_sq"), found.extras, strict=False))
        rows["d_dot_c"], resting = found.extras[2], []
        if plan.rule.max_move is not None:
            rows |= dict(zip(("p_sq", "p_dot_x"), found.extras[3:], strict=True))
    elif plan.rule.coupled:
        plan.penalty = float(found.extras[0].sum())
    joined = Table(**{name: row.tolist() for name, row in rows.items()})
    travelled = found.travelled[0].reshape(-1, 2).tolist() if plan.rule.distance else ()
    return float(found.m), float(found.C), joined, travelled, resting


def take(opt: Any, plan: Plan, f: float, C: float, bounded: bool, weight: float) -> Taken | None:
    """Take the step of a plan, or none if it has to be skipped; None if its numbers need doubles.

    Args:
        opt: the optimizer.
        plan: its plan.
        f: the loss.
        C: its lower bound, 0 if it has none.
        bounded: whether it has one.
        weight: of this rank's loss.
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
        f, C, table, travelled, resting = _join(opt, plan, f, C, weight, table, travelled, resting)
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
        opt._skip("move", OUT_OF_RANGE)
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


def _next_average(plan: Plan, options: dict[str, Any], k: float, tau: float) -> dict[str, float]:
    """Choose the share of the new point in the average of the schedule-free form; the numbers after the step."""
    plan.share, total, latest = plain.next_share(float(options["total"]), float(options["longest"]), k, tau)
    return {"total": total, "longest": latest, "squares": plan.momentum[1]}
