"""Whole weights of a sharded model, bucket by bucket: for engines that generate, and for exports.

[Note: iterating over weights]
Every rank iterates to the end, also one that gets nothing or has left its loop: while it closes the iterator it
takes part in what is left. So nobody waits for a rank that reads no more. While a bucket is read the next one is in
flight. Each bucket is a run among the ranks, as a graph is ([Note: agreement] in `runtime/rank_check.py`): a rank that
does something else instead is named in an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard.errors import ConfigError, FxshardError, RankMismatchError
from fxshard.ir.launches import Launch, on_group
from fxshard.runtime import eager, gloo, mesh_axes, unsharded_cache
from fxshard.runtime.rank_check import Agreement, telling_others
from fxshard.sharding.sharded_module import units_under
from fxshard.state.local_shards import LocalShard, hold, require_bucket
from fxshard.state.lora import base_name
from fxshard.state.model_state import require_values
from fxshard.state.names import fqn_of, module_in
from fxshard.state.ranks import Ranks
from fxshard.state.user_hooks import is_extra
from fxshard.state.weight_buckets import Buffers, Gathering, Packing, Weight, pack

_CALL = "full_weights"


@dataclass(frozen=True)
class WeightBucket:
    """Whole weights in one piece of memory, valid until the next bucket; iterated, names and views of it."""

    buffer: Tensor  # `[nbytes]` of uint8
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]  # of first bytes; without a gap between weights if they have one dtype

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, shape, dtype, offset in zip(self.names, self.shapes, self.dtypes, self.offsets, strict=True):
            yield name, self.buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class FullWeights(Iterator[tuple[str, Tensor]]):
    """Whole weights in order, whose `names`, `shapes` and `dtypes` every rank knows: iterate it, or `buckets()`."""

    def __init__(self, weights: Sequence[Weight], iteration: _Iteration) -> None:
        self.names, self.shapes, self.dtypes = _described(weights)
        self._iteration, self._buckets = iteration, iteration.run()
        self._items = (pair for bucket in self._buckets for pair in bucket)

    def __next__(self) -> tuple[str, Tensor]:
        return next(self._items)

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield what is left, bucket by bucket."""
        yield from self._buckets

    def close(self) -> None:
        """End the iteration on this rank; it takes part until no rank reads any more."""
        self._items.close()
        self._iteration.end()

    def __enter__(self) -> FullWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """End an iteration that nobody reads any more, also one that never began: other ranks may read."""
        if not sys.is_finalizing():
            self.close()


