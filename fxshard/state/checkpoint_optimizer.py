"""The state of an optimizer by parameter FQN: read for a save, staged and put in place by a load.

torch's get_optimizer_state_dict and set_optimizer_state_dict step an optimizer that has no state yet, and cast state to
the dtype of its parameter. But a save must change nothing, and a load must bring back every bit. The names are torch's:
`state.<FQN>.<name>`, `param_groups.<i>.<option>`; what an optimizer adds to its state_dict() is stored by its key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

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
    """Describe what an optimizer holds, not what its state_dict() returns."""
    names_of(model, optim)
    fqns = {p: fqn for fqn, p in named_parameters(model)}
    state_dict = optim.state_dict()  # first: `WholeMatrices` then has its state in `state`
    states = {p: state for p, state in optim.state.items() if state}
    groups = [
        {**{key: value for key, value in group.items() if key != PARAMS}, PARAMS: group[PARAMS]}
        for group in optim.param_groups
    ]
    held = OptimizerState.of({**state_dict, STATE: states, GROUPS: groups}, fqns)
    if held.others:
        raise ConfigError(
            f"the optimizer has state under keys that are not parameters: {[*held.others]}. A checkpoint names state "
            "by parameter. Keep it in attributes of the optimizer, and add it in state_dict()."
        )
    return held


def state_of(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state and groups with FQNs in place of parameters; nothing is copied or changed."""
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
    """The optimizer's part of a checkpoint, read into CPU memory beside the optimizer.

    Attributes:
        whole: the state_dict that was saved, by the ids of this optimizer; `None` if neither it nor that of this
            optimizer adds anything to state and groups.
    """

    def __init__(
        self, contents: CheckpointIndex, model: nn.Module, optim: Optimizer, placements: Mapping[str, list[int | None]]
    ) -> None:
        """Compare what the checkpoint holds with the optimizer, then read it."""
        self._optim, self._names, self._own = optim, names_of(model, optim), _held_by(model, optim)
        paths = {key: path[1:] for path, key in contents.under(ROOT)}
        tensors = {key: path for key, path in paths.items() if key in contents.tensors}
        values = {key: None for key in paths if key not in tensors}
        contents.read(values)
        leaves = {path: LeafMark(path) if key in tensors else values[key] for key, path in paths.items()}
        coming = OptimizerState.of({STATE: {}, **assemble(leaves)}, {fqn: fqn for fqn in self._names.parameters})
        announced = {key: contents.announced(path[1:], key) for key, path in tensors.items() if path[0] == STATE}
        held = tensors_in(self._own.states)
        problems = [*group_misfits(coming, self._names), *unknown_state(coming.others)]
        problems = problems or self._problems(coming, announced.values(), held)
        refuse(problems, f"the optimizer's state in {contents.folder}", CheckpointError)
        room: dict[str, Any] = {key: contents.room(key) for key in tensors if key not in announced}
        for key, each in announced.items():
            contents.require_whole(key)
            room[key] = self._room_for(each, held.get(each.path), placements.get(key))
        contents.read(room)
        read = {path: room[key] for key, path in tensors.items()}
        coming = replace(coming.with_beside(put_back(coming.beside, read)), states=put_back(coming.states, read))
        self.whole = coming.state_dict(self._names) if coming.rest or self._own.rest else None
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._placed: dict[str, Any] = self._find_places({STATE: coming.states, GROUPS: coming.groups})

    def _problems(
        self, coming: OptimizerState, announced: Iterable[Announced], held: Mapping[KeyPath, Tensor]
    ) -> list[str]:
        found = list(state_misfits(coming, announced, self._names, self._own.states, held))
        there, here = sorted(coming.rest), sorted(self._own.rest)
        if there != here and self._own.states:  # some add something only once they have state
            found.append(f"state_dict() adds {there or 'nothing'} there, and {here or 'nothing'} here")
        return found

    def _room_for(self, each: Announced, existing: Tensor | None, dims: list[int | None] | None) -> Tensor:
        if existing is not None:
            return torch.empty_like(existing.detach(), device="cpu")
        parameter = self._names.parameters[each.path[0]]
        if isinstance(parameter, DTensor) and dims:
            # Saved on a mesh of one axis or two: the last one shards, and one before it replicates.
            outer = [None] * (parameter.device_mesh.ndim - 1)
            placed: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in (*outer, *dims[-1:])]
            mesh = parameter.device_mesh
            return empty_dtensor(*each.shape, dtype=each.dtype, device_mesh=mesh, placements=placed)
        if isinstance(parameter, DTensor) and dims is None and parameter.shape == each.shape and each.path[1] != "step":
            return torch.empty_like(parameter.detach(), dtype=each.dtype, device="cpu")
        return torch.empty(each.shape, dtype=each.dtype)

    def _find_places(self, coming: dict[str, Any]) -> dict[str, Any]:
        """Return what is coming in the tensors that are there, where there are such; else in those that were read."""
        there = tensors_in({STATE: self._own.states, GROUPS: self._optim.param_groups})
        given = tensors_in(coming)
        copies = {
            path: (there[path], value)
            for path, value in given.items()
            if path in there and shape_and_dtype(there[path]) == shape_and_dtype(value)
        }
        contested, on_device = _contested(copies.values()), self._on_device(coming[GROUPS])
        for path, value in given.items():
            if path not in copies:
                if path[0] == STATE and (path[2] != "step" or path[1] in on_device):
                    given[path] = value.to(self._names.parameters[path[1]].device)
                continue
            before, _ = copies[path]
            if is_writable(before) and id(before) not in contested:
                self._copies.append(copies[path])
                given[path] = before
            else:
                given[path] = value.to(before.device)
        return cast("dict[str, Any]", mapped(lambda path, value: given.get(path, value), coming))

    def _on_device(self, groups: list[dict[str, Any]]) -> set[str]:
        """Return the parameters whose steps are counted where they are."""
        options = [{**now, **saved} for now, saved in zip(self._optim.param_groups, groups, strict=True)]
        pairs = zip(options, self._names.groups, strict=True)
        return {fqn for each, fqns in pairs if each.get("capturable") or each.get("fused") for fqn in fqns}

    @torch.no_grad()
    def commit(self) -> None:
        """Write what was read into the tensors that are there, and hand over those that are new."""
        for before, value in self._copies:
            before.copy_(value)
        for group, saved in zip(self._optim.param_groups, self._placed[GROUPS], strict=True):
            group.update({name: value for name, value in saved.items() if name != PARAMS})
        for fqn, p in self._names.parameters.items():
            self._optim.state.pop(p, None)
            if state := self._placed[STATE].get(fqn):
                self._optim.state[p] = subclasses.unflatten(state, state_fact(fqn))


def _contested(copies: Iterable[tuple[Tensor, Tensor]]) -> set[int]:
    """Find tensors to which several values are coming: groups share a default `lr`, and part when they load."""
    first: dict[int, Tensor] = {}
    return {
        id(before)
        for before, value in copies
        if (other := first.setdefault(id(before), value)) is not value and not serializable.same_bits(other, value)
    }
