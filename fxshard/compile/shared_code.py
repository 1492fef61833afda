"""Code that one rank compiles for all: `options={"compile_on": "one"}`.

[Note: shared code]
Ranks that train the same model compile the same graphs. Who comes first to a graph claims it at the store, by a digest
of what Dynamo captured and of all that decides its code; compiles it; and puts there what torch's caches have recorded.
The others wait for that, fill their own caches, and compile as ever: the code comes out of the cache. Torch decides
whether an entry fits, so a digest that says too little costs time, and never brings a wrong graph; one that says too
much makes a rank claim a graph that another one compiles, too. No compilation waits for another rank, so whoever is
waited for goes on. Nothing depends on it: where code cannot be had, a rank compiles by itself and warns why.

Torch's code names its device by number: ranks on `cuda:0` and `cuda:1` of a machine compile one each, and those of the
next machine load both. Kernels for CPUs are compiled anew on each machine; the cache has their source.

Source: `torch.compiler.save_cache_artifacts`, which was made for machines that start one after the other.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.compiler._cache import CacheArtifact, CacheArtifactManager

from fxshard import torch_private
from fxshard.ranks.rendezvous import is_alone, longest_wait

_T = TypeVar("_T")

_log = logging.getLogger(__name__)

_PIECE = 4 << 20  # bytes; a message to a TCPStore may have 8 MiB


def compile_or_load(text: str, compile: Callable[[], _T], was_loaded: Callable[[], bool]) -> _T:
    """Compile a graph, or load what another rank made of it.

    Args:
        text: what decides the code; equal on ranks that compile the same.
        compile: compiles it, by means of torch's caches.
        was_loaded: whether `compile` has found its code there.
    """
    if dist.get_backend() == "fake" or is_alone():
        return compile()
    shared = SharedCode(torch_private.default_store(), text)
    if shared.is_first():
        return shared.compile_for_all(compile)
    why = shared.load()
    compiled = compile()
    if not why and not was_loaded():
        why = "what another rank made does not fit here: torch found no entry for this graph"
    if why:
        warn(why)
    return compiled


def warn(why: str) -> None:
    """Say that this rank compiles by itself."""
    _log.warning('fxshard: compile_on="one": this rank compiles a graph by itself: %s.', why)


class SharedCode:
    """Code of a graph that one rank compiles, at the store."""

    def __init__(self, store: dist.Store, text: str) -> None:
        """`text`: as in `compile_or_load`."""
        self._store, self._key = store, f"fxshard/compiled/{hashlib.sha256(text.encode()).hexdigest()}"

    def is_first(self) -> bool:
        """SharedCode the graph; return whether nobody did so before."""
        return self._store.add(f"{self._key}/claims", 1) == 1

    def compile_for_all(self, compile: Callable[[], _T]) -> _T:
        """Compile it, and put what torch has cached, or why it cannot be had, where the others wait for it."""
        answer = "it failed on the rank that compiled it for all"
        try:
            with _recording() as recorded:
                compiled = compile()
                answer = self._put(recorded())
        finally:
            self._store.set(self._key, answer)
        return compiled

    def load(self, limit: float | None = None) -> str:
        """Wait for what the first rank makes of it, and fill torch's caches; say why that was not possible."""
        try:
            answer = self._answer(limit or longest_wait())
            if not answer.startswith("pieces "):
                return answer
            pieces = [self._store.get(f"{self._key}/{i}") for i in range(int(answer.removeprefix("pieces ")))]
        except RuntimeError as error:
            return f"the store of the process group failed: {error}"
        loaded = torch.compiler.load_cache_artifacts(b"".join(pieces))
        return "" if loaded is not None else "what another rank made could not be read"

    def _put(self, artifacts: bytes) -> str:
        if not artifacts:
            return "torch cached nothing on the rank that compiled it for all (TORCH_LOGS=+torch._functorch says why)"
        pieces = [artifacts[i : i + _PIECE] for i in range(0, len(artifacts), _PIECE)]
        for i, piece in enumerate(pieces):
            self._store.set(f"{self._key}/{i}", piece)  # type: ignore[arg-type] # the stubs know texts only
        return f"pieces {len(pieces)}"

    def _answer(self, limit: float) -> str:
        began, say = time.monotonic(), 30.0
        while not self._store.check([self._key]):
            waited = time.monotonic() - began
            if waited > limit:
                return f"the rank that compiles it for all was not ready after {limit:.0f} s"
            if waited > say:
                _log.warning("fxshard: waited %.0f s for code that another rank compiles.", waited)
                say *= 2
            time.sleep(min(0.5, max(0.001, waited / 10)))
        return self._store.get(self._key).decode()


@contextmanager
def _recording() -> Iterator[Callable[[], bytes]]:
    """Give a function for what torch's caches have recorded inside; what the user records has it, too."""
    found: list[CacheArtifact] = []

    def recorded() -> bytes:
        found.extend(chain(*CacheArtifactManager._new_cache_artifacts.values()))
        saved = torch.compiler.save_cache_artifacts()
        return b"" if saved is None else saved[0]

    try:
        with CacheArtifactManager.with_fresh_cache():
            yield recorded
    finally:
        for artifact in found:
            if artifact not in CacheArtifactManager._seen_artifacts:
                CacheArtifactManager._seen_artifacts.add(artifact)
                CacheArtifactManager._new_cache_artifacts[artifact.type()].append(artifact)