def full_weights(
    model: nn.Module,
    *,
    bucket_mib: float = 512,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    ranks: int | Collection[int] | dist.ProcessGroup | None = None,
    merge_lora: bool = False,
) -> FullWeights:
    """Give out the whole parameters and persistent buffers, one by one, in the names and the order of `state_dict`.

    All ranks of the model call it alike, and iterate, also those that get nothing. A tensor is a view of a bucket and
    valid until the next one; while you keep one, its bucket's memory is not used again. See [Note: weights out].

    Args:
        model: sharded by fxshard, by FSDP2 or not at all; compiled or not.
        bucket_mib: half of the memory that may be taken. A tensor with more than two thirds is a bucket of its own.
        dtype: to cast what is floating-point to, before it is sent; each tensor's own by default.
        device: where the tensors are; by default where collectives work.
        ranks: who gets them: a rank or several, counted among those that share the model, or a process group, which is
            `GroupMember.NON_GROUP_MEMBER` on ranks outside of it; all by default.
        merge_lora: whether PEFT's active LoRA adapters are added to the weights, under the base model's names.

    Returns:
        An iterator of names and tensors. A tied one comes once, under its first name; buffers are this rank's.
    """
    sharing = Ranks.of(model)
    agreed = _Agreed(sharing.group if sharing.size > 1 else None)

    def held_here() -> tuple[list[Weight], bool]:
        require_bucket(bucket_mib)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"dtype must be a floating-point torch.dtype or None, got {dtype!r}.")
        return _weights_of(module_in(model), dtype, merge_lora), _is_among(ranks, sharing)

    with torch.no_grad(), agreed():
        weights, wants = sharing.together(held_here, _CALL)
        facts = {name: f"{held.text} of {held.local.dtype}{', merged' * bool(merge)}" for name, held, merge in weights}
        sharing.compare(_CALL, {**facts, "arguments": f"bucket_mib={bucket_mib}, merge_lora={merge_lora}"})
        unsharded = _unsharded_in(module_in(model), weights)
        everyone = sharing.exchange((wants, set(unsharded)))
        everywhere = set.intersection(*(names for _, names in everyone))
        weights = [each._replace(held=unsharded[each.name]) if each.name in everywhere else each for each in weights]
        wanting = [rank for rank, (wanted, _) in zip(sharing.members, everyone, strict=True) if wanted]
        travels = any(each.held.mesh is not None or each.held.other for each in weights)
        on = sharing.device if travels or not weights else weights[0].held.local.device
        packings, capacity = pack(weights, bucket_mib)
        gathers = sharing.group is not None and "gloo" not in gloo.backend_of(sharing.group, on.type)
        kinds = (on,) if device is None or torch.empty(0, device=device).device == on else (on, torch.device(device))
        needs = [each.nbytes for each in packings] if sharing.members[sharing.rank] in wanting else []
        buffers = sharing.together(lambda: [Buffers(needs, capacity, kind) for kind in kinds], _CALL)
    version = _version_of(module_in(model))
    agreed = agreed if travels else _Agreed(None)
    return FullWeights(weights, _Iteration(packings, buffers, agreed, on, wanting, gathers, wants, version, version()))


def _described(weights: Sequence[Weight]) -> tuple[tuple[str, ...], tuple[torch.Size, ...], tuple[torch.dtype, ...]]:
    names, held = tuple(each.name for each in weights), [each.held for each in weights]
    return names, tuple(torch.Size(each.shape) for each in held), tuple(each.dtype for each in held)


def _is_among(ranks: object, sharing: Ranks) -> bool:
    if ranks is None or ranks is dist.GroupMember.NON_GROUP_MEMBER:
        return ranks is None
    if isinstance(ranks, dist.ProcessGroup):
        return dist.get_rank() in dist.get_process_group_ranks(ranks)
    chosen = list(ranks) if isinstance(ranks, Collection) else [ranks]
    if not chosen or not all(isinstance(each, int) and 0 <= each < sharing.size for each in chosen):
        raise ConfigError(
            f"ranks must be None, some of the {sharing.size} ranks that share the model, counted from 0, or a process "
            f"group, got {ranks!r}."
        )
    return sharing.rank in chosen


def _weights_of(model: nn.Module, dtype: torch.dtype | None, merge_lora: bool) -> list[Weight]:
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    require_values(state)
    weights: dict[int, Weight] = {}
    for name, value in state.items():
        found = base_name(model, name) if merge_lora else (name, None)
        if found is None or is_extra(name) or id(value) in weights:
            continue
        held, merge = hold(value), found[1]
        if merge is not None and held.other:
            raise ConfigError(f"merge_lora: {name} is tensor-parallel, so no rank can add to its rows.")
        if held.mesh is None or mesh_axes.num_shards(held.mesh) == 1 or not held.nbytes:
            held.mesh, held.dim = None, 0
        held.dtype = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
        weights[id(value)] = Weight(fqn_of(model, found[0]), held, merge)
    return list(weights.values())


def _unsharded_in(model: nn.Module, weights: Sequence[Weight]) -> dict[str, LocalShard]:
    """Return parameters that are unsharded now, by name, if they have the bits that are asked for."""
    names = {id(each.held.local): each for each in weights}
    found = {}
    for unit in units_under(model):
        for (i, j), value in {**unsharded_cache.unsharded_of(unit), **eager.unsharded_of(unit)}.items():
            member = unit.shards[i].members[j]
            weight = names.get(id(member.local))
            if weight is None or member.tensor_parallel or member.extension or member.settings.dim:
                continue
            if value.dtype == member.local.dtype or (value.dtype == weight.held.dtype and weight.merge is None):
                found[weight.name] = LocalShard(weight.held.shape, weight.held.dtype, value.detach())
    return found


