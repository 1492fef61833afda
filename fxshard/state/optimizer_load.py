"""The load of the full state of an optimizer: cut anew for the present ranks and units, to the bit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Adafactor, Optimizer

from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import rows_first, shard_rows
from fxshard.state import full, subclasses
from fxshard.state.full import Announced, FullState
from fxshard.state.local_shards import LocalShard, can_cut, deliver, hold, require_bucket
from fxshard.state.names import GROUPS, PARAMS, STATE, ParameterNames, module_in, names_of
from fxshard.state.optimizer_state import (
    is_step,
    parameter_states,
    simple,
    state_fact,
    unknown_keys,
)
from fxshard.state.pytree import KeyPath, LeafMark, put_back, take_out
from fxshard.state.ranks import Ranks, is_sharded

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
        model: as for `full_optim_state_dict`.
        optim: with the same param groups; its own state is replaced.
        state: the full state, by id or FQN, on one rank (the others pass `{}`) or the same on every rank: all that
            ranks share of it is compared.
        bucket_mib: as for `full_optim_state_dict`.

    Raises:
        ConfigError: groups, keys, shapes or dtypes do not fit (what does not is named, on every rank).
    """
    ranks = Ranks.of(model)

    def named() -> ParameterNames:
        require_bucket(bucket_mib)
        return names_of(module_in(model), optim)

    names = ranks.together(named, _CALL)
    given = full.receive(_CALL, state, bucket_mib, ranks, lambda: _packed(state, names))
    contents = cast(_GivenState, given.contents)

    def fitting() -> list[_LoadTarget]:
        full.refuse(_misfits(contents, names))
        found = _targets(contents, given.announced, names, optim)
        problems = [problem for each in found for problem in each.problems]
        full.refuse(problems + _other_keys(contents, names, optim) + _placed_otherwise(contents, names))
        full.refuse(full.out_of_reach(given, [each.held for each in found]))
        return found

    places = ranks.together(fitting, _CALL)
    targets = [each.held for each in places]
    sharing = {each.announced.name: each.parameter for each in places}
    sharing |= {state_fact(fqn): names.parameters[fqn] for fqn in contents.states if fqn in names.parameters}
    own = {"optimizer": type(optim).__qualname__}
    full.require_alike(_CALL, given, targets, sharing, ranks, own)
    for each in places:
        each.allocate()
    deliver(targets, given.tensors, given.source, ranks, bucket_mib)
    # load_state_dict and its hooks are the user's.
    ranks.together(lambda: _install(optim, names, contents, [each.finished() for each in places]), _CALL)


@dataclass(frozen=True)
class _Coming:
    """What is coming for one parameter: its state with places counted through all parameters, and their paths."""

    skeleton: Any
    paths: list[tuple[int, KeyPath]]


@dataclass(frozen=True)
class _GivenState:
    """An optimizer's state by FQN."""

    states: dict[str, _Coming]  # FQN -> what is coming
    others: dict[Any, Any]  # state that belongs to no parameter
    unknown_keys: list[Any]  # of it, those that would name parameters
    groups: list[dict[str, Any]]  # hyperparameters, and the FQNs of each group
    rest: dict[str, Any]  # other top-level keys


