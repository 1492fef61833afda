"""Which rank updates which matrix, and which part of a sharded tensor each rank has.

The ranks that hold parts of a tensor are a `Team`: those along the mesh axes that cut it. All of them compute the same
owners from shapes and placements, so nothing is exchanged to agree on them. Where it pays, the ranks of all replicas
are one team: an owner gets parts from its own replica, and sends the new rows to all.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import operator
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fxshard import torch_fsdp2
from fxshard.errors import ConfigError
from fxshard.hardware import BUILTIN, HardwareSpec
from fxshard.runtime.parameters import local_of

Box = tuple[tuple[int, int], ...]
"""The first index and the one after the last, of each dimension."""

Counts = np.ndarray[Any, np.dtype[np.int64]]
"""A number for each rank of a team."""


@dataclass(frozen=True, eq=False)
class Team:
    """The ranks that differ along some axes of a mesh only, and hold the parts of a tensor."""

    mesh: DeviceMesh
    axes: tuple[int, ...]
    _boxes: dict[Any, list[Box]] = field(default_factory=dict, repr=False)
    _splits: dict[Any, RowSplit] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def group(self) -> dist.ProcessGroup:
        """Their process group; collective the first time if there are several axes."""
        return torch_fsdp2.group_along(self.mesh, self.axes)

    @functools.cached_property
    def rank(self) -> int:
        """The place of this rank in the group."""
        return self.coordinates.index(tuple(cast("list[int]", self.mesh.get_coordinate())))

    @functools.cached_property
    def coordinates(self) -> list[tuple[int, ...]]:
        """Where on the mesh each rank is, in the order of the group."""
        own, sizes = cast("list[int]", self.mesh.get_coordinate()), enumerate(self.mesh.shape)
        spans = [range(size) if axis in self.axes else (own[axis],) for axis, size in sizes]
        return sorted(itertools.product(*spans), key=lambda at: int(self.mesh.mesh[at]))

    @functools.cached_property
    def ranks(self) -> list[int]:
        """What the ranks are called outside of the group."""
        return [int(self.mesh.mesh[at]) for at in self.coordinates]

    @property
    def replicas(self) -> Team | None:
        """The team with all replicas of these parts; `None` if there are no others."""
        axes = tuple(axis for axis, size in enumerate(self.mesh.shape) if size > 1)
        return None if axes == self.axes else Team(self.mesh, axes)

    def boxes(self, shape: Sequence[int], placements: Sequence[Placement]) -> list[Box]:
        """Return what each rank has of a tensor of this shape."""
        key = tuple(shape), tuple(placements)
        if key not in self._boxes:
            self._boxes[key] = [box_of(shape, placements, self.mesh.shape, at) for at in self.coordinates]
        return self._boxes[key]

    def split(self, tensor: DTensor, rows: tuple[int, int]) -> RowSplit:
        """Return which part of some rows of a tensor each rank has; those of equal tensors are one object."""
        key = tuple(tensor.shape), tuple(tensor.placements), rows
        if key not in self._splits:
            self._splits[key] = RowSplit(self, self.boxes(tensor.shape, tensor.placements), rows)
        return self._splits[key]


def box_of(
    shape: Sequence[int], placements: Sequence[Placement], sizes: Sequence[int], coordinate: Sequence[int]
) -> Box:
    """Return what the rank at `coordinate` of a mesh of `sizes` has of a tensor, cut as `torch.chunk` cuts.

    Axes that cut one dimension do so in their order, but those of strided placements come last: FSDP2 cuts the rows
    that tensor parallelism has left, although its axis stands before.
    """
    box = [(0, size) for size in shape]
    cuts = [
        (getattr(each, "split_factor", 0), i, each.dim) for i, each in enumerate(placements) if hasattr(each, "dim")
    ]
    for _, axis, dim in sorted(cuts):
        first, last = box[dim]
        rows = -(-(last - first) // sizes[axis])
        begin = min(first + coordinate[axis] * rows, last)
        box[dim] = begin, min(begin + rows, last)
    return tuple(box)


def cutting_axes(tensor: DTensor) -> tuple[int, ...]:
    """Return the axes of its mesh along which ranks hold different parts."""
    found = enumerate(zip(tensor.placements, tensor.device_mesh.shape, strict=True))
    return tuple(axis for axis, (placement, size) in found if hasattr(placement, "dim") and size > 1)


@dataclass(frozen=True, eq=False)
class RowSplit:
    """Which part of some rows of a tensor each rank of a team has."""

    team: Team
    boxes: Sequence[Box]  # what each rank has of the tensor
    rows: tuple[int, int]  # of the tensor, from and to
    _sources: dict[int, Collection[int]] = field(default_factory=dict, repr=False)

    @functools.cached_property
    def parts(self) -> dict[int, Box]:
        """What the ranks have of the rows, by rank, without those that have nothing."""
        found = {}
        for rank, ((first, last), *others) in enumerate(self.boxes):
            box = ((max(first, self.rows[0]), min(last, self.rows[1])), *others)
            if all(begin < end for begin, end in box):
                found[rank] = box
        return found

    def sources(self, owner: int) -> Collection[int]:
        """Return the ranks that send their parts to an owner: of those that have the same one the nearest."""
        if owner not in self._sources:
            found, at = dict[Box, int](), self.team.coordinates
            far = {rank: sum(map(operator.ne, at[rank], at[owner])) for rank in self.parts}
            for rank in sorted(self.parts, key=far.__getitem__):
                found.setdefault(self.parts[rank], rank)
            self._sources[owner] = set(found.values())
        return self._sources[owner]

    def packed_bytes(self, itemsize: int) -> Counts:
        """Return what the part of each rank takes on the link."""
        parts = (self.parts.get(rank, ((0, 0),)) for rank in range(len(self.boxes)))
        return np.array([aligned(math.prod(last - first for first, last in part) * itemsize) for part in parts])

    def in_local(self, local: Tensor) -> Tensor:
        """Return the view of what this rank has of the rows, of what it has of the tensor."""
        origin = [first for first, _ in self.boxes[self.team.rank]]
        return _slice(local, self.parts[self.team.rank], origin)

    def in_whole(self, whole: Tensor, rank: int) -> Tensor:
        """Return the view of what a rank has of the rows, of all of them."""
        return _slice(whole, self.parts[rank], [self.rows[0], *[0] * (whole.dim() - 1)])


def _slice(tensor: Tensor, box: Box, origin: Sequence[int]) -> Tensor:
    """Return the view of a box, of a tensor whose first element has the indices `origin`."""
    for dim, ((first, last), start) in enumerate(zip(box, origin, strict=True)):
        if (first - start, last - first) != (0, tensor.shape[dim]):
            tensor = tensor.narrow(dim, first - start, last - first)
    return tensor


def aligned(nbytes: int) -> int:
    """Return what a part of so many bytes takes in a buffer: a multiple of the size of any element."""
    return -(-nbytes // 16) * 16


class MatrixTraffic(NamedTuple):
    """Bytes on the link in a step, by rank of a team; gradients count in the dtype of their parameters."""

    to_owners: Counts  # that a rank sends: gradients and rows
    at_owners: Counts  # that it gets as an owner
    from_owners: Counts  # updated rows that it sends as an owner
    back: Counts  # that it gets

    @classmethod
    def of(cls, team: Team, matrices: Iterable[Matrix], inside: int = 1) -> MatrixTraffic:
        """Count what matrices of a team move between nodes of so many ranks."""
        found, node = cls(*np.zeros((4, len(team.ranks)), dtype=np.int64)), np.array(team.ranks) // inside
        for matrix in matrices:
            moved = np.where(node == node[matrix.owner], 0, matrix.split.packed_bytes(matrix.parameter.element_size()))
            sources = list(matrix.split.sources(matrix.owner))
            found.to_owners[sources] += 2 * moved[sources]
            found.at_owners[matrix.owner] += 2 * moved[sources].sum()
            found.from_owners[matrix.owner] += moved.sum()
            found.back[:] += moved
        return found


class Traveller(NamedTuple):
    """A tensor that lies on the ranks of a team in parts, and with its owner as a whole."""

    split: RowSplit
    owner: int  # a rank of the team
    local: Tensor  # what this rank has of the tensor
    whole: Tensor | None  # the rows, on their owner


@dataclass(eq=False)
class Matrix:
    """What one owner updates: a parameter, or rows of one that stacks several matrices."""

    parameter: DTensor
    name: str  # of the parameter in its model, or its place
    place: int  # of the parameter among those of the optimizer
    split: RowSplit
    drops_first: bool  # whether the optimizer sees it without the first dimension, which is 1
    owner: int = 0  # a rank of the team

    @property
    def team(self) -> Team:
        """The ranks that hold it."""
        return self.split.team

    @property
    def shape(self) -> tuple[int, ...]:
        """As a part of the parameter: with the first dimension."""
        first, last = self.split.rows
        return (last - first, *self.parameter.shape[1:])

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """As the optimizer sees it."""
        return self.shape[1:] if self.drops_first else self.shape

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * self.parameter.element_size()

    def traveller(self, local: Tensor, whole: Tensor | None) -> Traveller:
        """Describe a tensor like the parameter: what this rank has of it, and its owner of the matrix."""
        return Traveller(self.split, self.owner, local, None if whole is None else whole.detach().reshape(self.shape))

    @property
    def is_owned(self) -> bool:
        """Whether this rank updates it."""
        return self.owner == self.team.rank

    @property
    def stays(self) -> bool:
        """Whether one rank holds all of it, and so owns it."""
        return len(self.split.parts) == 1

    @property
    def cost(self) -> int:
        """What Newton-Schulz takes, up to a factor: two products with the smaller square, and one of it with itself."""
        small, large = sorted((self.seen_shape[0], math.prod(self.seen_shape[1:])))
        return small * small * (2 * large + small)


NEWTON_SCHULZ = 10
"""FLOPs for each unit of `Matrix.cost`: five steps, and two for a multiplication and an addition."""


def matrices_of(parameter: DTensor, name: str, place: int, team: Team, rows: Sequence[int] | None) -> list[Matrix]:
    """Return the matrices that a parameter has; `rows` are those of each along the first dimension, `None` for one."""
    shape, held = tuple(parameter.shape), tuple(local_of(parameter).shape)
    boxes = team.boxes(shape, parameter.placements)
    if (own := tuple(last - first for first, last in boxes[team.rank])) != held:
        raise ConfigError(
            f"whole_matrices: this rank has {held} of the parameter {name} {shape}, where its "
            f"placements {parameter.placements} say {own}. Shard it with fully_shard."
        )
    given = [shape[0]] if rows is None else list(rows)
    if sum(given) != shape[0] or (rows is not None and min(given, default=0) < 1):
        raise ConfigError(
            f"whole_matrices: rows gave {given} for the parameter {name} {shape}. They must "
            "be positive and sum to its first dimension; None leaves it one matrix."
        )
    drops = rows is not None and len(shape) > 2 and set(given) == {1}
    ends = list(itertools.accumulate(given))
    spans = zip([0, *ends[:-1]], ends, strict=True)
    return [Matrix(parameter, name, place, team.split(parameter, span), drops) for span in spans]


def assign_owners(matrices: Iterable[Matrix]) -> list[Matrix]:
    """Give each matrix its owner, so that the ranks of a team have nearly equal costs; return the costliest first.

    A matrix that lies on one rank is updated there. Of the others the costliest goes to the rank with the least to do,
    and so on (longest processing time first).
    """
    ordered = sorted(matrices, key=lambda matrix: (not matrix.stays, -matrix.cost, matrix.place, matrix.split.rows))
    loads: dict[Team, list[int]] = {}
    for matrix in ordered:
        load = loads.setdefault(matrix.team, [0] * len(matrix.split.boxes))
        matrix.owner = next(iter(matrix.split.parts)) if matrix.stays else load.index(min(load))
        load[matrix.owner] += matrix.cost
    return ordered


def share_out(
    team: Team,
    parameters: Sequence[tuple[DTensor, str, int, Sequence[int] | None]],
    over_replicas: bool | None,
    hardware: HardwareSpec | None,
) -> dict[Tensor, list[Matrix]]:
    """Return the matrices of parameters that a team holds; of all replicas, if they are to share or it takes less time.

    `parameters`: each with its name, place and rows, as `matrices_of` takes them. `hardware`: by default that of nodes
    with eight accelerators.
    """

    def shared_by(some: Team) -> dict[Tensor, list[Matrix]]:
        return {each[0]: matrices_of(*each[:3], some, each[3]) for each in parameters}

    narrow, replicas = shared_by(team), team.replicas if over_replicas is not False else None
    if replicas is None:
        return narrow
    wide = shared_by(replicas)
    usual = BUILTIN["cpu" if team.mesh.device_type == "cpu" else "h100-sxm"]
    return wide if over_replicas or _seconds_saved(narrow, wide, hardware or usual) > 0 else narrow


def _seconds_saved(
    narrow: Mapping[Tensor, list[Matrix]], wide: Mapping[Tensor, list[Matrix]], hardware: HardwareSpec
) -> float:
    """What a step takes less where replicas share: Newton-Schulz in bf16, and exchanges."""
    computing, moving = [], []
    for found in (narrow, wide):
        matrices = assign_owners(itertools.chain.from_iterable(found.values()))
        team, loads = matrices[0].team, collections.Counter[int]()
        for matrix in matrices:
            loads[matrix.owner] += matrix.cost
        computing.append(NEWTON_SCHULZ * max(loads.values()) / hardware.peak(torch.bfloat16))
        moving.append(sum(exchange_seconds(team, matrices, hardware)))
    return float(computing[0] + moving[0] - computing[1] - moving[1])


def exchange_seconds(team: Team, matrices: Iterable[Matrix], hardware: HardwareSpec) -> tuple[float, float]:
    """Return what an exchange with owners takes, and the one back: the rank with most to send or to get decides.

    Each rank sends to all others at once, so that what goes between nodes has the network beside the link in the node.
    """
    inside, ranks = hardware.ranks_per_node, len(team.ranks)
    whole = MatrixTraffic.of(team, matrices)
    spans = inside and len({rank // inside for rank in team.ranks}) > 1
    between = MatrixTraffic.of(team, matrices, inside) if spans else None
    found = []
    for direction in (slice(0, 2), slice(2, 4)):
        near = max(counts.max() for counts in whole[direction])
        seconds = near / (hardware.link_bandwidth if inside else hardware.link(ranks).bandwidth) if near else 0.0
        if between and near:
            far = max(counts.max() for counts in between[direction]) / cast(float, hardware.network_bandwidth)
            seconds = hardware.network_latency + max(seconds, far)
        found.append(float(seconds + hardware.link_latency * bool(near)))
    return found[0], found[1]
