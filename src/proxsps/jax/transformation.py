"""From a method to an optax transformation: gather, solve, scatter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from proxsps.core import rules
from proxsps.core.array import Array
from proxsps.core.distance import completed
from proxsps.core.outcome import Report, Solution, report
from proxsps.jax.checks import check_lower_bound, check_state, check_update
from proxsps.jax.groups import Gathered, Groups
from proxsps.jax.moments import Moments, start_moments
from proxsps.jax.second_point import ScheduleFreeMoments, start_points
from proxsps.jax.solve import JaxMethod, settled, solve

LastStep = Report
Number = Any  # a Python number or a 0-d array, traced or not
Schedule = Number | Callable[[Array], Array]


class PolyakState(NamedTuple):
    """State of the transformations: a few numbers, and moments if the method has them."""

    count: Array  # updates so far, which are passed to schedules
    last_step: LastStep  # what the last update did
    memory: rules.StepMemory | Moments | ScheduleFreeMoments | tuple[()] = ()  # state from earlier steps


def transformation(
    method: JaxMethod, groups: Groups, bound: Number | None = None, constants: Mapping[str, Number] | None = None
) -> optax.GradientTransformationExtraArgs:
    """The method with its options, its lower bound and its constants."""
    blocks_count = len(groups.options)
    needed = rules.StepMemory._fields if method.remembers else method.moments.fields

    def init(params: Any) -> PolyakState:
        groups.check(params)
        dtype = groups.dtype(params)
        nothing = report(jnp.zeros(blocks_count, dtype), Solution.skipped(jnp.nan))
        memory: Any = ()
        if method.remembers:
            memory = rules.start_memory(jnp.zeros(blocks_count, dtype))
        elif method.moments.second:
            numbers = {**dict(method.numbers), **(constants or {})}
            memory = start_points(method.moments, groups.owners(groups.label_tree(params)), params, numbers, dtype)
        elif method.moments.any:
            memory = start_moments(method.moments, params, dtype)
        return PolyakState(jnp.zeros((), jnp.int32), settled(nothing, dtype), memory)

    def update(
        updates: Any,
        state: PolyakState,
        params: Any = None,
        *,
        value: Number | None = None,
        lower_bound: Number | None = None,
        **extra: Any,
    ) -> tuple[Any, PolyakState]:
        if value is None and not method.bounded:
            value = 0.0
        check_update(method.name, params, value)
        check_lower_bound(method.name, lower_bound, method.bounded)
        check_state(method.name, state, needed)
        dtype = groups.dtype(params)
        gathered = groups.gather(updates, params, state.count)
        C = 0.0 if bound is None else bound if lower_bound is None else lower_bound
        loss, least = (jnp.asarray(x, dtype).reshape(()) for x in (value, C))
        memory = _listed(state.memory, gathered)
        moved, last, memory = solve(method, gathered, loss, least, memory, constants or {})
        after = PolyakState(optax.safe_increment(state.count), last, _restored(memory, state.memory))
        return gathered.scatter(moved), after

    return optax.GradientTransformationExtraArgs(init, update)


TREES = {Moments: ("average", "square"), ScheduleFreeMoments: ("z", "y", "average", "square", "zeros")}


def _listed(memory: Any, gathered: Gathered) -> Any:
    """Memory with lists, in the order of the parameters, for trees."""
    names = TREES.get(type(memory), ())
    if names and memory.travel:
        memory = memory._replace(travel=completed(memory.travel))
    found = {name: jax.tree.leaves(getattr(memory, name)) for name in names}
    for moments in found.values():
        if moments and len(moments) != len(gathered.owners):
            raise ValueError(
                f"The state has moments of {len(moments)} parameters, got {len(gathered.owners)} parameters. Call init "
                "with the parameters that are passed to update."
            )
    return memory._replace(**found) if found else memory


def _restored(memory: Any, like: Any) -> Any:
    """Memory with trees for lists."""
    trees = {name: jax.tree.structure(getattr(like, name)) for name in TREES.get(type(memory), ())}
    found = {name: jax.tree.unflatten(tree, getattr(memory, name)) for name, tree in trees.items()}
    return memory._replace(**found) if found else memory
