"""The parameters and buffers of a model by FQN: read for a save, staged and put in place by a load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import serializable
from fxshard.state.dcp_reader import CheckpointIndex, assemble, shape_and_dtype
from fxshard.state.names import named_parameters
from fxshard.state.pytree import KeyPath
from fxshard.state.user_hooks import is_extra, require_writable

ROOT = "model"
"""The entry of a checkpoint that holds the model."""


def state_of(model: nn.Module) -> dict[str, Any]:
    """Map FQN -> parameter, buffer or extra state; nothing is copied.

    Raises `ConfigError` if something is on the meta device, or cannot be stored.
    """
    state = get_model_state_dict(model)
    meta = [fqn for fqn, value in state.items() if isinstance(value, Tensor) and value.is_meta]
    if meta:
        raise ConfigError(
            f"parameters or buffers on the meta device have no values: {', '.join(meta)}. Call "
            "model.to_empty(device=...) first."
        )
    return {fqn: serializable.nested(value, fqn) for fqn, value in state.items()}


def lines(state: Mapping[str, Any]) -> Iterator[str]:
    """Return what must be the same on every rank of what `state_of` gives."""
    for fqn, value in state.items():
        yield f"{fqn}: {serializable.tensor_line(value) if isinstance(value, Tensor) else type(value).__name__}"


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
        self._contents, self._model = contents, model
        self._paths = dict(contents.under(ROOT))
        self._state = state_of(model)
        if problems := [*self._problems_of_names(), *self._problems()]:
            raise CheckpointError(
                f"the model in {contents.folder} does not fit: {'; '.join(problems)}. Nothing was loaded."
            )
        require_writable({fqn: value for fqn, value in self._state.items() if not is_extra(fqn)})
        self.room = {key: self._room_for(path, key) for path, key in self._paths.items()}

    def _problems_of_names(self) -> Iterator[str]:
        saved = {str(path[1]): key for path, key in self._paths.items() if len(path) > 1}
        yield from (f"{fqn} is missing" for fqn in self._state if fqn not in saved)
        for fqn, key in saved.items():
            if fqn not in self._state:
                yield f"{fqn} is not in the model ({self._contents.files_of(key)})"

    def _problems(self) -> Iterator[str]:
        for path, key in self._paths.items():
            value, saved = self._value(path), self._contents.tensors.get(key)
            where = self._contents.files_of(key)
            if isinstance(value, Tensor) and saved is None:
                yield f"{path[-1]} is no tensor there ({where})"
            elif isinstance(value, Tensor) and saved is not None and shape_and_dtype(value) != shape_and_dtype(saved):
                (there, dtype), (here, own) = shape_and_dtype(saved), shape_and_dtype(value)
                yield f"{path[-1]} is {dtype}{there} there ({where}), and {own}{here} here"

    def _value(self, path: KeyPath) -> Any:
        """Return what is to be loaded into; a module takes an extra state of any kind and shape."""
        fqn = str(path[1])
        return self._state.get(fqn) if len(path) == 2 and not is_extra(fqn) else None

    def _room_for(self, path: KeyPath, key: str) -> Tensor | None:
        saved, value = self._contents.tensors.get(key), self._value(path)
        if saved is None:
            return None
        self._contents.require_whole(key)
        if isinstance(value, Tensor):
            return torch.empty_like(value, device="cpu")
        return torch.empty(saved.size, dtype=saved.properties.dtype)  # of an extra state

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` if parameters that are one here have several values there."""
        first: dict[int, str] = {}
        for fqn, parameter in named_parameters(self._model, remove_duplicate=False):
            if (other := first.setdefault(id(parameter), fqn)) == fqn:
                continue
            one, two = (loaded.get(self._paths.get((ROOT, each), "")) for each in (fqn, other))
            if one is not None and two is not None and not serializable.same_bits(one, two):
                raise CheckpointError(
                    f"{other} and {fqn} are one parameter (tied), and {self._contents.folder} has different values for "
                    "them. Nothing was loaded; load it into a model whose parameters are not tied."
                )

    def assembled(self, loaded: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was read, by FQN."""
        leaves = {path: loaded[key] for path, key in self._paths.items()}
        return dict(assemble(leaves).get(ROOT, {}))

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
