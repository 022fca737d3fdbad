"""Checkpoints of optimizers: dictionaries of plain data, checked before anything changes, in the dtypes they had."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from proxsps.optim.checks import check_saved
from proxsps.optim.hints import warn
from proxsps.optim.memory import restored
from proxsps.optim.reduce import Ranks
from proxsps.regularizers import Regularizer


class SavesState(Optimizer):
    """The part of an optimizer that is saved, loaded, copied and pickled."""

    _ranks: Ranks
    _complete: bool
    _loading: dict[str, Any] | None

    def _forget(self) -> None:
        """Drop what is not part of a checkpoint."""
        raise NotImplementedError

    def _register_hooks(self) -> None:
        self.register_state_dict_post_hook(_only_plain_data)
        self.register_load_state_dict_pre_hook(_remember)

    def _further_state(self) -> dict[Tensor, dict[str, Any]]:
        """What a checkpoint has besides the state, so that it has the same keys in each mode of an optimizer."""
        return {}

    def _packed(self, param: Tensor, key: str, value: Any) -> Any:
        """A value of the state as it goes into a checkpoint."""
        return value

    def _unpacked(self, param: Tensor, key: str, value: Any) -> Any:
        """The inverse of `_packed`; None for a value of an earlier version that is of no use."""
        return value

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
                    own[key] = self._unpacked(param, key, restored(key, value, original.get(key), param))
                    if own[key] is None:
                        del own[key]

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
            for key, default in self.defaults.items():
                group.setdefault(key, default)
            if own is not None:
                _keep_regularizer(group, own[i]["regularizer"])


def _only_plain_data(opt: Any, state: dict[str, Any]) -> None:
    """Turn a dictionary of state into plain data (regularisers as text) and copies, which later steps do not change.

    This is a hook, so that the user's hooks, which run after it, get what will be saved.
    """
    state["param_groups"] = [{key: _plain(value) for key, value in group.items()} for group in state["param_groups"]]
    params = [p for group in opt.param_groups for p in group["params"]]
    owners = dict(zip((i for group in state["param_groups"] for i in group["params"]), params, strict=True))
    further = opt._further_state()
    for i, own in list(state["state"].items()):
        if i in owners and isinstance(own, dict):  # else it is the user's own entry
            own = own | further.get(owners[i], {})
            state["state"][i] = {key: opt._packed(owners[i], key, _plain(value)) for key, value in own.items()}


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
