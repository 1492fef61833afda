"""What collectives compute, for all ranks at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

Parts = list[Tensor]  # of each rank of a group, in the order of its ranks


def exchanged(op: Any, calls: Sequence[Mapping[str, Any]]) -> list[Any]:
    """Return what each rank gets of an op, from the arguments of all ranks by name."""
    name = op.name().rpartition("::")[2].partition(".")[0]
    kind, results = next(kind for kind in _KINDS if name.startswith(kind)), list[Any]([None] * len(calls))
    is_list = "coalesced" in name
    for ranks in _groups(calls[0]["group_name"], len(calls)):
        sent = [next(iter(calls[rank].values())) for rank in ranks]
        by_tensor = zip(*sent, strict=True) if is_list else [sent]
        made = [_KINDS[kind](list(parts), calls[0]) for parts in by_tensor]
        for i, rank in enumerate(ranks):
            results[rank] = [parts[i] for parts in made] if is_list else made[0][i]
    for call, result in zip(calls, results, strict=True):
        into = call.get("out") if "out" in call else next(iter(call.values())) if name.endswith("_") else None
        for target, part in zip(_listed(into), _listed(result) if into is not None else [], strict=True):
            target.copy_(part)
    return results


def _listed(tensors: Any) -> list[Tensor]:
    return [] if tensors is None else [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _groups(name: Any, world_size: int) -> list[list[int]]:
    """Return all groups of which rank 0 sees its own: the meshes here are regular."""
    ours = dist.get_process_group_ranks(_resolve_process_group(name))
    step = ours[1] - ours[0] if len(ours) > 1 else 1
    if ours != [*range(0, step * len(ours), step)]:
        raise NotImplementedError(f"group {name} of ranks {ours}")
    starts = [rank for rank in range(world_size) if rank // step % len(ours) == 0]
    return [[start + step * i for i in range(len(ours))] for start in starts]


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


_KINDS: dict[str, Callable[[Parts, Mapping[str, Any]], Parts]] = {
    "all_gather": _gather,
    "reduce_scatter": _reduce_scatter,
    "all_reduce": _reduce,
    "all_to_all": _all_to_all,
}
