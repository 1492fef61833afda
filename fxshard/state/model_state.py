"""The state_dict that the plain, unsharded module would have, gathered from the ranks; and loading one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fxshard.errors import ConfigError
from fxshard.state import full, serializable
from fxshard.state.fit import Announced, model_misfits, refuse, tied_otherwise
from fxshard.state.full import FullState
from fxshard.state.local_shards import LocalShard, can_cut, deliver, gather_all, hold, require_bucket
from fxshard.state.names import fqn_of, module_in
from fxshard.state.pytree import LeafMark
from fxshard.state.ranks import Ranks
from fxshard.state.user_hooks import extra_states, is_extra, require_writable

_CALL, _LOAD_CALL = "full_state_dict", "load_full_state_dict"


def state_of_module(model: nn.Module) -> dict[str, Any]:
    """Return the parameters and buffers themselves by FQN, in a dict of the class and versions of `state_dict`."""
    state = model.state_dict(keep_vars=True)
    named = copy.copy(state)
    named.clear()
    named.update((fqn_of(model, name), value) for name, value in state.items())
    if (metadata := getattr(state, "_metadata", None)) is not None:
        renamed = ((fqn_of(model, name), each) for name, each in metadata.items())
        vars(named)["_metadata"] = type(metadata)(renamed)
    return named


@torch.no_grad()
def full_state_dict(
    model: nn.Module, *, recipient_rank: int | None = 0, cpu_offload: bool = True, bucket_mib: float = 64
) -> dict[str, Any]:
    """Return the `state_dict` of the unsharded model: its keys, order, full parameters and buffers.

    Arguments are as for `full_optim_state_dict`. Buffers are those of the rank that gets it.

    Returns:
        The state where it is wanted, `{}` elsewhere.
    """
    ranks = Ranks.of(model)

    def held_here() -> tuple[int | None, dict[str, Any], dict[int, LocalShard], dict[str, str]]:
        require_bucket(bucket_mib)
        recipient = ranks.recipient(recipient_rank)
        state = state_of_module(module_in(model))
        require_values(state)
        held = {id(value): hold(value) for value in state.values() if isinstance(value, Tensor)}  # tied ones once
        facts = {"arguments": f"recipient_rank={recipient_rank}, cpu_offload={cpu_offload}, bucket_mib={bucket_mib}"}
        for name, value in state.items():
            facts |= {name: held[id(value)].text} if id(value) in held else dict(serializable.facts(value, name))
        return recipient, state, held, facts

    recipient, state, held, facts = ranks.together(held_here, _CALL)
    sharing = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    ranks.compare(_CALL, facts, sharing)
    shards, title = list(held.values()), "model state"
    fulls = gather_all(shards, recipient=recipient, cpu_offload=cpu_offload, bucket_mib=bucket_mib, title=title)
    if fulls is None:
        return {}
    arrived = dict(zip(held, fulls, strict=True))
    for name, value in state.items():
        state[name] = arrived[id(value)] if id(value) in arrived else copy.deepcopy(value)
    return state


def require_values(state: Mapping[str, Any]) -> None:
    """Raise `ConfigError` if parameters or buffers are on the meta device."""
    if absent := [name for name, value in state.items() if isinstance(value, Tensor) and value.is_meta]:
        raise ConfigError(
            f"parameters on the meta device have no values: {', '.join(absent)}. Call model.to_empty(device=...) first."
        )


@torch.no_grad()
def load_full_state_dict(model: nn.Module, state: Mapping[str, Any], *, bucket_mib: float = 64) -> None:
    """Load the `state_dict` of the unsharded model: every rank takes its rows, in place.

    Args:
        model: as for `full_optim_state_dict`.
        state: the full state, on one rank (the others pass `{}`) or on every rank: then the values of sharded
            parameters must be the same, and of buffers and extra state each rank takes its own.
        bucket_mib: as for `full_optim_state_dict`.
    """
    ranks = Ranks.of(model)

    def present() -> tuple[nn.Module, dict[str, Any]]:
        module = module_in(model)
        found = state_of_module(module)
        require_bucket(bucket_mib)
        require_values(found)
        _require_registered(module, found)
        return module, found

    module, own = ranks.together(present, _LOAD_CALL)
    given = full.receive(_LOAD_CALL, state, ranks, lambda: _packed(state, module, own))

    def fitting() -> list[LocalShard]:
        announced = {each.name: each for each in given.announced}
        refuse(model_misfits(given.contents, announced, own))
        found = [hold(own[each.name]) for each in given.announced]
        refuse(full.out_of_reach(given, found))
        return found

    targets = ranks.together(fitting, _LOAD_CALL)
    full.require_alike(_LOAD_CALL, given, targets, own, ranks, {"arguments": f"bucket_mib={bucket_mib}"})
    landings = [_contiguous(target) for target in targets]
    with extra_states(module, given.contents) as set_extra_states:
        ranks.together(set_extra_states, _LOAD_CALL)
        deliver(landings, given.tensors, given.source, ranks, bucket_mib)
    for target, landing in zip(targets, landings, strict=True):
        if landing is not target:
            target.local.copy_(landing.local)
    # Memory was written behind the parameters' backs; a gather that was launched before must be seen to be old.
    torch.autograd.graph.increment_version([value for value in own.values() if isinstance(value, Tensor)])


def _packed(state: Mapping[str, Any], model: nn.Module, own: Mapping[str, Any]) -> FullState:
    sharded = [name for name, value in state.items() if isinstance(value, DTensor)]
    full.require_whole(sharded, "model.load_state_dict")
    values = {fqn_of(model, name): value for name, value in state.items()}
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor) and not is_extra(name)}
    contents = {name: LeafMark((name,)) if name in tensors else value for name, value in values.items()}
    announced = [Announced.of((name,), tensor) for name, tensor in tensors.items()]
    refuse(tied_otherwise(tensors, own))
    return FullState(contents=contents, announced=announced, tensors=list(tensors.values()))


def _require_registered(model: nn.Module, own: Mapping[str, Any]) -> None:
    # Writing into what stands in the state_dict but nowhere else would change nothing.
    known = {id(each) for each in (*model.parameters(), *model.buffers())}
    tensors = {name: value for name, value in own.items() if isinstance(value, Tensor) and not is_extra(name)}
    if made := [name for name, value in tensors.items() if id(value) not in known]:
        raise ConfigError(
            f"{', '.join(made)} of the state_dict is neither a parameter nor a buffer, but made by a hook. Load with "
            "model.load_state_dict."
        )
    require_writable(tensors)
    placed = {name: value for name, value in tensors.items() if isinstance(value, DTensor)}
    if elsewhere := [name for name, value in placed.items() if hold(value).other and not can_cut(value)]:
        raise ConfigError(f"{', '.join(elsewhere)} has placements of another library. Load with model.load_state_dict.")


def _contiguous(target: LocalShard) -> LocalShard:
    if target.other or target.rows.is_contiguous():
        return target
    rows = torch.empty_like(target.rows, memory_format=torch.contiguous_format)
    return LocalShard(target.shape, target.dtype, rows.movedim(0, target.dim), target.mesh, dim=target.dim)
