"""Whole weights of a sharded model, bucket by bucket: for engines that generate, and for exports.

[Note: a pass over the weights]
Every rank makes the pass, also one that gets nothing. While a bucket is read the next one is in flight. With each
bucket goes a vote: whether a rank still wants weights. The next is launched if any rank's vote says so; a rank that
has voted "yes" needs not look at the others'. So a rank that leaves its loop early votes "no", and takes part until no
rank is left that reads; nobody hangs, and nobody gathers for nothing but the buckets that were under way.

Each bucket is a run among the ranks, as a graph is ([Note: agreement] in `runtime/rank_check.py`). A rank that does
something else instead is named in an error.
"""

from __future__ import annotations

import contextlib
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fxshard.errors import ConfigError, FxshardError, RankMismatchError
from fxshard.ir.launches import Launch, on_group
from fxshard.runtime import eager, gloo, unsharded_cache
from fxshard.runtime.rank_check import Agreement, telling_others
from fxshard.runtime.unit import Unit
from fxshard.sharding.sharded_module import units_under
from fxshard.state.local_shards import LocalShard, hold, require_bucket
from fxshard.state.lora import base_name
from fxshard.state.model_state import require_values
from fxshard.state.names import fqn_of, module_in
from fxshard.state.ranks import Ranks
from fxshard.state.transport import Wire
from fxshard.state.user_hooks import is_extra
from fxshard.state.weight_buckets import Buffers, Gathering, Weight, capacity_of, lay_out

_CALL = "full_weights"


