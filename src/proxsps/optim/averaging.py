"""Averages of weights: the polynomial one for `torch.optim.swa_utils.AveragedModel`, and batch normalisation for any.

The formula of the average is in `core.averaging`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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


@torch.no_grad()
def renew_statistics(model: nn.Module, batches: Iterable[Any]) -> None:
    """Compute the running statistics of batch normalisation again, for the parameters that the model is evaluated with.

    They were collected at other parameters than the average. The model is switched to evaluation mode and stays there;
    switch the optimizer before, unless it follows the model.

    Args:
        model: the model.
        batches: inputs, or lists or tuples that begin with them, as in `torch.optim.swa_utils.update_bn`; about 20.
    """
    model.eval()
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    norms = [part for part in norms if part.track_running_stats]
    if not norms:
        return
    momenta, device, seen = [part.momentum for part in norms], next(model.parameters()).device, False
    try:
        for part in norms:
            part.reset_running_stats()
            part.momentum, part.training = None, True  # None: the mean over all batches
        for batch in batches:
            model((batch[0] if isinstance(batch, Sequence) else batch).to(device))
            seen = True
    finally:
        for part, momentum in zip(norms, momenta, strict=True):
            part.momentum, part.training = momentum, False
    if not seen:
        raise ValueError("renew_statistics needs at least one batch to compute statistics from, got none.")
