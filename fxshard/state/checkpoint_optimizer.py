"""The state of an optimizer by parameter FQN: read for a save, staged and put in place by a load.

torch's get_optimizer_state_dict and set_optimizer_state_dict step an optimizer that has no state yet, and cast state to
the dtype of its parameter. But a save must change nothing, and a load must bring back every bit. The names are torch's,
so either side reads what the other wrote: `state.<FQN>.<name>`, `param_groups.<i>.<option>`. What an optimizer adds to
its state_dict() beside these (`loss_scale`) is stored by its key, and handed, with all the rest, to its
load_state_dict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import serializable, subclasses
from fxshard.state.dcp_reader import CheckpointIndex, assemble, shape_and_dtype
from fxshard.state.fit import Announced, group_misfits, refuse, state_misfits, unknown_state
from fxshard.state.local_shards import hold
from fxshard.state.names import GROUPS, PARAMS, STATE, named_parameters, names_of
from fxshard.state.optimizer_state import OptimizerState, require_no_shards, state_fact, texts_of
from fxshard.state.pytree import KeyPath, LeafMark, mapped, put_back, take_out, tensors_in
from fxshard.state.user_hooks import is_writable

ROOT = "optim"
"""The entry of a checkpoint that holds the optimizer."""


def _held_by(model: nn.Module, optim: Optimizer) -> OptimizerState:
    """Describe what an optimizer holds itself, whatever its state_dict() makes of that.

    Raises `ConfigError` if one of its parameters is not the model's, or state has no FQN.
    """
    names_of(model, optim)
    fqns = {p: fqn for fqn, p in named_parameters(model)}
    states = {p: state for p, state in optim.state.items() if state}
    groups = [
        {**{key: value for key, value in group.items() if key != PARAMS}, PARAMS: group[PARAMS]}
        for group in optim.param_groups
    ]
    held = OptimizerState.of({**optim.state_dict(), STATE: states, GROUPS: groups}, fqns)
    if held.others:
        raise ConfigError(
            f"the optimizer has state under keys that are not parameters: {[*held.others]}. A checkpoint names state "
            "by parameter. Keep it in attributes of the optimizer, and add it in state_dict()."
        )
    return held


def state_of(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state and groups with FQNs in place of parameters; nothing is copied or changed.

    Raises `ConfigError` if it holds parameters of another model, something that cannot be stored, or sharded tensors
    outside of the state of parameters.
    """
    held = _held_by(model, optim)
    state = {fqn: serializable.named(each, state_fact(fqn)) for fqn, each in held.states.items()}
    groups = [serializable.named(group, f"param_groups[{i}]") for i, group in enumerate(held.groups)]
    rest = serializable.named(held.rest, f"{type(optim).__name__}.state_dict()")
    require_no_shards(tensors_in({GROUPS: groups, **rest}))
    return {**rest, STATE: state, GROUPS: groups}


def facts_of(model: nn.Module, optim: Optimizer) -> dict[str, str]:
    """Return what must be the same on every rank for the state to be saved as one."""
    held, parameters = _held_by(model, optim), dict(named_parameters(model))
    states, tensors = take_out(held.states)
    texts = texts_of({path: hold(tensor) for path, tensor in tensors.items()}, parameters)
    return {"optimizer": type(optim).__name__, **replace(held, states=states).facts(texts)}


def placements_of(model: nn.Module, optim: Optimizer) -> dict[str, list[int | None]]:
    """Map key -> placements of each tensor in the state that are not those of its parameter.

    Either it is sharded and has another shape, or it is a part of a tensor subclass. Or, with no placements, it is a
    counter of one element that is not sharded though its parameter, of one element as well, is.
    """
    states, parameters, found = _held_by(model, optim).states, dict(named_parameters(model)), {}
    parts = dict(subclasses.parts_in(states))
    for path, value in tensors_in(states).items():
        p = parameters[path[0]]
        key = ".".join(map(str, (ROOT, STATE, *path)))
        if isinstance(value, DTensor) and (path in parts or value.shape != p.shape):
            found[key] = [x.dim if isinstance(x, Shard) else None for x in value.placements]
        elif isinstance(p, DTensor) and value.shape == p.shape and p.numel() == 1:
            found |= {} if isinstance(value, DTensor) else {key: []}
    return found


