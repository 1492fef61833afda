"""The ranks that save or load one checkpoint together: what one of them cannot do, all refuse."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException

from fxshard.errors import CheckpointError, ConfigError, FxshardError, RankMismatchError
from fxshard.state.compare import exchange
from fxshard.state.state_ranks import ranks_of, state_ranks_of

T = TypeVar("T")

Comparison = Mapping[str, Sequence[str]]
"""What ranks compare: a title, and lines that must be the same on all of them."""


@dataclass(frozen=True)
class _Failure:
    """An error as it travels between ranks."""

    kind: type[FxshardError]
    text: str

    @classmethod
    def of(cls, error: BaseException) -> _Failure:
        if isinstance(error, ConfigError | CheckpointError | RankMismatchError):
            return cls(type(error), str(error))
        if isinstance(error, CheckpointException):
            causes = [cause for cause, _ in error.failures.values()]
            return cls(CheckpointError, "; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in causes)))
        return cls(CheckpointError, f"{type(error).__name__}: {error}")


class Ranks:
    """The ranks of a model, or this process alone where there is no process group.

    Attributes:
        group: their process group.
        rank, size: this rank in it, and how many there are.
    """

    def __init__(self, group: dist.ProcessGroup | None, rank: int, size: int) -> None:
        self.group = group
        self.rank = rank
        self.size = size

    @classmethod
    def of(cls, model: object) -> Ranks:
        """The ranks that share the parameters of `model`; all ranks, if it is not sharded."""
        state_ranks = state_ranks_of(model)
        return cls(state_ranks.group, state_ranks.rank, len(state_ranks.ranks))

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank."""
        return exchange(value, self.group)

    def together(self, work: Callable[[], T]) -> T:
        """Do `work`, which has no collectives, on every rank; where it fails on one, raise the same on all.

        Raises:
            FxshardError: with the text of the first rank that failed.
        """
        value, failure, cause = None, None, None
        try:
            value = work()
        except (Exception, CheckpointException) as error:
            failure, cause = _Failure.of(error), error
        failures = self.gather(failure)
        first = next((rank for rank, each in enumerate(failures) if each is not None), None)
        if first is not None:
            found = cast(_Failure, failures[first])
            where = "" if self.size == 1 or failures.count(found) == self.size else f"rank {first}: "
            raise found.kind(where + found.text) from cause
        return cast(T, value)

    def agree(self, describe: Callable[[], Comparison]) -> None:
        """Compare what ranks say of themselves; where `describe` fails on one, raise that on all.

        Raises:
            RankMismatchError: with the first line that differs, on every rank.
        """
        mine: dict[str, list[str]] = {}

        def digest_of_each() -> dict[str, str]:
            mine.update({title: list(lines) for title, lines in describe().items()})
            return {title: hashlib.sha256("\n".join(lines).encode()).hexdigest() for title, lines in mine.items()}

        digests = self.gather(self.together(digest_of_each))
        for title in dict.fromkeys(itertools.chain.from_iterable(digests)):
            if len({digest.get(title) for digest in digests}) > 1:
                raise RankMismatchError(_difference(title, self.gather(mine.get(title, []))))


def _difference(title: str, lines_of_ranks: Sequence[Sequence[str]]) -> str:
    """The first line in which a rank differs from rank 0."""
    for rank, lines in enumerate(lines_of_ranks):
        for expected, found in itertools.zip_longest(lines_of_ranks[0], lines, fillvalue="nothing"):
            if expected != found:
                return (
                    f"the ranks disagree about {title}: rank 0 has {expected}, rank {rank} has {found}. Call it on "
                    "every rank with the same arguments."
                )
    raise AssertionError("equal lines, unequal digests")


def require_one_set(model: nn.Module) -> None:
    """Raise if parameters are sharded over several sets of ranks.

    Raises:
        ConfigError: they are; torch's index of a checkpoint would hold the rows of one of them.
    """
    found: dict[tuple[int, ...], str] = {}
    for name, parameter in model.named_parameters():
        if members := ranks_of(parameter):
            found.setdefault(members, name)
    if len(found) > 1:
        listed = ", ".join(f"{name} on {list(members)}" for members, name in found.items())
        raise ConfigError(
            f"a checkpoint holds one model on one set of ranks, but parameters are sharded over several: {listed}. "
            "Save the parts one by one, each on its own ranks and to a path of its own."
        )
