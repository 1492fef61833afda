"""The full state that a load is given: on one rank, which tells the others what is coming, or on every rank."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from fxshard.errors import ConfigError
from fxshard.state.local_shards import LocalShard, value_text
from fxshard.state.ranks import Caught, Ranks

_MOST = 10  # problems that a message lists


@dataclass(frozen=True, kw_only=True)
class Announced:
    """A tensor that is coming.

    Attributes:
        name: what messages call it.
        shape: of the full tensor.
        dtype: of it.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, name: str, tensor: Tensor) -> Announced:
        """Announce a tensor."""
        return cls(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype)


@dataclass(frozen=True, kw_only=True)
class FullState:
    """A full state.

    Attributes:
        contents: all of it, with a `LeafMark` for each tensor that is to be cut or is large.
        announced: those tensors.
        tensors: themselves, on the ranks that have them.
        others: what else ranks that all pass a state must pass alike: name -> in words.
        source: the global rank that has them; `None` if every rank does.
    """

    contents: Any
    announced: Sequence[Announced]
    tensors: Sequence[Tensor] | None
    others: Mapping[str, str] = field(default_factory=dict)
    source: int | None = None


def receive(
    call: str,
    caught: Caught,
    state: Mapping[str, Any],
    bucket_mib: float,
    ranks: Ranks,
    pack: Callable[[], FullState],
) -> FullState:
    """The full state on every rank; the tensors themselves stay where they are.

    Args:
        call: the public function, for the message.
        caught: what this rank found wrong.
        state: what it was given.
        bucket_mib: likewise.
        ranks: the ranks.
        pack: makes a full state of `state`, where that counts.

    Raises:
        ConfigError: on every rank, if one found something wrong with what it was given.
    """
    source = _choose_source(call, caught, state, bucket_mib, ranks)
    full = None
    with Caught() as caught:
        if source is None or ranks.members[ranks.rank] == source:
            full = pack()
            if source is not None:
                _require_sendable(full.contents)
    ranks.raise_together(call, caught)
    if full is not None and (source is None or ranks.group is None):
        return full
    told: list[Any] = [None if full is None else (full.contents, full.announced)]
    dist.broadcast_object_list(told, src=source, group=ranks.group)
    contents, announced = told[0]
    tensors = None if full is None else full.tensors
    return FullState(contents=contents, announced=announced, tensors=tensors, source=source)


def _choose_source(call: str, caught: Caught, state: Mapping[str, Any], bucket_mib: float, ranks: Ranks) -> int | None:
    """The global rank whose state is loaded: the first that was given one; `None` if all were.

    Raises:
        ConfigError: on every rank, if one found something wrong, none was given a state, or buckets differ.
    """
    is_given = False
    if caught.error is None:
        with caught:
            if not isinstance(state, Mapping):
                raise ConfigError(f"the state must be a dict, got {type(state).__name__}.")
            is_given = bool(state)
    passed = ranks.exchange((is_given, bucket_mib))
    given = [each for each, _ in passed]
    with caught:
        if caught.error is None and len({size for _, size in passed}) > 1:
            sizes = ", ".join(f"{size} on rank {rank}" for rank, (_, size) in enumerate(passed))
            raise ConfigError(f"bucket_mib differs between ranks: {sizes}. Pass the same on every rank.")
        if caught.error is None and not any(given):
            raise ConfigError("no rank was given a state. Pass it on rank 0, and {} on the others, or on every rank.")
    ranks.raise_together(call, caught)
    return None if all(given) else ranks.members[given.index(True)]


def _require_sendable(contents: object) -> None:
    try:
        pickle.dumps(contents)
    except Exception as error:
        raise ConfigError(
            f"the state cannot be sent to other ranks: {error}. Pass it on every rank, or leave that value out."
        ) from error


def refuse(problems: Iterable[str]) -> None:
    """Raise for all of them, if there are any.

    Raises:
        ConfigError: what is coming does not fit.
    """
    if not (found := list(problems)):
        return
    more = f" (and {len(found) - _MOST} more)" if len(found) > _MOST else ""
    raise ConfigError(f"the state does not fit, and nothing was loaded. {'; '.join(found[:_MOST])}{more}.")


def require_alike(
    call: str,
    caught: Caught,
    full: FullState,
    targets: Sequence[LocalShard],
    sharing: Mapping[str, Tensor],
    ranks: Ranks,
    own: Mapping[str, str] | None = None,
) -> None:
    """Make sure, before anything is written, that every rank can take what is coming, and that it is the same.

    Args:
        call: the public function, for the message.
        caught: what this rank found wrong.
        full: what is coming.
        targets: where it goes.
        sharing: name -> the parameter or buffer that says which ranks share what is coming; all ranks share the rest.
        ranks: the ranks.
        own: what each of them has itself that all must have alike: name -> in words.

    Raises:
        ConfigError: on every rank, if one cannot.
    """
    facts: dict[str, str] = {}
    if caught.error is None:
        with caught:
            facts = {each.name: target.text for each, target in zip(full.announced, targets, strict=True)}
            if full.source is not None:  # what is not cut into rows is sent to all
                whole = {each.name for each, target in zip(full.announced, targets, strict=True) if target.mesh is None}
                sharing = {name: parameter for name, parameter in sharing.items() if name not in whole}
            elif ranks.group is not None:
                facts = {**_valued(facts, full, targets, sharing), **full.others}
            facts |= own or {}
    ranks.compare(call, caught, facts, sharing)


def _valued(
    facts: Mapping[str, str], full: FullState, targets: Sequence[LocalShard], sharing: Mapping[str, Tensor]
) -> dict[str, str]:
    """The facts with the values that this rank was given, where ranks share them."""
    given = zip(facts.items(), targets, full.tensors or (), strict=True)
    return {
        name: f"{text} = {value_text(tensor)}" if isinstance(sharing[name], DTensor) and not target.replica else text
        for (name, text), target, tensor in given
    }


def out_of_reach(full: FullState, targets: Sequence[LocalShard]) -> list[str]:
    """What is wrong if a tensor is shared by ranks that do not include the one that has it."""
    unreached = [
        each.name
        for each, target in zip(full.announced, targets, strict=True)
        if target.mesh is not None
        and full.source is not None
        and full.source not in dist.get_process_group_ranks(target.mesh.get_group())
    ]
    if not unreached:
        return []
    return [f"rank {full.source} has no part in {', '.join(unreached)}: pass the state on every rank"]