class OptimizerStaging:
    """Room for the optimizer's part of a checkpoint, beside the optimizer.

    Attributes:
        room: key -> a tensor to read into.
        whole: the state_dict that was saved, by the ids of this optimizer, once it is read; `None` if neither it nor
            that of this optimizer adds anything to state and groups.
    """

    def __init__(
        self,
        contents: CheckpointIndex,
        model: nn.Module,
        optim: Optimizer,
        placements: Mapping[str, list[int | None]],
    ) -> None:
        """Read all but the tensors, compare it with the optimizer, and make room on the CPU.

        Raises `CheckpointError` if a key, shape or dtype does not fit, named with its file.
        """
        self._contents, self._optim, self._placements = contents, optim, placements
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._contested: frozenset[int] = frozenset()
        self._options: list[dict[str, Any]] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        self.whole: dict[str, Any] | None = None
        self._names, self._own = names_of(model, optim), _held_by(model, optim)
        self._paths = {key: path[1:] for path, key in contents.under(ROOT)}
        self._coming = self._described()
        self._tensors = {key: path for key, path in self._paths.items() if key in contents.tensors}
        announced = [contents.announced(path[1:], key) for key, path in self._tensors.items() if path[0] == STATE]
        held = tensors_in(self._own.states)
        problems = [*group_misfits(self._coming, self._names), *unknown_state(self._coming.others)]
        problems = problems or self._problems(announced, held)
        refuse(problems, f"the optimizer's state in {contents.folder}", CheckpointError)
        self.room = {key: self._room_for(path, key, held) for key, path in self._tensors.items()}

    def _described(self) -> OptimizerState:
        """Read all but the tensors, for which a `LeafMark` with their path below `optim` stands."""
        values = {key: None for key in self._paths if key not in self._contents.tensors}
        self._contents.read(values)
        leaves = {path: values[key] if key in values else LeafMark(path) for key, path in self._paths.items()}
        return OptimizerState.of({STATE: {}, **assemble(leaves)}, {fqn: fqn for fqn in self._names.parameters})

    def _problems(self, announced: list[Announced], held: Mapping[KeyPath, Tensor]) -> list[str]:
        found = list(state_misfits(self._coming, announced, self._names, self._own.states, held))
        there, here = (sorted(each.rest) for each in (self._coming, self._own))
        if there != here and self._own.states:  # some add something only once they have state
            found.append(f"state_dict() adds {there or 'nothing'} there, and {here or 'nothing'} here")
        return found

    def _room_for(self, path: KeyPath, key: str, held: Mapping[KeyPath, Tensor]) -> Tensor:
        self._contents.require_whole(key)
        shape, dtype = shape_and_dtype(self._contents.tensors[key])
        if path[0] != STATE:
            return torch.empty(shape, dtype=dtype)
        if (existing := held.get(path[1:])) is not None:
            return torch.empty_like(existing.detach(), device="cpu")
        parameter, dims = self._names.parameters[path[1]], self._placements.get(key)
        if not isinstance(parameter, DTensor) or dims == []:
            return torch.empty(shape, dtype=dtype)
        if dims is None and list(parameter.shape) == shape and path[2] != "step":
            return torch.empty_like(parameter.detach(), dtype=dtype, device="cpu")
        if dims is None:
            return torch.empty(shape, dtype=dtype)
        # Saved on a mesh of one axis or two: the last one shards, and one before it replicates.
        outer = [None] * (parameter.device_mesh.ndim - 1)
        placed: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in (*outer, *dims[-1:])]
        return empty_dtensor(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placed)

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Find a place for everything that was read, and make all tensors that are new."""
        tensors = {path: loaded[key] for key, path in self._tensors.items()}
        coming = self._coming.with_beside(put_back(self._coming.beside, tensors))
        coming = replace(coming, states=put_back(coming.states, tensors))
        if coming.rest or self._own.rest:
            self.whole = coming.state_dict(self._names)
        self._place(coming)
        if contested := _contested(self._copies):
            self._place(coming, contested)

    def _place(self, coming: OptimizerState, contested: frozenset[int] = frozenset()) -> None:
        """Find a place for everything; `contested` are ids of tensors to which several values are coming."""
        self._copies, self._options, self._contested = [], [], contested
        for group, saved, fqns in zip(self._optim.param_groups, coming.groups, self._names.groups, strict=True):
            options = {name: value for name, value in saved.items() if name != PARAMS}
            self._options.append(self._placed(options, group, None))
            now = {**group, **self._options[-1]}
            on_device = now.get("capturable") or now.get("fused")
            for p, fqn in zip(group[PARAMS], fqns, strict=True):
                before = self._own.states.get(fqn, {})
                placed = {
                    name: self._placed(value, before.get(name), p.device if name != "step" or on_device else None)
                    for name, value in coming.states.get(fqn, {}).items()
                }
                self._states[p] = subclasses.unflatten(placed, state_fact(fqn))

    def _placed(self, coming: Any, now: Any, device: torch.device | None) -> Any:
        """Put the tensors of `coming` into those of `now` where it has such, else on `device`, if that is given."""
        there = tensors_in(now)

        def placed(path: KeyPath, value: Any) -> Any:
            before = there.get(path)
            if not isinstance(value, Tensor):
                return value
            if before is None or shape_and_dtype(before) != shape_and_dtype(value):
                return value if device is None else value.to(device)
            if not is_writable(before) or id(before) in self._contested:
                return value.to(before.device)
            self._copies.append((before, value))
            return before

        return mapped(placed, coming)

    @torch.no_grad()
    def commit(self) -> None:
        """Write what was read into the tensors that are there, and hand over those that are new."""
        for before, value in self._copies:
            before.copy_(value)
        for group, options in zip(self._optim.param_groups, self._options, strict=True):
            group.update(options)
        for p, state in self._states.items():
            self._optim.state.pop(p, None)
            if state:
                self._optim.state[p] = state


def _contested(copies: Sequence[tuple[Tensor, Tensor]]) -> frozenset[int]:
    """Find tensors to which several values are coming: groups share a default `lr`, and part when they load."""
    first: dict[int, Tensor] = {}
    return frozenset(
        id(before)
        for before, value in copies
        if (other := first.setdefault(id(before), value)) is not value and not serializable.same_bits(other, value)
    )
