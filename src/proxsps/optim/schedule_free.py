"""ScheduleFreeSPS: the step of ProxSPS in the schedule-free form, in Adam's metric or with spectral directions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from proxsps.core.schedule_free import SCALE
from proxsps.optim.capped import MATCHED, CappedPolyak
from proxsps.optim.hints import sibling_hint
from proxsps.optim.model_groups import ADAM, MATRICES, REST, SPECTRAL, check_metric, model_groups
from proxsps.optim.modes import Switch, show_averages, show_gradient_points
from proxsps.optim.polyak import options_of
from proxsps.optim.reduce import ProcessGroup
from proxsps.optim.rule import AVERAGING, Rule
from proxsps.regularizers import L2, Regularizer, Zero


class ScheduleFreeSPS(CappedPolyak):
    r"""Stochastic proximal Polyak steps without a learning rate and without a schedule.

    Gradients are taken at $y$, which the parameters hold while you train; proximal steps move $z$; and what you
    evaluate is $x$, the average of all $z$ (Defazio et al., 2024):

    $$z^{k+1} = \mathrm{prox}^{D_k}_{\tau_k\varphi}(z^k - \tau_k p_k), \qquad
    x^{k+1} = x^k + w_k (z^{k+1} - x^k), \qquad y^{k+1} = \beta_1 x^{k+1} + (1 - \beta_1) z^{k+1}.$$

    In Adam's metric, $p_k = D_k^{-1} g_k$ with $D_k = \sqrt{v_k} + \epsilon$. With `metric="spectral"`, hidden matrices
    move along orthogonalised averages of their gradients, as in Muon (Jordan et al., 2024). $\tau_k$ is the first step
    at which the linear model of the loss, seen from $z^k$, reaches $C$, or the distance cap
    $2\,\bar r_k / \sqrt{\hat G_k}$. Hidden matrices and other tensors have a distance cap each.

    Two words more than with other optimizers: call `opt.eval()` before you evaluate or save the model, and
    `opt.train()` before you train on. If you pass the model itself, `model.eval()` and `model.train()` do it for you.

    The state is two tensors per parameter, and a sample of the starting parameters, as in `ProxSPSAdam`; three tensors
    for parameters of half precision.

    `factor`, `process_group`, `check_replicas`, `fused` and `capturable` are as in `ProxSPS`.

    Args:
        params: the model, whose hidden matrices and other tensors become groups (see `model_groups`), and whose
            `train()` and `eval()` switch the optimizer too; or parameters, or groups. In groups, `"metric"` may differ,
            and `"set"` names the groups that share a distance cap; tensors with two or more dims are apart from others.
        lr: a further cap on the step; None for no learning rate.
        betas: $\beta_1$, the part of $x$ in $y$, and the weight of the old $v$ in each step.
        eps: $\epsilon$ of the metric.
        weight_decay: $\lambda$: decay by $1/(1 + \tau\lambda)$, decoupled from the metric as in AdamW.
        regularizer: another regulariser, instead of `weight_decay`, in groups with Adam's metric. It needs an exact
            prox in a diagonal metric. Evaluated models have its exact zeros.
        lower_bound: as in `ProxSPS`. "auto" is 0, or None if there is a regulariser other than `L2`: with one, steps
            would become short when the loss alone is small, long before the objective is.
        metric: "adam", or "spectral" for matrices: those of a model, or all tensors of a group.
        max_move: limit on the Euclidean length of the move of all $z$ together.
    """

    _siblings: tuple[range, ...] = ()  # places of groups that were made of one list, or of one model
    _switches: tuple[Switch, ...] = ()  # of models that it follows

    def __init__(
        self,
        params: nn.Module | Iterable[Any],
        lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        regularizer: Regularizer | None = None,
        lower_bound: float | Literal["auto"] | None = "auto",
        *,
        metric: Literal["adam", "spectral"] = "adam",
        factor: float | Tensor | None = None,
        max_move: float | None = None,
        process_group: ProcessGroup | Literal[False] | None = None,
        check_replicas: bool = False,
        fused: bool | None = None,
        capturable: bool = False,
    ) -> None:
        options = options_of(locals()) | {"cap": MATCHED, "distance_cap": True}
        options |= {"set": None, "packed": 1, "evaluating": False}
        groups: Any = list(params) if isinstance(params, Iterator) else params
        if isinstance(lower_bound, str) and lower_bound == "auto":
            options["lower_bound"] = _default_bound(groups, regularizer)
        if isinstance(params, nn.Module):
            groups, options["metric"] = model_groups(params, metric), ADAM
        super().__init__(groups, options, process_group, check_replicas)
        if isinstance(params, nn.Module):
            self._siblings = (range(len(self.param_groups)),)
            self.follow(params)

    # Groups

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as in `ProxSPSAdam`; matrices and other tensors of one group become two groups."""
        first = len(self.param_groups)
        try:
            for group in _by_set(param_group, self.defaults):
                super().add_param_group(group)
        except Exception:
            del self.param_groups[first:]  # both or none
            raise
        self._siblings += (range(first, len(self.param_groups)),)

    def _check_regularizer(self, group: dict[str, Any]) -> None:
        check_metric(group["metric"])
        if group["metric"] == SPECTRAL:
            _check_spectral(group)
        super()._check_regularizer(group)

    def _check_group(self, group: dict[str, Any]) -> None:
        super()._check_group(group)
        if self._complete:  # groups of one set have the same numbers
            for other in self.param_groups[:-1]:
                of_set = ("reach", "g_sq", "first_reach") if group["set"] == other["set"] else ()
                group.update({key: other[key] for key in ("k", "factors_sq", "evaluating", *AVERAGING, *of_set)})

    def _check_numbers(self, group: dict[str, Any]) -> None:
        super()._check_numbers(group)
        if not group["betas"][0] > 0:
            raise ValueError(
                f"betas[0] must be above 0, got {group['betas'][0]!r}: it is the part of the average in the point of "
                "the gradients, from which the average is computed."
            )

    def _rule(self) -> Rule:
        options = self.param_groups[0]
        mix, beta2 = options["betas"]
        return super()._rule()._replace(mix=mix, beta2=beta2, eps=options["eps"], scale=SCALE)

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(deepcopy(self.__getstate__(), memo))
        for switch in self._switches:
            if id(switch) in memo:  # its model was copied before
                memo[id(switch)].add(copied)
        return copied

    # Modes

    def train(self, mode: bool = True) -> None:
        """Let the parameters hold y, the point of gradients; in evaluation mode with `mode=False`."""
        if bool(mode) is self._evaluating:
            (show_gradient_points if mode else show_averages)(self)
            for group in self.param_groups:
                group["evaluating"] = not mode

    def eval(self) -> None:
        """Let the parameters hold the average x, with the exact zeros of a regulariser; `train` brings back y bitwise.

        A second call, without `train` in between, does nothing.
        """
        self.train(False)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """A context in which the parameters hold the average; afterwards they hold what they held before."""
        before = self._evaluating
        self.eval()
        try:
            yield
        finally:
            self.train(not before)

    def follow(self, model: nn.Module) -> None:
        """Let `model.train()` and `model.eval()` switch this optimizer too, as long as it exists.

        A `copy.deepcopy` of both together keeps this. After they are unpickled, call it again.
        """
        if not isinstance(model, nn.Module):
            raise TypeError(f"follow() needs the model, an nn.Module, got {type(model).__name__}.")
        known = vars(model).get("train")
        model.train = switch = known if isinstance(known, Switch) else Switch(model)  # type: ignore[method-assign]
        switch.add(self)

    @property
    def _evaluating(self) -> bool:
        return bool(self.param_groups[0]["evaluating"])

    def _check_options(self) -> None:
        if self._evaluating:
            raise RuntimeError(
                "ScheduleFreeSPS.step() was called in evaluation mode, in which the parameters hold the average and "
                "not the point at which gradients are needed. Call opt.train() before the forward pass (or "
                "model.train(), if the optimizer was given the model). Nothing was changed."
            )
        super()._check_options()
        if torch.compiler.is_compiling() or "siblings" in self._warned:
            return
        if (hint := sibling_hint(self.param_groups, self._siblings)) is not None:
            self._warn_once("siblings", hint, "", UserWarning)


