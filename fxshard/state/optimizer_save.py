"""The full state of an optimizer, gathered from the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fxshard.errors import ConfigError
from fxshard.runtime.parameters import local_of
from fxshard.state.local_shards import LocalShard, copied, gather_all, require_bucket
from fxshard.state.names import ParameterNames, module_in, names_of
from fxshard.state.optimizer_state import (
    OptimizerState,
    require_no_shards,
    shards_in,
    state_fact,
    texts_of,
    unknown_keys,
)
from fxshard.state.pytree import KeyPath, put_back, take_out
from fxshard.state.ranks import Ranks, ranks_of

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

    def held_here() -> tuple[int | None, _Held, dict[str, str]]:
        require_bucket(bucket_mib)
        if keys not in ("id", "fqn"):
            raise ConfigError(f'keys must be "id" or "fqn", got {keys!r}.')
        held = _Held.of(optim, names_of(module_in(model), optim), keys, cpu_offload)
        arguments = f"recipient_rank={recipient_rank}, cpu_offload={cpu_offload}, bucket_mib={bucket_mib}"
        facts = {"arguments": arguments, "optimizer": type(optim).__qualname__, **held.facts()}
        return ranks.recipient(recipient_rank), held, facts

    recipient, held, facts = ranks.together(held_here, _CALL)
    sharing = {state_fact(fqn): parameter for fqn, parameter in held.names.parameters.items()}
    lacking = ranks.compare(_CALL, facts, sharing)
    if any(lacking):
        held.complete(lacking, ranks)
    shards, title = list(held.shards.values()), "optimizer state"
    fulls = gather_all(shards, recipient=recipient, cpu_offload=cpu_offload, bucket_mib=bucket_mib, title=title)
    if fulls is None:
        return {}
    states = put_back(held.state.states, dict(zip(held.shards, fulls, strict=True)))
    return replace(held.state, states=states).state_dict(held.names, keys)


class _Description(NamedTuple):
    """A tensor of the state in words, to be sent to ranks that do not have it."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    device: str  # type of the device where it is
    whole: Tensor | None  # its value on the CPU if every rank has all of it, `None` if cut into rows

    @classmethod
    def of(cls, shard: LocalShard) -> _Description:
        whole = None if shard.mesh is not None else shard.local.detach().cpu()
        return cls(shard.shape, shard.dtype, shard.local.device.type, whole)

    def without_rows(self, parameter: Tensor) -> LocalShard:
        """Return what a rank holds that has no rows of the parameter."""
        if self.whole is not None:
            return LocalShard(self.shape, self.dtype, self.whole)
        local = local_of(parameter).new_empty((0, *self.shape[1:]), dtype=self.dtype, device=self.device)
        return LocalShard(self.shape, self.dtype, local, cast(DTensor, parameter).device_mesh)


@dataclass(eq=False)
class _Held:
    names: ParameterNames
    state: OptimizerState  # its tensors are taken out
    shards: dict[KeyPath, LocalShard]  # those of parameters, in the order of ids

    @classmethod
    def of(cls, optim: Optimizer, names: ParameterNames, keys: str, to_cpu: bool) -> _Held:
        """Describe a state_dict; all but the state of parameters is copied."""
        found = OptimizerState.of(optim.state_dict(), {i: fqn for fqn, i in names.ids.items()})
        skeleton, leaves = take_out(found.beside)
        require_no_shards(leaves)
        beside = put_back(skeleton, {path: copied(tensor, to_cpu=to_cpu) for path, tensor in leaves.items()})
        if unknown := unknown_keys(found.others, int if keys == "id" else str):
            raise ConfigError(
                f"the optimizer has state of no parameter under {', '.join(map(repr, unknown))}, where a load would "
                f"take it for a parameter's, by {keys}. Use a key of another type, or the other value of keys."
            )
        states, tensors = take_out({fqn: found.states[fqn] for fqn in names.parameters if fqn in found.states})
        return cls(names, replace(found.with_beside(beside), states=states), shards_in(tensors, names.parameters))

    def facts(self) -> dict[str, str]:
        lacking = {state_fact(fqn): "" for fqn in self.names.parameters if fqn not in self.state.states}
        return self.state.facts(texts_of(self.shards, self.names.parameters)) | lacking

    def complete(self, lacking: Sequence[Sequence[str]], ranks: Ranks) -> None:
        """Take what this rank lacks for want of rows as others describe it."""
        parameters, states, shards = self.names.parameters, self.state.states, self.shards
        fqns = {state_fact(fqn): fqn for fqn in parameters}
        wanted = {fqns[name] for each in lacking for name in each if name in fqns}
        offered: dict[str, tuple[Any, dict[KeyPath, _Description]]] = {
            fqn: (states[fqn], {}) for fqn in wanted if fqn in states
        }
        for path, shard in shards.items():
            if path[0] in offered:
                offered[path[0]][1][path] = _Description.of(shard)
        everyone = dict(zip(ranks.members, ranks.exchange(offered), strict=True))
        for fqn in (fqns[name] for name in lacking[ranks.rank]):
            donors = (everyone[rank] for rank in ranks_of(parameters[fqn]))
            states[fqn], described = next(donor[fqn] for donor in donors if fqn in donor)
            shards |= {path: each.without_rows(parameters[fqn]) for path, each in described.items()}
        order = {fqn: i for i, fqn in enumerate(parameters)}
        self.shards = dict(sorted(shards.items(), key=lambda item: order[item[0][0]]))
        self.state = replace(self.state, states=dict(sorted(states.items(), key=lambda item: order[item[0]])))