def _version_of(model: nn.Module) -> Callable[[], tuple[int, ...]]:
    parameters, units = [p for p in model.parameters() if not p.is_inference()], units_under(model)
    return lambda: (*(p._version for p in parameters), *(unit.epoch() for unit in units))


class _Agreed:
    """Around what all ranks do together: a rank that does something else is named; see [Note: agreement]."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        name = "" if group is None else group.group_name
        text = f"all_gather of whole weights{on_group(name)} for {_CALL}"
        self._launches = (Launch(name, text, _CALL, "all_gather"),) if name else ()
        self._agreement = Agreement("weights")
        self.is_lost = False  # whether a collective has failed

    @contextlib.contextmanager
    def __call__(self, *, waits: bool = False) -> Iterator[None]:
        """Around a launch, or a wait for it."""
        around = self._agreement.after if waits else self._agreement.before
        try:
            with telling_others(lambda: [each.group for each in self._launches]), around(self._launches):
                yield
        except FxshardError as error:
            self.is_lost = isinstance(error, RankMismatchError)
            raise
        except RuntimeError as error:
            self.is_lost = True
            raise RankMismatchError(
                f"{_CALL}: weights were not gathered ({error}). Another rank has probably ended, or has left its "
                "iterator without closing it; look at its output."
            ) from error


@dataclass(eq=False)
class _Iteration:
    """See [Note: iterating over weights]."""

    packings: Sequence[Packing]
    buffers: Sequence[Buffers]  # where collectives work, and where the weights go, if that is elsewhere
    agreed: _Agreed
    on: torch.device  # where collectives work
    wanting: Collection[int]
    gathers: bool  # as in `Gathering`
    wants: bool
    version: Callable[[], tuple[int, ...]]  # of the parameters
    version_read: tuple[int, ...]  # what it was before
    under_way: deque[Gathering] = field(default_factory=deque)
    started: int = 0
    stream: Any = None  # that was current at the last call

    def run(self) -> Iterator[WeightBucket]:
        try:
            while self.under_way or self.started < len(self.packings):
                if self.version() != self.version_read:
                    raise ConfigError(
                        f"{_CALL}: parameters were changed during the iteration, so the weights would be of two steps. "
                        "End the loop before an optimizer steps or a state is loaded."
                    )
                bucket = self._next()
                if self.wants:
                    yield bucket
        finally:
            self.end()

    def end(self) -> None:
        while (self.under_way or self.started < len(self.packings)) and not self.agreed.is_lost:
            self._next()

    def _next(self) -> WeightBucket:
        """Launch until two are under way, and wait for the first."""
        while len(self.under_way) < 2 and self.started < len(self.packings):
            self._launch()
        return self._land()

    def _launch(self) -> None:
        packing = self.packings[self.started]
        with torch.no_grad(), torch.inference_mode(False), self.agreed():
            self._follow_stream()
            buffer = self.buffers[0].next(packing.nbytes) if self.wants else None
            gathering = Gathering(packing, buffer, self.on, self.wanting, self.gathers)
            gathering.start()
        self.under_way.append(gathering)
        self.started += 1

    def _land(self) -> WeightBucket:
        gathering = self.under_way.popleft()
        packing, buffer = gathering.packing, gathering.buffer
        with torch.no_grad(), torch.inference_mode(False), self.agreed(waits=True):
            self._follow_stream()
            gathering.finish()
            if buffer is not None and len(self.buffers) > 1:
                buffer = self.buffers[1].next(packing.nbytes).copy_(buffer)
        buffer = torch.empty(0, dtype=torch.uint8) if buffer is None else buffer
        return WeightBucket(buffer, *_described(packing.weights), tuple(packing.begins))

    def _follow_stream(self) -> None:
        """Have the current stream wait for that of the last call, whose reader may have used another one."""
        if self.on.type != "cpu":
            now, before = torch.accelerator.current_stream(self.on), self.stream or torch.accelerator.current_stream()
            now.wait_stream(before)
            self.stream = now
