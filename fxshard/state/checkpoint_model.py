"""The parameters and buffers of a model by FQN: read for a save, staged and put in place by a load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fxshard.errors import CheckpointError
from fxshard.state import serializable
from fxshard.state.dcp_reader import CheckpointIndex, assemble
from fxshard.state.fit import model_misfits, refuse, tied_otherwise
from fxshard.state.local_shards import hold
from fxshard.state.model_state import require_values
from fxshard.state.names import named_parameters
from fxshard.state.user_hooks import is_extra, require_writable

ROOT = "model"
"""The entry of a checkpoint that holds the model."""


def state_of(model: nn.Module) -> dict[str, Any]:
    """Map FQN -> parameter, buffer or extra state; nothing is copied."""
    state = get_model_state_dict(model)
    require_values(state)
    return {fqn: serializable.nested(value, fqn) for fqn, value in state.items()}


def facts_of(state: Mapping[str, Any]) -> dict[str, str]:
    """Return what must be the same on every rank of what `state_of` gives."""
    return {
        f"{ROOT}.{fqn}": hold(value).text if isinstance(value, Tensor) else type(value).__name__
        for fqn, value in state.items()
    }


class ModelStaging:
    """The model's part of a checkpoint, read into CPU memory beside the model; `state` maps FQN -> what was saved."""

    def __init__(self, contents: CheckpointIndex, model: nn.Module) -> None:
        """Compare what the checkpoint holds with the model, then read it."""
        self._model, own, what = model, state_of(model), f"the model in {contents.folder}"
        paths = {key: path[1:] for path, key in contents.under(ROOT)}
        names = dict.fromkeys(str(path[0]) for path in paths.values() if path)
        tensors = {key: path for key, path in paths.items() if key in contents.tensors}
        announced = {str(path[0]): contents.announced(path, key) for key, path in tensors.items() if len(path) == 1}
        refuse(model_misfits(names, announced, own), what, CheckpointError)
        require_writable({fqn: value for fqn, value in own.items() if not is_extra(fqn)})
        room: dict[str, Any] = dict.fromkeys(paths)
        for key, path in tensors.items():
            room[key] = contents.room(key)  # also for an extra state, which may have any shape
            if len(path) == 1 and not is_extra(str(path[0])):
                room[key] = torch.empty_like(own[str(path[0])], device="cpu")
        contents.read(room)
        self.state = assemble({path: room[key] for key, path in paths.items() if path})
        tied = dict(named_parameters(model, remove_duplicate=False))
        refuse(tied_otherwise(self.state, tied), what, CheckpointError)

    def commit(self) -> None:
        """Write the tensors that were read into the model, in place; extra state is set already."""
        tensors = {fqn: value for fqn, value in self.state.items() if not is_extra(fqn)}
        found = set_model_state_dict(self._model, tensors, options=StateDictOptions(strict=False))
        if left := sorted(getattr(found, "unexpected_keys", ())):  # a load_state_dict of the user's may return nothing
            raise CheckpointError(
                f"load_state_dict of the model has no place for {', '.join(left)}, though its state_dict gives them: a "
                "hook of state_dict has renamed them. All else in the model was loaded, and nothing of the optimizer. "
                "Register a hook of load_state_dict that gives them back their names, and load again."
            )
