"""The state of an optimizer by FQN, whatever its sharding, and the full state that is gathered of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.state import subclasses
from fxshard.state.local_shards import LocalShard, copied, gather_all, hold, require_bucket, value_text
from fxshard.state.names import GROUPS, PARAMS, STATE, ParameterNames, module_in, names_of
from fxshard.state.pytree import KeyPath, Leaf, LeafMark, put_back, take_out
from fxshard.state.ranks import Ranks, is_sharded, ranks_of

_CALL = "full_optim_state_dict"


@torch.no_grad()
def full_optim_state_dict(
    model: nn.Module,
    optim: Optimizer,
    *,
    recipient_rank: int | None = 0,
    cpu_offload: bool = True,
    keys: Literal["id", "fqn"] = "id",
    bucket_mib: float = 64,
) -> dict[str, Any]:
    """Return the state that the optimizer of the unsharded model would have, gathered from the ranks.

    It is what `optim.state_dict()` gives, with full tensors, new ones: no sharding shows. All ranks that share the
    model must call it; if they hold different state, all of them raise. Of modules on a smaller mesh than the model's,
    such as experts, it has what the mesh of the recipient holds.

    Args:
        model: sharded, or not yet (the one-line form); compiled or plain.
        optim: of parameters of `model`, any class; with several groups, parameters without state, other keys beside
            `state` and `param_groups`, which stay. Plain tensors in the state of sharded parameters are rows if all of
            one name have the shape of their parameter's local rows; else they are whole, and the same on all ranks.
        recipient_rank: who gets it, counted among the ranks that share the model; `None` for all of them.
        cpu_offload: whether the result is on the CPU; else it is where its tensors are.
        keys: "id" for torch's numbering of the parameters, "fqn" for their names in the model.
        bucket_mib: small tensors travel together in buckets of this size, large ones to other devices in pieces. Of
            device memory beside the result this takes two buckets on a rank that receives, and one elsewhere; and the
            rows of two tensors that are not contiguous, or all of one that is sharded otherwise than by rows.

    Returns:
        The state where it is wanted, `{}` elsewhere.

    Raises:
        ConfigError: an argument means nothing, or the ranks differ (what differs is named, on every rank).
    """
    ranks = Ranks.of(model)

    def held_here() -> tuple[int | None, ParameterNames, dict[str, Any], dict[str, ParameterState], dict[str, str]]:
        require_bucket(bucket_mib)
        if keys not in ("id", "fqn"):
            raise ConfigError(f'keys must be "id" or "fqn", got {keys!r}.')
        recipient = ranks.recipient(recipient_rank)
        names = names_of(module_in(model), optim)
        whole, states = _split(optim, names, to_cpu=cpu_offload)
        _require_other_names(whole[STATE], keys)
        arguments = f"recipient_rank={recipient_rank}, cpu_offload={cpu_offload}, bucket_mib={bucket_mib}"
        return recipient, names, whole, states, {"arguments": arguments, **_facts(optim, names, states, whole)}

    recipient, names, whole, states, facts = ranks.together(held_here, _CALL)
    sharing = {state_fact(fqn): parameter for fqn, parameter in names.parameters.items()}
    lacking = ranks.compare(_CALL, facts, sharing)
    if any(lacking):
        states = _completed(states, names, lacking, ranks)
    fulls = gather_all(
        [held for state in states.values() for held in state.held],
        recipient=recipient,
        cpu_offload=cpu_offload,
        bucket_mib=bucket_mib,
        title="optimizer state",
    )
    return {} if fulls is None else _assembled(whole, states, fulls, names, keys)


def _require_other_names(others: Mapping[Any, Any], keys: str) -> None:
    if found := unknown_keys(others, int if keys == "id" else str):
        raise ConfigError(
            f"the optimizer has state of no parameter under {', '.join(map(repr, found))}, where a load would take it "
            f"for a parameter's, by {keys}. Use a key of another type, or the other value of keys."
        )


def _split(
    optim: Optimizer, names: ParameterNames, *, to_cpu: bool
) -> tuple[dict[str, Any], dict[str, ParameterState]]:
    """Return an optimizer's state_dict without the state of parameters, copied, and that state in the order of ids."""
    everything = optim.state_dict()
    kept, ids = everything[STATE], names.ids
    fqns = [fqn for fqn, i in ids.items() if i in kept]
    found = parameter_states(
        {names.parameters[fqn]: subclasses.flatten(kept[ids[fqn]], state_fact(fqn)) for fqn in fqns}
    )
    of_parameters = set(ids.values())
    others = {key: value for key, value in kept.items() if key not in of_parameters}
    skeleton, leaves = take_out({**everything, STATE: others})
    require_no_shards(leaves)
    whole = put_back(skeleton, [copied(leaf.tensor, to_cpu=to_cpu) for leaf in leaves])
    return whole, dict(zip(fqns, found, strict=True))


