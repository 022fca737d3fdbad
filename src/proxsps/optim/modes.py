"""Training and evaluation mode of a schedule-free optimizer: what the parameters hold, and a model that switches it.

While a model is trained they hold y, the points of gradients, and while it is evaluated the average x. Both are
computed in place from z, without copies, so that y comes back bitwise. A regulariser makes an exception: its zeros in x
are those that a longer proximal step would set, and y cannot be computed from zeros, so y is kept as state meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from proxsps.core.estimate import metric
from proxsps.core.schedule_free import CLEANING, average, average_exactly, cleaned, gradient_point, zeros_of_average
from proxsps.optim.checks import has_value
from proxsps.optim.lists import bundles, is_sharded, widened
from proxsps.optim.memory import HELD, Y, Z, entries, least_metric
from proxsps.optim.second_point import PIECE, bounds_on_entries
from proxsps.regularizers import Regularizer
from proxsps.regularizers.base import flatten, unflatten
from proxsps.regularizers.structure import group_dims


@torch.no_grad()
def show_averages(opt: Any) -> None:
    """Let the parameters hold x."""
    for group in opt.param_groups:
        moved = [(i, p) for i, p in enumerate(group["params"]) if Z in opt.state.get(p, ())]
        b = group["betas"][0]
        if group["regularizer"] is not None and moved:
            _show_cleaned(opt, group, moved, b)
            continue
        for _, param in moved:
            own = opt.state[param]
            shown, z = _local(param), _local(own[Z])
            if Y in own:
                shown.copy_(average(_local(own[Y]), z, b))
                continue
            for (y,), (other,) in bundles(([shown], [z]), PIECE):
                y.copy_(_average(y, other, b))


def _average(y: Tensor, z: Tensor, b: float) -> Tensor:
    """x by `average_exactly`, which takes as long as many steps, only where y would not come back from `average`."""
    x: Tensor
    if torch.compiler.is_compiling() or not has_value(y):
        x = average_exactly(y, z, b)
        return x
    x = average(y, z, b)
    missed = (gradient_point(x, z, b) != y).nonzero(as_tuple=True)  # about one entry in a hundred
    x[missed] = average_exactly(y[missed], z[missed], b)
    return x


@torch.no_grad()
def show_gradient_points(opt: Any) -> None:
    """Let the parameters hold y again."""
    for group in opt.param_groups:
        for param in group["params"]:
            own = opt.state.get(param, {})
            if HELD in own:
                _local(param).copy_(_local(own.pop(HELD)))
            elif Y in own:
                _local(param).copy_(_local(own[Y]))
            elif Z in own:
                for (x,), (z,) in bundles(([_local(param)], [_local(own[Z])]), PIECE):
                    x.copy_(gradient_point(x, z, group["betas"][0]))


def _show_cleaned(opt: Any, group: dict[str, Any], moved: list[tuple[int, Tensor]], b: float) -> None:
    """Let parameters with a regulariser hold x with zeros; y is kept."""
    phi, tau = group["regularizer"], float(group["tau"])
    pieces = [_piece(phi, i, param) for i, param in moved]  # None for a tensor as a whole
    points, ends, steps = [], [], []
    for (_, param), piece in zip(moved, pieces, strict=True):
        own = opt.state[param]
        own[HELD] = param.detach().clone()
        y, z, v = (entries(t, piece is None) for t in (own.get(Y, param), own[Z], own["square"]))
        ends.append(widened(z))
        points.append(average(widened(y), ends[-1], b))
        steps.append(CLEANING * tau / metric(v, group["eps"]).clamp_min(least_metric(v.dtype)))
    if not tau > 0:  # nothing has moved yet, not even onto a constraint
        found = points
    elif phi.joint:
        found = unflatten(cleaned(flatten(points), phi.prox_diagonal(flatten(points), flatten(steps)) == 0), points)
    else:
        regularizers = [phi.at(i) if piece is None else piece for (i, _), piece in zip(moved, pieces, strict=True)]
        found = list(map(_cleaned, regularizers, points, ends, steps))
    for (_, param), piece, x in zip(moved, pieces, found, strict=True):
        if piece is None and is_sharded(param):
            from proxsps.optim.shards import cut

            x = cut(x, param)
        _local(param).copy_(x)


def _piece(phi: Regularizer, index: int, param: Tensor) -> Regularizer | None:
    """The regulariser on this rank's shard of a parameter; None for a whole tensor, and where it needs one."""
    if not is_sharded(param):
        return None
    from proxsps.optim.shards import piece_of

    return piece_of(phi, index, param)


def _cleaned(phi: Regularizer, x: Tensor, z: Tensor, step: Tensor) -> Tensor:
    """x with the zeros of a regulariser, inside of the bounds of a constraint, which rounding may have left."""
    structure = phi.structure(tuple(x.shape))
    zeros = zeros_of_average(x, z, phi.prox_diagonal(x, step), group_dims(structure, x.dim()))
    found: Tensor = cleaned(x, zeros)
    bounds = bounds_on_entries(structure)
    return found if bounds is None else found.clamp(*bounds)


def _local(tensor: Tensor) -> Tensor:
    """The entries of this rank, as real numbers; writes to it are writes to the tensor."""
    local: Tensor = torch.atleast_1d(entries(tensor.detach(), False))
    return local


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


class Switch:
    """The `train` of a model that switches optimizers, as long as these exist; an attribute of the model.

    A copy of the model has no optimizer, and its copy of this object only calls the model's own method, unless the
    optimizer is copied together with it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)
        self._opts: weakref.WeakSet[Any] = weakref.WeakSet()

    def __call__(self, mode: bool = True) -> Any:
        """Switch the model, and the optimizers."""
        model: Any = self._model()
        found = type(model).train(model, mode)
        for opt in list(self._opts):
            opt.train(mode)
        return found

    def add(self, opt: Any) -> None:
        """Switch one more optimizer."""
        self._opts.add(opt)
        opt._switches += (self,)

    def __deepcopy__(self, memo: dict[int, Any]) -> Switch:
        copied = Switch(deepcopy(self._model(), memo))  # type: ignore[arg-type]
        for opt in self._opts:
            if id(opt) in memo:
                copied.add(memo[id(opt)])
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        return Switch, (self._model(),)