@dataclass(frozen=True, kw_only=True)
class WeightBucket:
    """Whole weights in one piece of memory, valid until the next bucket; iterated, names and views of it.

    Attributes:
        buffer: the bytes, `[nbytes]` of uint8.
        names, shapes, dtypes: of each weight.
        offsets: of each weight's first byte in the buffer. They follow each other without a gap if the dtypes are one.
    """

    buffer: Tensor
    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]
    offsets: tuple[int, ...]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each name with a view of the buffer."""
        for name, shape, dtype, offset in zip(self.names, self.shapes, self.dtypes, self.offsets, strict=True):
            yield name, self.buffer[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)


class FullWeights(Iterator[tuple[str, Tensor]]):
    """One pass over whole weights: iterate it, or `buckets()`. It can be closed, and used in a `with`.

    Attributes:
        names, shapes, dtypes: of all weights in order, known before the first is gathered, on every rank.
    """

    def __init__(self, weights: Sequence[Weight], one_pass: _Pass) -> None:
        self.names = tuple(each.name for each in weights)
        self.shapes = tuple(torch.Size(each.held.shape) for each in weights)
        self.dtypes = tuple(each.dtype for each in weights)
        self._pass, self._buckets = one_pass, one_pass.run()
        self._items: Any = (pair for bucket in self._buckets for pair in bucket)

    def __next__(self) -> tuple[str, Tensor]:
        """Return the next name, and a view that is valid until the one after it."""
        pair: tuple[str, Tensor] = next(self._items)
        return pair

    def buckets(self) -> Iterator[WeightBucket]:
        """Yield what is left of the pass, bucket by bucket."""
        yield from self._buckets

    def close(self) -> None:
        """End the pass on this rank; it takes part until no rank reads any more."""
        self._items.close()
        self._pass.end()

    def __enter__(self) -> FullWeights:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        """End a pass that nobody reads any more, also one that was never begun: other ranks may read."""
        if "_items" in self.__dict__ and not sys.is_finalizing():
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

    All ranks of the model call it with the same arguments, and iterate, also those that get nothing. A tensor is a view
    of a bucket and valid until the next one is asked for; one that is kept longer keeps its bucket's memory, which is
    then not used again. The next bucket is gathered meanwhile. See [Note: weights out].

    Args:
        model: sharded by fxshard, by FSDP2 or not at all; compiled or not.
        bucket_mib: half of the memory that may be taken: one bucket is gathered, one read, and the loop's variable has
            the last view of a third. A tensor with more than two thirds of it is a bucket of its own.
        dtype: to cast what is floating-point to, before it is sent; each tensor's own by default.
        device: where the tensors are; by default where collectives work.
        ranks: who gets them: a rank or several, counted among those that share the model, or a process group, which is
            `GroupMember.NON_GROUP_MEMBER` on ranks outside of it; all by default. The others iterate over nothing.
        merge_lora: whether PEFT's active LoRA adapters are added to the weights, under the base model's names.

    Returns:
        An iterator of names and tensors. A tied one comes once, under its first name; buffers are this rank's.

    Raises:
        ConfigError: as for `full_state_dict`, or adapters cannot be merged.
        RankMismatchError: a rank does something else, or was lost.
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
        facts = {each.name: f"{each.held.text} as {each.dtype}{', merged' * bool(each.merge)}" for each in weights}
        facts["arguments"] = f"bucket_mib={bucket_mib}, merge_lora={merge_lora}"
        sharing.compare(_CALL, facts)
        wanting = [rank for rank, each in zip(sharing.members, sharing.exchange(wants), strict=True) if each]
        weights = _with_unsharded(weights, module_in(model), sharing)
        on = sharing.device if _travel(weights) or not weights else weights[0].held.local.device
        one_pass = sharing.together(
            lambda: _Pass(weights, capacity_of(weights, bucket_mib), sharing, agreed, wanting, on, device), _CALL
        )
    one_pass.version = _version_of(module_in(model))
    return FullWeights(weights, one_pass)


def _travel(weights: Sequence[Weight]) -> bool:
    return any(each.mesh is not None or each.held.other for each in weights)


def _is_among(ranks: object, sharing: Ranks) -> bool:
    """Return whether this rank gets the weights."""
    own = sharing.members[sharing.rank]
    if ranks is None:
        return True
    if isinstance(ranks, dist.ProcessGroup):
        return own in dist.get_process_group_ranks(ranks)
    if ranks is dist.GroupMember.NON_GROUP_MEMBER:
        return False
    chosen = list(ranks) if isinstance(ranks, Collection) else [ranks]
    if not chosen or not all(isinstance(each, int) and 0 <= each < sharing.size for each in chosen):
        raise ConfigError(
            f"ranks must be None, some of the {sharing.size} ranks that share the model, counted from 0, or a process "
            f"group, got {ranks!r}."
        )
    return sharing.rank in chosen


def _weights_of(model: nn.Module, dtype: torch.dtype | None, merge_lora: bool) -> list[Weight]:
    """Return what stands in the state_dict, tied tensors once."""
    state = {name: value for name, value in model.state_dict(keep_vars=True).items() if isinstance(value, Tensor)}
    require_values(state)
    weights: dict[int, Weight] = {}
    for name, value in state.items():
        found = base_name(model, name) if merge_lora else (name, None)
        if found is None or is_extra(name) or id(value) in weights:
            continue
        held, merge = hold(value), found[1]
        if merge is not None and held.other:
            raise ConfigError(
                f"merge_lora: {name} has placements of tensor parallelism, so no rank can add to its rows."
            )
        kind = dtype if dtype is not None and held.dtype.is_floating_point else held.dtype
        weights[id(value)] = Weight(fqn_of(model, found[0]), held, kind, merge)
    return list(weights.values())


def _with_unsharded(weights: Sequence[Weight], model: nn.Module, sharing: Ranks) -> list[Weight]:
    """Take parameters that every rank has unsharded now from there, if they have the bits that are asked for."""
    whole = {id(rows): full for unit in units_under(model) for rows, full in _unsharded(unit)}
    usable = {
        each.name: whole[id(each.held.local)]
        for each in weights
        if id(each.held.local) in whole and whole[id(each.held.local)].dtype in _bits_of(each)
    }
    shared = set.intersection(*map(set, sharing.exchange(list(usable))))
    return [
        replace(each, held=LocalShard(each.held.shape, usable[each.name].dtype, usable[each.name]))
        if each.name in shared
        else each
        for each in weights
    ]


def _bits_of(weight: Weight) -> tuple[torch.dtype, ...]:
    return (weight.held.dtype,) if weight.merge else (weight.held.dtype, weight.dtype)


def _unsharded(unit: Unit) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the rows and the whole of each parameter that is unsharded now."""
    read, resident = eager.unsharded_of(unit), unsharded_cache.unsharded_of(unit)
    for i, shard in enumerate(unit.shards):
        for j, member in enumerate(shard.members):
            if member.tensor_parallel is not None or member.extension is not None:
                continue
            if (i, j) in read:
                yield member.local, read[i, j].detach()
            elif (i, j) in resident:
                yield member.local, resident[i, j].movedim(0, member.settings.dim)


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
class _Flight:
    """A bucket under way, and the votes that went with it."""

    gathering: Gathering
    wants: bool  # this rank's vote
    votes: Tensor | None  # of all ranks, `[ranks]`
    work: Any

    def goes_on(self) -> bool:
        """Return whether any rank wants more; the same on every rank."""
        if self.wants or self.votes is None:
            return self.wants
        self.work.wait()
        return bool(self.votes.any())


