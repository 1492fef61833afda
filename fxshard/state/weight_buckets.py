"""Buckets of whole weights: what stands in one, and how it is gathered.

[Note: weights out]
A bucket holds whole tensors one after the other, in the model's order, each at the next multiple of its element size:
with one dtype there is nothing between them. Rows are cast before they are sent, and land in their place: by sends and
receives, all of a bucket in one batch, or, where all ranks want the weights, on accelerators by one all_gather per
tensor with even rows (gloo's copies). Copied are parameters that are cut along another dimension than 0, once they are
there, and what a rank has whole.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from fxshard import torch_private
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import full_tensor_of, rows_first
from fxshard.runtime.raw import as_bytes
from fxshard.state.local_shards import MIB, LocalShard, gather_all, hold
from fxshard.state.lora import Merge
from fxshard.state.transport import Wire, launched

_SMALL = 16 * MIB  # a bucket that is large enough to be fast


class Weight(NamedTuple):
    """A tensor to be given out."""

    name: str
    held: LocalShard  # with the dtype in which it is given out, and without a mesh if it is whole here
    merge: Merge | None = None


class Packing(NamedTuple):
    """What stands where in a bucket."""

    weights: list[Weight]
    begins: list[int]  # of each weight, in bytes
    nbytes: int


def pack(weights: Sequence[Weight], bucket_mib: float) -> tuple[list[Packing], int]:
    """Cut weights into buckets, sixteen unless they were small; return also how many bytes one has at most."""
    capacity = min(int(2 * bucket_mib * MIB / 3), max(sum(each.held.nbytes for each in weights) // 16, _SMALL))
    packings: list[Packing] = []
    now = Packing([], [], 0)
    for weight in weights:
        size = weight.held.dtype.itemsize
        begin = -(-now.nbytes // size) * size
        if now.weights and begin + weight.held.nbytes > capacity:
            packings.append(now)
            now, begin = Packing([], [], 0), 0
        now.weights.append(weight)
        now.begins.append(begin)
        now = now._replace(nbytes=begin + weight.held.nbytes)
    return [*packings, now] if now.weights else packings, capacity


class Buffers:
    """Memory of three buckets, used again when nobody has a view of it: one gathered, one read, one in a variable."""

    def __init__(self, needs: Sequence[int], capacity: int, device: torch.device) -> None:
        """Take memory for buckets that need so many bytes, but for those that need more than `capacity`."""
        shared = [nbytes for nbytes in needs if nbytes <= capacity]
        self._capacity, self._device = capacity, device
        self._kept = deque(self._new(max(shared[i::3])) for i in range(min(3, len(shared))))

    def _new(self, nbytes: int) -> tuple[Tensor, int]:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        return buffer, torch_private.storage_users(buffer)

    def next(self, nbytes: int) -> Tensor:
        """Return memory for the next bucket, `[nbytes]`."""
        if nbytes > self._capacity:
            return self._new(nbytes)[0]
        buffer, unused = self._kept.popleft()
        if torch_private.storage_users(buffer) > unused:  # somebody has kept a view: it is theirs
            buffer, unused = self._new(buffer.numel())
        self._kept.append((buffer, unused))
        return buffer[:nbytes]


@dataclass(eq=False)
class Gathering:
    """One bucket under way; see [Note: weights out]."""

    packing: Packing
    buffer: Tensor | None  # on the ranks that want it
    device: torch.device  # where collectives work
    wanting: Collection[int]  # global ranks
    gathers: bool = False  # whether an all_gather lands in place without copies
    works: list[Any] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # what must live until the works are done

    def start(self) -> None:
        """Launch what all ranks launch together."""
        deltas, ops = self._deltas(), dict[DeviceMesh, list[dist.P2POp]]()
        wires = {
            mesh: Wire(mesh_axes.shard_group(mesh), self.device)
            for mesh in dict.fromkeys(each.held.mesh for each in self.packing.weights)
            if mesh is not None
        }
        for i, (_, held, _) in enumerate(self.packing.weights):
            if held.mesh is not None:
                self._launch(i, deltas.get(i), wires[held.mesh], ops.setdefault(held.mesh, []))
                continue
            whole = full_tensor_of(cast(DTensor, held.local)) if held.other else held.local  # all of its ranks are here
            if self.buffer is not None and whole.numel():
                self._write(self._bytes(i), whole + deltas[i].to(whole) if i in deltas else whole, held.dtype)
        for batch in ops.values():
            self.works += launched(batch)

    def _launch(self, i: int, delta: Tensor | None, wire: Wire, batch: list[dist.P2POp]) -> None:
        held, members = self.packing.weights[i].held, dist.get_process_group_ranks(wire.group)
        receivers = [rank for rank, member in enumerate(members) if member in self.wanting]
        if not receivers:
            return
        item, rows = held.item(wire.world_size, straight=False), held.rows
        spans = [item.held_by(rank) for rank in range(wire.world_size)]
        if delta is not None and rows.numel():
            first = spans[wire.rank][0] * held.shape[held.dim] // held.nbytes
            rows = rows + delta.movedim(held.dim, 0)[first : first + rows.shape[0]].to(rows)
        places = [self._bytes(i)[start : max(start, end)] for start, end in spans] if self.buffer is not None else []
        if places:
            own = self._write(places[wire.rank], rows, held.dtype)
        else:
            own = as_bytes(rows.to(self.device, held.dtype))
        self.kept.append(own)
        if self.gathers and len(receivers) == wire.world_size and item.share * wire.world_size == item.nbytes:
            self.works.append(wire.all_gather(self._bytes(i), own))
            return
        batch += [wire.send(own, rank) for rank in receivers if rank != wire.rank and own.numel()]
        batch += [wire.receive(to, rank) for rank, to in enumerate(places) if rank != wire.rank and to.numel()]

    def finish(self) -> None:
        """Wait, and bring what is cut along another dimension than 0 into its shape."""
        for work in self.works:
            work.wait()
        self.kept.clear()
        for i, (_, held, _) in enumerate(self.packing.weights if self.buffer is not None else ()):
            if held.dim:
                whole = self._bytes(i).view(held.dtype)
                whole.copy_(whole.view(rows_first(held.shape, held.dim)).movedim(0, held.dim).reshape(-1))

    def _bytes(self, i: int) -> Tensor:
        begin = self.packing.begins[i]
        return cast(Tensor, self.buffer)[begin : begin + self.packing.weights[i].held.nbytes]

    @staticmethod
    def _write(target: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
        target.view(dtype).view(rows.shape).copy_(rows)
        return target

    def _deltas(self) -> dict[int, Tensor]:
        """Gather the factors of the bucket's LoRA layers, and return what is to be added to each weight."""
        merges = {i: each.merge for i, each in enumerate(self.packing.weights) if each.merge is not None}
        factors = [hold(factor) for merge in merges.values() for _, _, factor in merge.factors()]
        whole = iter(gather_all(factors, recipient=None, cpu_offload=False, bucket_mib=64, title="") or ())
        return {i: merge.delta([next(whole) for _ in merge.factors()]) for i, merge in merges.items()}
