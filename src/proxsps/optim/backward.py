"""Which losses the gradients come from: whether gradients were cleared between one backward and the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Gradients = Callable[[], Iterator[Tensor]]


class LastBackward:
    """The gradients as the last watched backward left them.

    Clearing gradients drops or overwrites all of them. So if identity and version counter of the first gradient are the
    same, nothing was cleared, and plain accumulation does not wait for a device. Values are compared with zero only if
    the gradient was written to: a micro-batch whose gradient happens to be zero has not been cleared.

    Methods take a function that yields the current gradients; it is not kept, because it holds the optimizer.
    """

    def __init__(self) -> None:
        self._left: tuple[int, int] | None = None  # None while a backward runs, and after one that failed

    def begin(self, gradients: Gradients) -> None:
        """Wait for the end of the running backward pass; called in one of its hooks."""
        self._left = None
        if torch.compiler.is_compiling():  # compiled autograd traces hooks, but not the callbacks that they queue
            return
        # Wrappers of a model queue callbacks too, which write gradients: the second level runs after all of them.
        queue = torch.autograd.Variable._execution_engine.queue_callback
        queue(lambda: queue(lambda: self._end(gradients)))

    def _end(self, gradients: Gradients) -> None:
        self._left = _mark(gradients())

    def cleared(self, gradients: Gradients) -> bool:
        """Whether the gradients of the last backward pass are gone: dropped, or all zero now."""
        if torch.compiler.is_compiling():
            return next(gradients(), None) is None
        return _mark(gradients()) != self._left and not any(map(_nonzero, gradients()))


def _mark(gradients: Iterator[Tensor]) -> tuple[int, int]:
    """Identity and version of the first gradient.

    "No gradient" is a mark too: fully_shard keeps gradients elsewhere until they are synchronised.
    """
    first = next(gradients, None)
    return (0, 0) if first is None else (id(first), first._version)


def _nonzero(grad: Tensor) -> bool:
    """Whether some entry on this rank is not zero; sparse gradients, which raise an error later, count as nonzero."""
    local = grad.to_local() if hasattr(grad, "to_local") else grad
    return local.layout is not torch.strided or bool(local.any())