def _packed(state: Mapping[str, Any], names: ParameterNames) -> FullState:
    """Return a state_dict, by id or by FQN, as a full state by FQN."""
    if STATE not in state or GROUPS not in state:
        raise ConfigError(
            f"the state must be a dict with the keys {STATE!r} and {GROUPS!r}, as full_optim_state_dict or an "
            f"optimizer's state_dict() gives it, got one with {', '.join(map(repr, state)) or 'none'}."
        )
    by_key = _fqns_by_key(state, names)
    states: dict[str, _Coming] = {}
    announced: list[Announced] = []
    tensors: list[Tensor] = []
    for key, value in state[STATE].items():
        if key not in by_key:
            continue
        skeleton, leaves = take_out(subclasses.flatten(value, state_fact(by_key[key])))
        numbers = range(len(tensors), len(tensors) + len(leaves))
        places = [LeafMark(number) for number in numbers]
        paths = [(number, leaf.path) for number, leaf in zip(numbers, leaves, strict=True)]
        states[by_key[key]] = _Coming(put_back(skeleton, places), paths)
        tensors += [leaf.tensor for leaf in leaves]
        announced += [Announced.of(f"state of {by_key[key]}: {leaf.name}", leaf.tensor) for leaf in leaves]
    if sharded := [each.name for each, tensor in zip(announced, tensors, strict=True) if isinstance(tensor, DTensor)]:
        raise ConfigError(
            f"the state is sharded (DTensors): {', '.join(sharded[:5])}. Give the full state, or load this one with "
            "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict."
        )
    others = {key: value for key, value in state[STATE].items() if key not in by_key}
    contents = _GivenState(
        states,
        others,
        unknown_keys(others, str if _is_by_fqn(state) else int),
        [{**group, PARAMS: [by_key.get(key, key) for key in group[PARAMS]]} for group in state[GROUPS]],
        {key: value for key, value in state.items() if key not in (STATE, GROUPS)},
    )
    return FullState(contents=contents, announced=announced, tensors=tensors, others=_others(contents))


def _others(contents: _GivenState) -> dict[str, str]:
    """Describe all but the tensors of parameters in words."""
    states = {state_fact(fqn): simple(coming.skeleton) for fqn, coming in contents.states.items()}
    groups = {f"param_groups[{g}]": simple(group) for g, group in enumerate(contents.groups)}
    return {**states, **groups, "state of no parameter": simple(contents.others), "other keys": simple(contents.rest)}


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


def _misfits(contents: _GivenState, names: ParameterNames) -> Iterator[str]:
    """Say what does not fit between the groups of the state and those of the optimizer."""
    given = [list(group[PARAMS]) for group in contents.groups]
    everything = {fqn for fqns in given for fqn in fqns}
    if missing := [fqn for fqn in names.parameters if fqn not in everything]:
        yield f"its param_groups lack {', '.join(missing)}"
    if extra := [fqn for fqns in given for fqn in fqns if fqn not in names.parameters]:
        yield f"its param_groups have {', '.join(extra)}, which the optimizer does not have"
    if not missing and not extra and [set(fqns) for fqns in given] != [set(fqns) for fqns in names.groups]:
        yield f"its param_groups hold {given}, those of the optimizer {names.groups}"
    if contents.unknown_keys:
        yield f"it has state of {', '.join(map(str, contents.unknown_keys))}, which no param_group names"


