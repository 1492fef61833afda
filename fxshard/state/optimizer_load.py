"""The load of the full state of an optimizer: cut anew for the present ranks and units, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer

from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import rows_first, shard_rows
from fxshard.state import full, subclasses
from fxshard.state.fit import Announced, group_misfits, refuse, state_misfits, unknown_state
from fxshard.state.full import FullState
from fxshard.state.local_shards import LocalShard, can_cut, deliver, hold, require_bucket
from fxshard.state.names import GROUPS, PARAMS, STATE, ParameterNames, module_in, names_of
from fxshard.state.optimizer_state import OptimizerState, is_step, shards_in, state_fact, unknown_keys
from fxshard.state.pytree import KeyPath, leaves_in, mapped, put_back, take_out, tensors_in
from fxshard.state.ranks import Ranks

_CALL = "load_full_optim_state_dict"


@torch.no_grad()
def load_full_optim_state_dict(
    model: nn.Module, optim: Optimizer, state: Mapping[str, Any], *, bucket_mib: float = 64
) -> None:
    """Load the state of an unsharded optimizer: every rank takes its rows of it, unchanged to the bit.

    It may come from `full_optim_state_dict` under any number of ranks and any units, or from `state_dict()` of an
    optimizer that was never sharded. All ranks that share the model must call it. Nothing is written before everything
    has been checked; the old state lives until the new one is there.

    Args:
        model: as for `full_optim_state_dict`; so is `bucket_mib`.
        optim: with the same param groups; its own state is replaced.
        state: the full state, by id or FQN, on one rank (the others pass `{}`) or the same on every rank.
        bucket_mib: as there.
    """
    ranks = Ranks.of(model)

    def named() -> ParameterNames:
        require_bucket(bucket_mib)
        return names_of(module_in(model), optim)

    names = ranks.together(named, _CALL)
    given = full.receive(_CALL, state, ranks, lambda: _packed(state, names))
    contents = cast(OptimizerState, given.contents)
    own = {"arguments": f"bucket_mib={bucket_mib}", "optimizer": type(optim).__qualname__}

    def fitting() -> list[_LoadTarget]:
        refuse(group_misfits(contents, names))
        found, problems = _targets(contents, given.announced, names, optim)
        refuse([*problems, *_placed_otherwise(contents, names)])
        refuse(full.out_of_reach(given, [each.held for each in found]))
        own.update(contents.facts() if given.source is None else {})
        return found

    places = ranks.together(fitting, _CALL)
    targets = [each.held for each in places]
    sharing: dict[str, Tensor] = {each.name: names.parameters[each.path[0]] for each in given.announced}
    sharing |= {state_fact(fqn): names.parameters[fqn] for fqn in contents.states}
    full.require_alike(_CALL, given, targets, sharing, ranks, own)
    for each in places:
        each.allocate()
    deliver(targets, given.tensors, given.source, ranks, bucket_mib)
    # load_state_dict and its hooks are the user's.
    tensors = {each.announced.path: each.finished() for each in places}
    ranks.together(lambda: _install(optim, names, contents, tensors), _CALL)


def _packed(state: Mapping[str, Any], names: ParameterNames) -> FullState:
    if STATE not in state or GROUPS not in state:
        raise ConfigError(
            f"the state must be a dict with the keys {STATE!r} and {GROUPS!r}, as full_optim_state_dict or an "
            f"optimizer's state_dict() gives it, got one with {', '.join(map(repr, state)) or 'none'}."
        )
    given = OptimizerState.of(state, _fqns_by_key(state, names))
    states, tensors = take_out(given.states)
    announced = [Announced.of(path, tensor) for path, tensor in tensors.items()]
    sharded = [each.name for each in announced if isinstance(tensors[each.path], DTensor)]
    full.require_whole(sharded, "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict")
    refuse(unknown_state(unknown_keys(given.others, str if _is_by_fqn(state) else int)))
    contents = replace(given, states=states)
    return FullState(contents=contents, announced=announced, tensors=list(tensors.values()))


def _fqns_by_key(state: Mapping[str, Any], names: ParameterNames) -> dict[Any, str]:
    """Map key of a parameter in a state_dict -> its FQN here; ids stand for positions in the groups."""
    given = [list(group[PARAMS]) for group in state[GROUPS]]
    if _is_by_fqn(state):
        return {key: key for keys in given for key in keys}
    sizes, own = [len(keys) for keys in given], [len(fqns) for fqns in names.groups]
    if sizes != own:
        raise ConfigError(
            f"the state has param_groups of {sizes} parameters, the optimizer of {own}. Build the optimizer with the "
            'same groups, or save with keys="fqn", which says which parameters are meant.'
        )
    pairs = zip(given, names.groups, strict=True)
    return {key: fqn for keys, fqns in pairs for key, fqn in zip(keys, fqns, strict=True)}


def _is_by_fqn(state: Mapping[str, Any]) -> bool:
    return all(isinstance(key, str) for group in state[GROUPS] for key in group[PARAMS])


@dataclass(eq=False)
class _LoadTarget:
    """Where a tensor that is coming goes."""

    announced: Announced  # what is coming
    like: Tensor  # the tensor that the optimizer has there now, else the parameter
    held: LocalShard  # how this rank will hold it; memory comes with `allocate`

    def allocate(self) -> None:
        held = self.held
        if held.other:
            held.local = torch.empty_like(self.like.detach(), dtype=held.dtype)
            return
        shape: Sequence[int] = held.shape
        if (mesh := held.mesh) is not None:
            whole = torch.empty(shape, device="meta")
            own = shard_rows(whole, mesh_axes.shard_rank(mesh), mesh_axes.num_shards(mesh), held.dim)
            shape = rows_first(own.shape, held.dim)
        made = torch.empty(shape, dtype=held.dtype, device=held.local.device)
        held.local = made.movedim(0, held.dim) if held.dim else made

    def finished(self) -> Tensor:
        held = self.held
        if not isinstance(self.like, DTensor) or held.other or (held.mesh is None and not held.replica):
            return held.local
        mesh = self.like.device_mesh
        placements = mesh_axes.placements(mesh, is_scalar=held.mesh is None, dim=held.dim)
        stride = torch.empty(held.shape, device="meta").stride()
        shape = torch.Size(held.shape)
        return DTensor.from_local(held.local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _targets(
    contents: OptimizerState, announced: Sequence[Announced], names: ParameterNames, optim: Optimizer
) -> tuple[list[_LoadTarget], Iterator[str]]:
    present = {fqn: subclasses.flatten(optim.state.get(p, {}), state_fact(fqn)) for fqn, p in names.parameters.items()}
    tensors = tensors_in(present)
    held = shards_in(tensors, names.parameters)
    counters = _counters(announced, names)
    parts = dict(subclasses.parts_in(contents.states))
    found = []
    for each in announced:
        parameter, now = names.parameters[each.path[0]], held.get(each.path)
        if now is None:
            is_scalar = each.path[1:] in counters or (not each.shape and tuple(parameter.shape) != ())
            is_rows = parts.get(each.path, each.shape == tuple(parameter.shape))
            now = _new_shard(each, parameter, is_scalar=is_scalar, is_rows=is_rows)
        local = torch.empty(0, device=now.local.device)
        target = replace(now, shape=each.shape, dtype=each.dtype, local=local)
        found.append(_LoadTarget(each, tensors.get(each.path, parameter), target))
    # torch's keep the same for all parameters of a group, each tensor shaped as its parameter
    strict = type(optim).__module__.startswith("torch.optim") and not isinstance(optim, Adafactor | LBFGS)
    return found, state_misfits(contents, announced, names, present, held, strict)


def _counters(announced: Sequence[Announced], names: ParameterNames) -> set[KeyPath]:
    """Return the paths that lead to one element for all parameters, though one has more, or have torch's own name."""
    # Of a parameter of one element a counter may have the shape, so what it has for the others counts.
    sizes = [(each.path[1:], math.prod(each.shape), names.parameters[each.path[0]].numel()) for each in announced]
    larger = {path for path, size, _ in sizes if size != 1}
    of_larger = {path for path, _, size in sizes if size != 1}
    return {path for path, _, _ in sizes if path not in larger and (path in of_larger or is_step(path))}