def require_no_shards(leaves: Iterable[Leaf]) -> None:
    """Raise `ConfigError` if there are sharded tensors among those that belong to no parameter."""
    if sharded := [leaf.name for leaf in leaves if isinstance(leaf.tensor, DTensor)]:
        raise ConfigError(
            f"the optimizer's state_dict has sharded tensors that belong to no parameter: {', '.join(sharded)}. Keep "
            "them in the state of their parameter."
        )


@dataclass(eq=False)
class ParameterState:
    """What an optimizer keeps for one parameter."""

    skeleton: Any  # its state, with places for the tensors
    leaves: list[Leaf]
    held: list[LocalShard]  # how this rank holds each
    is_shared: bool  # whether other ranks have rows of the parameter

    @property
    def text(self) -> str:
        """What must be the same on all ranks; with the values, of what they share and is not sharded."""
        texts = [held.valued if self.is_shared else held.text for held in self.held]
        return simple(self.skeleton, texts)


def parameter_states(states: Mapping[Tensor, Any]) -> list[ParameterState]:
    """Take apart what an optimizer keeps for parameters.

    Optimizers that work on the local rows of sharded parameters keep plain tensors of their shape, which are rows as
    well. One may have that shape by chance, so a path leads to rows only if it does for every sharded parameter, and
    never if it ends in the name that torch's optimizers have for a counter.
    """
    taken = {parameter: take_out(state) for parameter, state in states.items()}
    others: set[KeyPath] = set()
    for parameter, (_, leaves) in taken.items():
        if isinstance(parameter, DTensor) and is_sharded(parameter):
            plain = [leaf for leaf in leaves if leaf.path not in others and not isinstance(leaf.tensor, DTensor)]
            others |= {
                path for path, x in plain if is_step(path) or not x.dim() or x.shape != local_of(parameter).shape
            }
    found = []
    for parameter, (skeleton, leaves) in taken.items():
        rows_of = parameter if isinstance(parameter, DTensor) and is_sharded(parameter) else None
        held = [hold(tensor, None if path in others else rows_of) for path, tensor in leaves]
        found.append(ParameterState(skeleton, leaves, held, isinstance(parameter, DTensor)))
    return found


def is_step(path: KeyPath) -> bool:
    """Return whether keys lead to what torch's optimizers count steps in; every rank has all of it."""
    return path[-1:] == ("step",)


def simple(value: Any, texts: Sequence[str] = ()) -> str:
    """Return words that are equal where values are; of what is neither plain nor a tensor the kind.

    If `value` is a skeleton, `texts` stand for its tensors.
    """
    if isinstance(value, Tensor):
        return type(value).__name__ if isinstance(value, DTensor) else value_text(value)
    if isinstance(value, LeafMark):
        return texts[value.number] if texts else "tensor"
    if isinstance(value, Mapping):
        return "{" + ", ".join([f"{key}: {simple(each, texts)}" for key, each in value.items()]) + "}"
    if isinstance(value, list | tuple):
        return f"[{', '.join([simple(each, texts) for each in value])}]"
    if isinstance(value, int | float | str | torch.dtype | None):
        return str(value)
    return type(value).__name__


def state_fact(fqn: str) -> str:
    """Return the name of the fact about the state of a parameter."""
    return f"state of {fqn}"


def unknown_keys(others: Mapping[Any, Any], kind: type) -> list[Any]:
    """Return those keys of state that belongs to no parameter that are of a kind that names parameters."""
    return [key for key, value in others.items() if isinstance(key, kind) and isinstance(value, Mapping)]


