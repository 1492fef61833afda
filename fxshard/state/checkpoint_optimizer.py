"""The state of an optimizer by parameter FQN: read for a save, staged and put in place by a load.

torch's get_optimizer_state_dict and set_optimizer_state_dict step an optimizer that has no state yet, and cast state to
the dtype of its parameter. But a save must change nothing, and a load must bring back every bit. The names are torch's,
so either side reads what the other wrote: `state.<FQN>.<name>`, `param_groups.<i>.<option>`. What an optimizer adds to
its state_dict() beside these (`loss_scale`) is stored by its key, and handed, with all the rest, to its
load_state_dict.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor import empty as empty_dtensor
from torch.optim import Optimizer

from fxshard.errors import CheckpointError, ConfigError
from fxshard.state import serializable, subclasses
from fxshard.state.dcp_reader import CheckpointIndex, assemble, shape_and_dtype
from fxshard.state.names import GROUPS, PARAMS, STATE, named_parameters, names_of
from fxshard.state.optimizer_state import require_no_shards, state_fact
from fxshard.state.pytree import KeyPath, take_out
from fxshard.state.user_hooks import is_writable

ROOT = "optim"
"""The entry of a checkpoint that holds the optimizer."""


def groups_of(model: nn.Module, optim: Optimizer) -> list[list[str]]:
    """Return the FQNs in each group; raise `ConfigError` if a parameter is not the model's, or state has no FQN."""
    if unknown := [key for key in optim.state if not isinstance(key, Tensor)]:
        raise ConfigError(
            f"the optimizer has state under keys that are not parameters: {unknown}. A checkpoint names state by "
            "parameter. Keep it in attributes of the optimizer, and add it in state_dict()."
        )
    return names_of(model, optim).groups


def _fqns(model: nn.Module, optim: Optimizer) -> dict[int, str]:
    groups_of(model, optim)
    return {id(p): fqn for fqn, p in named_parameters(model)}


def state_of(model: nn.Module, optim: Optimizer) -> dict[str, Any]:
    """Return the optimizer's state and groups with FQNs in place of parameters; nothing is copied or changed.

    Raises `ConfigError` if it holds parameters of another model, something that cannot be stored, or sharded tensors
    outside of the state of parameters.
    """
    fqns = _fqns(model, optim)
    named = {fqns[id(p)]: _flattened(each, fqns[id(p)]) for p, each in optim.state.items() if each}
    state = {fqn: serializable.named(each, f"state of {fqn}") for fqn, each in named.items()}
    groups = []
    for i, group in enumerate(optim.param_groups):
        options = {key: each for key, each in group.items() if key != PARAMS}
        kept = serializable.named(options, f"param_groups[{i}]")
        groups.append({**kept, PARAMS: [fqns[id(p)] for p in group[PARAMS]]})
    rest = serializable.named(_rest_of(optim.state_dict()), f"{type(optim).__name__}.state_dict()")
    require_no_shards(take_out({GROUPS: groups, **rest})[1])
    return {**rest, STATE: state, GROUPS: groups}


def _flattened(state: Mapping[str, Any], fqn: str) -> dict[str, Any]:
    return cast("dict[str, Any]", subclasses.flatten(dict(state), state_fact(fqn)))