def _new_shard(each: Announced, parameter: Tensor, *, is_scalar: bool, is_rows: bool) -> LocalShard:
    """Return how a rank holds what an optimizer without state would make for a parameter."""
    if is_scalar:
        return LocalShard(each.shape, each.dtype, torch.empty(0, device="cpu"))
    if isinstance(parameter, DTensor) and not is_rows:
        return LocalShard(each.shape, each.dtype, parameter, replica=True)
    return hold(parameter)


def _placed_otherwise(contents: OptimizerState, names: ParameterNames) -> list[str]:
    """Find parameters of other libraries' placements, for whose state there is no way in."""
    found = []
    for fqn in contents.states:
        parameter = names.parameters[fqn]
        if not isinstance(parameter, DTensor):
            continue
        if (kinds := subclasses.kinds_in(contents.states[fqn])) and (hold(parameter).other or hold(parameter).dim):
            found.append(f"{fqn} is not sharded by rows, and its state is kept in {kinds}, which is cut by rows only")
        elif hold(parameter).other and not can_cut(parameter):
            placements = ", ".join(map(str, parameter.placements))
            found.append(
                f"{fqn} is not sharded by rows, but {placements}: use "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
    return found


def _install(
    optim: Optimizer, names: ParameterNames, contents: OptimizerState, tensors: Mapping[KeyPath, Tensor]
) -> None:
    """Hand everything to the optimizer's own `load_state_dict`, and take back the casts that it makes."""
    before = {p: tensors_in(optim.state.get(p, {})) for p in names.parameters.values()}
    whole = replace(contents, states=put_back(contents.states, tensors)).state_dict(names)
    optim.load_state_dict(whole)
    ids = names.ids
    for fqn in contents.states:
        parameter = names.parameters[fqn]
        if parameter in optim.state:
            given = leaves_in(whole[STATE][ids[fqn]])
            optim.state[parameter] = _uncast(optim.state[parameter], given, before[parameter])


def _uncast(loaded: Any, given: Mapping[KeyPath, Any], before: Mapping[KeyPath, Tensor]) -> Any:
    """Return what an optimizer has loaded with the strings and dtypes that it was given, where it had them before."""

    def uncast(path: KeyPath, value: Any) -> Any:
        wanted = given.get(path)
        if isinstance(value, Tensor) and isinstance(wanted, Tensor):
            is_moved = path in before and value.device != wanted.device
            return wanted if is_moved or value.dtype != wanted.dtype else value
        return wanted if isinstance(wanted, str) else value  # torch casts these as it casts lists

    return mapped(uncast, loaded)
