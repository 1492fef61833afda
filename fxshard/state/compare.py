"""What ranks must have alike before they move state: checked first, so that all raise and none waits for the others."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import torch.distributed as dist

from fxshard.errors import ConfigError
from fxshard.state.state_ranks import StateRanks

NOTHING = ""
"""The fact of a rank that has no state of a parameter."""

_MOST = 5  # differences that a message lists

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What a rank says of one part of its state.

    Attributes:
        text: equal texts are alike.
        ranks: the ranks that must say the same; the others have something else by this name.
        may_lack: whether this rank has no rows of it anyway, so that it may have nothing.
    """

    text: str
    ranks: tuple[int, ...]
    may_lack: bool = False


class Caught:
    """A context that catches what goes wrong on this rank, so that it can be told to the others first.

    Attributes:
        error: in words, `None` if nothing went wrong.
        cause: the exception.
    """

    def __init__(self) -> None:
        self.error: str | None = None
        self.cause: BaseException | None = None

    def __enter__(self) -> Self:
        """Nothing has gone wrong yet."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        """Keep an exception; `KeyboardInterrupt` and the like go on."""
        if isinstance(error, Exception):
            self.cause = error
            self.error = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
        return isinstance(error, Exception)

    def told(self, call: str, text: str) -> ConfigError:
        """What is raised on every rank for it."""
        return ConfigError(f"{call}: {text}")


def exchange(value: T, group: dist.ProcessGroup | None) -> list[T]:
    """Every rank's value, in the order of the group; pickled, so for small ones."""
    if group is None or dist.get_world_size(group) == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def raise_together(call: str, caught: Caught, group: dist.ProcessGroup | None) -> None:
    """Raise on every rank what one of them found.

    Raises:
        ConfigError: with the errors of all ranks.
    """
    errors = exchange(caught.error, group)
    found = {text: [rank for rank, other in enumerate(errors) if other == text] for text in errors if text}
    if not found:
        return
    if len(found) == 1 and all(errors):
        raise caught.told(call, str(errors[0])) from caught.cause
    text = " ".join(f"{_ranks(ranks)}: {text}" for text, ranks in found.items())
    raise caught.told(call, text) from caught.cause


def compare(
    call: str,
    caught: Caught,
    facts: Mapping[str, str],
    detailed: Callable[[], Mapping[str, Claim]],
    state_ranks: StateRanks,
) -> list[list[str]]:
    """Compare across ranks what each of them has.

    Args:
        call: the public function, for the message.
        caught: what this rank found wrong by itself.
        facts: what it has, name -> text.
        detailed: the same in full; called where the texts differ.
        state_ranks: the ranks.

    Returns:
        For each rank the names of which it has nothing while others have; empty if all have the same.

    Raises:
        ConfigError: on every rank, if one found something wrong, or ranks differ.
    """
    group = state_ranks.group
    digest = hashlib.sha256((caught.error or repr(list(facts.items()))).encode(errors="replace")).digest()
    if group is None or len(set(exchange(digest, group))) == 1:
        if caught.error is not None:
            raise caught.told(call, caught.error) from caught.cause
        return []
    raise_together(call, caught, group)
    ranks = dist.get_process_group_ranks(group)
    everyone = dict(zip(ranks, exchange(dict(detailed()), group), strict=True))
    differences = list(_differences(everyone))
    if differences:
        more = f" (and {len(differences) - _MOST} more)" if len(differences) > _MOST else ""
        raise ConfigError(
            f"{call}: the ranks do not hold the same state. {'; '.join(differences[:_MOST])}{more}. Every rank must "
            "build the same model and optimizer, take the same steps and pass the same arguments."
        )
    return [_lacking(rank, everyone) for rank in ranks]


def _differences(everyone: Mapping[int, Mapping[str, Claim]]) -> Sequence[str]:
    names = dict.fromkeys(name for facts in everyone.values() for name in facts)
    found = []
    for name in names:
        for sharing in dict.fromkeys(facts[name].ranks for facts in everyone.values() if name in facts):
            texts: dict[str, list[int]] = {}
            for rank in sharing:
                fact = everyone[rank].get(name) if rank in everyone else None
                if fact is None or not (fact.may_lack and fact.text == NOTHING):
                    texts.setdefault(fact.text if fact is not None else NOTHING, []).append(rank)
            if len(texts) > 1:
                sides = ", ".join(f"{text or 'nothing'} on {_ranks(ranks)}" for text, ranks in texts.items())
                found.append(f"{name}: {sides}")
    return found


def _lacking(rank: int, everyone: Mapping[int, Mapping[str, Claim]]) -> list[str]:
    return [
        name
        for name, fact in everyone[rank].items()
        if fact.text == NOTHING and any(everyone[other][name].text != NOTHING for other in fact.ranks)
    ]


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {', '.join(map(str, ranks))}"