@dataclass(eq=False)
class _LoadTarget:
    """Where a tensor that is coming goes."""

    announced: Announced  # what is coming
    parameter: Tensor  # whose state it is
    existing: Tensor | None  # the tensor that the optimizer has there now
    as_dtensor: bool  # whether it becomes a DTensor
    held: LocalShard  # how this rank will hold it; memory comes with `allocate`
    problems: list[str]  # why it cannot

    def allocate(self) -> None:
        held = self.held
        if held.other:
            like = self.existing if isinstance(self.existing, DTensor) else self.parameter.detach()
            held.local = torch.empty_like(like, dtype=held.dtype)
            return
        shape = held.shape if held.mesh is None else rows_first(self._local_shape(), held.dim)
        made = torch.empty(shape, dtype=held.dtype, device=held.local.device)
        held.local = made.movedim(0, held.dim) if held.dim else made

    def _local_shape(self) -> torch.Size:
        mesh = self.held.mesh
        assert mesh is not None
        whole = torch.empty(self.held.shape, device="meta")
        return shard_rows(whole, mesh_axes.shard_rank(mesh), mesh_axes.num_shards(mesh), self.held.dim).shape

    def finished(self) -> Tensor:
        held = self.held
        if not self.as_dtensor or held.other:
            return held.local
        mesh = cast(DTensor, self.existing if isinstance(self.existing, DTensor) else self.parameter).device_mesh
        placements = mesh_axes.placements(mesh, is_scalar=held.mesh is None, dim=held.dim)
        stride = torch.empty(held.shape, device="meta").stride()
        shape = torch.Size(held.shape)
        return DTensor.from_local(held.local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_strict(optim: Optimizer) -> bool:
    """Return whether an optimizer keeps the same for all parameters of a group, each tensor shaped as its parameter."""
    return type(optim).__module__.startswith("torch.optim") and not isinstance(optim, Adafactor | LBFGS)


def _targets(
    contents: _GivenState, announced: Sequence[Announced], names: ParameterNames, optim: Optimizer
) -> list[_LoadTarget]:
    """Return where everything that is coming goes, in the order in which it comes."""
    found: dict[int, _LoadTarget] = {}
    is_strict = _is_strict(optim)
    states = parameter_states(
        {p: subclasses.flatten(optim.state.get(p, {}), state_fact(fqn)) for fqn, p in names.parameters.items()}
    )
    present = dict(zip(names.parameters, states, strict=True))
    counters = _counters(contents, announced, names)
    for fqn, coming in contents.states.items():
        pairs = zip(present[fqn].leaves, present[fqn].held, strict=True)
        existing = {leaf.path: (leaf.tensor, held) for leaf, held in pairs}
        parts = dict(subclasses.parts_in(coming.skeleton))
        for number, path in coming.paths:
            tensor, now = existing.get(path, (None, None))
            parameter = names.parameters[fqn]
            is_rows = parts.get(path, announced[number].shape == tuple(parameter.shape))
            found[number] = _target(
                announced[number], path in counters, parameter, tensor, now, is_strict, is_rows=is_rows
            )
    return [found[number] for number in range(len(announced))]


def _counters(contents: _GivenState, announced: Sequence[Announced], names: ParameterNames) -> set[KeyPath]:
    """Return the paths that lead to one element for all parameters, though one has more, or have torch's own name."""
    # Of a parameter of one element a counter may have the shape, so what it has for the others counts.
    sizes = [
        (path, math.prod(announced[number].shape), names.parameters[fqn].numel())
        for fqn, coming in contents.states.items()
        for number, path in coming.paths
    ]
    larger = {path for path, size, _ in sizes if size != 1}
    of_larger = {path for path, _, size in sizes if size != 1}
    return {path for path, _, _ in sizes if path not in larger and (path in of_larger or is_step(path))}


def _target(
    each: Announced,
    is_counter: bool,
    parameter: Tensor,
    existing: Tensor | None,
    now: LocalShard | None,
    is_strict: bool,
    *,
    is_rows: bool,
) -> _LoadTarget:
    """Choose what is there now; where there is nothing, what an optimizer would make for this parameter."""
    is_scalar = is_counter or (not each.shape and tuple(parameter.shape) != ())
    if existing is not None and now is not None:
        mesh, other, as_dtensor, device = now.mesh, now.other, isinstance(existing, DTensor), existing.device
        dim = now.dim
    else:
        as_dtensor = isinstance(parameter, DTensor) and not is_scalar
        is_alike = as_dtensor and is_rows
        has_rows, other = is_alike and is_sharded(cast(DTensor, parameter)), is_alike and hold(parameter).other
        mesh = cast(DTensor, parameter).device_mesh if has_rows else None
        device = torch.device("cpu") if is_scalar else parameter.device
        dim = hold(parameter).dim if has_rows else 0
    held = LocalShard(each.shape, each.dtype, torch.empty(0, dtype=each.dtype, device=device), mesh, dim=dim)
    held.other, held.replica = other, as_dtensor and mesh is None and not other
    return _LoadTarget(each, parameter, existing, as_dtensor, held, list(_wrong(each, parameter, now, is_strict)))


def _wrong(each: Announced, parameter: Tensor, now: LocalShard | None, is_strict: bool) -> Iterator[str]:
    """Say what does not fit one tensor: to what the optimizer has there, or to the parameter if it has nothing yet."""
    if now is not None:
        if now.shape != each.shape or now.dtype != each.dtype:
            yield f"{each.name} is {each.dtype}{list(each.shape)}, expected {now.dtype}{list(now.shape)}"
    elif is_strict and each.shape:
        shape, dtype = tuple(parameter.shape), parameter.dtype
        if shape != each.shape or (each.dtype.is_floating_point and dtype != each.dtype):
            yield f"{each.name} is {each.dtype}{list(each.shape)}, expected {dtype}{list(shape)} as its parameter"


def _other_keys(contents: _GivenState, names: ParameterNames, optim: Optimizer) -> list[str]:
    """Find parameters for which other keys are coming than the optimizer keeps, or than for others like them."""
    found = []
    for fqns in names.groups:
        states = {fqn: contents.states[fqn].skeleton for fqn in fqns if fqn in contents.states}
        of_group = {key for each in states.values() if isinstance(each, dict) for key in each}
        for fqn, given in states.items():
            now = optim.state.get(names.parameters[fqn]) or (of_group if _is_strict(optim) else given)
            if isinstance(given, dict) and set(now) != set(given):
                found.append(f"state of {fqn} has {sorted(map(str, given))}, expected {sorted(map(str, now))}")
                continue
            own = optim.state.get(names.parameters[fqn])
            (there, here) = (subclasses.kinds_in(given), subclasses.kinds_in(subclasses.flatten(own, state_fact(fqn))))
            if own and there != here:
                found.append(
                    f"state of {fqn} is kept in {there or 'plain tensors'}, expected {here or 'plain tensors'}"
                )
    return found


def _placed_otherwise(contents: _GivenState, names: ParameterNames) -> list[str]:
    """Find parameters of other libraries' placements, for whose state there is no way in."""
    found = []
    for fqn in contents.states:
        parameter = names.parameters[fqn]
        if not isinstance(parameter, DTensor):
            continue
        if (kinds := subclasses.kinds_in(contents.states[fqn].skeleton)) and (
            hold(parameter).other or hold(parameter).dim
        ):
            found.append(f"{fqn} is not sharded by rows, and its state is kept in {kinds}, which is cut by rows only")
        elif hold(parameter).other and not can_cut(parameter):
            placements = ", ".join(map(str, parameter.placements))
            found.append(
                f"{fqn} is not sharded by rows, but {placements}: use "
                "torch.distributed.checkpoint.state_dict.set_optimizer_state_dict"
            )
    return found


def _install(optim: Optimizer, names: ParameterNames, contents: _GivenState, tensors: Sequence[Tensor]) -> None:
    """Hand everything to the optimizer's own `load_state_dict`, and take back the casts that it makes."""
    states = {
        fqn: subclasses.unflatten(put_back(each.skeleton, tensors), state_fact(fqn))
        for fqn, each in contents.states.items()
    }
    before = {fqn: optim.state.get(names.parameters[fqn], {}) for fqn in states}
    ids = names.ids
    by_id = {ids[fqn]: state for fqn, state in states.items()}
    groups = [
        {**group, PARAMS: [ids[fqn] for fqn in fqns]} for group, fqns in zip(contents.groups, names.groups, strict=True)
    ]
    optim.load_state_dict({**contents.rest, STATE: {**by_id, **contents.others}, GROUPS: groups})
    for fqn, state in states.items():
        parameter = names.parameters[fqn]
        if parameter in optim.state:
            optim.state[parameter] = _uncast(_with_texts(optim.state[parameter], state), state, before[fqn])


def _with_texts(loaded: Any, given: Any) -> Any:
    """Return what an optimizer has loaded, with the strings it was given: torch casts these as it casts lists."""
    if isinstance(given, str | bytes):
        return given
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        return {key: _with_texts(value, given.get(key)) for key, value in loaded.items()}
    if isinstance(loaded, list | tuple) and isinstance(given, list | tuple) and len(loaded) == len(given):
        return type(loaded)([_with_texts(*pair) for pair in zip(loaded, given, strict=True)])
    return loaded


def _uncast(loaded: Any, given: Any, before: Any) -> Any:
    """Return what an optimizer has loaded, with the dtypes it was given, on the devices of its tensors before."""
    skeleton, leaves = take_out(loaded)
    wanted = {leaf.path: leaf.tensor for leaf in take_out(given)[1]}
    placed = {leaf.path for leaf in take_out(before)[1]}
    changed = [
        leaf.path in wanted
        and (
            leaf.tensor.dtype != wanted[leaf.path].dtype
            or (leaf.path in placed and leaf.tensor.device != wanted[leaf.path].device)
        )
        for leaf in leaves
    ]
    if not any(changed):
        return loaded
    return put_back(skeleton, [wanted[x.path] if new else x.tensor for x, new in zip(leaves, changed, strict=True)])
