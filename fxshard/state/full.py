"""The full state that a load is given: on one rank, which tells the others what is coming, or on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes
from fxshard.state.fit import Announced
from fxshard.state.local_shards import LocalShard, value_text
from fxshard.state.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class FullState:
    """A full state."""

    contents: Any  # all of it; a `LeafMark` for each tensor that is to be cut or is large
    announced: Sequence[Announced]  # those tensors
    tensors: Sequence[Tensor] | None  # themselves, on the ranks that have them
    source: int | None = None  # the global rank that has them; `None` if every rank does


def receive(call: str, state: Mapping[str, Any], ranks: Ranks, pack: Callable[[], FullState]) -> FullState:
    """Give every rank the full state; the tensors themselves stay where they are.

    `call` names the public function in messages. `state` is what this rank was given, of which `pack` makes a full
    state where that counts. Raises `ConfigError` on every rank if one of them finds something wrong.
    """
    source = _choose_source(call, state, ranks)

    def packed() -> FullState | None:
        if source is not None and ranks.members[ranks.rank] != source:
            return None
        mine = pack()
        if source is not None:
            _require_sendable(mine.contents)
        return mine

    full = ranks.together(packed, call)
    if full is not None and (source is None or ranks.group is None):
        return full
    told: list[Any] = [None if full is None else (full.contents, full.announced)]
    dist.broadcast_object_list(told, src=source, group=ranks.group)
    contents, announced = told[0]
    tensors = None if full is None else full.tensors
    return FullState(contents=contents, announced=announced, tensors=tensors, source=source)


def require_whole(sharded: Sequence[str], instead: str) -> None:
    """Raise `ConfigError` if there are any of these, the names of sharded tensors in a full state."""
    if sharded:
        raise ConfigError(
            f"the state is sharded (DTensors): {', '.join(sharded[:5])}. Give the full state, or load this one with "
            f"{instead}."
        )


def _choose_source(call: str, state: Mapping[str, Any], ranks: Ranks) -> int | None:
    """Return the global rank whose state is loaded: the first that was given one; `None` if all were."""

    def is_given() -> bool:
        if not isinstance(state, Mapping):
            raise ConfigError(f"the state must be a dict, got {type(state).__name__}.")
        return bool(state)

    given = ranks.exchange(ranks.together(is_given, call))
    if not any(given):
        raise ConfigError(
            f"{call}: no rank was given a state. Pass it on rank 0, and {{}} on the others, or on every rank."
        )
    return None if all(given) else ranks.members[given.index(True)]


def _require_sendable(contents: object) -> None:
    try:
        pickle.dumps(contents)
    except Exception as error:
        raise ConfigError(
            f"the state cannot be sent to other ranks: {error}. Pass it on every rank, or leave that value out."
        ) from error


def require_alike(
    call: str,
    full: FullState,
    targets: Sequence[LocalShard],
    sharing: Mapping[str, Tensor],
    ranks: Ranks,
    own: Mapping[str, str],
) -> None:
    """Make sure, before anything is written, that every rank can take what is coming, and that it is the same.

    `full` is coming and goes to `targets`. `sharing` maps name -> the parameter or buffer whose ranks share it; all
    ranks share the rest. `own` is what else must be the same on all ranks: name -> in words.
    """
    if full.source is not None:  # what is not cut into rows is sent to all
        whole = {each.name for each, target in zip(full.announced, targets, strict=True) if target.mesh is None}
        sharing = {name: parameter for name, parameter in sharing.items() if name not in whole}

    def facts() -> dict[str, str]:
        found = dict(own)
        given = full.tensors if full.source is None and ranks.group is not None else None
        for i, (each, target) in enumerate(zip(full.announced, targets, strict=True)):
            found[each.name] = target.text
            if given is not None and isinstance(sharing[each.name], DTensor) and not target.replica:
                found[each.name] += f" = {value_text(given[i])}"
        return found

    ranks.compare(call, ranks.together(facts, call), sharing)


def out_of_reach(full: FullState, targets: Sequence[LocalShard]) -> Iterator[str]:
    """Say so if a tensor is shared by ranks that do not include the one that has it."""
    meshes = {each.name: target.mesh for each, target in zip(full.announced, targets, strict=True)}
    if unreached := [
        name
        for name, mesh in meshes.items()
        if mesh is not None and full.source is not None and full.source not in mesh_axes.ranks_of(mesh)
    ]:
        yield f"rank {full.source} has no part in {', '.join(unreached)}: pass the state on every rank"
