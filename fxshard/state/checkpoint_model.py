"""The parameters and buffers of a model by FQN: read for a save, staged and put in place by a load."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from fxshard.errors import CheckpointError
from fxshard.state import serializable
from fxshard.state.dcp_reader import CheckpointIndex, assemble
from fxshard.state.fit import model_misfits, refuse, tied_otherwise
from fxshard.state.local_shards import hold
from fxshard.state.model_state import require_values, state_of_module
from fxshard.state.names import module_in, named_parameters
from fxshard.state.pytree import KeyPath
from fxshard.state.user_hooks import is_extra, require_writable

ROOT = "model"
"""The entry of a checkpoint that holds the model."""


def state_of(model: nn.Module) -> dict[str, Any]:
    """Map FQN -> parameter, buffer or extra state; nothing is copied.

    Raises `ConfigError` if something is on the meta device, or cannot be stored.
    """
    state = state_of_module(module_in(model))
    require_values(state)
    return {fqn: serializable.nested(value, fqn) for fqn, value in state.items()}


def facts_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be the same on every rank of what `state_of` gives."""
    return {
        f"{ROOT}.{fqn}": hold(value).text if isinstance(value, Tensor) else type(value).__name__
        for fqn, value in state.items()
    }


class ModelStaging:
    """Room for the model's part of a checkpoint, beside the model.

    `room` maps key -> a tensor to read into, or `None` for what is not a tensor.
    """

    def __init__(self, contents: CheckpointIndex, model: nn.Module) -> None:
        """Compare what the checkpoint holds with the model, and make room on the CPU.

        Raises:
            CheckpointError: keys, shapes or dtypes do not fit; all of them are named, with their files.
            ConfigError: a tensor of the model cannot be written.
        """
        self._contents, self._model, self._own = contents, model, state_of(model)
        self._paths = dict(contents.under(ROOT))
        names = dict.fromkeys(str(path[1]) for path in self._paths if len(path) > 1)
        announced = {
            str(path[1]): contents.announced(path[1:], key)
            for path, key in self._paths.items()
            if len(path) == 2 and key in contents.tensors
        }
        self._refuse(model_misfits(names, announced, self._own))
        require_writable({fqn: value for fqn, value in self._own.items() if not is_extra(fqn)})
        self.room = {key: self._room_for(path, key) for path, key in self._paths.items()}

    def _refuse(self, problems: Iterable[str]) -> None:
        refuse(problems, f"the model in {self._contents.folder}", CheckpointError)

    def _room_for(self, path: KeyPath, key: str) -> Tensor | None:
        if (saved := self._contents.tensors.get(key)) is None:
            return None
        self._contents.require_whole(key)
        if len(path) == 2 and not is_extra(str(path[1])):
            return torch.empty_like(self._own[str(path[1])], device="cpu")
        return torch.empty(saved.size, dtype=saved.properties.dtype)  # an extra state may have any shape

    def assembled(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was read, by FQN; raise `CheckpointError` if it has several values for tied parameters."""
        leaves = {path: loaded[key] for path, key in self._paths.items()}
        state = dict(assemble(leaves).get(ROOT, {}))
        self._refuse(tied_otherwise(state, dict(named_parameters(self._model, remove_duplicate=False))))
        return state

    def commit(self, state: Mapping[str, Any]) -> None:
        """Write the tensors that were read into the model, in place; extra state is set already.

        Raises `CheckpointError` if `load_state_dict` has no place for some that `state_dict` gives; the others are
        written.
        """
        tensors = {fqn: value for fqn, value in state.items() if not is_extra(fqn)}
        found = set_model_state_dict(self._model, tensors, options=StateDictOptions(strict=False))
        if left := sorted(getattr(found, "unexpected_keys", ())):  # a load_state_dict of the user's may return nothing
            raise CheckpointError(
                f"load_state_dict of the model has no place for {', '.join(left)}, though its state_dict gives them: a "
                "hook of state_dict has renamed them. All else in the model was loaded, and nothing of the optimizer. "
                "Register a hook of load_state_dict that gives them back their names, and load again."
            )