def _facts(
    optim: Optimizer, names: ParameterNames, states: Mapping[str, ParameterState], whole: Mapping[str, Any]
) -> dict[str, str]:
    """Return what ranks compare before they gather: name -> text, in an order that all ranks share."""
    facts = {"optimizer": type(optim).__qualname__}
    for g, group in enumerate(whole[GROUPS]):
        given = {key: value for key, value in group.items() if key != PARAMS}
        facts[f"param_groups[{g}]"] = f"{simple(given)} of {', '.join(names.groups[g])}"
    facts["state of no parameter"] = simple(whole[STATE])
    facts["other keys"] = simple({key: value for key, value in whole.items() if key not in (STATE, GROUPS)})
    for fqn in names.parameters:
        facts[state_fact(fqn)] = states[fqn].text if fqn in states else ""
    return facts


@dataclass(frozen=True, kw_only=True)
class _Description:
    """A tensor of the state in words, to be sent to ranks that do not have it."""

    path: KeyPath  # its keys below the parameter
    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    device: str  # type of the device where it is
    whole: Tensor | None = None  # its value on the CPU if every rank has all of it, `None` if cut into rows


def _described(state: ParameterState) -> tuple[Any, list[_Description]]:
    """Describe the state of parameters to ranks that lack it because they have no rows of them."""
    return state.skeleton, [
        _Description(
            path=leaf.path,
            shape=held.shape,
            dtype=held.dtype,
            device=held.local.device.type,
            whole=None if held.mesh is not None else held.local.detach().cpu(),
        )
        for leaf, held in zip(state.leaves, state.held, strict=True)
    ]


def _without_rows(skeleton: Any, descriptions: Iterable[_Description], parameter: Tensor) -> ParameterState:
    """Return the state of a parameter on a rank that has no rows of it, as another rank describes it."""
    leaves, held = [], []
    for each in descriptions:
        local = each.whole
        if local is None:
            local = local_of(parameter).new_empty((0, *each.shape[1:]), dtype=each.dtype, device=each.device)
        mesh = cast(DTensor, parameter).device_mesh if each.whole is None else None
        leaves.append(Leaf(each.path, local))
        held.append(LocalShard(each.shape, each.dtype, local, mesh))
    return ParameterState(skeleton, leaves, held, is_shared=True)


def _completed(
    states: Mapping[str, ParameterState], names: ParameterNames, lacking: Sequence[Sequence[str]], ranks: Ranks
) -> dict[str, ParameterState]:
    """Return the states, with those that this rank lacks for want of rows as others describe them."""
    wanted = dict.fromkeys(name for each in lacking for name in each)
    fqns = {state_fact(fqn): fqn for fqn in names.parameters}
    offered = {name: _described(states[fqns[name]]) for name in wanted if fqns.get(name) in states}
    everyone = dict(zip(ranks.members, ranks.exchange(offered), strict=True))
    completed = dict(states)
    for name in lacking[ranks.rank]:
        parameter = names.parameters[fqns[name]]
        donor = next(everyone[rank][name] for rank in ranks_of(parameter) if name in everyone[rank])
        completed[fqns[name]] = _without_rows(*donor, parameter)
    return {fqn: completed[fqn] for fqn in names.parameters if fqn in completed}


def _assembled(
    whole: Mapping[str, Any],
    states: Mapping[str, ParameterState],
    fulls: Sequence[Tensor],
    names: ParameterNames,
    keys: str,
) -> dict[str, Any]:
    """Return the state_dict of an unsharded optimizer; `fulls` are the full tensors of all `states`, in their order."""
    arriving = iter(fulls)
    by: Mapping[str, Any] = names.ids if keys == "id" else {fqn: fqn for fqn in names.parameters}
    filled = {fqn: put_back(each.skeleton, [next(arriving) for _ in each.leaves]) for fqn, each in states.items()}
    state = {by[fqn]: subclasses.unflatten(each, state_fact(fqn)) for fqn, each in filled.items()}
    groups = [
        {**group, PARAMS: [by[fqn] for fqn in fqns]} for group, fqns in zip(whole[GROUPS], names.groups, strict=True)
    ]
    return {**whole, STATE: {**state, **whole[STATE]}, GROUPS: groups}
