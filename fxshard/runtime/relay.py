"""Gather for the next graph while this one computes.

[Note: relay]
A model that breaks into several graphs, or is compiled block by block, would gather at the start of each graph with
nothing to hide it. So the first launch of a graph is `fxshard::open`, which takes over what is in flight already, and
the last one also launches what the next graph will open. Which graph that is, the relay has seen before: it remembers
what was opened after what, apart for forward and backward. What was launched and is not opened (the model took another
way this time) is waited for and dropped. All ranks see the same openings, so they launch the same.

A relay never reaches over the end of the outermost module's call or of a backward: an optimizer may step there. A call
that activation checkpointing repeats is part of its backward.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fxshard.errors import UnsupportedGraph
from fxshard.ir import fake, ops
from fxshard.runtime import eager, ranges, streams
from fxshard.runtime.unit import Unit, home_of

_c10d = torch.ops._c10d_functional


class Opening(NamedTuple):
    """One all_gather of stretches of a flat.

    Attributes:
        flat: this rank's shard, `[shard_numel]`.
        dtype: in which it is sent.
        stretches: (first element, number of elements) of each tensor that is sent.
        world_size: ranks.
        group: name of their process group.
        stream: on which it is cast and launched; empty for the current one.
    """

    flat: Tensor
    dtype: torch.dtype
    stretches: tuple[tuple[int, int], ...]
    world_size: int
    group: str
    stream: str = ""

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.flat.data_ptr(), self.dtype, self.stretches

    def launch(self, unit: str) -> list[Tensor]:
        """Start it; each result is `[world_size * numel]`, to be waited for. `unit` is its name in profiles."""
        flat = self.flat.detach()
        joiner = streams.copy_out_stream(self.stream, flat.device)
        with fake.unseen_by_policies(), ranges.of_unit(unit), streams.aside(self.stream, flat.device):
            (sent,) = streams.cast_aside([flat], self.dtype, joiner)
            parts = [sent[start : start + numel] for start, numel in self.stretches]
            if len(parts) == 1:
                return [_c10d.all_gather_into_tensor(parts[0], self.world_size, self.group)]
            return list(_c10d.all_gather_into_tensor_coalesced(parts, self.world_size, self.group))


Key = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]


@dataclass(slots=True, eq=False)
class _InFlight:
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
        with fake.unseen_by_policies():
            for tensor in self._launched:
                _c10d.wait_tensor(tensor)
        self._launched = ()


class Relay:
    """The openings of one model; see [Note: relay].

    Attributes:
        after: what the next forward's first launch waits for in place of the current stream.
    """

    def __init__(self) -> None:
        self.after: torch.Event | None = None
        self._scope: eager.Running | None = None
        self._in_flight: dict[Key, _InFlight] = {}
        # A collective that nobody waits for keeps its buffers for as long as the process runs.
        weakref.finalize(self, _drop, self._in_flight).atexit = False
        self._opened: list[Key] = []  # in this scope
        # By direction, backward or not.
        self._following: dict[tuple[bool, int, Key], Opening] = {}  # also by how many were opened so far
        self._of_unit: dict[tuple[bool, Unit], dict[Key, Opening]] = {}
        self._units: set[Unit] = set()  # whose openings of this scope are in `_of_unit`

    def open(self, opening: Opening, unit: Unit) -> list[Tensor]:
        """What `opening` gathers: taken over, or launched now."""
        scope = eager.running()
        if scope is None:
            return opening.launch(unit.fqn)
        if scope != self._scope:
            self._begin(scope)
        if self._opened:
            self._following[scope.is_backward, len(self._opened), self._opened[-1]] = opening
        if unit not in self._units:
            self._units.add(unit)
            self._of_unit[scope.is_backward, unit] = {}
        self._of_unit[scope.is_backward, unit][opening.key] = opening
        self._opened.append(opening.key)
        found = self._in_flight.get(opening.key)
        if found is None or not found.can_be_saved():
            self.drop(lambda other: other is found or other.why == "next")  # the model took another way than before
            return self._launch_first(opening, unit) if not scope.is_backward else opening.launch(unit.fqn)
        if found.epoch != unit.epoch():  # to gather again would be right, but the other ranks need not do so
            self.drop(lambda other: other is found)
            raise UnsupportedGraph(
                f"parameters of unit {unit.fqn or 'root'!r} were changed after their gather was launched: inside a "
                "forward, or after unshard(). Change parameters outside of forward and before unshard(), or compile "
                'with options={"prefetch": "off"}.'
            )
        del self._in_flight[opening.key]
        return found.launched

    def _launch_first(self, opening: Opening, unit: Unit) -> list[Tensor]:
        """Launch, after the event that the user set, if any; FSDP2 `_fsdp_state.py` (`post_optim_event`)."""
        after, self.after = self.after, None
        if after is None or not opening.flat.is_cuda:
            return opening.launch(unit.fqn)
        device = opening.flat.device
        ahead = streams.stream_of("ahead", torch.cuda.current_stream(device))
        ahead.wait_event(after)
        with torch.cuda.stream(ahead):  # no other stream beside it: that one would have waited for less than is read
            launched = opening._replace(stream="").launch(unit.fqn)
        for buffer in launched:
            buffer.record_stream(torch.cuda.current_stream(device))  # it was allocated for the other one
        return launched

    def settle(self, device: torch.device) -> None:
        """Wait for the event that the user set, on the current stream of the units' device: no launch after it will."""
        after, self.after = self.after, None
        if after is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(after)

    def _begin(self, scope: eager.Running) -> None:
        self.drop(lambda flight: flight.why != "asked")
        for flight in self._in_flight.values():
            flight.why = "listed"  # for this call, but for no other
        self._scope = scope
        self._opened.clear()
        self._units.clear()

    def end(self) -> None:
        """The outermost call ends: drop what it did not open, unless backward repeats the call and goes on."""
        if eager.running() is None:
            self.drop(lambda flight: flight.why != "asked")

    def unshard(self, unit: Unit) -> UnshardHandle:
        """Launch what the unit's forward opens, for the next call of the outermost module."""
        openings = self._of_unit.get((False, unit), {})
        self.drop(lambda flight: any(flight is self._in_flight.get(key) for key in openings))  # may be of old weights
        for opening in openings.values():
            self._launch(opening, "asked")
        return UnshardHandle(tuple(tensor for key in openings for tensor in self._in_flight[key].launched))

    def reshard(self, unit: Unit) -> None:
        """Drop what is in flight for the unit, or was gathered and not opened yet."""
        own = {shard.flat.data_ptr() for shard in unit.shards}
        dropped = {flight for key, flight in self._in_flight.items() if key[0] in own}
        self.drop(lambda flight: flight in dropped)

    def hand_over(self, unit: Unit, *, guess: bool) -> None:
        """Launch what comes next: what the unit lists, or if it lists nothing, what was opened next the last time."""
        scope = self._scope
        if scope is None or not self._opened or scope != eager.running():
            return
        listed = unit.backward_prefetch if scope.is_backward else unit.forward_prefetch
        for other in listed or ():
            for key, opening in self._of_unit.get((scope.is_backward, other), {}).items():
                if key not in self._opened:
                    self._launch(opening, "listed")
        following = self._following.get((scope.is_backward, len(self._opened), self._opened[-1]))
        if guess and listed == () and following is not None:
            self._launch(following, "next")

    def _launch(self, opening: Opening, why: Literal["next", "listed", "asked"]) -> None:
        home = home_of(opening.flat)
        if home is not None and opening.key not in self._in_flight:
            self._in_flight[opening.key] = _InFlight(opening.launch(home.unit.fqn), home.unit.epoch(), why)

    def drop(self, which: Callable[[_InFlight], bool] = lambda _: True) -> None:
        """Wait for what nobody will open, and free it."""
        _drop(self._in_flight, which)

    def forget(self) -> None:
        """Drop what is in flight, and what was remembered."""
        self.drop()
        self._scope = None
        self._opened.clear()
        self._units.clear()
        self._following.clear()
        self._of_unit.clear()


def _drop(in_flight: dict[Key, _InFlight], which: Callable[[_InFlight], bool] = lambda _: True) -> None:
    for key, flight in list(in_flight.items()):
        if which(flight):
            with fake.unseen_by_policies():
                for tensor in flight.launched:
                    _c10d.wait_tensor(tensor)
            del in_flight[key]


def _open(
    flat: Tensor,
    dtype: torch.dtype,
    starts: list[int],
    numels: list[int],
    world_size: int,
    group: str,
    role: str,
    guess: bool,
    stream: str,
) -> list[Tensor]:
    opening = Opening(flat, dtype, tuple(zip(starts, numels, strict=True)), world_size, group, stream)
    home = home_of(flat)
    relay = home.unit.relay if home is not None else None
    if home is None or relay is None:
        return opening.launch("")
    launched = relay.open(opening, home.unit) if role in ("first", "only") else opening.launch(home.unit.fqn)
    if role in ("last", "only"):
        relay.hand_over(home.unit, guess=guess)
    return launched


ops.implement_open(_open)
