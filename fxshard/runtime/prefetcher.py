"""Gather for the next graph while this one computes.

[Note: prefetch across graphs]
A model that breaks into several graphs, or is compiled block by block, would gather at the start of each graph with
nothing to hide it. So the first launches of a graph are `fxshard::prefetched_all_gather`, which takes what is in flight
already, and the last one also launches what the first unit of the next graph will take: all of it, for later launches
stand on the link behind the reductions of the graph before. The prefetcher remembers what was taken after what,
separately for forward and backward. What is not taken (the model went another way this time) is dropped. All ranks see
the same requests, so they launch the same. But where fewer ranks share some units (experts), and these get no rows,
their ranks see fewer requests: there a request is guessed only if its ranks are a proper subset of those of the unit
before it.

A guess does not reach over the end of the outermost module's call or of a backward: an optimizer may step there. A call
that activation checkpointing repeats is part of its backward. Where code outside of graphs comes first (an embedding in
forward, a head and a loss in backward), the first graph's launch is guessed before that code runs.

Ranks must guess the same, so after a RankMismatchError they forget what they have seen. A rank whose next graph
gathers, and is not the one that came the last time, waits for the others before it launches, even if it knows that
path: if they go the usual way, its launches would meet theirs of other sizes, which ends the process on gloo.

[Note: after a step]
When an optimizer that the user gave to `overlap_step` has stepped, what the next forward takes first is launched:
`zero_grad`, logging and the copy of the next batch hide it. After a write that torch counts it is dropped and launched
again, on all ranks, for they all write. A write that torch does not count (`.data`, `torch._foreach_*`, `to_local()`)
may change the rows of one rank only, so the gather cannot be repeated: each rank compares a copy of the rows that it
sent before the forward, and an unseen write is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from fxshard import torch_private
from fxshard.errors import UnsupportedGraph
from fxshard.ir import ops
from fxshard.ir.plan import BY
from fxshard.runtime import eager, profiler_ranges, rank_check, streams, unsharded_cache
from fxshard.runtime.flat_shard import home_of
from fxshard.runtime.unsharded_cache import Gathered, UnshardedCache, Why

if TYPE_CHECKING:
    from fxshard.runtime.unit import Unit


_c10d = torch.ops._c10d_functional

Key = tuple[int, torch.dtype, tuple[tuple[int, int], ...]]
"""What tells a request from others: address of the flat, dtype, parts."""


class AllGatherRequest(NamedTuple):
    """One all_gather of parts of a flat."""

    unit: Unit | None  # for which, `None` for a flat that belongs to none
    flat: Tensor  # this rank's shard, `[shard_numel]`
    dtype: torch.dtype  # in which it is sent
    parts: tuple[tuple[int, int], ...]  # (first element, number of elements) of each tensor that is sent
    world_size: int  # ranks
    group: str  # name of their process group
    stream: str = ""  # on which it is cast and launched; empty for the current one
    guess: bool = False  # whether it may be launched where no list of the user says so

    @property
    def key(self) -> Key:
        """What tells it from others."""
        return self.flat.data_ptr(), self.dtype, self.parts

    @property
    def sizes(self) -> tuple[object, ...]:
        """What a launch must have in common with that of another rank which it meets."""
        return self.dtype, self.world_size, [numel for _, numel in self.parts]

    def launch(self) -> list[Tensor]:
        """Start it; each result is `[world_size * numel]`, to be waited for."""
        flat = self.flat.detach()
        joiner = streams.copy_out_stream(self.stream, flat.device)
        name = self.unit.fqn if self.unit is not None else ""
        with profiler_ranges.of_unit(name), streams.on_side_stream(self.stream, flat.device):
            (sent,) = streams.cast_to_send([flat], self.dtype, joiner)
            inputs = [sent[start : start + numel] for start, numel in self.parts]
            if len(inputs) == 1:
                return [_c10d.all_gather_into_tensor(inputs[0], self.world_size, self.group)]
            return list(_c10d.all_gather_into_tensor_coalesced(inputs, self.world_size, self.group))


@dataclass
class UnshardHandle:
    """Gathers that `module.unshard(async_op=True)` has launched."""

    _launched: Sequence[Tensor]

    def wait(self) -> None:
        """Have what runs after this on the current stream (on the CPU: the caller) wait until all are done."""
        unsharded_cache.wait_for(self._launched)
        self._launched = ()


class Prefetcher:
    """What to gather next for one model; see [Note: prefetch across graphs]."""

    def __init__(self, cache: UnshardedCache) -> None:
        """Begin with nothing known; `cache` takes what is launched ahead."""
        # what the current stream waits for before the next gather; FSDP2 `_fsdp_state.py` (`post_optim_event`)
        self.after: torch.Event | None = None
        self.num_requests = 0  # that graphs have made so far
        self._cache = cache
        self._scope: eager.Running | None = None
        self._taken: list[Key] = []  # in this scope
        self._row: list[AllGatherRequest] = []  # what a unit has taken of these in this graph
        # By direction: what the first unit of a graph took.
        self._following: dict[tuple[bool, int, Key], list[AllGatherRequest]] = {}  # also by how many were taken so far
        self.first_rows: dict[bool, list[AllGatherRequest]] = {}  # what all ranks are known to take first
        self._taken_first: dict[bool, list[AllGatherRequest]] = {}  # in the scopes since the last forward began
        self._of_unit: dict[tuple[bool, Unit], dict[Key, AllGatherRequest]] = {}
        self._units: set[Unit] = set()  # whose requests of this scope are in `_of_unit`
        self.first: Unit | None = None  # of what the last forward took first, if that was launched for it
        self._are_alike: bool | None = None  # whether the same ranks share all units

    def take_or_launch(self, request: AllGatherRequest, unit: Unit) -> list[Tensor]:
        """What a request of a unit gathers: taken over, or launched now."""
        scope = eager.running()
        if scope is None:
            return request.launch()
        if scope != self._scope:
            self._begin(scope)
        self._remember(request, unit, scope)
        self.num_requests += 1
        found = self._cache.get(request.key)
        is_old = found is not None and found.why == "stepped" and not found.is_current  # on all ranks: `Unit.epoch`
        if found is None or is_old or not _can_be_saved(found):
            self._cache.drop(request.key)
            self._drop("next")  # the model took another way than before
            return request.launch()
        if not found.is_current:  # to gather again would be right, but the other ranks need not do so
            self._cache.drop(request.key)
            raise UnsupportedGraph(
                f"parameters of unit {unit.label!r} were changed after their gather was launched: inside a "
                "forward, or after unshard(). Change parameters outside of forward and before unshard(), or compile "
                'with options={"prefetch": "off"}.'
            )
        return list(self._cache.pop(request.key).tensors.values())

    def require_seen_writes(self) -> None:
        """Raise UnsupportedGraph if what was launched after a step has changed, and torch has counted no write."""
        stepped = [found for found in self._cache.values() if found.why == "stepped" and found.is_current]
        for gathered in stepped:
            assert gathered.sent is not None
            unit, (request, rows) = gathered.unit, gathered.sent
            message = (
                f"parameters of unit {unit.label!r} were written after the optimizer's step in a way that torch does "
                "not count (.data, torch._foreach_*, to_local(), numpy), and overlap_step had launched their gather. "
                "Write them with copy_() and the like under torch.no_grad(), call reshard() on the module after the "
                "write, or leave overlap_step out."
            )
            if not torch_private.holds((_bits(request.flat) == rows).all(), message):
                self.drop_stepped()
                rank_check.report_failure({request.group}, message)  # the others need not wait for this rank
                self.forget()
                raise UnsupportedGraph(message)

    def begin_graph(self) -> int:
        """A graph begins, and with it a row; return how many requests there were."""
        self._row = []
        return self.num_requests

    def _remember(self, request: AllGatherRequest, unit: Unit, scope: eager.Running) -> None:
        place = (scope.is_backward, len(self._taken), self._taken[-1]) if self._taken else None
        if self._row and self._row[-1].unit is unit:
            self._row.append(request)
            self._following.pop(place, None)  # type: ignore[arg-type]
        elif place is not None:
            self._row = self._following[place] = [request]
        else:
            if (first := self.first_rows.get(scope.is_backward)) and first[0].unit is not unit:
                del self.first_rows[scope.is_backward]  # on all ranks: `goes_another_way` knows nothing of new code
            self._row = self._taken_first[scope.is_backward] = [request]
            self.first = self.first if scope.is_backward else unit
        if unit not in self._units:
            self._units.add(unit)
            self._of_unit[scope.is_backward, unit] = {}
        self._of_unit[scope.is_backward, unit][request.key] = request
        self._taken.append(request.key)

    def settle(self, device: torch.device) -> None:
        """Have the current stream of the units' device wait for the event that the user set, if any."""
        after, self.after = self.after, None
        if after is not None and device.type == "cuda":
            torch.cuda.current_stream(device).wait_event(after)

    def _begin(self, scope: eager.Running) -> None:
        self._drop_guesses()
        for gathered in self._cache.values():
            if gathered.why == "asked":
                gathered.why = "listed"  # for this call, but for no other
        self._scope = scope
        self._taken.clear()
        self._units.clear()
        if not scope.is_backward:
            self.first = None
            self._taken_first.clear()

    def end(self) -> None:
        """The outermost call ends: drop what it did not take, unless backward repeats the call and goes on."""
        if eager.running() is None:
            self._drop_guesses()
            self.drop_stepped()

    def end_backward(self, which: int | None) -> None:
        """A backward ends: drop what it did not take."""
        if self._scope == (True, which):
            self._drop_guesses()

    def _drop_guesses(self) -> None:
        if self._scope is not None and not self._taken:
            self.first_rows.pop(self._scope.is_backward, None)  # it takes nothing any more
        self._drop("next", "listed")

    def _drop(self, *whys: Why) -> None:
        """Drop what is in flight for one of some reasons; another rank may have got an error before it launched it."""
        groups = {gathered.unit.plan.gathering_group for gathered in self._cache.values() if gathered.why in whys}
        if groups:
            with rank_check.waiting_for_unread(groups):
                self._cache.drop_if(lambda gathered: gathered.why in whys)

    def goes_another_way(self, units: Collection[Unit]) -> bool:
        """Whether a graph of these units launches other sizes than the one that came here the last time; said once."""
        scope = eager.running()
        if scope is None or not any((scope.is_backward, unit) in self._of_unit for unit in units):
            return False
        if not self._share_all_ranks(next(iter(units)).model.units):
            return False  # ranks without rows for an expert go on alone, and only such ranks have guessed it
        if scope != self._scope and scope.is_backward:
            return False  # of a call that is repeated, say: there is no first one to guess
        memory: dict[Any, list[AllGatherRequest]] = self.first_rows
        place: object = scope.is_backward
        if scope == self._scope and self._taken:
            memory, place = self._following, (scope.is_backward, len(self._taken), self._taken[-1])
        if place not in memory or memory[place][0].unit in units or not memory[place][0].guess:
            return False
        rows = filter(None, (self._of_unit.get((scope.is_backward, unit)) for unit in units))
        sizes = [each.sizes for each in next(rows).values()]
        if all(each.why != "next" for each in self._cache.values()) and sizes == [each.sizes for each in memory[place]]:
            return False  # launches that meet are of one size: ranks that differ are told when they look back
        del memory[place]
        return True

    def drop_stepped(self) -> None:
        """Drop what was launched after a step and not taken."""
        if stepped := [key for key, gathered in self._cache.items() if gathered.why == "stepped"]:
            self._cache.drop(*stepped)
            self.first = None  # this forward began with something else

    def launch_for_next_call(self, unit: Unit) -> list[Tensor]:
        """Launch what the unit's forward takes, for the next call of the outermost module."""
        requests = self._of_unit.get((False, unit), {})
        self._cache.drop(*requests)  # may be of old weights
        unit.encode()
        launched = [self._launch(request, "asked") for request in requests.values()]
        return [tensor for gathered in launched for tensor in gathered.tensors.values()]

    def launch_after_step(self, stepped: Collection[Unit]) -> None:
        """Launch what the next forward takes first, if it is of these units; see [Note: after a step]."""
        unit = self.first
        if unit is None or unit not in stepped or unit.plan.encoded:
            return  # what hooks encode is there when the forward begins
        self.drop_stepped()
        self.first = unit
        with unit.agreed("step", "all_gather", "what the next forward reads first"), torch.no_grad():
            for request in self._of_unit[False, unit].values():
                self._launch(request, "stepped").sent = request, _bits(request.flat).clone()

    def prefetch_next(self, unit: Unit, *, guess: bool) -> None:
        """Launch what comes next: what the unit lists, or if it lists nothing, what was taken next the last time."""
        scope = self._scope
        if scope is None or not self._taken or scope != eager.running():
            return
        settings = unit.settings
        listed = settings.backward_prefetch if scope.is_backward else settings.forward_prefetch
        for other in listed or ():
            for key, wanted in self._of_unit.get((scope.is_backward, other), {}).items():
                if key not in self._taken:
                    self._launch(wanted, "listed")
        following = self._following.get((scope.is_backward, len(self._taken), self._taken[-1]))
        if guess and listed == () and following and self._is_foreseen_alike(following[0], unit):
            for wanted in following:
                self._launch(wanted, "next")

    def ranks_agree(self) -> None:
        """All ranks have run the same since the last forward began: what was taken first may be guessed."""
        self.first_rows |= self._taken_first
        self._taken_first.clear()

    def prefetch_first(self) -> None:
        """Launch what this forward or backward takes first, before a graph of it runs: what it took the last time."""
        scope = eager.running()
        if scope is None or (scope == self._scope and self._taken):
            return
        first = self.first_rows.get(scope.is_backward)
        if first is None or first[0].unit is None or not first[0].guess:
            return
        if self._share_all_ranks(first[0].unit.model.units):
            if scope != self._scope:
                self._begin(scope)
            with torch.inference_mode(False), torch.no_grad():  # a graph may save it
                for wanted in first:
                    self._launch(wanted, "next")

    def _is_foreseen_alike(self, request: AllGatherRequest, after: Unit) -> bool:
        """Whether all ranks that must launch a request have seen alike what came before it; a unit came last."""
        return self._share_all_ranks(after.model.units) or _ranks_of(request.group) < _ranks_of(after.plan.group)

    def _share_all_ranks(self, units: Collection[Unit]) -> bool:
        if self._are_alike is None:
            self._are_alike = len({_ranks_of(unit.plan.group) for unit in units}) <= 1
        return self._are_alike

    def _launch(self, request: AllGatherRequest, why: Why) -> Gathered:
        if request.key not in self._cache:
            self.settle(request.flat.device)
            launched = dict(enumerate(request.launch()))
            self._cache[request.key] = Gathered(cast("Unit", request.unit), launched, why)
        return self._cache[request.key]

    def forget(self) -> None:
        """Drop what is in flight, and what was remembered."""
        self._drop("next", "listed", "asked", "stepped")
        self._scope = self.first = self._are_alike = None
        self._row = []
        self._taken.clear()
        self._units.clear()
        self._following.clear()
        self.first_rows.clear()
        self._taken_first.clear()
        self._of_unit.clear()


def _bits(flat: Tensor) -> Tensor:
    """Read a flat as integers, which are equal to themselves also where a number is NaN."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return flat.detach().view(integers[flat.element_size()])


def _ranks_of(group_name: str) -> frozenset[int]:
    """The ranks of a process group, also where an object of the user's communicates for it."""
    return frozenset(dist.get_process_group_ranks(torch_private.process_group_of(group_name.partition(BY)[0])))


def _can_be_saved(gathered: Gathered) -> bool:
    """Whether autograd could save it now, if it needs to."""
    return torch.is_inference_mode_enabled() or not next(iter(gathered.tensors.values())).is_inference()


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
    home = home_of(flat)
    unit, parts = home.unit if home is not None else None, tuple(zip(starts, numels, strict=True))
    request = AllGatherRequest(unit, flat, dtype, parts, group_size, group_name, stream, guess)
    if unit is None:
        return request.launch()
    takes = role in ("first", "only")
    launched = unit.model.prefetcher.take_or_launch(request, unit) if takes else request.launch()
    if role in ("last", "only"):
        unit.model.prefetcher.prefetch_next(unit, guess=guess)
    return launched


ops.implement(prefetched_all_gather=_prefetched_all_gather)
