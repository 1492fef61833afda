"""What collectives compute, for all ranks of a group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

Parts = list[Tensor]  # of each rank of a group, in the order of its ranks


@dataclass(frozen=True)
class RankCall:
    """A collective as a rank calls it."""

    op: Any
    rank: int
    group: Sequence[int]  # all of its ranks, this one among them
    arguments: Mapping[str, Any]  # by name
    targets: Sequence[tuple[int, Tensor]]  # where its results go, by their index

    @property
    def _name(self) -> str:
        return str(self.op.name().rpartition("::")[2].partition(".")[0])

    @property
    def sent(self) -> Parts:
        """What the rank sends."""
        return _listed(next(iter(self.arguments.values())))

    def receive(self, sent: Mapping[int, Parts]) -> None:
        """Write what the rank gets of what each rank has sent."""
        compute = next(_KINDS[kind] for kind in _KINDS if self._name.startswith(kind))
        by_tensor = zip(*(sent[rank] for rank in self.group), strict=True)
        results = [compute(list(parts), self.arguments)[self.group.index(self.rank)] for parts in by_tensor]
        into = self.arguments.get("out", self.sent if self._name.endswith("_") else None)
        for target, result in zip(_listed(into), results if into is not None else [], strict=True):
            target.copy_(result)
        for i, target in self.targets:
            target.copy_(results[i])


@dataclass(frozen=True)
class Collective:
    """A collective of ranks that run one code; those that run their own meet in `apart.py`."""

    calls: Sequence[RankCall]

    def __call__(self) -> None:
        sent = {call.rank: [part.clone() for part in call.sent] for call in self.calls}
        for call in self.calls:
            call.receive(sent)


def _listed(tensors: Any) -> Parts:
    return [] if tensors is None else [tensors] if isinstance(tensors, Tensor) else list(tensors)


def groups_of(name: Any, ranks: Sequence[int]) -> list[Sequence[int]]:
    """Return the group of that name of each of these ranks, of which the first one is this."""
    ours = dist.get_process_group_ranks(_resolve_process_group(name))
    if len(ranks) == 1:
        return [ours]
    step = ours[1] - ours[0] if len(ours) > 1 else 1
    if ours != [*range(0, step * len(ours), step)]:
        raise NotImplementedError(f"group {name} of ranks {ours}: these meshes are not regular")
    firsts = (rank - rank // step % len(ours) * step for rank in ranks)
    return [[first + step * i for i in range(len(ours))] for first in firsts]


def _gather(parts: Parts, _: Any) -> Parts:
    return [torch.cat(parts)] * len(parts)


def _reduce(parts: Parts, call: Mapping[str, Any]) -> Parts:
    stacked = torch.stack([part.float() if part.is_floating_point() else part for part in parts])
    reductions: dict[str, Callable[[Tensor], Tensor]] = {
        "sum": lambda all_: all_.sum(0),
        "avg": lambda all_: all_.mean(0),
        "max": lambda all_: all_.amax(0),
    }
    return [reductions[call["reduce_op"]](stacked).to(parts[0].dtype)] * len(parts)


def _reduce_scatter(parts: Parts, call: Mapping[str, Any]) -> Parts:
    return list(_reduce(parts, call)[0].chunk(len(parts)))


def _all_to_all(parts: Parts, call: Mapping[str, Any]) -> Parts:
    sizes = {*call["output_split_sizes"], *call["input_split_sizes"]}
    if len(sizes) > 1:
        raise NotImplementedError(f"splits of different sizes: {sizes}")
    pieces = [part.chunk(len(parts)) for part in parts]
    return [torch.cat([piece[i] for piece in pieces]) for i in range(len(parts))]


def _shard_dim_all_to_all(parts: Parts, call: Mapping[str, Any]) -> Parts:
    pieces = [part.chunk(len(parts), call["shard_dim"]) for part in parts]
    return [torch.cat([piece[i] for piece in pieces], call["gather_dim"]) for i in range(len(parts))]


_KINDS: dict[str, Callable[[Parts, Mapping[str, Any]], Parts]] = {
    "all_gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _reduce,
    "all_to_all": _all_to_all,
    "shard_dim_alltoall": _shard_dim_all_to_all,
}
