"""Buckets of whole weights: how they are laid out, and how one is gathered.

[Note: weights out]
A bucket holds whole tensors one after the other, in the model's order, each at the next multiple of its element size:
with one dtype there is nothing between them. What a rank sends lands in its place, so that no copy follows:

    even       on accelerators one all_gather per tensor, straight into its place
    others     sends and receives into place: uneven rows, only some of the ranks want the weights, or gloo, whose
               all_gather copies
    staged     shares below `STRAIGHT_BYTES`, and what is cut along another dimension than 0: one transfer for all of
               them, into a stage behind the tensors of the bucket, and a copy
    whole      what a rank has anyway, or another library's placements: a copy

Rows are cast before they are sent. A bucket and its stage together take at most `capacity` bytes; a tensor that needs
more is a bucket of its own.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, cast

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
from fxshard.state.rounds import STRAIGHT_BYTES, Item
from fxshard.state.transport import Wire, launched

_ALIGNMENT = 16  # bytes; of shares in a stage
_SMALL = 16 * MIB  # a bucket that is large enough to be fast


@dataclass(frozen=True, eq=False)
class Weight:
    """A tensor to be given out."""

    name: str
    held: LocalShard
    dtype: torch.dtype  # in which it is given out
    merge: Merge | None = None

    @cached_property
    def mesh(self) -> DeviceMesh | None:
        """Over which it is sharded by rows; `None` if it is whole here."""
        mesh = self.held.mesh
        return mesh if mesh is not None and mesh_axes.num_shards(mesh) > 1 and self.held.nbytes else None

    @cached_property
    def nbytes(self) -> int:
        """Of the whole, as it is given out."""
        return math.prod(self.held.shape) * self.dtype.itemsize

    @cached_property
    def item(self) -> Item:
        """How its bytes are spread over the ranks."""
        rows = self.held.shape[self.held.dim]
        share = -(-rows // mesh_axes.num_shards(cast(DeviceMesh, self.mesh))) * (self.nbytes // rows)
        return Item(self.nbytes, share, share >= STRAIGHT_BYTES and not self.held.dim)

    @cached_property
    def is_staged(self) -> bool:
        """Whether it travels together with others; see [Note: weights out]."""
        return self.mesh is not None and not self.item.straight


def _aligned(nbytes: int, to: int = _ALIGNMENT) -> int:
    return -(-nbytes // to) * to


@dataclass(eq=False)
class Layout:
    """What stands where in a bucket."""

    weights: list[Weight] = field(default_factory=list)
    begins: list[int] = field(default_factory=list)  # of each weight
    nbytes: int = 0  # of all weights
    widths: dict[DeviceMesh, int] = field(default_factory=dict)  # bytes that a rank puts into the stage
    # of each mesh: the index of each weight that is staged, and where its rows begin in a rank's part
    staged: dict[DeviceMesh, list[tuple[int, int]]] = field(default_factory=dict)

    def add(self, weight: Weight) -> None:
        """Append a weight."""
        self.weights.append(weight)
        self.begins.append(_aligned(self.nbytes, weight.dtype.itemsize))
        self.nbytes = self.begins[-1] + weight.nbytes
        if weight.is_staged:
            mesh = cast(DeviceMesh, weight.mesh)
            offset = self.widths.get(mesh, 0)
            self.staged.setdefault(mesh, []).append((len(self.weights) - 1, offset))
            self.widths[mesh] = offset + _aligned(weight.item.share)

    @property
    def stages(self) -> Iterator[tuple[DeviceMesh, int, int]]:
        """Yield mesh, begin and width of each stage."""
        begin = _aligned(self.nbytes)
        for mesh, width in self.widths.items():
            yield mesh, begin, width
            begin += width * mesh_axes.num_shards(mesh)

    @property
    def needs(self) -> int:
        """Bytes of the bucket with its stages."""
        return _aligned(self.nbytes) + sum(width * mesh_axes.num_shards(mesh) for mesh, width in self.widths.items())


def capacity_of(weights: Sequence[Weight], bucket_mib: float) -> int:
    """Return how many bytes a bucket may need: three exist at a time, and of sixteen the gathers overlap with reads."""
    total = sum(each.nbytes for each in weights)
    return min(int(2 * bucket_mib * MIB / 3), max(total // 16, _SMALL))


def lay_out(weights: Sequence[Weight], capacity: int) -> list[Layout]:
    """Cut weights into buckets of at most `capacity` bytes; the same on every rank."""
    layouts: list[Layout] = []
    now = Layout()
    for weight in weights:
        stage = 0
        if weight.is_staged:
            stage = _aligned(weight.item.share) * mesh_axes.num_shards(cast(DeviceMesh, weight.mesh))
        if now.weights and now.needs + stage + weight.nbytes + 2 * _ALIGNMENT > capacity:
            layouts.append(now)
            now = Layout()
        now.add(weight)
    return [*layouts, now] if now.weights else layouts


class Buffers:
    """Memory of buckets, which is used again when nobody holds a view of it.

    Three take turns: one is being gathered, one is read, and the reader's variable still has the last view of a third.
    """

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
    """One bucket under way."""

    layout: Layout
    buffer: Tensor | None  # on the ranks that want it
    device: torch.device  # where collectives work
    wanting: Collection[int]  # global ranks
    gathers: bool = False  # whether an all_gather lands in place without copies; gloo's does not
    works: list[Any] = field(default_factory=list)
    kept: list[Tensor] = field(default_factory=list)  # what must live until the works are done

    def start(self) -> None:
        """Launch what all ranks launch together."""
        deltas = self._deltas()
        meshes: dict[DeviceMesh, list[int]] = {}
        for i, weight in enumerate(self.layout.weights):
            if (mesh := weight.mesh) is not None:
                meshes.setdefault(mesh, []).append(i)
            else:
                self._take_whole(i, deltas)
        stages = {mesh: (begin, width) for mesh, begin, width in self.layout.stages}
        for mesh, indices in meshes.items():
            members = dist.get_process_group_ranks(mesh_axes.shard_group(mesh))
            if receivers := [i for i, rank in enumerate(members) if rank in self.wanting]:
                self._start_mesh(Wire(mesh_axes.shard_group(mesh), self.device), indices, receivers, deltas)
                if mesh in stages:
                    self._start_stage(mesh, *stages[mesh], receivers, deltas)

    def finish(self) -> None:
        """Wait, and take what was staged into place."""
        for work in self.works:
            work.wait()
        self.kept.clear()
        for mesh, begin, width in self.layout.stages if self.buffer is not None else ():
            world_size = mesh_axes.num_shards(mesh)
            regions = cast(Tensor, self.buffer)[begin : begin + width * world_size].view(world_size, width)
            for i, offset in self.layout.staged[mesh]:
                self._unstage(i, regions[:, offset : offset + self.layout.weights[i].item.share])

    def view(self, i: int) -> Tensor:
        """Return the i-th weight."""
        weight, begin = self.layout.weights[i], self.layout.begins[i]
        return cast(Tensor, self.buffer)[begin : begin + weight.nbytes].view(weight.dtype).view(weight.held.shape)

    def _deltas(self) -> dict[int, Tensor]:
        """Gather the factors of the bucket's LoRA layers, and return what is to be added to each weight."""
        merges = {i: each.merge for i, each in enumerate(self.layout.weights) if each.merge is not None}
        factors = [hold(factor) for merge in merges.values() for _, _, factor in merge.factors()]
        gathered = gather_all(factors, recipient=None, cpu_offload=False, bucket_mib=64, title="") or []
        whole = iter(gathered)
        return {i: merge.delta([next(whole) for _ in merge.factors()]) for i, merge in merges.items()}

    def _take_whole(self, i: int, deltas: dict[int, Tensor]) -> None:
        held = self.layout.weights[i].held
        full = full_tensor_of(cast(DTensor, held.local)) if held.other else held.local  # all of its ranks are here
        if self.buffer is not None and full.numel():
            self.view(i).copy_(full + deltas[i].to(full) if i in deltas else full)

    def _rows(self, i: int, wire: Wire, deltas: dict[int, Tensor]) -> Tensor:
        """Return this rank's rows as they are before the cast."""
        weight = self.layout.weights[i]
        rows = weight.held.rows
        if i not in deltas or not rows.numel():
            return rows
        of_row = weight.nbytes // weight.held.shape[weight.held.dim]
        first = weight.item.held_by(wire.rank)[0] // of_row
        return rows + deltas[i].movedim(weight.held.dim, 0)[first : first + rows.shape[0]].to(rows)

    def _place(self, i: int, rank: int) -> Tensor:
        """Return where the rows of a rank belong."""
        begin, (start, end) = self.layout.begins[i], self.layout.weights[i].item.held_by(rank)
        return cast(Tensor, self.buffer)[begin + start : begin + max(start, end)]

    def _start_mesh(self, wire: Wire, indices: Sequence[int], receivers: Sequence[int], deltas: Any) -> None:
        ops: list[dist.P2POp] = []
        for i in indices:
            weight = self.layout.weights[i]
            if weight.is_staged:
                continue
            rows, own = self._rows(i, wire, deltas), None
            is_ready = rows.is_contiguous() and (rows.dtype, rows.device) == (weight.dtype, self.device)
            is_even = weight.item.share * wire.world_size == weight.nbytes
            if len(receivers) == wire.world_size and is_even and self.gathers:
                own = as_bytes(rows) if is_ready else _written(self._place(i, wire.rank), rows, weight.dtype)
                begin = self.layout.begins[i]
                self.works.append(wire.all_gather(cast(Tensor, self.buffer)[begin : begin + weight.nbytes], own))
            elif self.buffer is not None:
                own = _written(self._place(i, wire.rank), rows, weight.dtype)
                ops += self._exchange(wire, own, receivers, [self._place(i, r) for r in range(wire.world_size)])
            else:
                own = as_bytes(rows if is_ready else rows.to(self.device, weight.dtype))
                ops += self._exchange(wire, own, receivers, [])
            self.kept.append(own)
        self.works += launched(ops)

    def _exchange(
        self, wire: Wire, own: Tensor, receivers: Sequence[int], landings: Sequence[Tensor]
    ) -> Iterator[dist.P2POp]:
        for rank in receivers if own.numel() else ():
            if rank != wire.rank:
                yield wire.send(own, rank)
        for rank, landing in enumerate(landings):
            if rank != wire.rank and landing.numel():
                yield wire.receive(landing, rank)

    def _start_stage(self, mesh: DeviceMesh, begin: int, width: int, receivers: Sequence[int], deltas: Any) -> None:
        wire, regions = Wire(mesh_axes.shard_group(mesh), self.device), []
        if self.buffer is not None:
            stage = self.buffer[begin : begin + width * wire.world_size]
            regions = list(stage.split(width))
        region = regions[wire.rank] if regions else torch.empty(width, dtype=torch.uint8, device=self.device)
        self.kept.append(region)
        for i, offset in self.layout.staged[mesh]:
            rows, dtype = self._rows(i, wire, deltas), self.layout.weights[i].dtype
            _written(region[offset : offset + rows.numel() * dtype.itemsize], rows, dtype)
        if len(receivers) == wire.world_size:
            self.works.append(wire.all_gather(stage, region))
        else:
            self.works += launched(list(self._exchange(wire, region, receivers, regions)))

    def _unstage(self, i: int, shares: Tensor) -> None:
        """Join the rows of all ranks, `[world_size, share]` in bytes."""
        weight, into = self.layout.weights[i], self.view(i)
        if dim := weight.held.dim:
            first, *others = rows_first(weight.held.shape, dim)
            rows = first // len(shares)
            into.movedim(dim, 0).unflatten(0, (len(shares), rows)).copy_(
                shares.view(weight.dtype).view(len(shares), rows, *others)
            )
            return
        full, rest = divmod(weight.nbytes, weight.item.share)
        place = as_bytes(into)
        place[: full * weight.item.share].view(full, weight.item.share).copy_(shares[:full])
        if rest:
            place[full * weight.item.share :].copy_(shares[full, :rest])


def _written(target: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Write rows into bytes, cast."""
    target.view(dtype).view(rows.shape).copy_(rows)
    return target
