"""The tensors of a state as this rank holds them, how all of them become full, and how they are cut again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from fxshard.errors import ConfigError
from fxshard.runtime import mesh_axes
from fxshard.runtime.parameters import full_tensor_of, local_of, rows_first
from fxshard.runtime.raw import as_bytes, checksum
from fxshard.state import transport
from fxshard.state.progress import showing
from fxshard.state.ranks import Ranks, is_sharded
from fxshard.state.rounds import Item, rounds_of
from fxshard.state.transport import Progress, Wire, part

MIB = 1024 * 1024


@dataclass(eq=False, slots=True)
class LocalShard:
    """A tensor of the state."""

    shape: tuple[int, ...]  # of the full tensor
    dtype: torch.dtype
    local: Tensor  # this rank's rows; the tensor itself if whole or sharded in another way
    mesh: DeviceMesh | None = None  # whose last axis has rows of it, `None` if it is not cut into rows
    other: bool = False  # a DTensor sharded in another way; its ranks make it full together
    replica: bool = False  # a DTensor, all of it on every rank: reductions may round differently
    dim: int = 0  # along which it is cut; it travels with this dimension first

    @property
    def rows(self) -> Tensor:
        """What this rank has, cut along its first dimension."""
        return self.local.movedim(self.dim, 0) if self.dim else self.local

    def rows_of(self, full: Tensor) -> Tensor:
        """Return the full tensor as `rows` are cut of it."""
        return full.movedim(self.dim, 0).contiguous() if self.dim else full

    def whole(self, full: Tensor) -> Tensor:
        """Return the full tensor in its shape, of one with the rows of all ranks."""
        shape = rows_first(self.shape, self.dim)
        return full.view(shape).movedim(0, self.dim).contiguous() if self.dim else full.view(shape)

    @property
    def is_on_device(self) -> bool:
        """Whether the rows lie where the collectives of their mesh work."""
        return self.mesh is None or self.local.device.type == self.mesh.device_type

    @property
    def text(self) -> str:
        """What must be the same on all ranks."""
        how = "" if self.mesh is not None else " elsewhere sharded" if self.other else " whole"
        return f"{self.dtype}{list(self.shape)}{how}{'' if self.is_on_device else ' on ' + self.local.device.type}"

    @property
    def valued(self) -> str:
        """The same with the value where that must be equal too: of a plain tensor that is not cut into rows."""
        is_plain = self.mesh is None and not self.other and not self.replica
        return f"{self.text} = {value_text(self.local)}" if is_plain else self.text

    @property
    def nbytes(self) -> int:
        """Bytes of the full tensor."""
        return math.prod(self.shape) * self.dtype.itemsize

    def item(self, world_size: int, straight: bool) -> Item:
        """Return it for `rounds_of`, if it is cut into rows over `world_size` ranks."""
        nbytes = self.nbytes
        if not nbytes:
            return Item(0, 0, False)
        rows = self.shape[self.dim]
        return Item(nbytes, -(-rows // world_size) * (nbytes // rows), straight and self.is_on_device)


def hold(tensor: Tensor, rows_of: DTensor | None = None) -> LocalShard:
    """Describe how this rank holds a DTensor or a plain tensor; a plain one may be state of the rows of `rows_of`."""
    if not isinstance(tensor, DTensor):
        if rows_of is not None:
            dim = cast(Shard, rows_of.placements[-1]).dim
            return LocalShard(tuple(rows_of.shape), tensor.dtype, tensor, rows_of.device_mesh, dim=dim)
        return LocalShard(tuple(tensor.shape), tensor.dtype, tensor)
    if is_sharded(tensor):
        dim = cast(Shard, tensor.placements[-1]).dim
        return LocalShard(tuple(tensor.shape), tensor.dtype, local_of(tensor), tensor.device_mesh, dim=dim)
    if all(type(placement) is Replicate for placement in tensor.placements):
        return LocalShard(tuple(tensor.shape), tensor.dtype, local_of(tensor), replica=True)
    return LocalShard(tuple(tensor.shape), tensor.dtype, tensor, other=True)


def can_cut(placed: DTensor) -> bool:
    """Return whether `own_part` knows what a rank has of it: rows of what tensor parallelism left."""
    mesh, placements = placed.device_mesh, placed.placements
    for axis, placement in enumerate(placements):
        if type(placement) in (Shard, Replicate):
            continue
        each: Any = placement
        factor = getattr(each, "split_factor", None)
        behind = [
            i for i in range(axis + 1, mesh.ndim) if type(placements[i]) is Shard and placements[i].is_shard(each.dim)
        ]
        if factor != math.prod(mesh.size(i) for i in behind):
            return False
    return sum(hasattr(each, "split_factor") for each in placements) <= 1


def own_part(full: Tensor, placed: DTensor) -> Tensor:
    """Return what this rank has of a full tensor that lies as `placed`: a strided shard is cut after all others."""
    mesh, part = placed.device_mesh, full
    cuts: list[tuple[int, Any]] = [
        (axis, each) for axis, each in enumerate(placed.placements) if type(each) is not Replicate
    ]
    for axis, each in sorted(cuts, key=lambda cut: hasattr(cut[1], "split_factor")):
        rows = part.shape[each.dim]
        share = -(-rows // mesh.size(axis))
        first = min(mesh.get_local_rank(axis) * share, rows)
        part = part.narrow(each.dim, first, min(share, rows - first))
    return part


def value_text(tensor: Tensor) -> str:
    """Return the value of a plain tensor as text, of one with several elements its checksum."""
    return str(tensor.item()) if tensor.numel() == 1 else f"CRC-32 {checksum([tensor]):08x}"


def gather_all(
    held: Sequence[LocalShard], *, recipient: int | None, cpu_offload: bool, bucket_mib: float, title: str
) -> list[Tensor] | None:
    """Make every tensor full, on global rank `recipient`, or on all if that is `None`; return new tensors there.

    Every rank calls it with the same tensors. `title` stands before a bar that shows how much has arrived, if any.
    """
    wanted = recipient is None or not dist.is_initialized() or dist.get_rank() == recipient
    results: list[Tensor | None] = [None] * len(held)
    by_mesh: dict[tuple[DeviceMesh, bool], list[int]] = {}
    for i, each in enumerate(held):
        if each.mesh is not None and mesh_axes.num_shards(each.mesh) > 1:
            by_mesh.setdefault((each.mesh, each.is_on_device), []).append(i)
            continue
        if each.other:
            full = _full(cast(DTensor, each.local), cpu_offload)  # all of its ranks must be here
            results[i] = full if wanted else None
        elif wanted:
            results[i] = copied(each.local, to_cpu=cpu_offload)
    shows = bool(title) and wanted and (recipient is not None or not dist.is_initialized() or dist.get_rank() == 0)
    moved = (held[i].nbytes for indices in by_mesh.values() for i in indices)
    with showing(title, moved if shows else ()) as advance:
        for indices in by_mesh.values():
            fulls = _gather_mesh([held[i] for i in indices], recipient, cpu_offload, bucket_mib, advance)
            for i, full in zip(indices, fulls, strict=False):
                results[i] = held[i].whole(full.view(held[i].dtype))
    return cast("list[Tensor]", results) if wanted else None


def _full(tensor: DTensor, to_cpu: bool) -> Tensor:
    # Along axes of one rank torch gives the tensor itself.
    full = full_tensor_of(tensor)
    if full.untyped_storage().data_ptr() == local_of(tensor).untyped_storage().data_ptr():
        return copied(full, to_cpu=to_cpu)
    return full.to("cpu" if to_cpu else full.device)


def copied(tensor: Tensor, *, to_cpu: bool) -> Tensor:
    """Return a tensor of its own with the same values."""
    return tensor.detach().cpu() if to_cpu and tensor.device.type != "cpu" else tensor.detach().clone()


def _gather_mesh(
    held: Sequence[LocalShard], recipient: int | None, cpu_offload: bool, bucket_mib: float, progress: Progress
) -> list[Tensor]:
    """Gather what one mesh holds on one device; nothing on ranks that do not want it, or are not in it."""
    mesh = cast(DeviceMesh, held[0].mesh)
    group = mesh_axes.shard_group(mesh)
    ranks = dist.get_process_group_ranks(group)
    if recipient is not None and recipient not in ranks:
        return []
    wire = Wire(group, device_of(held))
    result_device = torch.device("cpu") if cpu_offload or not held[0].is_on_device else wire.device
    in_place = result_device == wire.device
    items = [each.item(wire.world_size, straight=in_place) for each in held]
    if recipient is None:  # an all_gather has no place for uneven rows
        items = [i._replace(straight=i.straight and i.nbytes == i.share * wire.world_size) for i in items]
    rounds = rounds_of(items, wire.world_size, int(bucket_mib * MIB))
    rows = [each.rows for each in held]
    position = None if recipient is None else ranks.index(recipient)
    return transport.gather(wire, items, rows, rounds, position, result_device, progress)


def device_of(held: Sequence[LocalShard]) -> torch.device:
    """Return where the collectives of their mesh work."""
    device_type = cast(DeviceMesh, held[0].mesh).device_type
    for each in held:
        if each.local.device.type == device_type:
            return each.local.device
    return torch.empty(0, device=device_type).device


def deliver(
    targets: Sequence[LocalShard], fulls: Sequence[Tensor] | None, source: int | None, ranks: Ranks, bucket_mib: float
) -> None:
    """Fill this rank's rows of every target, which are contiguous, and the whole of those that are not cut into rows.

    `fulls` are the full tensors, on the global rank `source`, or on every rank if that is `None`.
    """
    if source is None or ranks.group is None or ranks.size == 1:
        for target, full in zip(targets, fulls or (), strict=True):
            _cut(target, full)
        return
    bucket_bytes, wire = int(bucket_mib * MIB), Wire(ranks.group, ranks.device)
    sender = ranks.members.index(source)
    by_mesh: dict[DeviceMesh | None, list[int]] = {}
    for i, each in enumerate(targets):
        if each.other:  # one by one: each rank has the whole of it for a moment
            full = torch.empty(each.shape, dtype=each.dtype, device=wire.device)
            transport.broadcast(wire, [full], sender, None if fulls is None else [fulls[i]], bucket_bytes)
            _cut(each, full)
        else:
            by_mesh.setdefault(each.mesh, []).append(i)
    for mesh, indices in by_mesh.items():
        chosen = [targets[i] for i in indices]
        given = None if fulls is None else [targets[i].rows_of(fulls[i]) for i in indices]
        if mesh is None:
            transport.broadcast(wire, [each.local for each in chosen], sender, given, bucket_bytes)
            continue
        _deliver_rows(mesh, chosen, given, source, bucket_bytes)


def _deliver_rows(
    mesh: DeviceMesh, targets: Sequence[LocalShard], fulls: Sequence[Tensor] | None, source: int, bucket_bytes: int
) -> None:
    """Give each rank its rows: first those of the source's replica, then from each of them the other replicas."""
    rows, wire = [each.rows for each in targets], Wire(mesh_axes.shard_group(mesh), device_of(targets))
    sharing = dist.get_process_group_ranks(wire.group)
    if source in sharing:
        items = [each.item(wire.world_size, straight=wire.device.type == "cpu") for each in targets]
        rounds = rounds_of(items, wire.world_size, bucket_bytes)
        transport.scatter(wire, items, rows, rounds, sharing.index(source), fulls)
    if (outer := mesh_axes.replicate_group(mesh)) is not None:
        replica = mesh_axes.ranks_of(mesh).index(source) // mesh_axes.num_shards(mesh)
        given = rows if mesh.get_local_rank(0) == replica else None
        transport.broadcast(Wire(outer, wire.device), rows, replica, given, bucket_bytes)


def _cut(target: LocalShard, full: Tensor) -> None:
    if target.other:
        placed = cast(DTensor, target.local)
        local_of(placed).copy_(own_part(full.to(local_of(placed).device), placed))
        return
    start, end = 0, target.nbytes
    if target.mesh is not None and target.nbytes:
        item = target.item(mesh_axes.num_shards(target.mesh), straight=False)
        start, end = item.held_by(mesh_axes.shard_rank(target.mesh))
    as_bytes(target.rows).copy_(part(target.rows_of(full), start, end))


def require_bucket(bucket_mib: object) -> None:
    """Raise `ConfigError` unless it is a size."""
    if not isinstance(bucket_mib, int | float) or not 0 < bucket_mib < math.inf:
        raise ConfigError(f"bucket_mib must be a positive number of MiB, got {bucket_mib!r}.")
