"""Matrices and their state on the way between owners, who have them whole, and the ranks that hold parts of them.

In an optimizer's `state` the tensors of a matrix are cut like any other.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils import _pytree as pytree

from fxshard.errors import ConfigError
from fxshard.runtime.matrix_owners import Matrix, RowSplit, Team, Traveller, aligned, cutting_axes
from fxshard.runtime.parameters import local_of

State = dict[str, Any]
"""What an optimizer keeps of one parameter: tensors, numbers, and lists and dicts of them."""


class PackedPart(NamedTuple):
    """A part of a tensor that goes to another rank, or comes from there."""

    peer: int
    view: Tensor  # that it is copied from or to

    @property
    def nbytes(self) -> int:
        """Bytes in the buffer."""
        return aligned(self.view.numel() * self.view.element_size())


class RowExchange:
    """Parts on their way to owners (`inward`), or back, in one all_to_all; launched when it is made, until `finish`.

    They travel as bytes: tensors of any dtype share a launch.
    """

    def __init__(self, team: Team, travellers: Sequence[Traveller], *, inward: bool) -> None:
        """Pack and launch; all ranks of the team make it alike."""
        self._work = cast(Any, None)
        sent, self._received, moves = list[PackedPart](), list[PackedPart](), False
        for split, owner, local, whole in travellers:
            moves |= split.parts.keys() != {owner}
            ranks = split.sources(owner) if inward else split.parts
            if owner != team.rank and team.rank in ranks:
                (sent if inward else self._received).append(PackedPart(owner, split.in_local(local)))
            for rank in ranks if owner == team.rank else ():
                view = split.in_whole(cast(Tensor, whole), rank)
                if rank != owner:
                    (self._received if inward else sent).append(PackedPart(rank, view))
                elif inward:
                    view.copy_(split.in_local(local))
                else:
                    split.in_local(local).copy_(view)
        if moves:
            device = travellers[0].local.device
            outgoing, sizes = self._buffer(team, sent, device)
            self._incoming, self._sizes = self._buffer(team, self._received, device)
            for part, place in _places(sent, sizes, outgoing):
                place.copy_(part.view)
            self._outgoing = outgoing  # until it has been sent
            self._work = dist.all_to_all_single(
                self._incoming, outgoing, self._sizes, sizes, group=team.group, async_op=True
            )

    @staticmethod
    def _buffer(team: Team, parts: Sequence[PackedPart], device: torch.device) -> tuple[Tensor, list[int]]:
        sizes = [0] * team.group.size()
        for part in parts:
            sizes[part.peer] += part.nbytes
        return torch.empty(sum(sizes), dtype=torch.uint8, device=device), sizes

    def finish(self) -> None:
        """Wait, and copy what has come to where it belongs."""
        if self._work is not None:
            self._work.wait()
            for part, place in _places(self._received, self._sizes, self._incoming):
                part.view.copy_(place)
            self._work = None
            del self._outgoing, self._incoming


def _places(parts: Sequence[PackedPart], sizes: Sequence[int], buffer: Tensor) -> Iterator[tuple[PackedPart, Tensor]]:
    """Yield where each part lies: by rank, and of a rank in the order of the list."""
    starts = [sum(sizes[:rank]) for rank in range(len(sizes))]
    for part in parts:
        view, at = part.view, starts[part.peer]
        yield part, buffer.narrow(0, at, view.numel() * view.element_size()).view(view.dtype).view(view.shape)
        starts[part.peer] += part.nbytes


class AwayState(dict[str, Any]):
    """In an optimizer's `state` while owners hold that of a parameter: empty, and who reads or writes it is told."""

    def refuse(self, *_: object, **__: object) -> Any:
        """Raise."""
        raise ConfigError(
            "whole_matrices: the state of this parameter is with its owner. Call optimizer.shard_state() on all ranks "
            "before you read or write it, and state_dict() of what whole_matrices has returned to save it."
        )

    __missing__ = __setitem__ = clear = update = setdefault = __reduce__ = refuse