def _rest_of(whole: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return what an optimizer adds to the state of its parameters and their groups."""
    return {key: value for key, value in whole.items() if key not in (STATE, GROUPS)}


def lines(state: Mapping[str, Any], model: nn.Module, optim: Optimizer) -> Iterator[str]:
    """Return what must be the same on every rank of what `state_of` gives, for it to be saved as one."""
    yield f"optimizer {type(optim).__name__}"
    yield from serializable.lines(state[GROUPS], GROUPS)
    yield from serializable.lines(_rest_of(state), "state_dict()")
    parameters = dict(named_parameters(model))
    for fqn, values in state[STATE].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and not isinstance(parameters[fqn], DTensor):
                yield f"state of {fqn}[{name!r}]: {serializable.tensor_line(value)}"
            else:
                yield from serializable.lines(value, f"state of {fqn}[{name!r}]")


def placements_of(model: nn.Module, optim: Optimizer) -> dict[str, list[int | None]]:
    """Map key -> placements of each tensor in the state that are not those of its parameter.

    Either it is sharded and has another shape, or it is a part of a tensor subclass. Or, with no placements, it is a
    counter of one element that is not sharded though its parameter, of one element as well, is.
    """
    fqns, found = _fqns(model, optim), {}
    for p, each in optim.state.items():
        state = _flattened(each, fqns[id(p)])
        parts = {path for path, _ in subclasses.parts_in(state)}
        for path, value in take_out(state)[1]:
            key = ".".join(map(str, (ROOT, STATE, fqns[id(p)], *path)))
            if isinstance(value, DTensor) and (path in parts or value.shape != p.shape):
                found[key] = [x.dim if isinstance(x, Shard) else None for x in value.placements]
            elif isinstance(value, Tensor) and isinstance(p, DTensor) and value.shape == p.shape and p.numel() == 1:
                found |= {} if isinstance(value, DTensor) else {key: []}
    return found


class OptimizerStaging:
    """Room for the optimizer's part of a checkpoint, beside the optimizer.

    Attributes:
        room: key -> a tensor to read into, or `None` for what is not a tensor.
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
        """Compare what the checkpoint holds with the optimizer, and make room on the CPU.

        Raises `CheckpointError` if a key, shape or dtype does not fit, named with its file.
        """
        self._contents, self._optim = contents, optim
        self._placements = placements
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._contested: frozenset[int] = frozenset()
        self._options: list[dict[str, Any]] = []
        self._states: dict[Tensor, dict[str, Any]] = {}
        self._own = optim.state_dict()
        self.whole: dict[str, Any] | None = None
        self._parameters = dict(named_parameters(model))
        self._groups = groups_of(model, optim)
        self._now = {fqn: _flattened(optim.state.get(p, {}), fqn) for fqn, p in self._parameters.items()}
        self._paths = dict(contents.under(ROOT))
        tensors = [(path, key, contents.tensors[key]) for path, key in self._paths.items() if key in contents.tensors]
        problems = list(self._problems_of_names()) or [each for found in tensors for each in self._problems_of(*found)]
        if problems:
            raise CheckpointError(
                f"the optimizer's state in {contents.folder} does not fit: {'; '.join(problems)}. Nothing was loaded."
            )
        self.room: dict[str, Tensor | None] = dict.fromkeys(self._paths.values())
        for path, key, saved in tensors:
            contents.require_whole(key)
            self.room[key] = self._room_for(path, key, saved)

    def _problems_of_names(self) -> Iterator[str]:
        known = {fqn for group in self._groups for fqn in group}
        saved: dict[str, set[str]] = {}
        for path, key in self._contents.under(ROOT, STATE):
            fqn, name = str(path[2]), str(path[3])
            if fqn not in known and fqn not in saved:
                yield f"{fqn} is not a parameter of the optimizer ({self._contents.files_of(key)})"
            saved.setdefault(fqn, set()).add(name)
        for fqn, names in saved.items():
            present = set(self._now[fqn]) if fqn in known else set()
            if present and present != names:
                yield f"{fqn} has {sorted(names)} there, and {sorted(present)} here"
        rest = {str(path[1]) for path in self._paths} - {STATE, GROUPS}
        has_state = any(self._optim.state.values())  # some add something only once they have
        if rest != (own := set(_rest_of(self._own))) and has_state:
            yield f"state_dict() adds {sorted(rest) or 'nothing'} there, and {sorted(own) or 'nothing'} here"

    def _existing(self, path: KeyPath) -> Any:
        """Return what the optimizer holds at a path below `state` now, `None` if nothing."""
        found: Any = self._now[str(path[2])]
        for step in path[3:]:
            is_inside = isinstance(found, Mapping) and step in found
            is_inside = is_inside or (isinstance(found, list) and isinstance(step, int) and step < len(found))
            if not is_inside:
                return None
            found = found[step]
        return found

    def _room_for(self, path: KeyPath, key: str, saved: TensorStorageMetadata) -> Tensor:
        shape, dtype = shape_and_dtype(saved)
        if path[1] != STATE:
            return torch.empty(shape, dtype=dtype)
        parameter, existing = self._parameters[str(path[2])], self._existing(path)
        if isinstance(existing, Tensor) and shape_and_dtype(existing) == (shape, dtype):
            return torch.empty_like(existing.detach(), device="cpu")
        if not isinstance(parameter, DTensor) or self._placements.get(key) == []:
            return torch.empty(shape, dtype=dtype)
        dims = self._placements.get(key)
        if dims is None and list(parameter.shape) == shape and path[3] != "step":
            return torch.empty_like(parameter.detach(), dtype=dtype, device="cpu")
        if dims is None:
            return torch.empty(shape, dtype=dtype)
        # Saved on a mesh of one axis or two: the last one shards, and one before it replicates.
        outer = [None] * (parameter.device_mesh.ndim - 1)
        placed: list[Placement] = [Replicate() if dim is None else Shard(dim) for dim in (*outer, *dims[-1:])]
        return empty_dtensor(*shape, dtype=dtype, device_mesh=parameter.device_mesh, placements=placed)

    def _problems_of(self, path: KeyPath, key: str, saved: TensorStorageMetadata) -> Iterator[str]:
        existing = self._existing(path) if path[1] == STATE else None
        if path[1] == STATE and existing is None and isinstance(self._existing(path[:-1]), Tensor):
            yield f"{path[3]} of {path[2]} is a tensor subclass there ({self._contents.files_of(key)}), and none here"
        if isinstance(existing, Mapping) and subclasses.KIND in existing:
            kind = existing[subclasses.KIND]["class"]
            yield f"{path[3]} of {path[2]} is a plain tensor there ({self._contents.files_of(key)}), and a {kind} here"
        if isinstance(existing, Tensor) and shape_and_dtype(existing) != shape_and_dtype(saved):
            (there, dtype), (here, own) = shape_and_dtype(saved), shape_and_dtype(existing)
            where = self._contents.files_of(key)
            yield f"{path[3]} of {path[2]} is {dtype}{there} there ({where}), and {own}{here} here"

    def check(self, loaded: Mapping[str, Any]) -> None:
        """Compare the groups, once they are read, and make all tensors that are new.

        Raises `CheckpointError` if they hold other parameters.
        """
        found = assemble({path: loaded[key] for path, key in self._paths.items()})[ROOT]
        saved = [group[PARAMS] for group in found[GROUPS]]
        if saved != self._groups:
            raise CheckpointError(
                f"the optimizer in {self._contents.folder} has other param_groups: {saved} there, {self._groups} here. "
                "Nothing was loaded."
            )
        if _rest_of(found) or _rest_of(self._own):
            self.whole = self._packed(found)
        self._place(found.get(STATE, {}), found[GROUPS])
        if contested := _contested(self._copies):
            self._place(found.get(STATE, {}), found[GROUPS], contested)

    def _packed(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """Return what was saved, with ids in place of FQNs."""
        ids = [group[PARAMS] for group in self._own[GROUPS]]
        by_fqn = dict(zip(itertools.chain(*self._groups), itertools.chain(*ids), strict=True))
        states = {
            by_fqn[fqn]: subclasses.unflatten(dict(state), state_fact(fqn))
            for fqn, state in found.get(STATE, {}).items()
        }
        groups = [{**group, PARAMS: own} for group, own in zip(found[GROUPS], ids, strict=True)]
        return {**found, STATE: states, GROUPS: groups}

    def _place(
        self, states: Mapping[str, Any], groups: list[dict[str, Any]], contested: frozenset[int] = frozenset()
    ) -> None:
        """Find a place for everything; `contested` are ids of tensors to which several values are coming."""
        self._copies, self._options, self._contested = [], [], contested
        for group, saved in zip(self._optim.param_groups, groups, strict=True):
            options = {name: value for name, value in saved.items() if name != PARAMS}
            self._options.append({name: self._placed(group.get(name), value, None) for name, value in options.items()})
            now = {**group, **self._options[-1]}
            on_device = now.get("capturable") or now.get("fused")
            for p, fqn in zip(group[PARAMS], saved[PARAMS], strict=True):
                before = self._now[fqn]
                placed = {
                    name: self._placed(before.get(name), value, p.device if name != "step" or on_device else None)
                    for name, value in states.get(fqn, {}).items()
                }
                self._states[p] = subclasses.unflatten(placed, state_fact(fqn))

    def _placed(self, before: Any, value: Any, device: torch.device | None) -> Any:
        """Put `value` into the tensors of `before` where it has such, else on `device`, if that is given."""
        if isinstance(value, Tensor):
            if not isinstance(before, Tensor) or shape_and_dtype(before) != shape_and_dtype(value):
                return value if device is None else value.to(device)
            if not is_writable(before) or id(before) in self._contested:
                return value.to(before.device)
            self._copies.append((before, value))
            return before
        if isinstance(value, dict):
            inner = before if isinstance(before, Mapping) else {}
            return {key: self._placed(inner.get(key), each, device) for key, each in value.items()}
        if isinstance(value, list):
            old = before if isinstance(before, list) and len(before) == len(value) else [None] * len(value)
            return [self._placed(one, each, device) for one, each in zip(old, value, strict=True)]
        return value

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