class _Pass:
    """See [Note: a pass over the weights]."""

    version: Callable[[], tuple[int, ...]]  # of the parameters

    def __init__(
        self,
        weights: Sequence[Weight],
        capacity: int,
        sharing: Ranks,
        agreed: _Agreed,
        wanting: Collection[int],
        on: torch.device,
        device: torch.device | str | None,
    ) -> None:
        """Take memory; `on` is where collectives work."""
        self._layouts = lay_out(weights, capacity)
        self._travels = sharing.size > 1 and _travel(weights)
        self._sharing, self._wanting, self._on = sharing, wanting, on
        self._agreed = agreed if self._travels else _Agreed(None)
        group = sharing.group
        self._gathers = group is not None and "gloo" not in gloo.backend_of(group, on.type)
        self._receives = self._wants = sharing.members[sharing.rank] in wanting
        needs = [each.needs for each in self._layouts if self._receives]
        self._buffers = Buffers(needs, capacity, on)
        given = on if device is None else torch.empty(0, device=device).device
        self._elsewhere = Buffers(needs, capacity, given) if given != on else None
        self._under_way: deque[_Flight] = deque()
        self._started = 0
        self._stream: Any = None

    def run(self) -> Iterator[WeightBucket]:
        """Yield the buckets, if this rank wants them."""
        first = self.version()
        try:
            self._launch_next()
            while self._under_way:
                if self._wants and self.version() != first:
                    raise ConfigError(
                        f"{_CALL}: parameters were changed during the pass, so its weights would be of two steps. End "
                        "the loop before an optimizer steps or a state is loaded."
                    )
                self._launch_next()
                bucket = self._land()
                if self._wants:
                    yield bucket
        finally:
            self.end()

    def end(self) -> None:
        """Want nothing more, and take part until no rank does."""
        self._wants = False
        if not self._started:
            self._launch_next()
        while self._under_way and not self._agreed.is_lost:
            self._launch_next()
            self._land()

    def _launch_next(self) -> None:
        if self._started == len(self._layouts) or (self._under_way and not self._under_way[-1].goes_on()):
            return
        layout = self._layouts[self._started]
        with torch.no_grad(), torch.inference_mode(False), self._agreed():
            self._follow_stream()
            buffer = self._buffers.next(layout.needs) if self._receives else None
            votes, work = self._vote()
            gathering = Gathering(layout, buffer, self._on, self._wanting, gathers=self._gathers)
            gathering.start()
        self._under_way.append(_Flight(gathering, self._wants, votes, work))
        self._started += 1

    def _vote(self) -> tuple[Tensor | None, Any]:
        sharing = self._sharing
        if not self._travels or sharing.group is None:
            return None, None
        votes = torch.empty(sharing.size, dtype=torch.uint8, device=sharing.device)
        own = torch.full((1,), self._wants, dtype=torch.uint8, device=sharing.device)
        return votes, Wire(sharing.group, sharing.device).all_gather(votes, own)

    def _land(self) -> WeightBucket:
        """Wait for the first bucket that is under way."""
        flight = self._under_way.popleft()
        gathering = flight.gathering
        layout, buffer = gathering.layout, gathering.buffer
        with torch.no_grad(), torch.inference_mode(False), self._agreed(waits=True):
            self._follow_stream()
            if flight.work is not None:
                flight.work.wait()
            gathering.finish()
            if buffer is None:
                buffer = torch.empty(0, dtype=torch.uint8)
            elif self._elsewhere is not None:
                buffer = self._elsewhere.next(layout.nbytes).copy_(buffer[: layout.nbytes])
        return WeightBucket(
            buffer=buffer[: layout.nbytes],
            names=tuple(each.name for each in layout.weights),
            shapes=tuple(torch.Size(each.held.shape) for each in layout.weights),
            dtypes=tuple(each.dtype for each in layout.weights),
            offsets=tuple(layout.begins),
        )

    def _follow_stream(self) -> None:
        """Have the current stream wait for that of the last call, whose reader may have used another one."""
        if self._on.type == "cpu":
            return
        now, before = torch.accelerator.current_stream(self._on), self._stream
        if before is not None and before != now:
            now.wait_stream(before)
        self._stream = now
