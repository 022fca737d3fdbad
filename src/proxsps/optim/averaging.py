"""The polynomial average of weights for `torch.optim.swa_utils.AveragedModel`; the formula is in `core.averaging`."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from proxsps.core.averaging import polynomial_weight

Averages = list[Tensor] | tuple[Tensor, ...]


def polynomial_avg_fn(power: float = 8.0) -> Callable[[Tensor, Tensor, Tensor | int], Tensor]:
    r"""The `avg_fn` of an average that follows the weights: $\bar x \mathrel{+}= \frac{9}{k+10} (x - \bar x)$.

    Args:
        power: how quickly old weights lose influence: the weights after step k count with about k^power. 8 is the
            9 / (k + 10) above, 0 the plain mean.
    """
    update_all = polynomial_multi_avg_fn(power)

    @torch.no_grad()
    def update(averaged: Tensor, current: Tensor, count: Tensor | int) -> Tensor:
        new = averaged.clone()
        update_all([new], [current], count)
        return new

    return update


def polynomial_multi_avg_fn(power: float = 8.0) -> Callable[[Averages, Averages, Tensor | int], None]:
    r"""As `polynomial_avg_fn`, for all weights at once: pass it as `multi_avg_fn`.

    Args:
        power: how quickly old weights lose influence.

    Examples:
        >>> import torch
        >>> from torch.optim.swa_utils import AveragedModel
        >>> from proxsps import polynomial_multi_avg_fn
        >>> model = torch.nn.Linear(3, 1)
        >>> averaged = AveragedModel(model, multi_avg_fn=polynomial_multi_avg_fn())
        >>> averaged.update_parameters(model)  # after each step of the optimizer
        >>> bool((averaged.module.weight == model.weight).all())
        True
    """
    if not 0 <= power < float("inf"):
        raise ValueError(f"power must be a finite number >= 0, got {power!r}. 0 gives the plain mean.")

    @torch.no_grad()
    def update(averaged: Averages, current: Averages, count: Tensor | int) -> None:
        first = averaged[0]
        if isinstance(count, Tensor):  # torch divides integers in float32
            count = count.to(torch.promote_types(first.dtype, torch.float32))
        weight = polynomial_weight(count, power)
        if first.is_floating_point() or first.is_complex():
            moves = torch._foreach_sub(list(current), list(averaged))
            torch._foreach_mul_(moves, weight)
            torch._foreach_add_(list(averaged), moves)
        else:  # counters among the buffers
            for average, value in zip(averaged, current, strict=True):
                average.copy_(average + weight * (value - average))

    return update
