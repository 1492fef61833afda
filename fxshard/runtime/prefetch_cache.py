"""Gather for the next graph while this one computes.

[Note: prefetch cache]
A model that breaks into several graphs, or is compiled block by block, would gather at the start of each graph with
nothing to hide it. So the first launch of a graph is `fxshard::prefetched_all_gather`, which takes what is in flight
already, and the last one also launches what the next graph will take. Which graph that is, the prefetch cache has seen
before: it remembers what was taken after what, separately for forward and backward. What was launched and is not taken
(the model went another way this time) is waited for and dropped. All ranks see the same requests, so they launch the
same.

A prefetch cache never reaches over the end of the outermost module's call or of a backward: an optimizer may step
there. A call that activation checkpointing repeats is part of its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir import ops
from fxshard.runtime import eager, profiler_ranges, streams
from fxshard.runtime.unit import Unit, home_of

_c10d = torch.ops._c10d_functional


class AllGatherRequest(NamedTuple):
    """One all_gather of parts of a flat.

    Attributes:
        flat: this rank's shard, `[shard_numel]`.
        dtype: in which it is sent.
        spans: (first element, number of elements) of each tensor that is sent.
        world_size: ranks.
        group: name of their process group.
        stream: on which it is cast and launched; empty for the current one.
    """

    flat: Tensor
    dtype: torch.dtype
    spans: tuple[tuple[int, int], ...]
    world_size: int
    group: str
    stream: str = ""

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.flat.data_ptr(), self.dtype, self.spans

    def launch(self, unit: str) -> list[Tensor]:
        """Start it; each result is `[world_size * numel]`, to be waited for. `unit` is its name in profiles."""
        flat = self.flat.detach()
        joiner = streams.copy_out_stream(self.stream, flat.device)
        with (
            torch_private.unseen_by_policies(),
            profiler_ranges.of_unit(unit),
            streams.on_side_stream(self.stream, flat.device),
        ):
            (sent,) = streams.cast_to_send([flat], self.dtype, joiner)
            parts = [sent[start : start + numel] for start, numel in self.spans]
            if len(parts) == 1:
                return [_c10d.all_gather_into_tensor(parts[0], self.world_size, self.group)]
            return list(_c10d.all_gather_into_tensor_coalesced(parts, self.world_size, self.group))


Key = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]


@dataclass(slots=True, eq=False)
class _PrefetchedGather:
    """What was launched for a later graph.

    Attributes:
        launched: the buffers.
        epoch: of the unit, when they were launched.
        why: it came "next" the last time, a unit has "listed" it, or the user has "asked" for it.
    """

    launched: list[Tensor]
    epoch: int
    why: Literal["next", "listed", "asked"]

    def can_be_saved(self) -> bool:
        """Whether autograd could save it now, if it needs to."""
        return torch.is_inference_mode_enabled() or not self.launched[0].is_inference()


@dataclass
class UnshardHandle:
    """Gathers that `unshard(async_op=True)` has launched."""

    _launched: tuple[Tensor, ...]

    @classmethod
    def of(cls, handles: Iterable[UnshardHandle]) -> UnshardHandle:
        """One for several."""
        return cls(tuple(tensor for handle in handles for tensor in handle._launched))

    def wait(self) -> None:
        """Have what runs after this on the current stream (on the CPU: the caller) wait until all are done."""
        with torch_private.unseen_by_policies():
            for tensor in self._launched:
                _c10d.wait_tensor(tensor)
        self._launched = ()


class PrefetchCache:
    """The requests of one model; see [Note: prefetch cache].

    Attributes:
        after: what the next forward's first launch waits for in place of the current stream.
    """

    def __init__(self) -> None:
        self.after: torch.Event | None = None
        self._scope: eager.Running | None = None
        self._in_flight: dict[Key, _PrefetchedGather] = {}
        # A collective that nobody waits for keeps its buffers for as long as the process runs.
        weakref.finalize(self, _drop, self._in_flight).atexit = False
        self._taken: list[Key] = []  # in this scope
        # By direction, backward or not.
        self._following: dict[tuple[bool, int, Key], AllGatherRequest] = {}  # also by how many were taken so far
        self._of_unit: dict[tuple[bool, Unit], dict[Key, AllGatherRequest]] = {}
        self._units: set[Unit] = set()  # whose requests of this scope are in `_of_unit`

    def take_or_launch(self, request: AllGatherRequest, unit: Unit) -> list[Tensor]:
        """What `request` gathers: taken over, or launched now."""
        scope = eager.running()
        if scope is None:
            return request.launch(unit.fqn)
        if scope != self._scope:
            self._begin(scope)
        if self._taken:
            self._following[scope.is_backward, len(self._taken), self._taken[-1]] = request
        if unit not in self._units:
            self._units.add(unit)
            self._of_unit[scope.is_backward, unit] = {}
        self._of_unit[scope.is_backward, unit][request.key] = request
        self._taken.append(request.key)
        found = self._in_flight.get(request.key)
        if found is None or not found.can_be_saved():
            self.drop(lambda other: other is found or other.why == "next")  # the model took another way than before
            return self._launch_first(request, unit) if not scope.is_backward else request.launch(unit.fqn)
        if found.epoch != unit.epoch():  # to gather again would be right, but the other ranks need not do so
            self.drop(lambda other: other is found)
            raise UnsupportedGraph(
                f"parameters of unit {unit.fqn or 'root'!r} were changed after their gather was launched: inside a "
                "forward, or after unshard(). Change parameters outside of forward and before unshard(), or compile "
                'with options={"prefetch": "off"}.'
            )
        del self._in_flight[request.key]
        return found.launched

    def _launch_first(self, request: AllGatherRequest, unit: Unit) -> list[Tensor]:
        """Launch, after the event that the user set, if any; FSDP2 `_fsdp_state.py` (`post_optim_event`)."""
        after, self.after = self.after, None
        if after is None or not request.flat.is_cuda:
            return request.launch(unit.fqn)
        device = request.flat.device
        ahead = streams.stream_of("ahead", torch.cuda.current_stream(device))
        ahead.wait_event(after)
        with torch.cuda.stream(ahead):  # no other stream beside it: that one would have waited for less than is read
            launched = request._replace(stream="").launch(unit.fqn)
        for buffer in launched:
            buffer.record_stream(torch.cuda.current_stream(device))  # it was allocated for the other one
        return launched

    def settle(self, device: torch.device) -> None:
        """Wait for the event that the user set, on the current stream of the units' device: no launch after it will."""
        after, self.after = self.after, None
        if after is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(after)

    def _begin(self, scope: eager.Running) -> None:
        self.drop(lambda group: group.why != "asked")
        for group in self._in_flight.values():
            group.why = "listed"  # for this call, but for no other
        self._scope = scope
        self._taken.clear()
        self._units.clear()

    def end(self) -> None:
        """The outermost call ends: drop what it did not take, unless backward repeats the call and goes on."""
        if eager.running() is None:
            self.drop(lambda group: group.why != "asked")

    def unshard(self, unit: Unit) -> UnshardHandle:
        """Launch what the unit's forward takes, for the next call of the outermost module."""
        requests = self._of_unit.get((False, unit), {})
        self.drop(lambda group: any(group is self._in_flight.get(key) for key in requests))  # may be of old weights
        for request in requests.values():
            self._launch(request, "asked")
        return UnshardHandle(tuple(tensor for key in requests for tensor in self._in_flight[key].launched))

    def reshard(self, unit: Unit) -> None:
        """Drop what is in flight for the unit, or was gathered and not taken yet."""
        own = {shard.flat.data_ptr() for shard in unit.shards}
        dropped = {group for key, group in self._in_flight.items() if key[0] in own}
        self.drop(lambda group: group in dropped)

    def prefetch_next(self, unit: Unit, *, guess: bool) -> None:
        """Launch what comes next: what the unit lists, or if it lists nothing, what was taken next the last time."""
        scope = self._scope
        if scope is None or not self._taken or scope != eager.running():
            return
        listed = unit.backward_prefetch if scope.is_backward else unit.forward_prefetch
        for other in listed or ():
            for key, request in self._of_unit.get((scope.is_backward, other), {}).items():
                if key not in self._taken:
                    self._launch(request, "listed")
        following = self._following.get((scope.is_backward, len(self._taken), self._taken[-1]))
        if guess and listed == () and following is not None:
            self._launch(following, "next")

    def _launch(self, request: AllGatherRequest, why: Literal["next", "listed", "asked"]) -> None:
        home = home_of(request.flat)
        if home is not None and request.key not in self._in_flight:
            self._in_flight[request.key] = _PrefetchedGather(request.launch(home.unit.fqn), home.unit.epoch(), why)

    def drop(self, which: Callable[[_PrefetchedGather], bool] = lambda _: True) -> None:
        """Wait for what nobody will take, and free it."""
        _drop(self._in_flight, which)

    def forget(self) -> None:
        """Drop what is in flight, and what was remembered."""
        self.drop()
        self._scope = None
        self._taken.clear()
        self._units.clear()
        self._following.clear()
        self._of_unit.clear()


def _drop(in_flight: dict[Key, _PrefetchedGather], which: Callable[[_PrefetchedGather], bool] = lambda _: True) -> None:
    for key, group in list(in_flight.items()):
        if which(group):
            with torch_private.unseen_by_policies():
                for tensor in group.launched:
                    _c10d.wait_tensor(tensor)
            del in_flight[key]


def _prefetched_all_gather(
    flat: Tensor,
    dtype: torch.dtype,
    starts: list[int],
    numels: list[int],
    group_size: int,
    group_name: str,
    role: str,
    guess: bool,
    stream: str,
) -> list[Tensor]:
    request = AllGatherRequest(flat, dtype, tuple(zip(starts, numels, strict=True)), group_size, group_name, stream)
    home = home_of(flat)
    prefetch_cache = home.unit.prefetch_cache if home is not None else None
    if home is None or prefetch_cache is None:
        return request.launch("")
    takes = role in ("first", "only")
    launched = prefetch_cache.take_or_launch(request, home.unit) if takes else request.launch(home.unit.fqn)
    if role in ("last", "only"):
        prefetch_cache.prefetch_next(home.unit, guess=guess)
    return launched


ops.implement_prefetched_all_gather(_prefetched_all_gather)