@dataclass(frozen=True)
class OwnedTensor:
    """A tensor that an owner has, as other ranks hear of it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _said(value: Any) -> Any:
    """Return what other ranks need to know of a part of a state: of numbers, and of tensors that are one, all."""
    if not isinstance(value, Tensor):
        return value
    return OwnedTensor(tuple(value.shape), value.dtype) if value.dim() else value.detach().cpu()


def shard_states(team: Team, matrices: Sequence[Matrix], held: Mapping[Matrix, State]) -> dict[DTensor, State]:
    """Return the state of all matrices of a team, cut over its ranks; collective.

    What has the shape of its matrix is cut as the parameter is, other tensors along their first dimension. ConfigError
    if a matrix is one of several of its parameter, and has a tensor of another shape.
    """
    said: dict[Any, State] = {}
    everyone: list[Any] = [None] * team.group.size()
    own = {(each.place, each.split.rows): pytree.tree_map(_said, held[each]) for each in matrices if each in held}
    dist.all_gather_object(everyone, own, group=team.group)
    for each in everyone:
        said |= each
    of, states = dict[DTensor, list[Matrix]](), dict[DTensor, State]()
    for matrix in matrices:
        if (matrix.place, matrix.split.rows) in said:
            of.setdefault(matrix.parameter, []).append(matrix)
    for parameter, its in of.items():
        leaves, spec = pytree.tree_flatten(said[its[0].place, its[0].split.rows])
        wholes = [pytree.tree_leaves(held[each]) if each in held else [None] * len(leaves) for each in its]
        values = [
            _cut(leaf, its, [whole[i] for whole in wholes]) if isinstance(leaf, OwnedTensor) else leaf
            for i, leaf in enumerate(leaves)
        ]
        states[parameter] = pytree.tree_unflatten(values, spec)
    return states


def _cut(leaf: OwnedTensor, matrices: Sequence[Matrix], wholes: Sequence[Tensor | None]) -> DTensor:
    """Return the DTensor that holds a tensor of the state of a parameter, which owners have for each matrix."""
    first, parameter = matrices[0], matrices[0].parameter
    mesh, team, rows = parameter.device_mesh, first.team, local_of(parameter)
    placements: Sequence[Placement] = parameter.placements
    if leaf.shape == first.seen_shape:
        shape, local = tuple(parameter.shape), torch.zeros_like(rows, dtype=leaf.dtype)
        travellers = [each.traveller(local, whole) for each, whole in zip(matrices, wholes, strict=True)]
    elif first.shape == tuple(parameter.shape):
        shape = leaf.shape
        cut = cutting_axes(parameter)
        placements = [Shard(0) if axis in cut else Replicate() for axis in range(mesh.ndim)]
        boxes = team.boxes(shape, placements)
        sizes = [last - begin for begin, last in boxes[team.rank]]
        local = torch.zeros(sizes, dtype=leaf.dtype, device=rows.device)
        travellers = [Traveller(RowSplit(team, boxes, (0, shape[0])), first.owner, local, wholes[0])]
    else:
        raise ConfigError(
            f"whole_matrices: the optimizer keeps a tensor {leaf.shape} of a matrix {first.seen_shape}, one of several "
            f"of the parameter {first.name} {tuple(parameter.shape)}. It has no place in the "
            "state of the parameter: leave rows out, or keep only tensors of the shape of a matrix."
        )
    RowExchange(team, travellers, inward=False).finish()
    strides = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides)


def bring(matrix: Matrix, state: State) -> tuple[list[Traveller], State | None]:
    """Return what brings the state of a matrix to its owner, and there the state that it fills."""
    leaves, spec = pytree.tree_flatten(state)
    is_owner, travellers, values = matrix.is_owned, list[Traveller](), list[Any]()
    for leaf in leaves:
        value, is_like = leaf, isinstance(leaf, Tensor) and leaf.shape == matrix.parameter.shape
        first, last = (
            matrix.split.rows if is_like else (0, leaf.shape[0] if isinstance(leaf, Tensor) and leaf.dim() else 0)
        )
        if isinstance(leaf, DTensor) and cutting_axes(leaf):
            local = local_of(leaf)
            value = local.new_empty((last - first, *leaf.shape[1:])) if is_owner else None
            travellers.append(Traveller(matrix.team.split(leaf, (first, last)), matrix.owner, local, value))
        elif is_owner and isinstance(leaf, Tensor):
            whole = local_of(leaf) if isinstance(leaf, DTensor) else leaf
            value = whole[first:last].clone() if is_like else whole.clone()
        values.append(value.view(matrix.seen_shape) if is_like and is_owner else value)
    return travellers, pytree.tree_unflatten(values, spec) if is_owner else None
