"""A guard that ends endless walks through torch-pruning's graph."""

from __future__ import annotations

from functools import partial
from typing import Any

ROUNDS = 10  # times that a walk may reach each edge of the graph; two or three are usual


class EndlessError(Exception):
    """torch-pruning follows channels in circles; the error holds the modules that it reached."""

    def __init__(self, reached: set[Any]) -> None:
        super().__init__()
        self.reached = reached


class Guard:
    """Ends a walk through the graph that takes far more steps than the graph has edges.

    If channels are cut and joined again, as by rotary embeddings, each round gives new indices, and torch-pruning would
    never stop. It counts steps, not time: the result must not depend on how busy the machine is.
    """

    def __init__(self, graph: Any) -> None:
        edges = [edge for node in graph.module2node.values() for edge in node.dependencies]
        self.graph, self.limit, self.steps = graph, ROUNDS * len(edges) + 100, 0
        self.reached: set[Any] = set()
        for edge in edges:
            edge.is_triggered_by = partial(self._count, edge)

    def __enter__(self) -> None:
        self.steps, self.reached = 0, set()

    def __exit__(self, *error: object) -> None:
        return None

    def _count(self, edge: Any, function: Any) -> bool:
        self.steps += 1
        if self.steps > self.limit:
            raise EndlessError(self.reached)
        if edge.trigger != function:
            return False
        if self.graph.is_out_channel_pruning_fn(edge.handler):
            self.reached.add(edge.target.module)
        return True


__all__ = ["EndlessError", "Guard"]