def _default_bound(params: Any, regularizer: Regularizer | None) -> float | None:
    """0, or None with a regulariser: the loss alone would then not go to 0."""
    groups = params if isinstance(params, (list, tuple)) else ()
    found = [regularizer, *[group.get("regularizer") for group in groups if isinstance(group, dict)]]
    return 0.0 if all([isinstance(phi, L2 | Zero | None) for phi in found]) else None


def _check_spectral(group: dict[str, Any]) -> None:
    """Raise an error for a group whose directions cannot be orthogonalised."""
    if group["regularizer"] is not None:
        raise ValueError(
            f'A group with metric="spectral" has regularizer={group["regularizer"]!r}, whose prox is not exact in this '
            'metric. Use weight_decay there, or metric="adam" for the group that is to be sparse or constrained.'
        )
    for i, param in enumerate(group["params"]):
        if param.dim() < 2 or param.is_complex():
            raise ValueError(
                f'metric="spectral" is for real matrices and filters, got parameter {i} of a group with shape '
                f'{tuple(param.shape)} and {param.dtype}. Put it into a group with metric="adam": '
                'ScheduleFreeSPS(model, metric="spectral") does that, by the groups of proxsps.model_groups(model).'
            )
        if param.shape[0] % group["packed"]:
            raise ValueError(
                f"Parameter {i} of a group has {param.shape[0]} rows, which are not {group['packed']} matrices of the "
                'same size. Put it into another group, without "packed".'
            )


def _by_set(given: Any, defaults: dict[str, Any]) -> list[Any]:
    """A group, or two: tensors with two or more dims, and others; unless it names its set, or must stay whole."""
    if not isinstance(given, dict) or given.get("set") is not None or isinstance(given.get("params"), set):
        return [given]  # torch raises for sets of parameters
    params, phi = given.get("params", ()), given.get("regularizer", defaults["regularizer"])
    params = [params] if isinstance(params, Tensor) else list(params)
    tensors = [one[1] if isinstance(one, tuple) else one for one in params]
    kinds = [MATRICES if isinstance(t, Tensor) and t.dim() > 1 else REST for t in tensors]
    if given.get("metric", defaults["metric"]) == SPECTRAL:
        kinds = [MATRICES] * len(kinds)
    elif isinstance(phi, Regularizer) and (phi.joint or type(phi).at is not Regularizer.at):
        kinds = [MATRICES if MATRICES in kinds else REST] * len(kinds)
    found = []
    for kind in [kind for kind in (MATRICES, REST) if kind in kinds] or [MATRICES]:
        own = [i for i, one in enumerate(kinds) if one == kind]
        group = {**given, "params": [params[i] for i in own], "set": kind}
        names = given.get("param_names")
        found.append(group if names is None else {**group, "param_names": [names[i] for i in own]})
    return found
