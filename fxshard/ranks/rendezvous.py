"""Where ranks meet, and how they differ: a place at the store of the default process group.

A collective hangs where one rank does not come. At the store a rank can see who has come, and give up.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from fxshard import torch_private
from fxshard.errors import ConfigError


class Rendezvous:
    """A place at the store where some ranks meet: keys that begin with `place`, with values that JSON can hold.

    Each call looks the store up again: an object that keeps the last reference to a store keeps its server alive.
    """

    def __init__(self, topic: str, ranks: Sequence[int] = (), *, again: bool = False) -> None:
        """`again`: there is a place for each time; the n-th of this rank is the n-th of the others."""
        self.place = f"fxshard/{topic}/{hashlib.sha256(repr(tuple(ranks)).encode()).hexdigest()[:16]}"
        self._ranks = ranks
        if again:
            self.place += f"/{torch_private.default_store().add(f'{self.place}/times/{dist.get_rank()}', 1)}"

    def write(self, key: str, value: Any) -> None:
        """Write a value for the others to read."""
        torch_private.default_store().set(f"{self.place}/{key}", json.dumps(value))

    def write_all(self, values: Mapping[str, Any]) -> None:
        """Write some values for the others to read, in one message."""
        keys, texts = [f"{self.place}/{key}" for key in values], [json.dumps(value) for value in values.values()]
        torch_private.default_store().multi_set(keys, texts)  # type: ignore[attr-defined] # missing in torch's stubs

    def read(self, *keys: str, are_written: bool = False) -> list[Any]:
        """Read the values of some keys; none before all are written, which costs no message if they surely are."""
        store, names = torch_private.default_store(), [f"{self.place}/{key}" for key in keys]
        return list(map(json.loads, store.multi_get(names))) if are_written or store.check(names) else []

    def arrive(self, text: str) -> bool:
        """Come with a text, and return whether this rank is the last one."""
        self.write(str(dist.get_rank()), text)
        return torch_private.default_store().add(f"{self.place}/came", 1) == len(self._ranks)

    def texts(self) -> dict[int, str]:
        """Read by rank what the ranks came with; a late rank is missing."""
        return {rank: text for rank in self._ranks for text in self.read(str(rank))}

    def decide(self, text: str) -> str:
        """Decide for all ranks, by the key `decision`, unless one has done so; return what is decided."""
        found = torch_private.default_store().compare_set(f"{self.place}/decision", "", json.dumps(text))
        return str(json.loads(found))

    def decision(self, limit: float) -> str:
        """Wait for a decision, at most so many seconds; empty if there is none."""
        for _ in polls(limit):
            if found := self.read("decision"):
                return str(found[0])
        return ""

    def leave(self) -> None:
        """Read no more; the last rank deletes what all came with."""
        store = torch_private.default_store()
        if store.add(f"{self.place}/left", 1) == len(self._ranks):
            for key in ("came", "decision", "left", *self._ranks):
                store.delete_key(f"{self.place}/{key}")


def longest_wait() -> float:
    """Seconds to wait for ranks that may compile: ten times the process group's timeout, but at least an hour."""
    timeout: timedelta = torch_private.default_store().timeout  # type: ignore[attr-defined] # missing in torch's stubs
    return max(3600.0, 10 * timeout.total_seconds())


def polls(limit: float) -> Iterator[float]:
    """Yield the seconds waited, once and then up to the limit; sleep in between, longer and longer."""
    began, waited = time.monotonic(), 0.0
    while waited <= limit:
        yield waited
        time.sleep(min(1.0, max(0.001, waited / 10), limit))
        waited = time.monotonic() - began


def gather_texts(
    topic: str,
    text: str,
    group: dist.ProcessGroup,
    timeout: timedelta = timedelta(minutes=5),
    remedy: str = "All ranks must make the first call of the compiled model.",
) -> list[str]:
    """Every rank's text, in group order; emulated ranks have this rank's. The n-th call on a topic meets the n-th.

    Raises `ConfigError`, with the remedy, if ranks do not come in time.
    """
    ranks = dist.get_process_group_ranks(group)
    if is_alone():
        return [text] * len(ranks)
    meeting = Rendezvous(topic, ranks, again=True)
    is_last = meeting.arrive(text)
    decided = "" if is_last else meeting.decision(timeout.total_seconds())
    decided = decided or meeting.decide("all ranks came" if is_last else "a rank is late")
    texts = meeting.texts()
    if decided != "all ranks came":  # a rank that comes later reads this, too
        if late := [str(rank) for rank in ranks if rank not in texts]:
            raise ConfigError(f"{topic}: rank {dist.get_rank()} waited {timeout} for rank {', '.join(late)}. {remedy}")
        raise ConfigError(f"{topic}: rank {dist.get_rank()} came after others had waited {timeout}. {remedy}")
    meeting.leave()
    return list(texts.values())


def first_difference(
    ours: Iterable[str], theirs: Iterable[str], nothing: str = "nothing", key: Callable[[str], str] = str
) -> tuple[int, str, str] | None:
    """Number, from 1, and texts of the first line in which two ranks differ; `key` gives what is compared of a line."""
    pairs = enumerate(itertools.zip_longest(ours, theirs, fillvalue=nothing), 1)
    return next(((i, *pair) for i, pair in pairs if key(pair[0]) != key(pair[1])), None)


def difference_from(rank: int, lines: Mapping[int, Sequence[str]]) -> str:
    """The first line in which another rank differs from `rank`, in words; empty if all have the same lines."""
    for other, theirs in lines.items():
        if found := first_difference(lines[rank], theirs):
            return f"rank {rank} has {found[1]}, rank {other} has {found[2]}"
    return ""


def is_alone() -> bool:
    """Whether no other process can reach the store: the other ranks are emulated."""
    store = torch_private.default_store()
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.HashStore) or "fake" in dist.get_backend()
