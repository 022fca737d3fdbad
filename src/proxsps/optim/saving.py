"""Checkpoints of optimizers: dictionaries of plain data, checked before anything changes, in the dtypes they had."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from proxsps.optim.blocks import SPECTRAL
from proxsps.optim.checks import check_saved
from proxsps.optim.distance import Known, sampled, unsampled
from proxsps.optim.hints import warn
from proxsps.optim.lists import is_sharded
from proxsps.optim.memory import HELD, KEYS, ORIGIN, Z, restored, start_state
from proxsps.optim.reduce import Ranks
from proxsps.optim.rule import Rule
from proxsps.regularizers import Regularizer

EARLIER = "start"  # the sampled entries of versions that took others: they are dropped (`proxsps.optim.distance`)


class SavesState(Optimizer):
    """The part of an optimizer that is saved, loaded, copied and pickled."""

    _ranks: Ranks
    _places: Known
    _complete: bool
    _loading: dict[str, Any] | None

    def _forget(self) -> None:
        """Drop what is not part of a checkpoint."""
        raise NotImplementedError

    def _rule(self) -> Rule:
        """What sets the method apart, with the options that it has now."""
        raise NotImplementedError

    def _register_hooks(self) -> None:
        self.register_state_dict_post_hook(_only_plain_data)
        self.register_load_state_dict_pre_hook(_remember)

    def _start_state(self) -> None:
        """Create the state of parameters with a gradient, so that a checkpoint can be loaded into it."""
        rule = self._rule()
        owners = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in owners:
            start_state(self.state, p, rule, group.get("metric") == SPECTRAL)
        for found in sampled([p for p, _ in owners], self._ranks, self._places) if rule.distance else ():
            self.state[found.owner].setdefault(ORIGIN, found.keep())

    def _drop_blank_state(self) -> None:
        """Drop such state before the first step: that starts from the parameters and gradients that it finds."""
        k = self.param_groups[0].get("k")
        if self.state and not isinstance(k, Tensor) and k == 0:
            for own in [own for own in self.state.values() if isinstance(own, dict)]:
                for key in KEYS & own.keys():
                    del own[key]

    def _restore(self, state: dict[Any, Any]) -> None:
        """Undo what torch does to loaded state: it casts all of it to the dtypes of the parameters.

        The result holds copies, so that later steps do not change the loaded dictionary.
        """
        loading, self._loading = self._loading or {"param_groups": (), "state": {}}, None
        params = [p for group in self.param_groups for p in group["params"]]
        places = [i for group in loading["param_groups"] for i in group["params"]]
        for param, place in zip(params, places, strict=False):
            own, original = state.get(param), loading["state"].get(place)
            if not isinstance(own, dict) or not isinstance(original, dict):
                continue
            for key, value in list(own.items()):
                if isinstance(value, Tensor):
                    own[key] = restored(key, value, original.get(key), param)
            own.pop(EARLIER, None)
            if ORIGIN in own and not is_sharded(param):
                own[ORIGIN] = unsampled(param, self._ranks).vector(own[ORIGIN])

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ranks": self._ranks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # load_state_dict calls this last, after its hooks and checks: an error here leaves everything as it was.
        own = self.param_groups if "defaults" not in state else None
        if own is not None:
            for group, saved in zip(own, state["param_groups"], strict=True):
                check_saved(type(self).__name__, self.defaults, group, saved)
            self._restore(state["state"])
        super().__setstate__(state)
        self._complete = True
        self.defaults.pop("differentiable", None)  # torch adds it, to optimizers without that option too
        if "_watched" not in self.__dict__:  # unpickled or copied
            self._forget()
            self._register_hooks()
        for i, group in enumerate(self.param_groups):
            group.pop("differentiable", None)
            if "reach" in group and "factors_sq" not in group:  # saved before factors were counted
                group["factors_sq"] = group["k"] + 0.0  # and not the same tensor
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            if own is not None:
                _keep_regularizer(group, own[i]["regularizer"])
        if not self.param_groups[0].get("evaluating"):
            for own_state in [one for one in self.state.values() if isinstance(one, dict)]:
                own_state.pop(HELD, None)


def _only_plain_data(opt: Any, state: dict[str, Any]) -> None:
    """Turn a dictionary of state into plain data (regularisers as text) and copies, which later steps do not change.

    This is a hook, so that the user's hooks, which run after it, get what will be saved.
    """
    state["param_groups"] = [{key: _plain(value) for key, value in group.items()} for group in state["param_groups"]]
    pairs = zip(opt.param_groups, state["param_groups"], strict=True)
    owners = {
        i: (param, group) for group, saved in pairs for i, param in zip(saved["params"], group["params"], strict=True)
    }
    for i, own in list(state["state"].items()):
        if i not in owners or not isinstance(own, dict):  # the user's own entry
            continue
        param, group = owners[i]
        own = state["state"][i] = {key: _plain(value) for key, value in own.items()}
        if ORIGIN in own and not is_sharded(param):  # the matrix that shards have
            own[ORIGIN] = unsampled(param, opt._ranks).matrix(own[ORIGIN])
        if Z in own and HELD not in own and group["regularizer"] is not None:  # the same keys in each mode
            own[HELD] = torch.zeros_like(param.detach())


def _remember(opt: Any, state: dict[str, Any]) -> None:
    """Keep the dictionary that is being loaded; torch casts its own copy to the dtypes of the parameters."""
    opt._loading = state


def _keep_regularizer(group: dict[str, Any], phi: Regularizer | None) -> None:
    """Give a loaded group the regulariser it was constructed with, which a checkpoint has only as text."""
    saved, group["regularizer"] = group["regularizer"], phi
    if _plain(saved) != _plain(phi):  # without an entry, `saved` is the default, not a text
        text = f"The checkpoint has regularizer={saved}; this optimizer was constructed with {phi!r} and keeps it."
        warn(text, UserWarning)


def _plain(value: Any) -> Any:
    """An option of a group as it goes into a checkpoint."""
    if isinstance(value, Regularizer):
        return repr(value)
    return value.clone() if isinstance(value, Tensor) else value
